"""How a job ended: for JSON, and where its newest checkpoint is."""

from __future__ import annotations

from typing import Any

from provision.jobs.metrics import Summary, summary
from provision.jobs.store import Job


def result(job: Job) -> dict[str, Any]:
    """The JSON of a job that ended or was started."""
    state, facts = job.state(), summary(job.metrics_file)
    step, path = newest_checkpoint(job, facts)
    return {
        "job": job.id,
        "state": state.phase,
        "message": state.message,
        "lost_workers": state.lost,
        **{name: getattr(facts, name) for name in ("step", "steps", "loss", "auc", "eval", "samples_per_s")},
        "directory": str(job.directory),
        "run_dir": str(job.run_dir),
        "checkpoint": path,
        "checkpoint_step": step,
        "export": facts.export,
    }


def newest_checkpoint(job: Job, facts: Summary) -> tuple[int | None, str | None]:
    """Step and path of the newest checkpoint: here, or reported by a worker on another host."""
    checkpoint = job.checkpoint()
    if checkpoint is not None:
        return checkpoint[0], str(checkpoint[1])
    return facts.checkpoint_step, facts.checkpoint
