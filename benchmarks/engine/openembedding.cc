// OpenEmbedding's own core through its C API: a parameter server in a process of its own and a worker, over
// loopback.
//   openembedding DIM ROWS OPTIMIZER SHARDS
// Answers each line "FILE BATCH" (ids as uint64, so many a batch) with the seconds of each batch's pull and
// push.
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "c_api.h"

namespace {

using Clock = std::chrono::steady_clock;

double Since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void Check(bool ok) {
  if (ok) return;
  std::fprintf(stderr, "openembedding: %s\n", exb_last_error());
  std::exit(1);
}

struct Worker {
  exb_storage* storage;
  exb_variable* variable;
  size_t dim;
  int64_t batch = 0;
  std::vector<float> weights;

  double Pull(const uint64_t* ids, size_t n) {
    weights.resize(n * dim);
    const auto start = Clock::now();
    Check(exb_pull_wait(exb_pull_weights(variable, ids, n, batch), ids, n, weights.data()));
    return Since(start);
  }
  double Push(const uint64_t* ids, size_t n, const float* gradients) {
    const auto start = Clock::now();
    Check(exb_wait(exb_push_gradients(variable, ids, n, gradients)));
    Check(exb_wait(exb_update_weights(storage)));
    ++batch;
    return Since(start);
  }
};

// Sends the endpoint of the master; a process without threads must be what is forked.
int StartServer() {
  int pipe_ends[2];
  Check(::pipe(pipe_ends) == 0);
  const pid_t child = ::fork();
  if (child != 0) {
    ::close(pipe_ends[0]);
    return pipe_ends[1];
  }
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::close(pipe_ends[1]);
  exb_string endpoint{};
  if (::read(pipe_ends[0], &endpoint, sizeof endpoint) != static_cast<ssize_t>(sizeof endpoint)) ::_exit(1);
  exb_connection* connection = exb_connect("", endpoint.data, "127.0.0.1");
  if (connection == nullptr) ::_exit(1);
  exb_server_join(exb_server_start(connection));
  ::_exit(0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const size_t dim = std::strtoull(argv[1], nullptr, 10);
  const uint64_t rows = std::strtoull(argv[2], nullptr, 10);
  const int to_server = StartServer();
  exb_master* master = exb_master_start("127.0.0.1");
  exb_string endpoint{};
  exb_master_endpoint(master, &endpoint);
  Check(::write(to_server, &endpoint, sizeof endpoint) == static_cast<ssize_t>(sizeof endpoint));
  exb_connection* connection = exb_connect("", endpoint.data, "127.0.0.1");
  exb_context* context = exb_context_initialize(connection, 1, 1);
  while (exb_running_server_count(connection) < 1) ::usleep(10000);
  exb_storage* storage = exb_create_storage(context, std::atoi(argv[4]));
  exb_variable* variable = exb_create_variable(storage, ~uint64_t{0}, dim);
  exb_initializer* initializer = exb_create_initializer("uniform");
  exb_set_initializer_property(initializer, "minval", "-0.05");
  exb_set_initializer_property(initializer, "maxval", "0.05");
  exb_set_initializer(variable, initializer);
  exb_optimizer* optimizer = exb_create_optimizer(argv[3]);
  exb_set_optimizer_property(optimizer, "learning_rate", "0.01");
  exb_set_optimizer(variable, optimizer);

  Worker worker{storage, variable, dim, 0, {}};
  std::vector<float> gradients;
  std::vector<uint64_t> ids;
  for (uint64_t key = 0; key < rows;) {
    ids.clear();
    for (; ids.size() < 200000 && key < rows; ++key) ids.push_back(key);
    gradients.assign(ids.size() * dim, 0.01F);
    worker.Pull(ids.data(), ids.size());
    worker.Push(ids.data(), ids.size(), gradients.data());
  }
  std::puts("ready");
  (void)std::fflush(stdout);

  std::string file;
  size_t size = 0;
  while (std::cin >> file >> size) {
    std::ifstream input(file, std::ios::binary | std::ios::ate);
    ids.resize(static_cast<size_t>(input.tellg()) / sizeof(uint64_t));
    input.seekg(0);
    input.read(reinterpret_cast<char*>(ids.data()),
               static_cast<std::streamsize>(ids.size() * sizeof(uint64_t)));
    gradients.assign(size * dim, 0.01F);
    for (size_t at = 0; at + size <= ids.size(); at += size) {
      const double pull = worker.Pull(&ids[at], size);
      const double push = worker.Push(&ids[at], size, gradients.data());
      std::printf("%.9f %.9f ", pull, push);
    }
    std::puts("");
    (void)std::fflush(stdout);
  }
  ::_exit(0);
}
