"""What clients share on the first server, when they and the server come and go."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training_runs import ServerProcess

from oe_runtime.errors import AuthError, ServerLost, SpecError
from oe_runtime.shared_values import SharedValues

pytestmark = pytest.mark.process


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    found = ServerProcess(tmp_path / "server")
    yield found
    found.stop()


@pytest.fixture
def clients(server: ServerProcess) -> Iterator[list[SharedValues]]:
    found = [SharedValues([server.endpoint], job="train") for _ in range(2)]
    yield found
    for values in found:
        values.close()


def count(found: dict[str, Any]) -> int:
    found["count"] = found.get("count", 0) + 1
    return int(found["count"])


def test_changes_of_several_clients_are_one_after_the_other(clients: list[SharedValues]) -> None:
    seen: list[int] = []

    def change(values: SharedValues) -> None:
        seen.extend(values.change("counter", count) for _ in range(100))

    threads = [threading.Thread(target=change, args=(values,)) for values in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(1, 201))
    # What changes nothing is decided by the present value, not by the one last seen.
    assert {values.change("counter", lambda found: found["count"]) for values in clients} == {200}


def test_an_error_of_a_change_leaves_the_value(clients: list[SharedValues]) -> None:
    one, two = clients
    one.change("counter", count)

    def fail(found: dict[str, Any]) -> None:
        count(found)
        raise KeyError("step")

    with pytest.raises(KeyError, match="step"):
        two.change("counter", fail)
    assert two.change("counter", count) == 2


def test_values_of_any_size_are_written_in_pieces(clients: list[SharedValues]) -> None:
    one, two = clients
    large = bytes(range(256)) * 10000
    one.write("weights", large)
    assert two.read_written("weights") == large
    one.write("weights", b"short")
    assert two.read_written("weights") == b"short"
    one.write("weights", b"")
    assert two.read_written("weights") == b""
    with pytest.raises(SpecError, match="a name has at most 64 bytes"):
        one.read("n" * 65)


def test_members_are_the_clients_that_live(clients: list[SharedValues], server: ServerProcess) -> None:
    one, two = clients
    one.read("any")
    assert one.members == {one.me, two.me}
    two.close()
    while one.members != {one.me}:
        one.read("any")
    other = SharedValues([server.endpoint], job="other")
    assert other.members == {other.me}
    other.close()


def test_after_a_lost_server_a_client_returns_and_its_values_are_gone(
    clients: list[SharedValues], server: ServerProcess
) -> None:
    one, two = clients
    returned = threading.Event()
    calls: list[int] = []

    def announce() -> None:
        one.change("ranks", lambda found: found.update(zero=one.me))
        calls.append(one.me)
        if len(calls) > 1:
            returned.set()

    one.announce(announce)
    one.change("counter", count)
    server.kill()
    with pytest.raises(ServerLost):
        one.read("counter")
    with pytest.raises(ServerLost):
        one.rejoin()
    server.start_again()
    assert returned.wait(60), "a thread connects again, and announces its client"
    with pytest.raises(ServerLost):  # until it knows that the values are gone
        one.read("counter")
    one.rejoin()
    assert one.read("counter") == b""
    two.rejoin()
    two.read("ranks")
    assert two.object("ranks") == {"zero": one.me}
    assert two.members == {one.me, two.me}


def test_a_client_is_refused_without_the_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o600)
    server = ServerProcess(tmp_path / "server", 0, 1, "dram", "--token-file", str(token))
    try:
        with pytest.raises(AuthError):
            SharedValues([server.endpoint], token="another")
    finally:
        server.stop()
