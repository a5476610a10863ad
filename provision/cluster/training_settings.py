"""Inventory variables of the training job: ``training_*``; see ``provision.cluster.settings``."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from provision.cluster.setting_types import Settings, Switch, Text

_WIDTHS = r"^[1-9]\d*(,[1-9]\d*)*$"


class TrainingSettings(Settings):
    """The training job; the same for all hosts, so set these under all: vars:."""

    prefix: ClassVar[str] = "training_"
    model: Literal["deepfm", "dlrm", "wdl", "xdeepfm"] = Field(
        default="deepfm", description="Model to train."
    )
    data: Text = Field(
        default="",
        description="Rows in Criteo's shape: a file, directory or glob of .tsv, .csv (also .gz, .zst), "
        ".parquet or .tfrecord; or generate:ROWS or generate:ROWS:SEED.",
    )
    max_bad_rows: int = Field(
        default=0,
        ge=0,
        description="Broken rows of a pass over the data that are left out, and said; 0: the first one is an "
        "error.",
    )
    dim: int = Field(default=9, ge=1, le=4096, description="Width of an embedding.")
    batch_size: int = Field(default=4096, ge=1, description="Rows of a step, of all workers together.")
    epochs: int = Field(
        default=1, ge=0, description="Passes over the data; 0: as many as training_steps takes."
    )
    steps: int = Field(default=0, ge=0, description="Stop after so many steps; 0: at the end of the epochs.")
    hidden: Text = Field(
        default="256,128",
        pattern=_WIDTHS,
        description="Widths of the layers of the deep part, of DLRM's top.",
    )
    cin: Text = Field(
        default="64,64",
        pattern=_WIDTHS,
        description="xdeepfm: feature maps of the layers of its interaction network.",
    )
    bottom: Text = Field(
        default="512,256,64",
        pattern=_WIDTHS,
        description="dlrm: widths of the layers over the integers, before one of width training_dim.",
    )
    interaction: Literal["dot", "cat"] = Field(
        default="dot", description="dlrm: inner products of all pairs of fields (dot), or none (cat)."
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Of the hidden layers' products; with bfloat16, weights stay in float32.",
    )
    row_precision: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Of the tables' rows; bfloat16 halves their memory, the optimizer's state stays float32.",
    )
    index: Literal["array", "hash"] = Field(
        default="array",
        description="Tables with a row for each of a field's ids (array), or for any 64-bit id, made when it "
        "is first trained (hash).",
    )
    admission: Text = Field(
        default="",
        description="With training_index hash, only ids that came so often get a row: "
        "counter:TIMES[:MOST_IDS] or cbf:TIMES[:MOST_IDS[:PROBABILITY]]; default: all do.",
    )
    eviction: Text = Field(
        default="",
        description="Rows that go: global_step:STEPS[:EVERY], l2_weight:THRESHOLD[:EVERY], "
        "ttl:SECONDS[:EVERY], cap:ROWS[:lru|lfu], several with commas; default: none.",
    )
    jit: bool = Field(default=False, description="Let XLA fuse the operations of a step.")
    device: Literal["auto", "cpu", "gpu"] = Field(
        default="auto",
        description="Where the model computes; gpu: refuse to train where TensorFlow finds none; auto: gpu "
        "on hosts of kind gpu, elsewhere a GPU if there is one.",
    )
    micro_batch: int = Field(
        default=1,
        ge=1,
        description="Parts in which a worker computes its part of a batch, one after the other, before one "
        "update: less memory, the same results within floating point.",
    )
    pipeline: bool = Field(
        default=True, description="Pull the rows of the next batch while one computes; the results are equal."
    )
    workqueue: bool = Field(
        default=False,
        description="Workers do not wait for each other: each takes ranges of the files from a queue in the "
        "job's directory (so all on one host, or on Kubernetes), each row once an epoch. "
        "training_batch_size is then of each worker.",
    )
    staleness: int | None = Field(
        default=None,
        ge=0,
        description="With training_workqueue, wait for workers that are more steps behind (default: for "
        "none). Without, of one worker: 1 lets a push go out while the next batch computes (default 0).",
    )
    optimizer: Literal[
        "adadelta",
        "adagrad",
        "adagraddecay",
        "adam",
        "adamasync",
        "adamax",
        "adamw",
        "amsgrad",
        "ftrl",
        "lion",
        "momentum",
        "nadam",
        "rmsprop",
        "sgd",
    ] = Field(default="adagrad", description="Optimizer.")
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        description="Learning rate. Default: the trainer's for the optimizer (adam 0.001, lion 0.0001, "
        "adadelta 1.0, adagrad 0.05, …); flavor deeprec: its script's.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of all that is random.")
    max_cardinality: int = Field(
        default=0,
        ge=0,
        description="At most so many distinct ids a categorical field; 0: the full cardinalities.",
    )
    holdout: float = Field(default=0.1, ge=0, lt=1, description="Part of the rows kept for evaluation.")
    tls: Switch = Field(
        default="auto",
        description="Encrypt the connections between workers and servers; auto: unless all servers listen on "
        "loopback.",
    )
    checkpoint_steps: int = Field(
        default=1000, ge=0, description="Steps between checkpoints; 0: only at the end."
    )
    keep_checkpoints: int = Field(
        default=3, ge=1, le=64, description="How many of the newest checkpoints are kept."
    )
    checkpoint_rows: Literal["auto", "pool", "files"] = Field(
        default="auto",
        description="Where checkpoints have their rows: in the servers' persistent memory, which stops "
        "nothing (pool), or in files of the job's directory (files); auto: pool with storage pmem_libpmem "
        "and dram_pmem. The last one of a finished job has files.",
    )
    export_checkpoints: int = Field(
        default=0,
        ge=0,
        description="With rows of checkpoints in persistent memory, every so many have them in files all the "
        "same; 0: none but the last.",
    )
    checkpoint_increments: int = Field(
        default=0,
        ge=0,
        description="With rows of checkpoints in files: after one with all rows, so many with only those "
        "that changed since the one before. What they build on is kept. 0: all have all rows.",
    )
    server_wait: int = Field(
        default=300,
        ge=0,
        description="Seconds to wait for a lost server to restart, or for a lost worker's host to answer (at "
        "least 20), before training goes on from the last checkpoint. 0: a lost server ends the job.",
    )
    worker_wait: int = Field(
        default=600,
        ge=1,
        description="Seconds that workers wait for one that does not come or is busy, as with a checkpoint.",
    )
    on_worker_lost: Literal["stop", "continue"] = Field(
        default="stop",
        description="When one of several workers is killed or its host is lost: stop, or go on with the "
        "rest, unless training_restarts starts it again. Workers of a queue (training_workqueue) go on where "
        "they are, with its ranges too; others start again from the last checkpoint, with its part of every "
        "batch. Checkpoints are on worker 0's host. (On Kubernetes lost workers are always started again.)",
    )
    restarts: int = Field(
        default=0,
        ge=0,
        description="How often a job of several workers starts them again, from the last checkpoint, when "
        "one was killed, or a server lost that did not come back in time.",
    )
    timeline: int = Field(
        default=0,
        ge=0,
        description="Every so many steps, one is traced by TensorFlow's profiler, for TensorBoard; 0: none.",
    )
    export: bool = Field(
        default=True, description="Export the trained model as a SavedModel in the job directory."
    )
