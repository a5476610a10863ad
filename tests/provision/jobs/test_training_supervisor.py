import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_processes import make_job
from rich.console import Console

from provision.cli.views.ending import last_screen
from provision.cli.views.jobs import status
from provision.cli.views.training import describe
from provision.cluster.errors import HostError, TrainingError
from provision.hosts.stop_request import StopRequest
from provision.jobs import cleanup, worker_group
from provision.jobs.backends import Stopped, ssh
from provision.jobs.backends.local import Child
from provision.jobs.backends.ssh import Fleet, HostServer, HostWorker
from provision.jobs.background import start_detached
from provision.jobs.job_run import Limits
from provision.jobs.metrics import Event
from provision.jobs.store import Job, JobState, ProcessSpec
from provision.jobs.supervisor import Outcome, Supervisor
from provision.node import process

QUICK = Limits(checkpoint=20, server=20, loss=20)
REPOSITORY = Path(__file__).parents[3]


def supervise(
    job: Job, *, resume: bool = False, stop: StopRequest | None = None, limits: Limits = QUICK
) -> tuple[Outcome, list[Event]]:
    events: list[Event] = []
    outcome = Supervisor(job, events.append, stop or StopRequest(), limits).run(resume)
    return outcome, events


def assert_nothing_left(job: Job) -> None:
    state = job.state()
    assert state.processes
    for item in state.processes:
        now = process.start_time(item.pid)  # 0: there is none; so is one written down that ended at once
        assert not now or now != item.started, f"{item.name} still runs"


def until(path: Path, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


def until_running(job: Job, seconds: float = 20) -> JobState:
    """The state once it says so, which the launcher writes only after it has started the last worker."""
    deadline = time.monotonic() + seconds
    while (state := job.state()).phase != "running":
        assert time.monotonic() < deadline, f"{state.phase}, not running"
        time.sleep(0.02)
    return state


def ask_when(path: Path, stop: StopRequest, times: int = 1) -> threading.Thread:
    def wait_and_ask() -> None:
        until(path)
        for _ in range(times):
            stop.ask()
            time.sleep(0.3)

    thread = threading.Thread(target=wait_and_ask)
    thread.start()
    return thread


def test_runs_to_the_end(tmp_path: Path) -> None:
    job = make_job(tmp_path, servers=2)
    outcome, events = supervise(job)
    assert outcome == Outcome("done", "training is done", 0)
    kinds = [event["event"] for event in events]
    assert kinds[:4] == ["server", "server", "worker", "start"]
    assert kinds.count("step") == 8
    assert kinds[-1] == "end"
    started = next(event for event in events if event["event"] == "start")
    assert started["servers"] == "127.0.0.1:7001,127.0.0.1:7001", "the worker is given the endpoints in order"
    assert job.state().phase == "done"
    assert [item.exit_code for item in job.state().processes] == [0, 0, 0]
    assert_nothing_left(job)


def test_worker_killed(tmp_path: Path) -> None:
    job = make_job(tmp_path, worker="kills-itself")
    outcome, _ = supervise(job)
    assert (outcome.phase, outcome.exit_code) == ("failed", 1)
    assert "worker-0 on localhost" in outcome.message
    assert "killed by signal 9 (SIGKILL)" in outcome.message
    checkpoint = job.checkpoint()
    assert checkpoint is not None
    assert checkpoint[0] == 2
    assert_nothing_left(job)


def test_one_of_two_workers_killed(tmp_path: Path) -> None:
    job = make_job(tmp_path, worker="loses-worker", follower="kills-itself")
    outcome, events = supervise(job)
    assert (outcome.phase, outcome.exit_code) == ("failed", 1)
    assert "worker-1 on localhost" in outcome.message
    assert "killed by signal 9 (SIGKILL)" in outcome.message
    assert [event["name"] for event in events if event["event"] == "worker"] == ["worker-0", "worker-1"]
    assert [item.exit_code for item in job.state().processes] == [0, 3, -9]
    assert_nothing_left(job)


def test_workers_start_again_from_the_last_checkpoint(tmp_path: Path) -> None:
    job = make_job(tmp_path, worker="loses-worker", follower="kills-itself", restarts=1)
    outcome, events = supervise(job)
    assert outcome == Outcome("done", "training is done", 0)
    again = next(event for event in events if event["event"] == "workers_restarted")
    assert "worker-1 on localhost" in again["message"]
    assert [event["step"] for event in events if event["event"] == "resume"] == [2]
    assert_nothing_left(job)


def lost_one(job: Job, outcome: Outcome, name: str) -> None:
    assert (outcome.phase, outcome.exit_code) == ("done", 0)
    assert outcome.message.startswith(f"training is done by 1 of 2 workers: {name} on localhost (pid ")
    assert outcome.message.endswith("was killed by signal 9 (SIGKILL)")
    assert job.state().lost == ["worker-1"]
    assert len(job.state().processes) == 3
    assert_nothing_left(job)


def test_the_rest_of_the_workers_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path, worker="loses-worker", follower="kills-itself", on_worker_lost="continue")
    outcome, events = supervise(job)
    lost_one(job, outcome, "worker-1")
    assert [event["step"] for event in events if event["event"] == "resume"] == [2]
    again = next(event for event in events if event["event"] == "workers_go_on")
    assert describe(again).endswith("(SIGKILL); the rest restart from the last checkpoint")
    last_screen(job, tmp_path, Console(width=300))
    assert "warning" in capsys.readouterr().out
    assert status(tmp_path) == 0
    assert "1 of 2 workers: worker-1 on localhost" in capsys.readouterr().out


def test_the_first_worker_is_started_again_in_the_place_of_another(tmp_path: Path) -> None:
    job = make_job(tmp_path, worker="kills-itself", follower="follows", on_worker_lost="continue")
    outcome, events = supervise(job, limits=replace(QUICK, loss=0.3))
    lost_one(job, outcome, "worker-0")
    assert [event["name"] for event in events if event["event"] == "worker"][2:] == ["worker-0"]


def test_workers_of_a_queue_go_on_where_they_are(tmp_path: Path) -> None:
    settings = {"on_worker_lost": "continue", "workqueue": True, "restarts": 1}
    job = make_job(tmp_path, worker="lets-go", follower="kills-itself", **settings)
    seen: list[str] = []

    def on_event(event: Event) -> None:
        if event["event"] == "workers_go_on":
            seen.append(job.state().message)

    outcome = Supervisor(job, on_event, StopRequest(), QUICK).run()
    lost_one(job, outcome, "worker-1")
    assert [words.partition(":")[0] for words in seen] == ["1 of 2 workers"]
    kinds = [json.loads(line)["event"] for line in job.metrics_file.read_text().splitlines()]
    assert "resume" not in kinds


def test_each_start_of_the_workers_is_of_a_higher_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that servers need not wait for the end of connections of those before."""
    started: list[tuple[str, int]] = []
    real = Child.start

    def start(child: Child, argv: list[str], *more: Any, fresh: bool = True) -> None:
        at = argv.index("--generation") + 1 if "--generation" in argv else 0
        started.append((child.spec.name, int(argv[at]) if at else 0))
        real(child, argv, *more, fresh=fresh)

    monkeypatch.setattr(Child, "start", start)
    job = make_job(tmp_path, worker="loses-worker", follower="kills-itself", restarts=1)
    supervise(job)
    assert [name for name, _ in started] == ["server-0", *["worker-0", "worker-1"] * 2]
    server, first, second, third, fourth = (generation for _, generation in started)
    assert server == 0
    assert int(time.time()) - 600 < first == second < third == fourth
    started.clear()
    supervise(make_job(tmp_path / "two"))
    assert started[-1] == ("worker-0", 0), "one worker alone takes nobody's place"


def test_a_workers_host_may_be_silent_as_long_as_a_server(tmp_path: Path) -> None:
    for wait, silence in ((300, 300), (0, 120), (1000, 1000)):
        job = make_job(tmp_path / str(wait), server_wait=wait)
        assert Fleet(job, job.spec()).silence == silence


def test_the_workers_that_continue_after_a_loss() -> None:
    endpoints = "--workers a:1,a:2,b:1"
    hosts = ("a", "a", "b")
    specs = [
        ProcessSpec(
            name=f"worker-{rank}", role="worker", host=host, argv=[*endpoints.split(), "--rank", str(rank)]
        )
        for rank, host in enumerate(hosts)
    ]

    def left(*lost: int) -> list[str]:
        found = worker_group.rest(specs, {f"worker-{rank}" for rank in lost})
        return [" ".join(words) for words in worker_group.commands(found, specs, {})]

    assert left(1) == ["--workers a:1,b:1 --rank 0", "--workers a:1,b:1 --rank 1"]
    assert left(0) == left(1), "worker 0 is where the checkpoints are"
    assert left(1, 2) == ["--workers a:1 --rank 0"]
    assert left(0, 1) == [], "nobody else is on that host"


def test_exit_codes_that_count_as_a_lost_worker(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    worker = HostWorker(Fleet(job, job.spec()), job.spec().processes[-1], print)
    for code, lost in ((0, False), (1, False), (3, False), (130, False), (-9, True), (137, True)):
        worker.exit_code = code
        assert worker_group.was_lost(worker) == lost, code
    worker.exit_code = None
    worker.give_up("No route to host")
    assert worker_group.was_lost(worker)
    assert not worker_group.has_mistake(worker)
    assert worker.state().exit_code is None, "nobody knows whether it runs"


def test_a_workers_start_is_waited_for_as_long_as_it_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host ends an earlier worker first, which writes a checkpoint; a stop request ends the wait."""
    job, stop = make_job(tmp_path), StopRequest()
    spec = job.spec().processes[-1].model_copy(update={"host": "gpu-2", "unit": "oeprov-j-worker-0.service"})
    job.write_spec(job.spec().model_copy(update={"processes": [spec], "hosts": {}}))
    fleet = Fleet(job, job.spec())
    fleet.__dict__["hosts"] = {"gpu-2": None}

    def run(
        host: object, errand: str, args: dict[str, Any], longest: int, asked: StopRequest
    ) -> dict[str, Any]:
        assert errand == "start"
        assert longest >= 2 * (600 + 2 * args["seconds"] + 600)
        if not asked.count:
            return {"boot": "b", "workers": {spec.name: 7}}
        raise HostError("gpu-2", "was not waited for: a stop request")

    monkeypatch.setattr(ssh.errands, "run", run)
    worker = HostWorker(fleet, spec, print)
    worker.start(spec.argv, {}, stop)
    assert (worker.pid, worker.boot) == (7, "b")
    stop.ask()
    with pytest.raises(Stopped):
        worker.start(spec.argv, {}, stop)


def test_a_host_that_does_not_answer_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once, not at each observation."""
    job = make_job(tmp_path)
    spec = job.spec().processes[-1].model_copy(update={"host": "gpu-2"})
    clock, told = [1000.0], []
    answers = iter([True, False, False, True, True, *[False] * 60])

    def observe(fleet: Fleet, name: str) -> dict[str, Any]:
        if not next(answers):
            raise HostError(name, "No route to host")
        return {"processes": {spec.name: {"pid": 7, "up": True}}, "boot": "b"}

    monkeypatch.setattr(Fleet, "observe_host", observe)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    worker = HostWorker(Fleet(job, job.spec()), spec, lambda event: told.append(describe(event)))
    while worker.poll() is None:
        clock[0] += 3
    assert told == [
        f"[yellow]![/] gpu-2 ({spec.name}) does not answer, waiting up to 120 s: No route to host",
        "[green]✓[/] gpu-2 answers again after 9.0 s",
        f"[yellow]![/] gpu-2 ({spec.name}) does not answer, waiting up to 120 s: No route to host",
    ]
    assert worker.how == "cannot be reached any more: No route to host"


@pytest.mark.parametrize("again", [False, True])
def test_a_worker_that_is_lost_after_the_last_step_is_started_once_more(
    tmp_path: Path, *, again: bool
) -> None:
    job = make_job(tmp_path, worker="loses-power-at-the-end")
    if again:
        (job.run_dir / "again").touch()
    outcome, events = supervise(job)
    assert outcome.phase == ("failed" if again else "done")
    kinds = [event["event"] for event in events]
    assert kinds.count("worker") == 2
    assert [event["step"] for event in events if event["event"] == "resume"] == [8]
    assert_nothing_left(job)


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    job = make_job(tmp_path, worker="fails", follower="follows", restarts=3, on_worker_lost="continue")
    outcome, events = supervise(job, limits=replace(QUICK, loss=0.2))
    assert outcome.message.endswith("exit status 1: table C1: dim is 9 here and 16 in the checkpoint")
    assert not {"workers_restarted", "workers_go_on"} & {event["event"] for event in events}
    assert_nothing_left(job)


def test_all_workers_are_told_to_stop(tmp_path: Path) -> None:
    job, stop = make_job(tmp_path, worker="waits", follower="follows"), StopRequest()
    asking = ask_when(job.run_dir / "following", stop)
    outcome, _ = supervise(job, stop=stop)
    asking.join()
    assert outcome == Outcome("interrupted", "stopped at step 3, which is saved", 130)
    assert [item.exit_code for item in job.state().processes] == [0, 130, 130]
    assert_nothing_left(job)


def test_workers_of_this_machine_listen_at_the_inventory_s_ports(tmp_path: Path) -> None:
    """`worker_port` puts them on the command lines; no host is asked about them."""
    job, stop = make_job(tmp_path, worker="waits", follower="ends"), StopRequest()
    spec = job.spec()
    for rank, item in enumerate(spec.processes[1:]):
        item.argv.extend(["--workers", "127.0.0.1:47810,127.0.0.1:47811", "--rank", str(rank)])
    job.write_spec(spec)
    asking = ask_when(job.run_dir / "waiting", stop)
    outcome, _ = supervise(job, stop=stop)
    asking.join()
    assert outcome == Outcome("interrupted", "stopped at step 3, which is saved", 130)
    outcome, _ = supervise(job, resume=True)
    assert outcome == Outcome("done", "training is done", 0)
    assert_nothing_left(job)


def test_worker_error_is_shown(tmp_path: Path) -> None:
    outcome, _ = supervise(make_job(tmp_path, worker="fails"))
    assert (outcome.phase, outcome.exit_code) == ("failed", 1)
    assert outcome.message.endswith("exit status 1: table C1: dim is 9 here and 16 in the checkpoint")


def test_server_killed(tmp_path: Path) -> None:
    job = make_job(tmp_path, worker="kills-server")
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        if event["event"] == "server":
            (job.run_dir / "victim").write_text(str(event["pid"]))

    outcome = Supervisor(job, on_event, StopRequest(), QUICK).run()
    assert (outcome.phase, outcome.exit_code) == ("failed", 1)
    assert "server-0 on localhost" in outcome.message
    assert "127.0.0.1:7001" in outcome.message
    assert "killed by signal 9 (SIGKILL)" in outcome.message
    assert "the worker says: lost server 127.0.0.1:7001 after step 3" in outcome.message
    assert_nothing_left(job)


def lose_server(job: Job, limits: Limits) -> tuple[Outcome, list[Event]]:
    """A run whose worker kills its server and waits for another one."""
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        if event["event"] in ("server", "server_restarted"):
            (job.run_dir / "victim.new").write_text(str(event["pid"]))
            (job.run_dir / "victim.new").replace(job.run_dir / "victim")

    return Supervisor(job, on_event, StopRequest(), limits).run(), events


@pytest.mark.parametrize("follower", ["", "good"], ids=["one worker", "two workers"])
def test_killed_server_is_started_again(tmp_path: Path, follower: str) -> None:
    job = make_job(tmp_path, worker="outlives-server", follower=follower, server_wait=60)
    outcome, events = lose_server(job, QUICK)
    assert outcome == Outcome("done", "training is done", 0)
    kinds = [event["event"] for event in events]
    for kind in ("server_lost", "server_restarted", "server_gone", "server_back"):
        assert kinds.count(kind) == 1
    lost = events[kinds.index("server_lost")]
    assert lost["message"] == "was killed by signal 9 (SIGKILL)"
    again = events[kinds.index("server_restarted")]
    assert again["endpoint"] == "127.0.0.1:7001"
    assert job.state().processes[0].pid == again["pid"]
    assert_nothing_left(job)


def test_server_that_dies_again_and_again_ends_the_job(tmp_path: Path) -> None:
    job = make_job(tmp_path, server="comes-back-broken", worker="outlives-server", server_wait=60)
    spec = job.spec()
    worker = spec.processes[1].model_copy(update={"argv": [*spec.processes[1].argv[:-1], "waits"]})
    job.write_spec(spec.model_copy(update={"processes": [spec.processes[0], worker]}))

    def kill_server() -> None:
        until(job.run_dir / "waiting")
        os.kill(job.state().processes[0].pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_server)
    thread.start()
    outcome, events = supervise(job, limits=replace(QUICK, restarts=2, restart_pause=0.05))
    thread.join()
    assert (outcome.phase, outcome.exit_code) == ("failed", 1)
    assert "ended with exit status 1: pool of table C1 is damaged" in outcome.message
    assert "(it was restarted 2 times before)" in outcome.message
    assert [event["event"] for event in events].count("server_restarted") == 2
    assert_nothing_left(job)


@pytest.mark.parametrize("waited_for", [True, False])
def test_a_unit_that_systemd_has_started_again(tmp_path: Path, *, waited_for: bool) -> None:
    job = make_job(tmp_path, server_wait=300 if waited_for else 0)
    spec = job.spec().processes[0].model_copy(update={"unit": "oeprov-j-server-0.service"})
    prepared = spec.state(pid=811, started=5, boot="boot-1", endpoint="10.0.0.1:7001")
    server = HostServer(Fleet(job, job.spec()), spec, prepared)
    answer = {"up": True, "pid": 811, "started": 5, "how": "", "exit_code": None}
    server.refresh({"boot": "boot-1", "processes": {"server-0": answer}})
    assert (server.poll(), server.pid) == (None, 811)
    answer.update(pid=900, started=77, how="its process ended (code=killed, status=9/KILL)")
    server.refresh({"boot": "boot-1", "processes": {"server-0": answer}})
    if waited_for:
        assert (server.poll(), server.state().pid, server.state().started) == (None, 900, 77)
        answer.update(up=False, exit_code=-9)
        server.refresh({"boot": "boot-1", "processes": {"server-0": answer}})
    assert server.poll() is not None
    assert server.how_it_ended() == "was lost: its process ended (code=killed, status=9/KILL)"


def test_pools_are_kept_for_a_resume(tmp_path: Path) -> None:
    """The rows of a stopped job stay on persistent memory, those of one that is done go; never others'."""
    job, stop = make_job(tmp_path, worker="waits"), StopRequest()
    mine, other = tmp_path / "pmem" / job.id / "server-0", tmp_path / "pmem" / "other" / "server-0"
    for path in (mine, other):
        path.mkdir(parents=True)
    spec = job.spec()
    server = spec.processes[0].model_copy(update={"pools": str(mine)})
    job.write_spec(spec.model_copy(update={"processes": [server, spec.processes[1]]}))

    def fill_and_stop() -> None:
        until(job.run_dir / "waiting")
        (mine / "pool").touch()
        stop.ask()

    thread = threading.Thread(target=fill_and_stop)
    thread.start()
    outcome, _ = supervise(job, stop=stop)
    thread.join()
    assert outcome.phase == "interrupted"
    assert (mine / "pool").exists()
    outcome, _ = supervise(job, resume=True)
    assert outcome.phase == "done"
    assert not mine.parent.exists()
    assert other.is_dir()


def test_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    job = make_job(tmp_path, server="dies")
    outcome, events = supervise(job)
    assert (outcome.phase, outcome.exit_code) == ("failed", 1)
    assert "ended with exit status 1: port 7001 on 127.0.0.1 is taken" in outcome.message
    assert str(job.log("server-0")) in outcome.message
    assert not [event for event in events if event["event"] == "worker"]
    assert_nothing_left(job)


def test_a_storage_directory_in_use_stays(tmp_path: Path) -> None:
    """Of another state directory's job with this id, whose server has no rows yet: ours fails at its lock."""
    job = make_job(tmp_path, server="dies")
    place = tmp_path / "pmem" / job.id / "server-0"
    place.mkdir(parents=True)
    spec = job.spec()
    server = spec.processes[0].model_copy(update={"pools": str(place)})
    job.write_spec(spec.model_copy(update={"processes": [server, spec.processes[1]]}))
    with (place / "oe.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        outcome, _ = supervise(job)
        assert outcome.phase == "failed"
        assert place.is_dir()
        with pytest.raises(TrainingError, match=f"{place} could not be removed; check whether a server uses"):
            cleanup.remove(cleanup.holding(job), tmp_path, here_only=False)
        assert (place / "oe.lock").exists()
    cleanup.remove(cleanup.holding(job), tmp_path, here_only=False)
    assert not place.parent.exists()


def test_server_that_never_listens(tmp_path: Path) -> None:
    job = make_job(tmp_path, server="silent", start_timeout=1)
    outcome, _ = supervise(job)
    assert outcome.phase == "failed"
    assert "was not ready after 1 s" in outcome.message
    assert "raise parameter_server_start_timeout" in outcome.message
    assert_nothing_left(job)


def test_program_that_is_missing(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    spec = job.spec()
    first = spec.processes[0].model_copy(update={"argv": ["/nonexistent/python"]})
    job.write_spec(spec.model_copy(update={"processes": [first, *spec.processes[1:]]}))
    outcome, _ = supervise(job)
    assert outcome.message == "server-0 on localhost: /nonexistent/python: No such file or directory"


def test_servers_end_also_without_a_job_file(tmp_path: Path) -> None:
    job, stop = make_job(tmp_path, worker="waits"), StopRequest()

    def remove_and_ask() -> None:
        until(job.run_dir / "waiting")
        job.job_file.unlink()
        stop.ask()

    thread = threading.Thread(target=remove_and_ask)
    thread.start()
    outcome, _ = supervise(job, stop=stop)
    thread.join()
    assert outcome.message == "stopped at step 3, which is saved"
    assert_nothing_left(job)


def test_stop_drains_and_resume_goes_on(tmp_path: Path) -> None:
    job, stop = make_job(tmp_path, worker="waits"), StopRequest()
    thread = ask_when(job.run_dir / "waiting", stop)
    outcome, events = supervise(job, stop=stop)
    thread.join()
    assert outcome == Outcome("interrupted", "stopped at step 3, which is saved", 130)
    assert [event["event"] for event in events][-2:] == ["checkpoint", "interrupted"]
    assert_nothing_left(job)

    events_from = job.metrics_file.stat().st_size
    job.write_state(job.state().model_copy(update={"phase": "prepared", "events_from": events_from}))
    outcome, events = supervise(job, resume=True)
    assert outcome.phase == "done"
    assert job.state().events_from == events_from
    assert [event["step"] for event in events if event["event"] == "step"] == [4, 5, 6, 7, 8]
    assert next(event for event in events if event["event"] == "resume")["step"] == 3


def test_a_stop_in_the_last_second_leaves_the_job_done(tmp_path: Path) -> None:
    """The trainer has told its end and the interpreter is about to exit: SIGTERM kills it then."""
    job, stop = make_job(tmp_path, worker="ends-slowly"), StopRequest()
    thread = ask_when(job.run_dir / "waiting", stop)
    outcome, _ = supervise(job, stop=stop)
    thread.join()
    assert (outcome.phase, outcome.message) == ("done", "training is done")
    assert job.state().processes[-1].exit_code == -signal.SIGTERM
    assert_nothing_left(job)


def test_a_worker_that_ended_without_a_word_is_not_done(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    spec = job.spec()
    silent = spec.processes[1].model_copy(update={"argv": [sys.executable, "-ISc", ""]})
    job.write_spec(spec.model_copy(update={"processes": [spec.processes[0], silent]}))
    outcome, _ = supervise(job)
    assert outcome.phase == "failed"
    assert outcome.message.endswith(f"ended, but {job.metrics_file} has no end event")


def test_a_worker_that_exits_without_a_reason_leaves_nothing(tmp_path: Path) -> None:
    """As os._exit does in a script: what it has started before still runs."""
    program = (
        "import os, subprocess; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); "
        "os._exit(7)"
    )
    job = make_job(tmp_path)
    spec = job.spec()
    leaving = spec.processes[1].model_copy(update={"argv": [sys.executable, "-ISc", program]})
    job.write_spec(spec.model_copy(update={"processes": [spec.processes[0], leaving]}))
    outcome, _ = supervise(job)
    pid = job.log("worker-0").read_text().split()[-1]
    assert outcome.message.endswith(f"ended with exit status 7 without a reason; its last line: {pid}")
    deadline = time.monotonic() + 20
    while process.start_time(int(pid)):
        assert time.monotonic() < deadline, "what the worker has started still runs"
        time.sleep(0.02)


def test_a_job_that_ended_after_its_launcher_is_done(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    job.write_state(JobState(phase="running"))
    for event, phase in (("start", "interrupted"), ("end", "done"), ("resume", "interrupted")):
        with job.metrics_file.open("a") as file:
            file.write(json.dumps({"event": event}) + "\n")
        assert job.state().phase == phase


def test_the_end_of_an_earlier_run_is_not_that_of_this_one(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    job.metrics_file.write_text('{"event": "start"}\n{"event": "end"}\n')
    job.write_state(JobState(phase="running"))
    before = json.loads(job.state_file.read_text())
    del before["events_from"]  # as versions before this field wrote it
    job.state_file.write_text(json.dumps(before))
    assert job.state().phase == "done"
    job.write_state(JobState(phase="running", events_from=job.metrics_file.stat().st_size))
    assert (job.state().phase, job.is_done()) == ("interrupted", False)
    with job.metrics_file.open("a") as file:
        file.write('{"event": "start"}\n{"event": "end"}\n')
    assert (job.state().phase, job.is_done()) == ("done", True)
    outcome, _ = supervise(job)
    assert (outcome.phase, job.state().events_from) == ("done", 0), "its events were written anew"


def test_the_pools_of_a_checkpoint_on_another_host_are_known(tmp_path: Path) -> None:
    job = make_job(tmp_path, servers=2)
    for rows, servers in (("pool", 2), ("files", None)):
        event = {"event": "checkpoint", "step": 2, "path": "/elsewhere/step-0000000002", "rows": rows}
        job.metrics_file.write_text(json.dumps(event) + "\n")
        assert job.pool_servers() == servers


def test_events_are_read_to_the_end_beside_another_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path)
    spec = job.spec()
    far = spec.processes[1].model_copy(update={"unit": "oeprov-j-worker-0.service"})
    job.write_spec(spec.model_copy(update={"processes": [spec.processes[0], far]}))
    fleet = Fleet(job, job.spec())
    fleet.__dict__["hosts"] = {"localhost": None}
    there = '{"event": "start"}\n{"event": "end"}\n'
    asked: list[int] = []

    def observe(host: object, errand: str, args: dict[str, int], timeout: int) -> dict[str, str]:
        if not asked:
            job.metrics_file.write_text(there[:19])  # `oeprov status` has asked a moment before
        asked.append(args["offset"])
        return {"events": there[args["offset"] :]}

    monkeypatch.setattr("provision.hosts.errands.run", observe)
    fleet.take_events()
    assert asked == [0, 19]
    assert job.metrics_file.read_text() == there
    assert job.is_done()


def test_only_the_jobs_own_processes_are_kept_when_a_host_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names become names of files here, and a host may have been taken over."""
    job = make_job(tmp_path)
    spec = job.spec()
    far = spec.processes[1].model_copy(update={"unit": "oeprov-j-worker-0.service"})
    job.write_spec(spec.model_copy(update={"processes": [spec.processes[0], far]}))
    fleet = Fleet(job, job.spec())
    fleet.__dict__["hosts"] = {"localhost": None}
    item = {"ran": True, "exit_code": 0, "log": ["a line"], "metrics": {"rows": 1}}
    answer = {"stopped": {"../../taken": item, "worker-0": item}, "rows": {}, "removed": True}
    monkeypatch.setattr("provision.hosts.errands.on_all", lambda *_: {"localhost": answer})
    fleet.stop("worker")
    assert job.log("worker-0").read_text() == "a line\n"
    assert not list(tmp_path.rglob("taken*"))


def test_second_stop_ends_a_deaf_worker(tmp_path: Path) -> None:
    job, stop = make_job(tmp_path, worker="deaf"), StopRequest()
    thread = ask_when(job.run_dir / "waiting", stop, times=2)
    outcome, _ = supervise(job, stop=stop)
    thread.join()
    assert (outcome.phase, outcome.exit_code) == ("interrupted", 130)
    assert "without a new checkpoint" in outcome.message
    assert_nothing_left(job)


def test_a_stop_request_while_workers_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of workers on hosts, whose start may take minutes: what was trained before is told."""
    real, at = Child.start, [True]  # whether the start that is stopped is the first one

    def begin(
        child: Child, argv: list[str], env: dict[str, str], stop: StopRequest, *, fresh: bool = True
    ) -> None:
        if child.spec.role == "worker" and fresh == at[0]:
            stop.ask()
            raise Stopped
        real(child, argv, env, stop, fresh=fresh)

    monkeypatch.setattr(Child, "start", begin)
    job = make_job(tmp_path, worker="loses-worker", follower="kills-itself", restarts=1)
    assert supervise(job)[0] == Outcome("interrupted", "stopped before training began", 130)
    at[0] = False
    words = "stopped before the first step after the checkpoint of step 2"
    assert supervise(job)[0] == Outcome("interrupted", words, 130)
    assert job.state().message == words
    assert supervise(job, resume=True)[0] == Outcome("interrupted", words, 130)
    assert_nothing_left(job)


def test_stop_while_servers_start(tmp_path: Path) -> None:
    job, stop = make_job(tmp_path, server="silent"), StopRequest()
    stop.ask()
    outcome, _ = supervise(job, stop=stop)
    assert (outcome.phase, outcome.exit_code) == ("interrupted", 130)
    assert_nothing_left(job)


def test_stubborn_server_is_killed(tmp_path: Path) -> None:
    job = make_job(tmp_path, server="stubborn")
    outcome, _ = supervise(job, limits=Limits(server=0.2))
    assert outcome.phase == "done"
    assert job.state().processes[0].exit_code == -signal.SIGKILL


@pytest.mark.parametrize("error", [BrokenPipeError, SystemExit(1)])
def test_a_screen_whose_reader_has_gone_ends_no_job(
    tmp_path: Path, error: type[BaseException] | BaseException
) -> None:
    """`oeprov launch-training | head`: rich raises SystemExit where it finds the pipe broken."""
    job = make_job(tmp_path)

    def on_event(event: Event) -> None:
        raise error

    assert Supervisor(job, on_event, StopRequest(), QUICK).run().phase == "done"
    assert job.state().phase == "done"


def test_error_in_the_view_leaves_no_orphans(tmp_path: Path) -> None:
    job = make_job(tmp_path, worker="waits")

    def on_event(event: Event) -> None:
        if event["event"] == "step":
            raise RuntimeError("the view broke")

    with pytest.raises(RuntimeError, match="the view broke"):
        Supervisor(job, on_event, StopRequest(), QUICK).run()
    assert job.state().phase == "failed"
    assert_nothing_left(job)


@pytest.mark.process
def test_killed_launcher_leaves_no_orphans(tmp_path: Path) -> None:
    job = make_job(tmp_path, worker="waits")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "provision.jobs.background", str(job.directory)], cwd=REPOSITORY
    )
    until(job.run_dir / "waiting")
    state = until_running(job)
    assert [item.alive for item in state.processes] == [True, True]
    launcher.kill()
    launcher.wait()
    for item in state.processes:
        assert process.wait_gone(item.pid, item.started, 20), f"{item.name} outlived its launcher"
    after = job.state()
    assert after.phase == "interrupted"
    assert "launcher" in after.message
    checkpoint = job.checkpoint()
    assert checkpoint is not None
    assert checkpoint[0] == 3, "the worker saw the end of its input and wrote a checkpoint"


@pytest.mark.process
def test_detached_supervisor_stops_on_sigterm(tmp_path: Path) -> None:
    job = make_job(tmp_path, worker="waits")
    pid = start_detached(job, resume=False)
    until(job.run_dir / "waiting")
    assert job.state().supervisor_pid == pid
    assert process.send(pid, job.state().supervisor_started)
    os.waitpid(pid, 0)
    assert job.state().phase == "interrupted"
    assert job.state().message == "stopped at step 3, which is saved"
    lines = job.log("supervisor").read_text().splitlines()
    assert json.loads(lines[0])["event"] == "server"
    assert_nothing_left(job)


def test_a_later_process_with_the_same_pid_is_left_alone() -> None:
    other = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        started = process.start_time(other.pid)
        assert not process.send(other.pid, started - 1)
        assert other.poll() is None
        assert process.alive(other.pid, started)
        assert process.send(other.pid, started)
        other.wait(20)
    finally:
        other.kill()
        other.wait()
