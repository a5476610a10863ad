"""Carries steps of a plan out. Only actions that are known by name; everything else is refused."""

from typing import Any, Callable, Dict, NamedTuple, Optional

from . import directory, packages, runtime
from .command import CommandError, System
from .step import Step


class Applied(NamedTuple):
    """What a step did; ``changed`` is False when the machine was there already."""

    changed: bool
    message: str

    def to_dict(self) -> Dict[str, Any]:
        """Plain values, as an Ansible module returns them."""
        return {"changed": self.changed, "msg": self.message}


def _make_directory(system: System, args: Dict[str, Any]) -> Applied:
    new = directory.apply(system, args["path"], args["size"])
    return Applied(new, "made {}".format(args["path"]) if new else "{} is there".format(args["path"]))


def _install_packages(system: System, args: Dict[str, Any]) -> Applied:
    installed = packages.apply(system, args["manager"], args["names"])
    return Applied(bool(installed), "installed " + ", ".join(installed) if installed else "all are installed")


def _install_runtime(system: System, args: Dict[str, Any]) -> Applied:
    before = runtime.observe(system, args["venv"], args["requirements"])
    if before.exists and not before.missing and not before.error:
        return Applied(False, "{} has all that is needed".format(args["venv"]))
    installed, missing = runtime.apply(
        system, args["venv"], args["python"], args["create"], args["requirements"]
    )
    if missing:
        raise CommandError("pip ended well, but {} still lacks {}".format(args["venv"], ", ".join(missing)))
    return Applied(True, "installed {} in {}".format(", ".join(installed) or "Python", args["venv"]))


ACTIONS: Dict[str, Callable[[System, Dict[str, Any]], Applied]] = {
    "make_directory": _make_directory,
    "install_packages": _install_packages,
    "install_runtime": _install_runtime,
}


def can_apply(step: Step) -> bool:
    """Whether this version carries the step's action out."""
    return step.action in ACTIONS


def apply(step: Step, system: Optional[System] = None) -> Applied:
    """Carry one step out on this machine; CommandError says what failed.

    Running a step twice is safe: the second time changes nothing.
    """
    if not can_apply(step):
        raise CommandError(
            "step {!r} ({}): this version of oeprov plans {!r} but does not carry it out".format(
                step.id, step.what, step.action
            )
        )
    return ACTIONS[step.action](system or System(), step.args)
