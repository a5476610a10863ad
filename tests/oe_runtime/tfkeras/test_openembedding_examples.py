"""OpenEmbedding's own programs, unchanged but for two import lines; see openembedding/README.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import openembedding_programs
import pytest
from server_processes import Servers

ROWS = 32
EXAMPLES = {
    "lr": "examples/criteo_lr_subclass.py",
    "hook": "examples/criteo_deepctr_hook.py",
    "network": "examples/criteo_deepctr_network.py",
    "mirrored": "examples/criteo_deepctr_network_mirrored.py",
}
pytestmark = pytest.mark.skipif(
    find_spec("deepctr") is None,
    reason="needs DeepCTR, whose import asks PyPI for its newest version",
)
BENCHMARK = "benchmark/criteo_deepctr.py"


def _write_csv(path, numbers, categories):
    """The form of OpenEmbedding's train100.csv."""
    rng = np.random.default_rng(0)
    columns = {"": np.arange(ROWS), "label": rng.integers(0, 2, ROWS)}
    columns |= {f"I{i}": rng.random(ROWS) for i in range(1, numbers + 1)}
    columns |= {f"C{i}": rng.integers(0, 50 * i, ROWS) for i in range(1, categories + 1)}
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


def _run(directory, *programs):
    """Their results; all run in one process."""
    words = [[str(word) for word in program] for program in programs]
    command = [sys.executable, openembedding_programs.__file__, json.dumps(words)]
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=600
    )
    results = [
        json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line[:7] == "RESULT "
    ]
    assert len(results) == len(programs), done.stdout + done.stderr
    assert [result.get("error") for result in results] == [None] * len(programs), done.stderr
    return [result["losses"] for result in results]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Each example: trained with all of its flags, then loaded from the fourth epoch's checkpoint."""
    directory = tmp_path_factory.mktemp("examples")
    data = _write_csv(directory / "train.csv", 2, 2)
    programs = []
    for name, program in EXAMPLES.items():
        flags = ["--checkpoint", f"{name}-", "--save", f"{name}-save"]
        if name in ("network", "mirrored"):
            flags += ["--export", f"{name}-export/1"]
        load = ["--load", f"{name}-4/variables/variables"]  # as criteo_deepctr_checkpoint.sh has it
        programs += [[program, "--data", data, *more] for more in (flags, load)]
    results = _run(directory, *programs)
    return directory, dict(zip(EXAMPLES, zip(results[::2], results[1::2], strict=True), strict=True))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_and_goes_on_from_its_checkpoint(trained, name):
    directory, results = trained
    first, again = results[name]
    assert len(first) == len(again) == 5
    assert first[4] < first[0]
    assert again[0] == pytest.approx(first[4], rel=0.05)  # the next epoch, shuffled otherwise
    assert again[4] < again[0]
    for epoch in (*"12345", "save"):
        assert list((directory / f"{name}-{epoch}").glob("*.oet"))
    assert not any(n.startswith("optimizer/") for n in np.load(directory / f"{name}-save" / "dense.npz"))
    export = directory / f"{name}-export" / "1" / "saved_model.pb"
    assert export.exists() == (name in ("network", "mirrored"))


@pytest.mark.slow
@pytest.mark.process
def test_the_pmem_guide_writes_checkpoint_numbers_and_not_rows(tmp_path):
    """`criteo_deepctr.py --server --pmem …` as in the PMem guide, with a server on PMem storage."""
    data = _write_csv(tmp_path / "train.csv", 13, 26)
    servers = Servers(tmp_path / "server", 1, storage="dram_pmem")
    try:
        server = ["--server", "--master_endpoint", *servers.endpoints, "--pmem", "/mnt/pmem0"]
        size = ["--data", data, "--batch_size", 8, "--embedding_dim", 2, "--cache", "--prefetch"]
        program = [BENCHMARK, *server, *size, "--epochs", 2]
        first, again = _run(
            tmp_path,
            [*program, "--checkpoint", "epoch", "--save", "B"],
            [*program, "--load", "epoch1/variables/variables"],
        )
    finally:
        servers.end()
    for name, batch in (("epoch1", 4), ("epoch2", 8), ("B", 8)):
        found = sorted(str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*.*"))
        assert found == ["config.json", "dense.npz", "openembedding/persisted.json"]
        assert json.loads((tmp_path / name / "openembedding/persisted.json").read_text()) == {"batch": batch}
    assert again[0] == pytest.approx(first[1], rel=1e-5)  # its second epoch again: batches are not shuffled
