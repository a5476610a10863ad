#!/usr/bin/env bash
# clang-tidy over the C++ sources of the core; only tests are left out. $1: a build folder with compile_commands.json
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files 'oe_runtime/core/*.cc' ':!*_test.cc' ':!oe_runtime/core/bindings/*' |
  xargs -P "$(nproc)" -n 1 "${VENV:-.venv}/bin/clang-tidy" --quiet -p "$1"
