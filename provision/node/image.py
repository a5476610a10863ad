"""Image mode: a system that is not booted, such as the build of a container image for bootc, and its hosts.

A build gets packages, the Python environment and kernel arguments. The hardware that it sees is the build
machine's, so all that depends on hardware is left for the booted host, as are reboots and units' starts.
A booted host of such an image cannot change what comes with it.
"""

import json
from typing import Any, Dict, List

from . import families, platforms, systemd
from .command import CommandError, System
from .platform_base import MEMORY_NODES
from .state import Image, State
from .step import Action, Applied, Desired, Part, Step

KARGS = "/usr/lib/bootc/kargs.d/50-oeprov.toml"  # bootc gives these to the kernel at install and upgrade
_BOOTC = "/usr/lib/bootc"  # of every base image for bootc
_BOOTED_IMAGE = "/run/ostree-booted"
# What a host of an image cannot do by itself.
_OF_THE_IMAGE = (
    "install_packages",
    "install_kernel",
    "set_default_kernel",
    "set_saved_default",
    "edit_boot_arguments",
    "install_gpu_driver",
)


def observe(system: System) -> Image:
    """Whether the system is booted, and of an image for bootc."""
    booted = systemd.is_booted(system)
    bootc = system.exists(_BOOTED_IMAGE if booted else _BOOTC)
    return Image(booted=booted, bootc=bootc, arguments=system.read(KARGS))


def _text(arguments: List[str]) -> str:
    # A list of strings is the same in JSON and in TOML.
    return "# Written by oeprov.\nkargs = " + json.dumps(arguments, ensure_ascii=False) + "\n"


def _arguments(desired: Desired) -> List[str]:
    """The kernel arguments that are known without the hardware."""
    nodes = ["memhp_default_state=offline"] if desired.pmem_mode in MEMORY_NODES else []
    return list(dict.fromkeys(nodes + desired.kernel_arguments))


def plan(state: State, desired: Desired) -> Part:
    """The share of a system that is not booted, beside packages and the Python environment."""
    wanted, part = _arguments(desired), Part(notes=_left(state, desired), problems=_problems(state, desired))
    text = _text(wanted) if wanted else ""
    if not state.image.bootc or state.image.arguments == text:
        return part
    step = Step(
        id="image-arguments",
        what="give kernel arguments to hosts of this image: {}".format(" ".join(wanted) or "none"),
        why="bootc reads them at installation and at each upgrade",
        commands=[["write", KARGS, text] if text else ["rm", KARGS]],
        action="write_image_arguments",
        role="kernel",
        preparing=True,
        args={"text": text},
    )
    return part._replace(before=[step])


def _left(state: State, desired: Desired) -> List[str]:
    """A note that names what is left for the booted host."""
    left = []
    if desired.pmem_mode != "none":
        left.append(f"{platforms.get(desired.kind).memory} memory (pmem_mode {desired.pmem_mode})")
    left += ["drives (ssd_devices)"] if desired.ssd_devices else []
    if not state.image.bootc:
        left += [f"kernel {desired.kernel_version}"] if desired.kernel_version else []
        left += ["kernel arguments " + " ".join(_arguments(desired))] if _arguments(desired) else []
        left += [f"the GPU driver {desired.gpu_driver}"] if desired.gpu_driver else []
    waits = ", ".join(left) or "nothing"
    note = f"this system is not booted, as in the build of an image; left for the booted host: {waits}"
    return [note] + _venv_notes(state, desired)


def _venv_notes(state: State, desired: Desired) -> List[str]:
    home = state.runtime.home or desired.runtime_venv
    if not state.image.bootc or not (home + "/").startswith(("/var/", "/opt/")):
        return []
    return [
        f"runtime_venv {desired.runtime_venv}: an upgrade of the image does not change /var, where bootc's "
        "base images have /opt too; set runtime_venv: /usr/lib/oeprov/venv"
    ]


def _problems(state: State, desired: Desired) -> List[str]:
    asked = [("kernel_version", desired.kernel_version), ("gpu_driver", desired.gpu_driver)]
    return [
        f"{name} {value}: an image for bootc has the kernel and drivers of its base image; choose a base "
        f"that has them, or install them in the Containerfile, and leave {name} out"
        for name, value in asked
        if value and state.image.bootc
    ]


def not_booted(state: State) -> List[str]:
    """Why nothing can be removed: the rest of what oeprov made is on booted hosts."""
    name = families.title(state.os)
    return [f"{name} is not booted, as in the build of an image; nothing is removed here: build it anew"]


def refusals(state: State, steps: List[Step]) -> List[str]:
    """Steps that a booted host of an image cannot do."""
    if not state.image.bootc or not state.image.booted:
        return []
    of_usr = [step for step in steps if str(step.args.get("venv", "")).startswith("/usr/")]
    return [
        f"this host boots an image (bootc), with which this must come: {step.what}; build the image again "
        "with the roles kernel and runtime of oeprov.oeprov, then upgrade the host"
        for step in steps
        if step.action in _OF_THE_IMAGE or step in of_usr
    ]


def _write_arguments(system: System, args: Dict[str, Any]) -> Applied:
    if systemd.is_booted(system):
        raise CommandError("this host is booted: kernel arguments of an image are set in its build")
    changed = system.write(KARGS, args["text"]) if args["text"] else system.remove(KARGS)
    return Applied(changed, f"hosts of the image get them by {KARGS}")


ACTIONS: Dict[str, Action] = {"write_image_arguments": _write_arguments}
