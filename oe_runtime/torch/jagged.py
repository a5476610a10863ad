"""Lists of ids of different lengths, with the names and methods of TorchRec, for programs without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch


class JaggedTensor:
    """Lists of different lengths, one after the other in one tensor; see TorchRec's JaggedTensor.

    `values` has the elements of all lists in its first dimension, `weights` a number for each. Give
    `lengths`, (lists,), or `offsets`, (lists + 1,).
    """

    def __init__(self, values: Any, weights: Any = None, lengths: Any = None, offsets: Any = None) -> None:
        if lengths is None and offsets is None:
            raise ValueError("JaggedTensor: give lengths or offsets")
        self._values, self._weights, self._lengths, self._offsets = values, weights, lengths, offsets

    @staticmethod
    def from_dense(values: Sequence[Any], weights: Sequence[Any] | None = None) -> JaggedTensor:
        """Return the lists of a sequence of tensors."""
        lengths = torch.tensor([len(one) for one in values], dtype=torch.int64)
        return JaggedTensor(torch.cat(list(values)), torch.cat(list(weights)) if weights else None, lengths)

    def values(self) -> Any:
        """Return the elements of all lists."""
        return self._values

    def weights(self) -> Any:
        """Return a number for each element. Raises ValueError where there are none."""
        if self._weights is None:
            raise ValueError("this JaggedTensor has no weights")
        return self._weights

    def weights_or_none(self) -> Any:
        """Return a number for each element, or None."""
        return self._weights

    def lengths(self) -> Any:
        """Return the length of each list."""
        if self._lengths is None:
            self._lengths = torch.diff(self._offsets)
        return self._lengths

    def offsets(self) -> Any:
        """Return where each list begins, and at last where the last one ends."""
        if self._offsets is None:
            self._offsets = _offsets(self._lengths)
        return self._offsets

    def to_dense(self) -> list[Any]:
        """Return the lists, a tensor each."""
        return [self._values[begin:end] for begin, end in pairwise(self.offsets().tolist())]

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Any:
        """Return (lists, length, …): shorter lists are padded at their ends, longer ones cut off."""
        if torch.compiler.is_exporting():
            if desired_length is None:
                raise ValueError("to_padded_dense: a model that is exported must give desired_length")
            return torch.ops.oe_runtime.padded.default(
                self._values, self.lengths(), desired_length, float(padding_value)
            )
        offsets = self.offsets()
        lengths = torch.diff(offsets)
        longest = int(lengths.max()) if len(lengths) else 0
        places = torch.arange(longest if desired_length is None else desired_length, device=offsets.device)
        there = places < lengths[:, None]
        shape = (*there.shape, *self._values.shape[1:])
        padded = self._values.new_full(shape, padding_value)
        return padded.index_put((there,), self._values[(offsets[:-1, None] + places)[there]])

    def to(self, device: Any, non_blocking: bool = False) -> JaggedTensor:
        """Return it on a device."""
        parts = (self._values, self._weights, self._lengths, self._offsets)
        return JaggedTensor(
            *(one if one is None else one.to(device, non_blocking=non_blocking) for one in parts)
        )


class KeyedJaggedTensor:
    """Jagged tensors of several features in one; see TorchRec's KeyedJaggedTensor.

    First come the lists of ids of the first feature for all examples, then those of the next. All features
    have equally many lists, unless `stride_per_key_per_rank` says how many each has (its rows are summed). An
    element of `inverse_indices`, (features, examples), then says which list of the feature an example has.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Any,
        weights: Any = None,
        lengths: Any = None,
        offsets: Any = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | None = None,
        inverse_indices: tuple[list[str], Any] | None = None,
    ) -> None:
        self._keys = list(keys)
        self._jagged = JaggedTensor(values, weights, lengths, offsets)
        self._inverse_indices = inverse_indices
        self._parts: dict[str, JaggedTensor] | None = None  # by feature, where they are known
        lists = self._jagged.lengths().shape[0]  # torch.export takes len() for fixed
        if stride_per_key_per_rank is not None:
            self._strides = [sum(strides) for strides in stride_per_key_per_rank]
        else:
            self._strides = [lists // max(len(self._keys), 1) if stride is None else stride] * len(self._keys)
        if len(self._strides) != len(self._keys) or sum(self._strides) != lists:
            raise ValueError(
                f"KeyedJaggedTensor: {lists} lists of ids cannot be shared out among "
                f"{len(self._keys)} features as {self._strides}"
            )

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str], values: Any, lengths: Any, weights: Any = None, **more: Any
    ) -> KeyedJaggedTensor:
        """Return one by the length of each list."""
        return KeyedJaggedTensor(keys, values, weights, lengths=lengths, **more)

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str], values: Any, offsets: Any, weights: Any = None, **more: Any
    ) -> KeyedJaggedTensor:
        """Return one by the offsets of the lists."""
        return KeyedJaggedTensor(keys, values, weights, offsets=offsets, **more)

    @staticmethod
    def from_jt_dict(features: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """Return one of several features with equally many lists."""
        parts = list(features.values())
        weighted = [key for key, one in features.items() if one.weights_or_none() is not None]
        if 0 < len(weighted) < len(parts):
            raise ValueError(f"KeyedJaggedTensor: only {', '.join(weighted)} of the features have weights")
        whole = KeyedJaggedTensor(
            list(features),
            torch.cat([one.values() for one in parts]),
            torch.cat([one.weights() for one in parts]) if weighted else None,
            lengths=torch.cat([one.lengths() for one in parts]),
            stride_per_key_per_rank=[[one.lengths().shape[0]] for one in parts],
        )
        whole._parts = dict(features)
        return whole

    def keys(self) -> list[str]:
        """Return the features' names."""
        return self._keys

    def values(self) -> Any:
        """Return the ids of all lists."""
        return self._jagged.values()

    def weights(self) -> Any:
        """Return a number for each id. Raises ValueError where there are none."""
        return self._jagged.weights()

    def weights_or_none(self) -> Any:
        """Return a number for each id, or None."""
        return self._jagged.weights_or_none()

    def lengths(self) -> Any:
        """Return the length of each list."""
        return self._jagged.lengths()

    def offsets(self) -> Any:
        """Return where each list begins, and at last where the last one ends."""
        return self._jagged.offsets()

    def stride(self) -> int:
        """Return the number of examples."""
        if self._inverse_indices is not None:
            return int(self._inverse_indices[1].shape[-1])
        return max(self._strides, default=0)

    def stride_per_key(self) -> list[int]:
        """Return the number of lists of each feature."""
        return self._strides

    def inverse_indices_or_none(self) -> tuple[list[str], Any] | None:
        """Return the list of each example, by feature; None if an example's list has its number."""
        return self._inverse_indices

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return one feature. Raises KeyError."""
        return self.to_dict()[key]

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Return the features by name."""
        if self._parts is not None:
            return dict(self._parts)
        offsets, found = self.offsets(), {}
        for key, (first, last) in zip(
            self._keys, pairwise(accumulate(self._strides, initial=0)), strict=True
        ):
            begin, end = int(offsets[first]), int(offsets[last])
            weights = self.weights_or_none()
            found[key] = JaggedTensor(
                self.values()[begin:end],
                None if weights is None else weights[begin:end],
                offsets=offsets[first : last + 1] - begin,
            )
        return found

    def to(self, device: Any, non_blocking: bool = False) -> KeyedJaggedTensor:
        """Return it on a device."""
        jagged = self._jagged.to(device, non_blocking)
        inverse = self._inverse_indices
        return KeyedJaggedTensor(
            self._keys,
            jagged.values(),
            jagged.weights_or_none(),
            offsets=jagged.offsets(),
            stride_per_key_per_rank=[[one] for one in self._strides],
            inverse_indices=None if inverse is None else (inverse[0], inverse[1].to(device)),
        )


class KeyedTensor:
    """Embeddings of features side by side, (examples, sum of the dims); see TorchRec's KeyedTensor."""

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Any) -> None:
        self._keys, self._lengths, self._values = list(keys), list(length_per_key), values

    def keys(self) -> list[str]:
        """Return the features' names."""
        return self._keys

    def values(self) -> Any:
        """Return all embeddings, side by side."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Return the dim of each feature."""
        return self._lengths

    def offset_per_key(self) -> list[int]:
        """Return the column at which each feature begins, and at last the number of columns."""
        return list(accumulate(self._lengths, initial=0))

    def __getitem__(self, key: str) -> Any:
        """Return the embeddings of one feature. Raises KeyError."""
        return self.to_dict()[key]

    def to_dict(self) -> dict[str, Any]:
        """Return the embeddings of each feature, (examples, dim)."""
        return dict(zip(self._keys, self._values.split(self._lengths, dim=1), strict=True))

    @staticmethod
    def regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Any]:
        """Return the embeddings of each group of features, side by side."""
        found = {key: value for one in keyed_tensors for key, value in one.to_dict().items()}
        return [torch.cat([found[key] for key in group], dim=1) for group in groups]


def _offsets(lengths: Any) -> Any:
    return torch.cat([lengths.new_zeros(1), torch.cumsum(lengths, 0, dtype=lengths.dtype)])
