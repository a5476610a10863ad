"""One process of a run, whatever it trains: what follows its end, a stop request, a loss or an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from oe_runtime.errors import ServerLost, WorkerLost
from oe_runtime.run.checkpoints import newest
from oe_runtime.run.connection import leave
from oe_runtime.run.course import Interrupted
from oe_runtime.run.outcome import INTERRUPTED, WORKER_LOST, explain
from oe_runtime.run.position import Position
from oe_runtime.run.ranks import Stopped
from oe_runtime.run.run_directory import RunError
from oe_runtime.run.session import Session


def carry_out(
    session: Session, train: Callable[[], None], start_anew: Callable[[ServerLost], None] | None = None
) -> int:
    """Call `train`, which trains as a part of the session's run; return the exit status.

    Errors are one line on stderr and an event. `start_anew` is what follows a lost server that `train` cannot
    wait for by itself: it replaces this process, or raises.
    """
    process = os.getpid()
    ended = False  # by its end or a stop request, not by an error
    try:
        with session.screen:
            try:
                try:
                    train()
                except ServerLost as lost:
                    if start_anew is None:
                        raise
                    start_anew(lost)
                leave(session.connected)
                code = 0
            except Interrupted as interrupted:
                code = _interrupted(session, interrupted)
            except Stopped:
                code = _interrupted(session, Interrupted(Position(), None))
        ended = True
        return code
    except Exception as error:
        return _failed(session, error)
    finally:
        if os.getpid() == process:  # a program may have forked
            _close(session, ended=ended)


def _interrupted(session: Session, interrupted: Interrupted) -> int:
    """Say after a stop request where the run goes on."""
    options, path, step = session.options, interrupted.path, interrupted.position.step
    session.stop.limit(0, None)
    resumes = path is None and options.resume and not options.rank  # training had not begun yet
    if resumes and (last := newest(options.run_dir)) is not None:
        path, step = last.path, last.position.step
    if session.directory is not None:
        session.directory.event("interrupted", step=step, path=None if path is None else str(path))
    reason = session.stop.reason
    if options.rank:
        session.screen.say(f"stopped ({reason}); worker 0 says after which step")
    elif path is None:
        session.screen.say(f"stopped ({reason}) before the first step; there is nothing to resume")
    else:
        session.screen.say(
            f"stopped ({reason}) after step {step}, checkpoint {path}; "
            f"go on with --run-dir {options.run_dir} --resume"
        )
    leave(session.connected)
    if session.uploads is not None:
        try:
            session.uploads.finish()
        except RunError as error:
            session.screen.say(f"warning: {error}")
    return INTERRUPTED


def _failed(session: Session, error: Exception) -> int:
    """Say why the run has ended. Raises the error of a bug, whose traceback is wanted."""
    message = explain(error, session.options)
    message = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in message)
    if session.directory is not None:
        session.directory.event("error", message=message or f"{type(error).__name__}: {error}")
    if not message:
        raise error
    print(f"error: {message}", file=sys.stderr, flush=True)
    return WORKER_LOST if isinstance(error, WorkerLost) else 1


def _close(session: Session, *, ended: bool) -> None:
    session.stop.at_signal = lambda: None
    if session.uploads is not None:
        session.uploads.close()
    if session.directory is not None:
        session.directory.close()
    if session.uploads is not None and ended:
        session.uploads.upload_reports()
    if session.connected is not None:
        session.connected.close()
