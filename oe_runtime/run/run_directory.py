"""A run's directory: config.json, metrics.jsonl, tensorboard/, checkpoints/, report.html, export/."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oe_runtime.errors import OeError
from oe_runtime.run import report
from oe_runtime.run.options import ROW_OPTIONS, RunOptions

_LAST_BYTES = 65536  # of the events before
TENSORBOARD = "tensorboard"  # tensorboard --logdir RUN_DIR; its plugin xprof shows the traces


class RunError(OeError):
    """A run that cannot start, continue or finish; the message says what to do."""


class RunDirectory:
    """Makes the directory and writes its events."""

    def __init__(self, options: RunOptions) -> None:
        """Refuses a directory that holds another run (unless resuming) or that cannot be written."""
        self.path = options.run_dir
        self.checkpoints = self.path / "checkpoints"
        self._metrics = self.path / "metrics.jsonl"
        self._scalars: _Scalars | None = None
        self._lock = threading.Lock()
        self._unwritten = False  # whether the last event could not be written
        has_checkpoints = self.checkpoints.is_dir() and any(self.checkpoints.glob("step-*"))
        if options.resume and not has_checkpoints:
            raise RunError(f"nothing to resume: {self.path} has no checkpoint; run without --resume to start")
        if has_checkpoints and not options.resume:
            raise RunError(f"{self.path} already holds a run; go on with --resume, or name another --run-dir")
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.stopped = _last_stop(self._metrics) if options.resume else {}
            # Overwrite the metrics of an earlier attempt without a checkpoint.
            self._file = self._metrics.open("a" if options.resume else "w", encoding="utf-8")
            self._write_config(options)  # a resumed run may train longer or on other servers
        except OSError as error:
            raise RunError(f"cannot write to the run directory {self.path}: {error.strerror}") from error

    def event(self, event: str, **values: Any) -> None:
        """Append one event; it is in the file at the return.

        A full disk is reported once; later events are written when there is room again.
        """
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        try:
            with self._lock:  # uploads have events of their own
                self._file.write(json.dumps({"event": event, **values, "time": now}, default=str) + "\n")
                self._file.flush()
        except OSError as error:
            if not self._unwritten:
                print(f"warning: {self._metrics}: {error.strerror}; events wait for room", file=sys.stderr)
            self._unwritten = True
        else:
            self._unwritten = False

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Show the known `values` in TensorBoard, unless this program does without TensorFlow."""
        if "tensorflow" not in sys.modules:
            return
        if self._scalars is None:
            self._scalars = _Scalars(self.path / TENSORBOARD)
        self._scalars.write(step, values)

    def traced(self) -> contextlib.AbstractContextManager[None]:
        """Trace the block for TensorBoard."""
        return _traced(self.path / TENSORBOARD)

    def close(self) -> None:
        """Close the metrics and write their report."""
        if self._scalars is not None:
            self._scalars.close()
        try:
            self._file.close()
        except OSError as error:
            print(f"warning: {self._metrics}: {error.strerror}; its last events are missing", file=sys.stderr)
        try:
            report.write(self.path)
        except (OSError, report.ReportError) as error:  # the run is complete without it
            print(f"warning: no {report.FILE}: {error}", file=sys.stderr)

    def _write_config(self, options: RunOptions) -> None:
        left_out = {"token_file", "resume"}
        if not options.program:
            left_out |= {"script", "arguments", "input_flags"}
        elif not options.input_flags:  # the program may read otherwise
            left_out |= {*ROW_OPTIONS}
        config = asdict(options) | {"schema": options.schema.to_value()}
        config = {name: value for name, value in config.items() if name not in left_out}
        partial = self.path / ".config.json.part"
        partial.write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")
        os.replace(partial, self.path / "config.json")


def _last_stop(metrics: Path) -> Mapping[str, Any]:
    """Return the event with which the run before was stopped; empty if it ended otherwise."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:  # the run was on another host
        return {}
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:  # cut off
            continue
        if isinstance(event, dict) and event.get("event") in ("interrupted", "error", "end", "start"):
            return event if event["event"] == "interrupted" else {}
    return {}


class _Scalars:
    """Writes numbers by step for TensorBoard, without importing it, as tf.summary.scalar would."""

    def __init__(self, directory: Path) -> None:
        import tensorflow as tf

        self._tf = tf
        self._writer = tf.summary.create_file_writer(str(directory))

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        summary = self._tf.compat.v1.Summary()
        for name, value in values.items():
            if value is not None:
                summary.value.add(tag=name, simple_value=value)
        with self._writer.as_default():
            self._tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@contextlib.contextmanager
def _traced(directory: Path) -> Iterator[None]:
    """Trace TensorFlow and Python in the block into `directory`/plugins/profile. Imports TensorFlow."""
    import tensorflow as tf

    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, python_tracer_level=1)
    tf.profiler.experimental.start(str(directory), options=options)
    try:
        yield
    finally:
        tf.profiler.experimental.stop()
