#!/usr/bin/env bash
# clang-tidy over the C++ sources of the core, but for tests and the Python bindings.
# $1: a build folder with compile_commands.json
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files 'oe_runtime/core/*.cc' | grep -v -e '_test\.cc$' -e '/bindings/' -e '/bench/' -e '/fuzz_main' |
  xargs -P "$(nproc)" -n 1 "${VENV:-.venv}/bin/clang-tidy" --quiet -p "$1"
