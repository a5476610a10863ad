"""A training program of TorchRec, moved to our servers, has the losses that it had, and is a job."""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import job_scripts
import pytest
import torch
from job_scripts import losses, start
from server_processes import free_endpoints
from training_runs import ServerProcess

import oe_runtime.torch as embed
from oe_runtime import Client
from oe_runtime.run.loops import count_rows
from oe_runtime.torch.job_state import TorchScriptState

torchrec = pytest.importorskip("torchrec")
EXAMPLES = Path(__file__).parents[3] / "examples"
GUIDE = Path(__file__).parents[3] / "docs/guides/pytorch.md"
STOCK, MOVED = EXAMPLES / "pytorch_torchrec.py", EXAMPLES / "pytorch_torchrec_moved.py"


def means(said: str) -> dict[str, float]:
    """Return the mean losses that the workers print after their epochs."""
    return {
        place: float(loss) for place, loss in re.findall(r"(worker \d, epoch \d): mean loss ([\d.]+)", said)
    }


# What runs the program by TorchRec alone, so that it prints the loss of each step.
EACH_STEP = """
import runpy, sys
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist as Pipeline
progress = Pipeline.progress
def shown(*arguments):
    answer = progress(*arguments)
    print("loss", answer[0].item(), flush=True)
    return answer
Pipeline.progress = shown
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run_stock(rank: int, workers: int, address: str) -> Any:
    """Start a process of the program by TorchRec alone, as torchrun does."""
    host, port = address.split(":")
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": workers,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
    return subprocess.Popen(
        [sys.executable, "-c", EACH_STEP, str(STOCK)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def said_by(processes: list[Any]) -> str:
    """Return what processes print, when they have ended well."""
    try:
        said = [one.communicate(timeout=240) for one in processes]
    finally:
        for one in processes:
            one.kill()
            one.communicate()
    assert not any(one.returncode for one in processes), said
    return "".join(output for output, _ in said)


@pytest.mark.process
@pytest.mark.parametrize("workers", [1, 2])
def test_the_moved_program_has_the_losses_of_torchrec(workers: int, tmp_path: Path) -> None:
    address = free_endpoints(1)
    stock = said_by([run_stock(rank, workers, address) for rank in range(workers)])
    server = ServerProcess(tmp_path / "server")
    flags: tuple[str, ...] = ("--servers", server.endpoint)
    if workers > 1:
        flags += ("--workers", free_endpoints(workers))
    try:
        moved = said_by(
            [
                start(MOVED, tmp_path / "run", *flags, *(("--rank", str(rank)) if workers > 1 else ()))
                for rank in range(workers)
            ]
        )
    finally:
        server.stop()
    assert len(means(stock)) == 2 * workers
    # Until a number before a ReLU is so close to 0 that rounding decides its sign: step 5 on some processors.
    if workers == 1:
        first = [float(loss) for loss in re.findall(r"^loss ([\d.]+)", stock, re.MULTILINE)][:4]
        assert [losses(tmp_path / "run")[step][0] for step in (1, 2, 3, 4)] == pytest.approx(first, abs=1e-6)
    # A learning rate that is wrong by a hundredth makes 0.0003; a flipped sign 0.0001.
    assert means(moved) == pytest.approx(means(stock), abs=2e-4)


def test_the_guide_shows_what_changes() -> None:
    """All lines of the program, except how it is run and how deep its loop is indented."""

    def lines(path: Path) -> list[str]:
        text = path.read_text()
        said = ast.get_docstring(ast.parse(text), clean=False)
        return text.replace(f'"""{said}"""\n', "").splitlines()

    found = [
        line
        for line in difflib.ndiff(lines(STOCK), lines(MOVED))
        if line[:2] in ("- ", "+ ") and line[2:].strip()
    ]
    changed = {sign: [line[2:].strip() for line in found if line[0] == sign] for sign in "-+"}
    indented = {line for line in changed["-"] if line in changed["+"]}
    (diff,) = re.findall(r'```diff title="A program of TorchRec"\n(.*?)```', GUIDE.read_text(), re.DOTALL)
    for sign in "-+":
        shown = [line[1:].strip() for line in diff.splitlines() if line.startswith(sign)]
        assert sorted(line for line in shown if line not in indented) == sorted(
            line for line in changed[sign] if line not in indented
        )


def test_the_moved_program_resumes_with_its_scheduler(tmp_path: Path) -> None:
    """TorchRec's KeyedOptimizer has the groups and the state of the optimizer in it, also after a resume.

    Optimizers in backward have their rates of then.
    """
    text = MOVED.read_text()
    for old, new in {
        "num_workers=1": "num_workers=0",
        "impressions(20_000)": "impressions(6_000)",
        "pipeline =": (
            "fused = distributed.optim._get_in_backward_optimizers(model)\n"
            "scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)\npipeline ="
        ),
        "job.training(model, optimizer)": "job.training(model, optimizer, scheduler=scheduler)",
        "job.step(loss=loss)": (
            "scheduler.step(); [g.update(lr=g['lr'] * 0.95) for o in fused for g in o.param_groups]; "
            "str(loop.step_number + 1) in job.arguments and "
            "loop.step_number + 1 > job.resume_step and os.kill(os.getpid(), signal.SIGTERM); "
            "job.step(loss=loss)"
        ),
        "import contextlib\n": "import contextlib, os, signal\n",
    }.items():
        assert old in text
        text = text.replace(old, new)
    job_scripts.write(tmp_path, (EXAMPLES / "clicks.py").read_text(), "clicks.py")
    script = job_scripts.write(tmp_path, text)
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert job_scripts.run(script, whole) == 0
    stops = ("5", "17")
    codes = [job_scripts.run(script, run_dir, arguments=stops)]
    codes += [job_scripts.run(script, run_dir, "--resume", arguments=stops) for _ in stops]
    assert codes == [130, 130, 0]
    assert losses(run_dir) == losses(whole)
    assert len(losses(whole)) == 24


def model_on_meta(function: object) -> torch.nn.Module:
    table = torchrec.EmbeddingBagConfig(100, 4, "rows", feature_names=["rows"], init_fn=function)
    return torch.nn.Sequential(
        torchrec.EmbeddingBagCollection(tables=[table], device=torch.device("meta")), torch.nn.Linear(4, 1)
    )


def test_tables_on_the_meta_device_begin_with_their_init_fn() -> None:
    model = embed.distributed_model(model_on_meta(lambda rows: rows.fill_(0.25)), Client.in_process())
    embed.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    assert torch.equal(model[0].layers[0].weight.read(), torch.full((100, 4), 0.25))


@pytest.mark.parametrize("kind", ["WarmupOptimizer", "CombinedOptimizer"])
def test_optimizers_with_more_state_are_no_job_s(kind: str) -> None:
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.warmup import WarmupOptimizer, WarmupStage

    model = embed.distributed_model(model_on_meta(None), Client.in_process())
    keyed = KeyedOptimizerWrapper(dict(model.named_parameters()), lambda p: torch.optim.SGD(p, 0.1))
    embed.distributed_optimizer(keyed._optimizer, model)
    TorchScriptState(model, keyed, {})
    warm = (
        WarmupOptimizer(keyed, [WarmupStage()]) if kind == "WarmupOptimizer" else CombinedOptimizer([keyed])
    )
    with pytest.raises(ValueError, match=f"not a {kind}, which has more state than checkpoints hold"):
        TorchScriptState(model, warm, {})


def test_the_examples_of_a_batch_are_counted() -> None:
    from torchrec.datasets.utils import Batch

    lists = torchrec.KeyedJaggedTensor(["a", "b"], torch.arange(5), lengths=torch.tensor([2, 0, 1, 1, 1, 0]))
    numbers = torch.zeros(3, 2)
    for batch in (Batch(numbers, lists, numbers), lists, [lists, numbers], {"x": [numbers]}, numbers):
        assert count_rows(batch) == 3
    slotted = make_dataclass("Slotted", ["labels", "ids"], slots=True)
    assert count_rows(slotted(None, torch.zeros(3, 2))) == 3
    assert count_rows(()) == count_rows(7) == count_rows(torch.tensor(7)) == 1
