"""System packages: which ones a host needs, which it has, and installing the rest."""

import re
import time
from typing import Any, Dict, List

from .command import CommandError, Result, System
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
        "numpy": "python3-numpy",
        "libstdc++": "libstdc++6",
        "build": "build-essential pkg-config cmake ninja-build python3-dev python3-venv "
        "libpmem-dev libasio-dev libssl-dev nlohmann-json3-dev libxxhash-dev",
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
        "numpy": "python3.11-numpy",
        "libstdc++": "libstdc++",
        "build": "gcc-c++ pkgconf-pkg-config cmake ninja-build python3.11-devel "
        "openssl-devel "
        "libpmem-devel asio-devel json-devel xxhash-devel",  # these four: CodeReady Builder and EPEL
    },
}
_STATUS = "/var/lib/dpkg/status"
_UPDATES = "/var/lib/dpkg/updates"  # holds files while dpkg has not written its last changes into the former
_APT = ["apt-get", "-o", "DPkg::Lock::Timeout=300"]
# Nobody is there to answer; files that an administrator changed stay as they are.
_INSTALL = ["-y", "--no-install-recommends"] + [
    word for option in ("--force-confdef", "--force-confold") for word in ("-o", "Dpkg::Options::=" + option)
]
_ENVIRONMENT = {"DEBIAN_FRONTEND": "noninteractive"}
_TIMEOUT = 1800
_UPDATE_TRIES = 10  # the index has a lock of its own, which apt-get does not wait for
_UPDATE_PAUSE = 15.0


def needed(desired: Desired, family: str) -> List[str]:
    """Names of the packages that the host must have; without repeats, in a fixed order."""
    needs: List[str] = []
    if desired.parameter_server or desired.kind != "local":
        # The core is linked against it, whatever the tier. (libssl is in the core, or Python needs it too.)
        needs.append("libpmem")
    if desired.kind != "local":
        needs += ["libstdc++", "venv"]
        if not desired.runtime_requirements:
            needs.append("numpy")  # with a framework, pip brings the version that it wants
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


def build_packages(family: str) -> List[str]:
    """What a host needs on top, to build the runtime; empty for families that are not known."""
    return _NAMES.get(family, {}).get("build", "").split()


def parse_dpkg(text: str) -> Dict[str, str]:
    """Name → version of ``dpkg-query -W -f '${Package}\\t${db:Status-Status}\\t${Version}\\n'``."""
    found = {}
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) == 3 and fields[1] == "installed":
            found[fields[0]] = fields[2]
    return found


def installed_version(status: str, name: str) -> str:
    """Version of an installed package in the text of dpkg's status file; empty when it is not installed."""
    head, at = "\nPackage: {}\n".format(name), -1
    text = "\n" + status
    while True:
        at = text.find(head, at + 1)
        if at < 0:
            return ""
        stanza = text[at : text.find("\n\n", at) + 1 or None]
        fields = dict(re.findall(r"^(Status|Version): (.*)", stanza, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            return str(fields.get("Version", ""))


def parse_rpm(text: str) -> Dict[str, str]:
    """Name → version of ``rpm -q --qf '%{NAME}\\t%{VERSION}-%{RELEASE}\\n'``."""
    pairs = [line.split("\t") for line in text.splitlines() if "is not installed" not in line]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def observe(system: System, os: OsInfo, names: List[str]) -> Dict[str, str]:
    """Installed versions of ``names``; empty text for those that are not installed."""
    found: Dict[str, str] = {}
    if names and os.package_manager == "apt":
        # Megabytes, of which only names and versions matter, which are ASCII: this encoding costs nothing.
        text = system.read(_STATUS, "latin-1")
        if text and not system.list(_UPDATES):
            # Reading it ourselves takes a fraction of the time.
            return {name: installed_version(text, name) for name in names}
        query = "${Package}\\t${db:Status-Status}\\t${Version}\\n"
        found = parse_dpkg(system.run(["dpkg-query", "-W", "-f", query] + names).out)
    elif names and os.package_manager in ("dnf", "yum"):
        found = parse_rpm(system.run(["rpm", "-q", "--qf", "%{NAME}\\t%{VERSION}-%{RELEASE}\\n"] + names).out)
    return {name: found.get(name, "") for name in names}


def parse_candidates(text: str) -> Dict[str, str]:
    """Name → version that can be installed, of ``apt-cache policy``; empty when there is none."""
    found, name = {}, ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            name = line.rstrip(":")
        elif line.strip().startswith("Candidate:"):
            version = line.split(":", 1)[1].strip()
            found[name] = "" if version == "(none)" else version
    return found


def install_command(os: OsInfo, names: List[str]) -> List[str]:
    """The command line that installs ``names``."""
    if os.package_manager == "apt":
        return _APT + ["install"] + _INSTALL + names
    return [os.package_manager, "install", "-y"] + names


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
            commands=[install_command(state.os, missing)],
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
            "system packages are missing and this user cannot install them; as root: {} install {}".format(
                "apt-get" if state.os.package_manager == "apt" else state.os.package_manager,
                " ".join(missing),
            )
        ]
    return []


def apply(system: System, manager: str, names: List[str]) -> List[str]:
    """Installs ``names``; returns what was installed. CommandError when the package manager fails."""
    os = OsInfo(package_manager=manager)
    before = observe(system, os, names)
    absent = [name for name in names if not before[name]]
    if not absent:
        return []
    result = _apt_install(system, absent) if manager == "apt" else _run(system, install_command(os, absent))
    if not result.ok:
        raise CommandError(result.explain())
    after = observe(system, os, absent)
    missed = [name for name in absent if not after[name]]
    if missed:
        raise CommandError("{} said that it installed {}, but it did not".format(manager, ", ".join(missed)))
    return absent


def _run(system: System, argv: List[str]) -> Result:
    return system.run(argv, timeout=_TIMEOUT, environment=_ENVIRONMENT)


def _apt_install(system: System, names: List[str]) -> Result:
    """Installs from the index that is there, and from a fresh one only where that does not do."""
    _repair_dpkg(system)
    command = install_command(OsInfo(package_manager="apt"), names)
    candidates = parse_candidates(system.run(["apt-cache", "policy"] + names).out)
    if all(candidates.get(name) for name in names):
        result = _run(system, command)
        if result.ok:
            return result
    refreshed = _apt_update(system)
    result = _run(system, command)
    if result.ok or refreshed.ok:
        return result
    # An index that cannot be refreshed (no network) may still be good enough; if not, both are worth saying.
    return result._replace(err="{}\n{}".format(result.err.strip(), refreshed.explain()))


def _repair_dpkg(system: System) -> None:
    """Ends what a power cut or a kill interrupted; without that apt-get refuses everything."""
    if not system.list(_UPDATES) and not system.run(["dpkg", "--audit"]).out.strip():
        return
    # apt-get waits for the lock, dpkg does not: another installation that is just under way ends first.
    _run(system, _APT + ["check"])
    _run(system, ["dpkg", "--force-confdef", "--force-confold", "--configure", "-a"])
    if system.run(["dpkg", "--audit"]).out.strip():
        _run(system, _APT + ["install", "--fix-broken"] + _INSTALL)


def _apt_update(system: System) -> Result:
    for number in range(_UPDATE_TRIES):
        result = _run(system, _APT + ["update"])
        if result.ok or "Could not get lock" not in result.err or number + 1 == _UPDATE_TRIES:
            break
        time.sleep(_UPDATE_PAUSE)
    return result


def _install_packages(system: System, args: Dict[str, Any]) -> Applied:
    installed = apply(system, args["manager"], args["names"])
    return Applied(bool(installed), "installed " + ", ".join(installed) if installed else "all are installed")


ACTIONS: Dict[str, Action] = {"install_packages": _install_packages}
