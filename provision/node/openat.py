"""Files in directories that somebody else may write, such as a job's user: root trusts no name there.

A path is walked by descriptors, one name at a time. Root follows a symbolic link only if root made it where
only root writes, as ``/var/lib/oeprov -> /data/oeprov``. So a name that is swapped meanwhile leads nowhere
else. Only plain files of their directory's owner are read: no pipe that never ends, no hard link to somebody
else's file.

Files where only root writes need none of this; ``System`` reads and writes those.
"""

import contextlib
import errno
import os
import stat
from typing import IO, Dict, Iterator, List, Tuple

from .command import CommandError, System, printable

MOST = 4 << 20  # bytes that ``read`` takes of a file
_DEEPEST = 200  # directories below each other; each one open takes a descriptor and a call
_LINKS = 40  # as the kernel follows
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Neither waits for a pipe's writer nor for a lease.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@contextlib.contextmanager
def directory(system: System, path: str, make: bool = False) -> Iterator[int]:
    """Descriptor of a directory; OSError names what is in the way.

    ``make``: missing ones are made with mode 0755.
    """
    root = os.open(system.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    held, names, links = os.dup(root), path.split("/"), 0
    walked: List[str] = []
    try:
        while names:
            name = names.pop(0)
            if name in ("", "."):
                continue
            whole = "/" + "/".join(walked + [name])
            try:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o755, dir_fd=held)
                below = os.open(name, _DIRECTORY, dir_fd=held)
            except OSError as error:
                target = _link(held, name, whole)
                if not target:
                    raise OSError(error.errno, error.strerror, whole) from None
                links += 1
                if links > _LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), whole) from None
                names = target.split("/") + names
                below = os.dup(root if target.startswith("/") else held)
            else:
                walked.append(name)
            os.close(held)
            held = below
        yield held
    finally:
        os.close(held)
        os.close(root)


def path_of(descriptor: int) -> str:
    """A path to an open directory, for functions that take no descriptor; its own name is not used."""
    return f"/proc/self/fd/{descriptor}"


def _link(above: int, name: str, whole: str) -> str:
    """Target of a link that may be followed, empty for anything else; OSError for another link."""
    try:
        target = os.readlink(name, dir_fd=above)
        maker = os.stat(name, dir_fd=above, follow_symlinks=False).st_uid
    except OSError:
        return ""
    if os.geteuid():
        return target  # it leads to nothing that this user may not reach anyway
    holder = os.fstat(above)
    shared = holder.st_mode & stat.S_IWOTH or (holder.st_mode & stat.S_IWGRP and holder.st_gid)
    if maker or holder.st_uid or (shared and not holder.st_mode & stat.S_ISVTX):
        raise OSError(errno.ELOOP, "is a symbolic link, where others than root may write; remove it", whole)
    return target


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        name = error.filename
        whole = name if isinstance(name, str) and name.startswith("/") else path
        raise CommandError(f"{printable(whole)}: {error.strerror}") from None


def make_directory(
    system: System, path: str, mode: int, uid: int, gid: int, owners: Tuple[int, ...] = ()
) -> None:
    """Make a directory with this mode and owner, or give them to the one there, with its parents (0755).

    CommandError for a directory of another user than root, ``uid`` and ``owners``.
    """
    with _explained(path), directory(system, path, make=True) as found:
        owner = os.fstat(found).st_uid
        if owner not in (0, os.geteuid(), uid, *owners):
            raise OSError(errno.EPERM, f"belongs to user {owner}, not to oeprov; move it away", path)
        os.fchown(found, uid, gid)
        os.fchmod(found, mode)


def write(system: System, path: str, text: str, mode: int = 0o600, uid: int = -1, gid: int = -1) -> None:
    """Replace a file atomically by a new one with this mode and owner, and flush it to the disk.

    Whatever else had the name, a link too, is replaced; CommandError for a directory.
    """
    parent, name = os.path.split(path)
    new = f".{name}.{os.urandom(8).hex()}"
    with _explained(path), directory(system, parent) as above:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(new, flags, 0o600, dir_fd=above)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchown(descriptor, uid, gid)
                os.fchmod(descriptor, mode)
                file.write(text.encode())
                file.flush()
                os.fsync(descriptor)
            os.rename(new, name, src_dir_fd=above, dst_dir_fd=above)
            os.fsync(above)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=above)
            raise


@contextlib.contextmanager
def opened(system: System, path: str, is_roots: bool = False) -> Iterator[IO[bytes]]:
    """A plain file of its directory's owner, to read; OSError for anything else.

    ``is_roots``: it may also be root's, any file of root's. So nothing of it may go to anybody.
    """
    parent, name = os.path.split(path)
    with directory(system, parent) as above:
        descriptor = os.open(name, _FILE, dir_fd=above)
        with os.fdopen(descriptor, "rb") as file:
            if not _is_plain(os.fstat(descriptor), above, is_roots):
                raise OSError(errno.EPERM, "is not a plain file of its directory's owner", path)
            yield file


def _is_plain(found: os.stat_result, above: int, is_roots: bool = False) -> bool:
    mine = found.st_uid == os.fstat(above).st_uid or (is_roots and found.st_uid == 0)
    return mine and stat.S_ISREG(found.st_mode)


def read(system: System, path: str) -> str:
    """Text of a file, at most ``MOST`` bytes; empty if it is missing or no plain file of its owner."""
    try:
        with opened(system, path) as file:
            return file.read(MOST).decode("utf-8", "replace")
    except OSError:
        return ""


def has_text(system: System, path: str, text: str) -> bool:
    """Whether a file has exactly this text; earlier versions wrote such files as root."""
    try:
        with opened(system, path, is_roots=True) as file:
            return file.read(MOST) == text.encode()
    except OSError:
        return False


def list_names(system: System, path: str) -> List[str]:
    """Sorted names in a directory; empty if it is missing, or a link that is not followed."""
    try:
        with directory(system, path) as found:
            return sorted(os.listdir(found))
    except OSError:
        return []


def sizes(system: System, path: str) -> Tuple[Dict[str, int], List[str]]:
    """Bytes of every plain file of its directory's owner at a path or below it, and the names of all else.

    Both by their names from there; that of the path itself is empty. Hidden files are in neither.
    CommandError for a tree that is too deep.
    """
    found: Dict[str, int] = {}
    others: List[str] = []
    parent, name = os.path.split(path)
    with _explained(path):
        try:
            with directory(system, parent) as above:
                _measure(above, name, "", found, others, 0)
        except FileNotFoundError:
            pass
    return found, others


def _measure(above: int, name: str, at: str, found: Dict[str, int], others: List[str], depth: int) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # removed, or swapped, meanwhile
        item = os.stat(name, dir_fd=above, follow_symlinks=False)
        if _is_plain(item, above):
            found[at] = item.st_size
        elif stat.S_ISDIR(item.st_mode):
            with _child(above, name, depth) as below:
                for inner in os.listdir(below):
                    if not inner.startswith("."):
                        _measure(below, inner, os.path.join(at, inner), found, others, depth + 1)
        else:
            others.append(at)


@contextlib.contextmanager
def _child(above: int, name: str, depth: int) -> Iterator[int]:
    if depth > _DEEPEST:
        raise OSError(errno.EMLINK, f"is too deep: more than {_DEEPEST} directories; rm -r removes it")
    descriptor = os.open(name, _DIRECTORY, dir_fd=above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def remove(system: System, path: str, last: str = "") -> bool:
    """Remove what has this name, with all below it; False if nothing has. CommandError says what stays.

    Links are removed, not followed, and so other file systems stay. ``last``: the name directly below it that
    goes after all others.
    """
    parent, name = os.path.split(path)
    with _explained(path):
        try:
            with directory(system, parent) as above:
                _remove(above, name, path, last, 0)
                os.fsync(above)
        except FileNotFoundError:
            return False
    return True


def _remove(above: int, name: str, path: str, last: str, depth: int) -> None:
    try:
        try:
            os.unlink(name, dir_fd=above)
            return
        except IsADirectoryError:
            pass
        with _child(above, name, depth) as below:
            if os.fstat(below).st_dev != os.fstat(above).st_dev:
                raise OSError(errno.EXDEV, "is another file system; unmount it first")
            for inner in sorted(os.listdir(below), key=lambda inner: (inner == last, inner)):
                with contextlib.suppress(FileNotFoundError):
                    _remove(below, inner, os.path.join(path, inner), "", depth + 1)
        os.rmdir(name, dir_fd=above)
    except OSError as error:
        whole = isinstance(error.filename, str) and error.filename.startswith("/")
        raise OSError(error.errno, error.strerror, error.filename if whole else path) from None


def remove_empty(system: System, path: str) -> bool:
    """Remove a directory; False if it holds files, or does not exist."""
    parent, name = os.path.split(path)
    try:
        with directory(system, parent) as above:
            os.rmdir(name, dir_fd=above)
    except OSError:
        return False
    return True
