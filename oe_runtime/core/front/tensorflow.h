// TensorFlow's C API in the libraries that Python has loaded already: this module neither links nor includes
// it. With the context of Python's TensorFlow, its functions and variables are those that Python sees.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "oe_runtime/core/front/program.h"

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

// A function of the context, with the tensors that it has beside its arguments: variables, as handles of
// others.
class TensorFlowFunction : public Program {
 public:
  TensorFlowFunction(const TensorFlowApi& api, TFE_Context* context, std::string name,
                     std::vector<TFE_TensorHandle*> captured, size_t outputs)
      : api_(api),
        context_(context),
        name_(std::move(name)),
        captured_(std::move(captured)),
        outputs_(outputs) {}

  ProgramTensor New(NumberType type, std::vector<int64_t> shape) const override;
  // The first call is alone, because TensorFlow compiles the function in each that comes before its end, for
  // seconds. Arguments must not share memory.
  std::vector<ProgramTensor> Call(const std::vector<const ProgramTensor*>& arguments) const override;

 private:
  const TensorFlowApi api_;
  TFE_Context* const context_;
  const std::string name_;
  const std::vector<TFE_TensorHandle*> captured_;
  const size_t outputs_;
  mutable std::mutex first_;
  mutable std::atomic<bool> is_compiled_{false};
};

}  // namespace oe
