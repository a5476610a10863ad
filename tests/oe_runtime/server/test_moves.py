"""Tables that move: saved in parts, restored on other numbers of servers and other tiers, trained on."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from oe_runtime import Client, StorageSpec, TableSpec
from oe_runtime.spec import CACHED, DTYPES, OPTIMIZERS

pytestmark = pytest.mark.filterwarnings("ignore:.*(not persistent|is not persistent memory)")

# Where the rows are, one after the other, and on how many servers.
PLACES = [
    ("dram", 2),
    ("pmem_libpmem", 3),
    ("dram_pmem", 1),
    ("dram_ssd", 2),
    ("pmem_memkind", 4),
    ("dram", 1),
]
RULES = [
    *({"name": name} for name in OPTIMIZERS),
    {"name": "sgd", "momentum": 0.9, "nesterov": True},
    {"name": "adam", "amsgrad": True, "weight_decay": 0.01},
    {"name": "rmsprop", "centered": True, "momentum": 0.5},
    {"name": "sgd", "torch": True, "momentum": 0.9, "dampening": 0.5, "coupled_weight_decay": 0.1},
    {"name": "nadam", "torch": True, "momentum_decay": 0.004, "maximize": True, "learning_rate_decay": 0.1},
]


def opened(directory: Path, hop: int, specs: list[TableSpec]) -> Client:
    kind, servers = PLACES[hop]
    storage = StorageSpec(
        kind,
        "" if kind == "dram" else directory / f"rows-{hop}",
        cache_bytes=1 << 20 if kind in CACHED else 0,
    )
    client = Client.in_process(storage, servers)
    for spec in specs:
        client.create_table(spec)
    return client


def saved(client: Client, directory: Path, before: list[Path]) -> list[dict[str, object]]:
    """One more save in `before`: the first has all rows, the others what changed."""
    path = directory / f"saved-{len(list(directory.glob('saved-*')))}"
    path.mkdir()
    entries = client.save(path, since=before[-1] if before else None)
    assert all(("base" in entry) == bool(before) for entry in entries)
    before.append(path)
    return entries


def test_every_optimizer_goes_on_with_the_same_bits(tmp_path):
    specs = [
        TableSpec(f"{i}", dim, "array" if i % 3 == 0 else "hash", 50 * (i % 3 == 0), DTYPES[i % 4], rule)
        for i, (rule, dim) in enumerate(zip(RULES, itertools.cycle((1, 8, 9, 16, 64, 65, 128)), strict=False))
    ]

    def train(client: Client, step: int) -> None:
        rng = np.random.default_rng(step)
        ids = [rng.integers(0, 50, 20), np.append(rng.integers(-(2**63), 2**63 - 1, 10), [0, -1, 7, -8])]
        pulled = client.pull(ids, [(i, int(spec.index == "hash")) for i, spec in enumerate(specs)])
        gradients = [rng.normal(size=(len(g.inverse), g.dim)).astype(g.rows.dtype) for g in pulled.groups]
        client.push(pulled, gradients, 0.01 * (1 + step % 3))

    def rows(client: Client) -> list[dict[int, bytes]]:
        tables = [client.export_rows(table) for table in range(len(specs))]
        return [{int(k): row.tobytes() for k, row in zip(*table, strict=True)} for table in tables]

    stays = opened(tmp_path, 0, specs)
    chain: list[Path] = []
    for hop in range(len(PLACES)):
        with opened(tmp_path, hop, specs) as client:
            if chain:
                client.restore(*chain)
            chain = []
            for step in range(2 * hop, 2 * hop + 2):
                train(client, step)
                train(stays, step)
                if step % 2 or hop == 1:
                    saved(client, tmp_path, chain)
            assert rows(client) == rows(stays), PLACES[hop]


class Oracle:
    """Which keys have a row, and its weights: 1 and what was pushed since it has it."""

    def __init__(self, counter: bool) -> None:
        self.rows: dict[int, float] = {}
        self._counts: Counter[int] = Counter()
        self._pushed: dict[int, int] = {}
        self._version = 0
        self._counter = counter
        self._period: int | None = 0  # when that of the counts began; None: with the next sweep
        self._lately: set[int] = set()  # counted since the last sweep that ended one

    def push(self, keys: np.ndarray) -> None:
        self._version += 1
        for key, times in Counter(keys.tolist()).items():
            if key not in self.rows:
                self._counts[key] += times
                self._lately.add(key)
                if self._counts[key] < 3:
                    continue
                if self._counter:
                    del self._counts[key]
                self.rows[key] = 1.0
            self.rows[key] += times
            self._pushed[key] = self._version

    def evict(self) -> int:
        old = [k for k, row in self.rows.items() if self._version - self._pushed[k] > 6 or row < 3.5]
        for key in old:
            del self.rows[key]
        self._sweep_counts()
        return len(old)

    def restored(self) -> None:
        self._period, self._lately = None, set(self._counts)

    def _sweep_counts(self) -> None:
        if self._period is None:
            self._period = self._version
        elif self._counter and self._version - self._period > 6:
            self._counts = Counter({key: n for key, n in self._counts.items() if key in self._lately})
            self._period, self._lately = self._version, set()


@pytest.mark.parametrize("name", ["counter", "cbf"])
def test_policies_together_do_what_they_say(tmp_path, name):
    bloom = {"max_element_size": 3000, "false_positive_probability": 1e-9} if name == "cbf" else {}
    spec = TableSpec(
        "t",
        2,
        optimizer={"name": "sgd"},
        initializer={"name": "constant", "value": 1.0},
        admission={"name": name, "filter_freq": 3, "default_value": 0.5, **bloom},
        eviction=[
            {"name": "global_step", "steps_to_live": 6},
            {"name": "l2_weight", "threshold": 3.4**2},
            {"name": "ttl", "seconds": 10**6},
            {"name": "cap", "max_rows": 10**5, "policy": "lfu"},
        ],
    )
    rng = np.random.default_rng(3)
    oracle = Oracle(name == "counter")
    chain: list[Path] = []
    tombstones = 0
    for hop in range(len(PLACES)):
        with opened(tmp_path, hop, [spec]) as client:
            if chain:
                client.restore(*chain)
                oracle.restored()
            chain = []
            evicted = 0
            for _ in range(4):
                for _ in range(5):
                    keys = rng.zipf(1.3, 200) % 300
                    keys[keys == 299] = -1
                    oracle.push(keys)
                    pulled = client.pull([keys], [(0, 0)])
                    client.push(pulled, [np.full((len(keys), 2), -1, np.float32)], 1.0)
                evicted += oracle.evict()
                entries = saved(client, tmp_path, chain)  # evicts
                tombstones += sum(int(entry.get("tombstones", 0)) for entry in entries)
                found, weights = client.export_rows(0)
                assert dict(zip(found.tolist(), weights[:, 0].tolist(), strict=True)) == oracle.rows
                absent = np.array([key for key in range(299) if key not in oracle.rows])
                assert (client.pull_rows(0, absent) == 0.5).all()
            counted = [server["tables"]["t"]["eviction"] for server in client.stats()["servers"]]
            assert sum(of["evicted_rows"] for server in counted for of in server.values()) == evicted
    assert tombstones > 100
