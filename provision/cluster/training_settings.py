"""Inventory variables of the training job: ``training_*``; see ``provision.cluster.settings``.

The trainer decides a setting whose default is ``None``: unset, it is not passed on. Two files are generated
from the trainer: ``trainer_defaults.json`` has what it then takes, to be shown and for the trainers of other
flavors, and ``trainer_optimizers.json`` its optimizers.
"""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from provision.cluster.setting_types import Flag, Scope, Settings, Switch, Text

_WIDTHS = r"^[1-9]\d*(,[1-9]\d*)*$"
# A script of the user's own decides the settings of models itself: beside it they are refused.
# Settings of the rows are for scripts that read by job.batches; the trainer refuses them for others.
_MODEL, _ROWS = Scope("model"), Scope("rows")
TRAINER_DEFAULTS = Path(__file__).with_name("trainer_defaults.json")
Precision = Literal["float32", "bfloat16"]
TRAINER_OPTIMIZERS = Path(__file__).with_name("trainer_optimizers.json")
# Of each optimizer, the numbers of its state per weight and per row.
OPTIMIZER_STATES: dict[str, list[int]] = json.loads(TRAINER_OPTIMIZERS.read_text(encoding="utf-8"))
OPTIMIZERS: tuple[str, ...] = tuple(OPTIMIZER_STATES)
if TYPE_CHECKING:
    Optimizer = str
else:
    Optimizer = Literal[OPTIMIZERS]


# A method of this name was the base's in pydantic 1.
warnings.filterwarnings("ignore", 'Field name "schema" in "TrainingSettings" shadows', UserWarning)


class TrainingSettings(Settings):
    """The training job; the same for all hosts, so set these under all: vars:."""

    prefix: ClassVar[str] = "training_"
    model: Annotated[Literal["deepfm", "dlrm", "wdl", "xdeepfm"], Flag(), _MODEL] = Field(
        default="deepfm", description="Model to train."
    )
    script: Annotated[Text, Flag()] = Field(
        default="",
        description="Training script of your own (a .py file) instead of a built-in model. Its directory "
        "travels to workers on other hosts, except what .oeprovignore there names; packages of its "
        "requirements.txt or pyproject.toml get an environment of their own. The script decides model and "
        "optimizer; columns, batch size and length too, unless it reads training_data by job.batches.",
    )
    script_arguments: list[Text] = Field(
        default=[],
        description="Arguments of training_script. On the command line they follow a lone -- at the end.",
    )
    data: Annotated[Text, Flag()] = Field(
        default="",
        description="Rows in Criteo's shape, or training_schema's. A file, directory or glob of .tsv, .csv "
        "(also .gz, .zst), .parquet, .arrow or .tfrecord, or generated ones: generate:ROWS[:SEED]. All but "
        ".tfrecord may lie in a store: s3://, oss://, gs://, hdfs://.",
    )
    follow: Annotated[bool | None, Flag(), _ROWS] = Field(
        default=None,
        description="Train on what arrives in the directory training_data, once, in the order of the files' "
        "names. Rename a complete file into it; names that begin with . or _ or end in .tmp are not read. A "
        "file _END ends the training. For one worker.",
    )
    schema: Annotated[Text | None, Flag(), _ROWS] = Field(  # type: ignore[assignment]
        default=None,
        description="Columns of the rows. criteo, deeprec, avazu, or a YAML file here, which travels with "
        "the job (oeprov data inspect writes one). Unset: criteo.",
    )
    label: Annotated[Text | None, Flag(), _ROWS] = Field(
        default=None, description="Column of the label, 0 or 1. Replaces the schema's."
    )
    categories: Annotated[Text | None, Flag(), _ROWS] = Field(
        default=None,
        description="Columns of categories in place of the schema's, with commas between them: "
        "COLUMN[:IDS]. Values are hashed into so many ids; without a number, into 64 bits, and the table has "
        "a row for each id that comes.",
    )
    numbers: Annotated[Text | None, Flag(), _ROWS] = Field(
        default=None,
        description="Columns of numbers in place of the schema's, with commas between them: COLUMN[:SCALE]. "
        "The scale is log1p (unset), none, min-max:MIN:MAX or standard:MEAN:DEVIATION.",
    )
    max_bad_rows: Annotated[int | None, _ROWS] = Field(
        default=None,
        ge=0,
        description="Malformed rows that a pass over the data may skip and report. 0: the first is an error.",
    )
    dim: Annotated[int | None, Flag(), _MODEL] = Field(
        default=None, ge=1, le=4096, description="Width of an embedding."
    )
    batch_size: Annotated[int | None, Flag(), _ROWS] = Field(
        default=None,
        ge=1,
        description="Rows per step, over all workers; with training_workqueue, per worker.",
    )
    epochs: Annotated[int | None, Flag(), _ROWS] = Field(
        default=None,
        ge=0,
        description="Passes over the data. 0, or unset with training_steps: as many as training_steps takes.",
    )
    steps: Annotated[int | None, Flag(), _ROWS] = Field(
        default=None, ge=0, description="Stop after this many steps in all. 0: at the end of the epochs."
    )
    hidden: Annotated[Text | None, _MODEL] = Field(
        default=None,
        pattern=_WIDTHS,
        description="Widths of the hidden layers of the deep part; for dlrm, of the top.",
    )
    cin: Annotated[Text | None, _MODEL] = Field(
        default=None,
        pattern=_WIDTHS,
        description="xdeepfm: feature maps per layer of the interaction network.",
    )
    bottom: Annotated[Text | None, _MODEL] = Field(
        default=None,
        pattern=_WIDTHS,
        description="dlrm: widths of the layers over the integers, before one of width training_dim.",
    )
    interaction: Annotated[Literal["dot", "cat"] | None, _MODEL] = Field(
        default=None, description="dlrm: inner products of all pairs of fields (dot), or none (cat)."
    )
    precision: Annotated[Precision | None, _MODEL] = Field(
        default=None,
        description="Precision of the hidden layers' products. With bfloat16, weights stay in float32.",
    )
    row_precision: Annotated[Precision | None, _MODEL] = Field(
        default=None,
        description="Precision of the tables' weights in memory. bfloat16 halves them, and rows on their way "
        "to workers of other hosts.",
    )
    state_precision: Annotated[Precision | None, _MODEL] = Field(
        default=None,
        description="Precision of the optimizer's state of rows in memory, such as Adagrad's sums. bfloat16 "
        "halves it; with training_row_precision bfloat16, rows take half of their memory.",
    )
    exchange_precision: Annotated[Precision | None, _MODEL] = Field(
        default=None,
        description="Precision of the gradients of rows on their way to servers of other hosts. "
        "bfloat16 halves them, rounded to nearest.",
    )
    index: Annotated[Literal["array", "hash"] | None, _MODEL] = Field(
        default=None,
        description="How tables find rows. array: a row for each id of a field; hash: a row for any 64-bit "
        "id, made when the id is first trained.",
    )
    admission: Annotated[Text | None, _MODEL] = Field(
        default=None,
        description="With training_index hash: ids get a row only after they came this often. "
        "counter:TIMES[:MOST_IDS] or cbf:TIMES[:MOST_IDS[:PROBABILITY]]. Unset: all ids get one.",
    )
    eviction: Annotated[Text | None, _MODEL] = Field(
        default=None,
        description="Rules by which rows are evicted, with commas between them. global_step:STEPS[:EVERY], "
        "l2_weight:THRESHOLD[:EVERY], ttl:SECONDS[:EVERY], cap:ROWS[:lru|lfu]. Unset: no row is evicted.",
    )
    jit: Annotated[bool | None, _MODEL] = Field(
        default=None, description="Fuse the operations of a step with XLA. The first step takes longer."
    )
    device: Literal["auto", "cpu", "gpu"] = Field(
        default="auto",
        description="Where the model computes. gpu: fail when TensorFlow finds none; auto: a GPU if there is "
        "one; hosts of kind gpu must have one.",
    )
    micro_batch: Annotated[int | None, Flag()] = Field(
        default=None,
        ge=1,
        description="Parts that a worker computes its batch in, one after the other, before one update. "
        "Saves memory; results are the same within floating point.",
    )
    pipeline: Annotated[bool | None, Flag()] = Field(
        default=None,
        description="Pull the rows of the next batch while one computes. Results are the same to the bit.",
    )
    workqueue: Annotated[bool | None, Flag()] = Field(
        default=None,
        description="Train asynchronously: workers take ranges of the files from a queue and wait for no "
        "other. Each row is trained once per epoch. The queue is on the first server.",
    )
    staleness: Annotated[int | None, Flag()] = Field(
        default=None,
        ge=0,
        description="Steps that training may be ahead. With training_workqueue: wait for workers that are "
        "further behind (unset: for none). Without it, for one worker: 1 pushes while the next batch "
        "computes (unset: 0).",
    )
    optimizer: Annotated[Optimizer | None, Flag(), _MODEL] = Field(
        default=None, description="Optimizer of the tables and of the dense weights."
    )
    learning_rate: Annotated[float | None, Flag(), _MODEL] = Field(
        default=None, gt=0, description="Learning rate. Unset: the trainer's default for the optimizer."
    )
    seed: Annotated[int | None, Flag(), _MODEL] = Field(
        default=None, ge=0, description="Seed of everything random. The same seed gives the same losses."
    )
    max_cardinality: Annotated[int | None, Flag(), _ROWS] = Field(
        default=None,
        ge=0,
        description="Limit of distinct ids per categorical field. 0: Criteo's full cardinalities, 10 "
        "million ids in all.",
    )
    holdout: Annotated[float | None, _ROWS] = Field(
        default=None, ge=0, le=0.9, description="Share of the rows held out for the final evaluation."
    )
    eval_data: Annotated[Text | None, Flag()] = Field(
        default=None,
        description="Rows for the evaluation, as training_data, of which none is trained on; or a share of "
        "training_data to hold out, such as 0.05. Unset: training_holdout, or eval.csv of a directory with "
        "train.csv and eval.csv.",
    )
    eval_every: Annotated[int | None, Flag()] = Field(
        default=None,
        ge=0,
        description="Steps between evaluations during training. 0: only one at the end; of a script's fit, "
        "only with training_eval_data.",
    )
    tls: Switch = Field(
        default="auto",
        description="Encrypt connections between workers and servers. auto: unless all servers listen on "
        "loopback.",
    )
    checkpoint_steps: Annotated[int | None, Flag()] = Field(
        default=None,
        ge=0,
        description="Steps between checkpoints, besides those by time. 0: none by steps.",
    )
    checkpoint_minutes: Annotated[int | None, Flag()] = Field(
        default=None,
        ge=0,
        description="Most minutes from one checkpoint to the next. More where they would take more than a "
        "hundredth of the time. 0: none by time. The end of training always has one.",
    )
    keep_checkpoints: int = Field(
        default=3, ge=1, le=64, description="Number of newest checkpoints to keep; servers are told it too."
    )
    checkpoint_rows: Literal["auto", "pool", "files"] | None = Field(
        default=None,
        description="Where a checkpoint has its rows. pool: in the servers' storage, without stopping "
        "training; files: in files of the job's directory; auto: pool with storage pmem_libpmem, dram_pmem "
        "and dram_ssd. The last checkpoint of a finished job has files.",
    )
    export_checkpoints: int | None = Field(
        default=None,
        ge=0,
        description="With rows in persistent memory: export every Nth checkpoint to files. 0: only the last.",
    )
    checkpoint_increments: int | None = Field(
        default=None,
        ge=0,
        description="With rows in files: N incremental checkpoints after each full one. Checkpoints that "
        "later ones build on are kept. 0: each checkpoint is full.",
    )
    upload_to: Annotated[Text | None, Flag()] = Field(
        default=None,
        description="Folder in an object store to upload to: checkpoints in files while training goes on, "
        "export and report at the end. s3://BUCKET/PATH, oss://, gs:// or hdfs://. Each run needs its own.",
    )
    upload_bandwidth: int | None = Field(
        default=None, ge=0, description="Most megabytes per second of uploads. 0: no limit."
    )
    server_wait: int = Field(
        default=300,
        ge=0,
        description="Seconds to wait for a lost server, or for a lost worker's host (at least 20). Then "
        "training goes on from the last checkpoint. 0: a lost server ends the job.",
    )
    worker_wait: int | None = Field(
        default=None,
        ge=1,
        description="Seconds that workers wait for one that is missing or busy, such as with a checkpoint.",
    )
    on_worker_lost: Annotated[Literal["stop", "continue"], Flag()] = Field(
        default="stop",
        description="What to do when one of several workers is lost: stop, or continue with the others. "
        "With training_workqueue the others take over its ranges; without, they restart from the last "
        "checkpoint and share its part of each batch. training_restarts restarts lost workers instead. "
        "Checkpoints are on worker 0's host. On Kubernetes lost workers always restart.",
    )
    restarts: int = Field(
        default=0,
        ge=0,
        description="How often to restart the workers from the last checkpoint. When one of several was "
        "killed, or a lost server did not come back in time.",
    )
    timeline: int | None = Field(
        default=None,
        ge=0,
        description="Trace every Nth step with TensorFlow's profiler, for TensorBoard. 0: none.",
    )
    export: Annotated[bool, Flag(), _MODEL] = Field(
        default=True, description="Export the trained model as a SavedModel to the job's directory."
    )
    export_rows: Annotated[Literal["trained", "int8"] | None, Flag(), _MODEL] = Field(
        default=None,
        description="Rows of the export. trained: as they are. int8: 8-bit integers and a scale for each "
        "row, about a quarter of the size.",
    )

    def decided(self) -> TrainingSettings:
        """These settings with the trainer's defaults in place of unset values."""
        unset = {name: value for name, value in trainer_defaults().items() if getattr(self, name) is None}
        return self.model_copy(update=unset)


MODEL_SETTINGS, ROW_SETTINGS = TrainingSettings.marked(_MODEL), TrainingSettings.marked(_ROWS)


@cache
def trainer_defaults() -> dict[str, Any]:
    """What the trainer takes for settings that are not set, by name."""
    found: dict[str, Any] = json.loads(TRAINER_DEFAULTS.read_text(encoding="utf-8"))
    return found
