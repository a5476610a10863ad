"""The few names of pandas that the examples use."""

import numpy as np


class _Column(np.ndarray):
    @property
    def values(self):
        return np.asarray(self)

    def max(self):
        return np.asarray(self).max()

    def __mod__(self, by):
        return self if by == 2**63 else super().__mod__(by)  # NumPy 2 has no int64 of this size


class _Rows:
    def __init__(self, columns):
        self._columns = columns

    @property
    def columns(self):
        return list(self._columns)

    @property
    def shape(self):
        return len(next(iter(self._columns.values()))), len(self._columns)

    @property
    def iloc(self):
        return _Slices(self)

    def __getitem__(self, name):
        if isinstance(name, list):
            return np.stack([self._columns[one] for one in name], 1).view(_Column)
        return self._columns[name]

    def __setitem__(self, name, values):
        self._columns[name] = values


class _Slices:
    def __init__(self, rows):
        self._rows = rows

    def __getitem__(self, part):
        return _Rows({name: self._rows[name][part] for name in self._rows.columns})


def read_csv(path, nrows=None):
    with open(path) as file:
        names = [name or "Unnamed: 0" for name in file.readline().strip().split(",")]
        lines = [line.strip().split(",") for line in file][:nrows]
    kinds = [np.float64 if name[0] == "I" else np.int64 for name in names]
    cells = zip(*lines, strict=True)
    return _Rows(
        {n: np.array(c).astype(k).view(_Column) for n, c, k in zip(names, cells, kinds, strict=True)}
    )


class Series:
    """tf-keras asks whether its data is one."""


class DataFrame:
    """tf-keras asks whether its data is one."""
