"""Wear, temperature and spare blocks of NVMe drives, from nvme-cli's JSON; for `oeprov doctor`."""

import json
from typing import Any, Dict, List, NamedTuple

from .command import System
from .state import State

_UNIT = 512000  # bytes of a data unit
_KELVIN = 273


class Wear(NamedTuple):
    """What a drive says of itself; ``error``: why it says nothing."""

    device: str
    error: str = ""
    warnings: int = 0  # bits of the critical warning
    used: int = 0  # percent of the rated endurance; may exceed 100
    spare: int = 100  # percent of the spare blocks that are left
    spare_least: int = 0  # percent below which the drive warns
    celsius: int = 0
    written: int = 0  # bytes
    media_errors: int = 0


def observe(system: System, state: State) -> List[Wear]:
    """Of each NVMe drive in ``ssd_devices``."""
    return [_read_wear(system, item.device) for item in state.drives if item.device.startswith("nvme")]


def _read_wear(system: System, device: str) -> Wear:
    result = system.run(["nvme", "smart-log", "--output-format=json", "/dev/" + device])
    if not result.ok:
        return Wear(device, result.explain())
    try:
        return parse(device, json.loads(result.out))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}"
        return Wear(device, f"nvme smart-log said something else than expected: {said}")


def parse(device: str, said: Dict[str, Any]) -> Wear:
    """The log as nvme-cli 1 and 2 print it; KeyError, ValueError or TypeError for anything else."""
    warnings = said["critical_warning"]
    return Wear(
        device,
        warnings=int(warnings["value"] if isinstance(warnings, dict) else warnings),
        used=int(said["percent_used"] if "percent_used" in said else said["percentage_used"]),
        spare=int(said["avail_spare"]),
        spare_least=int(said["spare_thresh"]),
        celsius=int(said["temperature"]) - _KELVIN,
        written=int(said["data_units_written"]) * _UNIT,  # numbers of 128 bits may be texts
        media_errors=int(said["media_errors"]),
    )
