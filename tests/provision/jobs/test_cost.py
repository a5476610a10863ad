"""Costs: the paper's case, sizes that are the runtime's own, and price tables that cannot be used."""

import json
from pathlib import Path

import numpy as np
import pytest

from oe_runtime import Client, StorageSpec, TableSpec
from oe_runtime.spec import OPTIMIZERS
from provision.cli import main as cli
from provision.jobs import cost
from provision.jobs.cost import Model

PAPER = Model(  # the paper's "500 GB"; what changes in its 20 minutes between checkpoints, it does not say
    rows=2_100_000_000, dim=64, optimizer="sgd", dtype="float32", changed=50_000_000, kept=1
)
TABLES = {  # the runtime's optimizers by the trainer's names
    **{name.replace("_", ""): {"name": name} for name in OPTIMIZERS},
    "amsgrad": {"name": "adam", "amsgrad": 1},
    "momentum": {"name": "sgd", "momentum": 0.9},
}


def test_costs_of_the_openembedding_paper_are_reproduced() -> None:
    """The prices are two of its three costs by their times; servers and the third follow."""
    found = {
        item.system: item
        for item in cost.choices(PAPER, cost.read(cost.DEFAULT_PRICES), 1)
        if item.servers < 3
    }
    assert PAPER.rows * cost.row_bytes(PAPER) / 2**30 == pytest.approx(500, rel=0.01)
    dram, pmem, plain = found["dram"], found["dram_pmem"], found["Ori-Cache"]
    assert (dram.servers, dram.server) == (2, "r6e.13xlarge")
    assert (pmem.servers, pmem.server) == (plain.servers, plain.server) == (1, "re6p.13xlarge")
    assert round(dram.cost, 1) == 34.9
    assert round(pmem.cost, 1) == 20.3
    assert round(plain.cost, 1) == 26.6
    assert 1 - pmem.cost / dram.cost == pytest.approx(0.42, abs=0.005)


def test_every_optimizer_of_the_trainer_is_known() -> None:
    assert sorted(TABLES) == sorted(cost.OPTIMIZERS)


@pytest.mark.parametrize(
    ("dtype", "state"),
    [
        ("float32", "float32"),
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
        ("float64", "float32"),
    ],
)
def test_rows_have_the_runtimes_size(dtype: cost.Dtype, state: cost.StateDtype, tmp_path: Path) -> None:
    """A table file has a head, a line of JSON, and then 8 bytes of key and the row for each."""
    keys = np.arange(5_000)
    of_state = state if state == "bfloat16" else None
    tables = dict(TABLES)
    if of_state:
        del tables["adagraddecay"]  # counts in its state
    for dim in (8, 9):
        saved = tmp_path / str(dim)
        saved.mkdir()
        with Client.in_process(threads=1) as client:
            for name, optimizer in tables.items():
                spec = TableSpec(name, dim, dtype=dtype, optimizer=optimizer, state_dtype=of_state)
                table = client.create_table(spec)
                pulled = client.pull([keys], [(table, 0)])
                client.push(pulled, [np.zeros_like(pulled.groups[0].rows)], learning_rate=0.1)
            client.save(str(saved))
        for name in tables:
            row = cost.row_bytes(Model(1, dim, name, dtype, state_dtype=state))
            (file,) = saved.glob(f"*.{name}.oet")
            assert row + 8 <= file.stat().st_size / len(keys) < row + 9, name


def test_rows_of_pools_lie_in_lines(tmp_path: Path) -> None:
    with Client.in_process(StorageSpec("pmem_libpmem", str(tmp_path / "rows")), threads=1) as client:
        for name in ("adagrad", "amsgrad"):
            table = client.create_table(TableSpec(name, 9, optimizer=TABLES[name]))
            for first in range(0, 200_000, 50_000):
                pulled = client.pull([np.arange(first, first + 50_000)], [(table, 0)])
                client.push(pulled, [np.zeros_like(pulled.groups[0].rows)], learning_rate=0.1)
        tables = client.stats()["servers"][0]["tables"]
    for name in ("adagrad", "amsgrad"):
        one = cost.pool_bytes(cost.row_bytes(Model(1, 9, name, "float32")))
        assert one * 0.9 <= tables[name]["bytes"] / 200_000 <= one * 1.6, name


@pytest.mark.parametrize(
    ("row", "size"),
    [(72, 256 / 3), (128, 128), (132, 132), (192, 192), (256, 256), (260, 260), (384, 384), (512, 512)],
)
def test_pool_bytes_per_row_follow_the_line_layout(row: int, size: float) -> None:
    assert cost.pool_bytes(row) == size + 16


DRIVES = """\
servers:
  - {name: nvme, dram: 256G, ssd: 3840G, ssd_writes: 3840G, price: 4, source: test, date: 2026-11-26}
systems:
  - {name: dram_ssd, storage: dram_ssd, time: 1.2, source: test, date: 2026-11-26}
"""


def test_rows_on_drives_are_packed_into_blocks() -> None:
    assert cost.log_bytes(512) == 512 + 20
    assert cost.log_bytes(72) == 4096 / 56 + 20
    assert cost.log_bytes(5000) == 8192 + 20


def test_drives_have_room_for_the_cleaner_and_a_wear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yml").write_text(DRIVES)
    words = ["cost", "--rows", "1e9", "--dim", "64", "--changed-rows", "0", "--kept", "1"]
    words += ["--prices", str(tmp_path / "mine.yml"), "--written-rows", "208000"]  # 50 batches of 4,160 rows
    assert cli.run([*words, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["choices"]
    assert found["row_bytes"] == 512
    # The index, a checksum per block, and five bits per place.
    assert found["dram"] == pytest.approx(10**9 * 12 + found["ssd"] / 4096 * 4 + found["ssd"] / 532 * 5 / 8)
    model = Model(10**9, 64, "adagrad", "float32", changed=0, kept=1)
    assert found["ssd"] == pytest.approx(cost.slots(model) * 532 * 1.45)
    assert found["servers"] == 1
    assert found["ssd_writes"] == pytest.approx(208_000 * 86_400 * 532 * 2)
    assert found["ssd_wear"] == pytest.approx(found["ssd_writes"] / (3840 << 30))
    assert cli.run(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "dram_ssd on nvme: its drives are written 17,808.2 GiB a day, 464% of what they are rated for: use"
        in said
    )
    (tmp_path / "mine.yml").write_text(DRIVES.replace("ssd_writes: 3840G, ", ""))
    assert cli.run(words) == 0
    assert "for their rating, set ssd_writes in the price table" in " ".join(capsys.readouterr().out.split())


def test_rows_changed_between_checkpoints_take_slots() -> None:
    """A pool of so many places trains: rows fit, and all of them that change are updated (a full one)."""
    million = Model(1_000_000, 16, "adagrad", "float32", changed=100_000, kept=2)
    assert cost.slots(million) == 1_000_000 + 3 * 100_000 + 3 * 15_625
    assert cost.changed(Model(1_600, 16, "adagrad", "float32")) == 100
    assert cost.changed(Model(1_600, 16, "adagrad", "float32", changed=10**9)) == 1_600
    prices = cost.read(cost.DEFAULT_PRICES)

    def pmem(changed: int, kept: int) -> int:
        model = Model(1_000_000, 16, "adagrad", "float32", changed=changed, kept=kept)
        return next(item.pmem for item in cost.choices(model, prices, 1) if item.pmem)

    assert pmem(100_000, 2) - pmem(0, 2) == 300_000 * 144
    assert pmem(100_000, 4) - pmem(0, 4) == 500_000 * 144


@pytest.mark.parametrize("kept", [1, 3])
def test_pools_of_the_planned_size_refuse_nothing(tmp_path: Path, kept: int) -> None:
    """Rows to the last, and then the changes of many checkpoints."""
    rows, part = 60_000, 6_000
    model = Model(rows, 16, "adagrad", "float32", changed=part, kept=kept)
    one = cost.pool_bytes(cost.row_bytes(model))
    size = int(cost.slots(model) * one / cost.USABLE) // 4096 * 4096
    storage = StorageSpec("pmem_libpmem", str(tmp_path / "rows"), size, kept_checkpoints=kept)
    chance = np.random.default_rng(0)
    with Client.in_process(storage, threads=1) as client:
        table = client.create_table(TableSpec("t", 16, optimizer={"name": "adagrad"}))

        def push(keys: np.ndarray) -> None:
            pulled = client.pull([keys], [(table, 0)])
            client.push(pulled, [np.ones_like(pulled.groups[0].rows)], learning_rate=0.1)

        for step, first in enumerate(range(0, rows, part), 1):
            push(np.arange(first, first + part))
            if first:
                push(np.sort(chance.choice(first, part - part // 10, replace=False)))
            client.checkpoint(step, wait=True)
        for step in range(100, 110):
            push(np.sort(chance.choice(rows, part, replace=False)))
            client.checkpoint(step, wait=True)


def test_more_rows_take_more_servers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cost", "--dim", "64", "--optimizer", "adagrad", "--json", "--epoch-hours", "2"]
    counts = []
    for rows in ("1e6", "2.1e9", "2.1e10"):
        assert cli.run([*words, "--rows", rows]) == 0
        found = json.loads(capsys.readouterr().out)
        counts.append(
            [item["servers"] for item in sorted(found["choices"], key=lambda i: (i["system"], i["server"]))]
        )
        assert [item["cost"] for item in found["choices"]] == sorted(
            item["cost"] for item in found["choices"]
        )
    assert counts[0] == [1] * len(counts[0])
    assert all(few < many for few, many in zip(counts[1], counts[2], strict=True))
    assert cli.run(["cost", "--rows", "2.1e9", "--dim", "64", "--optimizer", "sgd"]) == 0
    said = capsys.readouterr().out
    assert "34.90" in said
    assert "give your own with --prices" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("price: 17.45", "price: -1"), "servers.0.price: found -1; allowed: more than 0"),
        (("dram: 384G", "dram: 384GB"), "servers.0.dram: found '384GB'; expected a size such as"),
        (("    source: by definition\n", ""), "systems.0.source: is missing"),
        (("storage: dram\n", "storage: disk\n"), "systems.0.storage: found 'disk'; allowed: dram"),
        (("currency: USD", "curency: USD"), "curency: unknown key"),
        (("currency: USD", "currency: ["), "is not YAML"),
    ],
)
def test_price_tables_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], words: str
) -> None:
    text = cost.DEFAULT_PRICES.read_text()
    assert change[0] in text
    (tmp_path / "mine.yml").write_text(text.replace(*change, 1))
    assert cli.run(["cost", "--rows", "1000", "--prices", str(tmp_path / "mine.yml")]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path / "mine.yml") in said
    assert words in said


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--rows", "0"], "--rows and --dim are at least 1"),
        (["--rows", "1.5"], "1.5"),
        (["--rows", "many"], "found 'many'; expected a whole number, such as 2.1e9"),
        (["--rows", "1e400"], "found '1e400'; expected a whole number"),
        (["--rows", "9", "--kept", "65"], "--kept"),
        (["--rows", "9", "--changed-rows", "-1"], "--changed-rows: found -1"),
        (["--rows", "9", "--written-rows", "-1"], "--written-rows: found -1"),
        (["--rows", "nan"], "found 'nan'; expected a whole number"),
        (["--rows", "9", "--optimizer", "adagradd"], "--optimizer: found 'adagradd'; allowed: adadelta"),
        (["--rows", "9", "--dtype", "int8"], "--dtype: found 'int8'; allowed: float32"),
        (["--rows", "9", "--prices", "/nonexistent"], "/nonexistent: No such file"),
    ],
)
def test_models_that_cannot_be(capsys: pytest.CaptureFixture[str], more: list[str], words: str) -> None:
    assert cli.run(["cost", *more]) == 1
    assert words in capsys.readouterr().err
