"""Train a model of DeepCTR-Torch as a job: its own `fit` keeps the loop.

<!-- needs: torch deepctr_torch -->

Run by itself, in this process:

    python examples/pytorch_deepctr_job.py

Run as a job, here with its rows in the process too; --servers names parameter servers:

    python -m oe_runtime.train --script examples/pytorch_deepctr_job.py --in-process --run-dir run
"""

from clicks import ITEMS, USERS, clicks
from deepctr_torch.callbacks import EarlyStopping
from deepctr_torch.inputs import SparseFeat
from deepctr_torch.models import DeepFM

import oe_runtime.job as job
import oe_runtime.torch as embed

EPOCHS = 3
inputs, labels = clicks(20_000)
columns = [SparseFeat("user", USERS, embedding_dim=16), SparseFeat("item", ITEMS, embedding_dim=16)]
model = DeepFM(columns, columns, l2_reg_linear=0, l2_reg_embedding=0)  # others read all rows in each step
model = embed.distributed_model(model, job.client())  # 1
model.compile("adagrad", "binary_crossentropy", metrics=["auc"])
embed.distributed_optimizer(model.optim, model)  # 2
stopping = EarlyStopping("val_auc", patience=1)


def fit(first: int) -> None:
    """Train the epochs that are left."""
    model.fit(
        inputs,
        labels,
        batch_size=500,
        epochs=EPOCHS,
        initial_epoch=first,
        validation_split=0.1,
        callbacks=[stopping],
        verbose=2,
    )


with job.training(model, model.optim, stopping=stopping) as loop:  # 3
    loop.fit(fit, EPOCHS)
