"""Files by URL: s3://, oss://, gs:// and hdfs://, through pyarrow's file systems; file:// is a local path.

`RemotePath` has those methods of `pathlib.Path` that readers use, so most code does not ask which one it has.
Errors are OSError like a local file's: `strerror` says in one sentence what was found and what to do, and
`filename` is the URL. Credentials come from where each store's own tools find them, and are in no message.

Not for rows of tables and not for servers: the core reads and writes local files only.
"""

from __future__ import annotations

import configparser
import contextlib
import datetime
import errno
import fnmatch
import functools
import glob
import hashlib
import io
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

SCHEMES = ("s3", "oss", "gs", "hdfs")
PART = 8 << 20  # bytes per request
_AHEAD = 4  # parts requested at the same time
# Bytes of a request at least: pyarrow puts the text of a store's error into the buffer for the answer, and
# without room for it the error is lost.
_LEAST = 64 << 10
_ATTEMPTS = 6  # of a request
_CONNECT_SECONDS, _SILENT_SECONDS = 5, 10
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_BLOCK = 4 << 20  # bytes of a file in memory while it is uploaded


class InvalidUrl(ValueError):
    """A URL that this cannot open; the message says why, without what may be secret in it."""


@dataclass(frozen=True, order=True)
class RemotePath:
    """An object or a folder in a store; equal and ordered by `url`."""

    url: str  # without a slash at the end
    _size: int | None = field(default=None, compare=False, repr=False)  # known from a listing

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        raise TypeError(f"{self.url} is not a local file")

    def resolve(self) -> RemotePath:
        """Return this path: a URL has no links."""
        return self

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def scheme(self) -> str:
        """The URL's scheme, such as "s3"."""
        return self.url.partition("://")[0]

    @property
    def bucket(self) -> str:
        """The bucket; of HDFS, host and port."""
        return self.url.partition("://")[2].partition("/")[0]

    @property
    def key(self) -> str:
        """The object's name in its bucket; empty for the bucket itself."""
        return self.url.partition("://")[2].partition("/")[2]

    @property
    def name(self) -> str:
        """The last part of the key."""
        return PurePosixPath(self.key).name

    @property
    def suffix(self) -> str:
        """The name's ending, such as ".gz"."""
        return PurePosixPath(self.key).suffix

    @property
    def stem(self) -> str:
        """The name without its ending."""
        return PurePosixPath(self.key).stem

    @property
    def parent(self) -> RemotePath:
        """The folder that has it; a bucket is its own."""
        return RemotePath(self.url.rpartition("/")[0]) if self.key else RemotePath(self.url)

    def relative_to(self, folder: RemotePath) -> str:
        """Return the rest of the URL below `folder`."""
        return self.url.removeprefix(folder.url).lstrip("/")

    def is_file(self) -> bool:
        """Return whether there is such an object."""
        return bool(self._info().type == fs.FileType.File)

    def is_dir(self) -> bool:
        """Return whether there are objects below it."""
        return not self.key or self._info().type == fs.FileType.Directory

    def exists(self) -> bool:
        """Return whether it is an object or a folder."""
        return self.is_file() or self.is_dir()

    def stat(self) -> Any:
        """Return `st_size`. Raises FileNotFoundError."""
        if self._size is not None:
            return SimpleNamespace(st_size=self._size)
        info = self._info()
        if info.type != fs.FileType.File:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", self.url)
        return SimpleNamespace(st_size=info.size)

    def iterdir(self) -> list[RemotePath]:
        """Return what lies directly in it, sorted."""
        return self._list(recursive=False)

    def files(self) -> list[RemotePath]:
        """Return all objects below it, sorted, with their sizes."""
        return [path for path in self._list(recursive=True) if path._size is not None]

    def open(self, mode: str = "rb", buffering: int = -1) -> BinaryIO:
        """Open it to read."""
        if mode != "rb":
            raise ValueError(f"mode is {mode!r}; expected 'rb'")
        return RemoteFile(self)  # type: ignore[return-value]

    def read_bytes(self) -> bytes:
        """Return the whole content."""
        with self.open() as file:
            return file.read()

    def write_bytes(self, content: bytes) -> None:
        """Replace the object."""
        with _explaining(self), self._system().open_output_stream(self._place, compression=None) as stream:
            stream.write(content)

    def etag(self) -> str:
        """Return the store's mark of this content; empty if it gives none."""
        with _explaining(self), self._system().open_input_file(self._place) as file:
            found = file.metadata() or {}
        return bytes(found.get(b"ETag", found.get("ETag", b""))).decode().strip('"')

    def unlink(self) -> None:
        """Remove the object; it may be gone already."""
        with contextlib.suppress(FileNotFoundError), _explaining(self):
            self._system().delete_file(self._place)

    def remove(self) -> None:
        """Remove all objects below it, and what is there of a folder itself."""
        with contextlib.suppress(FileNotFoundError), _explaining(self):
            self._system().delete_dir(self._place)

    def upload(self, source: Path, limit: Bandwidth | None = None) -> str:
        """Replace the object by a local file's content; return its SHA-256.

        After an error there is no such object, or the former one.
        """
        try:
            with source.open("rb") as file, _explaining(self):
                with self._system().open_output_stream(self._place, compression=None) as stream:
                    size, digest = _copy(file, stream, _BLOCK, limit)
                found = self._info().size
            if found != size:
                raise OSError(errno.EIO, f"it has {found} bytes there, {source} has {size}", self.url)
        except BaseException:
            # pyarrow has no way to give up an upload: what was written becomes the object.
            with contextlib.suppress(OSError):
                self.unlink()
            raise
        return digest

    def download(self, target: Path, limit: Bandwidth | None = None) -> tuple[int, str]:
        """Write the object to a local file; return its bytes and SHA-256. After an error there is no file."""
        try:
            with self.open() as source, target.open("wb") as file:
                return _copy(source, file, PART, limit)
        except BaseException as error:
            target.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:
                raise OSError(error.errno, error.strerror, str(target)) from error
            raise

    @property
    def _place(self) -> str:
        """Its name for pyarrow."""
        return f"/{self.key}" if self.scheme == "hdfs" else f"{self.bucket}/{self.key}".rstrip("/")

    def _system(self) -> fs.FileSystem:
        return _system(self.scheme, self.bucket)

    def _info(self) -> fs.FileInfo:
        with _explaining(self):
            found = self._system().get_file_info(self._place)
        if found.type == fs.FileType.NotFound:
            self.check_bucket()
        return found

    def check_bucket(self) -> None:
        """Raise FileNotFoundError if there is no such bucket; stores call each object in it not found."""
        if self.scheme == "hdfs":
            return
        try:
            with _explaining(self):
                found = self._system().get_file_info(self.bucket)
        except OSError:
            return  # a client that may not list the bucket may still read its objects
        if found.type == fs.FileType.NotFound:
            raise FileNotFoundError(errno.ENOENT, _no_bucket(self), self.url)

    def _list(self, *, recursive: bool) -> list[RemotePath]:
        with _explaining(self):
            found = self._system().get_file_info(fs.FileSelector(self._place, recursive=recursive))
        root = len(self._place.rstrip("/"))
        return sorted(
            RemotePath(self.url + info.path[root:], info.size if info.type == fs.FileType.File else None)
            for info in found
        )


class RemoteFile(io.RawIOBase):
    """An open object. Reading onward requests parts ahead; one that is cut short is requested again.

    Files of fsspec have one request on the way, and take a whole block after a jump; obstore has no HDFS.
    """

    def __init__(self, path: RemotePath) -> None:
        """Raises OSError."""
        super().__init__()
        self.name = str(path)
        self._path = path
        with _explaining(path):
            self._file = path._system().open_input_file(path._place)
            self._size: int = self._file.size()
        self._at = 0
        self._parts: deque[tuple[int, Future[bytes]]] = deque()  # those ahead, by their first byte
        self._threads: ThreadPoolExecutor | None = None
        self._last = -1  # the byte after the last read

    def size(self) -> int:
        """Return the bytes of the object."""
        return self._size

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def seekable(self) -> bool:
        """Return that it can be read from anywhere."""
        return True

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place; return it."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`; return the number of bytes, which is smaller at the end only."""
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view) and (found := self._some(len(view) - done)):
            view[done : done + len(found)] = found
            done += len(found)
        return done

    def readall(self) -> bytes:
        """Return the rest."""
        return b"".join(iter(lambda: bytes(self._some(PART)), b""))

    def close(self) -> None:
        """Close it."""
        if not self.closed:
            if self._threads is not None:
                self._threads.shutdown(cancel_futures=True)
            self._file.close()
        super().close()

    def _some(self, most: int) -> memoryview:
        """Return bytes at the present place and go past them; none at the end."""
        if self._at >= self._size:
            return memoryview(b"")
        onward = self._at == self._last
        if not onward and not (self._parts and self._parts[0][0] <= self._at < self._parts[0][0] + PART):
            self._parts.clear()
            # A jump: Parquet's footer, a header, a digest's block. Ask for little more than that.
            found = memoryview(self._part(self._at, max(_LEAST, min(most, PART))))[:most]
        else:
            found = self._ahead(most)
        self._at += len(found)
        self._last = self._at
        return found

    def _ahead(self, most: int) -> memoryview:
        while self._parts and self._parts[0][0] + PART <= self._at:
            self._parts.popleft()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_AHEAD, "fetch")
        following = self._parts[-1][0] + PART if self._parts else self._at
        while len(self._parts) < _AHEAD and following < self._size:
            self._parts.append((following, self._threads.submit(self._part, following, PART)))
            following += PART
        start, part = self._parts[0]
        return memoryview(part.result())[self._at - start :][:most]

    def _part(self, start: int, length: int) -> bytes:
        wanted = min(length, self._size - start)
        for attempt in range(_ATTEMPTS):
            with _explaining(self._path):
                found: bytes = self._file.read_at(wanted, start)
            if len(found) == wanted:
                return found
            time.sleep(min(0.1 * 2**attempt, 2))
        raise OSError(errno.EIO, f"the store sends {len(found)} bytes instead of {wanted}", self.name)


class Cancelled(Exception):
    """A transfer that was given up on request."""


class Bandwidth:
    """Lets bytes pass at most at a rate, until it is cancelled; one for all threads that share it."""

    def __init__(self, bytes_per_second: float = 0) -> None:
        """0: no limit."""
        self._rate = bytes_per_second
        self._cancelled = threading.Event()
        self._free = 0.0  # when the next bytes may pass
        self._lock = threading.Lock()

    def spend(self, count: int) -> None:
        """Wait until `count` more bytes may pass. Raises Cancelled."""
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free)
            self._free = start + (count / self._rate if self._rate else 0)
        if self._cancelled.wait(start - now):
            raise Cancelled

    def cancel(self) -> None:
        """End the transfers that share it."""
        self._cancelled.set()


def _copy(source: Any, target: Any, block_bytes: int, limit: Bandwidth | None) -> tuple[int, str]:
    """Copy one open file to another; return the bytes and their SHA-256."""
    digest, size = hashlib.sha256(), 0
    while block := source.read(block_bytes):
        if limit is not None:
            limit.spend(len(block))
        target.write(block)
        digest.update(block)
        size += len(block)
    return size, digest.hexdigest()


def is_remote(name: object) -> bool:
    """Return whether a path or the text of one is a URL of a store. Raises InvalidUrl for other URLs."""
    if isinstance(name, RemotePath):
        return True
    match = _URL.match(str(name))
    if match is None or match[1].lower() == "file":
        return False
    _check(str(name), match[1])
    return True


def path(name: str) -> Path:
    """Return the path of a local name; of a URL, a RemotePath in its place. Raises InvalidUrl."""
    if is_remote(name):
        return cast(Path, RemotePath(name.rstrip("/")))
    return Path(name.removeprefix("file://")).expanduser()


def match(pattern: str) -> list[Path]:
    """Return the objects of a URL with *, ? or [] in it, sorted; none of these matches a slash."""
    parts = pattern.split("/")
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    if fixed < 3:
        raise InvalidUrl(f"{pattern}: a bucket's name has no pattern")
    folder = RemotePath("/".join(parts[:fixed]))
    try:
        found = folder._list(recursive=fixed < len(parts) - 1)
    except FileNotFoundError:
        folder.check_bucket()
        return []
    found = [one for one in found if one._size is not None and _matches(one.url.split("/"), parts)]
    return cast(list[Path], found)


def _matches(names: list[str], parts: list[str]) -> bool:
    return len(names) == len(parts) and all(map(fnmatch.fnmatchcase, names, parts))


def reason(error: Exception) -> str:
    """Return why a file could not be read or written, without its name."""
    return getattr(error, "strerror", None) or str(error)


def describe(error: OSError) -> str:
    """Return the file's name and why it could not be read or written."""
    return f"{error.filename}: {reason(error)}" if error.filename else reason(error)


def open_input(place: Path | RemotePath) -> pa.NativeFile:
    """Open a file for pyarrow: it can be read from anywhere, and knows its size. Raises OSError."""
    if isinstance(place, RemotePath):
        return pa.PythonFile(RemoteFile(place), "r")
    return pa.OSFile(str(place))


def _check(url: str, scheme: str) -> None:
    """Raise InvalidUrl for one that this cannot open."""
    # A secret may have slashes in it, so the part before the first slash need not have the "@".
    _, _, rest = url.partition("://")
    place = rest.partition("/")[0]
    name, colon, port = place.rpartition(":")
    has_credentials = "@" in place or bool(colon and not port.isdigit() and "[" not in name)
    shown = f"{scheme}://{rest.rpartition('@')[2] if '@' in rest else '…'}" if has_credentials else url
    if has_credentials:
        raise InvalidUrl(
            f"{shown}: the URL has credentials in it, which would end up in logs; remove them there and "
            f"{_CREDENTIALS.get(scheme, 'set them as the store wants them')}"
        )
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in (*SCHEMES, "file"))
        raise InvalidUrl(f"{shown}: {scheme}:// is not one of {known}")
    if not urlsplit(url).netloc:
        raise InvalidUrl(f"{shown}: it names no {'host' if scheme == 'hdfs' else 'bucket'}")


@functools.cache
def _system(scheme: str, bucket: str) -> fs.FileSystem:
    """Return pyarrow's file system of a bucket. Raises InvalidUrl, and OSError."""
    if scheme == "gs":
        endpoint = os.environ.get("STORAGE_EMULATOR_HOST", "")
        other = {"endpoint_override": urlsplit(endpoint).netloc, "scheme": urlsplit(endpoint).scheme}
        limit = datetime.timedelta(seconds=_SILENT_SECONDS)
        return fs.GcsFileSystem(retry_time_limit=limit, **(other | {"anonymous": True} if endpoint else {}))
    if scheme == "hdfs":
        if not os.environ.get("CLASSPATH"):  # else libhdfs prints where it looks for Java, and fails
            raise InvalidUrl(
                f"hdfs://{bucket}: Hadoop's client is not set up on this host; set JAVA_HOME, HADOOP_HOME "
                "and CLASSPATH (hadoop classpath --glob) for this process"
            )
        host, _, port = bucket.partition(":")
        return fs.HadoopFileSystem(host, int(port or 8020))
    common = {
        "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
        "allow_delayed_open": True,  # a small object takes one request instead of three
        "connect_timeout": _CONNECT_SECONDS,
        "request_timeout": _SILENT_SECONDS,
    }
    if scheme == "oss":
        return fs.S3FileSystem(force_virtual_addressing=True, **_oss(bucket), **common)
    if endpoint := _s3_endpoint():
        return fs.S3FileSystem(endpoint_override=endpoint, **common)
    if not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or _profile("region")):
        with contextlib.suppress(OSError):
            return fs.S3FileSystem(region=fs.resolve_s3_region(bucket), **common)
    return fs.S3FileSystem(**common)


def _s3_endpoint() -> str:
    """Return the S3 server that the environment or the profile names; empty for Amazon's own."""
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return named or _profile("endpoint_url")


def _profile(name: str) -> str:
    """Return a setting of the present profile in ~/.aws/config; empty if it is not there."""
    profile = os.environ.get("AWS_PROFILE", "default")
    config = configparser.ConfigParser(interpolation=None)
    try:
        config.read(Path(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")).expanduser(), encoding="utf-8")
    except (OSError, ValueError, configparser.Error):  # the store's own client says what is wrong with it
        return ""
    section = profile if profile == "default" else f"profile {profile}"
    return config.get(section, name, fallback="")


def _oss(bucket: str) -> dict[str, str]:
    """Return endpoint and credentials of Alibaba Cloud's OSS, as its own tools find them."""
    region, endpoint = os.environ.get("OSS_REGION", ""), os.environ.get("OSS_ENDPOINT", "")
    if not (region or endpoint):
        raise InvalidUrl(
            f"oss://{bucket}: set OSS_REGION (such as cn-hangzhou) or OSS_ENDPOINT for this process"
        )
    found = {
        "endpoint_override": endpoint or f"https://s3.oss-{region}.aliyuncs.com",
        "region": f"oss-{region}" if region else "",
        "access_key": os.environ.get("OSS_ACCESS_KEY_ID", ""),
        "secret_key": os.environ.get("OSS_ACCESS_KEY_SECRET", ""),
        "session_token": os.environ.get("OSS_SESSION_TOKEN", ""),
    }
    return {name: value for name, value in found.items() if value}


_CREDENTIALS = {
    "s3": "use AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws/credentials or the instance's role",
    "oss": "use OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET",
    "gs": "use GOOGLE_APPLICATION_CREDENTIALS, gcloud auth application-default login or the instance's role",
    "hdfs": "use kinit",
}
_DENIED = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN_ID|INVALID_SIGNATURE"
    r"|EXPIRED_TOKEN|HTTP status 40[13]|PERMISSION_DENIED|UNAUTHENTICATED|Permission denied"
)
_BUSY = re.compile(r"SLOW_DOWN|SERVICE_UNAVAILABLE|INTERNAL_FAILURE|HTTP status 5\d\d|UNAVAILABLE|THROTTLING")
_UNREACHED = re.compile(r"NETWORK_CONNECTION|curlCode: (?:5|6|7|28|35)\b|REQUEST_TIMEOUT")


@contextlib.contextmanager
def _explaining(place: RemotePath) -> Iterator[None]:
    """Turn pyarrow's errors in the block into an OSError with one sentence and the URL."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # explained already, or of a local file
        number, reason = _explain(place, str(error), getattr(error, "errno", None))
        raise OSError(number, reason, place.url) from error
    except InvalidUrl as error:
        raise OSError(errno.EINVAL, str(error).partition(": ")[2], place.url) from error


def _explain(place: RemotePath, text: str, number: int | None) -> tuple[int, str]:
    where = _shown_bucket(place)
    if "NO_SUCH_BUCKET" in text:
        return errno.ENOENT, _no_bucket(place)
    if number == errno.ENOENT or "RESOURCE_NOT_FOUND" in text or "NO_SUCH_KEY" in text:
        return errno.ENOENT, "there is no such object"
    if _DENIED.search(text):
        return errno.EACCES, f"the store refuses these credentials; {_CREDENTIALS[place.scheme]}"
    if "Failed to flush response stream" in text:
        return errno.EIO, f"the store refuses to send it; {_CREDENTIALS[place.scheme]}"
    if _BUSY.search(text):
        return (
            errno.EBUSY,
            f"the store is overloaded ({_ATTEMPTS} attempts failed); try again later",
        )
    if "curlCode: 60" in text:
        return (
            errno.EPROTO,
            f"the certificate of {where} is not trusted on this host; install its authority's",
        )
    if _UNREACHED.search(text):
        return errno.EHOSTUNREACH, f"{where} does not answer; check the endpoint and the network"
    first = text.strip().splitlines()[0] if text.strip() else "unknown error"
    first = re.sub(r"\s*\(Request ID: [^)]*\)|\b(?:AKIA|ASIA|LTAI)\w+", "", first)
    return errno.EIO, first[:300]


def _shown_bucket(place: RemotePath) -> str:
    endpoint = _s3_endpoint() if place.scheme == "s3" else os.environ.get("OSS_ENDPOINT", "")
    return f"{place.scheme}://{place.bucket}" + (f" at {endpoint}" if endpoint else "")


def _no_bucket(place: RemotePath) -> str:
    return f"there is no bucket {_shown_bucket(place)}; make it, or correct the name"
