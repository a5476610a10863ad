"""Training beside stock Keras and OpenEmbedding: speed, memory, AUC, and where a step's time goes.

    python benchmarks/training                     # all of it: hours on 2 cores
    python benchmarks/training vocabularies --models wdl --rows 40000     # or a part; each has a --help
    python benchmarks/training vocabularies --report                      # what was measured so far

vocabularies  WDL, DeepFM, DLRM at dims 9 and 64 and 40 k to 10 M ids a field, in float32 and bfloat16:
              samples/s and memory of stock Keras, of embeddings on a server, of OpenEmbedding; AUC of all
auc           of the held-out rows over seeds: stock, stock that updates rows as tables do, served
pipeline      input, pull, compute and push of a step, and what the pipeline hides
checkpoints   what a checkpoint every so many steps costs, with rows on persistent memory
drive         rows on a drive (dram_ssd) beside rows in memory, step by step
workers       1 and 2 workers on 2 cores; on paper, up to 16 with 8 servers
torch         PyTorch's sparse Embedding and EmbeddingBag beside ours (pip install torch);
              --turns: processor time of a step, beside FBGEMM's tables too
schemas       Avazu's columns and two more schemas, beside stock Keras
job           a script with JobCallback beside the built-in model, step by step
serving       latency and lookups/s of exports with rows inside, and of rows at a server
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import auc
import checkpoints
import drive
import job
import pipeline
import pytorch
import schemas
import serving
import vocabularies
import workers

PARTS = {
    "vocabularies": vocabularies.main,
    "auc": auc.main,
    "pipeline": pipeline.main,
    "checkpoints": checkpoints.main,
    "drive": drive.main,
    "workers": workers.main,
    "torch": pytorch.main,
    "schemas": schemas.main,
    "job": job.main,
    "serving": serving.main,
}


def main() -> int:
    """Run a part, or all; 0 when no target is missed."""
    program, *words = sys.argv
    if words and words[0] not in PARTS:
        print(__doc__)
        return 0 if words[0] in ("-h", "--help") else 2
    status = 0
    for name in words[:1] or PARTS:
        sys.argv = [f"{program} {name}", *words[1:]]
        status = max(status, PARTS[name]())
    return status


if __name__ == "__main__":
    sys.exit(main())
