#include "oe_runtime/core/front/torch_program.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>

#include "oe_runtime/core/common/error.h"

namespace oe {

using Tensor = void;     // AtenTensorHandle is a pointer to it
using Container = void;  // AOTInductorModelContainerHandle is a pointer to it

// Of torch/csrc/inductor/aoti_runtime/interface.h.
struct ConstantEntry {
  const char* name;
  Tensor* tensor;
};

// Functions of torch/csrc/inductor/aoti_torch/c/shim.h and aoti_runtime/interface.h. Those that return an int
// return 0 if all went well.
struct TorchApi {
  int (*from_blob)(void* data, int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t offset,
                   int32_t dtype, int32_t device_type, int32_t device_index, Tensor** tensor);
  int (*delete_tensor)(Tensor*);
  int (*get_data)(Tensor*, void** data);
  int (*get_dim)(Tensor*, int64_t* dims);
  int (*get_sizes)(Tensor*, int64_t** sizes);
  int (*get_dtype)(Tensor*, int32_t* dtype);
  int (*is_contiguous)(Tensor*, bool* is);
  int (*create)(Container**, size_t instances, const char* device, const char* directory);
  int (*destroy)(Container*);
  int (*run)(Container*, Tensor** inputs, size_t, Tensor** outputs, size_t, void* stream, void* executor);
  int (*count_inputs)(Container*, size_t*);
  int (*count_outputs)(Container*, size_t*);
  int (*count_constants)(Container*, size_t*);
  int (*constant_name)(Container*, size_t, const char**);
  int (*constant_fqn)(Container*, size_t, const char**);
  int (*use_constants)(Container*, const ConstantEntry*, size_t, bool inactive, bool validate);
  void* torch;
  std::map<NumberType, int32_t> codes;

  int32_t CodeOf(const std::string& type) const {
    void* const found = dlsym(torch, ("aoti_torch_dtype_" + type).c_str());
    if (found == nullptr) throw Error("PyTorch has no type " + type + " for compiled programs");
    return reinterpret_cast<int32_t (*)()>(found)();
  }
};

namespace {

std::vector<int64_t> StridesOf(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(shape[i], 1);
  return strides;
}

void Check(int status, const char* what) {
  if (status != 0) throw Error(std::string("PyTorch's compiled program cannot ") + what);
}

std::unique_ptr<const TorchApi> Find(const std::string& library, const std::string& torch) {
  auto api = std::make_unique<TorchApi>();
  api->torch = dlopen(torch.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (api->torch == nullptr) throw Error(torch + " is not loaded");
  // Stays loaded: its threads, if it has some, may not have ended.
  void* const program = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (program == nullptr) throw Error(std::string(dlerror()));
  const auto find = [&](void* in, const char* name, auto* function) {
    *reinterpret_cast<void**>(function) = dlsym(in, name);
    if (*function == nullptr) throw Error((in == program ? library : torch) + " has no " + name);
  };
  find(api->torch, "aoti_torch_create_tensor_from_blob", &api->from_blob);
  find(api->torch, "aoti_torch_delete_tensor_object", &api->delete_tensor);
  find(api->torch, "aoti_torch_get_data_ptr", &api->get_data);
  find(api->torch, "aoti_torch_get_dim", &api->get_dim);
  find(api->torch, "aoti_torch_get_sizes", &api->get_sizes);
  find(api->torch, "aoti_torch_get_dtype", &api->get_dtype);
  find(api->torch, "aoti_torch_is_contiguous", &api->is_contiguous);
  find(program, "AOTInductorModelContainerCreateWithDevice", &api->create);
  find(program, "AOTInductorModelContainerDelete", &api->destroy);
  find(program, "AOTInductorModelContainerRun", &api->run);
  find(program, "AOTInductorModelContainerGetNumInputs", &api->count_inputs);
  find(program, "AOTInductorModelContainerGetNumOutputs", &api->count_outputs);
  find(program, "AOTInductorModelContainerGetNumConstants", &api->count_constants);
  find(program, "AOTInductorModelContainerGetConstantName", &api->constant_name);
  find(program, "AOTInductorModelContainerGetConstantOriginalFQN", &api->constant_fqn);
  find(program, "AOTInductorModelContainerUpdateUserManagedConstantBufferPairs", &api->use_constants);
  api->codes = {{NumberType::kFloat32, api->CodeOf("float32")},
                {NumberType::kFloat64, api->CodeOf("float64")},
                {NumberType::kInt32, api->CodeOf("int32")},
                {NumberType::kInt64, api->CodeOf("int64")}};
  return api;
}

}  // namespace

TorchProgram::TorchProgram(const std::string& library, const std::string& torch,
                           const std::vector<TorchWeight>& weights, size_t instances)
    : api_(Find(library, torch)) {
  Check(api_->create(&container_, instances, "cpu", nullptr), "start");
  Check(api_->count_inputs(container_, &inputs_), "count its inputs");
  Check(api_->count_outputs(container_, &outputs_), "count its outputs");
  UseWeights(weights);
}

TorchProgram::~TorchProgram() {
  api_->destroy(container_);
  for (Tensor* const weight : weights_) api_->delete_tensor(weight);
}

void TorchProgram::UseWeights(const std::vector<TorchWeight>& weights) {
  size_t count = 0;
  Check(api_->count_constants(container_, &count), "count its weights");
  std::vector<ConstantEntry> entries;
  for (size_t i = 0; i < count; ++i) {
    const char *name = nullptr, *fqn = nullptr;
    Check(api_->constant_name(container_, i, &name), "name a weight");
    Check(api_->constant_fqn(container_, i, &fqn), "name a weight");
    const auto found =
        std::find_if(weights.begin(), weights.end(), [&](const TorchWeight& one) { return one.name == fqn; });
    if (found == weights.end()) throw Error("a compiled program needs the weight " + std::string(fqn));
    Tensor* tensor = nullptr;
    Check(api_->from_blob(found->data, static_cast<int64_t>(found->shape.size()), found->shape.data(),
                          found->strides.data(), 0, api_->CodeOf(found->type), 0, 0, &tensor),
          "take a weight");
    weights_.push_back(tensor);
    entries.push_back({name, tensor});
  }
  Check(api_->use_constants(container_, entries.data(), entries.size(), false, true), "take its weights");
}

ProgramTensor TorchProgram::New(NumberType type, std::vector<int64_t> shape) const {
  const size_t bytes = BytesOf(type) * static_cast<size_t>(CountOf(shape));
  // Vectors of numbers are loaded from it, faster if none is in two cache lines.
  void* const memory = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
  if (memory == nullptr) throw Error("no memory for a tensor of " + std::to_string(bytes) + " bytes");
  return {type, std::move(shape), memory, {memory, std::free}};
}

std::vector<ProgramTensor> TorchProgram::Call(const std::vector<const ProgramTensor*>& arguments) const {
  if (arguments.size() != inputs_) throw Error("a compiled program has another number of inputs");
  const auto remove = [this](Tensor* tensor) { api_->delete_tensor(tensor); };
  std::vector<std::unique_ptr<Tensor, decltype(remove)>> inputs;
  for (const ProgramTensor* const one : arguments) {
    if (!one->type) throw Error("an input has a type that the front does not read");
    Tensor* tensor = nullptr;
    Check(api_->from_blob(one->data, static_cast<int64_t>(one->shape.size()), one->shape.data(),
                          StridesOf(one->shape).data(), 0, api_->codes.at(*one->type), 0, 0, &tensor),
          "take an input");
    inputs.emplace_back(tensor, remove);
  }
  std::vector<Tensor*> given, returned(outputs_, nullptr);
  for (auto& input : inputs) given.push_back(input.release());  // run() takes them
  Check(api_->run(container_, given.data(), given.size(), returned.data(), returned.size(), nullptr, nullptr),
        "answer it");
  std::vector<std::shared_ptr<void>> owners;
  owners.reserve(returned.size());
  for (Tensor* const tensor : returned) owners.emplace_back(tensor, remove);
  std::vector<ProgramTensor> found;
  for (const std::shared_ptr<void>& owner : owners) {
    ProgramTensor& one = found.emplace_back();
    one.owner = owner;
    int32_t code = 0;
    int64_t dims = 0, *sizes = nullptr;
    bool is_contiguous = false;
    Check(api_->get_dtype(owner.get(), &code), "name an output's type");
    Check(api_->get_dim(owner.get(), &dims), "measure an output");
    Check(api_->get_sizes(owner.get(), &sizes), "measure an output");
    Check(api_->is_contiguous(owner.get(), &is_contiguous), "measure an output");
    Check(api_->get_data(owner.get(), &one.data), "return an output");
    if (!is_contiguous) throw Error("a compiled program returns an output in another order");
    for (const auto& [type, known] : api_->codes)
      if (known == code) one.type = type;
    one.shape.assign(sizes, sizes + dims);
  }
  return found;
}

}  // namespace oe
