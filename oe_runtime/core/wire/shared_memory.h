// Memory that a client shares with the servers on its own host. Rows are gathered right into it and gradients
// are read right out of it, so that only keys and headers cross a socket; for any other server everything
// does.
//
// A connection begins as any other. The server offers a nonce in its reply to the hello; the client writes it
// into its memory and says where that is (Op::kShare). The server opens it under /proc, which its user must
// be allowed to, and finds its nonce there: so both are on one host, see each other's processes, and the
// memory is that of the client that asked. Where any of this does not hold (another host, a container,
// another user), the rows go over the socket.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "oe_runtime/core/common/file.h"
#include "oe_runtime/core/wire/messages.h"

namespace oe {

// What only the two ends of a connection know.
using Nonce = std::array<uint8_t, 16>;

// Nothing where the system has no random numbers.
std::optional<Nonce> NewNonce() noexcept;
std::string NonceText(const Nonce& nonce);  // 32 hexadecimal digits
std::optional<Nonce> ParseNonce(const std::string& text);

// A client's. Its file only ever grows, and is sealed against shrinking: a server that looks at it cannot be
// ended by a page that is no more. Thread-safe; lives as long as one of its blocks.
class SharedArena {
 public:
  static constexpr size_t kMost = size_t{4} << 30;         // bytes of all blocks; as many addresses are taken
  static constexpr size_t kLeastBlock = size_t{64} << 10;  // less is as well sent
  // What lies unused at its end beyond this goes back to the system.
  static constexpr size_t kMostSpare = size_t{256} << 20;

  // nullptr where the system gives none.
  static std::shared_ptr<SharedArena> Create() noexcept;
  ~SharedArena();
  SharedArena(const SharedArena&) = delete;
  SharedArena& operator=(const SharedArena&) = delete;

  // A block for `bytes` bytes, aligned to a page; nullptr where there is no room.
  uint8_t* Take(size_t bytes);
  void Give(uint8_t* block, size_t bytes) noexcept;

  // How far the file reaches by now.
  size_t size() const;
  // Where in the file; nothing for memory that lies elsewhere.
  std::optional<uint64_t> PlaceOf(const void* data) const;
  // Writes the nonce of the connection with this number, of kMostNonces; what the server is told.
  ShareRequest Show(size_t connection, const Nonce& nonce);
  static constexpr size_t kMostNonces = kNonceBytes / sizeof(Nonce);

 private:
  struct Range {
    size_t begin;
    size_t end;
  };
  SharedArena(File file, uint8_t* data);
  bool Extend(size_t end);

  const File file_;
  uint8_t* const data_;
  const int process_;
  mutable std::mutex mutex_;
  size_t size_ = 0;
  size_t backed_ = 0;        // how much of it has memory
  size_t blocks_ = 0;        // in use
  std::vector<Range> free_;  // ascending, none beside another
};

// A server's view of a client's.
class SharedMapping {
 public:
  // nullptr if it is not what the client says, or cannot be had.
  static std::unique_ptr<SharedMapping> Open(const ShareRequest& request, const Nonce& nonce);
  ~SharedMapping();
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  SharedMapping(std::byte* data, size_t size) : data_(data), size_(size) {}
  std::byte* const data_;
  const size_t size_;
};

}  // namespace oe
