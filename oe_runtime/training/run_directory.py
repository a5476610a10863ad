"""A run's directory: config.json, metrics.jsonl, tensorboard/, checkpoints/, report.html, export/."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from oe_runtime.errors import OeError
from oe_runtime.training import report
from oe_runtime.training.options import Options
from oe_runtime.training.tensorboard import Scalars, traced

TENSORBOARD = "tensorboard"


class RunError(OeError):
    """A run that cannot start, go on or finish; the message says what to do."""


class RunDirectory:
    """Makes the directory and writes its events."""

    def __init__(self, options: Options) -> None:
        """Refuses a directory that holds another run (unless resuming) or that cannot be written."""
        self.path = options.run_dir
        self.checkpoints = self.path / "checkpoints"
        self._metrics = self.path / "metrics.jsonl"
        self._scalars: Scalars | None = None
        self._unwritten = False  # whether the last event could not be written
        has_checkpoints = self.checkpoints.is_dir() and any(self.checkpoints.glob("step-*"))
        if options.resume and not has_checkpoints:
            raise RunError(f"nothing to resume: {self.path} has no checkpoint; run without --resume to start")
        if has_checkpoints and not options.resume:
            raise RunError(f"{self.path} already holds a run; go on with --resume, or name another --run-dir")
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            # What an earlier attempt without a checkpoint left is of no use to this run.
            self._file = self._metrics.open("a" if options.resume else "w", encoding="utf-8")
            self._write_config(options)  # resumed, it may train longer or on other servers
        except OSError as error:
            raise RunError(f"cannot write to the run directory {self.path}: {error.strerror}") from error

    def event(self, event: str, **values: Any) -> None:
        """Append one event; it is in the file when this returns.

        Where the disk is full that is said once, and events are written when there is room again.
        """
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        try:
            self._file.write(json.dumps({"event": event, **values, "time": now}, default=str) + "\n")
            self._file.flush()
        except OSError as error:
            if not self._unwritten:
                print(f"warning: {self._metrics}: {error.strerror}; events wait for room", file=sys.stderr)
            self._unwritten = True
        else:
            self._unwritten = False

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Show those of `values` that are known in TensorBoard. Imports TensorFlow."""
        if self._scalars is None:
            self._scalars = Scalars(self.path / TENSORBOARD)
        self._scalars.write(step, values)

    def traced(self) -> contextlib.AbstractContextManager[None]:
        """Traces what happens inside, for TensorBoard."""
        return traced(self.path / TENSORBOARD)

    def close(self) -> None:
        """Close the metrics and write the report of what is in them."""
        if self._scalars is not None:
            self._scalars.close()
        try:
            self._file.close()
        except OSError as error:
            print(f"warning: {self._metrics}: {error.strerror}; its last events are missing", file=sys.stderr)
        try:
            report.write(self.path)
        except (OSError, report.ReportError) as error:  # the run is what it is without
            print(f"warning: no {report.FILE}: {error}", file=sys.stderr)

    def _write_config(self, options: Options) -> None:
        config = {k: v for k, v in asdict(options).items() if k not in ("token_file", "resume")}
        partial = self.path / ".config.json.part"
        partial.write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")
        os.replace(partial, self.path / "config.json")
