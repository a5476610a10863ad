"""`python -m oe_runtime.train --script FILE`: run a user's program as a part of a job.

The program runs in this process as `__main__`. Its end becomes an exit status and a last event. A lost server
makes this process start anew, by exec, from the newest checkpoint, because only so is every loop of a
program, and its data, where the checkpoint was.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from oe_runtime.errors import OeError, ServerLost, WorkerLost
from oe_runtime.run import processes
from oe_runtime.run.checkpoints import newest
from oe_runtime.run.connection import leave
from oe_runtime.run.course import Interrupted
from oe_runtime.run.lifecycle import Program, run_program
from oe_runtime.run.lost_server import refuse_many, server_name, wait_for_server
from oe_runtime.run.options import RunOptions
from oe_runtime.run.outcome import (
    disk_error,
    explain,
    memory_error,
)
from oe_runtime.run.position import Position
from oe_runtime.run.progress import View
from oe_runtime.run.ranks import Stopped, translating_worker_losses
from oe_runtime.run.session import OF_SCRIPT, Session

_PAUSE = 0.3  # seconds between attempts to reach the servers again
_EXIT_SECONDS = 20.0  # that a program may take to end after its last line
_SIOCGIFADDR = 0x8915  # linux/sockios.h: an interface's IPv4 address
_HELD: list[socket.socket] = []  # bound to the port of a single process's group
_LOSS = "OE_JOB_LOSS"  # the environment of a process that starts anew: the loss, as JSON


def run_script(options: RunOptions) -> int:
    """Run the script as the options say; return the exit status. Errors are sentences and events."""
    assert options.script is not None  # noqa: S101 - of --script
    if _is_program():
        processes.adopt_orphans()
        faulthandler.enable()  # a crash in a library shows the script's line in the log
    code = run_program(options, partial(_Script, options.script), View())
    _end_leftovers(options, code)
    return code


class _Script(Program):
    def __init__(self, path: Path, session: Session) -> None:
        super().__init__(session)
        self._path = path
        self._process = os.getpid()
        self._cwd = os.getcwd()
        os.register_at_fork(after_in_child=session.stop.forget)  # the signals are its own

    def prepare(self) -> None:
        """See Program."""
        self.session.prepare(anew=_LOSS in os.environ)

    def train(self) -> None:
        """See Program."""
        session, name = self.session, self._path.name
        session.say_start(name)
        self._note_loss()
        session.stop.at_signal = self._at_signal
        session.screen.say(f"{name}, run directory {session.run_dir}")
        self._execute()
        if (course := session.course) is None:
            raise _ScriptError(
                f"{name} has ended without training: give fit callbacks=[embed.JobCallback(job)], "
                "or write the loop inside `with job.training(model, optimizer)`"
            )
        if course.training:
            raise _ScriptError(
                f"{name} has ended in the middle of training, after step {course.position.step}"
            )

    def _at_signal(self) -> None:
        """Between trainings, such as while the program reads data, a stop request ends it at once."""
        course = self.session.course
        if (course is None or not course.training) and os.getpid() == self._process:
            raise Interrupted(Position(), None) if course is None else course.interrupted()

    def _execute(self) -> None:
        """Run the program as `__main__`. Raises _ScriptError for its errors, in words."""
        script, options = self._path, self.session.options
        module = ModuleType("__main__")
        module.__file__ = str(script)
        module.__dict__["__builtins__"] = __builtins__
        before = sys.modules["__main__"], sys.argv, sys.path[0], os.getcwd(), dict(os.environ)
        try:
            _set_environment(options)
            os.environ[OF_SCRIPT] = script.name
            sys.modules["__main__"], sys.argv = module, [str(script), *options.arguments]
            sys.path[0] = str(script.parent)
            os.chdir(script.parent)
            code = compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
            with translating_worker_losses(options):
                exec(code, module.__dict__)  # noqa: S102 - the user's own program
        except SystemExit as end:
            self._leave_child(end.code)
            if end.code not in (None, 0):
                where = _line(end, script)
                said = f"exited with {end.code}" if isinstance(end.code, int) else str(end.code)
                raise _ScriptError(f"{where}: {said}") from None
        except OeError as error:
            self._leave_child(1, error)
            if isinstance(error, WorkerLost) and (cause := self._find_lost()) is not None:
                raise cause from error
            if isinstance(error, (ServerLost, WorkerLost)):
                raise
            raise _ScriptError(f"{_line(error, script)}: {explain(error, options)}") from error
        except Exception as error:
            self._leave_child(1, error)
            if (lost := self._loss(error)) is not None:
                raise lost from error
            raise _program_error(error, script) from error
        finally:
            if os.getpid() == self._process:
                sys.modules["__main__"], sys.argv, sys.path[0] = before[:3]
                if sys.modules.get("__mp_main__") is module:  # of multiprocessing
                    del sys.modules["__mp_main__"]
                with suppress(OSError):
                    os.chdir(before[3])
                os.environ.clear()
                os.environ.update(before[4])
        self._leave_child(0)

    def _loss(self, error: Exception) -> ServerLost | WorkerLost | None:
        """Return the loss that an error of PyTorch's process groups comes from; None for another error."""
        if self.session.workers == 1 or "torch.distributed" not in sys.modules:
            return None
        from oe_runtime.run.torch_ranks import loss_of_worker

        lost = loss_of_worker(error)
        return lost and (self._find_lost() or lost)

    def _find_lost(self) -> ServerLost | WorkerLost | None:
        """Return the loss that has made another worker end its connections, as far as the servers know."""
        try:
            if self.session.connected is not None:
                self.session.connected.stats()
        except (ServerLost, WorkerLost) as known:
            return known
        return None

    def _leave_child(self, code: object, error: BaseException | None = None) -> None:
        """End a process that the program has forked, which is no part of the run."""
        if os.getpid() == self._process:
            return
        if error is not None:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)

    def start_anew(self, lost: ServerLost) -> NoReturn:
        """Wait for the lost server; then replace this process by one that resumes."""
        session, options = self.session, self.session.options
        client, directory, began = session.connected, session.directory, time.monotonic()
        saved = None if session.course is None else session.course.saved
        known = (saved is not None or options.rank > 0) and not session.goes_back  # which has failed
        if client is None or directory is None or not options.server_wait or not known or not _is_program():
            raise lost
        step = -1 if saved is None else saved.position.step
        before = json.loads(os.environ.get(_LOSS, "{}"))
        losses = before.get("losses", 0) + 1 if step <= before.get("step", -1) else 1
        refuse_many(lost, losses)
        session.ranks.break_off({int(server.rpartition(":")[2]) for server in options.servers})
        stopped = Interrupted(Position(), None) if saved is None else Interrupted(saved.position, saved.path)

        def reconnect() -> None:
            if session.stop:
                raise stopped
            client.reconnect()

        wait_for_server(lost, reconnect, options, directory, session.screen.say, session.stop)
        try:
            session.ranks.wait_to_start_anew()
        except Stopped:
            raise stopped from None
        leave(client)
        client.close()
        if session.uploads is not None:
            session.uploads.close()
        directory.close()
        os.environ[_LOSS] = json.dumps(
            {
                "losses": losses,
                "step": step,
                "endpoint": lost.endpoint,
                "name": server_name(lost.endpoint, options),
                "seconds": round(time.monotonic() - began, 1),
                "told": False,
            }
        )
        processes.end_children()
        os.chdir(self._cwd)
        sys.stdout.flush()
        sys.stderr.flush()
        session.stop.return_stdin()
        processes.close_on_exec()
        os.execv(sys.executable, [sys.executable, *_with_resume(sys.orig_argv[1:])])  # noqa: S606 - this program

    def _note_loss(self) -> None:
        """After `start_anew`: say that the server is back."""
        session, loss = self.session, json.loads(os.environ.get(_LOSS, "{}"))
        if not loss or loss["told"] or session.directory is None:
            return
        os.environ[_LOSS] = json.dumps(loss | {"told": True})
        saved = None if session.rank else newest(session.run_dir)
        step = 0 if saved is None else saved.position.step
        session.directory.event("server_back", endpoint=loss["endpoint"], step=step, seconds=loss["seconds"])
        session.screen.say(
            f"{loss['name']} is back after {loss['seconds']:.1f} s; starting {self._path.name} anew"
            + ("" if session.rank else f" from step {step}")  # worker 0 knows it
        )


class _ScriptError(OeError):
    """An error of the program; the message is a sentence."""


def _program_error(error: Exception, script: Path) -> _ScriptError:
    """Show the traceback of the program's own error without the runner's frames; return a sentence."""
    where = _line(error, script)
    if message := memory_error(error):
        return _ScriptError(f"{where}: {message.partition(';')[0]}; try smaller batches or layers")
    if isinstance(error, SyntaxError) and error.filename == str(script):
        return _ScriptError(f"{script.name} line {error.lineno}: {error.msg}")
    if isinstance(error, (UnicodeDecodeError, SyntaxError, ValueError)) and _frames(error, script) is None:
        return _ScriptError(f"{script.name} is not a Python program: {error}")
    if isinstance(error, ModuleNotFoundError) and error.name:
        return _ScriptError(
            f"{where}: {error.msg}; name its package in requirements.txt beside the script, or install it "
            f"into the environment of {sys.executable}"
        )
    if not isinstance(error, OeError):
        traceback.print_exception(type(error), error, _frames(error, script))
    said = disk_error(error) or f"{type(error).__name__}: {error}".rstrip(": ")
    return _ScriptError(f"{where}: {said}")


def _frames(error: BaseException, script: Path) -> TracebackType | None:
    """Return the traceback from the script's first frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    return trace


def _line(error: BaseException, script: Path) -> str:
    """Return `train.py line 12`: the last place in the files beside the script that led to the error."""
    found = script.name
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path == script or (path.parent == script.parent and path.suffix == ".py"):
            found = f"{path.name} line {frame.lineno}"
    return found


def _set_environment(options: RunOptions) -> None:
    """Set what torchrun's, Horovod's and TensorFlow's programs read."""
    rank, size = str(options.rank), str(options.size)
    given = os.environ
    given.setdefault(
        "TF_CPP_MIN_LOG_LEVEL", "3" if options.size > 1 else "2"
    )  # lost workers are reported here
    hosts = [worker.rpartition(":")[0] for worker in options.workers] or [""]
    own = hosts[options.rank]
    local = (
        given.get("LOCAL_RANK", str(hosts[: options.rank].count(own))),
        given.get("LOCAL_WORLD_SIZE", str(hosts.count(own))),
    )
    given.update({"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local[0], "LOCAL_WORLD_SIZE": local[1]})
    given.update({"HOROVOD_RANK": rank, "HOROVOD_SIZE": size})
    given.update({"HOROVOD_LOCAL_RANK": local[0], "HOROVOD_LOCAL_SIZE": local[1]})
    if not options.workers:
        given["MASTER_ADDR"], given["MASTER_PORT"] = "127.0.0.1", str(_hold_port())
    else:
        host, _, port = options.workers[0].rpartition(":")
        given["MASTER_ADDR"], given["MASTER_PORT"] = host.strip("[]"), port
        if interface := _interface(options.workers[options.rank].rpartition(":")[0]):
            given.setdefault("GLOO_SOCKET_IFNAME", interface)  # gloo takes that of the host's name
        cluster = {"worker": list(options.workers)}
        given["TF_CONFIG"] = json.dumps(
            {"cluster": cluster, "task": {"type": "worker", "index": options.rank}}
        )


def _hold_port() -> int:
    """Take a port of loopback that no other process is given while this one lives.

    A program may listen there only after minutes; it sets SO_REUSEADDR, as PyTorch's process groups do.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    while _HELD:
        _HELD.pop().close()
    _HELD.append(held)
    port: int = held.getsockname()[1]
    return port


def _interface(host: str) -> str:
    """Return the network interface that has this IPv4 address as its first; empty if none has."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        address = socket.inet_aton(socket.gethostbyname(host))
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found = fcntl.ioctl(any_socket, _SIOCGIFADDR, name.encode().ljust(40, b"\0"))
                if found[20:24] == address:
                    return name
    return ""


def _with_resume(words: Sequence[str]) -> list[str]:
    """Return a command line with --resume, before the script's own arguments."""
    end = words.index("--") if "--" in words else len(words)
    more = [] if "--resume" in words[:end] else ["--resume"]
    return [*words[:end], *more, *words[end:]]


def _is_program() -> bool:
    """Whether this process is `python -m oe_runtime.train`, and not one that imported it."""
    return "oe_runtime.train" in sys.orig_argv


def _end_leftovers(options: RunOptions, code: int) -> None:
    """End what the program leaves running: processes now, and this one where threads would hold it."""
    if not _is_program():
        return
    if left := processes.end_children():
        print(f"warning: {options.program} left {left} processes running: ended", file=sys.stderr)

    def end() -> None:
        time.sleep(_EXIT_SECONDS)
        names = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
        what = f"its threads {', '.join(names)} still run" if names else "a function at exit still runs"
        print(
            f"warning: {options.program} does not end: {what} after {_EXIT_SECONDS:.0f} s; ended",
            file=sys.stderr,
            flush=True,
        )
        processes.end_children()
        os._exit(code)

    threading.Thread(target=end, name="end-at-limit", daemon=True).start()
