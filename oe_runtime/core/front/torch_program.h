// A program that PyTorch's AOTInductor compiled, by the C functions of its library and of the libtorch that
// Python has loaded already: this module neither links nor includes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "oe_runtime/core/front/program.h"

namespace oe {

// A weight of a program, in memory of Python's PyTorch.
struct TorchWeight {
  std::string name;  // as torch.export has it
  std::string type;  // of PyTorch, without "torch."
  void* data = nullptr;
  std::vector<int64_t> shape, strides;
};

struct TorchApi;

class TorchProgram : public Program {
 public:
  // `library` is the compiled program; `torch`, libtorch_cpu.so, must be loaded. `weights` must outlive it,
  // and whoever changes them must not do so during Call(). As many calls compute at a time as `instances`;
  // others wait. Throws Error naming what is missing.
  TorchProgram(const std::string& library, const std::string& torch, const std::vector<TorchWeight>& weights,
               size_t instances);
  ~TorchProgram() override;

  ProgramTensor New(NumberType type, std::vector<int64_t> shape) const override;
  std::vector<ProgramTensor> Call(const std::vector<const ProgramTensor*>& arguments) const override;

 private:
  void UseWeights(const std::vector<TorchWeight>& weights);

  const std::unique_ptr<const TorchApi> api_;
  void* container_ = nullptr;
  size_t inputs_ = 0, outputs_ = 0;
  std::vector<void*> weights_;  // tensors of libtorch
};

}  // namespace oe
