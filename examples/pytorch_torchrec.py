"""Train DLRM by TorchRec alone. pytorch_torchrec_moved.py is the same program with its tables on our servers.

<!-- needs: torchrec -->

Run it in one process; more of them share the tables:

    torchrun --standalone --log-dir logs --nproc-per-node 1 examples/pytorch_torchrec.py
"""

import contextlib

import torch
from clicks import SIZES, impressions
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

BATCH, DIM, EPOCHS = 512, 16, 2


def set_first_rows(rows: torch.Tensor) -> None:
    """The same rows in each run, whatever drew random numbers before."""
    nn.init.uniform_(rows, -0.1, 0.1, generator=torch.Generator().manual_seed(len(rows)))


def collate(examples: list[tuple]) -> Batch:
    """Lay out a batch: the lists of ids of the first feature for all examples, then those of the next."""
    numbers, *lists, labels = zip(*examples, strict=True)
    ids = [torch.from_numpy(one) for of_feature in lists for one in of_feature]
    lengths = torch.tensor([len(one) for one in ids])
    features = KeyedJaggedTensor(list(SIZES), torch.cat(ids), lengths=lengths)
    return Batch(torch.tensor(numbers), features, torch.tensor(labels))


distributed.init_process_group("gloo")
rank, workers = distributed.get_rank(), distributed.get_world_size()
torch.manual_seed(0)
device = torch.device("cpu")
numbers, lists, labels = impressions(20_000)
data = list(zip(numbers.tolist(), *lists.values(), labels.tolist(), strict=True))
sampler = DistributedSampler(data, workers, rank)  # this worker's part of the data
loader = DataLoader(data, BATCH // workers, sampler=sampler, collate_fn=collate, num_workers=1)

tables = [
    EmbeddingBagConfig(
        name=f"t_{name}", num_embeddings=size, embedding_dim=DIM, feature_names=[name], init_fn=set_first_rows
    )
    for name, size in SIZES.items()
]
bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
model = DLRMTrain(DLRM(bags, 4, [32, DIM], [64, 1]))
apply_optimizer_in_backward(RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": 0.05})
model = DistributedModelParallel(model, device=device)
dense = KeyedOptimizerWrapper(
    dict(in_backward_optimizer_filter(model.named_parameters())),
    lambda parameters: torch.optim.Adagrad(parameters, 0.02),
)
optimizer = CombinedOptimizer([model.fused_optimizer, dense])
pipeline = TrainPipelineSparseDist(model, optimizer, device)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)  # another order
    batches, losses = iter(loader), []
    with contextlib.suppress(StopIteration):
        while True:
            loss, _logits, _labels = pipeline.progress(batches)
            losses.append(loss.item())
    print(f"worker {rank}, epoch {epoch + 1}: mean loss {sum(losses) / len(losses):.6f}", flush=True)
distributed.destroy_process_group()
