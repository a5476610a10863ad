"""Rows in Criteo's format made from a seed: `generate:ROWS[:SEED]`, or a file from the command line.

Ids follow a bounded Zipf law with exponent 1.25 over Criteo's 26 cardinalities. So 0.05 % of the largest
field's ids take about 86 % of its accesses and 1 % about 95 %, the skew published for production embeddings.
Popular ids are scattered over the id range, as hashed categories are.

Labels come from a planted logistic model: every id and every integer has a hidden weight from the seed. A
model that learns the weights reaches the AUC of `best_auc`, and no model exceeds it.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from oe_runtime.data.auc import StreamingAuc
from oe_runtime.data.batch import MISSING_ID, Batch, normalise
from oe_runtime.data.criteo import CATEGORIES, INTEGERS, field_cardinalities
from oe_runtime.data.identity import InputFile
from oe_runtime.data.source import Source
from oe_runtime.data.work_queue import Range
from oe_runtime.data.write import SCHEMA, write_rows
from oe_runtime.errors import DataError
from oe_runtime.support import interrupt

# Rows are made block by block, each from its own random stream: a resumed run starts at any block at once.
BLOCK_ROWS = 32768
ZIPF_EXPONENT = 1.25
# Every third field lacks its value in one row of twenty; the integers in one of ten.
_MISSING_CATEGORY = 0.05
_MISSING_INTEGER = 0.1
_SIGNAL = 1.5  # standard deviation of the planted log-odds
_BIAS = -1.4  # about a quarter of the labels are 1
_SCATTER = 2654435761  # odd; made coprime to the cardinality, it permutes the ids


class RawRows(NamedTuple):
    """Generated rows before normalisation, as a TSV file would hold them."""

    integers: NDArray[np.int64]  # (B, 13)
    missing: NDArray[np.bool_]  # (B, 13): the integer is absent
    ids: NDArray[np.int64]  # (B, 26), column-major, MISSING_ID where the category is absent
    labels: NDArray[np.float32]  # (B,)
    logits: NDArray[np.float32]  # (B,) the planted log-odds


class Generator(Source):
    """An endless table of rows: a pure function of the seed and the cap on cardinalities."""

    def __init__(self, rows: int, seed: int = 0, max_cardinality: int = 0) -> None:
        self.name = f"generate:{rows}:{seed}"
        self.rows = rows
        self.seed = seed
        self._cardinalities = field_cardinalities(max_cardinality)
        rng = np.random.Generator(np.random.SFC64([seed, 0]))
        # The weight of a field's rank r; rank 0 is its most popular id. 'missing' counts as weight 0.
        self._weights = [rng.standard_normal(c, dtype=np.float32) for c in self._cardinalities]
        self._integer_weights = rng.standard_normal(len(INTEGERS), dtype=np.float32)
        self._multipliers = [_coprime(_SCATTER % c or 1, c) for c in self._cardinalities]
        # Normalise, because a few popular ids would decide the share of ones and the best AUC.
        self._shift, self._scale = np.float32(0), np.float32(1)
        logits = self.raw_block(0).logits
        self._scale = np.float32(_SIGNAL / logits.std())
        self._shift = np.float32(_BIAS) - self._scale * logits.mean()

    def check(self, *, tensorflow: bool = True) -> None:
        """Accept: generated rows are always readable."""

    def identity(self) -> list[InputFile]:
        """See Source: another version of NumPy might make other rows from the same seed."""
        digest = hashlib.blake2b(digest_size=16)
        for values in self.raw_block(0):
            digest.update(np.ascontiguousarray(values).tobytes())
        return [InputFile(self.name, self.rows, digest.hexdigest())]

    def total_rows(self) -> int | None:
        """Return the rows of one epoch."""
        return self.rows

    def blocks(self, start_row: int = 0) -> Iterator[Batch]:
        """Yield all rows from `start_row` on, in order."""
        first = start_row // BLOCK_ROWS
        for index in range(first, -(-self.rows // BLOCK_ROWS)):
            raw = self.raw_block(index)
            dense = normalise(raw.integers)
            block = Batch(dense, raw.ids, raw.labels)
            begin = index * BLOCK_ROWS
            yield block.slice(max(0, start_row - begin), min(BLOCK_ROWS, self.rows - begin))

    def ranges(self, target_rows: int = 8 * BLOCK_ROWS) -> list[Range]:
        """Return parts of about `target_rows` rows for a work queue."""
        starts = range(0, self.rows, target_rows)
        return [Range(self.name, start, min(self.rows, start + target_rows)) for start in starts]

    def read(self, part: Range, start_row: int = 0) -> Iterator[Batch]:
        """Yield the rows of a range from its row `start_row` on, in order."""
        row = part.start + start_row
        for block in self.blocks(row):
            if row >= part.stop:
                return
            yield block.slice(0, min(block.rows, part.stop - row))
            row += block.rows

    def raw_block(self, index: int) -> RawRows:
        """Return the rows from index·BLOCK_ROWS on (always a full block)."""
        rng = np.random.Generator(np.random.SFC64([self.seed, 1, index]))
        normal = rng.standard_normal((BLOCK_ROWS, len(INTEGERS)), dtype=np.float32)
        missing = rng.random((BLOCK_ROWS, len(INTEGERS)), dtype=np.float32) < _MISSING_INTEGER
        integers = np.exp(normal * np.float32(1.5) + np.float32(1)).astype(np.int64)
        integers[missing] = 0
        normal[missing] = 0
        logits = normal @ self._integer_weights
        ids = np.empty((BLOCK_ROWS, len(CATEGORIES)), np.int64, order="F")
        for field, cardinality in enumerate(self._cardinalities):
            ranks = _zipf(rng, cardinality)
            weights = self._weights[field][ranks]
            ranks *= self._multipliers[field]
            ranks %= cardinality
            ranks += 1
            if field % 3 == 2:
                absent = rng.random(BLOCK_ROWS, dtype=np.float32) < _MISSING_CATEGORY
                ranks[absent] = MISSING_ID
                weights[absent] = 0
            logits += weights
            ids[:, field] = ranks
        logits *= self._scale
        logits += self._shift
        labels = rng.random(BLOCK_ROWS, dtype=np.float32) < 1 / (1 + np.exp(-logits))
        return RawRows(integers, missing, ids, labels.astype(np.float32), logits)


def _zipf(rng: np.random.Generator, cardinality: int) -> NDArray[np.int64]:
    """Return BLOCK_ROWS ranks below `cardinality` by inverting the continuous bounded power law."""
    reach = 1 - (cardinality + 1.0) ** (1 - ZIPF_EXPONENT)
    x = rng.random(BLOCK_ROWS)
    x *= -reach
    x += 1
    # x ** (1 / (1 - 1.25)) = x ** -4, by multiplication: several times faster than np.power.
    x *= x
    x *= x
    np.reciprocal(x, out=x)
    ranks = x.astype(np.int64)
    ranks -= 1
    return np.minimum(ranks, cardinality - 1, out=ranks)


def _coprime(start: int, cardinality: int) -> int:
    """Return the first number from `start` on that shares no factor with `cardinality`."""
    while np.gcd(start, cardinality) != 1:
        start += 1
    return start


def parse(name: str, max_cardinality: int = 0) -> Generator:
    """Parse `generate:ROWS[:SEED]`. DataError says what is wrong with the name."""
    parts = name.split(":")
    numbers = [p.replace("_", "") for p in parts[1:]]
    if (
        len(numbers) not in (1, 2)
        or not all(n.isascii() and n.isdigit() for n in numbers)
        or not int(numbers[0])
    ):
        raise DataError(f"'{name}' is not generate:ROWS[:SEED], for example generate:1000000:7")
    return Generator(int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else 0, max_cardinality)


@functools.cache
def best_auc(seed: int = 0, max_cardinality: int = 0) -> float:
    """Return the AUC of the planted model on its first block: the limit for training."""
    raw = Generator(BLOCK_ROWS, seed, max_cardinality).raw_block(0)
    auc = StreamingAuc()
    auc.update(raw.labels, 1 / (1 + np.exp(-raw.logits)))
    return auc.result()


def tables(generator: Generator) -> Iterator[pa.RecordBatch]:
    """Yield the rows as in files. A category is eight hex digits, as in Criteo's."""
    for index in range(-(-generator.rows // BLOCK_ROWS)):
        raw = generator.raw_block(index)
        columns = [pa.array(raw.labels.astype(np.int8))]
        columns += [pa.array(raw.integers[:, i], mask=raw.missing[:, i]) for i in range(len(INTEGERS))]
        columns += [_hex_texts(raw.ids[:, i]) for i in range(len(CATEGORIES))]
        rows = pa.record_batch(columns, schema=SCHEMA)
        yield rows.slice(0, min(BLOCK_ROWS, generator.rows - index * BLOCK_ROWS))


_HEX_BYTES = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), np.uint16)


def _hex_texts(ids: NDArray[np.int64]) -> pa.StringArray:
    """Return the ids, scattered over 32 bits, as hex digits; null for MISSING_ID."""
    scattered = (ids.astype(np.uint64) * np.uint64(_SCATTER)).astype(">u4")
    digits = _HEX_BYTES[scattered.view(np.uint8)]
    fixed = pa.Array.from_buffers(pa.binary(8), len(ids), [None, pa.py_buffer(digits)])
    return pc.if_else(pa.array(ids == MISSING_ID), None, fixed.cast(pa.binary()).cast(pa.string()))


def main(argv: list[str] | None = None) -> int:
    """`python -m oe_runtime.data.generate --rows N --out FILE`."""
    parser = argparse.ArgumentParser(
        prog="python -m oe_runtime.data.generate",
        description="Write rows in Criteo's format with skewed ids and a planted signal.",
        epilog="example: python -m oe_runtime.data.generate --rows 100000 --out /tmp/f.tsv.gz",
    )
    parser.add_argument("--rows", type=int, required=True, help="how many rows")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same rows (default 0)")
    parser.add_argument(
        "--max-cardinality", type=int, default=0, help="cap on distinct values of a field (0: none)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="file to write: .tsv, .csv (either also with .gz or .zst), .parquet or .tfrecord",
    )
    options = parser.parse_args(argv)
    if options.rows < 1:
        parser.error("--rows must be at least 1")
    if options.seed < 0:
        parser.error("--seed must not be negative")
    generator = Generator(options.rows, options.seed, options.max_cardinality)
    try:
        write_rows(options.out, tables(generator))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    best = best_auc(options.seed, options.max_cardinality)
    print(f"{options.out}: {options.rows:,} rows; the planted model's own AUC is {best:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(interrupt.run(main))
