"""Incompatible versions on a GPU host, found before anything is installed, with compatible ones."""

from typing import List

from . import cuda, families, gpu, gpucheck, gpufabric, platforms
from .state import State
from .step import Desired

_APT_LINE = (
    "deb [signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg] "
    "https://developer.download.nvidia.com/compute/cuda/repos/{}/x86_64/ /"
)


def problems(state: State, desired: Desired) -> List[str]:
    """Why the host cannot train on its GPUs with these settings."""
    if not platforms.get(desired.kind).has_gpus:
        return []
    if not state.gpu.devices:
        return ["kind gpu, but there is no NVIDIA device on the PCI bus; correct oeprov_kind (cpu?)"]
    found = _branch_problems(state, desired) + _secure_boot(state, desired)
    bounds = gpucheck.bounds_of(state, desired)
    if bounds is None:
        return found
    build, python = gpucheck.build(state, desired), gpucheck.python_of(state, desired)
    if build is None:
        there = [item for item in cuda.BUILDS if cuda.allowed(item, bounds)]
        newer = cuda.numbers(python)[:2] > cuda.numbers(cuda.BUILDS[-1].last_python)
        if there and not (newer and there[-1] == cuda.BUILDS[-1]):  # one newer than the table may have it
            found.append(
                f"TensorFlow {_span(there)} has no build for Python {python}: set runtime_python to a Python "
                f"{there[0].first_python} to {there[-1].last_python}"
            )
        return found
    return (
        found
        + _driver(state, desired, build)
        + _architecture(state, build)
        + _libraries(state, desired, build)
    )


def _span(builds: List[cuda.Build]) -> str:
    first, last = builds[0].tensorflow, builds[-1].tensorflow
    return first if first == last else f"{first} to {last}"


def _branch_problems(state: State, desired: Desired) -> List[str]:
    """The wanted branch is not available, or does not support the GPU."""
    where, newest = gpu.source(state, desired)
    if where is None or not desired.gpu_driver:
        return []
    found, family = [], families.find(state.os)
    if desired.gpu_driver.isdigit() and not where.proprietary.branch:
        found.append(
            "gpu_driver {}: {} has one driver branch only{}; use newest, or {}".format(
                desired.gpu_driver,
                family.name if family else "this system",
                f" ({newest})" if newest else "",
                _vendor(state),
            )
        )
    branch, last = gpu.branch_of(state, desired), gpu.last_branch(state)
    if branch and last and int(branch) > int(last):
        found.append(
            f"gpu_driver {desired.gpu_driver}: {_ended(state, last)} GPUs are driven up to branch {last} "
            f'only; set gpu_driver: "{last}"'
        )
    return found


def _ended(state: State, last: str) -> str:
    return ", ".join(item.name for item in cuda.architectures(state.gpu.ids) if item.last_driver == last)


def _vendor(state: State) -> str:
    """How to use NVIDIA's own repository."""
    name = state.os.id + state.os.version.replace(".", "")
    return (
        f"NVIDIA's repository (its key in place, runtime_repositories: {{{gpu.REPOSITORY}: "
        f"{_APT_LINE.format(name)!r}}})"
    )


def _secure_boot(state: State, desired: Desired) -> List[str]:
    """Modules that are built on the host have a signature that the firmware does not know."""
    at_stake = gpu.changes(state, desired) or (state.gpu.installed and not state.gpu.driver)
    if (
        not (state.kernel.secure_boot and at_stake and gpu.builds_modules(state, desired))
        or state.gpu.key_enrolled
    ):
        return []
    return [
        "Secure Boot is on, and the driver's kernel modules are built on the host: the firmware must know "
        "their key first (mokutil --import /var/lib/dkms/mok.pub, a reboot at the console), or turn Secure "
        "Boot off; a driver that is signed already, as in a vendor's image, works with gpu_driver: keep"
    ]


def _driver(state: State, desired: Desired, build: cuda.Build) -> List[str]:
    """The driver is too old for TensorFlow or for the GPU."""
    version = gpu.will_run(state, desired)
    if not version:
        return []
    least, what = build.driver, f"TensorFlow {build.tensorflow} (CUDA {build.cuda})"
    for item in cuda.architectures(state.gpu.ids):
        if cuda.numbers(item.driver) > cuda.numbers(least):
            least, what = item.driver, item.name + " GPUs"
    if _reaches(version, least):
        return []
    return [
        f"NVIDIA driver {version} is too old for {what}; the oldest for that is {least}: "
        f"{_newer(state, desired, least, version)}"
    ]


def _reaches(version: str, least: str) -> bool:
    """The version is at least ``least``; a whole branch counts as its newest release."""
    mine, needed = cuda.numbers(version), cuda.numbers(least)
    return mine[0] >= needed[0] if len(mine) == 1 else mine >= needed


def _newer(state: State, desired: Desired, least: str, version: str) -> str:
    """What would work instead."""
    last, (where, newest) = gpu.last_branch(state), gpu.source(state, desired)
    if last and not _reaches(last, least):
        fit = [item for item in cuda.BUILDS if _reaches(last, item.driver)]
        return (
            f"{_ended(state, last)} GPUs have no newer driver; the newest TensorFlow for them is "
            f"{fit[-1].tensorflow}, on Python {fit[-1].first_python} to {fit[-1].last_python}"
        )
    if where is not None and newest and not _reaches(newest, least):
        family = families.find(state.os)
        if state.os.package_manager == "apt":
            return "{}'s own is of branch {}; take {} and gpu_driver: newest".format(
                family.name if family else "this system", newest, _vendor(state)
            )
        return (
            f"{families.title(state.os)} has none newer than branch {newest}; take a newer release of the "
            "system"
        )
    bounds = gpucheck.bounds_of(state, desired) or []
    fit = cuda.candidates(bounds, gpucheck.python_of(state, desired))
    usable = [item for item in fit if _reaches(version, item.driver) and item.driver != least]
    if any(cuda.numbers(item.driver) > cuda.numbers(version) for item in cuda.architectures(state.gpu.ids)):
        usable = []  # it is the GPU that the driver does not know
    other = f", or TensorFlow {usable[-1].tensorflow}" if usable else ""
    return "set gpu_driver: newest" + other


def _architecture(state: State, build: cuda.Build) -> List[str]:
    """GPUs newer than this CUDA; within a major version its code is compiled for them at first use."""
    return [
        f"TensorFlow {build.tensorflow} uses CUDA {build.cuda}, without code for {item.name} GPUs (from CUDA "
        f"{item.cuda} on): take {_first_for(item)} or newer"
        for item in cuda.architectures(state.gpu.ids)
        if cuda.numbers(item.cuda)[0] > cuda.numbers(build.cuda)[0]
    ]


def _first_for(item: cuda.Architecture) -> str:
    major = cuda.numbers(item.cuda)[0]
    return next(row.tensorflow for row in cuda.BUILDS if cuda.numbers(row.cuda)[0] >= major)


def _libraries(state: State, desired: Desired, build: cuda.Build) -> List[str]:
    """CUDA must be on the host if no wheel brings it."""
    coming = any(name.startswith(cuda.PACKAGES) for name in desired.runtime_packages)
    if build.wheels or build.cuda in state.gpu.toolkits or coming:
        return []
    family = families.find(state.os)
    return [
        "TensorFlow {} has no wheels of CUDA: CUDA {} must be in /usr/local/cuda-{} with cuDNN {}: "
        "runtime_packages: [cuda-libraries-{}, libcudnn{}], from {}".format(
            build.tensorflow,
            build.cuda,
            build.cuda,
            build.cudnn,
            build.cuda.replace(".", "-"),
            build.cudnn.split(".")[0],
            "NVIDIA's repository" if family and gpu.REPOSITORY in family.repositories else _vendor(state),
        )
    ]


def notes(state: State, desired: Desired) -> List[str]:
    """Notes on GPUs that cannot be used, or not at once."""
    if not gpu.is_used(state, desired):
        return []
    found = []
    if not desired.gpu_driver and not state.gpu.driver:
        why = "nouveau drives the GPU" if state.gpu.nouveau else "no NVIDIA driver is loaded"
        found.append(f"{why} and gpu_driver is keep: training would run on the CPUs")
    elif not desired.gpu_driver and state.gpu.installed not in ("", state.gpu.driver):
        found.append(
            f"NVIDIA driver {state.gpu.installed} is installed and {state.gpu.driver} loaded: CUDA fails "
            "until the host is rebooted"
        )
    build = gpucheck.build(state, desired)
    for item in cuda.architectures(state.gpu.ids) if build else []:
        first, mine = cuda.numbers(item.cuda), cuda.numbers(build.cuda if build else "")
        if first > mine and first[0] == mine[0]:
            found.append(
                "TensorFlow {} was built with CUDA {}, before {} GPUs: its code is compiled for them when it "
                "first runs, which takes minutes".format(
                    build.tensorflow if build else "", build.cuda if build else "", item.name
                )
            )
    where, _ = gpu.source(state, desired)
    if where is not None:
        found += gpufabric.notes(state, desired, where, gpu.will_run(state, desired))
    return found
