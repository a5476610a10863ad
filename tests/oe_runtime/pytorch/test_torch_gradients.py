"""What a program does to gradients between forward and step reaches rows on servers as it does in torch."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import platform
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from server_processes import Servers

torch = pytest.importorskip("torch")

from torch.nn.utils import (  # noqa: E402
    clip_grad_norm_,
    clip_grad_value_,
    parameters_to_vector,
)
from torch.utils.checkpoint import checkpoint  # noqa: E402

import oe_runtime.torch as embed  # noqa: E402
from oe_runtime import Client  # noqa: E402
from oe_runtime.errors import GradientError  # noqa: E402

ROWS = 80
IDS = torch.tensor([[1, 2], [2, 7], [70, 2], [5, 5]])
OTHER = torch.tensor([[2, 9], [9, 11]])


class Model(torch.nn.Module):
    """One embedding, and one bag."""

    def __init__(self, together=True):
        super().__init__()
        self.together = together
        self.users = torch.nn.Embedding(ROWS, 4, padding_idx=5)
        self.items = torch.nn.EmbeddingBag(ROWS, 3, mode="sum")
        self.dense = torch.nn.Linear(7, 1)

    def forward(self, ids):
        if type(self.users) is embed.Embedding and self.training and self.together:
            embed.pull({self.users: ids[:, 0], self.items: ids})
        return self.dense(torch.cat([self.users(ids[:, 0]), self.items(ids)], 1))


def loss(model, ids=IDS):
    return ((model(ids) - 1) ** 2).sum()


def clip_by_norm(model, optimizer):
    loss(model).backward()
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def clip_by_norm_one_by_one(model, optimizer):
    loss(model).backward()
    for parameter in model.parameters():
        clip_grad_norm_(parameter, 0.1, norm_type=1.0, foreach=False)
    optimizer.step()


def clip_by_value(model, optimizer):
    loss(model).backward()
    clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()


def halve_in_place(model, optimizer):
    loss(model).backward()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    optimizer.step()


def assign_a_function_of_it(model, optimizer):
    loss(model).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5
    optimizer.step()


def scale(model, optimizer):
    scaler = model.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=1024.0))
    scaler.scale(loss(model)).backward()
    scaler.step(optimizer)
    scaler.update()


def scale_and_clip(model, optimizer):
    scaler = model.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=1024.0))
    scaler.scale(loss(model)).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


def scale_with_infinities(model, optimizer):
    scaler = model.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=1024.0))
    steps = model.__dict__["steps"] = model.__dict__.get("steps", 0) + 1
    scaler.scale(loss(model) * (torch.inf if steps == 2 else 1)).backward()
    scaler.step(optimizer)
    scaler.update()


def discard_by_the_model(model, optimizer):
    loss(model, OTHER).backward()
    model.zero_grad()
    loss(model).backward()
    optimizer.step()


def zero_between_forward_and_backward(model, optimizer):
    found = loss(model)
    optimizer.zero_grad()
    found.backward()
    optimizer.step()


def keep_zeros(model, optimizer):
    optimizer.zero_grad(set_to_none=False)
    loss(model).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def never_zero(model, optimizer):
    loss(model).backward()
    optimizer.step()
    loss(model, OTHER).backward()
    optimizer.step()


def step_twice(model, optimizer):
    loss(model).backward()
    optimizer.step()
    optimizer.step()


def backward_in_eval_mode(model, optimizer):
    model.eval()
    loss(model).backward()
    optimizer.step()


def gradients_by_autograd_grad(model, optimizer):
    wanted = [p for p in model.parameters() if p.requires_grad]
    for parameter, gradient in zip(wanted, torch.autograd.grad(loss(model), wanted), strict=True):
        parameter.grad = gradient
    optimizer.step()


def gradients_of_dense_weights_only(model, optimizer):
    found = loss(model)
    torch.autograd.grad(found, list(model.dense.parameters()), retain_graph=True)
    torch.autograd.grad(found, list(model.users.parameters()), retain_graph=True)
    found.backward(inputs=[*model.dense.parameters(), *model.items.parameters()])
    optimizer.step()


def backward_for_all_inputs(model, optimizer):
    loss(model).backward(inputs=list(model.parameters()))
    optimizer.step()


def freeze_before_forward(model, optimizer):
    model.users.requires_grad_(False)
    loss(model).backward()
    optimizer.step()


def freeze_before_backward(model, optimizer):
    found = loss(model)
    model.users.requires_grad_(False)
    found.backward()
    optimizer.step()
    model.users.requires_grad_(True)


def freeze_before_step(model, optimizer):
    loss(model).backward()
    model.users.requires_grad_(False)
    optimizer.step()
    model.users.requires_grad_(True)


def several_forwards_before_backward(model, optimizer):
    first, second = loss(model), loss(model, OTHER)
    with torch.no_grad():
        loss(model)
    (first + second).backward()
    optimizer.step()


def accumulate_and_clip(model, optimizer):
    for ids in (IDS, OTHER, IDS):
        loss(model, ids).backward()
    clip_grad_norm_(model.parameters(), 0.1)
    loss(model, OTHER).backward()
    optimizer.step()


def backward_twice(model, optimizer):
    found = loss(model)
    found.backward(retain_graph=True)
    found.backward()
    optimizer.step()


def one_layer_twice(model, optimizer):
    (loss(model) + model.items(OTHER).sum() + model.items(IDS).square().sum()).backward()
    optimizer.step()


def a_part_at_a_time(model, optimizer):
    users, items = model.users(IDS[:, 0]), model.items(IDS)
    users.sum().backward()
    items.square().sum().backward()
    optimizer.step()


def closure(model, optimizer):
    def evaluate():
        optimizer.zero_grad()
        found = loss(model)
        found.backward()
        clip_grad_norm_(model.parameters(), 0.1)
        return found

    optimizer.step(evaluate)


def recompute(model, optimizer):
    checkpoint(loss, model, use_reentrant=False).backward()
    optimizer.step()


def recompute_reentrant(model, optimizer):
    ones = torch.ones(4, 1, requires_grad=True)
    (checkpoint(lambda x: model(IDS) * x, ones, use_reentrant=True) - 1).square().sum().backward()
    optimizer.step()


def hooks(model, optimizer):
    seen = []
    handles = [p.register_hook(lambda gradient: gradient * 0.5) for p in model.parameters()]
    handles += [p.register_post_accumulate_grad_hook(seen.append) for p in model.parameters()]
    loss(model).backward()
    assert {id(p) for p in seen} == {id(p) for p in model.parameters()}
    for handle in handles:
        handle.remove()
    loss(model).backward()
    assert len(seen) == len(handles) / 2
    optimizer.step()


def penalty_of_gradients(model, optimizer):
    users = list(model.users.parameters())
    (gradient,) = torch.autograd.grad(loss(model), users, create_graph=True)
    (loss(model) + gradient.square().sum()).backward()
    optimizer.step()


def stash_and_restore(model, optimizer):
    loss(model).backward()
    stash = [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    loss(model, OTHER).backward()
    for parameter, gradient in zip(model.parameters(), stash, strict=True):
        parameter.grad = gradient
    optimizer.step()


def read_after_the_step(model, optimizer):
    loss(model).backward()
    optimizer.step()
    norms = torch.stack([p.grad.norm() for p in model.parameters()])
    loss(model, OTHER).backward()  # on top
    clip_grad_value_(model.parameters(), float(norms.max()) / 20)
    optimizer.step()


WAYS = [
    clip_by_norm,
    clip_by_norm_one_by_one,
    clip_by_value,
    halve_in_place,
    assign_a_function_of_it,
    scale,
    scale_and_clip,
    scale_with_infinities,
    discard_by_the_model,
    zero_between_forward_and_backward,
    keep_zeros,
    never_zero,
    step_twice,
    backward_in_eval_mode,
    gradients_by_autograd_grad,
    gradients_of_dense_weights_only,
    backward_for_all_inputs,
    freeze_before_forward,
    freeze_before_backward,
    freeze_before_step,
    several_forwards_before_backward,
    accumulate_and_clip,
    backward_twice,
    one_layer_twice,
    a_part_at_a_time,
    closure,
    recompute,
    recompute_reentrant,
    hooks,
    penalty_of_gradients,
    stash_and_restore,
    read_after_the_step,
]

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.02),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05, initial_accumulator_value=0.1),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, 0.05, initial_accumulator_value=0.1, fused=True),
}


def made(make, ours, client=None, *, together=True):
    torch.manual_seed(0)
    model = Model(together)
    if ours:
        model = embed.distributed_model(model, client)
    optimizer = make(model.parameters())
    return model, embed.distributed_optimizer(optimizer, model) if ours else optimizer


def outputs(model):
    with torch.no_grad():
        ids = torch.arange(ROWS)
        return [model.users(ids), model.items(ids[:, None]), model.dense.weight, model.dense.bias]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_rows_train_as_stock(way, make):
    """Also where `forward` does not pull, and its calls are known from a forward pass before."""
    found = []
    for ours, together in ((False, False), (True, True), (True, False)):
        model, optimizer = made(make, ours, together=together)
        model(IDS)
        for _ in range(3):
            optimizer.zero_grad()
            way(model, optimizer)
        found.append(outputs(model))
    stock = found[0]
    for rows in found[1:]:
        torch.testing.assert_close(rows, stock, atol=1e-6, rtol=1e-5)


def test_the_gradient_is_of_the_distinct_rows():
    model, optimizer = made(OPTIMIZERS["SGD"], True)
    (users,) = model.users.parameters()
    assert users.grad is None
    assert users.grad_keys is None
    loss(model).backward()
    assert users.grad.shape == (3, 4)  # of 1, 2 and 70; 5 is padding
    assert sorted(users.grad_keys) == [1, 2, 70]
    assert users.grad is users.grad
    loss(model, OTHER).backward()
    np.testing.assert_array_equal(users.grad_keys, [1, 2, 9, 70])
    optimizer.zero_grad(set_to_none=False)
    assert not users.grad.any()
    loss(model, OTHER).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    loss(model, OTHER).backward()
    np.testing.assert_array_equal(sorted(users.grad_keys), [2, 9])  # not the rows of all steps
    del users.grad
    assert users.grad is None
    assert [p.requires_grad for p in model.parameters()] == [True] * 4


def test_two_optimizers_of_two_parts():
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = Model()
        if ours:
            model = embed.distributed_model(model)
        first = torch.optim.SGD(model.users.parameters(), 0.02)
        second = torch.optim.Adagrad([*model.items.parameters(), *model.dense.parameters()], 0.1)
        if ours:
            embed.distributed_optimizer(first, model.users)
            embed.distributed_optimizer(second, model.items)
            embed.distributed_optimizer(second, model.items)  # again changes nothing
        for step in range(4):
            loss(model).backward()
            if step % 2:
                first.step()
                first.zero_grad()
            clip_grad_norm_(model.parameters(), 0.1)
            second.step()
            second.zero_grad()
        found.append(outputs(model))
    for stock, rows in zip(*found, strict=True):
        torch.testing.assert_close(rows, stock, atol=1e-6, rtol=1e-5)


def test_one_optimizer_over_two_models():
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        models = [Model(), Model()]
        if ours:
            client = Client.in_process()
            models = [
                embed.distributed_model(model, client, name_prefix=f"{i}.") for i, model in enumerate(models)
            ]
        optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], 0.02)
        for model in models if ours else ():
            embed.distributed_optimizer(optimizer, model)
        for _ in range(3):
            optimizer.zero_grad()
            sum(loss(model) for model in models).backward()
            clip_grad_norm_(models[0].parameters(), 0.1)
            optimizer.step()
        found.append(outputs(models[0]) + outputs(models[1]))
    for stock, rows in zip(*found, strict=True):
        torch.testing.assert_close(rows, stock, atol=1e-6, rtol=1e-5)


def test_a_step_that_fails_hides_nothing():
    model, optimizer = made(OPTIMIZERS["SGD"], True)
    before = outputs(model)
    (loss(model) * torch.nan).backward()
    with pytest.raises(GradientError):
        optimizer.step()
    assert model.users.anchor.grad.isnan().all()
    optimizer.zero_grad()
    torch.testing.assert_close(outputs(model)[:2], before[:2], rtol=0, atol=0)

    def fails():
        raise KeyError

    loss(model).backward()
    with pytest.raises(KeyError):
        optimizer.step(fails)
    assert model.users.anchor.grad is not None


def test_lookups_live_as_long_as_their_graph():
    model, optimizer = made(OPTIMIZERS["SGD"], True)
    gc.disable()
    try:
        found = model.items(IDS)
        kept = weakref.ref(found.grad_fn.next_functions[0][0])
        assert kept() is not None
        found.sum().backward()
        pull = weakref.ref(model.items.anchor.parts[0][0].lookups[0].pull)
        optimizer.step()
        del found
        assert kept() is None
        assert pull() is not None  # the gradient stays until zero_grad
        optimizer.zero_grad()
        assert pull() is None
    finally:
        gc.enable()


MATHEMATICS = {
    "mul": lambda p: p * 2,
    "sub": lambda p: 2 - p,
    "mul_": lambda p: p.mul_(0.9),
    "add_": lambda p: torch.zeros(0).add_(p),
    "cat": lambda p: torch.cat([torch.ones(2), p]),
    "_foreach_norm": lambda p: torch._foreach_norm([torch.ones(2), p]),
    "view": lambda p: parameters_to_vector([p]),
    "abs": lambda p: p.detach().abs(),
    "add": lambda p: torch.add(p.data, 1),
    "uniform_": lambda p: torch.nn.init.uniform_(p.to(torch.float64)),
    "isfinite": lambda p: torch.isfinite(p).all(),
}


@pytest.mark.parametrize("name", MATHEMATICS)
def test_mathematics_on_the_parameter_are_refused_by_name(name):
    model, _ = made(OPTIMIZERS["SGD"], True)
    with pytest.raises(
        RuntimeError,
        match=rf"torch's \w*{name}\w* cannot use the parameter of table 'users', whose rows are on parameter "
        "servers: for L2 set the optimizer's weight_decay",
    ):
        MATHEMATICS[name](next(model.users.parameters()))


@pytest.mark.parametrize("kind", ["norm", "pow", "square", "abs"])
def test_penalties_on_all_parameters_are_those_of_stock_layers(kind):
    """Of all rows, also those of no batch: as SASRec and FuxiCTR do."""
    penalty = {
        "norm": lambda p: torch.norm(p, 2) ** 2,
        "pow": lambda p: (p**2).sum(),
        "square": lambda p: torch.square(p).sum(),
        "abs": lambda p: p.abs().sum(),
    }[kind]
    states = []
    for on_servers in (False, True):
        model, optimizer = made(lambda parameters: torch.optim.Adam(parameters, 0.02), on_servers)
        for _ in range(5):
            optimizer.zero_grad()
            (loss(model) + 0.1 * sum(map(penalty, model.parameters()))).backward()
            optimizer.step()
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-5, atol=1e-6)


def test_weights_that_a_model_keeps_in_lists_become_the_rows():
    """As DeepCTR-Torch's models do, for L2."""

    class Penalized(Model):
        def __init__(self):
            super().__init__()
            self.penalized = [(list(self.parameters()), 0.1)]
            self.others = {"users": self.users.weight}

    penalized = Penalized()
    first = penalized.users.weight.detach().clone()
    model = embed.distributed_model(penalized)
    embed.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    held = [one for one in model.penalized[0][0] if isinstance(one, embed.Rows)]
    assert len(held) == 2
    assert torch.equal(model.others["users"].clone(), first)


def test_a_gradient_of_unknown_rows_is_refused():
    model, _ = made(OPTIMIZERS["SGD"], True)
    parameter = next(model.users.parameters())
    loss(model).backward()
    with pytest.raises(
        ValueError, match=r"rows of table 'users' has shape \(7, 4\), and which rows it is of"
    ):
        parameter.grad = torch.zeros(7, 4)
    parameter.grad = None
    with pytest.raises(ValueError, match="which rows it is of is unknown: change"):
        parameter.grad = torch.zeros(3, 4)
    with pytest.raises(TypeError, match="is_grads_batched"):
        torch.autograd.grad(model(IDS)[:, 0], parameter, torch.eye(4), is_grads_batched=True)


def test_workers_of_another_launcher_cannot_read_gradients():
    torch.manual_seed(0)
    model = embed.distributed_model(Model())
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    embed.distributed_optimizer(optimizer, model, workers=2)
    for _ in range(2):
        optimizer.zero_grad()  # nothing to exchange
        loss(model).backward()
        optimizer.step()
    loss(model).backward()
    with pytest.raises(RuntimeError, match=r"read with 2 workers, but torch\.distributed is not initialised"):
        clip_grad_norm_(model.parameters(), 0.1)


def test_an_optimizer_that_does_not_push_is_refused():
    model, _ = made(OPTIMIZERS["SGD"], True)
    other = torch.optim.SGD(model.parameters(), 0.1)
    loss(model).backward()
    with pytest.raises(
        RuntimeError, match=r"SGD\.step\(\) cannot train the rows of table 'users' .*distributed_optimizer"
    ):
        other.step()


def test_what_describes_moves_and_copies_parameters_works():
    model, optimizer = made(OPTIMIZERS["Adagrad"], True)
    loss(model).backward()
    model.to(torch.device("cpu")).float()
    parameter = next(model.users.parameters())
    assert (parameter.numel(), parameter.dtype, parameter.device.type) == (0, torch.float32, "cpu")
    assert repr(parameter) == "<rows of table 'users' on parameter servers>"
    for other in (copy.deepcopy(parameter), torch.load(pickled(parameter), weights_only=False)):
        assert type(other) is type(parameter)
        assert other.requires_grad
        assert other.grad is None
    torch.load(pickled(model.state_dict()), weights_only=True)
    torch.load(pickled(optimizer.state_dict()), weights_only=True)
    optimizer.load_state_dict(optimizer.state_dict())
    assert parameter.grad is not None


def pickled(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


FAULTS = """
import resource
import sys
import numpy as np
from oe_runtime.torch.optimizer import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
for step in range(20):
    if step == 10:
        begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(8 << 20, np.uint8) for _ in range(3)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin)
"""


@pytest.mark.process
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")
def test_a_step_takes_the_memory_that_the_last_one_freed():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    faults = {
        kind: int(subprocess.check_output([sys.executable, "-c", FAULTS, kind], text=True, env=environment))
        for kind in ("kept", "default")
    }
    assert faults["kept"] * 10 < faults["default"]


@pytest.mark.process
def test_two_workers_read_the_mean_of_all_gradients(tmp_path):
    servers = Servers(tmp_path, 2)
    try:
        command = [
            sys.executable,
            str(Path(__file__).with_name("torch_gradient_worker.py")),
            str(tmp_path),
            json.dumps(servers.endpoints),
        ]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        workers = [
            subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True, env=environment)
            for rank in range(2)
        ]
        said = [worker.communicate(timeout=240)[1] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], said
    finally:
        servers.end()


def test_gradients_of_other_rows_are_not_added_though_they_are_as_many():
    model = embed.distributed_model(Model(), Client.in_process())
    optimizer = embed.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    ids, others = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[10, 11], [12, 13]])
    parameter = next(model.users.parameters())

    def gradient_of(some):
        optimizer.zero_grad()
        loss(model, some).backward()
        return parameter.grad.clone()

    first, same, other = gradient_of(ids), gradient_of(ids), gradient_of(others)
    assert torch.equal(first, same)
    assert torch.equal(copy.deepcopy(first) + same, 2 * first)  # of the same rows
    for combine in (lambda: other.add_(first), lambda: first + other, lambda: parameter.grad.copy_(first)):
        with pytest.raises(ValueError, match="gradients of different rows on parameter servers"):
            combine()
    parameter.grad = first * 0.5  # which says of which rows it is
    assert parameter.grad_keys.tolist() == [1, 3]
    assert float(clip_grad_norm_(model.parameters(), 1e9)) > 0


def test_parameters_have_two_dimensions_and_refuse_initializers():
    """Programs choose weights for decay or a start by their number of dimensions."""
    model = embed.distributed_model(Model(), Client.in_process())
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    assert [len(decayed), len(plain)] == [3, 1]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": plain, "weight_decay": 0.0}]
    embed.distributed_optimizer(torch.optim.SGD(groups, 0.1), model)
    assert model.users.table.spec.optimizer["weight_decay"] == 0.5
    with pytest.raises(RuntimeError, match="uniform_ cannot use the parameter of table 'users'"):
        torch.nn.init.xavier_uniform_(next(model.users.parameters()))


def test_backward_passes_without_a_step_do_not_keep_all_batches():
    model = embed.distributed_model(Model(), Client.in_process())
    embed.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for number in range(100):
        loss(model, torch.tensor([[number % 70 + 6, 1], [7, 8]])).backward()
    assert len(next(model.users.parameters()).parts) <= 33
