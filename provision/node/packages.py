"""System packages: those that a host needs, those that it has, and installing the rest."""

import re
import time
from typing import Any, Dict, List

from . import cuda, drives, families, flavor_needs, platforms, repositories
from .command import CommandError, Result, System
from .state import OsInfo, State
from .step import Action, Applied, Desired, Step

_STATUS = "/var/lib/dpkg/status"
_UPDATES = "/var/lib/dpkg/updates"  # has files while dpkg's last changes are not in the former
_APT = ["apt-get", "-o", "DPkg::Lock::Timeout=300"]
# There is no terminal; files that an administrator changed stay as they are.
_INSTALL = ["-y", "--no-install-recommends"] + [
    word for option in ("--force-confdef", "--force-confold") for word in ("-o", "Dpkg::Options::=" + option)
]
_ENVIRONMENT = {"DEBIAN_FRONTEND": "noninteractive"}
_TIMEOUT = 1800
UPDATE_TRIES = 10  # apt-get does not wait for the lock of the index, and dnf would wait for ever
UPDATE_PAUSE = 15.0
LOCKED = 200  # how dnf and yum end where another one is at work
_HOLDER = re.compile(r"(?:locked by|held by process|running as pid) (\d+)( \([^)]*\))?")


def _needs(desired: Desired) -> List[str]:
    """Needs of the host in a fixed order; each family has its own packages for them."""
    needs, platform = flavor_needs.needs(desired), platforms.get(desired.kind)
    if platform.managed:
        if desired.pmem_mode in ("fsdax", "system-ram", "tiered", "memory"):
            needs += ["ndctl", "daxctl", "numactl"]
        needs += platform.packages
        if desired.pmem_mode == "fsdax":
            needs.append(desired.pmem_filesystem)
        if desired.pmem_mode == "system-ram":
            needs.append("memkind")
        if any(map(drives.is_drive, desired.ssd_devices)):
            needs += ["nvme", desired.ssd_filesystem]
    return needs


def needed(desired: Desired, os: OsInfo) -> List[str]:
    """Names of the packages that the host needs, without repeats, in a fixed order."""
    wanted = [name for need in _needs(desired) for name in families.names(os, need)]
    return list(dict.fromkeys(wanted + desired.runtime_packages))


def further_repositories(os: OsInfo, desired: Desired) -> List[str]:
    """Repositories of the family to enable for the packages."""
    family = families.find(os)
    needs = _needs(desired) if family is not None else []
    wanted = [name for need in needs for name in (family.comes_from.get(need, []) if family else [])]
    if family is not None and desired.runtime_packages:
        wanted += [name for name in desired.runtime_repositories if name in family.repositories]
        if any(name.startswith(cuda.PACKAGES) for name in desired.runtime_packages):
            wanted += family.gpu.repositories
    return list(dict.fromkeys(wanted))


def given(desired: Desired, os: OsInfo) -> Dict[str, str]:
    """The inventory's repositories by name, and the archive of a distribution whose mirrors are gone."""
    url = repositories.archive(os, desired.kernel_archive_url)
    return dict({repositories.ARCHIVE: url} if url else {}, **desired.runtime_repositories)


def parse_dpkg(text: str) -> Dict[str, str]:
    """Name → version of ``dpkg-query -W -f '${Package}\\t${db:Status-Status}\\t${Version}\\n'``."""
    found = {}
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) == 3 and fields[1] == "installed":
            found[fields[0]] = fields[2]
    return found


def installed_version(status: str, name: str) -> str:
    """Version of a package in dpkg's status file; empty if it is not installed."""
    head = f"Package: {name}\n"  # not behind a newline: it may be the first line, and the text is long
    at = -1
    while True:
        at = status.find(head, at + 1)
        if at < 0:
            return ""
        if at and status[at - 1] != "\n":
            continue
        stanza = status[at : status.find("\n\n", at) + 1 or None]
        fields = dict(re.findall(r"^(Status|Version): (.*)", stanza, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            return str(fields.get("Version", ""))


def parse_rpm(text: str) -> Dict[str, str]:
    """Name → version of ``rpm -q --qf '%{NAME}\\t%{VERSION}-%{RELEASE}\\n'``."""
    pairs = [line.split("\t") for line in text.splitlines() if "is not installed" not in line]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def observe(system: System, os: OsInfo, names: List[str]) -> Dict[str, str]:
    """Installed versions of ``names``; empty for those that are not installed."""
    found: Dict[str, str] = {}
    if names and os.package_manager == "apt":
        # Only ASCII names and versions matter in these megabytes, and latin-1 decodes fastest.
        text = system.read(_STATUS, "latin-1")
        if text and not system.list(_UPDATES):
            # This takes a fraction of dpkg-query's time.
            return {name: installed_version(text, name) for name in names}
        query = "${Package}\\t${db:Status-Status}\\t${Version}\\n"
        found = parse_dpkg(system.run(["dpkg-query", "-W", "-f", query] + names).out)
    elif names and os.package_manager in ("dnf", "yum"):
        found = parse_rpm(system.run(["rpm", "-q", "--qf", "%{NAME}\\t%{VERSION}-%{RELEASE}\\n"] + names).out)
    return {name: found.get(name, "") for name in names}


def parse_candidates(text: str) -> Dict[str, str]:
    """Name → candidate version of ``apt-cache policy``; empty if there is none."""
    found, name = {}, ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            name = line.rstrip(":")
        elif line.strip().startswith("Candidate:"):
            version = line.split(":", 1)[1].strip()
            found[name] = "" if version == "(none)" else version
    return found


def install_command(os: OsInfo, names: List[str], options: List[str]) -> List[str]:
    """The command line that installs ``names``."""
    if os.package_manager == "apt":
        return _APT + options + ["install"] + _INSTALL + names
    return [os.package_manager, "install", "-y"] + options + names


def plan(state: State, desired: Desired) -> List[Step]:
    """One step that installs the missing packages; none if nothing is missing."""
    missing = [name for name in needed(desired, state.os) if not state.packages.get(name)]
    if not missing or not state.os.package_manager:
        return []
    use = repositories.use(state.os, given(desired, state.os), further_repositories(state.os, desired))
    return [
        Step(
            id="packages",
            what="install " + ", ".join(missing),
            why="training and its tools need them and they are not installed",
            commands=use.commands + [install_command(state.os, missing, use.options)],
            action="install_packages",
            role="runtime",
            preparing=True,
            scope="host" if platforms.get(desired.kind).managed else "training",
            args=dict(
                {"manager": state.os.package_manager, "names": missing},
                **({} if use == repositories.ENABLED else {"repositories": use._asdict()}),
            ),
        )
    ]


# The effect of a missing package, and the alternative.
_WITHOUT = {
    "memkind": "storage pmem_memkind is not available; dram puts servers on the memory node too",
    "ipmctl": "goals can be set on another system, or with ipmctl from elsewhere",
    "tbb": "an archive of OpenEmbedding that was linked against libtbb.so.2 does not start",
    "cxl": "oeprov needs daxctl only; install `cxl list` from elsewhere if you want it",
}


def notes(state: State, desired: Desired) -> List[str]:
    """Notes on packages that differ on this release."""
    found = [
        f"{families.title(state.os)} has no package of {need}: {_WITHOUT[need]}"
        for need in _needs(desired)
        if need in _WITHOUT and families.lacks(state.os, need)
    ]
    family = families.find(state.os)
    if family is None or not platforms.get(desired.kind).managed:
        return found
    if not families.is_known(state.os):
        found.append(
            f"{families.title(state.os)} is not one of the systems that oeprov knows "
            f"({families.known_names()}): it is treated as {families.treated_as(state.os)}"
        )
    return found


def archive_notes(state: State, desired: Desired, steps: List[Step]) -> List[str]:
    """A note on an archive that the inventory does not name, if a step uses it."""
    family = families.find(state.os)
    named = desired.kernel_archive_url or desired.runtime_repositories.get(repositories.ARCHIVE)
    option = "--enablerepo=oeprov-" + repositories.ARCHIVE
    used = any(option in command for step in steps for command in step.commands)
    if named or family is None or not used:
        return []
    archive = given(desired, state.os)[repositories.ARCHIVE]
    return [
        f"{family.name}'s own mirrors are gone: packages come from {archive}; set "
        "kernel_archive_url to use another mirror of that archive"
    ]


def problems(state: State, desired: Desired) -> List[str]:
    """Why missing packages cannot be installed."""
    wanted = needed(desired, state.os)
    missing = [name for name in wanted if not state.packages.get(name)]
    name = families.title(state.os)
    # A host that is not managed may need no packages; its system does not matter then.
    if families.find(state.os) is None and (_needs(desired) or desired.runtime_packages):
        return [f"{name}: packages are known for {families.known_names()} only"]
    found = repositories.problems(state.os, desired.runtime_repositories)
    if missing and not state.os.package_manager:
        found.append(f"{name}: {', '.join(missing)} missing, and neither apt, dnf nor yum is there")
    elif missing and not state.os.is_root and not platforms.get(desired.kind).managed:
        found.append(
            "system packages are missing and this user cannot install them; as root: {} install {}".format(
                "apt-get" if state.os.package_manager == "apt" else state.os.package_manager,
                " ".join(missing),
            )
        )
    return found


def apply(
    system: System, manager: str, names: List[str], use: repositories.Use = repositories.ENABLED
) -> List[str]:
    """Install ``names``; returns those that were missing. CommandError if the package manager fails."""
    os = OsInfo(package_manager=manager)
    before = observe(system, os, names)
    absent = [name for name in names if not before[name]]
    if not absent:
        return []
    written = bool(use.path) and system.write(use.path, use.text, use.mode)
    command = install_command(os, absent, use.options)
    if manager == "apt":
        result = _apt_install(system, absent, command, written, use.options)
    else:
        result = _run(system, command)
    if not result.ok:
        said = result.err + "\n" + result.out
        known = repositories.signature_problem(said, use) or lock_problem(command, said)
        if known:
            raise CommandError(known)
        # dnf prints much else at its end.
        short = result if manager == "apt" else result._replace(out="", err=first_errors(result))
        raise CommandError(short.explain())
    after = observe(system, os, absent)
    missed = [name for name in absent if not after[name]]
    if missed:
        raise CommandError(f"{manager} said that it installed {', '.join(missed)}, but it did not")
    return absent


def run_install(system: System, manager: str, command: List[str], options: List[str]) -> Result:
    """Install a version that the index may not have yet."""
    if manager == "apt":
        _repair_dpkg(system)
        _apt_update(system, options)
    return _run(system, command)


def first_errors(result: Result) -> str:
    """The first lines about errors: the last ones of a package manager only count them."""
    lines = [line.strip() for line in (result.err + "\n" + result.out).splitlines()]
    found = [line for line in lines if re.search(r"error|fail|no space|E:|GPG", line, re.IGNORECASE)]
    return " / ".join(found[:3] or ["it did not say why"])


def impatient(argv: List[str]) -> List[str]:
    """The command line of dnf or yum, which ends with status ``LOCKED`` where another one is at work."""
    return argv + ["--setopt=exit_on_lock=True"] if argv[0] in ("dnf", "yum") else argv


def lock_problem(argv: List[str], said: str) -> str:
    """Who keeps a package manager from working, and what to do; empty: nobody."""
    found = _HOLDER.search(said)
    if not found:
        return ""
    return (
        f"{argv[0]} is locked by process {found[1]}{found[2] or ''}: wait for it to end, and run this again"
    )


def _run(system: System, argv: List[str]) -> Result:
    for number in range(UPDATE_TRIES):
        result = system.run(impatient(argv), timeout=_TIMEOUT, environment=_ENVIRONMENT)
        if result.code != LOCKED or number + 1 == UPDATE_TRIES:
            break
        time.sleep(UPDATE_PAUSE)
    return result


def _apt_install(
    system: System, names: List[str], command: List[str], stale: bool, options: List[str]
) -> Result:
    """Install from the cached index, and refresh it only if it is stale or does not suffice."""
    _repair_dpkg(system)
    policy = ["apt-cache"] + options + ["policy"] + names
    candidates = {} if stale else parse_candidates(system.run(policy).out)
    if all(candidates.get(name) for name in names):
        result = _run(system, command)
        if result.ok:
            return result
    refreshed = _apt_update(system, options)
    result = _run(system, command)
    if result.ok or refreshed.ok:
        return result
    # Without network the cached index may suffice; if not, both failures are reported.
    return result._replace(err=f"{result.err.strip()}\n{refreshed.explain()}")


def _repair_dpkg(system: System) -> None:
    """Finish an installation that was interrupted; apt-get refuses everything until then."""
    if not system.list(_UPDATES) and not system.run(["dpkg", "--audit"]).out.strip():
        return
    # apt-get waits for the lock, dpkg does not: this lets a running installation finish.
    _run(system, _APT + ["check"])
    _run(system, ["dpkg", "--force-confdef", "--force-confold", "--configure", "-a"])
    if system.run(["dpkg", "--audit"]).out.strip():
        _run(system, _APT + ["install", "--fix-broken"] + _INSTALL)


def refresh_command(options: List[str]) -> List[str]:
    """The command line that refreshes apt's index."""
    return _APT + options + ["update"]


def _apt_update(system: System, options: List[str]) -> Result:
    for number in range(UPDATE_TRIES):
        result = _run(system, refresh_command(options))
        if result.ok or "Could not get lock" not in result.err or number + 1 == UPDATE_TRIES:
            break
        time.sleep(UPDATE_PAUSE)
    return result


def _install_packages(system: System, args: Dict[str, Any]) -> Applied:
    installed = apply(
        system, args["manager"], args["names"], repositories.Use(**args.get("repositories", {}))
    )
    return Applied(bool(installed), "installed " + ", ".join(installed) if installed else "all are installed")


ACTIONS: Dict[str, Action] = {"install_packages": _install_packages}
