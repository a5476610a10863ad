"""Persistent memory modules as the kernel shows them, and their faults."""

import re
from typing import List

from .command import System
from .devices import ND
from .state import Module, State

LOCKED = "locked"
# Flags of a module, as the kernel names them (Documentation/ABI/testing/sysfs-bus-nfit), and two of security.
WORDS = {
    "save_fail": "did not save its contents at the last power loss",
    "restore_fail": "could not restore its contents at boot",
    "flush_fail": "could not flush its buffers",
    "not_armed": "is not armed: it would lose data at a power loss",
    "smart_event": "has reported a health event",
    "map_fail": "could not be mapped",
    "smart_notify": "will report health events",
    LOCKED: "is locked: nothing on it can be read",
    "overwrite": "is being overwritten by a secure erase",
}
_FINE = "smart_notify"
_CURES = {LOCKED: "unlock it (`ndctl load-keys`, or ipmctl's LockState=Unlocked) and plan again"}
_CURE = "`ndctl list -DH -d {0}` and `ipmctl show -dimm` say more; replace the module if that stays"


def observe(system: System) -> List[Module]:
    """The modules of the nvdimm bus."""
    found = []
    for name in system.list(ND):
        if re.match(r"nmem\d+$", name):
            base = f"{ND}/{name}/"
            flags = system.read(base + "nfit/flags").split()
            # The kernel sets its own flag if the firmware refuses to show the labels.
            locked = "lock" in system.read(base + "flags").split()
            security = system.read(base + "security").strip()
            words = [LOCKED] if locked else []
            words += [security] if security in (LOCKED, "overwrite") and security not in words else []
            found.append(Module(name, flags + words))
    return found


# Harmless words: the module works, and its health event stays until it is replaced.
_WORKS = ("smart_event",)
_WORKS_BY_IPMCTL = ("Noncritical failure", "Minor Failure")


def is_broken(state: State) -> bool:
    """A module cannot keep its data."""
    flags = [word for item in state.modules for word in item.flags if word not in (_FINE,) + _WORKS]
    said = [words for words in state.dimms.unhealthy.values() if words not in _WORKS_BY_IPMCTL]
    return bool(flags or said)


def complaints(state: State) -> List[str]:
    """Faults of modules as the kernel and ipmctl report them, with what to do."""
    found = []
    for item in state.modules:
        words = [word for word in item.flags if word != _FINE]
        if words:
            said = ", ".join(WORDS.get(word, word) for word in words)
            cure = next((_CURES[word] for word in words if word in _CURES), _CURE.format(item.dev))
            found.append(f"persistent memory module {item.dev} {said}; {cure}")
    for name, said in state.dimms.unhealthy.items():
        found.append(f"ipmctl says of module {name}: {said}; `ipmctl show -a -dimm {name}` says more")
    return found
