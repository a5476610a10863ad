// Answers of a model of numbers without Python: JSON, rows and the model's program. What it declines, Python
// answers.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/client/client.h"
#include "oe_runtime/core/front/batch_queue.h"
#include "oe_runtime/core/front/http_server.h"
#include "oe_runtime/core/front/json_tensors.h"
#include "oe_runtime/core/front/program.h"

namespace oe {

// What `forward` takes at one place.
struct ForwardArgument {
  enum class Kind : uint8_t { kInput, kRows, kSizes, kLookup };
  Kind kind = Kind::kInput;
  size_t number = 0;  // of the input, the group of lookups, or the lookup
};

struct PredictorOptions {
  std::string name;  // of the model, in replies
  std::vector<JsonInput> inputs;
  std::vector<JsonOutput> outputs;  // in the order of `forward`; without shape and data
  std::shared_ptr<const Program> forward;
  std::vector<ForwardArgument> arguments;
  // Of models whose rows are elsewhere (model_description.py). Either `ids` computes the ids from the inputs
  // in this order, or they are inputs, flat.
  std::shared_ptr<const Program> ids;
  std::vector<size_t> ids_inputs;
  std::vector<int64_t> limits;  // of what `ids` returns after the ids: it must be from 0 to below these
  std::vector<std::pair<uint32_t, uint32_t>> lookups;
  std::vector<std::vector<size_t>> groups;  // of which `forward` takes the rows of each as one tensor
};

class Predictor {
 public:
  explicit Predictor(PredictorOptions options);

  // One request, which whoever keeps rows and weights together (serving/model.py) leads through its steps.
  class Call {
   public:
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    // Of the model's tables; throws what the client does.
    void Pull(Client* client);
    // Throws Error.
    void Forward();
    // Of what answered, for replies that name it; set after Forward().
    int64_t version = 0;

   private:
    friend class Predictor;
    explicit Call(const Predictor* predictor) : predictor_(*predictor) {}
    void FindIds(std::vector<ProgramTensor>* found) const;
    void TakeRows(Client* client, const PulledBatch& pulled, const std::vector<ProgramTensor>& ids);

    const Predictor& predictor_;
    std::vector<ProgramTensor> inputs_, rows_, lookups_, outputs_;
    std::vector<int64_t> sizes_;
  };
  // Calls Pull(), where there are lookups, and Forward(). Returns what to answer where they are not possible
  // now; throws Error where the predictor declines.
  using Lead = std::function<std::optional<HttpReply>(Call*)>;

  // Merges requests that wait at the same time, up to so many examples, into one call; before the first
  // Answer(). Models whose answer for an example depends on others must not. Larger requests are alone.
  // Throws SpecError naming an input of a fixed number of examples.
  void Batch(size_t examples, double timeout_seconds);
  // Of a POST for this model, by either protocol. Where a `version` is asked, an answer of another one is
  // none. Thread-safe.
  std::optional<HttpReply> Answer(const HttpRequest& request, std::optional<int64_t> version,
                                  const Lead& lead) const;

 private:
  struct Waiting;

  struct Asked;

  std::optional<Asked> Read(const HttpRequest& request) const;
  // None for the answer of another version than the asked one.
  std::optional<HttpReply> Write(const Asked& asked, const std::vector<JsonOutput>& outputs,
                                 int64_t version) const;
  std::optional<HttpReply> AnswerAlone(const Asked& asked, const Lead& lead) const;
  // Replies to those for which it can; each of the others is to be answered alone.
  void AnswerTogether(const std::vector<Waiting*>& waiting, const Lead& lead) const;

  const PredictorOptions options_;
  std::unique_ptr<BatchQueue> queue_;
  mutable std::atomic<bool> merges_{true};  // the model's outputs have a row for each example
};

}  // namespace oe
