"""The evaluation of a run: AUC, accuracy and log loss on rows that no worker trains on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.data.auc import StreamingAuc
from oe_runtime.run.followers import FollowingDirectory
from oe_runtime.run.progress import View
from oe_runtime.run.ranks import Ranks, deferring_losses, refuse_together
from oe_runtime.run.run_directory import RunDirectory, RunError
from oe_runtime.run.stopping import StopRequest

Prediction = tuple[NDArray[Any], NDArray[Any]]  # labels, 0 or 1, and probabilities; both (B,)


class Evaluation:
    """Measures the predictions of all workers together, and says the results."""

    def __init__(
        self, ranks: Ranks, directory: RunDirectory | FollowingDirectory, view: View, stop: StopRequest
    ) -> None:
        self._ranks = ranks
        self._directory = directory
        self._view = view
        self._stop = stop
        self._latest: tuple[int, StreamingAuc] | None = None  # step and result

    def measure(self, predictions: Iterable[Prediction]) -> StreamingAuc | None:
        """Return the result over this worker's `predictions` and the others'; None after a stop request.

        The workers may have different numbers of batches. Raises RunError in all of them if one has
        predictions that cannot be measured.
        """
        auc, mine, more = StreamingAuc(), iter(predictions), True
        while more:
            if self._ranks.stop_requested(self._stop):
                return None
            found, problem = None, ""
            try:
                with deferring_losses(self._ranks):
                    found = next(mine, None)
            except RunError as error:
                problem = str(error)
            if found is not None:
                auc.update(*found)
            more, wrong = self._ranks.sum(np.array([found is not None, bool(problem)], np.int32)).astype(bool)
            if wrong:
                refuse_together(self._ranks, problem)
        self._ranks.barrier()
        if self._ranks.count > 1:
            auc.gather(self._ranks.sum)
        return auc

    def latest(self, step: int) -> StreamingAuc | None:
        """Return the last result if it is that of `step`."""
        return self._latest[1] if self._latest is not None and self._latest[0] == step else None

    def forget(self) -> None:
        """Forget the last result, after a return to a checkpoint."""
        self._latest = None

    def say(self, step: int, auc: StreamingAuc) -> None:
        """Write a result to the run directory and the screen, once."""
        if self.latest(step) is not None:
            return
        self._latest = step, auc
        found = {"loss": auc.log_loss(), "auc": auc.result(), "accuracy": auc.accuracy()}
        only = {} if auc.only_label is None else {"only_label": auc.only_label}
        self._directory.event("eval", step=step, rows=auc.rows, **found, **only)
        self._directory.scalars(step, {f"eval/{name}": value for name, value in found.items()})
        self._view.say(
            f"held-out rows {auc.rows:,}: AUC {found['auc']:.4f}, accuracy {found['accuracy']:.4f}, "
            f"log loss {found['loss']:.4f}"
        )
        if only:
            self._view.say(
                f"warning: the label of all held-out rows is {auc.only_label}, so AUC says nothing; is it "
                "the right column?"
            )


def checked_predictions(found: Any, source: str) -> Prediction:
    """Return labels and probabilities as flat arrays. Raises RunError for others, of `source`."""
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise RunError(f"{source} yields pairs of labels and probabilities, not a {type(found).__name__}")
    labels, probabilities = (  # numpy has no bfloat16 as PyTorch has it
        np.asarray(one.detach().cpu().double() if hasattr(one, "detach") else one) for one in found
    )
    for what, array in (("labels", labels), ("probabilities", probabilities)):
        if array.ndim == 0 or array.shape[1:] not in ((), (1,)):
            raise RunError(
                f"{source} yields {what} shaped {array.shape}: AUC and log loss need one for each row, "
                "shaped (B,) or (B, 1)"
            )
    labels, probabilities = labels.reshape(-1), probabilities.reshape(-1)
    if len(labels) != len(probabilities):
        raise RunError(
            f"{source} yields {len(probabilities)} probabilities for {len(labels)} labels: AUC and log loss "
            "need one for each row"
        )
    if not np.isin(labels, (0, 1)).all():
        raise RunError(f"{source} yields labels other than 0 and 1, for which there is no AUC")
    if np.isnan(probabilities).any():
        raise RunError(f"{source} yields NaN as a probability: try a smaller learning rate")
    if not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise RunError(
            f"{source} yields values outside of 0 to 1 as probabilities: apply a sigmoid to logits first"
        )
    return labels, probabilities
