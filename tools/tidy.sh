#!/usr/bin/env bash
# clang-tidy over the C++ sources of the core and of the simulation, except tests, benchmarks and the Python bindings.
# $1: a build folder with compile_commands.json
# TIDY_NODES: states that the analyzer explores per function. Its own default is 225000.
# The analyzer does not follow calls into xxhash: it reports an overflow there that cannot happen.
set -euo pipefail
cd "$(dirname "$0")/.."
nodes=${TIDY_NODES:-25000}
git ls-files 'oe_runtime/core/*.cc' 'tests/fuzz/*.cc' 'tests/simulation/*.cc' | grep -v -e '_test\.cc$' -e '/bindings/' -e '/fuzz_main' |
  xargs -P "$(nproc)" -n 1 "${VENV:-.venv}/bin/clang-tidy" --quiet -p "$1" \
    --extra-arg={-UXXH_INLINE_ALL,-DXXH_STATIC_LINKING_ONLY} \
    --extra-arg={-Xclang,-analyzer-config,-Xclang,max-nodes="$nodes"}
