#!/usr/bin/env bash
# Brings a fresh Debian or Ubuntu machine to where this checkout builds and runs.
#   tools/setup.sh run    what `oeprov` needs: system packages, .venv, the C++ core built into it
#   tools/setup.sh demo   the same, and TensorFlow
#   tools/setup.sh test   the same, and what the tests need (pytest and others)
#   tools/setup.sh lint   the same, the linters and what builds the documentation site
#   tools/setup.sh clang  what `run` has, and clang with its sanitizers and libFuzzer
# Does nothing (in well under a second) where all is there already.
# Python packages are those that constraints/ names, with their SHA-256. OEPROV_UNLOCKED=1 takes whatever versions the
# index has that pyproject.toml allows.
set -euo pipefail
cd "$(dirname "$0")/.."
profile=${1:-run}
venv=${VENV:-.venv}
python=${PYTHON:-python3}

packages=(
  python3 python3-venv python3-dev build-essential pkg-config cmake ninja-build
  openssh-client libpmem-dev libasio-dev libssl-dev libzstd-dev nlohmann-json3-dev libxxhash-dev
  liburing-dev libgtest-dev
)
[ "$profile" != lint ] || packages+=(git)
# For the dashboard's tests in a real browser, which are skipped elsewhere: Ubuntu's chromium is a snap.
[ "$profile" != test ] || ! grep -qx 'ID=debian' /etc/os-release || packages+=(chromium chromium-driver)
[ "$profile" != clang ] || packages+=(clang libclang-rt-dev)

fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

missing=()
for p in "${packages[@]}"; do
  dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null | grep -qx installed || missing+=("$p")
done
if [ ${#missing[@]} -gt 0 ]; then
  command -v apt-get >/dev/null || fail "this is not Debian or Ubuntu; install the counterparts of: ${missing[*]}"
  sudo=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || fail "system packages are missing and there is no sudo; as root: apt-get install ${missing[*]}"
    sudo=(sudo)
  fi
  echo "setup: installing system packages: ${missing[*]}"
  "${sudo[@]}" apt-get update -qq
  # For tables on memory nodes; Debian 13 has none.
  [ -z "$(apt-cache madison libmemkind0)" ] || missing+=(libmemkind0)
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  fail "$("$python" --version) is too old; Python 3.10 or newer is needed (PYTHON=/path/to/python3 make …)"

if ! "$venv/bin/python" -c '' 2>/dev/null; then
  echo "setup: creating $venv"
  "$python" -m venv --clear "$venv"
fi

# Each profile holds the ones before it.
case $profile in
  run | clang) extras='' locks='run' enough='run clang demo test lint' ;;
  demo) extras='[tensorflow]' locks='run demo' enough='demo test lint' ;;
  test) extras='[tensorflow,test]' locks='run demo test' enough='test lint' ;;
  lint) extras='[tensorflow,test,lint,docs]' locks='run demo test lint' enough='lint' ;;
  *) fail "unknown profile '$profile' (run, demo, test, lint, clang)" ;;
esac
unlocked=${OEPROV_UNLOCKED:-}
if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 14))'; then
  unlocked=1 # [tool.uv] in pyproject.toml: constraints/ has no versions for it
fi

# One stamp a profile, holding the digest of everything that is compiled or decides what is installed: also which
# packages of Python there are, since an editable installation knows them by a list.
digest=$( { echo "$PWD $unlocked"; find oe_runtime/core -type f \( -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt \) -print0 | sort -z |
  xargs -0 sha256sum; find provision oe_runtime -name __init__.py | sort; sha256sum CMakeLists.txt pyproject.toml tools/setup.sh constraints/*.txt; } | sha256sum | cut -d' ' -f1)
for p in $enough; do
  [ "$(cat "$venv/.setup-$p" 2>/dev/null)" != "$digest" ] || exit 0
done
echo "setup: building and installing into $venv (profile $profile)"
pip() { "$venv/bin/pip" install -q --no-build-isolation "$@"; }
# Pinned files only, but from whichever index pip is set up for.
locked() {
  pip --require-hashes "$@" ||
    fail "could not install what constraints/ pins (above); to take what your index has: OEPROV_UNLOCKED=1 make …"
}
if [ -n "$unlocked" ]; then
  # setuptools and wheel: what builds those dependencies that PyPI has as sources only.
  pip 'scikit-build-core>=0.10' 'pybind11>=2.12' setuptools wheel
  pip -e ".$extras"
else
  locked -r constraints/build.txt
  files=()
  for lock in $locks; do files+=(-r "constraints/$lock.txt"); done
  locked "${files[@]}"
  pip --no-deps -e .
fi
# Without what they depend on: tensorflow would put the same files a second time over those of tensorflow-cpu, and
# DeepCTR pins an h5py that Keras 3 cannot use.
case $profile:$unlocked in
  test: | lint:) locked --no-deps -r constraints/no-deps.txt ;;
  test:* | lint:*)
    version=$("$venv/bin/pip" list --format=freeze | sed -nE 's/^tensorflow([-_]cpu)?==([0-9]+\.[0-9]+).*/\2/p')
    pip --no-deps tensorflow-serving-api "tf-keras==$version.*" deepctr==0.9.4
    ;;
esac
echo "$digest" >"$venv/.setup-$profile"
