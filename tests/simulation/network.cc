#include "tests/simulation/network.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/simulation/disk.h"
#include "tests/simulation/processes.h"
#include "tests/simulation/real.h"
#include "tests/simulation/scheduler.h"

namespace sim {
namespace {

constexpr int kFirstDescriptor = 500000;  // the kernel's are below
constexpr uint64_t kResend = kSecond;     // of what is not acknowledged

struct Descriptor {
  virtual ~Descriptor() = default;
  virtual uint32_t Events() { return 0; }
  int process = 0;
  uint64_t changes = 1;  // of which an edge-triggered epoll reports each once
};

struct EventCount : Descriptor {
  uint32_t Events() override { return count > 0 ? uint32_t{EPOLLIN} : 0; }
  uint64_t count = 0;
};

struct Segment {
  std::string bytes;
  bool ends = false;
  uint64_t sent = 0;
};

// One end of a connection.
struct Socket : Descriptor {
  uint32_t Events() override;
  size_t unread() const { return input.size() - input_at; }
  bool has_room() const;

  uint16_t port = 0;
  uint16_t peer_port = 0;
  bool listening = false;
  bool connected = false;
  bool wrote_end = false;
  bool ended = false;  // the peer has ended its direction
  bool reset = false;
  bool closed = false;  // nobody here knows of it any more
  bool silent = false;  // nor does its host answer
  int error = 0;
  std::deque<std::shared_ptr<Socket>> pending;  // connections to accept
  std::shared_ptr<Socket> peer;
  std::string input;
  size_t input_at = 0;
  std::deque<Segment> wire;  // sent, not delivered
  size_t in_flight = 0;
  uint64_t next_arrival = 0;
  uint64_t heard = 0;             // when the peer's host last answered
  uint64_t cut_after = kForever;  // bytes
  uint64_t user_timeout = 0;      // nanoseconds; 0: none
  uint64_t keepalive = 0;
};

struct Poller : Descriptor {
  struct Watch {
    epoll_event event{};
    std::shared_ptr<Descriptor> descriptor;
    uint64_t reported = 0;  // changes
  };
  std::map<int, Watch> watches;
};

struct Network {
  NetworkPolicy policy;
  Random random{Seed() ^ 0x6e6574};
  std::map<int, std::shared_ptr<Descriptor>> descriptors;
  std::vector<std::weak_ptr<Socket>> sockets;  // all that were connected
  std::map<uint16_t, std::weak_ptr<Socket>> listeners;
  std::map<std::pair<int, int>, uint64_t> parted;  // until when
  int next_descriptor = kFirstDescriptor;
  uint16_t next_port = 20000;
};

Network& Net() {
  static Network* network = nullptr;
  if (network == nullptr) network = new Network;
  return *network;
}

template <typename Kind>
std::shared_ptr<Kind> Find(int descriptor) {
  const auto found = Net().descriptors.find(descriptor);
  return found == Net().descriptors.end() ? nullptr : std::dynamic_pointer_cast<Kind>(found->second);
}

int Add(std::shared_ptr<Descriptor> made) {
  made->process = Current()->process;
  Net().descriptors[Net().next_descriptor] = std::move(made);
  return Net().next_descriptor++;
}

int Fail(int error) {
  errno = error;
  return -1;
}

bool Socket::has_room() const {
  return in_flight + (peer == nullptr ? 0 : peer->unread()) < Net().policy.window;
}

uint32_t Socket::Events() {
  if (listening) return pending.empty() ? 0 : uint32_t{EPOLLIN};
  uint32_t events = 0;
  if (unread() > 0 || ended || reset) events |= EPOLLIN;
  if ((connected && has_room()) || reset || error != 0) events |= EPOLLOUT;
  if (ended) events |= EPOLLRDHUP;
  if (reset || error != 0) events |= EPOLLERR | EPOLLHUP;
  return events;
}

void Reset(Socket* socket, int error = ECONNRESET) {
  if (socket->reset) return;
  socket->reset = true;
  socket->error = error;
  socket->wire.clear();
  socket->in_flight = 0;
  ++socket->changes;
}

uint64_t Delay() {
  Network& net = Net();
  uint64_t delay = net.random.Between(net.policy.least_delay, net.policy.most_delay);
  if (net.policy.spike_every != 0 && net.random.OneIn(net.policy.spike_every)) {
    delay += net.random.Below(net.policy.spike);
  }
  return delay;
}

// Until when nothing passes between the two.
uint64_t PartedUntil(int one, int other) {
  const auto found = Net().parted.find(std::minmax(one, other));
  return found == Net().parted.end() || found->second <= Now() ? 0 : found->second;
}

bool Reaches(const Socket& socket) {
  return socket.peer != nullptr && !socket.peer->silent &&
         PartedUntil(socket.process, socket.peer->process) == 0;
}

void MixBytes(const std::string& bytes) { MixIntoTrace(XXH3_64bits(bytes.data(), bytes.size())); }

void Arrive(const std::shared_ptr<Socket>& from);

void ArriveLater(const std::shared_ptr<Socket>& from, uint64_t at) {
  from->next_arrival = std::max(from->next_arrival + 1, at);
  CallAt(from->next_arrival, [from] { Arrive(from); });
}

// Delivers the next segment. Each has one call of its own, so none overtakes another.
void Arrive(const std::shared_ptr<Socket>& from) {
  if (from->wire.empty()) return;
  Socket* const to = from->peer.get();
  if (!Reaches(*from)) {
    if (from->user_timeout != 0 && Now() - from->wire.front().sent >= from->user_timeout) {
      return Reset(from.get(), ETIMEDOUT);
    }
    CallAt(Now() + kResend, [from] { Arrive(from); });
    return;
  }
  Segment segment = std::move(from->wire.front());
  from->wire.pop_front();
  from->in_flight -= segment.bytes.size();
  from->heard = to->heard = Now();
  ++from->changes;
  if (to->closed || to->reset) {
    if (!segment.bytes.empty()) Reset(from.get(), from->ended ? EPIPE : ECONNRESET);
    return;
  }
  const bool cut = segment.bytes.size() >= from->cut_after;
  if (cut) segment.bytes.resize(from->cut_after);
  if (from->cut_after != kForever) from->cut_after -= segment.bytes.size();
  MixBytes(segment.bytes);
  to->input += segment.bytes;
  to->ended = to->ended || (segment.ends && !cut);
  ++to->changes;
  if (!cut) return;
  Reset(from.get());
  Reset(to);
}

void Send(const std::shared_ptr<Socket>& from, std::string bytes, bool ends) {
  from->in_flight += bytes.size();
  from->wire.push_back({std::move(bytes), ends, Now()});
  ArriveLater(from, Now() + Delay());
}

void Shut(const std::shared_ptr<Socket>& socket) {
  if (!socket->connected || socket->wrote_end || socket->reset) return;
  socket->wrote_end = true;
  Send(socket, "", true);
}

// As the kernel does when the last descriptor goes.
void Close(const std::shared_ptr<Socket>& socket) {
  if (socket->closed) return;
  socket->closed = true;
  if (socket->listening) {
    Net().listeners.erase(socket->port);
    for (const auto& waiting : socket->pending) Close(waiting);
    return;
  }
  if (!socket->connected || socket->reset) return;
  if (socket->unread() == 0) return Shut(socket);
  // Unread bytes: the peer gets a reset, once it is reached. After an end of the stream, which it does not
  // overtake, that is another error (tcp_reset() in Linux).
  const auto peer = socket->peer;
  socket->next_arrival = std::max(socket->next_arrival + 1, Now() + Delay());
  CallAt(socket->next_arrival, [socket, peer] {
    if (Reaches(*socket)) Reset(peer.get(), peer->ended ? EPIPE : ECONNRESET);
  });
}

// Of a host that is gone: nothing closes, and a port stays taken.
void GoSilent(Socket* socket) {
  socket->closed = !socket->listening;
  socket->wire.clear();
  for (const auto& waiting : socket->pending) waiting->closed = true;
}

// Looks whether the peer's host still answers, as TCP's keepalive.
void Probe(const std::weak_ptr<Socket>& weak) {
  const auto socket = weak.lock();
  if (socket == nullptr || socket->closed || socket->reset) return;
  if (Reaches(*socket)) {
    socket->heard = Now();
    if (socket->peer->closed) return Reset(socket.get());
  } else if (Now() - socket->heard >= socket->keepalive) {
    return Reset(socket.get(), ETIMEDOUT);
  }
  CallAt(Now() + std::max(kSecond, socket->keepalive / 4), [weak] { Probe(weak); });
}

void Connect(const std::weak_ptr<Socket>& weak) {
  Network& net = Net();
  const auto socket = weak.lock();
  if (socket == nullptr || socket->closed) return;
  const auto found = net.listeners.find(socket->peer_port);
  const auto listener = found == net.listeners.end() ? nullptr : found->second.lock();
  const bool unreachable =
      listener != nullptr && (listener->silent || PartedUntil(socket->process, listener->process) != 0);
  if (unreachable) {
    CallAt(Now() + kResend, [weak] { Connect(weak); });
    return;
  }
  ++socket->changes;
  if (listener == nullptr || !listener->listening) {
    socket->error = ECONNREFUSED;
    return;
  }
  const auto other = std::make_shared<Socket>();
  other->process = listener->process;
  other->port = socket->peer_port;
  other->peer_port = socket->port;
  other->peer = socket;
  socket->peer = other;
  other->connected = socket->connected = true;
  other->heard = socket->heard = Now();
  net.sockets.push_back(socket);
  net.sockets.push_back(other);
  listener->pending.push_back(other);
  ++listener->changes;
}

sockaddr_in Loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

int CopyAddress(uint16_t port, sockaddr* to, socklen_t* size) {
  const sockaddr_in address = Loopback(port);
  std::memcpy(to, &address, std::min<size_t>(*size, sizeof address));
  *size = sizeof address;
  return 0;
}

ssize_t Put(int descriptor, const iovec* parts, size_t count) {
  const auto socket = Find<Socket>(descriptor);
  if (socket == nullptr) return Fail(EBADF);
  if (socket->reset) {
    const int error = std::exchange(socket->error, 0);
    return Fail(error != 0 ? error : EPIPE);
  }
  if (socket->wrote_end) return Fail(EPIPE);
  if (!socket->connected) return Fail(ENOTCONN);
  if (!socket->has_room()) return Fail(EAGAIN);
  const size_t segment = Net().policy.segment;
  const size_t most = segment >= 65536 ? segment : 1 + Net().random.Below(segment);
  std::string bytes;
  for (size_t i = 0; i < count && bytes.size() < most; ++i) {
    bytes.append(static_cast<const char*>(parts[i].iov_base),
                 std::min(parts[i].iov_len, most - bytes.size()));
  }
  const auto size = static_cast<ssize_t>(bytes.size());
  Send(socket, std::move(bytes), false);
  return size;
}

ssize_t Take(int descriptor, const iovec* parts, size_t count, bool peek) {
  const auto socket = Find<Socket>(descriptor);
  if (socket == nullptr) return Fail(EBADF);
  if (socket->unread() == 0) {
    if (socket->reset) {
      const int error = std::exchange(socket->error, 0);
      return error == 0 ? 0 : Fail(error);
    }
    return socket->ended ? 0 : Fail(EAGAIN);
  }
  size_t at = socket->input_at;
  size_t taken = 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t size = std::min(parts[i].iov_len, socket->input.size() - at);
    std::memcpy(parts[i].iov_base, socket->input.data() + at, size);
    at += size;
    taken += size;
  }
  if (peek) return static_cast<ssize_t>(taken);
  socket->input_at = at;
  if (at == socket->input.size()) {
    socket->input.clear();
    socket->input_at = 0;
  }
  if (socket->peer != nullptr) ++socket->peer->changes;
  return static_cast<ssize_t>(taken);
}

uint32_t NewEvents(const Poller::Watch& watch) {
  const bool edge = (watch.event.events & EPOLLET) != 0;
  if (edge && watch.reported == watch.descriptor->changes) return 0;
  return watch.descriptor->Events() & (watch.event.events | EPOLLERR | EPOLLHUP);
}

int Collect(Poller* poller, epoll_event* out, int most) {
  int count = 0;
  for (auto& [number, watch] : poller->watches) {
    if (count == most) break;
    const uint32_t events = NewEvents(watch);
    if (events == 0) continue;
    watch.reported = watch.descriptor->changes;
    out[count] = watch.event;
    out[count++].events = events;
  }
  return count;
}

bool HasEvents(const Poller& poller) {
  return std::any_of(poller.watches.begin(), poller.watches.end(),
                     [](const auto& item) { return NewEvents(item.second) != 0; });
}

bool IsSimulated(int descriptor) { return descriptor >= kFirstDescriptor; }

uint64_t Deadline(int milliseconds) {
  return milliseconds < 0 ? kForever : Now() + static_cast<uint64_t>(milliseconds) * kMillisecond;
}

}  // namespace

void SetNetworkPolicy(const NetworkPolicy& policy) { Net().policy = policy; }

void BreakConnection(int process, uint64_t within) {
  std::vector<std::shared_ptr<Socket>> found;
  for (const auto& weak : Net().sockets) {
    const auto socket = weak.lock();
    if (socket == nullptr || socket->closed || socket->reset) continue;
    if (socket->process == process || socket->peer->process == process) found.push_back(socket);
  }
  if (found.empty()) return;
  const auto& chosen = found[Net().random.Below(found.size())];
  chosen->cut_after = within == 0 ? 0 : Net().random.Below(within);
  if (within != 0) return;
  Reset(chosen.get());
  Reset(chosen->peer.get());
}

void Part(int process, int other, uint64_t until) { Net().parted[std::minmax(process, other)] = until; }

void HealAll() {
  Net().parted.clear();
  for (const auto& weak : Net().sockets) {
    if (const auto socket = weak.lock()) socket->cut_after = kForever;
  }
}

void DropSockets(int process, bool silent) {
  auto& descriptors = Net().descriptors;
  for (auto next = descriptors.begin(); next != descriptors.end();) {
    const auto at = next++;
    if (at->second->process != process) continue;
    const auto socket = std::dynamic_pointer_cast<Socket>(at->second);
    if (socket != nullptr) {
      socket->silent = silent;
      for (const auto& waiting : socket->pending) waiting->silent = silent;
      silent ? GoSilent(socket.get()) : Close(socket);
    }
    const bool keeps_port = silent && socket != nullptr && socket->listening;
    if (!keeps_port) descriptors.erase(at);
  }
}

void AnswerForHost(int process) {
  for (const auto& weak : Net().sockets) {
    const auto socket = weak.lock();
    if (socket != nullptr && socket->process == process) socket->silent = false;
  }
  DropSockets(process, false);  // the port is free again
}

}  // namespace sim

using sim::Current;
using sim::Fail;
using sim::Find;
using sim::IsSimulated;
using sim::Net;

extern "C" {

int epoll_create1(int flags) noexcept {
  if (Current() == nullptr) return SIM_REAL(epoll_create1)(flags);
  return sim::Add(std::make_shared<sim::Poller>());
}

int epoll_create(int /*size*/) noexcept { return epoll_create1(0); }

int eventfd(unsigned count, int flags) noexcept {
  if (Current() == nullptr) return SIM_REAL(eventfd)(count, flags);
  const auto made = std::make_shared<sim::EventCount>();
  made->count = count;
  return sim::Add(made);
}

// Asio then takes the limit of epoll_wait.
int timerfd_create(int /*clock*/, int /*flags*/) noexcept { return Fail(ENOSYS); }

int epoll_ctl(int poller, int operation, int descriptor, epoll_event* event) noexcept {
  const auto found = Find<sim::Poller>(poller);
  const auto watched = Find<sim::Descriptor>(descriptor);
  if (found == nullptr || watched == nullptr) return Fail(EBADF);
  if (operation == EPOLL_CTL_DEL) {
    found->watches.erase(descriptor);
    return 0;
  }
  found->watches[descriptor] = {*event, watched, 0};
  return 0;
}

int epoll_wait(int poller, epoll_event* events, int most, int milliseconds) {
  const auto found = Find<sim::Poller>(poller);
  if (found == nullptr) return Fail(EBADF);
  // Asio looks again and again in the last microsecond before its limit, and no time would pass.
  static int looks = 0;
  looks = milliseconds == 0 ? looks + 1 : 0;
  if (looks > 1000) {
    looks = 0;
    sim::Block("the clock", found.get(), [] { return false; }, sim::Now() + sim::kMicrosecond);
  }
  if (milliseconds != 0) {
    sim::Block(
        "a descriptor of an epoll", found.get(), [&found] { return sim::HasEvents(*found); },
        sim::Deadline(milliseconds));
  }
  return sim::Collect(found.get(), events, most);
}

int poll(pollfd* polled, nfds_t count, int milliseconds) {
  if (Current() == nullptr) return SIM_REAL(poll)(polled, count, milliseconds);
  const auto look = [polled, count] {
    int ready = 0;
    for (nfds_t i = 0; i < count; ++i) {
      const auto found = Find<sim::Descriptor>(polled[i].fd);
      const uint32_t events = found == nullptr ? 0 : found->Events();
      const auto wanted = static_cast<uint32_t>(polled[i].events) | POLLERR | POLLHUP;
      polled[i].revents = static_cast<short>(events & wanted);
      if (polled[i].revents != 0) ++ready;
    }
    return ready;
  };
  if (milliseconds != 0) {
    sim::Block("a descriptor of a poll", polled, [&look] { return look() > 0; }, sim::Deadline(milliseconds));
  }
  return look();
}

int socket(int domain, int type, int protocol) noexcept {
  if (Current() == nullptr) return SIM_REAL(socket)(domain, type, protocol);
  if (domain != AF_INET) return Fail(EAFNOSUPPORT);
  return sim::Add(std::make_shared<sim::Socket>());
}

int bind(int descriptor, const sockaddr* address, socklen_t size) noexcept {
  if (!IsSimulated(descriptor)) return SIM_REAL(bind)(descriptor, address, size);
  const auto found = Find<sim::Socket>(descriptor);
  const uint16_t port = ntohs(reinterpret_cast<const sockaddr_in*>(address)->sin_port);
  if (port != 0 && !Net().listeners[port].expired()) return Fail(EADDRINUSE);
  found->port = port != 0 ? port : Net().next_port++;
  Net().listeners[found->port] = found;
  return 0;
}

int listen(int descriptor, int /*backlog*/) noexcept {
  Find<sim::Socket>(descriptor)->listening = true;
  return 0;
}

int connect(int descriptor, const sockaddr* address, socklen_t size) {
  if (!IsSimulated(descriptor)) return SIM_REAL(connect)(descriptor, address, size);
  const auto found = Find<sim::Socket>(descriptor);
  found->port = Net().next_port++;
  found->peer_port = ntohs(reinterpret_cast<const sockaddr_in*>(address)->sin_port);
  const std::weak_ptr<sim::Socket> weak = found;
  sim::CallAt(sim::Now() + sim::Delay(), [weak] { sim::Connect(weak); });
  return Fail(EINPROGRESS);
}

int accept(int descriptor, sockaddr* address, socklen_t* size) {
  const auto found = Find<sim::Socket>(descriptor);
  if (found == nullptr) return Fail(EBADF);
  if (found->pending.empty()) return Fail(EAGAIN);
  const auto accepted = found->pending.front();
  found->pending.pop_front();
  if (address != nullptr) sim::CopyAddress(accepted->peer_port, address, size);
  return sim::Add(accepted);
}

int getsockname(int descriptor, sockaddr* address, socklen_t* size) noexcept {
  if (!IsSimulated(descriptor)) return SIM_REAL(getsockname)(descriptor, address, size);
  return sim::CopyAddress(Find<sim::Socket>(descriptor)->port, address, size);
}

int getpeername(int descriptor, sockaddr* address, socklen_t* size) noexcept {
  const auto found = Find<sim::Socket>(descriptor);
  if (found == nullptr || !found->connected || found->reset) return Fail(ENOTCONN);
  return sim::CopyAddress(found->peer_port, address, size);
}

int setsockopt(int descriptor, int level, int option, const void* value, socklen_t size) noexcept {
  if (!IsSimulated(descriptor)) return SIM_REAL(setsockopt)(descriptor, level, option, value, size);
  const auto found = Find<sim::Socket>(descriptor);
  if (found == nullptr) return Fail(EBADF);
  if (level != IPPROTO_TCP) return 0;
  const auto number = static_cast<uint64_t>(*static_cast<const int*>(value));
  if (option == TCP_USER_TIMEOUT) found->user_timeout = number * sim::kMillisecond;
  if (option != TCP_KEEPIDLE) return 0;
  found->keepalive = 3 * number * sim::kSecond;  // what ProbeIdlePeer() asks for with its other options
  const std::weak_ptr<sim::Socket> weak = found;
  sim::CallAt(sim::Now() + number * sim::kSecond, [weak] { sim::Probe(weak); });
  return 0;
}

int getsockopt(int descriptor, int level, int option, void* value, socklen_t* size) noexcept {
  if (!IsSimulated(descriptor)) return SIM_REAL(getsockopt)(descriptor, level, option, value, size);
  const auto found = Find<sim::Socket>(descriptor);
  if (found == nullptr) return Fail(EBADF);
  std::memset(value, 0, *size);
  if (level == SOL_SOCKET && option == SO_ERROR) *static_cast<int*>(value) = std::exchange(found->error, 0);
  if (level == IPPROTO_TCP && option == TCP_INFO) {
    auto* const info = static_cast<tcp_info*>(value);
    const bool late = !found->wire.empty() && sim::Now() - found->wire.front().sent > sim::kResend;
    info->tcpi_state = found->connected && !found->reset ? TCP_ESTABLISHED : TCP_CLOSE;
    info->tcpi_retransmits = late ? 1 : 0;
    info->tcpi_last_ack_recv = static_cast<uint32_t>((sim::Now() - found->heard) / sim::kMillisecond);
  }
  return 0;
}

ssize_t sendmsg(int descriptor, const msghdr* message, int flags) {
  if (!IsSimulated(descriptor)) return SIM_REAL(sendmsg)(descriptor, message, flags);
  return sim::Put(descriptor, message->msg_iov, message->msg_iovlen);
}

ssize_t send(int descriptor, const void* bytes, size_t size, int flags) {
  if (!IsSimulated(descriptor)) return SIM_REAL(send)(descriptor, bytes, size, flags);
  const iovec part{const_cast<void*>(bytes), size};
  return sim::Put(descriptor, &part, 1);
}

ssize_t recvmsg(int descriptor, msghdr* message, int flags) {
  if (!IsSimulated(descriptor)) return SIM_REAL(recvmsg)(descriptor, message, flags);
  return sim::Take(descriptor, message->msg_iov, message->msg_iovlen, (flags & MSG_PEEK) != 0);
}

ssize_t recv(int descriptor, void* bytes, size_t size, int flags) {
  if (!IsSimulated(descriptor)) return SIM_REAL(recv)(descriptor, bytes, size, flags);
  const iovec part{bytes, size};
  return sim::Take(descriptor, &part, 1, (flags & MSG_PEEK) != 0);
}

int shutdown(int descriptor, int how) noexcept {
  const auto found = Find<sim::Socket>(descriptor);
  if (found == nullptr) return Fail(EBADF);
  if (how != SHUT_RD) sim::Shut(found);
  return 0;
}

int close(int descriptor) {
  if (!IsSimulated(descriptor)) return static_cast<int>(sim::RealSyscall(SYS_close, descriptor));
  if (const auto found = Find<sim::Socket>(descriptor)) sim::Close(found);
  for (const auto& [number, other] : Net().descriptors) {
    if (auto* const poller = dynamic_cast<sim::Poller*>(other.get())) poller->watches.erase(descriptor);
  }
  Net().descriptors.erase(descriptor);
  return 0;
}

int ioctl(int descriptor, unsigned long request, ...) noexcept {
  va_list list;
  va_start(list, request);
  const long argument = va_arg(list, long);
  va_end(list);
  if (IsSimulated(descriptor)) return 0;
  return static_cast<int>(sim::RealSyscall(SYS_ioctl, descriptor, static_cast<long>(request), argument));
}

int fcntl(int descriptor, int command, ...) {
  va_list list;
  va_start(list, command);
  const long argument = va_arg(list, long);
  va_end(list);
  if (IsSimulated(descriptor)) return 0;
  return static_cast<int>(sim::RealSyscall(SYS_fcntl, descriptor, command, argument));
}

ssize_t write(int descriptor, const void* bytes, size_t size) {
  if (!IsSimulated(descriptor)) {
    const int error = Current() == nullptr || descriptor <= STDERR_FILENO ? 0 : sim::WriteError();
    if (error != 0) return Fail(error);
    return sim::RealSyscall(SYS_write, descriptor, reinterpret_cast<long>(bytes), static_cast<long>(size));
  }
  const auto found = Find<sim::EventCount>(descriptor);
  if (found == nullptr) return send(descriptor, bytes, size, 0);
  found->count += *static_cast<const uint64_t*>(bytes);
  ++found->changes;
  return static_cast<ssize_t>(size);
}

ssize_t read(int descriptor, void* bytes, size_t size) {
  if (!IsSimulated(descriptor)) {
    return sim::RealSyscall(SYS_read, descriptor, reinterpret_cast<long>(bytes), static_cast<long>(size));
  }
  const auto found = Find<sim::EventCount>(descriptor);
  if (found == nullptr) return recv(descriptor, bytes, size, 0);
  if (found->count == 0) return Fail(EAGAIN);
  *static_cast<uint64_t*>(bytes) = std::exchange(found->count, 0);
  return sizeof(uint64_t);
}

}  // extern "C"
