"""The trainer's command line: what can be set, its defaults, and what is refused before anything starts."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oe_runtime.client import TRANSFERS
from oe_runtime.spec import STORAGES, TLS
from oe_runtime.training import model_options, worker_options
from oe_runtime.training.argument_types import count, number, rate, share
from oe_runtime.training.optimizers import LEARNING_RATES

CHECKPOINT_ROWS = ("auto", "pool", "files")
DEVICES = ("auto", "cpu", "gpu")

_EPILOG = """\
examples:
  # a first run on generated data, everything in this process
  python -m oe_runtime.train --data generate:200000 --in-process

  # real data, two embedding servers, a checkpoint every 500 steps
  python -m oe_runtime.train --data 'day_*.gz' --servers 127.0.0.1:7000,127.0.0.1:7001 \\
      --token-file token --run-dir runs/first --checkpoint-steps 500

  # two workers, each started like this with its own --rank
  python -m oe_runtime.train --data 'day_*.gz' --servers 10.0.0.1:7000 --token-file token \\
      --run-dir runs/two --workers 10.0.0.2:7100,10.0.0.3:7100 --rank 0

  # the same by horovodrun, which starts them all
  horovodrun -np 2 -H node1:1,node2:1 python -m oe_runtime.train … --run-dir runs/two

  # go on after an interruption: the same command with --resume
  python -m oe_runtime.train … --run-dir runs/first --resume

The run directory holds config.json, metrics.jsonl (one event a line), tensorboard/, checkpoints/ and, at the
end, report.html (python -m oe_runtime.report DIR writes it at any time) and export/.
docs/deeprec-flags.md has DeepRec's flags and what they are called here.
Exit codes: 0 finished, 1 error, 3 another worker was lost, 130 interrupted (a checkpoint was written;
--resume goes on from it).
"""


@dataclass(frozen=True)
class Options:
    """A checked command line; see `parser` for the meaning of each."""

    data: str
    max_bad_rows: int
    model: str
    servers: tuple[str, ...]
    token_file: Path | None
    tls: str
    checkpoint_transfer: str
    job: str
    server_wait: int
    workers: tuple[str, ...]
    rank: int
    size: int
    rendezvous: str
    worker_wait: int
    generation: int
    workqueue: bool
    pipeline: bool
    staleness: int | None
    on_worker_lost: str
    in_process: bool
    stock: bool
    storage: str
    storage_path: str
    storage_size: int
    storage_cache: int
    dim: int
    hidden: tuple[int, ...]
    cin: tuple[int, ...]
    bottom: tuple[int, ...]
    interaction: str
    precision: str
    row_precision: str
    index: str
    admission: dict[str, Any] | None
    eviction: list[dict[str, Any]]
    batch_size: int
    micro_batch: int
    epochs: int | None
    steps: int | None
    optimizer: str
    learning_rate: float
    seed: int
    max_cardinality: int
    holdout: float
    eval: bool
    deterministic: bool
    jit: bool
    device: str
    inter_threads: int
    intra_threads: int
    run_dir: Path
    checkpoint_steps: int
    keep_checkpoints: int
    checkpoint_rows: str
    export_checkpoints: int
    checkpoint_increments: int
    resume: bool
    export: Path | None
    log_every: int
    stats_seconds: float
    timeline: int
    exit_with_parent: bool

    def fixed(self) -> dict[str, Any]:
        """The settings that a resumed run must share with the run it goes on from."""
        common = {
            "data": self.data,
            "model": self.model,
            "embeddings": "stock" if self.stock else "servers",
            "dim": self.dim,
            "hidden": list(self.hidden),
            "batch_size": self.batch_size,
            "optimizer": self.optimizer,
            "learning_rate": self.learning_rate,
            "seed": self.seed,
            "max_cardinality": self.max_cardinality,
            "holdout": self.holdout,
        }
        mine = {"xdeepfm": ("cin",), "dlrm": ("bottom", "interaction")}.get(self.model, ())
        shape = {name: getattr(self, name) for name in mine}
        if self.workqueue:
            common["workqueue"] = True
        return common | {k: list(v) if isinstance(v, tuple) else v for k, v in shape.items()}


def parser() -> argparse.ArgumentParser:
    """The argument parser, whose help is the reference of the trainer."""
    p = argparse.ArgumentParser(
        prog="python -m oe_runtime.train",
        description="Train a click model on Criteo-format data with its embeddings on parameter servers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--data",
        required=True,
        metavar="PATH|generate:ROWS[:SEED]",
        help="rows in Criteo's shape: a file, directory or glob of .tsv, .csv (also .gz, .zst), .parquet or "
        ".tfrecord; or generated rows",
    )
    p.add_argument(
        "--max-bad-rows",
        type=count(0),
        default=0,
        metavar="N",
        help="leave out up to N broken rows of a pass and say which; 0 (default): the first one is an error",
    )
    where = p.add_argument_group("where the embeddings live (one of the three)").add_mutually_exclusive_group(
        required=True
    )
    where.add_argument(
        "--servers", metavar="HOST:PORT,…", help="parameter servers, in the order of their --index"
    )
    where.add_argument("--in-process", action="store_true", help="in this process, by the same C++ core")
    where.add_argument("--stock", action="store_true", help="in the plain Keras model, to compare with")
    p.add_argument("--token-file", type=Path, metavar="FILE", help="file with the servers' token")
    p.add_argument(
        "--tls",
        choices=TLS,
        default="auto",
        help="with --servers: encrypt the connections; auto (default): but for those to loopback",
    )
    p.add_argument(
        "--checkpoint-transfer",
        choices=TRANSFERS,
        default="shared",
        help="with --servers: whether they write into the run directory themselves, as on this machine "
        "(shared, default), or send their files, as from other hosts (wire; they need --checkpoint-dir)",
    )
    p.add_argument(
        "--job",
        default="",
        metavar="NAME",
        help="with --servers: whose tables these are, where several jobs or models use the same servers",
    )
    p.add_argument(
        "--server-wait",
        type=count(0),
        default=300,
        metavar="SECONDS",
        help="with --servers: seconds to wait for a lost server, or for another worker's host (at least 20 "
        "s); then all workers go on from the latest checkpoint. 0: end the run at once (default 300)",
    )
    p.add_argument("--storage", choices=STORAGES, help="with --in-process: kind of memory (default dram)")
    p.add_argument("--storage-path", metavar="DIR", help="with --storage pmem_*, dram_pmem: its directory")
    p.add_argument(
        "--storage-cache",
        type=count(0),
        metavar="BYTES",
        help="with --storage dram_pmem: DRAM for its cache",
    )
    p.add_argument(
        "--storage-size", type=count(0), metavar="BYTES", help="with --in-process: cap on the rows' memory"
    )

    worker_options.add_arguments(p)

    model_options.add_arguments(p)

    t = p.add_argument_group("training")
    t.add_argument(
        "--batch-size",
        type=count(1),
        default=4096,
        help="rows a step (default 4096), of all workers together: where Horovod's and DeepRec's batch is "
        "of each worker, give that times their number",
    )
    t.add_argument(
        "--micro-batch",
        type=count(1),
        default=1,
        metavar="N",
        help="compute a batch, or this worker's part of it, in N parts, one after the other, before one "
        "update and one push: less memory, the same results within floating point (default 1)",
    )
    t.add_argument("--epochs", type=count(1), help="passes over the data (default 1, or as --steps needs)")
    t.add_argument("--steps", type=count(1), help="stop after so many steps in all")
    t.add_argument("--optimizer", choices=tuple(LEARNING_RATES), default="adagrad", help="default adagrad")
    rates = ", ".join(f"{k} {v}" for k, v in LEARNING_RATES.items())
    t.add_argument("--learning-rate", type=rate, help=f"default by optimizer: {rates}")
    t.add_argument("--seed", type=count(0), default=0, help="same seed, same losses (default 0)")
    t.add_argument(
        "--holdout",
        type=share,
        default=0.1,
        help="share of the rows kept for the final evaluation (default 0.1: every tenth row)",
    )
    t.add_argument(
        "--eval",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="evaluate on the held-out rows at the end (default on)",
    )
    t.add_argument(
        "--pipeline",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="pull the rows of the next batch while one computes; the results are the same to the bit "
        "(default on; several workers only read ahead)",
    )
    t.add_argument(
        "--staleness",
        type=count(0),
        metavar="N",
        help="of one worker, 1: a push goes out while the next batch computes, on rows that lack it (default "
        "0). With --workqueue: wait for workers that are more than N steps behind (default: for none)",
    )
    t.add_argument(
        "--jit",
        action="store_true",
        help="let XLA fuse the operations of a step (the first one takes longer)",
    )
    t.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="where the model computes: gpu ends the run at once where TensorFlow finds none, cpu leaves "
        "them alone; auto (default): a GPU if there is one",
    )
    t.add_argument(
        "--inter-threads",
        type=count(0),
        default=0,
        metavar="N",
        help="TensorFlow's threads for operations side by side; 0: it decides (default)",
    )
    t.add_argument(
        "--intra-threads", type=count(0), default=0, metavar="N", help="its threads within an operation"
    )
    t.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="TensorFlow's deterministic operations; they cost nothing measurable here (default on)",
    )

    r = p.add_argument_group("run")
    r.add_argument("--run-dir", type=Path, metavar="DIR", help="default runs/MODEL-DATE-TIME")
    r.add_argument(
        "--checkpoint-steps",
        type=count(0),
        default=1000,
        metavar="N",
        help="0: only at the end (default 1000)",
    )
    r.add_argument(
        "--keep-checkpoints",
        type=count(1),
        default=3,
        metavar="N",
        help="older ones are removed (default 3)",
    )
    r.add_argument(
        "--checkpoint-rows",
        choices=CHECKPOINT_ROWS,
        default="auto",
        help="what a checkpoint does with the rows: a mark in the servers' storage, which stops nothing "
        "(pool: pmem_libpmem or dram_pmem with --storage-recover), or copies in the run directory (files); "
        "auto (default): pool where all servers can. The last one of a finished run has files",
    )
    r.add_argument(
        "--export-checkpoints",
        type=count(0),
        default=0,
        metavar="N",
        help="with rows in pools: every Nth checkpoint has them in files all the same, which outlive the "
        "servers' storage; 0 (default): none but the last",
    )
    r.add_argument(
        "--checkpoint-increments",
        type=count(0),
        default=0,
        metavar="N",
        help="with rows in files: after a checkpoint with all rows, N with only those that changed since the "
        "one before; what they build on is kept; 0 (default): all have all rows",
    )
    r.add_argument("--resume", action="store_true", help="go on from the latest checkpoint of --run-dir")
    r.add_argument(
        "--export", type=Path, metavar="DIR", help="write a SavedModel for plain TensorFlow to DIR at the end"
    )
    r.add_argument(
        "--log-every",
        type=count(1),
        default=20,
        metavar="N",
        help="steps between progress lines (default 20)",
    )
    r.add_argument(
        "--stats-seconds",
        type=number,
        default=5.0,
        metavar="S",
        help="at most so often the servers' figures are written down, with a progress line (default 5)",
    )
    r.add_argument(
        "--timeline",
        type=count(0),
        default=0,
        metavar="N",
        help="every N steps, one is traced by TensorFlow's profiler, into RUN_DIR/tensorboard; 0: none",
    )
    r.add_argument("--exit-with-parent", action="store_true", help="stop as on SIGTERM when stdin closes")
    return p


def parse(argv: Sequence[str] | None = None) -> Options:
    """The checked options; a mistake ends the process with a message and status 2, as argparse does."""
    p = parser()
    a = p.parse_args(argv)
    if a.resume and a.run_dir is None:
        p.error("--resume needs --run-dir, the directory of the run to go on with")
    if not a.in_process and (a.storage or a.storage_path or a.storage_size or a.storage_cache):
        p.error("--storage and --storage-* go with --in-process; servers have their own")
    if a.storage in ("pmem_libpmem", "dram_pmem") and not a.storage_path:
        p.error(f"--storage {a.storage} needs --storage-path, a directory (an fsdax mount)")
    if a.storage_path and a.storage in (None, "dram"):
        p.error("--storage-path goes with --storage pmem_libpmem, dram_pmem or pmem_memkind")
    if bool(a.storage_cache) != (a.storage == "dram_pmem"):
        p.error("--storage dram_pmem and --storage-cache go together")
    servers = worker_options.endpoints(p, "--servers", a.servers) if a.servers is not None else ()
    place = worker_options.settle(p, a)
    if a.token_file is not None and not servers:
        p.error("--token-file goes with --servers")
    if a.checkpoint_transfer != "shared" and not servers:
        p.error("--checkpoint-transfer goes with --servers")
    if a.job and not servers:
        p.error("--job goes with --servers")
    if a.checkpoint_rows == "pool" and not servers:
        p.error("--checkpoint-rows pool goes with --servers")
    if a.admission is not None and a.index != "hash":
        p.error("--admission goes with --index hash: an array has a place for each id anyway")
    if a.stock and a.micro_batch > 1:
        p.error("--micro-batch: plain Keras, --stock, has none")
    if a.stock and (a.index == "hash" or a.eviction):
        p.error("--stock: plain Keras has neither --index hash nor --admission nor --eviction")
    if a.stock and a.row_precision != "float32":
        p.error("--stock: --row-precision is of tables; plain Keras would round the optimizer's state too")
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    values = vars(a) | {
        "servers": servers,
        **place._asdict(),
        "storage": a.storage or "dram",
        "storage_path": a.storage_path or "",
        "storage_size": a.storage_size or 0,
        "storage_cache": a.storage_cache or 0,
        "epochs": a.epochs if a.epochs or a.steps else 1,
        "learning_rate": LEARNING_RATES[a.optimizer] if a.learning_rate is None else a.learning_rate,
        "run_dir": a.run_dir or Path("runs") / f"{a.model}-{stamp}",
    }
    return Options(**values)
