"""The dashboard without a browser: who is answered, and what is told of hosts and jobs."""

import http.client
import json
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_processes import make_job

from provision.cli import main as cli
from provision.cluster import share
from provision.cluster.errors import HostError, OeprovError
from provision.converge import assumed_state
from provision.dashboard.server import DashboardServer
from provision.dashboard.watch import Watch
from provision.inventory.loader import load
from provision.jobs.store import JobState, ProcessState
from provision.node.state import FileSystem, Mount, Runtime

PAGE = Path(__file__).parents[3] / "provision" / "dashboard" / "page"
INVENTORY = """\
all:
  vars: {oeprov_cluster: ads, training_data: generate:100}
  children:
    parameter_servers:
      hosts:
        re6p-1: {oeprov_kind: re6p, ansible_host: 192.0.2.11, ansible_user: carol}
        re7p-1: {oeprov_kind: re7p, ansible_host: 192.0.2.12}
    workers:
      hosts: {gpu-1: {oeprov_kind: gpu, ansible_host: 192.0.2.13}}
"""


@pytest.fixture
def server() -> Iterator[DashboardServer]:
    with DashboardServer(lambda _: b'{"x": 1}') as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(
    server: DashboardServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, path, headers={"Host": f"127.0.0.1:{server.port}", **headers})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def test_requests_without_the_token_are_refused(server: DashboardServer) -> None:
    root = f"/{server.token}/"
    assert server.url == f"http://127.0.0.1:{server.port}{root}"
    for path, kind in (("", "text/html"), ("page.js", "text/javascript"), ("page.css", "text/css")):
        status, headers, body = ask(server, root + path)
        assert (status, headers["Content-Type"].split(";")[0]) == (200, kind)
        assert body == (PAGE / (path or "index.html")).read_bytes()
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["Cache-Control"] == "no-store"
    assert ask(server, root + "data.json")[2] == b'{"x": 1}'
    assert ask(server, root, "HEAD")[2] == b""
    for path in ("/", "/data.json", "/x/data.json", f"/{server.token}x/", root + "../watch.py", root + "a/b"):
        assert ask(server, path)[0] == 404
    assert ask(server, root, "POST")[0] == 501


def test_a_page_that_rebinds_its_name_is_refused(server: DashboardServer) -> None:
    path = f"/{server.token}/data.json"
    for name in (
        "evil.example",
        f"evil.example:{server.port}",
        "127.0.0.1.evil.example",
        "",
        "[",
        "192.0.2.1",
    ):
        status, _, body = ask(server, path, Host=name)
        assert status == 403
        assert b'{"x": 1}' not in body
    # The other end of a tunnel has another port.
    for name in ("localhost:9000", "127.0.0.1", "[::1]:80"):
        assert ask(server, path, Host=name)[0] == 200


def test_a_port_that_is_taken_is_one_line(server: DashboardServer) -> None:
    with pytest.raises(
        OeprovError, match=rf"port {server.port} of 127.0.0.1: .* in use; choose another --port"
    ):
        DashboardServer(bytes, server.port)


def test_nothing_comes_from_outside() -> None:
    text = "".join(path.read_text() for path in PAGE.iterdir())
    assert set(re.findall(r"\w+://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in text


def until(document: Callable[[], bytes], done: Callable[[Any], bool]) -> Any:
    changed = threading.Event()
    for _ in range(10_000):
        found = json.loads(document())
        if done(found):
            return found
        changed.wait(0.01)
    raise AssertionError(found)


def test_hosts_and_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inventory.yml").write_text(INVENTORY)
    inventory = load(tmp_path / "inventory.yml", state_dir=tmp_path)
    states: dict[str, Any] = {
        name: assumed_state.state(host.desired()) for name, host in inventory.hosts.items()
    }
    plain = states["re6p-1"]
    states["re6p-1"] = plain._replace(
        runtime=Runtime(oeprov="0.1.0"),
        namespaces=[plain.namespaces[0]._replace(mode="fsdax", uuid="u")],
        filesystems=[FileSystem("pmem0", "ext4", "1234")],
        mounts=[Mount("/dev/pmem0", "/mnt/pmem0", "ext4", ["rw", "dax=always"])],
    )
    states["gpu-1"] = HostError("gpu-1", "192.0.2.13 port 22 refuses connections")
    monkeypatch.setattr("provision.hosts.observe.observe", lambda _: states)
    job, broken = make_job(tmp_path), make_job(tmp_path)
    (job.run_dir / "metrics.jsonl").write_text(
        "".join(
            json.dumps(event) + "\n"
            for event in (
                {"event": "start", "steps": 8},
                {"event": "step", "step": 3, "loss": 0.5, "samples_per_s": 10.0},
                {"event": "step", "step": 2, "loss": 0.7, "samples_per_s": 9.0},
                {"event": "checkpoint", "step": 2, "path": "x", "seconds": 0.1, "rows": "files"},
            )
        )
    )
    (job.run_dir / "freshness.jsonl").write_text(
        '{"step": 2, "seconds": 0.2}\n{"step": 2, "seconds": 0.4}\n{"step": 3, "seconds": NaN}\n[2]\n{"st'
    )
    ended = ProcessState(name="server-0", role="parameter_server", host="x", pid=1, started=1, exit_code=0)
    broken.write_state(JobState(phase="failed", processes=[ended]))
    broken.job_file.write_text("{}")
    with Watch(inventory, tmp_path) as watch:
        found = until(watch.document, lambda data: data["hosts"]["at"] and data["jobs"]["at"])
    first, second, third = found["hosts"]["list"]
    assert (first["mode"], first["wanted_mode"], first["pmem_bytes"]) == ("fsdax", "fsdax", 1008 << 30)
    assert first["places"] == ["/mnt/pmem0: ext4 with DAX on /dev/pmem0"]
    assert (second["mode"], second["places"]) == ("system-ram", ["memory node 1 without CPUs"])
    assert any("memmap=1008G!257G" in step["what"] for step in second["steps"])
    assert (third["error"], third["roles"]) == ("192.0.2.13 port 22 refuses connections", ["worker"])
    jobs = {item["job"]: item for item in found["jobs"]["list"]}
    assert jobs[job.id]["course"]["step"] == [2, 3]
    assert jobs[job.id]["course"]["loss"] == [0.7, 0.5]
    assert [event["step"] for event in jobs[job.id]["course"]["checkpoints"]] == [2]
    assert jobs[job.id]["course"]["fresh_step"] == [2]
    assert jobs[job.id]["course"]["fresh_s"] == pytest.approx([0.3])
    assert "job.json" in jobs[broken.id]["message"]
    text = json.dumps(found)
    for secret in (job.token_file.read_text().strip(), "carol", "192.0.2.11"):
        assert secret not in text


def test_hosts_are_sent_again_only_when_they_were_observed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = iter(range(1000))
    again = threading.Event()

    def hosts(_: Watch) -> list[dict[str, Any]]:
        number = next(tries)
        assert number == 0 or again.wait(60)
        return [{"host": f"n{place}", "try": number} for place in range(1000)]

    monkeypatch.setattr(Watch, "hosts", hosts)
    monkeypatch.setattr(Watch, "jobs", lambda _: [])
    monkeypatch.setattr("provision.dashboard.watch.HOSTS_SECONDS", 0.01)
    with Watch(load(share.inventory("local")), tmp_path) as watch, DashboardServer(watch.document) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()

        def get(query: str = "") -> bytes:
            with urllib.request.urlopen(f"{server.url}data.json{query}") as answer:  # noqa: S310
                found: bytes = answer.read()
                return found

        first = until(get, lambda data: bool(data["hosts"]["at"]))["hosts"]
        assert len(first["list"]) == 1000
        small = get(f"?hosts={first['at']}")
        assert len(small) < 1000
        assert json.loads(small)["hosts"] == {"at": first["at"], "trouble": ""}
        assert len(json.loads(get("?hosts=no"))["hosts"]["list"]) == 1000
        again.set()
        data = until(lambda: get(f"?hosts={first['at']}"), lambda data: "list" in data["hosts"])
        assert data["hosts"]["list"][0]["try"] > 0
        server.shutdown()
        thread.join()


def test_a_missing_inventory_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["dashboard", "-i", str(tmp_path / "none.yml")]) == 1
    assert "none.yml" in capsys.readouterr().err


@pytest.mark.parametrize("error", [OeprovError("it is not to be had"), ZeroDivisionError("division by zero")])
def test_a_failed_survey_is_shown_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    (tmp_path / "inventory.yml").write_text(INVENTORY)
    inventory = load(tmp_path / "inventory.yml", state_dir=tmp_path)
    tries: list[None] = []

    def fails(_: object) -> None:
        tries.append(None)
        raise error

    monkeypatch.setattr("provision.dashboard.watch.survey", fails)
    monkeypatch.setattr("provision.dashboard.watch.HOSTS_SECONDS", 0.01)
    with Watch(inventory, tmp_path) as watch:
        found = until(watch.document, lambda data: len(tries) > 1 and data["hosts"]["trouble"])
    assert str(error) in found["hosts"]["trouble"]
    assert found["hosts"]["at"] is None
