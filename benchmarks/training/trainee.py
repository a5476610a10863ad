"""A built-in model that trains on batches from memory, with the trainer's own steps."""

from __future__ import annotations

from typing import Any


class Trainee:
    """A model with its tables at `client`'s servers; stock without. `state` is what a checkpoint holds."""

    def __init__(self, options: Any, client: Any) -> None:
        from oe_runtime.keras.job_state import KerasScriptState
        from oe_runtime.programs.click_model import Layout, build, prepare
        from oe_runtime.run.ranks import Ranks

        prepare(options)
        self.model = build(options, client, jit=options.jit, **options.steps_of_models())
        self.state = KerasScriptState(self.model, windows=True)
        self.batches_ahead = self.state.batches_ahead
        self._layout, self._ranks = Layout(options.schema), Ranks()
        self._known: list[tuple[Any, Any]] = []
        self._metrics: dict[str, float] = {}

    def train(self, batch: Any, *following: Any) -> None:
        """Run one step; the rows of the next batches (`batches_ahead`) are prefetched."""
        from oe_runtime.programs.click_model import train_step

        data = self._data(batch)
        self._known = [(one, self._data(one)) for one in following[: self.batches_ahead]]
        self.state.announce(data, [one for _, one in self._known])
        self._metrics = train_step(self.model, data)

    def window(self) -> tuple[float, float | None]:
        """Return mean loss and AUC of the steps since the last call."""
        return self.state.window(self._ranks, self._metrics)

    def _data(self, batch: Any) -> Any:
        return next((data for one, data in self._known if one is batch), None) or self._layout.data(batch)
