"""Processes that hold a table each and are measured in turn, on the same ids and cores."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from json import dumps
from pathlib import Path
from types import TracebackType

import numpy as np
import peers
from processes import Missing

HERE = Path(__file__).parent
FEATURES = 26
BATCH = 4096 * FEATURES
WARM, COUNTED = 1, 3  # batches a round


@dataclass(frozen=True)
class Setup:
    """The table that all contenders of a comparison hold."""

    dim: int
    rows: int
    optimizer: str

    @property
    def row_bytes(self) -> int:
        """Of weights and the optimizer's state."""
        return self.dim * 4 * (3 if self.optimizer == "adam" else 2)


def write_ids(file: Path, rows: int, skewed: bool, seed: int) -> None:
    """Batches of a round: 0.05 % of the rows take 85.7 % of the ids and 1 % take 95.7 %, or all alike."""
    rng = np.random.default_rng(seed)
    count = BATCH * (WARM + COUNTED)
    kind = rng.random(count)
    reach = np.full(count, rows)
    if skewed:
        reach = np.where(kind < 0.857, rows // 2000, np.where(kind < 0.957, rows // 100, rows))
    rank = (rng.random(count) * reach).astype(np.int64)
    # A permutation (7919 is a prime that divides no number of rows here): rows in use do not lie together.
    ((rank * 7919) % rows).tofile(file)


@dataclass
class Contender:
    """One process (and its server, its child) that answers with the times of its batches.

    A peer that fails is left out (`Missing`); where it is ours, the benchmark ends.
    """

    name: str
    command: tuple[str, ...]
    peer: bool = True
    times: dict[tuple[bool, int], list[tuple[float, float]]] = field(default_factory=dict)

    def start(self) -> None:
        """Start it and wait until its table is full. Raises ``Missing`` with what it said."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed on exit)
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        if self._read().strip() != "ready":
            raise self._failure("ended while it made the table")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _failure(self, what: str) -> Missing | SystemExit:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines() or ["no word why"]
        if self.peer:
            return Missing(f"it {what}: {lines[-1][:150]}")
        return SystemExit("\n".join([*lines, f"error: {self.name} {what}"]))

    def pin(self, cores: int) -> None:
        """Let all its threads, and its server's, run on so many processors."""
        chosen = sorted(os.sched_getaffinity(0))[:cores]
        for process in _family(self._process.pid):
            for thread in Path(f"/proc/{process}/task").iterdir():
                os.sched_setaffinity(int(thread.name), chosen)

    def measure(self, file: Path) -> list[tuple[float, float]]:
        """Seconds of (pull, push) of each counted batch of the file. Raises ``Missing``."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{file} {BATCH}\n")
        self._process.stdin.flush()
        numbers = [float(word) for word in self._read().split()]
        if len(numbers) != 2 * (WARM + COUNTED):
            raise self._failure("ended in the middle of a measurement")
        return list(zip(numbers[::2], numbers[1::2], strict=True))[WARM:]

    def __enter__(self) -> Contender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = getattr(self, "_process", None)
        if process is None:
            return
        self._log.close()
        try:
            process.stdin.close()
            process.wait(10)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            process.kill()
            process.wait()


def _family(pid: int) -> list[int]:
    family = [pid]
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            family += _family(int(child))
    return family


def ours(
    setup: Setup,
    where: str,
    index: str = "hash",
    tls: str = "off",
    share: bool = True,
    pools: Path | None = None,
) -> Contender:
    """This engine; ``share``: with memory that client and server share; with ``pools``, its rows in a
    directory and a cache of 2 % of their bytes in DRAM."""
    cache = setup.row_bytes * setup.rows // 50
    storage = ["--storage", "dram_pmem", "--storage-path", str(pools), "--storage-cache", str(cache)]
    asked = {"where": where, "tls": tls, "share": share, "index": index, **vars(setup)}
    asked["storage"] = storage if pools else []
    name = "ours" + (", array" if index == "array" else "") + (", TLS" if tls == "on" else "")
    name += ("" if share else ", TCP") + (", dram_pmem" if pools else "")
    return Contender(name, (sys.executable, str(HERE / "ours.py"), dumps(asked)), peer=False)


def openembedding(setup: Setup) -> Contender:
    """OpenEmbedding's core; -1 shards is its own default."""
    arguments = (str(setup.dim), str(setup.rows), setup.optimizer, "-1")
    return Contender("OpenEmbedding", (*peers.openembedding(), *arguments))


def fbgemm(setup: Setup, rowwise: bool = False) -> Contender:
    """FBGEMM; with ``rowwise``, its Adagrad that keeps one sum a row instead of one an element.

    Its dims are multiples of 4, so its users round up.
    """
    dim = (setup.dim + 3) // 4 * 4
    asked = {**vars(setup), "dim": dim, **({"optimizer": "rowwise"} if rowwise else {})}
    name = "FBGEMM" + (", rowwise" if rowwise else "") + (f", dim {dim}" if dim != setup.dim else "")
    return Contender(name, (*peers.fbgemm(), dumps(asked)))


def tfra(setup: Setup) -> Contender:
    """TensorFlow Recommenders Addons."""
    return Contender("TFRA", (*peers.tfra(), dumps(vars(setup))))


def sockets(setup: Setup) -> Contender:
    """No engine, but what its messages cost on the loopback device."""
    return Contender("socket", (sys.executable, str(HERE / "sockets.py"), str(setup.dim)), peer=False)
