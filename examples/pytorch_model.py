"""Train a PyTorch model with its embeddings on a parameter server, export it, and serve the export.

<!-- needs: torch -->

Run:

    python -m oe_runtime.server --port 4400 &
    python examples/pytorch_model.py 127.0.0.1:4400
"""

import sys

import torch
from clicks import ITEMS, USERS, clicks

import oe_runtime.torch as embed
from oe_runtime import Client
from oe_runtime.serving import Model


class ClickModel(torch.nn.Module):
    """An ordinary PyTorch model, except for one line in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.users = torch.nn.Embedding(USERS, 16)
        self.items = torch.nn.Embedding(ITEMS, 16)
        self.dense = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        """The logits of a click."""
        embed.pull({self.users: user, self.items: item})  # one message per server for both layers
        return self.dense(torch.cat([self.users(user), self.items(item)], 1))


inputs, labels = clicks(50_000)
user, item = (torch.from_numpy(inputs[name][:, 0]) for name in ("user", "item"))
label = torch.from_numpy(labels)
with Client(sys.argv[1].split(",")) as client:
    model = embed.distributed_model(ClickModel(), client)
    optimizer = embed.distributed_optimizer(torch.optim.Adagrad(model.parameters(), 0.1), model)
    loss = torch.nn.BCEWithLogitsLoss()
    losses = []
    for start in range(0, len(label), 1000):
        part = slice(start, start + 1000)
        optimizer.zero_grad()
        value = loss(model(user[part], item[part]), label[part])
        value.backward()
        optimizer.step()  # also pushes the rows' gradients
        losses.append(value.item())
    embed.export(model, "export", {"user": user[:8], "item": item[:8]})  # with the rows
    trained = model(user[:8], item[:8]).detach().numpy()
with Model.load("export") as served:  # python -m oe_runtime.serve export answers the same over REST
    answers = served.predict({"user": user[:8].numpy(), "item": item[:8].numpy()})["output_0"]
if abs(answers - trained).max() > 1e-6:
    raise SystemExit("the served model answers differently")
first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
print(f"loss of the first ten batches {first:.3f}, of the last ten {last:.3f}")
if last >= first:
    raise SystemExit("the model has not learned")
