"""This machine, with a directory in place of persistent memory: to try oeprov as an ordinary user."""

from . import directory
from .command import System
from .platform_base import GIB, Platform
from .state import Directory, OsInfo, Runtime, State
from .step import Desired, Part


class _Local(Platform):
    name = "local"
    modes = ("directory", "none")
    managed = False

    def refuse(self, mode: str) -> str:
        if mode == "auto" or mode in self.modes:
            return ""
        return (
            "kind local is this machine with a directory in place of persistent memory; use directory, or "
            "give the host the kind that it is (re6p, re7p, bare_metal_pmem, cxl) and reach it over ssh"
        )

    def observe(self, system: System, state: State, desired: Desired) -> State:
        if desired.pmem_mode != "directory":
            return state
        return state._replace(directories=[directory.observe(system, desired.pmem_directory)])

    def plan(self, state: State, desired: Desired) -> Part:
        return Part(before=directory.plan(state, desired), problems=directory.problems(state, desired))

    def find_mode(self, state: State) -> str:
        return "directory" if any(item.is_directory for item in state.directories) else ""

    def fresh(self, desired: Desired) -> State:
        return State(
            os=OsInfo("debian", "12", "debian", "Debian GNU/Linux 12", "x86_64", "apt", "3.11.2", True),
            directories=[Directory(desired.pmem_directory, writable=True, free=100 * GIB)],
            runtime=Runtime(exists=True, writable=True, python="3.11.2", oeprov="0.1.0"),
            assumed=True,
        )


PLATFORM = _Local()
