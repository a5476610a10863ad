#!/usr/bin/env bash
# Run ansible-test sanity on the collection, in a temporary directory. Options go to `ansible-test sanity`.
# tests/sanity/ignore.txt lists the exceptions with their reasons, ignore-VERSION.txt those of one ansible-core. Also:
# - provision and oe_runtime are no plugins: ruff and mypy check them. What modules import of them, provision/node,
#   stands here where modules find it, in plugins/module_utils.
# - Without options pylint leaves node out: it forbids print, sys.exit and `_` in modules, and node is a program too.
# ansible-test installs its tools with pip, which it downloads from its own server.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$(realpath "${VENV:-.venv}")/bin:$PATH
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
ansible-galaxy collection build --output-path "$scratch" . >/dev/null
ANSIBLE_COLLECTIONS_PATH=$scratch ansible-galaxy collection install --offline -p "$scratch" "$scratch"/*.tar.gz >/dev/null
version=$(python -c 'from ansible.release import __version__; print(*__version__.split(".")[:2], sep=".")')
collection=$scratch/ansible_collections/oeprov/oeprov
mkdir -p "$collection/tests/sanity"
cp tests/config.yml "$collection/tests/"
for list in ignore "ignore-$version"; do
  [ ! -e "tests/sanity/$list.txt" ] || cat "tests/sanity/$list.txt" >>"$collection/tests/sanity/ignore-$version.txt"
done
cd "$collection"
rm plugins/module_utils/node
mv provision/node plugins/module_utils/
rm -r provision oe_runtime
if [ $# -gt 0 ]; then
  ansible-test sanity "$@"
else
  ansible-test sanity --skip-test pylint
  ansible-test sanity --test pylint --exclude plugins/module_utils/node/
fi
