"""The trainer's flags for optimizers, tables and TensorFlow, DeepRec's among them (docs/deeprec-flags.md)."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from training_runs import DATA, SMALL, events, losses

from oe_runtime import StorageError, StorageSpec, TableSpec
from oe_runtime.checkpoint.saved import Saved
from oe_runtime.client import Client
from oe_runtime.run.connection import connect
from oe_runtime.run.optimizers import LEARNING_RATES
from oe_runtime.run.options import parse, parser
from oe_runtime.run.policies import admission, eviction
from oe_runtime.support.argument_types import size
from oe_runtime.train import main
from provision.cluster.setting_types import parse_size

ROOT = Path(__file__).parents[3]
# All flags of its script for DLRM.
DEEPREC = """
    data_location steps batch_size output_dir checkpoint deep_dropout seed optimizer learning_rate save_steps
    keep_checkpoint_max bf16 no_eval timeline interaction_op protocol inter intra input_layer_partitioner
    dense_layer_partitioner tf smartstaged emb_fusion ev ev_elimination ev_filter op_fusion micro_batch
    adaptive_emb dynamic_ev incremental_ckpt workqueue parquet_dataset parquet_dataset_shuffle group_embedding
"""


@pytest.fixture(autouse=True)
def keep_determinism() -> Iterator[None]:
    yield
    if "tensorflow" in sys.modules:
        from tensorflow.python.util import _pywrap_determinism

        _pywrap_determinism.enable(False)


def test_policies_are_what_tables_take() -> None:
    assert admission("counter:3") == {"name": "counter", "filter_freq": 3}
    assert admission("counter:3:500") == {"name": "counter", "filter_freq": 3, "max_keys": 500}
    assert admission("cbf:3:1000:0.5") == {
        "name": "cbf", "filter_freq": 3, "max_element_size": 1000, "false_positive_probability": 0.5,
    }  # fmt: skip
    rules = eviction("global_step:4000:100,l2_weight:1.5,ttl:60,cap:500:lfu")
    assert rules == [
        {"name": "global_step", "steps_to_live": 4000, "every_steps": 100},
        {"name": "l2_weight", "threshold": 1.5},
        {"name": "ttl", "seconds": 60},
        {"name": "cap", "max_rows": 500, "policy": "lfu"},
    ]
    with Client.in_process() as client:
        client.create_table(TableSpec("t", 4, admission=admission("counter:3"), eviction=rules))


@pytest.mark.parametrize("text", ["1048576", "512M", "16G", "1.5TiB", " 64G "])
def test_sizes_are_those_of_the_inventory(text: str) -> None:
    arguments = ["--data", "generate:10", "--in-process", "--storage-size", text]
    assert parse(arguments).storage_size == parse_size(text) == size()(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--index", "hash", "--admission", "bloom:3"], "'bloom:3' is none of counter:TIMES"),
        (["--index", "hash", "--admission", "counter:x"], "'x' cannot be filter_freq"),
        (["--eviction", "cap:10:mru"], "'mru' cannot be policy"),
        (["--eviction", "ttl"], "'ttl' is none of global_step"),
        (["--export-rows", "int8"], "--export-rows goes with --export"),
        (["--publish-seconds", "-1"], "argument --publish-seconds: -1 is not a number from 0"),
        (["--publish-seconds", "nan"], "argument --publish-seconds: nan is not a number from 0"),
        (["--admission", "counter:3"], "--admission goes with --index hash"),
        (["--interaction", "sum"], "invalid choice: 'sum'"),
        (["--micro-batch", "0"], "argument --micro-batch: "),
        (["--storage", "dram_ssd", "--storage-cache", "16GB"], "'16GB' is not a size such as 512M or 16G"),
        (["--storage-size", "-1"], "-1 is not between 0 and"),
    ],
)
def test_bad_flags(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--data", "generate:10", "--in-process", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_every_optimizer_is_one_of_tables() -> None:
    from oe_runtime.keras import distributed_optimizer
    from oe_runtime.programs.click_model import make_optimizer

    for name, rate in LEARNING_RATES.items():
        assert float(distributed_optimizer(make_optimizer(name, rate)).learning_rate) == pytest.approx(rate)
    assert make_optimizer("amsgrad", 0.1).amsgrad
    assert make_optimizer("momentum", 0.1).momentum == 0.9


def test_a_run_with_many_of_them(tmp_path: Path) -> None:
    import tensorflow as tf

    run = tmp_path / "run"
    flags = "--model dlrm --interaction cat --bottom 8 --precision bfloat16 --index hash --admission cbf:2"
    flags += " --row-precision bfloat16 --state-precision bfloat16 --exchange-precision bfloat16"
    flags += (
        " --eviction cap:40 --optimizer adamasync --jit --no-eval --timeline 4 --stats-seconds 0 --steps 6"
    )
    assert main([*DATA, *SMALL, "--in-process", "--run-dir", str(run), *flags.split()]) == 0
    assert not events(run, "eval")
    found = events(run, "servers")
    assert [e["step"] for e in found] == [1, 2, 3, 4, 5, 6, 6]
    rows = [e["servers"][0]["rows"] for e in found]
    assert 0 < rows[0] < rows[1]
    tables = events(run, "tables")[0]["tables"]
    assert "C3" in tables
    assert max(t["rows"] for t in tables.values()) <= 40
    saved = Saved.open(run / "checkpoints/step-0000000006").require().files
    for field in ("dtype", "state_dtype"):
        assert {files[0]["spec"][field] for files in saved.values()} == {"bfloat16"}
    assert json.loads((run / "config.json").read_text())["exchange_precision"] == "bfloat16"
    traces = list(run.glob("tensorboard/plugins/profile/*/*.xplane.pb"))
    assert len(traces) == 1
    assert (run / "report.html").read_text().count("<svg") == 10
    written: dict[str, dict[int, float]] = {}
    for file in run.glob("tensorboard/events.*"):
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                written.setdefault(value.tag, {})[event.step] = value.simple_value
    assert written["loss"] == pytest.approx({step: loss for step, (loss, _) in losses(run).items()})
    assert written["servers/rows"][6] == rows[-1]


def test_the_pace_of_steps_and_micro_batches(tmp_path: Path) -> None:
    """A push that goes out during the next step is not in the rows of that one."""
    found = []
    for number, flags in enumerate(["--no-pipeline --micro-batch 3", "--staleness 1"]):
        run = tmp_path / str(number)
        where = ["--in-process", "--run-dir", str(run), "--no-eval", "--steps", "4", "--model", "dlrm"]
        assert main([*DATA, *SMALL, *where, "--bottom", "8", *flags.split()]) == 0
        found.append([loss for loss, _ in losses(run).values()])
    whole, parts = found[1], found[0]
    assert parts[0] == pytest.approx(whole[0], rel=1e-5)
    assert parts[1:] != pytest.approx(whole[1:], rel=1e-5)
    assert parts[1:] == pytest.approx(whole[1:], rel=0.05)


def test_the_table_of_deeprecs_flags_names_flags_that_exist() -> None:
    text = (ROOT / "docs/deeprec-flags.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 25
    for name in DEEPREC.split():
        assert f"`--{name}" in text, name
    known = {flag for action in parser()._actions for flag in action.option_strings}
    for row in rows:
        for flag in re.findall(r"`(--[a-z-]+)", row[2]):
            assert flag in known, row


@pytest.mark.parametrize("backend", ["bogus", "torch"])
def test_a_backend_that_the_trainer_does_not_run_on_is_one_line(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", backend)
    assert main([*DATA, "--in-process", "--run-dir", str(tmp_path / "run"), *SMALL]) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(
        f"error: KERAS_BACKEND is {backend}, but this trainer runs on tensorflow: unset it"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:.*is not persistent memory")
@pytest.mark.parametrize("storage", ["pmem_libpmem", "dram_pmem", "dram_ssd"])
def test_a_run_says_what_happens_to_an_earlier_ones_checkpoint(tmp_path: Path, storage: str) -> None:
    """With tables in its own process, in a directory where another process has a checkpoint."""
    cache = 0 if storage == "pmem_libpmem" else 1 << 20
    spec, where = TableSpec("e", 2), str(tmp_path / "rows")
    with Client.in_process(StorageSpec(storage, where, recover=True, cache_bytes=cache)) as client:
        client.assign(client.create_table(spec), np.arange(3), np.ones((3, 2), np.float32))
        client.checkpoint(7, wait=True)
    words = ["--data", "generate:10", "--in-process", "--storage", storage, "--storage-path", where]
    words += ["--storage-cache", str(cache)] if cache else []
    files = {path.name: path.stat().st_size for path in (tmp_path / "rows").iterdir()}
    with pytest.raises(
        StorageError, match=r"has checkpoints of table 'e': .*--storage-recover.*--storage-fresh"
    ):
        connect(parse(words))
    assert {path.name: path.stat().st_size for path in (tmp_path / "rows").iterdir()} == files
    for flag, rows in (("--storage-recover", 3), ("--storage-fresh", 0)):
        client = connect(parse([*words, flag]))
        assert client is not None
        with client:
            assert client.to_arrow(client.create_table(spec)).num_rows == rows
