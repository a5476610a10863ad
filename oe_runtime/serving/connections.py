"""The running servers of a model's rows: several connections, which are renewed after a loss."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from oe_runtime.client import Client
from oe_runtime.errors import OeError, ServerLost, ServingError, TooManyConnections

_MOST = 4  # lookups at a time
_INTERVAL = 0.25  # seconds between two questions whether the servers answer
_FOLLOWS = 0.05  # seconds between two looks at what training publishes on the servers
_SILENCE = 0.7  # seconds without an answer to it, after which they count as stalled; busy servers say so


class Connections:
    """Connections to the servers for lookups in parallel, each used by one request at a time.

    After a loss, requests are refused at once until `reconnect` succeeds, which `watch` calls as well.
    """

    def __init__(self, client: Client) -> None:
        """`client` is the first connection; its owner closes it. Others are made as requests need them."""
        self._first = client
        self._clients = [client]
        self._idle = [client]
        self._lost: list[Client] = []  # to be renewed
        self._most = _MOST if client.is_remote else 1
        self._making = False
        self._error: ServerLost | None = None  # of the lookup that lost its connection
        self._silence = ""  # why the servers do not answer the watcher
        self._changed = threading.Condition()
        self._reconnecting = threading.Lock()
        self._stop = threading.Event()
        self._watchers: list[threading.Thread] = []
        self.follows = False
        self.following = ""

    @property
    def problem(self) -> str:
        """Why lookups fail, or will; "" if the servers answer."""
        error = self._error
        return self._silence if error is None else str(error)

    @contextlib.contextmanager
    def borrow(self, seconds: float) -> Iterator[Client]:
        """Use a connection, which may take `seconds` to be free. Raises ServerLost, ServingError."""
        client: Client | None = None
        try:
            client = self._take(seconds) or self._make() or self._take(seconds)
            assert client is not None  # noqa: S101 - no other is made
            yield client
        except ServerLost as error:
            with self._changed:
                self._error = error
                self._lost += [*self._idle, *([client] if client else [])]  # all are as old
                self._idle.clear()
                client = None
            raise
        finally:
            with self._changed:
                if client is not None:
                    (self._idle if self._error is None else self._lost).append(client)
                self._changed.notify_all()

    def _take(self, seconds: float) -> Client | None:
        """Return a free connection, or None if one is to be made."""

        def may_go_on() -> bool:
            may_make = not self._making and len(self._clients) < self._most
            return bool(self._error or self._idle or may_make)

        with self._changed:
            if not self._changed.wait_for(may_go_on, seconds):
                raise ServingError(f"the servers have answered no lookup of others for {seconds:g} seconds")
            if self._error is not None:
                raise ServerLost(self._error.endpoint, str(self._error))
            if self._idle:
                return self._idle.pop()
            self._making = True
            return None

    def _make(self) -> Client | None:
        """Return another connection, or None if the servers take no more."""
        try:
            client = self._first.another()
            self._clients.append(client)
            return client
        except TooManyConnections:
            self._most = len(self._clients)
            return None
        finally:
            with self._changed:
                self._making = False
                self._changed.notify_all()

    def reconnect(self) -> None:
        """Renew lost connections. Raises the errors of Client.reconnect; call it again then."""
        with self._reconnecting:
            while self._lost:
                self._lost[-1].reconnect()
                with self._changed:
                    self._idle.append(self._lost.pop())
                    self._changed.notify_all()
            with self._changed:
                self._error = None
                self._changed.notify_all()

    def watch(self) -> None:
        """Ask in a thread several times per second whether the servers answer; reconnect in another."""
        if not self._first.is_remote or self._watchers:
            return
        for work in (self._ask, self._renew):
            self._watchers.append(threading.Thread(target=work, name="oe-serving-servers", daemon=True))
            self._watchers[-1].start()

    def follow(self, look: Callable[[Client], bool]) -> None:
        """Call `look` about twenty times per second in a thread, with a connection of its own.

        It returns whether it has found something. `following` is its last ServingError until it does again.
        """
        if not self._first.is_remote or self.follows:
            return
        self.follows = True
        self._watchers.append(
            threading.Thread(target=self._follow, args=(look,), name="oe-serving-weights", daemon=True)
        )
        self._watchers[-1].start()

    def _follow(self, look: Callable[[Client], bool]) -> None:
        client: Client | None = None
        pause = _FOLLOWS
        while not self._stop.wait(pause):
            pause = _FOLLOWS
            try:
                if client is None:
                    client = self._first.another()
                if look(client):
                    self.following = ""
            except ServingError as error:
                self.following = str(error)
            except OeError:  # lookups say it
                pause = _INTERVAL
                if client is not None:
                    client.close()
                client = None
        if client is not None:
            client.close()

    def _ask(self) -> None:
        client: Client | None = None
        while not self._stop.wait(_INTERVAL):
            try:
                if client is None:
                    client = self._first.another(timeout=_SILENCE)
                elif self._silence:
                    client.reconnect()
                client.checkpoints()  # what costs servers least
            except TooManyConnections:
                continue
            except OeError as error:
                self._silence = str(error)
                continue
            if self._silence:
                with self._changed:  # so that none of them loses a request
                    self._lost += self._idle
                    self._idle.clear()
                self._silence = ""
        if client is not None:
            client.close()

    def _renew(self) -> None:
        while not self._stop.wait(_INTERVAL):
            if self._lost or self._error is not None:
                try:
                    self.reconnect()
                except OeError as error:
                    self._error = ServerLost(getattr(error, "endpoint", ""), str(error))

    def close(self) -> None:
        """Close the connections that were made here."""
        self._stop.set()
        for thread in self._watchers:
            thread.join(2)  # one that waits for a server ends with the process
        for client in self._clients:
            if client is not self._first:
                client.close()
