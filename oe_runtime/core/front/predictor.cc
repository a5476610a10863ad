#include "oe_runtime/core/front/predictor.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

size_t ExamplesOf(const JsonRequest& request) {
  return static_cast<size_t>(request.inputs.front().shape.front());
}

bool IsInOrder(const PlannedGroup& group, const std::vector<size_t>& lookups) {
  return std::equal(group.lookups.begin(), group.lookups.end(), lookups.begin(), lookups.end(),
                    [](const PlannedLookup& one, size_t number) { return one.lookup == number; });
}

}  // namespace

Predictor::Predictor(PredictorOptions options) : options_(std::move(options)) {}

void Predictor::Call::FindIds(std::vector<ProgramTensor>* found) const {
  const PredictorOptions& options = predictor_.options_;
  if (!options.ids) {
    for (const size_t input : options.ids_inputs) found->push_back(inputs_[input]);
    return;
  }
  std::vector<const ProgramTensor*> arguments;
  arguments.reserve(options.ids_inputs.size());
  for (const size_t input : options.ids_inputs) arguments.push_back(&inputs_[input]);
  *found = options.ids->Call(arguments);
  for (const ProgramTensor& one : *found)
    if (one.type != NumberType::kInt64) throw Error("the model computes ids that are not int64");
  if (found->size() < options.limits.size()) throw Error("the model computes too few ids");
  auto checked = found->end() - static_cast<std::ptrdiff_t>(options.limits.size());
  for (const int64_t limit : options.limits) {
    const auto* const numbers = static_cast<const int64_t*>(checked->data);
    if (std::any_of(numbers, numbers + checked->count(), [&](int64_t id) { return id < 0 || id >= limit; }))
      throw Error("an id is not in [0, " + std::to_string(limit) + ")");
    ++checked;
  }
  found->resize(found->size() - options.limits.size());
}

void Predictor::Call::Pull(Client* client) {
  std::vector<ProgramTensor> tensors;
  FindIds(&tensors);
  std::vector<std::vector<Key>> widened;
  widened.reserve(tensors.size());
  std::vector<IdsView> ids;
  for (const ProgramTensor& tensor : tensors) {
    if (tensor.type == NumberType::kInt64) {
      ids.push_back({static_cast<const Key*>(tensor.data), tensor.count()});
    } else {
      const auto* const numbers = static_cast<const int32_t*>(tensor.data);
      std::vector<Key>& keys = widened.emplace_back();
      for (size_t i = 0; i < tensor.count(); ++i) keys.push_back(static_cast<Key>(int64_t{numbers[i]}));
      ids.push_back({keys.data(), tensor.count()});
    }
  }
  TakeRows(client, *client->Pull(ids, predictor_.options_.lookups), tensors);
}

void Predictor::Call::TakeRows(Client* client, const PulledBatch& pulled,
                               const std::vector<ProgramTensor>& ids) {
  const PredictorOptions& options = predictor_.options_;
  const std::vector<PlannedGroup>& groups = pulled.plan.groups;
  std::vector<ProgramTensor> rows;
  for (const PlannedGroup& group : groups) {
    rows.push_back(
        options.forward->New(group.is_float64 ? NumberType::kFloat64 : NumberType::kFloat32,
                             {static_cast<int64_t>(group.inverse.size()), static_cast<int64_t>(group.dim)}));
    client->Embeddings(pulled, static_cast<size_t>(&group - groups.data()), rows.back().data);
  }
  for (const std::vector<size_t>& lookups : options.groups) {
    const auto group = std::find_if(groups.begin(), groups.end(),
                                    [&](const PlannedGroup& one) { return IsInOrder(one, lookups); });
    if (group == groups.end()) throw Error("the rows of several dtypes go together");
    rows_.push_back(rows[static_cast<size_t>(group - groups.begin())]);
  }
  sizes_.clear();
  lookups_.resize(options.lookups.size());
  for (const auto& [table, number] : options.lookups)
    sizes_.push_back(static_cast<int64_t>(ids[number].count()));
  for (size_t i = 0; i < groups.size(); ++i) {
    size_t before = 0;
    for (const PlannedLookup& one : groups[i].lookups) {
      const ProgramTensor& asked = ids[options.lookups[one.lookup].second];
      ProgramTensor& lookup = lookups_[one.lookup];
      lookup = rows[i];
      lookup.data = static_cast<std::byte*>(lookup.data) + before * groups[i].row_bytes();
      lookup.shape = asked.shape;
      lookup.shape.push_back(static_cast<int64_t>(groups[i].dim));
      before += asked.count();
    }
  }
}

void Predictor::Call::Forward() {
  const PredictorOptions& options = predictor_.options_;
  const ProgramTensor sizes = options.forward->New(NumberType::kInt64, {static_cast<int64_t>(sizes_.size())});
  std::memcpy(sizes.data, sizes_.data(), sizes_.size() * sizeof(int64_t));
  std::vector<const ProgramTensor*> arguments;
  for (const ForwardArgument& argument : options.arguments) {
    switch (argument.kind) {
      case ForwardArgument::Kind::kInput:
        arguments.push_back(&inputs_[argument.number]);
        break;
      case ForwardArgument::Kind::kRows:
        arguments.push_back(&rows_.at(argument.number));
        break;
      case ForwardArgument::Kind::kSizes:
        arguments.push_back(&sizes);
        break;
      case ForwardArgument::Kind::kLookup:
        arguments.push_back(&lookups_.at(argument.number));
        break;
    }
  }
  outputs_ = options.forward->Call(arguments);
}

void Predictor::Batch(size_t examples, double timeout_seconds) {
  for (const JsonInput& input : options_.inputs) {
    if (!input.shape.empty() && input.shape.front() == -1) continue;
    throw SpecError("input '" + input.name + "' of this model takes a fixed number of examples");
  }
  const auto timeout =
      std::chrono::duration_cast<BatchQueue::Clock::duration>(std::chrono::duration<double>(timeout_seconds));
  // Half of the processors compute while the others read requests, of which the next batch is made.
  queue_ =
      std::make_unique<BatchQueue>(examples, timeout, std::max(1U, std::thread::hardware_concurrency() / 2));
}

struct Predictor::Asked {
  JsonRequest request;
  bool is_inference = false;
  std::optional<int64_t> version;
};

struct Predictor::Waiting : BatchQueue::Item {
  const Asked* asked = nullptr;
  std::optional<HttpReply> reply;
};

std::optional<Predictor::Asked> Predictor::Read(const HttpRequest& request) const {
  if (request.method != "POST") return std::nullopt;
  const bool is_inference = request.target.rfind("/v2/", 0) == 0;
  if (is_inference && !request.json_length.empty()) return std::nullopt;
  std::optional<JsonRequest> read = is_inference
                                        ? ReadInference(request.body, options_.inputs, options_.outputs)
                                        : ReadRequest(request.body, options_.inputs);
  if (!read) return std::nullopt;
  return Asked{std::move(*read), is_inference, std::nullopt};
}

std::optional<HttpReply> Predictor::Write(const Asked& asked, const std::vector<JsonOutput>& outputs,
                                          int64_t version) const {
  if (asked.version.value_or(version) != version) return std::nullopt;
  std::optional<std::string> body = asked.is_inference
                                        ? WriteInference(options_.name, version, asked.request, outputs)
                                        : WriteReply(outputs, asked.request.by_row);
  if (!body) return std::nullopt;
  return HttpReply{200, std::move(*body), "application/json", ExamplesOf(asked.request)};
}

std::optional<HttpReply> Predictor::Answer(const HttpRequest& request, std::optional<int64_t> version,
                                           const Lead& lead) const {
  std::optional<Asked> asked = Read(request);
  if (!asked) return std::nullopt;
  asked->version = version;
  if (queue_ != nullptr && merges_ && ExamplesOf(asked->request) < queue_->most()) {
    Waiting own;
    own.examples = ExamplesOf(asked->request);
    own.asked = &*asked;
    for (const NumberArray& array : asked->request.inputs)
      own.kind.insert(own.kind.end(), array.shape.begin() + 1, array.shape.end());
    queue_->Run(&own, [&](const std::vector<BatchQueue::Item*>& items) {
      if (items.size() == 1) return;
      std::vector<Waiting*> waiting(items.size());
      std::transform(items.begin(), items.end(), waiting.begin(),
                     [](BatchQueue::Item* item) { return static_cast<Waiting*>(item); });
      AnswerTogether(waiting, lead);
    });
    if (own.reply) return std::move(own.reply);
  }
  return AnswerAlone(*asked, lead);
}

std::optional<HttpReply> Predictor::AnswerAlone(const Asked& asked, const Lead& lead) const {
  try {
    Call call(this);
    for (size_t i = 0; i < options_.inputs.size(); ++i) {
      const NumberArray& array = asked.request.inputs[i];
      call.inputs_.push_back(options_.forward->New(options_.inputs[i].type, array.shape));
      std::memcpy(call.inputs_.back().data, array.bytes.data(), array.bytes.size());
    }
    if (std::optional<HttpReply> refused = lead(&call)) return refused;
    std::vector<JsonOutput> outputs = options_.outputs;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const ProgramTensor& tensor = call.outputs_.at(i);
      if (tensor.type != outputs[i].type) return std::nullopt;
      outputs[i].shape = tensor.shape;
      outputs[i].data = tensor.data;
    }
    return Write(asked, outputs, call.version);
  } catch (const Error&) {
    return std::nullopt;  // whatever it is, Python finds it again, and the words for it
  }
}

void Predictor::AnswerTogether(const std::vector<Waiting*>& waiting, const Lead& lead) const {
  size_t total = 0;
  for (const Waiting* one : waiting) total += one->examples;
  try {
    Call call(this);
    for (size_t i = 0; i < options_.inputs.size(); ++i) {
      std::vector<int64_t> shape = waiting.front()->asked->request.inputs[i].shape;
      shape.front() = static_cast<int64_t>(total);
      call.inputs_.push_back(options_.forward->New(options_.inputs[i].type, shape));
      auto* to = static_cast<std::byte*>(call.inputs_.back().data);
      for (const Waiting* one : waiting) {
        const std::vector<std::byte>& bytes = one->asked->request.inputs[i].bytes;
        std::memcpy(to, bytes.data(), bytes.size());
        to += bytes.size();
      }
    }
    if (const std::optional<HttpReply> refused = lead(&call)) {
      for (Waiting* const one : waiting) one->reply = refused;
      return;
    }
    std::vector<JsonOutput> outputs = options_.outputs;
    std::vector<size_t> sizes;  // bytes of an example
    for (size_t i = 0; i < outputs.size(); ++i) {
      const ProgramTensor& tensor = call.outputs_.at(i);
      outputs[i].shape = tensor.shape;
      outputs[i].data = tensor.data;
      if (tensor.type != outputs[i].type) return;
      if (outputs[i].shape.empty() || outputs[i].shape.front() != static_cast<int64_t>(total)) {
        if (merges_.exchange(false))
          std::fprintf(stderr, "warning: output %s has no row for each example; requests are not merged\n",
                       outputs[i].name.c_str());
        return;
      }
      outputs[i].shape.front() = 1;
      sizes.push_back(static_cast<size_t>(CountOf(outputs[i].shape)) * BytesOf(outputs[i].type));
    }
    for (Waiting* const one : waiting) {
      for (JsonOutput& output : outputs) output.shape.front() = static_cast<int64_t>(one->examples);
      one->reply = Write(*one->asked, outputs, call.version);
      for (size_t i = 0; i < outputs.size(); ++i)
        outputs[i].data = static_cast<const std::byte*>(outputs[i].data) + one->examples * sizes[i];
    }
  } catch (const Error&) {  // one of them is bad, which is found when each is alone
    for (Waiting* const one : waiting) one->reply.reset();
  }
}

}  // namespace oe
