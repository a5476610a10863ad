"""The only access to a host: read its files and run commands.

``System`` reads files below a root directory and runs commands, so that tests can hand in a tree of files
and canned answers.
"""

import json
import os
import re
import signal
import subprocess
import time
from typing import IO, Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

TIMEOUT = 60.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NOT_FOUND = 127
TIMED_OUT = 124
STOPPED = 130
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_TICK = 0.2  # seconds between two checks whether a command is wanted


class CommandError(Exception):
    """A command failed; the message has the command, its end and its last lines."""


class Result(NamedTuple):
    """How a command ended."""

    argv: List[str]
    code: int
    out: str
    err: str

    @property
    def ok(self) -> bool:
        """It exited with 0."""
        return self.code == 0

    def explain(self) -> str:
        """One line: the command, its end, its last lines."""
        said = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        how = {NOT_FOUND: "is not installed", TIMED_OUT: "did not end in time"}.get(
            self.code, f"failed with exit status {self.code}"
        )
        return "`{}` {}{}".format(" ".join(self.argv), how, ": " + " / ".join(said[-3:]) if said else "")


def printable(text: str) -> str:
    """Somebody else's text as one line for a terminal: without colors, and ? for other control characters."""
    plain = _COLOR.sub("", text).replace("\t", " ")
    return "".join(sign if sign.isprintable() else "?" for sign in plain)


def flush_directory(path: str) -> None:
    """Make the entries of a directory outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: str, data: bytes, mode: Optional[int] = None) -> None:
    """Replace a file atomically and flush it to the disk: readers see the old one or the new one.

    Of several at once the last one wins. Raises OSError with the file's name, as for a full disk; then
    nothing has changed.
    """
    temporary = f"{path}.oeprov-new-{os.urandom(6).hex()}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                if mode is not None:
                    os.fchmod(file.fileno(), mode)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise
        flush_directory(os.path.dirname(path) or ".")
    except OSError as error:
        raise OSError(error.errno, error.strerror, path)


class System:
    """The host that this code runs on."""

    def __init__(self, root: str = "/") -> None:
        self.root = root

    def path(self, path: str) -> str:
        """Path of a file of the host for this process."""
        return os.path.join(self.root, path.lstrip("/"))

    def read(self, path: str, encoding: str = "utf-8") -> str:
        """Text of a file; empty if it is missing or unreadable."""
        try:
            with open(self.path(path), "rb") as file:
                return file.read().decode(encoding, "replace")
        except OSError:
            return ""

    def pieces(self, path: str, choose: Callable[[int], List[Tuple[int, int]]]) -> Iterator[bytes]:
        """Parts of a file or block device, opened once; ``choose`` gives (offset, length) from its size.

        CommandError says which byte cannot be read, and why.
        """
        size, offset = 0, 0
        try:
            descriptor = os.open(self.path(path), os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.lseek(descriptor, 0, os.SEEK_END)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
                for start, length in choose(size):
                    piece = b""
                    while len(piece) < length:
                        offset = start + len(piece)
                        more = os.pread(descriptor, length - len(piece), offset)
                        if not more:
                            raise CommandError(f"{path} ends at byte {offset} of {size}")
                        piece += more
                    yield piece
            finally:
                os.close(descriptor)
        except OSError as error:
            where = f" at byte {offset} of {size}" if size else ""
            raise CommandError(f"{path} cannot be read{where}: {error.strerror}")

    def list(self, path: str) -> List[str]:
        """Sorted names in a directory; empty if it is missing."""
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        """The path exists."""
        return os.path.exists(self.path(path))

    def link(self, path: str) -> str:
        """Target of a symbolic link; empty for anything else."""
        try:
            return os.readlink(self.path(path))
        except OSError:
            return ""

    def which(self, name: str) -> str:
        """Full path of a program, also in the sbin directories; empty if not found."""
        for directory in (os.environ.get("PATH", "") + ":" + _PATH).split(":"):
            path = os.path.join(directory, name)
            if directory and os.path.isfile(path) and os.access(path, os.X_OK):
                return path
        return ""

    def write(self, path: str, text: str, mode: int = 0o644) -> bool:
        """Replace a file atomically and flush it to the disk; False if it has this text already.

        Missing parent directories are made. Files of the kernel (below /sys and /proc) are written in place.
        CommandError names the path and the reason.
        """
        if self.exists(path) and self.read(path) == text:
            return False
        real = self.path(path)
        try:
            if path.startswith(("/sys/", "/proc/")):
                with open(real, "wb") as file:
                    file.write(text.encode())
                return True
            os.makedirs(os.path.dirname(real), exist_ok=True)
            replace_file(real, text.encode(), mode)
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}")
        return True

    def edit(self, path: str, text: str) -> bool:
        """Replace the text of a file that is not oeprov's own: owner, mode and symbolic links stay.

        False if it has this text already. CommandError for a file that is not UTF-8.
        """
        real = os.path.realpath(self.path(path))
        try:
            with open(real, "rb") as file:
                found = os.fstat(file.fileno())
                if file.read().decode() == text:
                    return False
        except FileNotFoundError:
            return self.write(path, text)
        except UnicodeDecodeError:
            raise CommandError(
                f"{path} is not UTF-8, so it could not be kept byte for byte; nothing was changed"
            )
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}")
        inner = "/" + os.path.relpath(real, os.path.realpath(self.root))
        changed = self.write(inner, text, found.st_mode & 0o7777)
        if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
            os.chown(real, found.st_uid, found.st_gid)
        return changed

    def open_lock(self, path: str) -> IO[str]:
        """A file for flock, made if missing; no other user may open it, not even to read: that locks too."""
        descriptor = os.open(self.path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, 0o600)
        return os.fdopen(descriptor, "r+")

    def remove(self, path: str) -> bool:
        """Remove a file; False if there was none. CommandError names the path and the reason."""
        real = self.path(path)
        try:
            os.unlink(real)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}")
        flush_directory(os.path.dirname(real))
        return True

    def remove_empty(self, path: str) -> bool:
        """Remove a directory; False if it holds files, or does not exist."""
        try:
            os.rmdir(self.path(path))
        except OSError:
            return False
        return True

    def read_json(self, path: str) -> Dict[str, Any]:
        """The object in a file of JSON; empty if there is no file, or something else in it."""
        try:
            found = json.loads(self.read(path))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def run(
        self, argv: List[str], timeout: float = TIMEOUT, environment: Optional[Dict[str, str]] = None
    ) -> Result:
        """Run to the end with output captured, English messages and no standard input; never raises."""
        return self.run_while(argv, None, timeout, environment)

    def run_while(
        self,
        argv: List[str],
        is_wanted: Optional[Callable[[], bool]],
        timeout: float,
        environment: Optional[Dict[str, str]] = None,
    ) -> Result:
        """As ``run``; ends the command, with what it has started, once it is not wanted: code STOPPED."""
        program = self.which(argv[0])
        if not program:
            return Result(argv, NOT_FOUND, "", "")
        merged = dict(os.environ, LC_ALL="C.UTF-8", LANG="C.UTF-8")
        merged.update(environment or {})
        try:
            process = subprocess.Popen(
                [program] + argv[1:],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=is_wanted is not None,
                env=merged,
            )
        except OSError as error:
            return Result(argv, 126, "", str(error))
        deadline = time.monotonic() + timeout
        with process:
            try:
                while True:
                    try:
                        said = process.communicate(timeout=_TICK if is_wanted else timeout)
                        out, err = (text.decode("utf-8", "replace") for text in said)
                        return Result(argv, process.returncode, out, err)
                    except subprocess.TimeoutExpired:
                        if time.monotonic() >= deadline:
                            return Result(argv, TIMED_OUT, "", f"gave up after {timeout:.0f} s")
                        if is_wanted and not is_wanted():
                            return Result(argv, STOPPED, "", "")
            finally:
                if process.returncode is None and is_wanted:
                    os.killpg(process.pid, signal.SIGKILL)
                elif process.returncode is None:
                    process.kill()

    def check(
        self, argv: List[str], timeout: float = TIMEOUT, environment: Optional[Dict[str, str]] = None
    ) -> str:
        """Standard output of a command; CommandError if it fails."""
        result = self.run(argv, timeout, environment)
        if not result.ok:
            raise CommandError(result.explain())
        return result.out
