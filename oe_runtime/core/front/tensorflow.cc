#include "oe_runtime/core/front/tensorflow.h"

#include <dlfcn.h>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

// As TF_DataType counts them.
int CodeOf(NumberType type) {
  switch (type) {
    case NumberType::kFloat32:
      return 1;
    case NumberType::kFloat64:
      return 2;
    case NumberType::kInt32:
      return 3;
    case NumberType::kInt64:
      return 9;
  }
  return 0;
}

std::optional<NumberType> TypeOf(int code) {
  for (const NumberType type :
       {NumberType::kFloat32, NumberType::kFloat64, NumberType::kInt32, NumberType::kInt64})
    if (CodeOf(type) == code) return type;
  return std::nullopt;
}

class Status {
 public:
  explicit Status(const TensorFlowApi* api) : api_(api), status_(api->new_status(), api->delete_status) {}
  TF_Status* get() const { return status_.get(); }
  void Check() const {
    if (api_->get_code(status_.get()) != 0) throw Error(api_->message(status_.get()));
  }

 private:
  const TensorFlowApi* api_;
  std::unique_ptr<TF_Status, void (*)(TF_Status*)> status_;
};

}  // namespace

TensorFlowApi FindTensorFlow(const std::string& library) {
  void* const found = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (found == nullptr) throw Error(library + " is not loaded");
  TensorFlowApi api{};
  const auto find = [&](const char* name, auto* function) {
    *reinterpret_cast<void**>(function) = dlsym(found, name);
    if (*function == nullptr) throw Error(library + " has no " + name);
  };
  find("TF_NewStatus", &api.new_status);
  find("TF_DeleteStatus", &api.delete_status);
  find("TF_GetCode", &api.get_code);
  find("TF_Message", &api.message);
  find("TF_AllocateTensor", &api.allocate_tensor);
  find("TF_DeleteTensor", &api.delete_tensor);
  find("TF_TensorData", &api.tensor_data);
  find("TF_TensorType", &api.tensor_type);
  find("TF_NumDims", &api.num_dims);
  find("TF_Dim", &api.dim);
  find("TFE_NewTensorHandle", &api.new_handle);
  find("TFE_DeleteTensorHandle", &api.delete_handle);
  find("TFE_TensorHandleResolve", &api.resolve);
  find("TFE_NewOp", &api.new_op);
  find("TFE_DeleteOp", &api.delete_op);
  find("TFE_OpAddInput", &api.add_input);
  find("TFE_OpSetAttrString", &api.set_attr_string);
  find("TFE_Execute", &api.execute);
  return api;
}

ProgramTensor TensorFlowFunction::New(NumberType type, std::vector<int64_t> shape) const {
  const size_t bytes = BytesOf(type) * static_cast<size_t>(CountOf(shape));
  TF_Tensor* const tensor =
      api_.allocate_tensor(CodeOf(type), shape.data(), static_cast<int>(shape.size()), bytes);
  if (tensor == nullptr) throw Error("TensorFlow has no memory for a tensor");
  return {type, std::move(shape), api_.tensor_data(tensor), {tensor, api_.delete_tensor}};
}

std::vector<ProgramTensor> TensorFlowFunction::Call(
    const std::vector<const ProgramTensor*>& arguments) const {
  using Handle = std::unique_ptr<TFE_TensorHandle, void (*)(TFE_TensorHandle*)>;
  const Status status(&api_);
  const std::unique_ptr<TFE_Op, void (*)(TFE_Op*)> op(api_.new_op(context_, name_.c_str(), status.get()),
                                                      api_.delete_op);
  status.Check();
  for (const ProgramTensor* const argument : arguments) {
    auto* const tensor = static_cast<const TF_Tensor*>(argument->owner.get());
    const Handle handle(api_.new_handle(tensor, status.get()), api_.delete_handle);
    status.Check();
    api_.add_input(op.get(), handle.get(), status.get());
    status.Check();
  }
  for (TFE_TensorHandle* const handle : captured_) {
    api_.add_input(op.get(), handle, status.get());
    status.Check();
  }
  // A request's threads are enough; TensorFlow's own would cost more than they give.
  const std::string executor = "SINGLE_THREADED_EXECUTOR";
  api_.set_attr_string(op.get(), "executor_type", executor.data(), executor.size());
  api_.set_attr_string(op.get(), "config_proto", "", 0);
  std::vector<TFE_TensorHandle*> returned(outputs_, nullptr);
  int count = static_cast<int>(outputs_);
  std::unique_lock<std::mutex> first(first_, std::defer_lock);
  if (!is_compiled_) first.lock();
  api_.execute(op.get(), returned.data(), &count, status.get());
  is_compiled_ = true;
  if (first) first.unlock();
  status.Check();
  std::vector<Handle> handles;
  handles.reserve(returned.size());
  for (TFE_TensorHandle* const handle : returned) handles.emplace_back(handle, api_.delete_handle);
  std::vector<ProgramTensor> found;
  for (const Handle& handle : handles) {
    TF_Tensor* const tensor = api_.resolve(handle.get(), status.get());
    status.Check();
    const std::shared_ptr<void> owner(tensor, api_.delete_tensor);
    std::vector<int64_t> shape(static_cast<size_t>(api_.num_dims(tensor)));
    for (size_t i = 0; i < shape.size(); ++i) shape[i] = api_.dim(tensor, static_cast<int>(i));
    found.push_back({TypeOf(api_.tensor_type(tensor)), std::move(shape), api_.tensor_data(tensor), owner});
  }
  return found;
}

}  // namespace oe
