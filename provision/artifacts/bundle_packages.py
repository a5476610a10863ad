"""System packages of a bundle, with all their dependencies: what an empty machine would install.

The package manager itself collects them, apt with an empty status, dnf or yum with an empty root.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from provision.cluster.errors import OeprovError
from provision.node import families, packages, repositories
from provision.node.command import Result, System
from provision.node.observe import observe_os
from provision.node.state import OsInfo

_TIMEOUT = 3600


class PackageSet(NamedTuple):
    """Packages that are installed together; ``given`` and ``wanted`` repositories as ``repositories.use``
    has them, ``streams`` of dnf's modules (``nvidia-driver:580-open``).
    """

    names: tuple[str, ...]
    given: tuple[tuple[str, str], ...] = ()
    wanted: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()


def system_of(os: OsInfo) -> str:
    """A system's name in a bundle: packages of one fit no other."""
    family = families.find(os)
    release = os.version if family is None else families.release(family, os)
    return f"{os.id}-{release}-{os.architecture}"


def collect(os: OsInfo, parts: Sequence[PackageSet], into: Path) -> int:
    """Put packages of a system and their index into a new directory; returns their number.

    Raises OeprovError if this machine cannot download packages of that system, or some are not available.
    """
    if not os.package_manager:
        raise OeprovError(f"{system_of(os)}: packages are known for {families.known_names()} only")
    scratch = into.parent.absolute() / ".scratch"
    scratch.mkdir(parents=True)
    into.mkdir(parents=True, exist_ok=True)
    try:
        return (_debs if os.package_manager == "apt" else _rpms)(os, parts, into.absolute(), scratch)
    finally:
        shutil.rmtree(scratch)


def _debs(os: OsInfo, parts: Sequence[PackageSet], into: Path, scratch: Path) -> int:
    own = observe_os(System())
    if (own.id, own.version) != (os.id, os.version):
        raise OeprovError(
            f"this machine is {system_of(own)}, and its apt has no packages of {system_of(os)}: run `oeprov "
            "bundle` on such a machine, with --limit to its hosts"
        )
    (scratch / "archives/partial").mkdir(parents=True)
    (scratch / "status").write_text("")
    for number, part in enumerate(parts):
        options = [f"Dir::State::status={scratch / 'status'}", f"Dir::Cache::archives={scratch / 'archives'}"]
        use = repositories.use(os, dict(part.given), list(part.wanted))
        if use.path:
            options += _sources(scratch / f"apt-{number}", use)
        argv = ["apt-get", *(word for option in options for word in ("-o", option))]
        if use.path:
            run([*argv, "update"])
        run([*argv, "-y", "--no-install-recommends", "--download-only", "install", *part.names])
    stanzas = []
    for path in sorted((scratch / "archives").glob("*.deb")):
        there = into / path.name.replace("%3a", ".")
        shutil.move(path, there)
        control = run(["dpkg-deb", "-f", str(there)]).strip()
        sum_, size = digest(there), there.stat().st_size
        stanzas.append(f"{control}\nFilename: ./{there.name}\nSize: {size}\nSHA256: {sum_}\n")
    (into / "Packages").write_text("\n".join(stanzas))
    return len(stanzas)


def _sources(directory: Path, use: repositories.Use) -> list[str]:
    """Options of apt for more repositories than this machine's, or for others."""
    (directory / "parts").mkdir(parents=True)
    (directory / "lists/partial").mkdir(parents=True)
    if not use.options:  # in addition to those of the machine
        for path in Path("/etc/apt").glob("sources.list*"):
            for file in [path] if path.is_file() else path.iterdir():
                shutil.copy(file, directory / "parts")
    (directory / "parts/oeprov.list").write_text(use.text)
    return [
        "Dir::Etc::sourcelist=-",
        f"Dir::Etc::sourceparts={directory / 'parts'}",
        f"Dir::State::lists={directory / 'lists'}",
    ]


def _rpms(os: OsInfo, parts: Sequence[PackageSet], into: Path, scratch: Path) -> int:
    """Download with dnf or yum into an empty root, with the modules of the packages."""
    own, system = observe_os(System()), system_of(os)
    same = system_of(own) == system
    manager = own.package_manager if same else "dnf"
    family = families.find(os)
    release = os.version if family is None else families.release(family, os)
    named = all(dict(part.given).get(repositories.ARCHIVE) for part in parts)
    if not (same or named):
        raise OeprovError(
            f"this machine is {system_of(own)}, whose repositories have nothing for {system}: run `oeprov "
            "bundle` on such a machine, with --limit to its hosts, or name a mirror of its packages: "
            "runtime_repositories: {archive: ADDRESS [ADDRESS OF THE KEY]}"
        )
    index = next((name for name in ("createrepo_c", "createrepo") if shutil.which(name)), "")
    if not (shutil.which(manager) and index):
        debian = own.package_manager == "apt"
        install = "apt-get install dnf createrepo-c" if debian else f"{manager} install createrepo_c"
        raise OeprovError(f"packages of {system} are collected by {manager} and createrepo_c: {install}")
    for number, part in enumerate(parts):
        use = repositories.use(os, dict(part.given), list(part.wanted))
        root, more = scratch / f"root-{number}", scratch / f"repositories-{number}"
        more.mkdir()
        (more / "oeprov.repo").write_text(use.text)
        places = ",".join(["/etc/yum.repos.d"] * same + [str(more)])
        options = [f"--installroot={root}", f"--releasever={release}", f"--setopt=reposdir={places}"]
        if manager == "dnf":
            # Modules say which systems they are for, and an empty root does not say what it is.
            platform = family.module_platform if family else "el{release}"
            options.append(f"--setopt=module_platform_id=platform:{platform.format(release=release)}")
        options += use.options
        for stream in part.streams:
            run([manager, "module", "enable", "-y", *options, stream])
        download = ["--downloadonly", f"--downloaddir={into}"]
        run([manager, "install", "-y", *options, *download, *part.names])
    count = len(list(into.glob("*.rpm")))
    run([index, "-q", str(into)])
    # dnf refuses a package of a module without the module's description.
    modules = {_text(path) for path in scratch.rglob("*modules.yaml*")}
    if modules:
        (scratch / "modules.yaml").write_text("".join(text.rstrip() + "\n" for text in sorted(modules)))
        run(["modifyrepo_c", "--mdtype=modules", str(scratch / "modules.yaml"), str(into / "repodata")])
    return count


def _text(path: Path) -> str:
    """The text of one of dnf's files, compressed in one of four ways or not."""
    unpack = {".gz": gzip.decompress, ".xz": lzma.decompress, ".bz2": bz2.decompress}
    if path.suffix == ".zst":
        return run(["zstd", "-dcq", str(path)])
    return unpack.get(path.suffix, bytes)(path.read_bytes()).decode()


def run(argv: Sequence[str]) -> str:
    """Standard output of a program; OeprovError with its first errors if it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    if done.returncode:
        errors = packages.first_errors(Result(list(argv), done.returncode, done.stdout, done.stderr))
        raise OeprovError(f"`{shlex.join(argv[:2])} … {argv[-1]}` failed: {errors}")
    return done.stdout


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            total.update(chunk)
    return total.hexdigest()
