"""FBGEMM's table-batched embeddings on the CPU, driven by lines on standard input (contenders.py).

python fbgemm.py '{"dim": 16, "rows": 1000000, "optimizer": "adagrad"}'

One id a bag and one feature, which is faster here than 26 features of one table. Its rows are an array:
ids are row numbers below `rows`. "rowwise" is the Adagrad that FBGEMM has a kernel of its own for, with one
sum a row.
"""

import json
import sys
import time

import fbgemm_gpu  # noqa: F401
import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    OptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
)

OPTIMIZERS = {
    "adagrad": OptimType.EXACT_ADAGRAD,
    "rowwise": OptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": OptimType.ADAM,
}


def main() -> None:
    """Make the table, then answer lines."""
    asked = json.loads(sys.argv[1])
    dim = asked["dim"]
    try:
        table = SplitTableBatchedEmbeddingBagsCodegen(
            [(asked["rows"], dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=OPTIMIZERS[asked["optimizer"]],
            learning_rate=0.01,
            pooling_mode=PoolingMode.SUM,
        )
    except (AssertionError, NotImplementedError, ValueError) as error:
        sys.exit(str(error))
    table.init_embedding_weights_uniform(-0.05, 0.05)
    print("ready", flush=True)
    for line in sys.stdin:
        file, size = line.split()
        batch = int(size)
        offsets = torch.arange(batch + 1)
        gradient = torch.full((batch, dim), 0.01)
        times = []
        for ids in np.fromfile(file, np.int64).reshape(-1, batch):
            indices = torch.from_numpy(ids)
            start = time.perf_counter()
            out = table(indices, offsets)
            middle = time.perf_counter()
            out.backward(gradient)
            times += [middle - start, time.perf_counter() - middle]
        print(*times, flush=True)


if __name__ == "__main__":
    main()
