// libFuzzer's entry into one target, which OE_FUZZ_TARGET names.
#include "tests/fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  oe::OE_FUZZ_TARGET(data, size);
  return 0;
}
