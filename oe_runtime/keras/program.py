"""The compiled function for data of one structure, and batches prepared for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from oe_runtime.client import Client, Pairs, Pulled
from oe_runtime.keras import by_row
from oe_runtime.keras.arrays import to_tensor
from oe_runtime.keras.feed import padding_cause
from oe_runtime.keras.gradients import RowGroup
from oe_runtime.keras.plan import LookupPlan
from oe_runtime.keras.served import Served
from oe_runtime.keras.step_bodies import TRAIN, Body
from oe_runtime.keras.supply import Supply


@dataclass(frozen=True)
class Prepared:
    """A batch that is ready to compute once its rows are up to date."""

    program: StepFunction
    tensors: list[Any]
    ids: list[NDArray[np.int64]]  # distinct ones; a model may draw others when it is asked again
    pulls: list[Pulled]
    pairs: list[list[Any]]  # per group the tensors of its Pairs, empty where unused
    connection: int  # the client's at the time of the pulls


class StepFunction:
    """The plan and the compiled function for data of one structure."""

    def __init__(
        self,
        served: Served,
        body: Body,
        data: Any,
        present: Sequence[bool],
        specs: Sequence[Any],
        *,
        eager: bool,
    ) -> None:
        self.specs = specs
        self._lengths = [tuple(spec.shape)[1:] for spec in specs]
        self._served = served
        self.body = body
        self._data = data
        self._present = present
        self._eager = eager
        n = len(keras.tree.flatten(data[0]))
        if not all(present[:n]):
            raise ValueError(
                "a model with distributed embeddings needs all of its inputs, but one of them is None"
            )
        self._inputs = n
        self._plan = LookupPlan(served.model, data[0], specs[:n])
        for layer in self._plan.layers:
            if layer.table is None:
                raise RuntimeError(f"Embedding '{layer.name}' has no table yet: compile the model first")
        lookups = range(len(self._plan.layers))
        # Frozen tables have a pull of their own, because a push covers all rows of its pull.
        self._trained = [i for i in lookups if self._plan.layers[i].trainable]
        frozen = [i for i in lookups if not self._plan.layers[i].trainable]
        self._pulls = [pulled for pulled in (self._trained, frozen) if pulled]
        self._tables = [
            [(self._plan.layers[i].table.number, self._plan.sources[i]) for i in pulled]
            for pulled in self._pulls
        ]
        self._function: Any = None
        self._sizes: tuple[list[list[int]], list[Any]] = ([], [])
        self._paired: set[int] | None = None  # the groups whose pairs the function uses; None: not known yet

    def accepts(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether tensors of these shapes fit the compiled function."""
        return all(
            shape[1:] == lengths or all(b in (a, None) for a, b in zip(shape[1:], lengths, strict=True))
            for shape, lengths in zip(shapes, self._lengths, strict=True)
        )

    @property
    def trains(self) -> bool:
        """Whether the first pull will be pushed."""
        return self.body is TRAIN and bool(self._trained)

    def ids(self, tensors: Sequence[Any]) -> list[NDArray[np.int64]]:
        """Return the distinct ids of a batch, flat."""
        return self._plan.ids(tensors[: self._inputs]) if self._pulls else []

    def plan(self, client: Client, ids: Sequence[NDArray[np.int64]]) -> list[Pulled]:
        """Plan the pulls of all lookups: first of trained tables, if any, then of frozen ones."""
        return [client.plan(ids, tables) for tables in self._tables]

    def trained_ids(self, ids: Sequence[NDArray[np.int64]]) -> list[tuple[str, NDArray[np.int64]]]:
        """Return the table and the flat ids of each lookup of the pull that is pushed."""
        return [(self._plan.layers[i].table.spec.name, ids[self._plan.sources[i]]) for i in self._trained]

    def padding_cause(self, ids: Sequence[NDArray[np.int64]], examples: int, batch: str) -> str:
        """See `feed.padding_cause`; `ids` are those of a `Prepared`."""
        of_lookups = [ids[source] for source in self._plan.sources]
        return padding_cause(self._plan.layers, of_lookups, examples, batch)

    def pairs(self, client: Client, pulls: Sequence[Pulled]) -> list[list[Any]]:
        """Return the pairs of all groups that need them (`by_row`)."""
        groups = [group for pulled in pulls for group in pulled.groups]
        if self._paired is None:
            served = self._served
            possible = not self._eager and not served.xla and served.settings.micro_batches == 1
            wanted = {
                g for g, group in enumerate(groups) if possible and by_row.wants_pairs(served.model, group)
            }
        else:
            wanted = self._paired
        none = [tf.constant([], tf.int32)] * len(Pairs._fields)
        return [
            [tf.constant(part) for part in client.pairs(group)] if g in wanted else none
            for g, group in enumerate(groups)
        ]

    def run(self, prepared: Prepared) -> Any:
        """Run the compiled function on pulled rows and the batch."""
        groups = [group for pulled in prepared.pulls for group in pulled.groups]
        if self._function is None:
            self._function = self._compile(prepared)
        rows = [to_tensor(group.rows) for group in groups]
        inverses = [to_tensor(group.inverse) for group in groups]
        sizes = [group.sizes for group in groups]
        if self._sizes[0] != sizes:  # rarely: at the last, smaller batch
            self._sizes = (sizes, [tf.constant(part, tf.int32) for part in sizes])
        pairs = [part for parts in prepared.pairs for part in parts]
        return self._function(*rows, *inverses, *self._sizes[1], *pairs, *prepared.tensors)

    def _compile(self, prepared: Prepared) -> Any:
        pulls = prepared.pulls
        served, body, layers = self._served, self.body, self._plan.layers
        data, present = self._data, self._present
        # Per group, its rows and the plan's numbers of its lookups.
        groups = [
            (tf.TensorSpec([None, group.dim], group.rows.dtype), [lookups[i] for i in group.lookups])
            for lookups, pulled in zip(self._pulls, pulls, strict=True)
            for group in pulled.groups
        ]
        n, m = len(groups), len(Pairs._fields)
        whole = served.settings.micro_batches == 1
        parts = [part for pulled in pulls for part in pulled.groups]
        even = [g for g, part in enumerate(parts) if whole and part.sizes[1:] and len(set(part.sizes)) == 1]
        paired = [g for g, parts in enumerate(prepared.pairs) if int(tf.size(parts[1]))]
        trained = len(pulls[0].groups) if self._trained else 0

        def function(*flat: Any) -> Any:
            rows: list[Any] = [None] * len(layers)
            for (_, lookups), unique, inverse, sizes in zip(
                groups, flat[:n], flat[n : 2 * n], flat[2 * n : 3 * n], strict=True
            ):
                # Split the positions, not the gathered rows, which would be copied again.
                for lookup, part in zip(lookups, tf.split(inverse, sizes, num=len(lookups)), strict=True):
                    rows[lookup] = tf.gather(unique, part)
            every_pair = [Pairs(*flat[k : k + m]) for k in range(3 * n, (3 + m) * n, m)]
            batch = iter(flat[(3 + m) * n :])
            values = keras.tree.pack_sequence_as(data, [next(batch) if p else None for p in present])
            row_groups = []
            for k, (_, lookups) in enumerate(groups):
                unique, inverse, sizes = flat[k], flat[n + k], flat[2 * n + k]
                together = _together(unique, inverse, len(lookups)) if k in even else None
                of_group = [layers[i] for i in lookups], [rows[i] for i in lookups]
                row_groups.append(RowGroup(unique, inverse, sizes, *of_group, together))
            products = by_row.Products(
                {g: by_row.PairedGroup(row_groups[g], every_pair[g], groups[g][1]) for g in paired}
            )
            together = {tuple(groups[k][1]): row_groups[k].together for k in even}
            supply = Supply(layers, rows, together, products)
            result = served.run(body, supply, row_groups[:trained], values)
            self._paired = products.used
            return result

        if self._eager:
            return function
        return tf.function(function, autograph=False).get_concrete_function(
            *(unique for unique, _ in groups),
            *(tf.TensorSpec([None], tf.int32) for _ in groups),
            *(tf.TensorSpec([len(lookups)], tf.int32) for _, lookups in groups),
            *(tf.TensorSpec([None], tf.int32) for _ in range(m * n)),
            *self.specs,
        )


def _together(rows: Any, inverse: Any, lookups: int) -> Any:
    """Return (examples, lookups, dim) for lookups with equally many ids."""
    # Not tf.transpose: of int32, oneDNN complains about it on stderr where there is no AVX-512.
    by_example = tf.stack(tf.split(inverse, lookups), axis=1)
    whole = tf.gather(rows, by_example)
    whole.set_shape((None, lookups, rows.shape[1]))
    return whole
