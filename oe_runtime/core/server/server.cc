#include "oe_runtime/core/server/server.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <asio/executor_work_guard.hpp>
#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/post.hpp>
#include <asio/steady_timer.hpp>
#include <asio/strand.hpp>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "oe_runtime/core/common/file.h"
#include "oe_runtime/core/server/connection.h"
#include "oe_runtime/core/server/scrubber.h"
#include "oe_runtime/core/wire/errors.h"
#include "oe_runtime/core/wire/tls.h"

namespace oe {

using asio::ip::tcp;

class Server::Impl {
 public:
  explicit Impl(const ServerOptions& options)
      : pool_(options.threads),
        // Of one job, as many at once as threads work, and one; of all, one more. Threads for another one, so
        // that there is always one to accept, to refuse and to read.
        context_(Fitting(options.limits, pool_.threads()), pool_.threads() + 2),
        acceptor_(io_),
        pause_(io_),
        stop_event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!stop_event_.ok()) throw Error(std::string("cannot make an event: ") + std::strerror(errno));
    if (options.shard.servers == 0 || options.shard.server >= options.shard.servers) {
      throw SpecError("server index " + std::to_string(options.shard.server) + " of " +
                      std::to_string(options.shard.servers) + " does not exist; it counts from 0");
    }
    if (!options.storage.row_precision.empty()) {
      throw SpecError("storage: 'row_precision' is for tables of one process, and servers' rows are of the " +
                      std::string("dtype of their tables"));
    }
    // The address first: a port that is taken must not cost the cleaning of a directory.
    Bind(options);
    storage_ = Storage::Open(options.storage);
    jobs_ = std::make_unique<Jobs>(storage_, options.shard, &pool_, options.limits.bytes,
                                   [this](std::function<void()> task) { tasks_.Run(std::move(task)); });
    if (!options.checkpoint_dir.empty()) scratch_ = std::make_unique<Scratch>(options.checkpoint_dir);
    context_.jobs = jobs_.get();
    context_.scratch = scratch_.get();
    context_.threads = &tasks_;
    context_.tls = tls_.get();
    context_.token = options.token;
    context_.hello = nlohmann::json{{"index", options.shard.server},         {"count", options.shard.servers},
                                    {"storage", options.storage.type},       {"is_pmem", storage_->is_pmem()},
                                    {"checkpoint_dir", scratch_ != nullptr}, {"pid", getpid()}};
    if (options.storage.type == "dram_ssd") context_.read_ahead = &read_ahead_;
    context_.hello["reads_ahead"] = context_.read_ahead != nullptr;
    context_.hello["counts_changes"] = true;
    context_.hello["places_rows"] = true;
    context_.hello["cuts"] = true;
    context_.hello["halves"] = true;
    context_.hello["sessions"] = true;
    context_.shares = options.tls != TlsMode::kOn;
    context_.stats = [this] { return Stats().dump(); };
    context_.on_shutdown = [this] {
      const uint64_t one = 1;
      (void)!write(stop_event_.get(), &one, sizeof one);
    };
    Listen(options);
    Accept();
    for (unsigned i = 0; i < pool_.threads() + 3; ++i) {
      threads_.emplace_back([this] { Work(); });
    }
    scrubber_ = std::make_unique<Scrubber>([this](const auto& pace) { jobs_->Scrub(pace); },
                                           options.scrub_bytes_per_second);
  }

  ~Impl() { Stop(); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  uint16_t port() const { return port_; }
  const Storage& storage() const { return *storage_; }
  bool encrypted() const { return tls_ != nullptr; }
  const std::string& note() const { return note_; }
  int stop_fd() const { return stop_event_.get(); }

  nlohmann::json Stats() const {
    nlohmann::json stats = jobs_->Stats();
    stats["traffic"] = {{"requests", context_.requests.load(std::memory_order_relaxed)},
                        {"bytes_in", context_.bytes_in.load(std::memory_order_relaxed)},
                        {"bytes_out", context_.bytes_out.load(std::memory_order_relaxed)}};
    nlohmann::json refused;
    for (size_t i = 0; i < Refusals::kNames.size(); ++i) {
      refused[Refusals::kNames.at(i)] = context_.refusals.count(i);
    }
    stats["connections"] = {{"open", context_.open.load()},
                            {"limit", context_.limits.connections},
                            {"before_hello", context_.arrivals.load()},
                            {"accepted", context_.accepted.load()},
                            {"encrypted", encrypted()},
                            {"sharing_memory", context_.sharing.load()},
                            {"away", context_.sessions.away()},
                            {"resumed", context_.sessions.resumed()},
                            {"shared_bytes", context_.shared_bytes.used()},
                            {"refused", std::move(refused)}};
    stats["queue"] = {
        {"requests", context_.queued.load(std::memory_order_relaxed)},
        {"bytes", context_.request_bytes.used() + context_.reply_bytes.used()},
        {"waiting_for_memory", context_.request_bytes.waiting() + context_.reply_bytes.waiting()}};
    stats["times"] = {{"pull", TimesOf(context_.pull_time)},
                      {"push", TimesOf(context_.push_time)},
                      {"queue_wait", TimesOf(context_.queue_wait)}};
    stats["saved"] = std::max(stats["saved"].get<int64_t>(), context_.saved.load());
    return stats;
  }

  void Stop() {
    const std::lock_guard<std::mutex> lock(stop_mutex_);
    read_ahead_.Stop();  // a restore may wait for it
    // What takes long ends first, and is answered; it may wait for others' requests.
    context_.slow_slots.Close();
    tasks_.Stop();
    if (!threads_.empty()) {
      std::promise<void> answered;
      asio::post(io_, [&answered] { answered.set_value(); });
      answered.get_future().wait();
    }
    io_.stop();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    if (scrubber_) scrubber_->Stop();
    jobs_->Stop();
    context_.sessions.Stop();
    // Connections that wait in line hold on to themselves.
    context_.request_bytes.Clear();
    context_.reply_bytes.Clear();
    context_.slots.Close();
  }

 private:
  ServerLimits Fitting(ServerLimits limits, unsigned threads) {
    note_ = FitOpenFiles(&limits, threads);
    return limits;
  }

  // An exception that leaves a handler (memory ran out) ends that connection, not the server.
  void Work() {
    for (;;) {
      try {
        io_.run();
        return;
      } catch (const std::exception& problem) {
        std::fprintf(stderr, "server: a connection was closed: %s\n", problem.what());
      }
    }
  }

  static std::string Place(const ServerOptions& options) {
    return options.host + ":" + std::to_string(options.port);
  }

  void Bind(const ServerOptions& options) {
    asio::error_code error;
    tcp::resolver resolver(io_);
    const auto found =
        resolver.resolve(options.host, std::to_string(options.port), tcp::resolver::passive, error);
    if (error || found.empty())
      throw SpecError("host '" + options.host + "' is not an address of this machine");
    const tcp::endpoint address = found.begin()->endpoint();
    if (options.token.empty() && !address.address().is_loopback()) {
      throw SpecError("host " + options.host + " is reachable from other machines: a token is needed");
    }
    if (Encrypts(options.tls, address.address())) {
      if (options.token.empty()) throw SpecError("encrypted connections (--tls on) need a token");
      tls_ = std::make_unique<TlsContext>(TlsContext::Role::kServer, options.token);
    }
    acceptor_.open(address.protocol(), error);
    if (!error) acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor_.bind(address, error);
    if (error == asio::error::address_in_use) RefusePort(options);
    if (error) throw Error("cannot listen on " + Place(options) + ": " + error.message());
  }

  void Listen(const ServerOptions& options) {
    asio::error_code error;
    acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (error == asio::error::address_in_use) RefusePort(options);
    if (error) throw Error("cannot listen on " + Place(options) + ": " + error.message());
    port_ = acceptor_.local_endpoint().port();
  }

  [[noreturn]] static void RefusePort(const ServerOptions& options) {
    throw Error("cannot listen on " + Place(options) +
                ": another program has this port; stop it or choose another port (0 takes any free one)");
  }

  void Accept() {
    acceptor_.async_accept(asio::make_strand(io_), [this](const asio::error_code& error, tcp::socket socket) {
      if (error == asio::error::operation_aborted) return;
      if (error) {
        // Out of descriptors, most likely: the ones in use may come back.
        TellFailedAccept(error);
        pause_.expires_after(std::chrono::milliseconds(100));
        pause_.async_wait([this](const asio::error_code& cancelled) {
          if (!cancelled) Accept();
        });
        return;
      }
      try {
        TakeIn(std::move(socket));
      } catch (const std::bad_alloc&) {
        context_.refusals.Count(Refusal::kMemory, "a connection");
      }
      Accept();
    });
  }

  void TellFailedAccept(const asio::error_code& error) {
    const auto now = std::chrono::steady_clock::now();
    if (told_ && now - *told_ < std::chrono::seconds(10)) return;
    told_ = now;
    std::fprintf(stderr, "server: cannot accept connections: %s; trying again\n", error.message().c_str());
  }

  void TakeIn(tcp::socket socket) {
    asio::error_code error;
    const auto address = socket.remote_endpoint(error).address();
    if (error) return;  // it has gone already
    MakeRoom();
    const auto connection = std::make_shared<Connection>(std::move(socket), &context_);
    arrivals_.push_back({connection, address});
    connection->Start();
  }

  // Closes a connection that has not said hello if there are as many as may be: a peer that means it says
  // hello at once, so the oldest, and of the address that has the most of them, so that one host does not
  // push out the others.
  void MakeRoom() {
    const auto gone = [](const Arrival& arrival) {
      const auto connection = arrival.connection.lock();
      return connection == nullptr || connection->greeted();
    };
    arrivals_.erase(std::remove_if(arrivals_.begin(), arrivals_.end(), gone), arrivals_.end());
    if (arrivals_.size() < context_.limits.arrivals) return;
    std::map<asio::ip::address, size_t> counts;
    size_t most = 0;
    for (const Arrival& arrival : arrivals_) most = std::max(most, ++counts[arrival.address]);
    const auto oldest = std::find_if(arrivals_.begin(), arrivals_.end(),
                                     [&](const Arrival& arrival) { return counts[arrival.address] == most; });
    if (const auto connection = oldest->connection.lock()) connection->PushOut();
    arrivals_.erase(oldest);
  }

  // A connection that has not said hello when it was last looked at.
  struct Arrival {
    std::weak_ptr<Connection> connection;
    asio::ip::address address;
  };

  ThreadPool pool_;
  TaskThreads tasks_;
  std::unique_ptr<TlsContext> tls_;
  std::shared_ptr<Storage> storage_;
  std::unique_ptr<Jobs> jobs_;
  std::unique_ptr<Scrubber> scrubber_;
  ReadAhead read_ahead_;
  std::unique_ptr<Scratch> scratch_;
  std::string note_;
  ConnectionContext context_;  // outlives the connections, which io_ owns
  asio::io_context io_;
  tcp::acceptor acceptor_;
  asio::steady_timer pause_;
  std::vector<Arrival> arrivals_;                              // the oldest first
  std::optional<std::chrono::steady_clock::time_point> told_;  // that none could be accepted
  const File stop_event_;
  uint16_t port_ = 0;
  std::mutex stop_mutex_;
  std::vector<std::thread> threads_;
};

Server::Server(const ServerOptions& options) : impl_(std::make_unique<Impl>(options)) {}
Server::~Server() = default;
uint16_t Server::port() const { return impl_->port(); }
const Storage& Server::storage() const { return impl_->storage(); }
bool Server::encrypted() const { return impl_->encrypted(); }
const std::string& Server::note() const { return impl_->note(); }
int Server::stop_fd() const { return impl_->stop_fd(); }
nlohmann::json Server::Stats() const { return impl_->Stats(); }
void Server::Stop() { impl_->Stop(); }

}  // namespace oe
