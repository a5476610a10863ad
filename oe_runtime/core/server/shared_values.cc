#include "oe_runtime/core/server/shared_values.h"

#include <iterator>
#include <optional>
#include <random>
#include <utility>

#include "oe_runtime/core/common/error.h"

namespace oe {

SharedValues::SharedValues(Budget* memory)
    : memory_(memory), last_version_(uint64_t{std::random_device{}()} << 30) {}

SharedReply SharedValues::Exchange(uint64_t client, const SharedRequest& request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  SharedReply reply;
  const auto found = values_.find(request.name);
  reply.version = found == values_.end() ? 0 : found->second.version;
  reply.written = request.write && request.version == reply.version;
  if (!reply.written) {
    if (found != values_.end()) reply.value = found->second.bytes;
  } else if (request.value.size == 0) {
    if (found != values_.end()) values_.erase(found);
    reply.version = 0;
  } else {
    if (found == values_.end() && values_.size() >= kMostNames) {
      throw SpecError("shared value '" + request.name + "': the job has " + std::to_string(kMostNames) +
                      " shared values already, which is the most it may have");
    }
    std::optional<Budget::Share> share = memory_->Try(request.value.size);
    if (!share) {
      throw Error("the server has no memory for shared value '" + request.name + "' of " +
                  std::to_string(request.value.size) + " bytes; start it with more --max-request-bytes");
    }
    auto bytes = std::make_shared<const std::string>(reinterpret_cast<const char*>(request.value.data),
                                                     request.value.size);
    Value& value = values_[request.name];
    value.bytes = std::move(bytes);
    value.share = std::move(*share);
    reply.version = value.version = ++last_version_;
  }
  if (IsServed(request.name)) return reply;
  members_.insert(client);
  reply.client = client;
  reply.members.assign(members_.begin(), members_.end());
  return reply;
}

uint64_t SharedValues::Bytes(const std::string& name) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = values_.find(name);
  return found == values_.end() ? 0 : found->second.bytes->size();
}

void SharedValues::End(uint64_t client) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (members_.erase(client) > 0 && members_.empty()) Forget(false);
}

void SharedValues::ForgetServed() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Forget(true);
}

void SharedValues::Forget(bool served) noexcept {
  for (auto value = values_.begin(); value != values_.end();) {
    value = IsServed(value->first) == served ? values_.erase(value) : std::next(value);
  }
}

}  // namespace oe
