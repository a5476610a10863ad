// TensorFlow's C API in the libraries that Python has loaded already: this module neither links nor includes
// it. With the context of Python's TensorFlow, its functions and variables are those that Python sees.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "oe_runtime/core/front/json_tensors.h"

struct TF_Status;
struct TF_Tensor;
struct TFE_Context;
struct TFE_Op;
struct TFE_TensorHandle;

namespace oe {

// Functions of tensorflow/c/c_api.h and tensorflow/c/eager/c_api.h.
struct TensorFlowApi {
  TF_Status* (*new_status)();
  void (*delete_status)(TF_Status*);
  int (*get_code)(const TF_Status*);
  const char* (*message)(const TF_Status*);
  TF_Tensor* (*allocate_tensor)(int type, const int64_t* dims, int count, size_t bytes);
  void (*delete_tensor)(TF_Tensor*);
  void* (*tensor_data)(const TF_Tensor*);
  int (*tensor_type)(const TF_Tensor*);
  int (*num_dims)(const TF_Tensor*);
  int64_t (*dim)(const TF_Tensor*, int);
  TFE_TensorHandle* (*new_handle)(const TF_Tensor*, TF_Status*);
  void (*delete_handle)(TFE_TensorHandle*);
  TF_Tensor* (*resolve)(TFE_TensorHandle*, TF_Status*);
  TFE_Op* (*new_op)(TFE_Context*, const char*, TF_Status*);
  void (*delete_op)(TFE_Op*);
  void (*add_input)(TFE_Op*, TFE_TensorHandle*, TF_Status*);
  void (*set_attr_string)(TFE_Op*, const char*, const void*, size_t);
  void (*execute)(TFE_Op*, TFE_TensorHandle**, int*, TF_Status*);
};

// Throws Error where the library is not loaded, or lacks a function.
TensorFlowApi FindTensorFlow(const std::string& library);

class TensorFlowTensor {
 public:
  TensorFlowTensor(const TensorFlowApi* api, TF_Tensor* tensor)
      : tensor_(tensor, api->delete_tensor), api_(api) {}
  static TensorFlowTensor New(const TensorFlowApi* api, NumberType type, const std::vector<int64_t>& shape);

  TF_Tensor* get() const { return tensor_.get(); }
  void* data() const { return api_->tensor_data(tensor_.get()); }
  std::vector<int64_t> shape() const;
  // Whether its values are of this type.
  bool Is(NumberType type) const;

 private:
  std::unique_ptr<TF_Tensor, void (*)(TF_Tensor*)> tensor_;
  const TensorFlowApi* api_;
};

// A function of the context, with the tensors that it has beside its arguments: variables, as handles of
// others.
class TensorFlowFunction {
 public:
  TensorFlowFunction(std::string name, std::vector<TFE_TensorHandle*> captured, size_t outputs)
      : name_(std::move(name)), captured_(std::move(captured)), outputs_(outputs) {}

  // Thread-safe. The first call is alone, because TensorFlow compiles the function in each that comes before
  // its end, for seconds. Throws Error with TensorFlow's message.
  std::vector<TensorFlowTensor> Call(const TensorFlowApi* api, TFE_Context* context,
                                     const std::vector<TF_Tensor*>& arguments) const;

 private:
  const std::string name_;
  const std::vector<TFE_TensorHandle*> captured_;
  const size_t outputs_;
  mutable std::mutex first_;
  mutable std::atomic<bool> is_compiled_{false};
};

}  // namespace oe
