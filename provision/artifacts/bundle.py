"""``oeprov bundle``: all that the hosts of an inventory need, in one directory, for air-gapped sites.

A bundle has, for each system (``debian-12-x86_64``), ``packages/SYSTEM`` with system packages, all that they
depend on and the package manager's index; for each kind of wheel, ``wheels/KEY`` with oeprov's own and
``pip/KEY`` with what pip would fetch; and ``MANIFEST.json``, which has the SHA-256 of every file.
"""

from __future__ import annotations

import io
import json
import shlex
import shutil
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from provision.artifacts import wheel
from provision.artifacts.bundle_packages import PackageSet, collect, digest, run, system_of
from provision.cluster import flavor_facts, own_sources
from provision.cluster.errors import HostError, OeprovError
from provision.cluster.inventory import Host, Inventory
from provision.cluster.systems import assigned
from provision.hosts import remote
from provision.node import ansible_python, build, families, gpu, kernelinstall, packages
from provision.node.command import System
from provision.node.observe import observe_os
from provision.node.state import OsInfo, Runtime, State
from provision.node.step import Desired

MANIFEST = "MANIFEST.json"
FORMAT = 1
THERE = "/var/lib/oeprov/bundle"  # on hosts: the files that `bootstrap --bundle` sent
_TIMEOUT = 3600  # for sending a batch
_BATCH = 64 << 20
_MOST_AT_ONCE = 4  # hosts: each has a batch in memory, twice
_OLDEST = 17  # wheels are built for C library 2.17 and later


def make(inventory: Inventory, output: Path, systems: Iterable[str], state_dir: Path) -> list[str]:
    """Collect the bundle into ``output``, which must be new or empty; returns one line for each part.

    ``systems``: the hosts' systems, one for all or ``HOST=SYSTEM``; default: this machine's. Raises
    OeprovError; ``output`` is then unchanged.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise OeprovError(f"{output} exists and is not empty; name a new directory")
    making = output.with_name(output.name + ".making")
    shutil.rmtree(making, ignore_errors=True)
    try:
        making.mkdir(parents=True)
    except OSError as error:
        raise OeprovError(f"{making}: {error.strerror}; name another directory") from None
    try:
        here = dict.fromkeys(inventory.hosts, observe_os(System()))
        named = {**here, **assigned(inventory, systems)}
        lines = _collect(inventory, making, named, state_dir)
        if inventory.flavor != flavor_facts.DEFAULT:
            lines.append(
                f"not included, since runtime_flavor {inventory.flavor} compiles on the hosts: downloads of "
                "pip and git; set mirrors or directories as runtime_index, runtime_package, runtime_sources"
            )
        _write_manifest(making)
        if output.exists():
            output.rmdir()
        making.rename(output)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return lines


def _collect(inventory: Inventory, into: Path, systems: dict[str, OsInfo], state_dir: Path) -> list[str]:
    wanted: dict[str, dict[PackageSet, None]] = {}
    by_name = {system_of(os): os for os in systems.values()}
    pip: dict[str, set[str]] = {}
    pip_only: set[str] = set()
    systems_of_keys = {own_sources.own_key(): observe_os(System())}
    for name, host in inventory.hosts.items():
        os, desired = systems[name], host.desired()
        wanted.setdefault(system_of(os), {}).update(dict.fromkeys(_parts(host, os)))
        if not host.platform.managed:
            pip_only.update(desired.runtime_requirements)
            continue
        state = State(os=os, runtime=Runtime(base=build.python_version(State(os=os), desired)))
        made = build.build_of(state, desired)
        if not made:
            continue  # of another flavor
        pip.setdefault(made, set()).update(desired.runtime_requirements)
        systems_of_keys[build.key_of(made)] = os
    lines = []
    for system, parts in wanted.items():
        count = collect(by_name[system], list(parts), into / "packages" / system)
        lines.append(f"packages/{system}: {count} packages")
    by_key: dict[str, set[str]] = {own_sources.own_key(): pip_only}
    for made, requirements in pip.items():
        key = build.key_of(made)
        path = wheel.provide(made, state_dir, _no_other)
        there = into / "wheels" / key / made.rpartition("-")[2]
        there.mkdir(parents=True)
        shutil.copy(path, there)
        lines.append(f"wheels/{key}: {path.name}")
        # pip installs the wheel with them, and so wants what that depends on.
        by_key.setdefault(key, set()).update({*requirements, str(path)} if requirements else ())
    for key, requirements in by_key.items():
        if requirements:
            _pip(key, systems_of_keys[key], sorted(requirements), into / "pip" / key)
            shown = [name for name in sorted(requirements) if not name.endswith(".whl")]
            lines.append(f"pip/{key}: {', '.join(shown)} and their dependencies")
    return lines


def _no_other(packed: Path, log: Path) -> Path:
    raise OeprovError(
        "there is no wheel yet for one of the systems: make the bundle on such a system, or bootstrap one "
        "host of it from here first"
    )


def _parts(host: Host, os: OsInfo) -> list[PackageSet]:
    """Packages that the host needs; those of drivers in parts of their own, because some conflict."""
    desired = host.desired()
    python = ansible_python.needed(os, desired)
    more = ansible_python.repositories_of(os) if python else []
    needs = PackageSet(
        tuple(dict.fromkeys([*packages.needed(desired, os), *python])),
        tuple(packages.given(desired, os).items()),
        tuple(dict.fromkeys([*packages.further_repositories(os, desired), *more])),
    )
    return [item for item in [needs, *_kernel(desired, os), *_drivers(host, desired, os)] if item.names]


def _kernel(desired: Desired, os: OsInfo) -> list[PackageSet]:
    """Packages of the kernel that the host needs."""
    if not desired.kernel_version:
        return []
    release = "" if desired.kernel_version == "newest" else desired.kernel_version
    return [
        PackageSet(tuple(kernelinstall.names(os, release, desired.kernel_source)), _kernel_from(desired, os))
    ]


def _kernel_from(desired: Desired, os: OsInfo) -> tuple[tuple[str, str], ...]:
    given = packages.given(desired, os)
    url = desired.kernel_repository_url or kernelinstall.address(os, desired.kernel_source)
    return tuple({**given, **({kernelinstall.KERNEL: url} if url else {})}.items())


def _drivers(host: Host, desired: Desired, os: OsInfo) -> list[PackageSet]:
    """Packages of the GPU driver, for each kind of GPU."""
    if not host.platform.has_gpus or not desired.gpu_driver:
        return []
    headers = tuple(gpu.kernel_packages(os))
    if not desired.kernel_version and not any(name.startswith(headers) for name in desired.runtime_packages):
        raise OeprovError(
            f"host {host.name}: its driver needs packages for its kernel, which is not known here: set "
            f"kernel_version, or name them in runtime_packages (they begin with {' or '.join(headers)})"
        )
    given = _kernel_from(desired, os)
    return [
        PackageSet(tuple(item.names), given, tuple(item.repositories), tuple(item.streams))
        for item in gpu.bundle_drivers(os, desired)
    ]


def _pip(key: str, os: OsInfo, requirements: list[str], into: Path) -> None:
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "-d", str(into)]
    if key != own_sources.own_key():
        argv += [f"--python-version={key.rpartition('-py')[2]}", "--implementation=cp"]
        argv += [f"--platform={item}" for item in _platforms(os)]
    run([*argv, *requirements])


def _platforms(os: OsInfo) -> list[str]:
    """Tags of the platforms whose wheels a system can use, the best first."""
    newest = families.glibc(os) or _OLDEST
    names = [f"manylinux_2_{number}" for number in range(newest, _OLDEST - 1, -1)]
    return [f"{name}_{os.architecture}" for name in [*names, "manylinux2014", "linux"]]


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and path != root / MANIFEST)


def _write_manifest(root: Path) -> None:
    files = {path.relative_to(root).as_posix(): digest(path) for path in _files(root)}
    (root / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n")


class Bundle:
    """A complete and unchanged bundle on this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        try:
            manifest = json.loads((root / MANIFEST).read_text())
            self.files: dict[str, str] = manifest["files"]
        except (OSError, ValueError, KeyError, TypeError):
            raise OeprovError(f"{root}: is no bundle: it has no readable {MANIFEST}") from None
        if manifest.get("format") != FORMAT:
            raise OeprovError(f"{root}: is of format {manifest.get('format')}; this oeprov reads {FORMAT}")
        there = {path.relative_to(root).as_posix() for path in _files(root)}
        for name in sorted(set(self.files) | there):
            if name not in there:
                raise OeprovError(f"{root}: {name} is missing; copy the bundle again")
            if name not in self.files or digest(root / name) != self.files[name]:
                raise OeprovError(f"{root}: {name} is not what was bundled; copy the bundle again")

    def used_by(self, inventory: Inventory, state_dir: Path) -> Inventory:
        """The inventory with the bundle's directories; copies wheels to where `bootstrap` expects them."""
        ours = inventory.flavor == flavor_facts.DEFAULT
        for path in (self.root / "wheels").glob("*/*/*.whl"):
            there = state_dir.absolute() / path.parent.relative_to(self.root)
            if not there.exists():
                shutil.copytree(path.parent, there)
        own = system_of(observe_os(System()))
        hosts = {}
        for name, host in inventory.hosts.items():
            place, index = f"{THERE}/packages", f"{THERE}/pip"
            if host.is_here:
                place = str(self.root / "packages" / own)
                index = str(self.root / "pip" / own_sources.own_key())
            # NVIDIA's repository for apt decides which packages of the driver apt installs.
            named = [name for name in (gpu.REPOSITORY,) if name in host.runtime.repositories]
            update: dict[str, object] = {"repositories": dict.fromkeys(["archive", *named], place)}
            update.update({"index": index} if ours else {})
            runtime = host.runtime.model_copy(update=update)
            elrepo = host.kernel.source in kernelinstall.ELREPO
            kernel = host.kernel.model_copy(update={"repository_url": place} if elrepo else {})
            hosts[name] = replace(host, runtime=runtime, kernel=kernel)
        return replace(inventory, hosts=hosts)

    def lacks(self, os: OsInfo) -> str:
        """Why hosts of that system cannot be set up from the bundle; empty if they can."""
        system = system_of(os)
        has = sorted({name.split("/")[1] for name in self.files if name.startswith("packages/")})
        if system in has:
            return ""
        return f"the bundle {self.root} has nothing for {system}, only for {', '.join(has) or 'no system'}"

    def send_all(self, hosts: Mapping[str, Host], states: Mapping[str, State]) -> list[HostError]:
        """Send all hosts the files that they lack, a few at once; returns why some could not be sent any."""

        def one(name: str) -> HostError | None:
            try:
                self.send(hosts[name], states[name])
            except HostError as error:
                return error
            return None

        with ThreadPoolExecutor(max_workers=_MOST_AT_ONCE) as pool:
            return [error for error in pool.map(one, hosts) if error is not None]

    def send(self, host: Host, state: State) -> None:
        """Send a host the files that it lacks; HostError if it cannot be reached or has no space."""
        if host.is_here:
            return
        made = build.build_of(state, host.desired())
        parts = {f"packages/{system_of(state.os)}/": "packages/", f"pip/{build.key_of(made)}/": "pip/"}
        wanted = {
            there + name.removeprefix(here): (name, sum_)
            for name, sum_ in self.files.items()
            for here, there in parts.items()
            if name.startswith(here)
        }
        _run_shell(host, f"mkdir -p {THERE}/packages {THERE}/pip")
        sums = _run_shell(host, f"cd {THERE} && find packages pip -type f -exec sha256sum {{}} +")
        have = {line[66:]: line[:64] for line in sums.splitlines()}
        missing = {there: name for there, (name, sum_) in wanted.items() if have.get(there) != sum_}
        # A file that was cut off has another sum, so the next run sends it again.
        for batch in self._batches(missing):
            _run_shell(host, f"tar -xf - -C {THERE}", batch)
        extra = " ".join(shlex.quote(f"{THERE}/{name}") for name in have if name not in wanted)
        if extra:
            _run_shell(host, f"rm -f {extra}")

    def _batches(self, missing: Mapping[str, str]) -> Iterator[bytes]:
        """Tar archives of files, ``missing`` being name there → name here; each of about _BATCH bytes."""
        names = list(missing)
        while names:
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w") as file:
                while names and packed.tell() < _BATCH:
                    there = names.pop()
                    info = file.gettarinfo(str(self.root / missing[there]), there)
                    info.uid = info.gid = 0
                    info.uname = info.gname = "root"
                    info.mode = 0o644
                    with (self.root / missing[there]).open("rb") as content:
                        file.addfile(info, content)
            yield packed.getvalue()


def _run_shell(host: Host, line: str, given: bytes = b"") -> str:
    command = remote.elevated(host, shlex.join(["sh", "-c", line]))
    code, out, err = remote.run(host, command, given, remote.CONNECT_TIMEOUT, _TIMEOUT)
    if code:
        error = (err.strip().splitlines() or [f"exit status {code}"])[-1]
        raise HostError(host.name, f"the bundle could not be sent: {error}")
    return out
