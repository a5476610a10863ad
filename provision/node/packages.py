"""System packages: which ones a host needs, which it has, and installing the rest."""

from typing import Any, Dict, List

from .command import CommandError, System
from .state import OsInfo, State
from .step import Action, Applied, Desired, Step

# What each need is called in a distribution family.
_NAMES: Dict[str, Dict[str, str]] = {
    "debian": {
        "libpmem": "libpmem1",
        "memkind": "libmemkind0",
        "ndctl": "ndctl",
        "daxctl": "daxctl",
        "cxl": "cxl",
        "ipmctl": "ipmctl",
        "numactl": "numactl",
        "ext4": "e2fsprogs",
        "xfs": "xfsprogs",
        "venv": "python3-venv",
    },
    "rhel": {
        "libpmem": "libpmem",
        "memkind": "memkind",
        "ndctl": "ndctl",
        "daxctl": "daxctl",
        "cxl": "cxl-cli",
        "ipmctl": "ipmctl",
        "numactl": "numactl",
        "ext4": "e2fsprogs",
        "xfs": "xfsprogs",
        "venv": "python3.11",  # EL's own python3 is older than what oeprov needs
    },
}


def needed(desired: Desired, family: str) -> List[str]:
    """Names of the packages that the host must have; without repeats, in a fixed order."""
    needs: List[str] = []
    if desired.parameter_server:
        needs.append("libpmem")  # the runtime's core is linked against it, whatever the tier
    if desired.kind != "local":
        needs.append("venv")
        if desired.pmem_mode in ("fsdax", "system-ram", "memory"):
            needs += ["ndctl", "daxctl", "numactl"]
        if desired.kind == "cxl":
            needs.append("cxl")
        if desired.kind == "bare_metal_pmem":
            needs.append("ipmctl")
        if desired.pmem_mode == "fsdax":
            needs.append(desired.pmem_filesystem)
        if desired.pmem_mode == "system-ram":
            needs.append("memkind")
    names = _NAMES.get(family, {})
    wanted = [names[need] for need in needs if need in names] + desired.runtime_packages
    return list(dict.fromkeys(wanted))


def parse_dpkg(text: str) -> Dict[str, str]:
    """Name → version of ``dpkg-query -W -f '${Package}\\t${db:Status-Status}\\t${Version}\\n'``."""
    found = {}
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) == 3 and fields[1] == "installed":
            found[fields[0]] = fields[2]
    return found


def parse_rpm(text: str) -> Dict[str, str]:
    """Name → version of ``rpm -q --qf '%{NAME}\\t%{VERSION}-%{RELEASE}\\n'``."""
    pairs = [line.split("\t") for line in text.splitlines() if "is not installed" not in line]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def observe(system: System, os: OsInfo, names: List[str]) -> Dict[str, str]:
    """Installed versions of ``names``; empty text for those that are not installed."""
    found: Dict[str, str] = {}
    if names and os.package_manager == "apt":
        query = "${Package}\\t${db:Status-Status}\\t${Version}\\n"
        found = parse_dpkg(system.run(["dpkg-query", "-W", "-f", query] + names).out)
    elif names and os.package_manager in ("dnf", "yum"):
        found = parse_rpm(system.run(["rpm", "-q", "--qf", "%{NAME}\\t%{VERSION}-%{RELEASE}\\n"] + names).out)
    return {name: found.get(name, "") for name in names}


def install_commands(os: OsInfo, names: List[str]) -> List[List[str]]:
    """Command lines that install ``names``."""
    if os.package_manager == "apt":
        return [["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends"] + names]
    return [[os.package_manager, "install", "-y"] + names]


def plan(state: State, desired: Desired) -> List[Step]:
    """One step that installs what is missing; none when nothing is."""
    missing = [name for name in needed(desired, state.os.family) if not state.packages.get(name)]
    if not missing or not state.os.package_manager:
        return []
    return [
        Step(
            id="packages",
            what="install " + ", ".join(missing),
            why="training and its tools need them and they are not installed",
            commands=install_commands(state.os, missing),
            action="install_packages",
            args={"manager": state.os.package_manager, "names": missing},
        )
    ]


def problems(state: State, desired: Desired) -> List[str]:
    """Why packages that are missing cannot be installed."""
    wanted = needed(desired, state.os.family)
    missing = [name for name in wanted if not state.packages.get(name)]
    name = state.os.name or state.os.id or "this system"
    if state.os.family not in _NAMES:
        return [
            "{}: packages are known for Debian, Ubuntu and EL (RHEL, Rocky, Alma, CentOS) only".format(name)
        ]
    if missing and not state.os.package_manager:
        return ["{}: {} missing, and neither apt, dnf nor yum is there".format(name, ", ".join(missing))]
    if missing and not state.os.is_root and desired.kind == "local":
        return [
            "system packages are missing and this user cannot install them; as root: {}".format(
                " ".join(install_commands(state.os, missing)[-1])
            )
        ]
    return []


def apply(system: System, manager: str, names: List[str]) -> List[str]:
    """Installs ``names``; returns what was installed. CommandError when the package manager fails."""
    os = OsInfo(package_manager=manager)
    before = observe(system, os, names)
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    for argv in install_commands(os, names):
        result = system.run(argv, timeout=1800, environment=environment)
        # An index that cannot be refreshed (no network) may still be good enough to install from.
        if not result.ok and argv[1] != "update":
            raise CommandError(result.explain())
    after = observe(system, os, names)
    absent = [name for name in names if not after[name]]
    if absent:
        raise CommandError("{} said that it installed {}, but it did not".format(manager, ", ".join(absent)))
    return [name for name in names if not before[name]]


def _install_packages(system: System, args: Dict[str, Any]) -> Applied:
    installed = apply(system, args["manager"], args["names"])
    return Applied(bool(installed), "installed " + ", ".join(installed) if installed else "all are installed")


ACTIONS: Dict[str, Action] = {"install_packages": _install_packages}
