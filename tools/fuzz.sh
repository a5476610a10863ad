#!/usr/bin/env bash
# Runs libFuzzer on every parser of what comes from outside, for $1 seconds each; what it finds it writes to
# build/fuzz/found/, and what it learned stays in build/fuzz/corpus/ for the next time.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
build=build/fuzz

cmake -G Ninja -S . -B "$build" -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ -DOE_BUILD_PYTHON=OFF \
  -DCMAKE_BUILD_TYPE=Sanitize -DOE_SANITIZE=address,undefined -DOE_FUZZ=ON >/dev/null
cmake --build "$build"
for seeds in tests/fuzz/corpus/*/; do
  name=$(basename "$seeds")
  mkdir -p "$build/corpus/$name" "$build/found"
  echo "fuzz: $name, $seconds s"
  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 "$build/oe_runtime/core/fuzz_$name" -max_total_time="$seconds" \
    -max_len=65536 -rss_limit_mb=4096 -timeout=20 -print_final_stats=1 -verbosity=0 \
    -artifact_prefix="$build/found/$name-" "$build/corpus/$name" "$seeds"
done
