"""dynamicemb's storage on servers and in the process, beside a dictionary that follows its published example.

`DictStorage` does what NVIDIA's example storage does (recsys-examples, revision 43465aeabf61, the storage of
the tests of corelib/dynamicemb), and what that leaves out of scores: LFU's sums, and `preserve_existing`.
"""

from __future__ import annotations

import copy
import enum
import json
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import DEVICE, FakeCuda
from server_processes import Servers

from oe_runtime import Client, SpecError, StorageSpec
from oe_runtime.torch.storage import ServerStorage


class CopyMode(enum.Enum):
    EMBEDDING = "embedding"
    VALUE = "value"


@dataclass
class Options:
    """The fields of dynamicemb's table options that a storage reads."""

    dim: int = 8
    embedding_dtype: torch.dtype = torch.float32
    evict_strategy: str = "EvictStrategy.KLfu"
    dist_type: str = "roundrobin"
    external_storage: Any = None


class Optimizer:
    """What a storage asks of dynamicemb's optimizers."""

    def __init__(self, kind: str = "adam", initial: float = 0.0) -> None:
        self.args: dict[str, Any] = {"opt_type": kind, "lr": 0.1, "eps": 1e-8, "iters": 3}
        self.args |= {"beta1": 0.9, "beta2": 0.999, "initial_accumulator_value": initial}

    def get_opt_args(self) -> dict[str, Any]:
        return self.args

    def set_opt_args(self, args: dict[str, Any]) -> None:
        self.args = args

    def get_state_dim(self, dim: int) -> int:
        return {"sgd": 0, "adam": 2 * dim, "exact_adagrad": dim}.get(self.args["opt_type"], 4)

    def get_ckpt_state_dim(self, dim: int) -> int:
        return 1 if self.args["opt_type"] == "exact_row_wise_adagrad" else self.get_state_dim(dim)

    def get_initial_optim_states(self) -> float:
        return float(self.args["initial_accumulator_value"])


class DictStorage:
    """Rows of dynamicemb in a dictionary, key by key."""

    def __init__(self, options: list[Options], optimizer: Optimizer) -> None:
        self.dims = [option.dim for option in options]
        self.states = [optimizer.get_state_dim(dim) for dim in self.dims]
        self.stored = [optimizer.get_ckpt_state_dim(dim) for dim in self.dims]
        self.max_dim = max(self.dims)
        self.width = max(dim + state for dim, state in zip(self.dims, self.states, strict=True))
        self.initial = optimizer.get_initial_optim_states()
        self.rows: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self.scores: dict[tuple[int, int], int] = {}

    def find(self, keys, table_ids, mode, frequencies=None):
        pairs = list(zip(table_ids.tolist(), keys.tolist(), strict=True))
        values = np.zeros((len(pairs), self.width), np.float32)
        values[:, self.max_dim :] = self.initial
        scores = [0] * len(pairs)
        for i, pair in enumerate(pairs):
            if pair not in self.rows:
                continue
            row, state = self.rows[pair]
            values[i, : len(row)] = row
            values[i, self.max_dim : self.max_dim + len(state)] = state
            if frequencies is not None:
                self.scores[pair] = self.scores.get(pair, 0) + int(frequencies[i])
            scores[i] = self.scores.get(pair, 0)
        founds = torch.tensor([pair in self.rows for pair in pairs], dtype=torch.bool)
        missing = torch.nonzero(~founds)[:, 0]
        values = values if mode == CopyMode.VALUE else values[:, : self.max_dim]
        return (
            len(missing),
            keys[missing],
            missing,
            table_ids[missing],
            None if frequencies is None else frequencies[missing],
            founds,
            torch.tensor(scores, dtype=torch.int64),
            torch.from_numpy(np.ascontiguousarray(values)),
        )

    def insert(self, keys, table_ids, values, scores=None, preserve_existing=False):
        for i, pair in enumerate(zip(table_ids.tolist(), keys.tolist(), strict=True)):
            dim, stored = self.dims[pair[0]], self.stored[pair[0]]
            state = values[i, self.max_dim : self.max_dim + stored]
            self.rows[pair] = (values[i, :dim].numpy().copy(), state.numpy().copy())
            if scores is not None and not (preserve_existing and pair in self.scores):
                self.scores[pair] = int(scores[i])


def make(client: Client, options: list[Options], optimizer: Optimizer, **fields: Any) -> ServerStorage:
    kind = type("Rows", (ServerStorage,), {"connect": lambda self: client, **fields})
    return kind(options, optimizer)


@pytest.fixture(params=["in process", "2 in process", "served", "2 served", "sent", "dram_ssd"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    where = request.param
    if "process" in where:
        with Client.in_process(servers=2 if "2" in where else 1) as local:
            yield local
        return
    storage = where if where == "dram_ssd" else "dram"
    servers = Servers(tmp_path / "servers", 2 if "2" in where else 1, storage=storage)
    with Client(servers.endpoints, share_memory=where != "sent") as remote:
        yield remote
    servers.end()


def some_keys(random: np.random.Generator, n: int, tables: int, ordered: bool) -> tuple[Any, Any]:
    tids = random.integers(0, tables, n)
    pairs = np.unique(np.stack([tids, random.integers(-(10**6), 10**6, n) * 10**12 % 977], 1), axis=0)
    pairs = pairs if ordered else random.permutation(pairs)
    return torch.from_numpy(pairs[:, 1].copy()), torch.from_numpy(pairs[:, 0].copy())


def assert_same(got: Any, wanted: Any) -> None:
    assert got[0] == wanted[0]
    for mine, his in zip(got[1:], wanted[1:], strict=True):
        if his is None:
            assert mine is None
        else:
            assert mine.dtype == his.dtype
            torch.testing.assert_close(mine, his, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["adam", "exact_adagrad", "exact_row_wise_adagrad", "sgd"])
def test_it_does_what_a_dictionary_does(client: Client, kind: str) -> None:
    optimizer = Optimizer(kind, 0.0 if kind in ("adam", "sgd") else 0.25)
    options = [Options(8), Options(4), Options(8)]
    mine, his = make(client, options, optimizer), DictStorage(options, optimizer)
    random = np.random.default_rng(3)
    for step in range(12):
        keys, tables = some_keys(random, 0 if step == 5 else 400, 3, ordered=step % 2 == 0)
        mode = CopyMode.EMBEDDING if step % 3 == 2 else CopyMode.VALUE
        frequencies = torch.from_numpy(random.integers(1, 9, len(keys))) if step % 4 else None
        found = mine.find(keys, tables, mode, frequencies)
        assert_same(found, his.find(keys, tables, mode, frequencies))
        values = torch.from_numpy(random.normal(size=(len(keys), his.width)).astype(np.float32))
        scores = torch.from_numpy(random.integers(1, 2**62, len(keys))) if step % 3 else None
        for storage in (mine, his):
            storage.insert(keys, tables, values, scores, preserve_existing=step % 2 == 1)
    for table in range(3):
        exported = {}
        for keys, rows, states, scores in mine.export_keys_values(torch.device("cpu"), 50, table):
            assert len(keys) <= 50
            for i, key in enumerate(keys.tolist()):
                state = np.zeros(0, np.float32) if states is None else states[i].numpy()
                assert (states is None) == (his.states[table] == 0)
                exported[key] = (rows[i].numpy(), state, int(scores[i]))
        assert set(exported) == {key for tid, key in his.rows if tid == table}
        for key, (row, state, score) in exported.items():
            assert (row == his.rows[table, key][0]).all()
            assert (state[: his.stored[table]] == his.rows[table, key][1]).all()
            assert score == his.scores.get((table, key), 0)


def test_a_million_keys_in_one_call() -> None:
    with Client.in_process() as client:
        storage = make(client, [Options(4)], Optimizer("sgd"))
        keys = torch.arange(1_000_000) * 7919
        tables = torch.zeros_like(keys)
        values = torch.rand(len(keys), 4)
        storage.insert(keys, tables, values, keys)
        found = storage.find(keys.flip(0), tables, CopyMode.VALUE)
        assert found[0] == 0
        assert torch.equal(found[6], keys.flip(0))
        assert torch.equal(found[7], values.flip(0))


def files(directory: Path, rank: int = 0) -> list[str]:
    return [str(directory / f"{what}.{rank}") for what in ("meta", "keys", "values", "scores", "states")]


@pytest.mark.parametrize("evict", ["EvictStrategy.KLfu", "EvictStrategy.KLru"])
def test_dumped_files_are_dynamicembs(tmp_path: Path, evict: str) -> None:
    options, optimizer = [Options(4, evict_strategy=evict)], Optimizer("exact_row_wise_adagrad", 0.5)
    keys = torch.arange(-50, 50) * 31
    values = torch.rand(100, 8)
    with Client.in_process() as client, Client.in_process() as other:
        storage = make(client, options, optimizer)
        storage.insert(keys, torch.zeros_like(keys), values, keys + 5000)
        storage.dump(0, *files(tmp_path), timestamp=10_000, current_score=7)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            Path(p).name for p in files(tmp_path)
        )
        meta, *paths = files(tmp_path)
        expected = optimizer.args | {"evict_strategy": evict, "dist_type": "roundrobin", "step_score": 7}
        assert json.loads(Path(meta).read_text()) == expected
        in_file = np.fromfile(paths[0], np.int64)
        assert sorted(in_file) == keys.tolist()
        order = (in_file // 31 + 50).tolist()
        assert (np.fromfile(paths[1], np.float32).reshape(100, 4) == values[order, :4].numpy()).all()
        scores = in_file + 5000 if "Lfu" in evict else 10_000 - (in_file + 5000)
        assert (np.fromfile(paths[2], np.int64) == scores).all()
        assert (np.fromfile(paths[3], np.float32) == values[order, 4].numpy()).all()
        copied = make(other, options, Optimizer("exact_row_wise_adagrad", 0.5))
        assert copied.load(0, *files(tmp_path), timestamp=10_000) == 7
        found = copied.find(keys, torch.zeros_like(keys), CopyMode.VALUE)
        assert found[0] == 0
        assert torch.equal(found[6], keys + 5000)
        assert torch.equal(found[7][:, :5], values[:, :5])
        assert (found[7][:, 5:] == 0.5).all()


def test_files_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    with Client.in_process() as client:
        storage = make(client, [Options(4)], Optimizer())
        keys = torch.arange(10)
        storage.insert(keys, torch.zeros_like(keys), torch.rand(10, 12))
        storage.dump(0, *files(tmp_path))
        meta, keys_path, values_path, _, states_path = files(tmp_path)
        with Client.in_process() as other:
            empty = make(other, [Options(4)], Optimizer())
            for path in (keys_path, values_path, states_path):
                whole = Path(path).read_bytes()
                Path(path).write_bytes(whole[:-4])
                with pytest.raises(SpecError, match=f"{path}: .* bytes; expected"):
                    empty.load(0, *files(tmp_path))
                Path(path).write_bytes(whole)
            found = json.loads(Path(meta).read_text())
            for field, value in (("dist_type", "continuous"), ("evict_strategy", "EvictStrategy.KLru")):
                Path(meta).write_text(json.dumps(found | {field: value}))
                with pytest.raises(SpecError, match=f"{field} is {value}"):
                    empty.load(0, *files(tmp_path))
            assert len(other.keys("dynamicemb.0")) == 0
            # Of another optimizer: the rows, with the first state.
            Path(meta).write_text(json.dumps(found | {"opt_type": "sgd"}))
            with pytest.warns(UserWarning, match="states are of sgd, not of adam"):
                empty.load(0, *files(tmp_path))
            assert (empty.find(keys, torch.zeros_like(keys), CopyMode.VALUE)[7][:, 4:] == 0).all()
            assert empty.find(keys, torch.zeros_like(keys), CopyMode.VALUE)[0] == 0


@pytest.mark.parametrize("tier", ["dram_pmem", "pmem_libpmem", "dram_ssd"])
def test_rows_are_in_checkpoints_of_the_servers(tmp_path: Path, tier: str) -> None:
    cache = {} if tier == "pmem_libpmem" else {"cache_bytes": 1 << 22}
    spec = StorageSpec(tier, path=str(tmp_path / "rows"), fresh=True, **cache)
    keys, values = torch.arange(5000), torch.rand(5000, 24)
    tables = torch.zeros_like(keys)
    with Client.in_process(spec) as client:
        storage = make(client, [Options()], Optimizer())
        storage.insert(keys, tables, values, keys)
        client.checkpoint(1, wait=True)
        storage.insert(keys[:100], tables[:100], values[:100] + 1, keys[:100] + 1)
        client.recover(1)
        assert torch.equal(storage.find(keys, tables, CopyMode.VALUE)[7], values)
        storage.insert(keys[:100], tables[:100], values[:100] + 1)  # lost: no checkpoint has it
    again = StorageSpec(tier, path=str(tmp_path / "rows"), recover=True, **cache)
    with Client.in_process(again) as client:
        found = make(client, [Options()], Optimizer()).find(keys, tables, CopyMode.VALUE)
        assert found[0] == 0
        assert torch.equal(found[6], keys)
        assert torch.equal(found[7], values)


def test_values_of_half_precision() -> None:
    with Client.in_process() as client:
        storage = make(client, [Options(embedding_dtype=torch.bfloat16)], Optimizer())
        keys, values = torch.arange(9), torch.rand(9, 24).bfloat16()
        storage.insert(keys, torch.zeros_like(keys), values)
        found = storage.find(keys, torch.zeros_like(keys), CopyMode.VALUE)[7]
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, values)
        assert storage.embedding_dtype() == torch.bfloat16


def test_the_layout_is_that_of_the_widest_table() -> None:
    with Client.in_process() as client:
        storage = make(client, [Options(8), Options(6)], Optimizer())
        assert [storage.embedding_dim(table) for table in range(2)] == [8, 6]
        assert [storage.value_dim(table) for table in range(2)] == [24, 18]
        assert (storage.max_embedding_dim(), storage.max_value_dim(), storage.num_tables) == (8, 24, 2)
        assert storage.embedding_dims().tolist() == [8, 6]
        assert not storage.all_dims_vec4()
        assert storage.init_optimizer_state() == 0
        assert client.spec(0).optimizer["name"] == "adam"


def test_wrong_values_change_nothing() -> None:
    with Client.in_process() as client:
        storage = make(client, [Options()], Optimizer())
        keys, tables, values = torch.arange(3), torch.zeros(3, dtype=torch.int64), torch.rand(3, 24)
        nan = values.clone()
        nan[1, 20] = torch.nan
        for wrong, message in (
            ((torch.tensor([1, 2, 1]), tables, values), "key 1 is there twice"),
            ((keys, tables, values[:, :23]), r"shape \(3, 23\); expected \(3, 24\)"),
            ((keys, tables, nan), "optimizer's state of key 1 is not finite"),
            ((keys.float(), tables, values), "the keys are torch.float32"),
            ((keys, tables[:2], values), r"table_ids are torch.int64 of shape \(2,\)"),
            ((keys, tables + 1, values), "table_id is 1; expected one of 0 to 0"),
            ((keys, tables, values, keys.float()), "scores: torch.float32"),
        ):
            with pytest.raises(SpecError, match=message):
                storage.insert(*wrong)
        with pytest.raises(SpecError, match="copy_mode is rows"):
            storage.find(keys, tables, "rows")
        assert storage.find(keys, tables, CopyMode.VALUE)[0] == 3


def test_options_that_cannot_be_stored_are_refused_by_name() -> None:
    with Client.in_process() as client:
        for options, optimizer, message in (
            ([], Optimizer(), "no table options"),
            ([Options(), Options(embedding_dtype=torch.float16)], Optimizer(), "differ in embedding_dtype"),
            ([Options(evict_strategy="EvictStrategy.KLruLfu")], Optimizer(), "two scores per key"),
            ([Options()], Optimizer("lamb"), "optimizer 'lamb' cannot be stored"),
        ):
            with pytest.raises(SpecError, match=message):
                make(client, options, optimizer)
        first = make(client, [Options()], Optimizer(), name="first")
        with pytest.raises(SpecError, match=r"another storage of this process has table 'first.0'"):
            make(client, [Options()], Optimizer(), name="first")
        del first
        make(client, [Options()], Optimizer(), name="first")
        with pytest.raises(NotImplementedError, match="has no 'connect'"):
            ServerStorage([Options()], Optimizer())


def test_scores_may_be_left_out() -> None:
    with Client.in_process() as client:
        storage = make(client, [Options()], Optimizer(), keep_scores=False)
        keys, tables = torch.arange(3), torch.zeros(3, dtype=torch.int64)
        storage.insert(keys, tables, torch.rand(3, 24), keys + 1)
        assert storage.find(keys, tables, CopyMode.VALUE)[6].tolist() == [0, 0, 0]
        assert list(client.stats()["servers"][0]["tables"]) == ["dynamicemb.0"]


class Rows(ServerStorage):
    """As a user writes one."""

    local: Client

    def connect(self) -> Client:
        return self.local


def test_options_with_it_are_copied_and_sent_to_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = types.ModuleType("dynamicemb.types")
    interface.Storage = type("Storage", (__import__("abc").ABC,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dynamicemb.types", interface)
    options = pickle.loads(pickle.dumps(copy.deepcopy(Options(external_storage=Rows))))  # noqa: S301
    with Client.in_process() as Rows.local:
        storage = options.external_storage([options], Optimizer())
        assert isinstance(storage, interface.Storage)
        assert storage.client is Rows.local


def test_ranks_export_and_dump_disjoint_shares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    keys, values = torch.arange(-100, 200), torch.rand(300, 24)
    with Client.in_process() as client:
        storage = make(client, [Options()], Optimizer())
        storage.insert(keys, torch.zeros_like(keys), values)
        shares = []
        for rank in range(3):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            storage.dump(0, *files(tmp_path, rank), include_meta=rank == 0)
            shares.append(np.fromfile(files(tmp_path, rank)[1], np.int64))
        assert (tmp_path / "meta.0").exists()
        assert not (tmp_path / "meta.1").exists()
        assert sorted(np.concatenate(shares)) == keys.tolist()
        with Client.in_process() as other:
            copied = make(other, [Options()], Optimizer())
            for rank in range(3):
                copied.load(0, str(tmp_path / "meta.0"), *files(tmp_path, rank)[1:])
            assert torch.equal(copied.find(keys, torch.zeros_like(keys), CopyMode.VALUE)[7], values)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function of a fake device and of an optimizer, which gives a storage with 100 rows in it."""

    def make_one(client: Client, cuda: FakeCuda, dtype: torch.dtype = torch.float32) -> ServerStorage:
        cuda.answer(monkeypatch)
        storage = make(client, [Options(4, dtype)], Optimizer("exact_adagrad", 0.5))
        keys = torch.arange(100)
        with cuda:
            values = cuda.put(keys[:, None] + torch.arange(8) / 16)
            storage.insert(cuda.put(keys), cuda.put(torch.zeros_like(keys)), values, cuda.put(keys))
        return storage

    return make_one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_on_a_gpu_are_those_that_were_asked_for(on_gpu: Any, dtype: torch.dtype) -> None:
    """A later request writes over the memory that an earlier one's rows are copied from."""
    cuda = FakeCuda()
    with Client.in_process() as client:
        storage = on_gpu(client, cuda, dtype)
        asked = [torch.tensor(keys) for keys in ([3, 200, 5], [7, 8, 9], list(range(50)), [1, 2, 3])]
        found = []
        with cuda:
            for keys in asked:
                tables = cuda.put(torch.zeros_like(keys))
                found.append(storage.find(cuda.put(keys), tables, CopyMode.VALUE))
            storage.insert(cuda.put(asked[0]), tables, cuda.put(torch.full((3, 8), -1.0)))
        for keys, got in zip(asked, found, strict=True):
            assert all(one.device == DEVICE for one in got[1:] if one is not None)
            values, there = got[7].numbers(), keys < 100
            assert values.dtype == dtype
            assert torch.equal(got[5].numbers(), there)
            assert torch.equal(values[there], (keys[there, None] + torch.arange(8) / 16).to(dtype))
        assert cuda.waits >= len(asked)
        again = storage.find(torch.tensor([200, 3]), torch.zeros(2, dtype=torch.int64), CopyMode.EMBEDDING)
        assert (again[7].float() == -1).all()


def test_memory_is_pinned_once_and_until_the_last_copy(on_gpu: Any) -> None:
    cuda = FakeCuda()
    with Client.in_process() as client:
        storage = on_gpu(client, cuda)
        (first,) = cuda.registered.items()
        keys = torch.arange(10)
        with cuda:
            storage.find(cuda.put(keys), cuda.put(torch.zeros_like(keys)), CopyMode.VALUE)
        assert list(cuda.registered.items()) == [first]  # there was enough
        keys = torch.arange(1000)
        with cuda:
            found = storage.find(cuda.put(keys), cuda.put(torch.zeros_like(keys)), CopyMode.VALUE)
        ((at, size),) = cuda.registered.items()
        assert size >= 1000 * 8 * 4 > first[1]
        del storage
        assert not cuda.registered, at
        assert torch.equal(found[7].numbers()[:100, 0], torch.arange(100.0))


def test_memory_that_cuda_does_not_pin_is_named(on_gpu: Any) -> None:
    cuda = FakeCuda(registers=False)
    with Client.in_process() as client:
        with pytest.warns(UserWarning, match="CUDA does not pin 4000 bytes of memory"):
            storage = on_gpu(client, cuda)
        keys = torch.tensor([4, 5])
        with cuda:
            found = storage.find(cuda.put(keys), cuda.put(torch.zeros_like(keys)), CopyMode.EMBEDDING)
        assert torch.equal(found[7].numbers()[:, 0], torch.tensor([4.0, 5.0]))


# What dynamicemb's example does with its table options, without a GPU.
OWN_EXAMPLE = """\
import argparse, sys
from test_torch_storage import CopyMode, Optimizer, Options, torch

def DynamicEmbTableOptions(caching, external_storage=None):
    return Options(4, external_storage=external_storage)

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--caching", action="store_true")
    asked = parser.parse_args()
    options = DynamicEmbTableOptions(caching=asked.caching)
    storage = options.external_storage([options], Optimizer("sgd"))
    keys, tables = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    before = storage.find(keys, tables, CopyMode.VALUE)[0]
    storage.insert(keys, tables, torch.ones(5, 4))
    print(before, storage.find(keys, tables, CopyMode.VALUE)[0], asked.train)
"""


def test_the_script_of_dynamicemb_s_own_example(tmp_path: Path) -> None:
    """Its rows are on the servers: those of one run are there for the next."""
    (tmp_path / "example.py").write_text(OWN_EXAMPLE)
    servers = Servers(tmp_path / "servers", 1)
    script = Path(__file__).parents[3] / "examples" / "dynamicemb_example.py"

    def said(*words: str) -> str:
        command = [sys.executable, str(script), "--servers", servers.endpoints[0], *words]
        path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path])
        ended = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        return (ended.stdout + ended.stderr).strip().splitlines()[-1]

    example = str(tmp_path / "example.py")
    assert said(example, "--train", "--caching") == "5 0 True"
    assert said(example, "--caching") == "0 0 False"
    assert said(example, "--train").startswith("error: only the misses of a cache are on servers: add --cach")
    assert said(str(tmp_path / "none.py")).endswith("clone https://github.com/NVIDIA/recsys-examples")
    servers.end()
