// Runs seeds, each in a process of its own. See docs/design/simulation.md.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/simulation/run.h"
#include "tests/simulation/swarm.h"

namespace {

constexpr const char* kUsage =
    "usage: simulate SEED [--build BUILD] [--only FAULTS]\n"
    "                                           run it, and print its schedule; of its faults, only those\n"
    "                                           with these numbers: 3,7\n"
    "       simulate --seconds N [--first SEED] run new seeds for so long; every tenth twice\n"
    "       simulate --seeds FILE               run those of a file, each twice\n"
    "The first two take --kinds NAMES, as in 'let a disk lie,cut the power of servers': the only kinds of\n"
    "faults, in place of those that the seed draws. Names are:\n";
constexpr const char* kAllFaults = "all";
constexpr unsigned kProcessorSeconds = 120;  // of one run

std::string Usage() {
  std::string text = kUsage;
  for (const std::string& name : sim::FaultNames()) text += "  " + name + "\n";
  return text;
}

[[noreturn]] void Die(const std::string& problem) {
  std::fprintf(stderr, "simulate: %s\n", problem.c_str());
  std::exit(2);
}

std::string TextOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

// What seeds mean depends on every byte of the program.
std::string Build() {
  const std::string program = TextOf("/proc/self/exe");
  std::array<char, 9> text{};
  std::snprintf(text.data(), text.size(), "%08" PRIx32,
                static_cast<uint32_t>(XXH3_64bits(program.data(), program.size())));
  return text.data();
}

// io_uring reads and writes where the simulation does not see it; without it the core takes preads.
void ForbidUring() {
  std::array<sock_filter, 4> filter = {{
      {BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(seccomp_data, nr)},
      {BPF_JMP | BPF_JEQ | BPF_K, 0, 1, SYS_io_uring_setup},
      {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | ENOSYS},
      {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW},
  }};
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    Die(std::string("cannot forbid io_uring by a seccomp filter: ") + std::strerror(errno));
  }
}

// The run itself, in the process that RunChild() has made.
[[noreturn]] void BeChild(uint64_t seed, bool show, const std::string& only, const std::string& kinds) {
  ForbidUring();
  const rlimit limit{kProcessorSeconds, kProcessorSeconds};
  (void)setrlimit(RLIMIT_CPU, &limit);
  // Its threads run one at a time, and wake each other in half of the time where they share a processor.
  cpu_set_t processor;
  CPU_ZERO(&processor);
  CPU_SET(static_cast<size_t>(std::max(sched_getcpu(), 0)), &processor);
  (void)sched_setaffinity(0, sizeof processor, &processor);
  std::filesystem::create_directory("servers");
  const std::vector<sim::Fault> of_kinds = sim::FaultsNamed(kinds).value_or(std::vector<sim::Fault>{});
  if (only == kAllFaults) sim::RunSeed(seed, show, std::nullopt, of_kinds);
  std::set<unsigned> faults;
  std::stringstream list(only);
  for (std::string one; std::getline(list, one, ',');)
    faults.insert(static_cast<unsigned>(std::strtoul(one.c_str(), nullptr, 10)));
  sim::RunSeed(seed, show, faults, of_kinds);
}

enum class Notes { kNone, kKept, kShown };

struct Result {
  bool passed = false;
  std::string line;
  std::string messages;  // on standard error, unless they are shown at once
};

class Directory {
 public:
  // Errors name it and cross the wire: the same for each run of a seed, but for two at once.
  explicit Directory(const std::string& seed) {
    const char* const given = std::getenv("TMPDIR");
    const std::string parent = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : given == nullptr ? "/tmp" : given;
    path_ = parent + "/oeprov-simulate-" + seed;
    if (mkdir(path_.c_str(), 0700) == 0) return;
    path_ += "-XXXXXX";
    if (mkdtemp(path_.data()) == nullptr)
      Die("cannot make a directory " + path_ + ": " + std::strerror(errno));
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Addresses, environment and heap are the same in each, because pointers may order what a program does.
Result RunChild(uint64_t seed, Notes notes, const std::string& kinds, const std::string& only = kAllFaults) {
  const std::string number = std::to_string(seed);
  const std::string padded = std::string(20 - number.size(), '0') + number;
  const Directory directory(padded);
  std::array<int, 2> pipe{};
  if (pipe2(pipe.data(), O_CLOEXEC) != 0) Die(std::string("no pipe: ") + std::strerror(errno));
  const pid_t child = fork();
  if (child == 0) {
    if (personality(ADDR_NO_RANDOMIZE) == -1)
      Die("this system does not let a program fix its addresses (personality)");
    if (chdir(directory.path().c_str()) != 0) Die("cannot enter " + directory.path());
    (void)dup2(pipe[1], STDOUT_FILENO);
    const int messages = open("stderr", O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (messages < 0) Die("cannot write in " + directory.path());
    if (notes != Notes::kShown) (void)dup2(messages, STDERR_FILENO);
    const char* const arguments[] = {
        "simulate",   "--child",     padded.c_str(), notes == Notes::kNone ? "0" : "1",
        only.c_str(), kinds.c_str(), nullptr};
    const char* const environment[] = {"GLIBC_TUNABLES=glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0",
                                       nullptr};
    execve("/proc/self/exe", const_cast<char**>(arguments), const_cast<char**>(environment));
    Die("cannot start itself anew");
  }
  close(pipe[1]);
  Result result;
  std::array<char, 4096> part{};
  for (ssize_t size = 0; (size = read(pipe[0], part.data(), part.size())) > 0;)
    result.line.append(part.data(), static_cast<size_t>(size));
  close(pipe[0]);
  int status = 0;
  (void)waitpid(child, &status, 0);
  result.passed = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  result.messages = TextOf(directory.path() + "/stderr");
  while (!result.line.empty() && result.line.back() == '\n') result.line.pop_back();
  if (WIFSIGNALED(status)) result.line += std::string("failed: signal ") + strsignal(WTERMSIG(status));
  if (result.line.empty()) result.line = "failed: exit code " + std::to_string(WEXITSTATUS(status));
  return result;
}

std::string TraceOf(const Result& result) {
  const size_t at = result.line.find("trace ");
  return at == std::string::npos ? result.line : result.line.substr(at, 22);
}

// What failed, without the numbers of keys, steps and servers.
std::string ProblemOf(const Result& result) {
  std::string text = result.line.substr(std::min(result.line.size(), result.line.find(": ")));
  text.erase(std::remove_if(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; }),
             text.end());
  return text.substr(0, 40);
}

// Leaves faults out as long as the seed fails in the same way (Zeller and Hildebrandt, Simplifying and
// Isolating Failure-Inducing Input, TSE 2002).
class Shrinker {
 public:
  Shrinker(uint64_t seed, std::string kinds, std::string problem)
      : seed_(seed), kinds_(std::move(kinds)), problem_(std::move(problem)) {}

  // The numbers of the faults that are left, as --only has them.
  std::string Shrink() {
    if (!Fails(kAllFaults)) return kAllFaults;
    size_t parts = 2;
    while (!faults_.empty() && runs_ < kMostRuns) {
      const size_t size = (faults_.size() + parts - 1) / parts;
      bool smaller = false;
      for (size_t at = 0; at < faults_.size() && !smaller && runs_ < kMostRuns; at += size) {
        std::vector<unsigned> rest = faults_;
        rest.erase(rest.begin() + static_cast<long>(at),
                   rest.begin() + static_cast<long>(std::min(at + size, rest.size())));
        smaller = Fails(TextOf(rest));
      }
      if (!smaller && size == 1) break;
      parts = smaller ? std::max<size_t>(parts - 1, 1) : std::min(2 * parts, faults_.size());
    }
    return TextOf(faults_);
  }
  const std::string& schedule() const { return schedule_; }

 private:
  static constexpr int kMostRuns = 100;

  static std::string TextOf(const std::vector<unsigned>& faults) {
    std::string text;
    for (const unsigned one : faults) text += (text.empty() ? "" : ",") + std::to_string(one);
    return text;
  }
  // If it fails, keeps the faults that happened before it did.
  bool Fails(const std::string& only) {
    ++runs_;
    const Result result = RunChild(seed_, Notes::kKept, kinds_, only);
    if (result.passed || ProblemOf(result) != problem_) return false;
    faults_.clear();
    schedule_ = result.messages;
    std::stringstream lines(schedule_);
    for (std::string line; std::getline(lines, line);) {
      double time = 0;
      unsigned number = 0;
      char colon = 0;
      // NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion): this program has written it
      if (std::sscanf(line.c_str(), "%lf %u%c", &time, &number, &colon) == 3 && colon == ':')
        faults_.push_back(number);
    }
    return true;
  }

  const uint64_t seed_;
  const std::string kinds_;
  const std::string problem_;
  std::vector<unsigned> faults_;
  std::string schedule_;
  int runs_ = 0;
};

class Campaign {
 public:
  explicit Campaign(std::string kinds = "") : kinds_(std::move(kinds)) {}

  // Runs a seed, if wanted twice.
  void Run(uint64_t seed, bool twice) {
    const Result result = RunChild(seed, Notes::kNone, kinds_);
    ++runs_;
    double simulated = 0;
    double processor = 0;
    unsigned long steps = 0;
    unsigned long losses = 0;
    // NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion): as above
    (void)std::sscanf(result.line.c_str(),
                      "passed trace %*x steps %lu losses %lu checkpoints %*u simulated %lf processor %lf",
                      &steps, &losses, &simulated, &processor);
    simulated_ += simulated;
    processor_ += processor;
    steps_ += steps;
    losses_ += losses;
    const std::string command = "  " + std::filesystem::read_symlink("/proc/self/exe").string() + " " +
                                std::to_string(seed) + " --build " + build_ +
                                (kinds_.empty() ? "" : " --kinds \"" + kinds_ + "\"");
    if (!result.passed) {
      ++failures_;
      Shrinker shrinker(seed, kinds_, ProblemOf(result));
      const std::string only = shrinker.Shrink();
      std::printf("%sseed %" PRIu64 " %s\n%s --only %s\n",
                  (shrinker.schedule().empty() ? result.messages : shrinker.schedule()).c_str(), seed,
                  result.line.c_str(), command.c_str(), only.empty() ? "0" : only.c_str());
    } else if (twice) {
      const Result again = RunChild(seed, Notes::kNone, kinds_);
      ++repeats_;
      if (TraceOf(again) != TraceOf(result)) {
        ++failures_;
        std::printf("seed %" PRIu64 " does not repeat: %s, then %s\n%s\n", seed, TraceOf(result).c_str(),
                    TraceOf(again).c_str(), command.c_str());
      }
    }
    std::fflush(stdout);
  }

  int Report() const {
    std::printf(
        "%u seeds, %u of them twice with equal traces, %u failures; %.0f simulated minutes with %lu steps "
        "and %lu losses "
        "of servers in %.1f processor seconds, %.0f steps per processor second\n",
        runs_, repeats_, failures_, simulated_ / 60, steps_, losses_, processor_,
        processor_ > 0 ? static_cast<double>(steps_) / processor_ : 0.0);
    return failures_ == 0 ? 0 : 1;
  }

 private:
  const std::string build_ = Build();
  const std::string kinds_;
  unsigned runs_ = 0;
  unsigned repeats_ = 0;
  unsigned failures_ = 0;
  double simulated_ = 0;
  double processor_ = 0;
  unsigned long steps_ = 0;
  unsigned long losses_ = 0;
};

uint64_t NumberOf(const std::string& text) {
  if (text.empty() || text.size() > 19 || text.find_first_not_of("0123456789") != std::string::npos) {
    Die("'" + text + "' is not a number from 0 to 9999999999999999999\n" + Usage());
  }
  return std::strtoull(text.c_str(), nullptr, 10);
}

// The system's: std::random_device is the simulation's own, and begins with the same number each time.
uint64_t NewSeed() {
  uint64_t seed = 0;
  if (getrandom(&seed, sizeof seed, 0) != sizeof seed) Die("the system has no random numbers");
  return seed % 1000000000;
}

// What follows the first argument, in pairs: names of `known` and their values.
std::map<std::string, std::string> OptionsOf(const std::vector<std::string>& arguments, size_t from,
                                             const std::set<std::string>& known) {
  std::map<std::string, std::string> options;
  for (size_t i = from; i < arguments.size(); i += 2) {
    if (known.count(arguments[i]) == 0) Die(arguments[i] + " is unknown\n" + Usage());
    if (i + 1 == arguments.size()) Die(arguments[i] + " has no value\n" + Usage());
    options[arguments[i]] = arguments[i + 1];
  }
  const std::string& kinds = options["--kinds"];
  if (!sim::FaultsNamed(kinds)) Die("'" + kinds + "' has a name that is no fault's\n" + Usage());
  return options;
}

int RunFor(const std::vector<std::string>& arguments) {
  if (arguments.size() < 2) Die("--seconds has no value\n" + Usage());
  const uint64_t seconds = NumberOf(arguments[1]);
  auto options = OptionsOf(arguments, 2, {"--first", "--kinds"});
  const uint64_t first = options.count("--first") > 0 ? NumberOf(options["--first"]) : NewSeed();
  std::printf("seeds from %" PRIu64 "\n", first);
  std::fflush(stdout);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  Campaign campaign(options["--kinds"]);
  for (uint64_t seed = first; std::chrono::steady_clock::now() < end; ++seed)
    campaign.Run(seed, seed % 10 == 0);
  return campaign.Report();
}

int RunFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) Die("cannot read " + path);
  Campaign campaign;
  for (std::string line; std::getline(file, line);) {
    const std::string seed = line.substr(0, line.find_first_of(" #"));
    if (!seed.empty()) campaign.Run(NumberOf(seed), true);
  }
  return campaign.Report();
}

int RunOne(const std::vector<std::string>& arguments) {
  const uint64_t seed = NumberOf(arguments[0]);
  auto options = OptionsOf(arguments, 1, {"--build", "--only", "--kinds"});
  const std::string only = options.count("--only") > 0 ? options["--only"] : kAllFaults;
  if (only != kAllFaults && only.find_first_not_of("0123456789,") != std::string::npos)
    Die("--only " + only + " has no numbers of faults\n" + Usage());
  if (options.count("--build") > 0 && options["--build"] != Build())
    std::fprintf(stderr,
                 "simulate: the seed is of build %s, this program is build %s: it may do something else\n",
                 options["--build"].c_str(), Build().c_str());
  const Result result = RunChild(seed, Notes::kShown, options["--kinds"], only);
  std::printf("%s\n", result.line.c_str());
  return result.passed ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() == 5 && arguments[0] == "--child") {
    BeChild(std::strtoull(arguments[1].c_str(), nullptr, 10), arguments[2] == "1", arguments[3],
            arguments[4]);
  }
  if (arguments.empty() || arguments[0] == "--help") {
    std::fputs(Usage().c_str(), stderr);
    return arguments.empty() ? 2 : 0;
  }
  if (arguments[0] == "--seconds") return RunFor(arguments);
  if (arguments[0] == "--seeds" && arguments.size() == 2) return RunFile(arguments[1]);
  if (arguments[0][0] == '-') Die(std::string("unknown arguments\n") + Usage());
  return RunOne(arguments);
}
