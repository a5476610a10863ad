#include "oe_runtime/core/server/cut.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/wire/frame.h"

namespace oe {

using std::chrono::steady_clock;

void Cut::Rename(Running* of_connection, uint64_t client) {
  const auto old = clients_.find(of_connection->client);
  if (old != clients_.end() && --old->second.connections == 0 && old->first != 0) clients_.erase(old);
  of_connection->client = client;
  ++clients_[client].connections;
}

void Cut::Join(uint64_t connection, uint64_t request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Running& running = running_[connection];
  running.client = ClientOf(request);
  ++clients_[running.client].connections;
}

void Cut::Leave(uint64_t connection) noexcept {
  std::vector<Resume> resumed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = running_.find(connection);
    if (found == running_.end()) return;
    EndNow(&found->second, false);
    const auto client = clients_.find(found->second.client);
    if (--client->second.connections == 0 && client->first != 0) clients_.erase(client);
    running_.erase(found);
    if (owner_ == connection) resumed = CloseNow();
  }
  for (const Resume& resume : resumed) resume();
}

bool Cut::TryBegin(uint64_t connection, uint64_t request) {
  Running& running = running_[connection];
  const uint64_t name = ClientOf(request);
  if (running.client != name) Rename(&running, name);  // it has sent 2^32 requests
  Client& client = clients_[name];
  const uint64_t change = name == 0 ? client.done + client.running + 1 : ChangeOf(request);
  if (owner_ != 0 && change > client.allowed) return false;
  ++client.running;
  ++changes_;
  running.change = change;
  return true;
}

bool Cut::Begin(uint64_t connection, uint64_t request, Resume later) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (TryBegin(connection, request)) return true;
  if (!stopped_) waiting_.push_back({connection, request, std::move(later)});
  return false;
}

void Cut::EndNow(Running* running, bool done) {
  if (running->change == 0) return;
  Client& client = clients_[running->client];
  --client.running;
  --changes_;
  if (done) client.done = running->client == 0 ? client.done + 1 : std::max(client.done, running->change);
  running->change = 0;
}

void Cut::End(uint64_t connection, bool done) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = running_.find(connection);
  if (found != running_.end()) EndNow(&found->second, done);
}

void Cut::GoBack() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [name, client] : clients_) client.done = client.allowed = 0;
}

bool Cut::Open(uint64_t connection) {
  Expire();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (owner_ != 0) return false;
  owner_ = connection;
  end_ = steady_clock::now() + kLongest;
  for (auto& [name, client] : clients_) client.allowed = client.done + (name == 0 ? client.running : 0);
  return true;
}

void Cut::Let(uint64_t connection, const std::vector<Allowed>& allowed) {
  std::vector<Resume> resumed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (owner_ != connection || taken_) return;
    for (const auto& [name, change] : allowed) {
      const auto client = clients_.find(name);
      if (client != clients_.end()) client->second.allowed = std::max(client->second.allowed, change);
    }
    resumed = Ready();
  }
  for (const Resume& resume : resumed) resume();
}

std::vector<Cut::Resume> Cut::Ready() {
  std::vector<Resume> ready;
  std::vector<Waiting> waiting;
  for (Waiting& one : waiting_) {
    if (TryBegin(one.connection, one.request)) {
      ready.push_back(std::move(one.resume));
    } else {
      waiting.push_back(std::move(one));
    }
  }
  waiting_ = std::move(waiting);
  return ready;
}

std::vector<Cut::Resume> Cut::CloseNow() {
  owner_ = 0;
  taken_ = false;
  return Ready();
}

void Cut::Close(uint64_t connection) {
  std::vector<Resume> resumed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (owner_ != connection || taken_) return;
    resumed = CloseNow();
  }
  for (const Resume& resume : resumed) resume();
}

void Cut::Expire() {
  std::vector<Resume> resumed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (owner_ == 0 || taken_ || steady_clock::now() < end_) return;
    resumed = CloseNow();
  }
  for (const Resume& resume : resumed) resume();
}

std::shared_ptr<void> Cut::Take(uint64_t connection) {
  Expire();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (owner_ != connection) {
    throw CheckpointError("the pushes that this save held for more than " + std::to_string(kLongest.count()) +
                          " s go on: its client, or the network, has stalled; save again");
  }
  taken_ = true;
  return {nullptr, [this, connection](void*) { Finish(connection); }};
}

void Cut::Finish(uint64_t connection) {
  std::vector<Resume> resumed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (owner_ == connection) resumed = CloseNow();
  }
  for (const Resume& resume : resumed) resume();
}

nlohmann::json Cut::State(uint64_t connection) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  nlohmann::json clients = nlohmann::json::array();
  for (const auto& [name, client] : clients_) clients.push_back({name, client.done});
  return {{"open", owner_ == connection}, {"running", changes_}, {"clients", std::move(clients)}};
}

void Cut::Stop() {
  std::vector<Waiting> waiting;  // holds connections, which Leave() when they go
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    waiting.swap(waiting_);
  }
}

}  // namespace oe
