"""A worker that ended is noticed where TensorFlow itself would wait for its heartbeats."""

from __future__ import annotations

import socket
import threading

import pytest

from oe_runtime.run import tensorflow_workers as workers


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def endpoint(of: socket.socket) -> str:
    return f"127.0.0.1:{of.getsockname()[1]}"


def test_a_neighbour_that_closes_its_port_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_PROBE_SECONDS", 0.05)
    before, after, far = listener(), listener(), listener()
    never = "127.0.0.1:1"  # of this worker itself, which nobody asks
    endpoints = [never, endpoint(after), endpoint(far), endpoint(before)]
    lost: list[int] = []
    watching = threading.Thread(
        target=workers._watch_neighbours, args=(endpoints, 0, lost.append), daemon=True
    )
    watching.start()
    for neighbour in (before, after):  # each was asked once, and again while it listens
        for _ in range(2):
            neighbour.accept()[0].close()
    far.close()  # no neighbour: those beside it see it
    watching.join(0.5)
    assert watching.is_alive()
    assert lost == []
    before.close()
    watching.join(30)
    assert lost == [3]
    after.close()


def test_one_that_has_not_listened_yet_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_PROBE_SECONDS", 0.05)
    late = listener()
    place = late.getsockname()
    late.close()
    lost: list[int] = []
    endpoints = ["127.0.0.1:1", f"127.0.0.1:{place[1]}"]
    watching = threading.Thread(
        target=workers._watch_neighbours, args=(endpoints, 0, lost.append), daemon=True
    )
    watching.start()
    watching.join(0.5)
    assert lost == []
    late = socket.create_server(place)
    late.accept()[0].close()
    late.close()
    watching.join(30)
    assert lost == [1]


def test_a_worker_alone_has_nobody_to_watch() -> None:
    workers._watch_neighbours(["127.0.0.1:1"], 0, lambda _: pytest.fail("there is nobody"))
