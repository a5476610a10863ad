"""Training scripts of the user's own on one host: their archives, a job's copy, and their environments.

An archive is kept by its digest, so that a second job with the same script sends nothing. An environment has
the packages that a script asks for, over the runtime's; jobs that ask for the same share it. Both are made
again where they are missing, so old ones may go at any time that no job uses them.
"""

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import re
import select
import tarfile
import time
import zlib
from typing import IO, Any, Callable, Dict, List

from . import environments, jobfiles, openat, pipindex, systemd
from .command import STOPPED, CommandError, Result, System, replace_file

SCRIPTS = jobfiles.HOME + "/scripts"
ENVIRONMENTS = jobfiles.HOME + "/environments"
KEPT = 5  # archives, and environments that no job uses
STAMP = "oeprov-environment.json"
PIP_SECONDS = 3000
_POLL = 0.2  # seconds
_UNREACHABLE = re.compile(
    r"NewConnectionError|Name or service not known|Temporary failure in name resolution|Connection refused|"
    r"Network is unreachable|ConnectTimeoutError|Max retries exceeded",
)
_NOT_BUILT = re.compile(r"Failed (?:building wheel for|to build) (\S+)")
_CAUSE = re.compile(r"(?:\S+: )?(?:fatal )?error: (?!subprocess-exited|metadata-generation)(.*)")


def deliver(system: System, args: Dict[str, Any]) -> Dict[str, Any]:
    """Keep a script's archive, make its environment, and remove old ones; idempotent.

    ``args``: ``digest``; ``archive`` (zlib, base64), or empty to ask whether it is there; ``environment`` as
    for ``make_environment``, or empty; ``user`` that jobs run as. Gives ``missing``, whether the archive must
    be sent, and ``made``, whether the environment was made.
    """
    os.umask(0o022)  # the jobs' user reads what root makes here
    path = archive_path(args["digest"])
    if not system.exists(path):
        if not args["archive"]:
            return {"missing": True, "made": False}
        _keep(system, path, args["digest"], zlib.decompress(base64.b64decode(args["archive"])))
    _touch(system, path)
    made = False
    if args["environment"]:
        jobfiles.ensure_user(system, args["user"])
        made = make_environment(system, args["environment"], args["user"], _is_heard)
    units = "".join(system.read(systemd.path(name)) for name in systemd.ours(system))
    clean(system, SCRIPTS, lambda path: False)
    clean(system, ENVIRONMENTS, lambda path: path + "/" in units or environments.folder(path) in units)
    return {"missing": False, "made": made}


def _is_heard() -> bool:
    """Whether somebody still reads this process's output: the launcher ends its ssh at a stop request."""
    output = select.poll()
    output.register(1, 0)
    return not output.poll(0)


def archive_path(digest: str) -> str:
    """Where a host keeps the archive of that digest."""
    return os.path.join(SCRIPTS, digest + ".tar")


def _keep(system: System, path: str, digest: str, archive: bytes) -> None:
    if hashlib.sha256(archive).hexdigest() != digest:
        raise CommandError("the script's archive did not come whole")
    real = system.path(path)
    try:
        os.makedirs(os.path.dirname(real), 0o755, exist_ok=True)
        replace_file(real, archive, 0o600)  # it may hold what only the user may read
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}")


def unpack(system: System, directory: str, user: str, digest: str) -> None:
    """Give the job its copy of the script, writable for its processes; one of the same digest stays."""
    there, stamp = os.path.join(directory, "script"), os.path.join(directory, "script.digest")
    if openat.has_text(system, stamp, digest) and "script" in openat.list_names(system, directory):
        return
    archive = archive_path(digest)
    if not system.exists(archive):
        raise CommandError(f"{archive} is missing: launch the job again")
    uid, gid = jobfiles.ensure_user(system, user)
    openat.remove(system, there)
    try:
        with openat.directory(system, there, make=True) as made, tarfile.open(system.path(archive)) as packed:
            if os.fstat(made).st_uid != os.geteuid() or os.listdir(made):
                raise CommandError(f"{there} was made by somebody else meanwhile")
            os.fchmod(made, 0o700)  # nobody else enters it until it is full, so names in it are root's
            held = openat.path_of(made)
            packed.extractall(held)  # noqa: S202 - it is what the controller has packed
            for place, folders, files in os.walk(held):
                for name in folders + files:
                    os.lchown(os.path.join(place, name), uid, gid)
            os.fchown(made, uid, gid)
    except (OSError, tarfile.TarError) as error:
        raise CommandError("{}: {}".format(there, getattr(error, "strerror", None) or error))
    openat.write(system, stamp, digest, 0o600, uid, gid)


def make_environment(
    system: System, wanted: Dict[str, Any], user: str = "", is_wanted: Callable[[], bool] = lambda: True
) -> bool:
    """Make an environment over that of ``python``, with packages; False if it is there already.

    ``wanted``: ``path``; ``python`` of the runtime's environment; ``files``, name -> text, and ``arguments``
    that make pip read them; ``index`` as runtime_index says. ``user``: who runs pip, for scripts of packages
    are other people's; empty: this process's. CommandError says which package, or that there is no network,
    or that ``is_wanted`` has become false while pip ran; nothing is left then.
    """
    path = wanted["path"]
    parent = os.path.dirname(path)
    os.makedirs(system.path(parent), 0o755, exist_ok=True)
    with system.open_lock(os.path.join(parent, ".lock")) as lock:
        while not _locked(lock):  # another launch may be making the same one
            if not is_wanted():
                raise _stopped(wanted)
            time.sleep(_POLL)
        return _make_by_digest(system, wanted, user, is_wanted)


def _make_by_digest(system: System, wanted: Dict[str, Any], user: str, is_wanted: Callable[[], bool]) -> bool:
    """Make it where no job runs from, and the wanted path a link to it; see ``environments``."""
    path, python = wanted["path"], environments.resolve(system, wanted["python"])
    sites = _sites(system, python, user)
    place = environments.place_over(system, path, python, [sites, _installed(system, sites)])
    try:
        made = _make(system, dict(wanted, path=place, python=python), user, is_wanted)
        environments.switch(system, path, place)
    except CommandError:
        environments.forget(system, path, place)
        raise
    environments.clean(system, path)
    return made


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stopped(wanted: Dict[str, Any]) -> CommandError:
    return CommandError("stopped while the packages of {} were installed".format(wanted["source"]))


def _make(system: System, wanted: Dict[str, Any], user: str, is_wanted: Callable[[], bool]) -> bool:
    path = wanted["path"]
    sites = _sites(system, wanted["python"], user)
    stamp = json.dumps({"sites": sites, "packages": _installed(system, sites)}, sort_keys=True)
    if openat.has_text(system, os.path.join(path, STAMP), stamp):
        _touch(system, path)
        return False
    uid, gid = jobfiles.ensure_user(system, user) if user else (-1, -1)
    openat.remove(system, path)
    try:
        openat.make_directory(system, path, 0o755, uid, gid)
        _fill(system, wanted, sites, user, is_wanted)
        openat.write(system, os.path.join(path, STAMP), stamp, 0o644, uid, gid)
    except CommandError:
        with contextlib.suppress(CommandError):
            openat.remove(system, path)
        raise
    return True


def _fill(
    system: System, wanted: Dict[str, Any], sites: List[str], user: str, is_wanted: Callable[[], bool]
) -> None:
    path = wanted["path"]
    uid, gid = jobfiles.ensure_user(system, user) if user else (-1, -1)
    done = system.run(_run_as(user, [wanted["python"], "-m", "venv", "--without-pip", path]), timeout=600)
    if not done.ok:
        raise CommandError("no environment for the script's packages could be made: " + done.explain())
    library = os.path.join(path, "lib")
    versions = [name for name in openat.list_names(system, library) if name.startswith("python")]
    if len(versions) != 1:
        raise CommandError(f"{library}: expected one Python, found {', '.join(versions) or 'none'}")
    # What the runtime has comes after what the script brings; pip leaves it alone.
    lines = [f"import site; site.addsitedir({site!r})\n" for site in sites]
    own = os.path.join(library, versions[0], "site-packages", "oeprov-runtime.pth")
    openat.write(system, own, "".join(lines), 0o644, uid, gid)
    # For its user alone: a requirement may be a URL with a password.
    asked = os.path.join(path, "asked")
    openat.make_directory(system, asked, 0o700, uid, gid)
    for name, text in wanted["files"].items():
        openat.write(system, os.path.join(asked, name), text, 0o600, uid, gid)
    index = wanted.get("index", "")
    pip = [os.path.join(path, "bin", "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    pip += ["--no-input", "--no-cache-dir", "--quiet"] + pipindex.words(index) + wanted["arguments"]
    # pip reads files that name others from their directory.
    shell = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', asked] + pip
    done = system.run_while(
        _run_as(user, shell), is_wanted, PIP_SECONDS, dict(pipindex.environment(index), HOME=path)
    )
    if done.code == STOPPED:
        raise _stopped(wanted)
    if not done.ok:
        raise CommandError(_why(done, wanted))


def _run_as(user: str, argv: List[str]) -> List[str]:
    return ["runuser", "-u", user, "--"] + argv if user else argv


def _why(done: Result, wanted: Dict[str, Any]) -> str:
    said = [line.strip() for line in (done.err + "\n" + done.out).splitlines() if line.strip()]
    errors = [line for line in said if line.startswith("ERROR: ")]
    if _UNREACHABLE.search("\n".join(said)):
        return (
            "the packages of {} cannot be installed: pip reaches no index from here; set runtime_index to a "
            "mirror, or to a directory of wheels on the host".format(wanted["source"])
        )
    built = _NOT_BUILT.search("\n".join(said))
    if built:
        causes = [found.group(1) for found in map(_CAUSE.match, said) if found]
        return (
            "the packages of {} cannot be installed: {} has no wheel for this Python, and it cannot be built "
            "here{}; ask for a version with a wheel, or install what building it needs".format(
                wanted["source"], built.group(1), f" ({causes[-1]})" if causes else ""
            )
        )
    last = (errors[0][len("ERROR: ") :] if errors else said[-1]) if said else done.explain()
    return "the packages of {} cannot be installed: {}".format(wanted["source"], last)


def _sites(system: System, python: str, user: str) -> List[str]:
    """The directories of packages that an interpreter uses."""
    program = (
        "import json, sys; print(json.dumps([p for p in sys.path "
        "if p.rstrip('/').endswith(('site-packages', 'dist-packages'))]))"
    )
    found: List[str] = json.loads(system.check(_run_as(user, [python, "-I", "-c", program]), timeout=120))
    return found


def _installed(system: System, sites: List[str]) -> str:
    """Stands for the packages with their versions in these directories."""
    names = [name for site in sites for name in system.list(site)]
    found = [name for name in names if name.endswith((".dist-info", ".egg-info"))]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def clean(system: System, directory: str, is_used: Callable[[str], bool]) -> None:
    """Remove all but the newest archives or environments of a directory, and those that jobs use."""
    names = [name for name in system.list(directory) if name != ".lock" and not name.endswith(".d")]
    paths = [os.path.join(directory, name) for name in names]
    for path in sorted(paths, key=lambda path: -_modified(system, path))[KEPT:]:
        if is_used(path):
            continue
        for item in (path, environments.folder(path)):
            openat.remove(system, item)


def _touch(system: System, path: str) -> None:
    try:
        os.utime(system.path(path))
    except OSError:
        pass  # it only says when it was last used


def _modified(system: System, path: str) -> float:
    try:
        return os.stat(system.path(path)).st_mtime
    except OSError:
        return 0.0
