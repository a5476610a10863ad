"""Scripts that end badly: a sentence with their line, the right exit status, nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import job_scripts
import numpy as np
import pytest
from job_scripts import losses, run, start, write
from numpy.typing import NDArray
from training_runs import events

from oe_runtime import checkpoint
from oe_runtime.client import Client
from oe_runtime.run.course import Course
from oe_runtime.run.options import outside, parse
from oe_runtime.run.progress import View
from oe_runtime.run.ranks import Ranks
from oe_runtime.run.run_directory import RunError
from oe_runtime.run.session import Session
from oe_runtime.run.stopping import StopRequest

TRAINING = job_scripts.KERAS + "model.fit(features, labels, batch_size=50, verbose=0, callbacks=callbacks)\n"


class Broken:
    """How a script ends, and what is said of it."""

    def __init__(self, text: str | bytes, message: str, traceback: bool = False) -> None:
        self.text = text
        self.message = message
        self.traceback = traceback


BROKEN = {
    "fails": Broken("x = 1\n1 / 0\n", "train.py line 2: ZeroDivisionError: division by zero", True),
    "module": Broken(
        "import no_such\n", "train.py line 1: No module named 'no_such'; name its package in req"
    ),
    "syntax": Broken("a = 1\nif a\n", "train.py line 2: expected ':'"),
    "binary": Broken(b"\x00\xff\xfe", "train.py is not a Python program: "),
    "control": Broken("raise SystemExit('b\\x00\\x1b[31mad')\n", "train.py line 1: b\ufffd\ufffd[31mad"),
    "status": Broken("import sys\nsys.exit(3)\n", "train.py line 2: exited with 3"),
    "sentence": Broken("raise SystemExit('no data')\n", "train.py line 1: no data"),
    "file": Broken("open('no-such')\n", "train.py line 1: no-such: No such file or directory", True),
    "nothing": Broken("print('done')\n", "train.py has ended without training: give fit callbacks=[embed.J"),
    "early": Broken("import sys\nsys.exit()\n", "train.py has ended without training: give fit callbacks="),
    "ours": Broken(
        "import oe_runtime.job as job\njob.client().create_table(None)\n", "train.py line 2: ", True
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_script_that_fails(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = BROKEN[name]
    script = write(tmp_path / "script", "")
    script.write_bytes(case.text if isinstance(case.text, bytes) else case.text.encode())
    assert run(script, tmp_path / "run") == 1
    error = capsys.readouterr().err
    assert f"error: {case.message}" in error
    assert ("Traceback" in error) == case.traceback
    assert "runner.py" not in error
    assert [e["event"] for e in events(tmp_path / "run")] == ["start", "error"]
    assert events(tmp_path / "run", "error")[0]["message"].startswith(case.message)


def test_an_end_in_the_middle_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRAINING.replace("os.kill(os.getpid(), signal.SIGTERM)", "sys.exit()")
    assert run(write(tmp_path, text), tmp_path / "run", arguments=("4",)) == 1
    assert "error: train.py has ended in the middle of training, after step 4" in capsys.readouterr().err


def test_a_launcher_overrides_the_defaults_of_a_script(tmp_path: Path) -> None:
    assert (
        run(
            write(tmp_path, "import oe_runtime.job as job\njob.defaults(resume=True)\n" + TRAINING),
            tmp_path / "run",
        )
        == 0
    )


def test_data_are_one_path(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"data is \['a', 'b'\]; a job has one path, directory, glob or URL"):
        outside(tmp_path / "train.py", data=["a", "b"])
    assert outside(tmp_path / "train.py", data="a").data == "a"


def test_a_job_trains_one_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = """
other = keras.Sequential([keras.Input((2,)), keras.layers.Embedding(99, 2, name="C2")])
other = embed.distributed_model(other, job.client())
other.compile("adam", "mse")
other.fit(features % 99, np.zeros((1000, 2, 2)), verbose=0, callbacks=[embed.JobCallback(job)])
"""
    script = write(tmp_path, TRAINING + second)
    assert run(script, tmp_path / "run") == 1
    line = len((TRAINING + second).splitlines())
    assert f"error: train.py line {line}: a job trains one model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "what"), [("recover(0)", "recover"), ("drop_tables(['C1'])", "dropping tables")]
)
def test_tables_do_not_change_in_the_middle(
    call: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TRAINING.replace("os.kill(os.getpid(), signal.SIGTERM)", f"job.client().{call}")
    assert run(write(tmp_path, text), tmp_path / "run", arguments=("4",)) == 1
    line = 1 + text.splitlines().index(f"            job.client().{call}")
    assert f"error: train.py line {line}: {what}: not in the middle of training" in capsys.readouterr().err


def test_fit_without_its_callback_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TRAINING.replace("callbacks=callbacks", "callbacks=callbacks[:1]")
    assert run(write(tmp_path, text), tmp_path / "run") == 1
    line = len(text.splitlines())
    error = capsys.readouterr().err
    assert f"error: train.py line {line}: ValueError: fit is no part of the job without its callback" in error
    assert not losses(tmp_path / "run")


def test_a_callback_without_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRAINING.replace("model = embed.distributed_model(model, job.client())\n", "")
    text = text.replace("embed.distributed_optimizer(keras.optimizers.Adam(0.01))", "'adam'")
    assert run(write(tmp_path, text), tmp_path / "run") == 1
    assert "ValueError: JobCallback is for the models of oe_runtime: give this" in capsys.readouterr().err


class TwoRanks(Ranks):
    """Worker 1 of two, whose other one has `first` batches; -1: unknown."""

    rank, count = 1, 2

    def __init__(self, first: int) -> None:
        self.first = first

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values + np.array([self.first, 0])


def agree(first: int, mine: int | None) -> None:
    course = Course.__new__(Course)
    course._ranks = TwoRanks(first)
    course.agree_on_batches(0, mine)


@pytest.mark.parametrize(("first", "mine"), [(4, 4), (-1, 4), (4, None)])
def test_equally_many_batches(first: int, mine: int | None) -> None:
    agree(first, mine)


def test_unequally_many_batches() -> None:
    with pytest.raises(RunError, match="of batches in epoch 1: 4 in worker 0, 5 in worker 1; give each as"):
        agree(4, 5)


def test_unequally_many_epochs() -> None:
    course = Course.__new__(Course)
    course._ranks = TwoRanks(2)
    course.agree_on_epochs(2)
    with pytest.raises(RunError, match="different numbers of epochs: 2 in worker 0, 3 in worker 1; give"):
        course.agree_on_epochs(3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dim", "8"], "--dim does not go with --script: train.py decides that (give it after --)"),
        (["--seed", "1"], "--seed does not go with --script"),
        (["--workqueue"], "--workqueue goes with --servers"),
        (["--data", "-", "--holdout", "0.5"], "--data - holds out no rows"),
        (["--stock"], "--stock does not go with --script"),
        (["--jit"], "--jit does not go with --script"),
        (["--data", "x", "--follow", "--epochs", "1"], "--epochs does not go with --follow"),
    ],
)
def test_flags_of_built_in_models(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [] if "--servers" in flags or "--stock" in flags else ["--in-process"]
    with pytest.raises(SystemExit):
        parse(["--script", str(write(tmp_path, "")), *where, *flags])
    assert message in capsys.readouterr().err


def test_a_script_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--script", str(tmp_path / "none.py"), "--in-process"])
    assert "none.py: there is no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--data", "x", "--in-process", "--", "--epochs"])
    assert "-- goes with --script" in capsys.readouterr().err


def test_what_a_script_sees(tmp_path: Path) -> None:
    """Its own name, arguments, directory and modules, and what launchers of several processes set."""
    write(tmp_path / "script", "VALUE = 7\n", "beside.py")
    script = write(
        tmp_path / "script",
        "import os, sys, beside, oe_runtime.job as job, __main__\n"
        "assert (sys.argv[1:], list(job.arguments)) == (['--epochs', '3'],) * 2\n"
        "assert os.getcwd() == os.path.dirname(sys.argv[0]) == sys.path[0]\n"
        "assert sys.argv[0] == __main__.__file__\n"
        "assert __name__ == '__main__' and beside.VALUE == 7\n"
        "assert (job.rank, job.workers, job.resume_step, job.data) == (0, 1, 0, None)\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')\n"
        "assert [os.environ[name] for name in names] == list('0101')\n"
        "import errno, socket\n"
        "address = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "assert socket.socket().connect_ex(address) == errno.ECONNREFUSED\n"
        "try: socket.socket().bind(address)  # as another program's, which is given no held port\n"
        "except OSError as error: assert error.errno == errno.EADDRINUSE\n"
        "else: raise AssertionError('the port is anybody\\'s')\n"
        "socket.create_server(address).close()\n"
        "assert not {'tensorflow', 'torch', 'keras'} & set(sys.modules)\n"
        "os.chdir('/')\n"
        "job.run_dir.joinpath('seen').touch()\n",
    )
    process = start(script, tmp_path / "run", arguments=("--epochs", "3"))
    _, error = process.communicate(timeout=60)
    assert error.startswith("error: train.py has ended without training"), error
    assert (tmp_path / "run" / "seen").exists()


LEAVES = """
import os, subprocess, sys, threading, time
import oe_runtime.job as job
if os.fork() == 0:
    try:
        job.client()
    except job.JobError as error:
        print(error, file=sys.stderr)
    sys.exit(5)
os.wait()
forked = os.fork()
if forked == 0:
    time.sleep(600)
child = subprocess.Popen(["sh", "-c", "setsid sleep 600 & echo $!"], stdout=subprocess.PIPE, text=True)
(job.run_dir / "left").write_text(f"{{forked}} {{child.stdout.readline()}}")
child.wait()
sys.stdout.buffer.write(bytes(range(256)))
{}
"""


@pytest.mark.process
def test_forks_and_children_are_no_part_of_the_run(tmp_path: Path) -> None:
    script = write(tmp_path, LEAVES.format(""))
    command = [sys.executable, "-m", "oe_runtime.train", "--in-process"]
    command += ["--script", str(script), "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, timeout=120)
    error = done.stderr.decode()
    assert done.returncode == 1
    assert bytes(range(256)) in done.stdout
    assert error.count("error: train.py has ended without training") == 1
    assert "job.client() is of process" in error
    assert "warning: train.py left 2 processes running: ended" in error
    assert [e["event"] for e in events(tmp_path / "run")] == ["start", "error"]
    for pid in (tmp_path / "run" / "left").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


@pytest.mark.process
def test_a_script_finds_its_standard_input_at_its_end(tmp_path: Path) -> None:
    """The launcher's pipe is there to say when the launcher has ended, and nothing ever comes from it."""
    script = write(tmp_path, "print(input('name? '))\n")
    process = start(script, tmp_path / "run", "--exit-with-parent", stdin=subprocess.PIPE)
    process.wait(timeout=60)
    _, error = process.communicate()
    assert "error: train.py line 1: EOFError: EOF when reading a line" in error


@pytest.mark.process
def test_a_crash_in_a_library_shows_the_line_of_the_script(tmp_path: Path) -> None:
    process = start(write(tmp_path, "import ctypes\nctypes.string_at(0)\n"), tmp_path / "run")
    _, error = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGSEGV
    assert f'File "{tmp_path}/train.py", line 2 in <module>' in error


@pytest.mark.process
def test_programs_that_a_script_starts_are_no_part_of_the_job(tmp_path: Path) -> None:
    """As those of torchrun, horovodrun or multiprocessing, which would train on tables of their own."""
    child = "import oe_runtime.job as job\njob.client()\n"
    text = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
    process = start(write(tmp_path, text), tmp_path / "run")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "JobError: a process that train.py has started is no part of its job" in error
    assert "the launcher starts several workers (--workers)" in error


@pytest.mark.process
def test_a_script_that_hangs_at_exit_is_ended(tmp_path: Path) -> None:
    script = write(
        tmp_path, "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
    )
    process = start(script, tmp_path / "run")
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "warning: train.py does not end: its threads Thread-" in error


class FirstWorker(Ranks):
    """Another worker's view: worker 0 says these words."""

    def __init__(self, *words: bytes) -> None:
        self.words = list(words)

    def share(self, value: bytes, origin: int = 0) -> bytes:
        return self.words.pop(0)


def published(run_dir: Path, step: int) -> None:
    checkpoint.publish(run_dir / "checkpoints", step, lambda path: {"training": {"position": {}}})


def test_the_step_of_the_resume_stays_when_there_are_newer_checkpoints(tmp_path: Path) -> None:
    published(tmp_path, 7)
    session = Session(
        outside(tmp_path / "train.py", run_dir=tmp_path, resume=True),
        StopRequest(with_parent=False),
        View(),
        launched=True,
    )
    assert session.resume_step == 7
    published(tmp_path, 9)
    assert session.resume_step == 7


def test_workers_have_the_step_of_worker_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = outside(tmp_path / "train.py", run_dir=tmp_path, resume=True)
    session = Session(replace(alone, rank=1, size=2), StopRequest(with_parent=False), View(), launched=True)
    ranks = FirstWorker(b"{}", b"40", b'{"t": {"name": "adam"}}')
    monkeypatch.setattr(Session, "_meet", lambda self: self._agree(ranks))
    assert session.resume_step == 40
    assert session.saved_optimizers == {"t": {"name": "adam"}}


def test_a_resume_knows_the_optimizers_of_the_checkpoint(tmp_path: Path) -> None:
    formats = Path(__file__).parents[1] / "data/formats/table-1-pool-1"
    for resume in (True, False):
        options = outside(tmp_path / "train.py", run_dir=formats, resume=resume)
        session = Session(options, StopRequest(with_parent=False), View(), launched=True)
        names = {name: rule["name"] for name, rule in session.saved_optimizers.items()}
        assert names == ({"known": "adam", "wide/emb": "adagrad"} if resume else {})


def test_defaults_of_zero_are_taken() -> None:
    assert outside(Path("train.py"), checkpoint_steps=0).checkpoint_steps == 0


def test_a_flag_that_is_on_can_be_switched_off() -> None:
    assert outside(Path("train.py")).steps_of_models()["pipeline"] is True
    assert outside(Path("train.py"), pipeline=False).steps_of_models()["pipeline"] is False


def test_servers_with_trained_rows_are_refused_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(client: Client) -> None:
        raise RunError("server 0 already holds trained rows")

    monkeypatch.setattr("oe_runtime.run.session.refuse_trained", refuse)
    alone = outside(tmp_path / "train.py", run_dir=tmp_path / "run")
    session = Session(alone, StopRequest(with_parent=False), View(), launched=False)
    for _ in range(2):
        with pytest.raises(RunError, match="already holds"):
            session.client()
    assert session.connected is None
