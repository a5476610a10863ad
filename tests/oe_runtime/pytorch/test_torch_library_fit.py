"""Loops that libraries hold are jobs: they train as without us, stop, and resume where they were."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import job_scripts
import numpy as np
import pytest
import torch
from job_scripts import losses, start, write
from library_scripts import DEEPCTR, DEEPCTR_FIT, LIGHTNING, LIGHTNING_JOB, PROGRAMS, as_job
from torch.optim.optimizer import register_optimizer_step_post_hook
from training_runs import ServerProcess, events, wait_for

from oe_runtime.torch.job_state import from_json, to_json

LIBRARIES = list(PROGRAMS)
EVERY = ("--checkpoint-steps", "4")


def run(script: Path, run_dir: Path, *flags: str, arguments: tuple[str, ...] = ()) -> int:
    os.environ["MODELS"] = f"{run_dir}.models"  # where FuxiCTR keeps the best one
    return job_scripts.run(script, run_dir, *flags, arguments=arguments)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", "")


def job_script(directory: Path, name: str) -> Path:
    pytest.importorskip(name.partition(".")[0])
    program, _, lines, _ = PROGRAMS[name]
    return write(directory, as_job(program, lines))


def stock_losses(program: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the losses of a program's steps: what it calls backward of."""
    found: list[float] = []
    waiting: list[float] = []
    backward = torch.Tensor.backward

    def note(loss: Any, *args: Any, **named: Any) -> None:
        waiting.append(float(loss))
        backward(loss, *args, **named)

    def step(*_: Any) -> None:
        found.append(sum(waiting))
        waiting.clear()

    monkeypatch.setattr(torch.Tensor, "backward", note)
    hook = register_optimizer_step_post_hook(step)
    try:
        exec(compile(program, "stock.py", "exec"), {"__name__": "__main__"})  # noqa: S102 - a test's own
    finally:
        hook.remove()
        monkeypatch.undo()
    return found


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_trains_as_without_us(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = job_script(tmp_path, name)
    program, fit, _, steps = PROGRAMS[name]
    assert run(script, tmp_path / "run") == 0
    ours = [loss for loss, _ in losses(tmp_path / "run").values()]
    expected = stock_losses(program + fit, monkeypatch)
    assert len(ours) == len(expected) == steps
    if name == "accelerate":  # backward gets a third of each batch's loss, job.step the mean of the batches
        expected = [loss * (3 / 2 if step % 7 == 6 else 1) for step, loss in enumerate(expected)]
    assert ours == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_s_loop_that_stops_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    script, steps = job_script(tmp_path, name), PROGRAMS[name][3]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert run(script, whole, *EVERY) == 0
    stops = tuple(str(steps * part // 6) for part in (1, 2, 5))  # in an epoch, at its end, in the last
    codes = [run(script, run_dir, *EVERY, arguments=stops)]
    codes += [run(script, run_dir, *EVERY, "--resume", arguments=stops) for _ in stops]
    assert codes == [130, 130, 130, 0]
    assert losses(run_dir) == losses(whole)
    assert events(run_dir, "end")[0]["steps"] == steps


@pytest.mark.process
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_s_loop_that_is_killed_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    script, steps = job_script(tmp_path, name), PROGRAMS[name][3]
    run_dir = tmp_path / "run"
    environment = {**os.environ, "MODELS": f"{run_dir}.models"}
    process = start(script, run_dir, *EVERY, arguments=(str(-(steps // 2)),), env=environment)
    assert process.wait(240) == -9
    process.communicate()
    assert run(script, run_dir, *EVERY, "--resume") == 0
    assert 0 < events(run_dir, "resume")[0]["step"] < steps // 2
    assert run(script, tmp_path / "whole", *EVERY) == 0
    assert losses(run_dir) == losses(tmp_path / "whole")


# A function with a loop of its own, which a test changes.
LOOP = """
import torch
import oe_runtime.job as job
import oe_runtime.torch as embed

torch.set_num_threads(1)
torch.manual_seed(1)
ids = torch.randint(0, 300, (160, 2))
data = torch.utils.data.TensorDataset(ids, (ids[:, :1] % 3 == 0).float())
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
model = torch.nn.Sequential(torch.nn.Embedding(300, 4), torch.nn.Flatten(), torch.nn.Linear(8, 1))
model = embed.distributed_model(model, job.client())
optimizer = embed.distributed_optimizer(torch.optim.Adagrad(model.parameters(), 0.1), model)


def step(x, y):
    optimizer.zero_grad()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x), y)
    loss.backward()
    optimizer.step()


def train(first):
    for _ in range(first, 2):
        for x, y in loader:
            step(x, y)


with job.training(model, optimizer) as loop:
    print("result", loop.fit(train, epochs=2))
"""


def stops_in(program: str) -> str:
    """Return the program with a request to stop in the steps that its arguments name."""
    return program.replace("import torch\n", "import os, signal\nimport torch\n", 1).replace(
        "    optimizer.step()\n",
        "    optimizer.step()\n"
        "    at = job.current().course.position.step + 1\n"
        "    if str(at) in job.arguments and at > job.resume_step:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n",
    )


ANNEAL = """    annealing.factor *= 0.9
    model.temperature *= 0.9 + 0.1 * annealing.factor
    model.part.p *= 0.9
"""
REFUSED = {
    "all epochs again": (
        "range(first, 2)",
        "range(3)",
        "fit begins epoch 3 of 2: let it train from the epoch",
    ),
    "no DataLoader": (
        "for x, y in loader",
        "for x, y in [(ids, data[:][1])]",
        "no DataLoader of PyTorch reads",
    ),
    "two at once": (
        "for x, y in loader",
        "for (x, y), _ in zip(loader, torch.utils.data.DataLoader(data))",
        "fit reads two DataLoaders at once",
    ),
    "an error": ("step(x, y)", "raise OSError('the disk')", "OSError: the disk"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_loop_cannot_do_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, message = REFUSED[name]
    before = torch.utils.data.DataLoader.__iter__, torch.Tensor.backward
    indented = f"            {old}" if old == "step(x, y)" else old
    script = write(tmp_path, LOOP.replace(indented, indented.replace(old, new)))
    assert run(script, tmp_path / "run") == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
    assert (torch.utils.data.DataLoader.__iter__, torch.Tensor.backward) == before


def test_a_loop_that_was_done_is_skipped_unless_it_has_more_epochs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, run_dir = write(tmp_path, LOOP), tmp_path / "run"
    assert run(script, run_dir) == 0
    assert max(losses(run_dir)) == 20
    assert run(script, run_dir, "--resume") == 0
    said = capsys.readouterr().out
    assert "fit was done before the checkpoint: skipped" in said
    assert max(losses(run_dir)) == 20
    longer = write(
        tmp_path, LOOP.replace("epochs=2", "epochs=3").replace("range(first, 2)", "range(first, 3)")
    )
    assert run(longer, run_dir, "--resume") == 0
    assert run(longer, tmp_path / "whole") == 0
    assert losses(run_dir) == losses(tmp_path / "whole")
    assert max(losses(run_dir)) == 30


def test_a_loop_may_end_early_and_leave_epochs(tmp_path: Path) -> None:
    early = LOOP.replace(
        "            step(x, y)", "            step(x, y)\n            if loop.step_number == 3: break"
    )
    script, run_dir = write(tmp_path, early), tmp_path / "run"
    assert run(script, run_dir) == 0
    assert max(losses(run_dir)) == 14  # four steps of the first epoch
    assert [e["step"] for e in events(run_dir, "epoch")] == [4, 14]
    assert run(script, run_dir, "--resume") == 0


def test_rows_are_pulled_ahead_in_a_library_s_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = LOOP.replace(
        "\n\ndef step",
        "\nfollowed, follow = [], job.client().follow\n"
        "job.client().follow = lambda *batches: (followed.append(1), follow(*batches))\n\n\ndef step",
    )
    script = write(tmp_path, counted + '    print("followed", len(followed))\n')
    assert run(script, tmp_path / "ahead") == 0
    assert "followed 15\n" in capsys.readouterr().out
    assert run(script, tmp_path / "after", "--no-pipeline") == 0
    assert "followed 0\n" in capsys.readouterr().out
    assert losses(tmp_path / "ahead") == losses(tmp_path / "after")


def test_callbacks_with_more_than_numbers_begin_anew_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("deepctr_torch")
    script = job_script(tmp_path, "deepctr_torch")
    best = script.read_text().replace("patience=2", "patience=2, restore_best_weights=True")
    assert run(write(tmp_path, best), tmp_path / "run") == 0
    assert "EarlyStopping.best_weights of fit's callbacks is no number or text" in capsys.readouterr().out


ACCUMULATED = (
    LOOP[: LOOP.index("def step")]
    + """
count = 0
with job.training(model, optimizer) as loop:
    for epoch in loop.epochs(3):
        for x, y in loop.batches(loader):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x), y)
            loss.backward()
            count += 1
            if count % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            job.step(loss=loss)
"""
)


def test_batches_without_a_step_are_no_steps(tmp_path: Path) -> None:
    """Of 30 batches in 3 epochs, with steps of 4 that do not end where epochs do."""
    script = write(tmp_path, ACCUMULATED)
    assert run(script, tmp_path / "run") == 0
    assert max(losses(tmp_path / "run")) == 7
    assert [e["step"] for e in events(tmp_path / "run", "epoch")] == [2, 5, 7]


@pytest.mark.process
def test_a_library_s_loop_goes_back_when_its_server_is_killed(tmp_path: Path) -> None:
    more = LOOP.replace("epochs=2", "epochs=30").replace("range(first, 2)", "range(first, 30)")
    script, run_dir = write(tmp_path, more), tmp_path / "run"
    server = ServerProcess(tmp_path / "server")
    process = start(script, run_dir, "--servers", server.endpoint, "--checkpoint-steps", "15")
    try:
        wait_for(lambda: max(losses(run_dir), default=0) > 20, process)
        server.kill()
        server.start_again()
        said, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert "is back after" in said
    finally:
        process.kill()
        process.communicate()
        server.stop()
    assert run(script, tmp_path / "whole", "--checkpoint-steps", "15") == 0
    assert losses(run_dir) == losses(tmp_path / "whole")


def test_the_best_weights_come_back_as_without_us() -> None:
    """DeepCTR-Torch's EarlyStopping copies the state, and loads it in the middle of fit."""
    pytest.importorskip("deepctr_torch")
    program = DEEPCTR.replace("patience=2", "patience=1, restore_best_weights=True").replace(
        'compile("adam"', "compile(torch.optim.Adam(model.parameters(), 0.03)"
    )
    ours = program.replace("model.compile", "model = embed.distributed_model(model)\nmodel.compile") + (
        "embed.distributed_optimizer(model.optim, model)\n"
    )
    found = []
    for text in (program, "import oe_runtime.torch as embed\n" + ours):
        made: dict[str, Any] = {"__name__": "__main__"}
        fit = DEEPCTR_FIT.replace("epochs=3", "epochs=30")
        exec(compile(text + fit, "program.py", "exec"), made)  # noqa: S102 - a test's own
        assert 0 < made["stopping"].stopped_epoch < 30
        found.append({name: value.clone() for name, value in made["model"].state_dict().items()})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_lightning_s_own_checkpoints_and_early_stopping(tmp_path: Path) -> None:
    """Its callbacks' states hold tensors; its files have the rows, for stock models too."""
    pytest.importorskip("pytorch_lightning")
    program = LIGHTNING.replace("enable_checkpointing=False", "callbacks=[stopping, saving]").replace(
        "trainer = ",
        'stopping = lightning.callbacks.EarlyStopping("loss", patience=3)\n'
        f'saving = lightning.callbacks.ModelCheckpoint({str(tmp_path / "files")!r}, monitor="loss")\n'
        "trainer = ",
    )
    lines = LIGHTNING_JOB.replace("scheduler=model.scheduler", "stopping=stopping, scheduler=model.scheduler")
    script, run_dir = write(tmp_path, as_job(program, lines)), tmp_path / "run"
    assert run(script, run_dir, *EVERY, arguments=("18",)) == 130
    assert run(script, run_dir, *EVERY, "--resume", arguments=("18",)) == 0
    assert run(script, tmp_path / "whole", *EVERY) == 0
    assert losses(run_dir) == losses(tmp_path / "whole")
    saved = [torch.load(path, weights_only=True) for path in (tmp_path / "files").iterdir()]
    assert saved
    assert all(one["state_dict"]["users.weight"].shape == (300, 4) for one in saved)


@pytest.mark.parametrize(
    "made",
    [
        "torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)",
        "torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda epoch: 1 / (1 + epoch))",
        "torch.optim.lr_scheduler.SequentialLR(self.optimizer, [torch.optim.lr_scheduler.LinearLR("
        "self.optimizer, 0.1, 1, 2), torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 5)], [1])",
    ],
    ids=["exponential", "lambda", "sequence"],
)
def test_schedulers_that_lightning_makes_resume(made: str, tmp_path: Path) -> None:
    """In configure_optimizers, which the job does not see: with the rates of then, not those of a begin."""
    pytest.importorskip("pytorch_lightning")
    program = LIGHTNING.replace("[self.scheduler]", f"[{made}]")
    lines = LIGHTNING_JOB.replace(", scheduler=model.scheduler", "")
    kept = [line for line in lines.splitlines() if "ExponentialLR" not in line]
    script, run_dir = write(tmp_path, as_job(program, "\n".join(kept) + "\n")), tmp_path / "run"
    for step in ("3", "7", "18"):  # in the first epoch, at its end, in the last one
        more = ("--resume",) if run_dir.exists() else ()
        assert run(script, run_dir, *EVERY, *more, arguments=("3", "7", "18")) == 130, step
    assert run(script, run_dir, *EVERY, "--resume", arguments=("3", "7", "18")) == 0
    assert run(script, tmp_path / "whole", *EVERY) == 0
    assert losses(run_dir) == losses(tmp_path / "whole")


def test_another_optimizer_that_lightning_makes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pytorch_lightning")
    another = "embed.distributed_optimizer(torch.optim.Adagrad(self.parameters()), self)"
    program = LIGHTNING.replace("[self.optimizer], [self.scheduler]", another)
    assert run(write(tmp_path, as_job(program, LIGHTNING_JOB)), tmp_path / "run") == 1
    assert "the model is trained by another Adagrad than job.training was given" in capsys.readouterr().err


SCHEDULED = stops_in(
    LOOP[: LOOP.index("def train")].replace("def step", "scheduler = MADE\n\n\ndef step")
    + """
with job.training(model, optimizer) as loop:
    for epoch in loop.epochs(2):
        for x, y in loop.batches(loader):
            step(x, y)
            scheduler.step()
            job.step(loss=x.sum() * 0 + optimizer.param_groups[0]["lr"])
"""
)


def test_a_scheduler_that_is_not_named_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a loop of the program's own; of two of a class the job asks for names."""
    made = "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)"
    script, run_dir = write(tmp_path, SCHEDULED.replace("MADE", made)), tmp_path / "run"
    assert run(script, run_dir, arguments=("7",)) == 130
    assert run(script, run_dir, "--resume", arguments=("7",)) == 0
    assert run(script, tmp_path / "whole") == 0
    assert losses(run_dir) == losses(tmp_path / "whole")
    twice = write(tmp_path, SCHEDULED.replace("MADE", f"{made}; other = {made}"))
    assert run(twice, tmp_path / "twice") == 1
    assert "the optimizer has two schedulers CosineAnnealingLR: name each" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["one", "sequence"])
def test_the_state_of_a_scheduler_with_milestones_is_kept(kind: str) -> None:
    rates = []
    for resumed in (False, True):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
        lr = torch.optim.lr_scheduler
        scheduler: Any = lr.MultiStepLR(optimizer, [5], 0.1)
        if kind == "sequence":
            scheduler = lr.SequentialLR(optimizer, [scheduler, lr.MultiStepLR(optimizer, [2, 4], 0.1)], [6])
        for step in range(12):
            if resumed and step == 3:
                scheduler.load_state_dict(from_json(to_json(scheduler.state_dict(), "scheduler")))
            optimizer.step()
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] < 1
    assert rates[1] == rates[0]


@pytest.mark.parametrize(
    "value",
    [
        Counter({5: 1, 7: 2}),
        OrderedDict([("b", 1), ("a", OrderedDict([(2, None)]))]),
        {1: {"x": [{0.5: True}]}, None: 2},
        {"pairs": [], "kind": "dict"},
        {"tensor": [1], "dtype": "int64"},
    ],
)
def test_dicts_are_kept_with_their_keys_and_kinds(value: Any) -> None:
    found = from_json(to_json(value, "it"))
    assert found == value
    assert type(found) is type(value)


def test_dicts_as_earlier_checkpoints_have_them_are_read() -> None:
    assert from_json(np.frombuffer(b'{"last_epoch": 3, "milestones": {"5": 1}}', np.uint8)) == {
        "last_epoch": 3,
        "milestones": {"5": 1},
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_draws_within_an_epoch_goes_on_where_it_was(workers: int, tmp_path: Path) -> None:
    """With replacement it draws for 32 examples, two batches, from the generator that it was given."""
    drawn = LOOP.replace(
        "shuffle=True)",
        f"num_workers={workers}, sampler=torch.utils.data.RandomSampler(data, replacement=True, "
        "generator=torch.Generator().manual_seed(3)))",
    )
    script, run_dir, whole = write(tmp_path, stops_in(drawn)), tmp_path / "run", tmp_path / "whole"
    assert run(script, whole) == 0
    stops = ("3", "6", "13")
    codes = [run(script, run_dir, arguments=stops)]
    codes += [run(script, run_dir, "--resume", arguments=stops) for _ in stops]
    assert codes == [130, 130, 130, 0]
    assert losses(run_dir) == losses(whole)


def test_arguments_of_models_parts_and_callbacks_that_training_changes_are_kept(tmp_path: Path) -> None:
    """A model anneals what its constructor, a part's and a callback's were given."""
    annealed = (
        LOOP.replace(
            "\n\ndef step",
            """

class Scaled(torch.nn.Module):
    def __init__(self, inner, temperature):
        super().__init__()
        self.inner, self.temperature, self.part = inner, temperature, torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.part(self.inner(x)) / self.temperature


class Annealing:
    def __init__(self, factor):
        self.factor = factor


annealing, inner = Annealing(1.0), model
model = Scaled(inner, 1.0)


def step""",
            1,
        )
        .replace("    optimizer.step()\n", "    optimizer.step()\n" + ANNEAL)
        .replace("training(model, optimizer)", "training(model, optimizer, annealing=annealing)")
    )
    script, run_dir, whole = write(tmp_path, stops_in(annealed)), tmp_path / "run", tmp_path / "whole"
    assert run(script, whole) == 0
    assert run(script, run_dir, arguments=("7",)) == 130
    assert run(script, run_dir, "--resume") == 0
    assert losses(run_dir) == losses(whole)
