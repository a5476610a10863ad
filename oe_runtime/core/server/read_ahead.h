// Reads rows from the drive that clients are going to pull, beside the requests that are served.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <thread>

#include "oe_runtime/core/server/memory_budget.h"
#include "oe_runtime/core/server/store.h"
#include "oe_runtime/core/wire/buffer.h"

namespace oe {

class ReadAhead {
 public:
  // What a client has announced (Op::kReadAhead).
  struct Batch {
    uint64_t client = 0;
    const Store* store = nullptr;  // must live until Stop()
    Buffer body;                   // as of a pull
    MemoryBudget::Share share;     // of the body
  };

  // Has a thread from the first Add() on.
  ReadAhead() = default;
  ~ReadAhead() { Stop(); }
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // Batches are read one after the other. One that comes while that before of the same client is not read
  // takes its place: a client pulls in between, and so has read the rest itself.
  void Add(Batch batch);
  // A client pulls: if that is what it announced, the pull reads the rest itself, and nothing is read twice.
  // `body` as of the pull.
  void Pulled(uint64_t client, Bytes body);
  // Ends what is being read, and takes no more.
  void Stop();

 private:
  void Run();
  void Read(const Batch& batch);

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::list<Batch> waiting_;
  const Batch* reading_ = nullptr;
  bool wanted_ = false;  // whether it still is
  std::thread thread_;
};

}  // namespace oe
