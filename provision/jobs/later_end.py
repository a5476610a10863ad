"""``resume --epochs/--steps``: a later end of a job's training."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from provision.cluster import flavor_facts
from provision.cluster.errors import TrainingError
from provision.cluster.training_settings import ROW_SETTINGS, trainer_defaults
from provision.jobs import store
from provision.jobs.ending import newest_checkpoint
from provision.jobs.metrics import has_event, summary
from provision.jobs.request import Request
from provision.jobs.store import Job


@dataclass(frozen=True)
class Trained:
    """How far the newest checkpoint of a job is: all its steps, and its whole epochs; None: unknown."""

    step: int | None
    epochs: int | None
    saved: bool = True  # False: the job is known to have no checkpoint
    by_flags: bool = False  # --epochs and --steps are known to end it; of a script: it reads by job.batches

    def __str__(self) -> str:
        epochs = [] if self.epochs is None else [f"{self.epochs} epoch{'' if self.epochs == 1 else 's'}"]
        return ", ".join([*epochs, *([] if self.step is None else [f"{self.step} steps"])])


def trained(job: Job) -> Trained:
    """How far a job is, from its checkpoint, or where that is on another host from its events."""
    facts = summary(job.metrics_file)
    step = newest_checkpoint(job, facts)[0] or 0
    settings, saved = job.spec().settings, job.has_checkpoint()
    given = any(settings.get(name) is not None for name in ROW_SETTINGS)
    if settings.get("script") and not (given or has_event(job.metrics_file, "input", 0)):
        return Trained(step, facts.epoch or 0, saved)
    limit = int(settings.get("steps") or 0)
    if job.state().phase == "done" and not (limit and step >= limit):
        epochs = settings.get("epochs")  # they were its end
        epochs = int(trainer_defaults()["epochs"] if epochs is None else epochs)
        return Trained(step, epochs, saved, by_flags=True)
    return Trained(step, _epochs(job), saved, by_flags=True)


def _epochs(job: Job) -> int:
    if (newest := job.checkpoint()) is not None:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return int(store.manifest(newest[1])["training"]["position"]["epoch"])
    return summary(job.metrics_file).epoch or 0


def extended(wanted: Request, end: Mapping[str, int], job: str, flavor: str, done: Trained) -> Request:
    """The request with a new ``end``: "steps", "epochs" or both; what is not named is no limit.

    TrainingError if the job has already trained as long, or has no checkpoint.
    """
    flags = " and ".join(f"--{name} {value}" for name, value in end.items())
    if flavor != flavor_facts.DEFAULT:
        raise TrainingError(f"{flags}: flavor {flavor} cannot resume from a checkpoint; start a new job")
    given = any(getattr(wanted.training, name) is not None for name in ROW_SETTINGS)
    if wanted.training.script and not (given or done.by_flags):
        raise TrainingError(
            f"{flags}: the script of job {job} decides how long it trains; give it other arguments: "
            f"oeprov resume {job} -- ARGUMENTS"
        )
    limits = {"epochs": done.epochs or 0, "steps": done.step or 0}
    steps, epochs = end.get("steps", 0), end.get("epochs", 0)
    if "steps" in end and "epochs" not in end and not steps:
        epochs = wanted.training.decided().epochs or 0
    low = 0 < steps <= limits["steps"] or 0 < epochs <= limits["epochs"]
    if low or not (steps or epochs):
        names = [name for name, value in end.items() if 0 < value <= limits[name]] or list(end)
        above = [f"above {limits[name]}" + (f" for --{name}" if len(end) > 1 else "") for name in names]
        how = f"has trained {done} already" if str(done) else "needs an end"
        raise TrainingError(f"{flags}: job {job} {how}; use a number {' and '.join(above)}")
    if not done.saved:
        raise TrainingError(f"{flags}: job {job} has no checkpoint to resume from; start a new job")
    return replace(
        wanted, training=wanted.training.model_copy(update={"steps": steps or None, "epochs": epochs or None})
    )
