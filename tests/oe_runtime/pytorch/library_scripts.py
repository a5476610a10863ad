"""Programs of libraries whose functions hold the loop, and the lines that make them jobs."""

from __future__ import annotations

from pathlib import Path

CRITEO = Path(__file__).parents[1] / "data/criteo_200.tsv"
_HEAD = """
import os, signal
import numpy as np
import torch

torch.set_num_threads(1)
torch.manual_seed(1)
ids = np.random.default_rng(0).integers(0, 300, (640, 2))
labels = (ids[:, 0] % 3 == 0).astype("float32")[:, None]
data = torch.utils.data.TensorDataset(torch.from_numpy(ids), torch.from_numpy(labels))
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
valid = torch.utils.data.DataLoader(data, batch_size=100)
"""
_MODEL = """
    def __init__(self):
        super().__init__()
        self.users, self.items = torch.nn.Embedding(300, 4), torch.nn.Embedding(300, 4)
        self.dense = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def forward(self, ids):
        return self.dense(torch.cat([self.users(ids[:, 0]), self.items(ids[:, 1])], 1))
"""

# 8 steps an epoch on real rows, with validation, early stopping, dropout, and L2 of all weights.
DEEPCTR = (
    f"""
import os, signal
import numpy as np
import torch
from deepctr_torch.callbacks import EarlyStopping
from deepctr_torch.inputs import DenseFeat, SparseFeat
from deepctr_torch.models import DeepFM

torch.set_num_threads(1)
rows = [line.rstrip("\\n").split("\\t") for line in open({str(CRITEO)!r})]
labels = np.array([float(row[0]) for row in rows], "float32")
inputs = {{f"I{{i}}": np.array([float(row[i] or 0) for row in rows], "float32") ** 0.25 for i in (2, 5)}}
inputs["I2"] = np.nan_to_num(inputs["I2"])
"""
    """
for i in range(14, 40):
    inputs[f"C{i}"] = np.array([int(row[i] or "0", 16) % 200 for row in rows])
columns = [SparseFeat(f"C{i}", 200, embedding_dim=4) for i in range(14, 40)]
columns += [DenseFeat(name, 1) for name in ("I2", "I5")]
model = DeepFM(columns, columns, dnn_dropout=0.2, l2_reg_embedding=1e-3, l2_reg_linear=1e-3)
model.compile("adam", "binary_crossentropy", metrics=["auc"])
stopping = EarlyStopping("val_auc", patience=2)
"""
)
DEEPCTR_FIT = """
model.fit(
    inputs, labels, batch_size=20, epochs=3, verbose=0, validation_split=0.2, callbacks=[stopping]
)
"""
DEEPCTR_JOB = """
from oe_runtime import job, torch as embed

model = embed.distributed_model(model, job.client())
model.compile("adam", "binary_crossentropy", metrics=["auc"])
optimizer = embed.distributed_optimizer(model.optim, model)
with job.training(model, optimizer, stopping=stopping) as loop:
    fit = lambda first: model.fit(
        inputs, labels, batch_size=20, epochs=3, verbose=0, validation_split=0.2, callbacks=[stopping],
        initial_epoch=first,
    )
    # train
    loop.fit(fit, epochs=3)
"""

# DeepFM of FuxiCTR's model zoo; it clips gradients, evaluates in the middle of epochs, and loads the best.
FUXICTR = (
    _HEAD
    + """
import sys, unittest.mock

for name in ("ray", "ray.data", "ray.data.datasource", "ray.data.datasource.filename_provider"):
    sys.modules.setdefault(name, unittest.mock.MagicMock())  # for preparing data, which this does not
from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import FactorizationMachine, FeatureEmbedding, MLP_Block
from fuxictr.pytorch.models import BaseModel

features = FeatureMap("clicks", os.environ["MODELS"])
os.makedirs(os.path.join(features.data_dir, "clicks"), exist_ok=True)
for name in ("user", "item"):
    features.features[name] = {"source": "", "type": "categorical", "vocab_size": 300}
features.labels, features.num_fields = ["label"], 2


class DeepFM(BaseModel):
    def __init__(self):
        super().__init__(
            features, model_root=features.data_dir, metrics=["AUC"], verbose=0, eval_steps=13,
            embedding_regularizer=1e-4, net_regularizer=1e-5, early_stop_patience=9,
        )
        self.embedding_layer = FeatureEmbedding(features, 4)
        self.fm = FactorizationMachine(features)
        self.mlp = MLP_Block(
            input_dim=8, output_dim=1, hidden_units=[8], dropout_rates=0.2, batch_norm=True
        )
        self.compile("adam", "binary_crossentropy", 0.02)
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs):
        X = self.get_inputs(inputs)
        rows = self.embedding_layer(X)
        scores = self.fm(X, rows) + self.mlp(rows.flatten(start_dim=1))
        return {"y_pred": self.output_activation(scores)}


def by_column(rows):
    ids, labels = torch.utils.data.default_collate(rows)
    return {"user": ids[:, 0], "item": ids[:, 1], "label": labels[:, 0]}


loader.collate_fn = valid.collate_fn = by_column
model = DeepFM()
"""
)
FUXICTR_FIT = """
model.fit(loader, epochs=3, validation_data=valid, max_gradient_norm=0.05)
"""
FUXICTR_JOB = """
from oe_runtime import job, torch as embed

model = embed.distributed_model(model, job.client())
model.compile("adam", "binary_crossentropy", 0.02)
optimizer = embed.distributed_optimizer(model.optimizer, model)
with job.training(model, optimizer) as loop:
    fit = lambda first: model.fit(loader, epochs=3 - first, validation_data=valid, max_gradient_norm=0.05)
    # train
    loop.fit(fit, epochs=3)
"""

# 20 batches an epoch in 7 steps, of three batches and of two; a scheduler, clipped gradients, validation.
LIGHTNING = (
    _HEAD + f"""
import logging
import pytorch_lightning as lightning

logging.getLogger("pytorch_lightning").setLevel("ERROR")


class Model(lightning.LightningModule):
{_MODEL}"""
    """
    def loss(self, batch):
        return torch.nn.functional.binary_cross_entropy_with_logits(self(batch[0]), batch[1])

    def training_step(self, batch, _):
        return self.loss(batch)

    def validation_step(self, batch, _):
        self.log("loss", self.loss(batch))

    def configure_optimizers(self):
        return [self.optimizer], [self.scheduler]


model = Model()
trainer = lightning.Trainer(
    max_epochs=3, accumulate_grad_batches=3, gradient_clip_val=0.5, check_val_every_n_epoch=2,
    accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
"""
)
LIGHTNING_FIT = """
model.optimizer = torch.optim.Adagrad(model.parameters(), 0.02)
model.scheduler = torch.optim.lr_scheduler.ExponentialLR(model.optimizer, 0.7)
trainer.fit(model, loader, valid)
"""
LIGHTNING_JOB = """
from oe_runtime import job, torch as embed

model = embed.distributed_model(model, job.client())
optimizer = embed.distributed_optimizer(torch.optim.Adagrad(model.parameters(), 0.02), model)
model.optimizer = optimizer
model.scheduler = torch.optim.lr_scheduler.ExponentialLR(model.optimizer, 0.7)
with job.training(model, optimizer, loops=trainer.fit_loop, scheduler=model.scheduler) as loop:
    fit = lambda _: trainer.fit(model, loader, valid)
    # train
    loop.fit(fit, epochs=3)
"""

# The program has the loop, and Accelerate the accumulation: 20 batches an epoch in 7 steps.
ACCELERATE = (
    _HEAD
    + f"""
from accelerate import Accelerator


class Model(torch.nn.Module):
{_MODEL}

model = Model()
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
"""
)
_STEP = """    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
"""
ACCELERATE_FIT = f"""
optimizer = torch.optim.Adagrad(model.parameters(), 0.02)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
{_STEP}"""
_ACCELERATE_JOB = """
from oe_runtime import job, torch as embed

model = embed.distributed_model(model, job.client())
optimizer = embed.distributed_optimizer(torch.optim.Adagrad(model.parameters(), 0.02), model)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""
_INDENTED = "".join(f"    {line}\n" for line in _STEP.splitlines()).replace(
    "in loader:", "in loop.batches(loader):"
)
ACCELERATE_JOB = f"""{_ACCELERATE_JOB}
with job.training(model, optimizer) as loop:
    # train
    for epoch in loop.epochs(3):
{_INDENTED}            job.step(loss=loss)
"""
# The same loop in a function, whose DataLoader of Accelerate reads a batch ahead.
ACCELERATE_FUNCTION = f"""{_ACCELERATE_JOB}

def train(first):
  for epoch in range(first, 3):
{_STEP}

with job.training(model, optimizer) as loop:
    # train
    loop.fit(train, epochs=3)
"""

# Lets a run stop after the steps of its arguments: by a signal, or killed.
STOP = """
stops = [int(one) for one in job.arguments]


def stop(*_):
    step = loop.step_number + 1
    if abs(step) in map(abs, stops) and step > job.resume_step:
        os.kill(os.getpid(), signal.SIGTERM if step in stops else signal.SIGKILL)


getattr(optimizer, "optimizer", optimizer).register_step_post_hook(stop)
"""


def as_job(program: str, lines: str) -> str:
    """Return a program as a job that stops where its arguments say."""
    before, _, after = lines.partition("    # train\n")
    indented = "".join(f"    {line}\n" if line else "\n" for line in STOP.splitlines())
    return program + before + indented + after


PROGRAMS = {
    "deepctr_torch": (DEEPCTR, DEEPCTR_FIT, DEEPCTR_JOB, 24),
    "fuxictr": (FUXICTR, FUXICTR_FIT, FUXICTR_JOB, 60),
    "pytorch_lightning": (LIGHTNING, LIGHTNING_FIT, LIGHTNING_JOB, 21),
    "accelerate": (ACCELERATE, ACCELERATE_FIT, ACCELERATE_JOB, 21),
    "accelerate.function": (ACCELERATE, ACCELERATE_FIT, ACCELERATE_FUNCTION, 21),
}
