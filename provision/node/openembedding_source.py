"""OpenEmbedding's package built on the host from its sources, with persistent memory.

As its documents have it (documents/en/pmem.md, "Build", and docker/Dockerfile.base): what its network layer
needs goes to ``tools`` beside the sources, PMDK 1.9 and libpmemobj++ 1.10 or newer too where the system's are
older, and ``USE_PMEM=1 ./build.sh build`` makes an archive for pip. All comes from the projects themselves.
"""

import os

PACKAGE = "source"  # what runtime_package says
VERSION = "0.1.2"
_PMDK = ("https://github.com/pmem/pmdk.git", "1.12.1")
_CPP = ("https://github.com/pmem/libpmemobj-cpp.git", "1.13.0")
_PARTS = (
    "gflags glog googletest sparsehash zlib snappy lz4 boost yaml jemalloc prometheus-cpp avro-cpp zookeeper "
    "protobuf leveldb openssl brpc eigen"
)
_SCRIPT = """\
cd {sources}
git submodule update --init --checkout --recursive
export prefix=$PWD/tools THIRD_PARTY=$PWD/tools
export PKG_CONFIG_PATH=$prefix/lib64/pkgconfig:$prefix/lib/pkgconfig
export LIBRARY_PATH=$prefix/lib64:$prefix/lib CPLUS_INCLUDE_PATH=$prefix/include
(cd pico-ps/pico-core && third_party/prepare.sh build {parts})
if ! pkg-config --atleast-version=1.9 libpmem || ! pkg-config --atleast-version=1.9 libpmemobj; then
  rm -rf tools/pmdk
  git clone --depth 1 --branch {pmdk[1]} {pmdk[0]} tools/pmdk
  make -C tools/pmdk -j "$(nproc)" NDCTL_ENABLE=n DOC=n prefix=$prefix install
fi
if ! pkg-config --atleast-version=1.10 libpmemobj++; then
  rm -rf tools/libpmemobj-cpp
  git clone --depth 1 --branch {cpp[1]} {cpp[0]} tools/libpmemobj-cpp
  options=
  for each in TESTS EXAMPLES DOC BENCHMARKS; do options="$options -DBUILD_$each=OFF"; done
  cmake -S tools/libpmemobj-cpp -B tools/libpmemobj-cpp/build -DCMAKE_INSTALL_PREFIX=$prefix $options
  make -C tools/libpmemobj-cpp/build install
fi
./build.sh clean
USE_PMEM=1 SKIP_CHECK_WHEEL_SETUP=1 VERSION={version} PYTHON={python} ./build.sh build
"""


def script(sources: str, python: str) -> str:
    """What bash runs; ``python`` is the environment's, which has pybind11."""
    return _SCRIPT.format(sources=sources, python=python, version=VERSION, parts=_PARTS, pmdk=_PMDK, cpp=_CPP)


def archive(sources: str) -> str:
    """The archive that the build makes."""
    return os.path.join(sources, "build", "pypi", "dist", "openembedding-{}.tar.gz".format(VERSION))
