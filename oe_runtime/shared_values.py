"""Small values on the first server, shared by the clients of a job: reads, compare-and-set, and who is there.

A connection is a lease: each reply names the clients that are connected now (the members). Values are in
the server's memory. They end with that process, and with the last member.

A value of more bytes than the server takes at once is written in pieces, then the versions of these under its
name. A reader that finds other versions has come during a write.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import oe_runtime._core as _core
from oe_runtime.errors import OeError, ServerLost

_T = TypeVar("_T")
_MOST = 1 << 20  # bytes of one value, kMaxSharedValue of oe_runtime/core/wire/frame.h
_MEMBERS = "members"  # a name without a value
_PATIENCE = 5.0  # seconds for the thread to end, which may be connecting to a vanished host
_POLL = 0.5  # seconds between proofs that this client is there
_PAUSE = 0.01  # seconds between two reads of what is being written

# Reads a value, or replaces a version of it: the present version, whether it was written, the present value.
Exchange = Callable[[str, "int | None", bytes], "tuple[int, bool, bytes]"]


def connect_first(
    endpoints: Sequence[str], *, token: str = "", tls: str = "auto", job: str = ""
) -> _core.Client:
    """Connect to the first server, which has the shared values. Raises as a Client."""
    first = [endpoints[0]]
    return _core.Client.connect(first, token, 60.0, 1, False, tls, job, "", False, False, len(endpoints))


def write_pieces(exchange: Exchange, name: str, value: bytes, known: dict[str, int]) -> None:
    """Write a value of any size, whatever was there; empty: remove it. For a name with one writer.

    `known` are the versions that the last call has written, which makes this one shorter.
    """
    pieces = [value[at : at + _MOST] for at in range(0, len(value), _MOST)]
    for number, piece in enumerate(pieces):
        _overwrite(exchange, f"{name}.{number}", piece, known)
    written = [known[f"{name}.{number}"] for number in range(len(pieces))]
    _overwrite(exchange, name, json.dumps(written).encode() if pieces else b"", known)


def read_pieces(exchange: Exchange, name: str, known: int = 0) -> tuple[int, bytes] | None:
    """Return what `write_pieces` wrote, with its version; the value is empty if that is the `known` one.

    None: it is being written, so read it again.
    """
    version, _, head = exchange(name, None, b"")
    if version == known or not head:
        return version, b""
    value = []
    for number, wanted in enumerate(json.loads(head)):
        found, _, piece = exchange(f"{name}.{number}", None, b"")
        if found != wanted:
            return None
        value.append(piece)
    return version, b"".join(value)


def _overwrite(exchange: Exchange, name: str, value: bytes, known: dict[str, int]) -> None:
    written = False
    while not written:
        known[name], written, _ = exchange(name, known.get(name, 0), value)


class SharedValues:
    """One client's connection for shared values, besides that of its rows. Thread-safe.

    After the connection is lost, every call raises ServerLost until `rejoin`. A thread connects again as soon
    as it can, so that the others see that this client lives, whatever it computes.
    """

    def __init__(
        self, endpoints: Sequence[str], *, token: str = "", tls: str = "auto", job: str = ""
    ) -> None:
        """`endpoints`: of all servers, in their order; this connects to the first. Raises as a Client."""
        self._connect = partial(connect_first, endpoints, token=token, tls=tls, job=job)
        self._lock = threading.RLock()
        self._core = self._connect()
        self._lost: ServerLost | None = None
        self._returned = True  # whether there is a connection
        self._announce: Callable[[], None] = lambda: None
        self._last: dict[str, tuple[int, bytes]] = {}  # version and value, as far as this client knows
        self.me = 0  # the number of this connection
        self.members: frozenset[int] = frozenset()
        self._closed = threading.Event()
        self._exchange(_MEMBERS, None)
        self._keeper = threading.Thread(target=self._keep, name="shared-values", daemon=True)
        self._keeper.start()

    def announce(self, call: Callable[[], None]) -> None:
        """Call it now, and in another thread after each reconnect."""
        self._announce = call
        call()

    def rejoin(self) -> None:
        """Go on after the connection was lost. Raises ServerLost while there is no server."""
        with self._lock:
            with contextlib.suppress(ServerLost):
                self._probe()
            if not self._returned:
                self._return(self._connect())
            self._lost = None

    def read(self, name: str) -> bytes:
        """Return a value; empty if there is none."""
        with self._lock:
            self._require()
            self._exchange(name, None)
            return self._last[name][1]

    def write(self, name: str, value: bytes) -> None:
        """Write a value of any size, whatever was there; empty: remove it. For a name with one writer."""
        with self._lock:
            self._require()
            write_pieces(self._exchanged, name, value, {})

    def read_written(self, name: str) -> bytes:
        """Return what `write` wrote; empty if it did not, or does so for several seconds."""
        until = time.monotonic() + _PATIENCE
        while True:
            with self._lock:
                self._require()
                found = read_pieces(self._exchanged, name)
            if found is not None or time.monotonic() > until:
                return b"" if found is None else found[1]
            time.sleep(_PAUSE)

    def change(self, name: str, change: Callable[[dict[str, Any]], _T]) -> _T:
        """Change a JSON object in place, by compare-and-set; return the result of the last call of `change`.

        The result fits the value and the members of one moment: `change` is called again when another client
        was faster. What it raises leaves the value as it was.
        """
        with self._lock:
            self._require()
            fresh = name not in self._last
            if fresh:
                self._exchange(name, None)
            while True:
                version, value = self._last[name]
                found = self.object(name)
                result = change(found)
                changed = json.dumps(found).encode()
                if changed != (value or b"{}"):
                    if self._exchange(name, version, changed):
                        return result
                    fresh = True
                elif fresh:
                    return result
                else:  # nothing to do, as far as is known here
                    self._exchange(name, None)
                    fresh = True

    def object(self, name: str) -> dict[str, Any]:
        """Return a copy of a JSON object as of the last call that read or changed it."""
        _, value = self._last.get(name, (0, b""))
        found: dict[str, Any] = json.loads(value or b"{}")
        return found

    def close(self) -> None:
        """End the connection: the others take back what this client held."""
        self._closed.set()
        with self._lock:
            self._core.close()
        self._keeper.join(_PATIENCE)

    def _require(self) -> None:
        if self._lost is not None:
            raise ServerLost(self._lost.endpoint, str(self._lost))

    def _exchanged(self, name: str, replaces: int | None, value: bytes) -> tuple[int, bool, bytes]:
        written = self._exchange(name, replaces, value)
        return self._last[name][0], written, self._last[name][1]

    def _exchange(self, name: str, replaces: int | None, value: bytes = b"") -> bool:
        """Read, or write where `replaces` is the present version; whether it was written."""
        try:
            version, written, self.me, members, found = self._core.exchange_shared(name, replaces, value)
        except ServerLost as error:
            self._lost, self._returned = error, False
            self._last.clear()
            raise
        self.members = frozenset(members)
        self._last[name] = (version, value if written else found or b"")
        return bool(written)

    def _probe(self) -> None:
        if self._returned:
            self._exchange(_MEMBERS, None)

    def _keep(self) -> None:
        while not self._closed.wait(_POLL):
            with contextlib.suppress(OeError):
                with self._lock, contextlib.suppress(ServerLost):
                    self._probe()
                if self._returned:
                    continue
                core = self._connect()  # may take long
                with self._lock:
                    if self._returned or self._closed.is_set():
                        core.close()
                    else:
                        self._return(core)

    def _return(self, core: _core.Client) -> None:
        self._core.close()
        self._core = core
        self._returned = True
        lost, self._lost = self._lost, None
        try:
            self._exchange(_MEMBERS, None)
            self._announce()
        finally:
            self._lost = self._lost or lost
