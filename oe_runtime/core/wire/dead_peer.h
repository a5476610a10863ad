// A peer whose host has vanished (power cut, cable) sends no farewell: without a limit of our own, TCP would
// wait for it for minutes to hours. A peer that is stopped or busy is another matter: its kernel still
// answers, also when it does not read and its window is full.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>

namespace oe {

// While nothing is under way, the kernel asks the peer's, and the connection breaks once that has not
// answered for about `silence`.
inline void ProbeIdlePeer(int socket, std::chrono::seconds silence) {
  const int seconds = std::max(1, static_cast<int>(silence.count()));
  const int idle = std::max(1, seconds / 3);
  const int interval = std::max(1, seconds / 6);
  const auto set = [socket](int level, int option, int value) {
    (void)::setsockopt(socket, level, option, &value, sizeof value);
  };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, idle);
  set(IPPROTO_TCP, TCP_KEEPINTVL, interval);
  set(IPPROTO_TCP, TCP_KEEPCNT, std::max(1, (seconds - idle) / interval));
}

// The connection breaks once what was sent has not been taken for `silence`: by a host that has vanished, and
// also by a peer that does not read and whose window is full.
inline void EndSilentPeer(int socket, std::chrono::seconds silence) {
  const unsigned milliseconds = static_cast<unsigned>(std::max<int64_t>(1, silence.count())) * 1000;
  (void)::setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof milliseconds);
}

// Tells, while something is under way, a host that has vanished from a peer that does not read: to the probes
// of a full window the latter's kernel answers.
class HostWatch {
 public:
  // Whether nothing has come back for `silence` of what the peer's kernel must answer. To be called a few
  // times per second.
  bool Silent(int socket, std::chrono::seconds silence) {
    const auto now = std::chrono::steady_clock::now();
    tcp_info info{};
    socklen_t size = sizeof info;
    const bool known = ::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) == 0;
    const bool unanswered = info.tcpi_retransmits > 0 || info.tcpi_probes > 0;
    // Acknowledgements of a window that stays full may be a minute apart.
    const auto heard = now - std::chrono::milliseconds(info.tcpi_last_ack_recv);
    if (!known || info.tcpi_state != TCP_ESTABLISHED || !unanswered || (waits_ && heard > since_)) {
      waits_ = false;
      return false;
    }
    if (!waits_) since_ = now;
    waits_ = true;
    return now - since_ >= silence;
  }

 private:
  bool waits_ = false;
  std::chrono::steady_clock::time_point since_{};  // when the first that is unanswered was seen
};

}  // namespace oe
