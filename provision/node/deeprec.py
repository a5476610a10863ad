"""DeepRec as it is: its wheel, built in its developer image as documented, and its model zoo's scripts.

The build is that of docs/docs_zh/Embedding-on-PMEM.md of its repository: memkind from source, libpmem,
``./configure`` with persistent memory, and bazel with the flags of fsdax or of KMEM DAX.
"""

import hashlib
import os
import re
from typing import Any, Dict, List

from . import families, foreign, numa, registry, repositories
from .build import run_logged
from .command import CommandError, System
from .packages import apply as install_packages
from .state import OsInfo, Runtime, State, decode
from .step import Desired, Step

IMAGE = "registry.cn-shanghai.aliyuncs.com/pai-dlc-share/deeprec-developer:deeprec-dev-cpu-py36-ubuntu18.04"
REPOSITORY = "https://github.com/DeepRec-AI/DeepRec.git"
MEMKIND = "https://github.com/memkind/memkind.git"
REVISION = "deeprec2402"  # its last release
SCRIPT = "modelzoo/dlrm/train.py"
# Libraries of its storage, by the use of persistent memory.
_LINKED = {"fsdax": "--copt=-lpmem --copt=-lmemkind", "kmem": "--copt=-lmemkind"}
# For bash in the container. TF_ENABLE_PMEM answers "Do you wish to build TensorFlow with PMEM support?", and
# other questions get their defaults.
_SCRIPT = """\
apt-get update
apt-get install -y libpmem-dev gzip numactl gdb autoconf
pip install pandas numpy==1.16.0
cd /work/memkind
./autogen.sh
./configure
make -j
make install
cd /work/DeepRec
export LD_LIBRARY_PATH=/usr/local/lib:$LD_LIBRARY_PATH
{nodes}export TF_ENABLE_PMEM=1
yes '' | ./configure
bazel build --cxxopt=-D_GLIBCXX_USE_CXX11_ABI=0 --host_cxxopt=-D_GLIBCXX_USE_CXX11_ABI=0 -c opt \
--copt=-L/usr/local/lib {linked} --config=opt //tensorflow/tools/pip_package:build_pip_package
./bazel-bin/tensorflow/tools/pip_package/build_pip_package /work/wheels"""
# N of the image's C library 2.N; programs run on the same or a newer one.
_IMAGES = {"ubuntu18.04": 27, "ubuntu20.04": 31, "ubuntu22.04": 35}
_HOURS = 6 * 3600


def memory(desired: Desired) -> str:
    """The build that the host needs: that for fsdax also serves DRAM."""
    return "kmem" if desired.pmem_mode == "system-ram" else "fsdax"


def image_of(desired: Desired) -> str:
    """The developer image."""
    return desired.runtime_image or IMAGE


def python_in(image: str) -> str:
    """``3.6`` of an image with ``py36`` in its name; empty for others."""
    match = re.search(r"py(\d)(\d+)", image)
    return f"{match.group(1)}.{match.group(2)}" if match else ""


def build_name(desired: Desired) -> str:
    """The name of the wheel's build; see ``build.py``."""
    inputs = [repository(desired), revision(desired), image_of(desired), memory(desired), MEMKIND]
    digest = hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]
    plain = re.sub(r"[^\w.]+", "_", revision(desired))
    return f"deeprec-{plain}-{memory(desired)}-{digest}"


def repository(desired: Desired) -> str:
    """The repository of its sources."""
    return desired.runtime_repository or REPOSITORY


def revision(desired: Desired) -> str:
    """The revision of its sources."""
    return desired.runtime_revision or REVISION


def wanted(desired: Desired) -> foreign.Wanted:
    """The environment of this host."""
    build = "" if desired.runtime_package else build_name(desired)
    return foreign.Wanted(
        title=f"DeepRec ({desired.runtime_package or revision(desired)})",
        requirements=["tensorflow<2"],
        package=desired.runtime_package or build,
        pip=[["--upgrade", "pip", "setuptools<60", "wheel"], ["pandas", foreign.WHEEL]],
        check=["-c", "import tensorflow"],
        repository=repository(desired),
        revision=revision(desired),
        folders=["modelzoo"],
        script=SCRIPT,
        build=build,
    )


def observe(system: System, os_info: OsInfo, desired: Desired) -> Runtime:
    """Observe the environment, the sources, and whether a needed image is available."""
    found = foreign.look(system, os_info, desired, wanted(desired))
    if (found.exists and not found.unfinished) or desired.runtime_package or not desired.runtime_image_check:
        return found
    return found._replace(image=missing_image(system, image_of(desired)))


def missing_image(system: System, image: str) -> str:
    """Why the image is not available; empty if it is."""
    if not system.which("docker"):
        return registry.missing(image)
    if system.run(["docker", "image", "inspect", image]).ok:
        return ""
    asked = system.run(["docker", "manifest", "inspect", image], timeout=60)
    return "" if asked.ok else asked.explain()


def plan(state: State, desired: Desired) -> List[Step]:
    """Steps for the environment and the scripts."""
    return foreign.plan(state, desired, wanted(desired))


def problems(state: State, desired: Desired) -> List[str]:
    """Why DeepRec cannot run on this host, and what would."""
    found = foreign.problems(state, desired, wanted(desired))
    if state.runtime.exists and not state.runtime.made:
        return found
    image, python = image_of(desired), foreign.version_of(state, desired)
    right = python_in(desired.runtime_package or image)
    if python and right and python != right:
        found.append(
            f"runtime_python {desired.runtime_python} is Python {python}, and DeepRec's wheel is for "
            f"{right}: set runtime_python to the path of a Python {right}, or runtime_image to a "
            f"developer image with py{python.replace('.', '')}"
        )
    own = families.glibc(state.os)
    needed = next((version for name, version in _IMAGES.items() if name in image), 0)
    if 0 < own < needed and not desired.runtime_package:
        found.append(
            f"{families.title(state.os)} has C library 2.{own}, and what is built in {image} wants "
            f"2.{needed}: use a newer system or an older runtime_image, or name a wheel for this one as "
            "runtime_package"
        )
    if state.runtime.image:
        found.append(
            f"runtime_image {image}: is not available ({state.runtime.image}): name an image that the "
            "registry has, or a wheel as runtime_package; runtime_image_check: false skips this check"
        )
    return found


def notes(state: State, desired: Desired) -> List[str]:
    """Notes on the build."""
    if desired.runtime_package or (state.runtime.exists and state.runtime.wheel == build_name(desired)):
        return []
    return [
        f"DeepRec's wheel is built once, on one of the hosts, in a container of {image_of(desired)}: that "
        "takes an hour and more, and 20 GB"
    ]


def commands(desired: Desired, into: str, nodes: List[int]) -> List[List[str]]:
    """The commands of the build below ``into``; ``nodes`` are the host's memory nodes without CPUs."""
    image, source = image_of(desired), os.path.join(into, "DeepRec")
    mounts = ["-v", into + ":/work"]
    if desired.pmem_mode == "fsdax":
        mount = desired.pmem_mount_prefix + "0"
        mounts += ["-v", f"{mount}:{mount}"]
    return [
        ["docker", "pull", image],
        ["git", "clone", repository(desired), source],
        ["git", "-C", source, "checkout", revision(desired)],
        ["git", "clone", MEMKIND, os.path.join(into, "memkind")],
        ["docker", "run", "--rm", "--privileged"]
        + mounts
        + [image, "/bin/bash", "-ec", script(desired, nodes)],
    ]


def script(desired: Desired, nodes: List[int]) -> str:
    """The script for the container."""
    kmem = memory(desired) == "kmem" and nodes
    known = "export MEMKIND_DAX_KMEM_NODES=" + ",".join(map(str, nodes)) + "\n" if kmem else ""
    return _SCRIPT.format(nodes=known, linked=_LINKED[memory(desired)])


def make(system: System, os_info: OsInfo, args: Dict[str, Any]) -> str:
    """Build the wheel on this host and return its path; ``args``: ``into`` and ``desired``."""
    desired, into = decode(Desired, args["desired"]), args["into"]
    needs = ["git"] + ([] if system.which("docker") else ["containers"])
    names = [name for need in needs for name in families.names(os_info, need)]
    use = repositories.use(os_info, desired.runtime_repositories, [])
    install_packages(system, os_info.package_manager, names, use)
    why = missing_image(system, image_of(desired)) if desired.runtime_image_check else ""
    if why:
        raise CommandError(f"runtime_image {image_of(desired)}: is not available ({why})")
    nodes = [node.id for node in numa.without_cpus(numa.observe_nodes(system))]
    run_logged(system, commands(desired, into, nodes), into, _HOURS, {})
    wheels = os.path.join(into, "wheels")
    found = [name for name in system.list(wheels) if name.endswith(".whl")]
    if not found:
        raise CommandError(f"the build succeeded, but {wheels} has no wheel")
    return os.path.join(wheels, found[0])
