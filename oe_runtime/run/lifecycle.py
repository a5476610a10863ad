"""One process of a run, whatever trains in it: what precedes and follows, stop requests, losses, errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from oe_runtime.errors import ServerLost, WorkerLost
from oe_runtime.run.checkpoints import newest
from oe_runtime.run.connection import leave
from oe_runtime.run.course import Interrupted
from oe_runtime.run.options import RunOptions
from oe_runtime.run.outcome import INTERRUPTED, WORKER_LOST, explain
from oe_runtime.run.position import Position
from oe_runtime.run.progress import View
from oe_runtime.run.ranks import Stopped
from oe_runtime.run.run_directory import RunError
from oe_runtime.run.session import Session
from oe_runtime.run.stopping import StopRequest


class Program:
    """What a process of a run trains by: a built-in model's program, or a user's."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def prepare(self) -> None:
        """Check everything before anything is written, and find servers and workers."""
        self.session.prepare()

    def train(self) -> None:
        """Train as a part of the session's run, whose directory is open."""
        raise NotImplementedError

    def start_anew(self, lost: ServerLost) -> NoReturn:
        """Replace this process after a loss that `train` cannot wait for by itself, or raise it."""
        raise lost


def run_program(options: RunOptions, kind: Callable[[Session], Program], view: View) -> int:
    """Train by a program of the `kind`; return the exit status.

    Errors are one line on stderr and an event.
    """
    process = os.getpid()
    with StopRequest(with_parent=options.exit_with_parent) as stop:
        session = Session(options, stop, view, launched=True)
        Session.install(session)
        try:
            return _carry_out(session, kind(session))
        finally:
            if os.getpid() == process:  # a program may have forked
                Session.install(None)


def _train(session: Session, program: Program) -> None:
    program.prepare()
    session.open_directory()
    program.train()
    session.stop.limit(0, None)  # no more waits for other workers
    if session.uploads is not None:
        session.uploads.finish()
        if session.exported is not None:
            found = session.uploads.upload_directory(session.exported, "export")
            session.screen.say(f"uploaded the SavedModel to {found}")
    assert session.course is not None  # noqa: S101 - train
    session.course.end()
    if not session.rank:
        session.screen.say(f"run directory {session.run_dir}, with report.html")


def _carry_out(session: Session, program: Program) -> int:
    process = os.getpid()
    ended = False  # by its end or a stop request, not by an error
    try:
        with session.screen:
            try:
                try:
                    _train(session, program)
                except ServerLost as lost:
                    program.start_anew(lost)
                leave(session.connected)
                code = 0
            except Interrupted as interrupted:
                code = _interrupted(session, interrupted)
            except Stopped:
                code = _interrupted(session, Interrupted(Position(), None))
        ended = True
        return code
    except Exception as error:
        if session.course is not None and os.getpid() == process:
            session.course.settle_files()
        return _failed(session, error)
    finally:
        if os.getpid() == process:
            _close(session, ended=ended)


def _interrupted(session: Session, interrupted: Interrupted) -> int:
    """Say after a stop request where the run goes on."""
    options, path, step = session.options, interrupted.path, interrupted.position.step
    session.stop.limit(0, None)
    resumes = path is None and options.resume and not options.rank  # training had not begun yet
    if resumes and (last := newest(options.run_dir)) is not None:
        path, step = last.path, last.position.step
    if session.directory is not None:
        stepped = None if session.course is None else session.course.stepped
        known = {} if stepped is None else {"stepped": stepped, "servers": len(options.servers)}
        session.directory.event("interrupted", step=step, path=None if path is None else str(path), **known)
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
