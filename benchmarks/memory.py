"""Bytes per key of a full table: every tier and precision, beside the ideal and FBGEMM's tables on the CPU.

    python benchmarks/memory.py [--rows 1000000] [--directory /path/on/a/drive]

In process, with the statistics that servers report. Rows were pushed once, in batches. The ideal is a row's
numbers and 8 bytes for its key. FBGEMM's rows have no keys (ids are positions), and dims that are multiples
of 4; its weights have two bytes at the precision "bfloat16 rows" (as float16, the only one it has there), and
its optimizers' state stays float32.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from reporting import MISSED, RESULTS, header, table

OPTIMIZERS = {"sgd": 0, "adagrad": 1, "adam": 2}  # numbers of state per weight
PRECISIONS = {  # of rows, and of the optimizer's state
    "float32": ("float32", None),
    "bfloat16 rows": ("bfloat16", None),
    "bfloat16 rows and state": ("bfloat16", "bfloat16"),
}
TIERS = {"dram": "dram", "dram, array": "dram", **dict.fromkeys(("pmem_libpmem", "dram_pmem", "dram_ssd"))}
CACHE = 1 << 20
AT_ONCE = 100_000  # keys of a push


@dataclass(frozen=True)
class Case:
    """What a table holds."""

    optimizer: str
    dim: int
    precision: str

    @property
    def ideal(self) -> int:
        """Bytes of a row's numbers and its key."""
        rows, state = PRECISIONS[self.precision]
        width = {"float32": 4, "bfloat16": 2}
        return self.dim * (width[rows] + OPTIMIZERS[self.optimizer] * width[state or "float32"]) + 8


@dataclass(frozen=True)
class Found:
    """Bytes per key: in DRAM without caches, and on the tier's medium."""

    dram: float
    medium: float = 0

    @property
    def rows(self) -> float:
        """Where the rows lie, with the index if that is DRAM."""
        return self.medium or self.dram

    def __str__(self) -> str:
        return f"{self.dram:.0f}" + (f" + {self.medium:.0f}" if self.medium else "")


def measure(case: Case, tier: str, rows: int, directory: Path) -> Found:
    """Fill a table in this process, and ask for its figures."""
    import oe_runtime as oe

    dtype, state = PRECISIONS[case.precision]
    index = {"index": "array", "input_dim": rows} if tier.endswith("array") else {}
    spec = oe.TableSpec(
        "memory", case.dim, optimizer={"name": case.optimizer}, dtype=dtype, state_dtype=state, **index
    )
    with tempfile.TemporaryDirectory(dir=directory) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a directory is not on persistent memory
        storage = oe.StorageSpec()
        if TIERS[tier] is None:
            cache = 0 if tier == "pmem_libpmem" else CACHE
            storage = oe.StorageSpec(tier, folder, cache_bytes=cache)
        with oe.Client.in_process(storage) as client:
            lookups = [(client.create_table(spec), 0)]
            keys = np.random.default_rng(1).permutation(rows) if index else np.arange(rows) * 7919
            for begin in range(0, rows, AT_ONCE):
                pulled = client.pull([keys[begin : begin + AT_ONCE]], lookups)
                client.push(pulled, [np.full(pulled.groups[0].rows.shape, 0.01, np.float32)], 0.01)
            one = client.stats()["servers"][0]
    held, memory = next(iter(one["tables"].values())), one["memory"]
    dram = memory["index"] + (memory["dram"] if TIERS[tier] else 0)
    return Found(dram / held["rows"], memory["pmem"] / held["rows"])


def measure_fbgemm(case: Case) -> Found | None:
    """The tensors of FBGEMM's table for 1,000 rows; None where it has no such table."""
    if case.precision == "bfloat16 rows and state":
        return None
    import torch
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        OptimType,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    rows, kinds = 1000, {"sgd": "EXACT_SGD", "adagrad": "EXACT_ADAGRAD", "adam": "ADAM"}
    try:
        held = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, (case.dim + 3) // 4 * 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=getattr(OptimType, kinds[case.optimizer]),
            weights_precision=SparseType.FP32 if case.precision == "float32" else SparseType.FP16,
        )
    except AssertionError:  # Adam, for example, is for GPUs only
        return None
    tensors = {t.data_ptr(): t for t in [*held.parameters(), *held.buffers()] if isinstance(t, torch.Tensor)}
    large = (t.numel() * t.element_size() for t in tensors.values() if t.numel() >= rows)
    return Found(sum(large) / rows)


def targets(found: dict[tuple[Case, str], Found], rows: int) -> Iterator[tuple[str, str, bool]]:
    """What was asked, what was found, and whether it is met; of tables that are full enough."""
    if rows < 1_000_000:
        return
    for tier, most in (
        ("dram", {16: 0.60, 64: 0.53}),
        ("pmem_libpmem", {16: 0.56, 64: 0.56}),
        ("dram_pmem", {16: 0.56, 64: 0.56}),
        ("dram_ssd", {16: 0.60, 64: 0.60}),
    ):
        for dim, bound in most.items():
            cases = [Case("adagrad", dim, name) for name in ("bfloat16 rows and state", "float32")]
            halves, floats = (found[case, tier].rows for case in cases)
            what = f"{tier}, Adagrad, dim {dim}: rows and state in bfloat16 ≤ {bound} of float32"
            yield what, f"{halves / floats:.3f}", halves / floats <= bound
    for dim in (16, 64):
        theirs = found.get((Case("adagrad", dim, "bfloat16 rows"), "FBGEMM"))
        if theirs is not None:
            ours = found[Case("adagrad", dim, "bfloat16 rows and state"), "dram, array"]
            part = ours.dram / theirs.dram
            yield f"array, Adagrad, dim {dim} ≤ 0.72 of FBGEMM in float16", f"{part:.3f}", part <= 0.72


def main() -> int:
    """Measure, print the table, and write it with ``--out``; MISSED if a target is missed."""
    parser = argparse.ArgumentParser(prog="python benchmarks/memory.py", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dims", type=int, nargs="+", default=[9, 16, 64])
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--directory", type=Path, help="for rows outside DRAM; by default in $TMPDIR or /tmp")
    parser.add_argument("--out", type=Path, default=RESULTS / "memory.md", help="where the page is written")
    options = parser.parse_args()
    has_fbgemm = importlib.util.find_spec("fbgemm_gpu") is not None
    if not has_fbgemm:
        print("fbgemm_gpu is not installed", file=sys.stderr)
    found: dict[tuple[Case, str], Found] = {}
    lines = []
    for optimizer, dim, precision in product(options.optimizers, options.dims, PRECISIONS):
        case = Case(optimizer, dim, precision)
        if has_fbgemm and (theirs := measure_fbgemm(case)) is not None:
            found[case, "FBGEMM"] = theirs
        for tier in TIERS:
            found[case, tier] = measure(case, tier, options.rows, options.directory)
        cells = [str(found.get((case, tier), "")) for tier in ("FBGEMM", *TIERS)]
        lines.append([f"{optimizer}, dim {dim}, {precision}", str(case.ideal), *cells])
        print(*lines[-1], sep=" | ", file=sys.stderr, flush=True)
    text = header("Bytes per key of a full table", f"{options.rows:,} rows")
    text += __doc__.split("\n\n")[-1].replace("In process, with", "Measured in process, by")
    text += "\nCells of tiers outside DRAM: bytes in DRAM, without caches, + bytes on the medium.\n\n"
    text += table(["optimizer, dim, precision", "ideal", "FBGEMM", *TIERS], lines) + "\n"
    asked = set(options.optimizers) >= {"adagrad"} and set(options.dims) >= {16, 64}
    verdicts = list(targets(found, options.rows)) if asked else []
    text += "".join(f"- {what}: {said} {'met' if met else 'MISSED'}\n" for what, said, met in verdicts)
    options.out.write_text(text)
    print(text)
    return MISSED if any(not met for *_, met in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
