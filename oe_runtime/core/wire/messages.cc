#include "oe_runtime/core/wire/messages.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "oe_runtime/core/wire/frame.h"

namespace oe {
namespace {

// Flags of a RowsRequest.
constexpr uint32_t kStates = 1;
constexpr uint32_t kChange = 2;
constexpr uint32_t kPlaced = 4;

// Takes bytes from the front of a body.
class Reader {
 public:
  Reader(Bytes body, const char* what) : rest_(body), what_(what) {}

  const uint8_t* Take(size_t size, const char* field) {
    if (size > rest_.size) {
      throw ProtocolError(std::string(what_) + ": " + field + " needs " + std::to_string(size) +
                          " bytes, but only " + std::to_string(rest_.size) + " are left");
    }
    const uint8_t* data = rest_.data;
    rest_.data += size;
    rest_.size -= size;
    return data;
  }
  // Like Take for `count` items of `size` bytes; the product cannot overflow.
  const uint8_t* TakeMany(uint64_t count, size_t size, const char* field) {
    if (count > rest_.size / size) {
      throw ProtocolError(std::string(what_) + ": " + std::to_string(count) + " " + field +
                          " do not fit into the " + std::to_string(rest_.size) + " bytes left");
    }
    return Take(static_cast<size_t>(count) * size, field);
  }
  template <typename T>
  T Number(const char* field) {
    T value;
    std::memcpy(&value, Take(sizeof value, field), sizeof value);
    return value;
  }
  Bytes rest() const { return rest_; }
  void End() const {
    if (rest_.size != 0) {
      throw ProtocolError(std::string(what_) + ": " + std::to_string(rest_.size) + " bytes too many");
    }
  }

 private:
  Bytes rest_;
  const char* what_;
};

template <typename T>
void Append(std::string* out, T value) {
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  out->append(bytes, sizeof value);
}

}  // namespace

std::string EncodeHello(const Hello& hello) {
  std::string body;
  Append(&body, hello.version);
  for (const std::string* text : {&hello.token, &hello.job, &hello.worker, &hello.session}) {
    if (text == &hello.session && text->empty()) break;  // servers of before refuse what follows
    Append(&body, static_cast<uint16_t>(text->size()));
    body += *text;
  }
  return body;
}

Hello ParseHello(Bytes body) {
  Reader reader(body, "hello");
  Hello hello;
  hello.version = reader.Number<uint16_t>("version");
  const auto text = [&reader](const char* field) {
    const auto size = reader.Number<uint16_t>(field);
    return std::string(reinterpret_cast<const char*>(reader.Take(size, field)), size);
  };
  hello.token = text("token");
  hello.job = text("job");
  hello.worker = text("worker");
  if (reader.rest().size > 0) hello.session = text("session");
  reader.End();
  return hello;
}

std::string EncodeError(const ErrorBody& error) {
  std::string body;
  Append(&body, static_cast<uint32_t>(error.code));
  return body + error.message;
}

ErrorBody ParseError(Bytes body) {
  Reader reader(body, "error");
  ErrorBody error;
  error.code = static_cast<ErrorCode>(reader.Number<uint32_t>("code"));
  error.message.assign(reinterpret_cast<const char*>(reader.rest().data), reader.rest().size);
  return error;
}

std::string EncodeShareRequest(const ShareRequest& request) {
  std::string body;
  Append(&body, request.process);
  Append(&body, request.file);
  Append(&body, request.size);
  Append(&body, request.nonce_at);
  return body;
}

ShareRequest ParseShareRequest(Bytes body) {
  Reader reader(body, "share");
  ShareRequest request;
  request.process = reader.Number<uint32_t>("process");
  request.file = reader.Number<uint32_t>("file");
  request.size = reader.Number<uint64_t>("size");
  request.nonce_at = reader.Number<uint64_t>("place of the nonce");
  reader.End();
  return request;
}

std::string EncodeKeysRequest(const KeysRequest& request) {
  std::string body;
  Append(&body, request.table);
  Append(&body, request.part);
  return body;
}

KeysRequest ParseKeysRequest(Bytes body) {
  Reader reader(body, "keys");
  KeysRequest request;
  request.table = reader.Number<uint32_t>("table");
  request.part = reader.Number<uint32_t>("part");
  reader.End();
  return request;
}

void EncodeRowsRequest(const RowsRequest& request, Buffer* head) {
  const size_t places_at = request.change != 0 ? 24 : 16;
  const size_t keys_at = places_at + (request.placed ? 16 : 0);
  head->Resize(keys_at + request.keys.size * 8);
  const uint32_t flags =
      (request.states ? kStates : 0) | (request.change != 0 ? kChange : 0) | (request.placed ? kPlaced : 0);
  const uint64_t size = request.keys.size;
  std::memcpy(head->data(), &request.table, 4);
  std::memcpy(head->data() + 4, &flags, 4);
  std::memcpy(head->data() + 8, &size, 8);
  if (request.change != 0) std::memcpy(head->data() + 16, &request.change, 8);
  if (request.placed) {
    std::memcpy(head->data() + places_at, &request.placed->weights, 8);
    std::memcpy(head->data() + places_at + 8, &request.placed->states, 8);
  }
  if (size > 0) std::memcpy(head->data() + keys_at, request.keys.keys, size * 8);
}

RowsRequest ParseRowsRequest(Bytes body) {
  if (reinterpret_cast<uintptr_t>(body.data) % alignof(uint64_t) != 0) {
    throw ProtocolError("rows: the body is not aligned");
  }
  Reader reader(body, "rows");
  RowsRequest request;
  request.table = reader.Number<uint32_t>("table");
  const auto flags = reader.Number<uint32_t>("flags");
  if (flags > (kStates | kChange | kPlaced))
    throw ProtocolError("rows: unknown flags " + std::to_string(flags));
  request.states = (flags & kStates) != 0;
  const auto size = reader.Number<uint64_t>("number of keys");
  if ((flags & kChange) != 0) {
    request.change = reader.Number<uint64_t>("change");
    if (request.change == 0) throw ProtocolError("rows: the number of the change is 0");
  }
  if ((flags & kPlaced) != 0) {
    RowsRequest::Placed placed;
    placed.weights = reader.Number<uint64_t>("place of weights");
    placed.states = reader.Number<uint64_t>("place of states");
    if (!request.states && placed.states != 0) throw ProtocolError("rows: a place of states without states");
    request.placed = placed;
  }
  request.keys.keys = reinterpret_cast<const uint64_t*>(reader.TakeMany(size, 8, "keys"));
  request.keys.size = static_cast<size_t>(size);
  request.rest = reader.rest();
  return request;
}

std::string EncodeFileChunk(const FileChunk& chunk) {
  std::string body;
  Append(&body, chunk.offset);
  Append(&body, chunk.size);
  Append(&body, static_cast<uint16_t>(chunk.file.size()));
  return body + chunk.file;
}

FileChunk ParseFileChunk(Bytes body, Bytes* data) {
  Reader reader(body, "file chunk");
  FileChunk chunk;
  chunk.offset = reader.Number<uint64_t>("offset");
  chunk.size = reader.Number<uint32_t>("size");
  const auto length = reader.Number<uint16_t>("length of the name");
  chunk.file.assign(reinterpret_cast<const char*>(reader.Take(length, "name")), length);
  if (chunk.size == 0 || chunk.size > kMaxChunk) {
    throw ProtocolError("file chunk: size " + std::to_string(chunk.size) + " is not between 1 and " +
                        std::to_string(kMaxChunk));
  }
  *data = reader.rest();
  return chunk;
}

std::string EncodeSharedRequest(const SharedRequest& request) {
  std::string body;
  Append(&body, request.version);
  Append(&body, static_cast<uint32_t>(request.write ? 1 : 0));
  Append(&body, static_cast<uint16_t>(request.name.size()));
  body += request.name;
  return body.append(reinterpret_cast<const char*>(request.value.data), request.value.size);
}

SharedRequest ParseSharedRequest(Bytes body) {
  Reader reader(body, "shared value");
  SharedRequest request;
  request.version = reader.Number<uint64_t>("version");
  const auto write = reader.Number<uint32_t>("write");
  if (write > 1) throw ProtocolError("shared value: write is " + std::to_string(write) + ", neither 0 nor 1");
  request.write = write == 1;
  const auto length = reader.Number<uint16_t>("length of the name");
  if (length == 0 || length > SharedRequest::kMostName) {
    throw ProtocolError("shared value: a name of " + std::to_string(length) + " bytes is not between 1 and " +
                        std::to_string(SharedRequest::kMostName));
  }
  request.name.assign(reinterpret_cast<const char*>(reader.Take(length, "name")), length);
  request.value = reader.rest();
  if (request.value.size > (request.write ? kMaxSharedValue : 0)) {
    throw ProtocolError("shared value: " + std::to_string(request.value.size) + " bytes; at most " +
                        std::to_string(request.write ? kMaxSharedValue : 0) + " are allowed");
  }
  return request;
}

std::string EncodeSharedReply(const SharedReply& reply) {
  std::string body;
  Append(&body, reply.version);
  Append(&body, reply.client);
  Append(&body, static_cast<uint32_t>(reply.written ? 1 : 0));
  Append(&body, static_cast<uint32_t>(reply.members.size()));
  for (const uint64_t member : reply.members) Append(&body, member);
  return reply.value == nullptr ? body : body + *reply.value;
}

SharedReply ParseSharedReply(Bytes body) {
  Reader reader(body, "reply of a shared value");
  SharedReply reply;
  reply.version = reader.Number<uint64_t>("version");
  reply.client = reader.Number<uint64_t>("client");
  reply.written = reader.Number<uint32_t>("written") != 0;
  const auto members = reader.Number<uint32_t>("number of members");
  const uint8_t* const numbers = reader.TakeMany(members, 8, "members");
  reply.members.resize(members);
  if (members > 0) std::memcpy(reply.members.data(), numbers, size_t{members} * 8);
  const Bytes rest = reader.rest();
  if (reply.version != 0 && !reply.written) {
    reply.value = std::make_shared<const std::string>(reinterpret_cast<const char*>(rest.data), rest.size);
  }
  return reply;
}

void EncodeBatch(const std::vector<BatchEntry>& entries, const std::vector<KeyBlock>& blocks, Buffer* head) {
  if (std::max(entries.size(), blocks.size()) > kMaxEntries) {
    throw SpecError("a batch of " + std::to_string(std::max(entries.size(), blocks.size())) +
                    " lookups; at most " + std::to_string(kMaxEntries) + " are allowed: use smaller batches");
  }
  size_t keys = 0;
  for (const KeyBlock& block : blocks) keys += block.size;
  head->Resize(8 + entries.size() * 24 + blocks.size() * 8 + keys * 8);
  uint8_t* out = head->data();
  const auto put = [&out](const void* data, size_t size) {
    if (size != 0) std::memcpy(out, data, size);
    out += size;
  };
  const auto block_count = static_cast<uint32_t>(blocks.size());
  const auto entry_count = static_cast<uint32_t>(entries.size());
  put(&block_count, 4);
  put(&entry_count, 4);
  for (const BatchEntry& entry : entries) {
    put(&entry.table, 4);
    put(&entry.block, 4);
    put(&entry.learning_rate, 8);
    put(&entry.place, 8);
  }
  for (const KeyBlock& block : blocks) {
    const uint64_t size = block.size;
    put(&size, 8);
  }
  for (const KeyBlock& block : blocks) put(block.keys, block.size * 8);
}

BatchView ParseBatch(Bytes body) {
  if (reinterpret_cast<uintptr_t>(body.data) % alignof(uint64_t) != 0) {
    throw ProtocolError("batch: the body is not aligned");
  }
  Reader reader(body, "batch");
  const auto block_count = reader.Number<uint32_t>("number of blocks");
  const auto entry_count = reader.Number<uint32_t>("number of entries");
  if (std::max(entry_count, block_count) > kMaxEntries) {
    throw ProtocolError("batch: " + std::to_string(entry_count) + " entries and " +
                        std::to_string(block_count) + " blocks; at most " + std::to_string(kMaxEntries) +
                        " of each are allowed");
  }
  const uint8_t* entries = reader.TakeMany(entry_count, 24, "entries");
  const uint8_t* sizes = reader.TakeMany(block_count, 8, "block sizes");

  BatchView view;
  view.entries.resize(entry_count);
  for (BatchEntry& entry : view.entries) {
    std::memcpy(&entry.table, entries, 4);
    std::memcpy(&entry.block, entries + 4, 4);
    std::memcpy(&entry.learning_rate, entries + 8, 8);
    std::memcpy(&entry.place, entries + 16, 8);
    entries += 24;
    if (entry.block >= block_count) {
      throw ProtocolError("batch: an entry names block " + std::to_string(entry.block) + " of " +
                          std::to_string(block_count));
    }
  }
  view.blocks.resize(block_count);
  for (KeyBlock& block : view.blocks) {
    uint64_t size = 0;
    std::memcpy(&size, sizes, 8);
    sizes += 8;
    block.keys = reinterpret_cast<const uint64_t*>(reader.TakeMany(size, 8, "keys"));
    block.size = static_cast<size_t>(size);
  }
  view.rest = reader.rest();
  return view;
}

}  // namespace oe
