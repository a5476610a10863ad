"""The trainer's command line: what can be set, its defaults, and what is refused before anything starts."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from oe_runtime import models
from oe_runtime.client import TRANSFERS
from oe_runtime.data import is_share, row_schema
from oe_runtime.data.row_schema import CRITEO, Schema
from oe_runtime.data.stream import STDIN
from oe_runtime.errors import DataError
from oe_runtime.models.options import ModelOptions
from oe_runtime.run import policies, worker_options
from oe_runtime.run.optimizers import LEARNING_RATES
from oe_runtime.run.setting_flags import add, add_flags, flag_field, scoped
from oe_runtime.spec import CACHED, DURABLE, STORAGES
from oe_runtime.support.argument_types import count, number, size, widths
from oe_runtime.support.remote_files import InvalidUrl, is_remote

BATCH_SIZE, HOLDOUT = 4096, 0.1
EPOCHS = 1  # where neither --epochs nor --steps says

_EPILOG = """\
examples:
  # a first run on generated data, everything in this process
  python -m oe_runtime.train --data generate:200000 --in-process

  # real data, two embedding servers, a checkpoint every 500 steps
  python -m oe_runtime.train --data 'day_*.gz' --servers 127.0.0.1:7000,127.0.0.1:7001 \\
      --token-file token --run-dir runs/first --checkpoint-steps 500

  # two workers, each started like this with its own --rank
  python -m oe_runtime.train --data 'day_*.gz' --servers 10.0.0.1:7000 --token-file token \\
      --run-dir runs/two --workers 10.0.0.2:7100,10.0.0.3:7100 --rank 0

  # the same by horovodrun, which starts them all
  horovodrun -np 2 -H node1:1,node2:1 python -m oe_runtime.train … --run-dir runs/two

  # a program of your own, which trains through oe_runtime.job
  python -m oe_runtime.train --script train.py --servers 10.0.0.1:7000 --run-dir runs/mine -- --epochs 3

  # go on after an interruption: the same command with --resume
  python -m oe_runtime.train … --run-dir runs/first --resume

The run directory holds config.json, metrics.jsonl (one event per line), tensorboard/, checkpoints/ and, at
the end, report.html (python -m oe_runtime.report DIR writes it at any time) and export/.
docs/deeprec-flags.md has DeepRec's flags and what they are called here.
Exit codes: 0 finished, 1 error, 3 another worker was lost, 130 interrupted (a checkpoint was written;
--resume goes on from it).
"""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What every run is started with: the servers, the workers, the run directory. A field is its flag.

    With `script` a user's program decides the model and the optimizer. The rows and the steps are the
    program's too, unless it reads by job.batches.
    """

    data: str = flag_field(
        "data",
        metavar="PATH|generate:ROWS[:SEED]|-",
        more="A script may do without. - is text from standard input; to resume, send it again from its "
        "first row on.",
    )
    follow: bool = flag_field("data", False)
    schema: Schema = flag_field("data", metavar="FILE|NAME")
    max_bad_rows: int = flag_field("data", 0)
    servers: tuple[str, ...] = flag_field(
        "where", metavar="HOST:PORT,…", help="On parameter servers, in the order of their --index."
    )
    in_process: bool = flag_field("where", action="store_true", help="In this process, by the same C++ core.")
    stock: bool = flag_field("where", action="store_true", help="In the plain Keras model, to compare with.")
    token_file: Path | None = flag_field(
        "data", type=Path, metavar="FILE", help="File with the servers' token."
    )
    tls: str = flag_field("data")
    checkpoint_transfer: str = flag_field(
        "data",
        choices=TRANSFERS,
        default="shared",
        help="How the servers' files of checkpoints get into the run directory. shared: servers on this "
        "machine write them there; wire: servers on other hosts send them, and need --checkpoint-dir. "
        "(default shared)",
    )
    job: str = flag_field(
        "data",
        default="",
        metavar="NAME",
        help="With --servers: name of the tables' owner, where several jobs or models share servers.",
    )
    server_wait: int = flag_field("data", metavar="SECONDS")
    storage: str = flag_field(
        "data", choices=STORAGES, help="With --in-process: kind of memory. (default dram)"
    )
    storage_path: str = flag_field(
        "data", metavar="DIR", help="With --storage pmem_*, dram_pmem and dram_ssd: directory of the rows."
    )
    storage_cache: int = flag_field(
        "data", type=size(), metavar="SIZE", help="With --storage dram_pmem and dram_ssd: DRAM for its cache."
    )
    storage_size: int = flag_field(
        "data", type=size(), metavar="SIZE", help="With --in-process: most memory of the rows."
    )
    storage_recover: bool = flag_field(
        "kept",
        action="store_true",
        help="With --storage-path: open the tables in that directory. Without this and --storage-fresh, a "
        "directory with a checkpoint is refused.",
    )
    storage_fresh: bool = flag_field(
        "kept", action="store_true", help="With --storage-path: remove the tables in that directory."
    )
    workers: tuple[str, ...] = flag_field(
        "workers",
        metavar="HOST:PORT,…",
        help="Where workers listen for each other, in the order of their --rank; goes with --servers. "
        "Not needed under horovodrun (with Gloo), whose rendezvous tells them.",
    )
    rank: int = flag_field(
        "workers",
        type=count(0),
        metavar="N",
        help="Which of --workers this is, from 0. (default: as horovodrun, mpirun, mpiexec or srun say)",
    )
    size: int
    rendezvous: str
    workqueue: bool = flag_field("workers", False, more="Dense weights are on the servers too.")
    on_worker_lost: str = flag_field(
        "workers",
        more="The launcher restarts workers: the trainer itself continues with --workqueue only, and without "
        "worker 0 writes no checkpoints.",
    )
    worker_wait: int = flag_field("workers", 600, metavar="SECONDS")
    generation: int = flag_field(
        "workers",
        type=count(0),
        default=0,
        metavar="N",
        help="Number of this start of the job. Servers drop workers of a lower number at once; without it "
        "they wait 90 s for a lost host. (default 0)",
    )
    max_cardinality: int = flag_field("model", 0)
    batch_size: int = flag_field(
        "training",
        BATCH_SIZE,
        more="The batch size of Horovod and DeepRec is per worker: multiply it by their number.",
    )
    micro_batch: int = flag_field("training", 1)
    epochs: int | None = flag_field("training", more=f"(default {EPOCHS}, or as many as --steps takes)")
    steps: int | None = flag_field("training")
    holdout: float = flag_field("training", HOLDOUT)
    eval_data: str = flag_field("training", metavar="PATH|SHARE")
    eval_every: int = flag_field("training", 0)
    eval: bool = flag_field(
        "training",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Evaluate on the rows of --eval-data, or held-out ones, at the end. (default on)",
    )
    pipeline: bool = flag_field("training", True, more="Several workers only read ahead.")
    staleness: int | None = flag_field("training")
    run_dir: Path = flag_field(
        "run",
        type=Path,
        metavar="DIR",
        help="Directory of the run. (default runs/MODEL-DATE-TIME)",
    )
    checkpoint_steps: int = flag_field("run", 1000)
    checkpoint_minutes: int = flag_field("run", 10)
    keep_checkpoints: int = flag_field("run")
    checkpoint_rows: str = flag_field("run", "auto", more="For pool, servers need --storage-recover.")
    export_checkpoints: int = flag_field("run", 0)
    checkpoint_increments: int = flag_field("run", 0)
    upload_to: str = flag_field("run", "", metavar="URL")
    upload_bandwidth: int = flag_field("run", 0)
    resume: bool = flag_field(
        "run",
        action="store_true",
        help="Go on from the latest checkpoint of --run-dir, or of --upload-to if that one is newer.",
    )
    log_every: int = flag_field(
        "run",
        type=count(1),
        default=20,
        metavar="N",
        help="Steps between progress lines. (default 20)",
    )
    stats_seconds: float = flag_field(
        "run",
        type=number(),
        default=5.0,
        metavar="S",
        help="Minimum seconds between samples of the servers' figures. (default 5)",
    )
    publish_seconds: float = flag_field(
        "run",
        type=number(least=0),
        default=0.1,
        metavar="S",
        help="Minimum seconds between publications of dense weights on the servers, for processes that serve "
        "the model (oe_runtime.serve --servers). They take a hundredth of the time at most. 0: none. "
        "(default 0.1)",
    )
    timeline: int = flag_field("run", 0)
    exit_with_parent: bool = flag_field(
        "run", action="store_true", help="Stop as on SIGTERM when stdin closes."
    )
    script: Path | None = None
    arguments: tuple[str, ...] = ()  # the script's
    input_flags: tuple[str, ...] = ()  # given flags of the rows that job.batches reads

    @property
    def program(self) -> str:
        """The name of the user's program that trains; empty for a built-in model."""
        return "" if self.script is None else self.script.name

    def steps_of_models(self) -> dict[str, Any]:
        """Return the arguments of `distributed_model` that say how its steps go."""
        return {
            "pipeline": self.pipeline,
            "staleness": 0 if self.workqueue else self.staleness or 0,
            "micro_batches": self.micro_batch,
        }

    def fixed(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share with the run that it continues.

        A script may change otherwise, and its checkpoints say whether they fit. What a program uses of the
        rows is known only when it does: see RunInput.fixed.
        """
        return {"script": self.program}

    @property
    def eval_path(self) -> str | None:
        """The data for the evaluation alone; None if rows of `data` are held out for it."""
        return None if is_share(self.eval_data) else self.eval_data or None


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions, ModelOptions):
    """A checked command line of a built-in model."""

    jit: bool = flag_field("training", False)
    device: str = flag_field("training")
    inter_threads: int = flag_field(
        "training",
        type=count(0),
        default=0,
        metavar="N",
        help="TensorFlow's threads for parallel operations. 0: TensorFlow decides. (default 0)",
    )
    intra_threads: int = flag_field(
        "training",
        type=count(0),
        default=0,
        metavar="N",
        help="TensorFlow's threads within an operation. 0: TensorFlow decides. (default 0)",
    )
    deterministic: bool = flag_field(
        "training",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Use TensorFlow's deterministic operations. They cost too little to measure. (default on)",
    )
    export: Path | None = flag_field(
        "run",
        type=Path,
        metavar="DIR",
        help="Write a SavedModel for plain TensorFlow to DIR at the end.",
    )
    export_rows: str = flag_field("run", "trained")

    @property
    def streams(self) -> bool:
        """Whether the data are still growing."""
        return self.follow or self.data == STDIN

    def fixed(self) -> dict[str, Any]:
        """See RunOptions."""
        common: dict[str, Any] = {
            "data": self.data,
            "model": self.model,
            "embeddings": "stock" if self.stock else "servers",
            "dim": self.dim,
            "hidden": list(self.hidden),
            "batch_size": self.batch_size,
            "optimizer": self.optimizer,
            "learning_rate": self.learning_rate,
            "seed": self.seed,
            "max_cardinality": self.max_cardinality,
            "holdout": self.holdout,
        }
        mine = {"xdeepfm": ("cin",), "dlrm": ("bottom", "interaction")}.get(self.model, ())
        shape = {name: getattr(self, name) for name in mine}
        if self.workqueue:
            common["workqueue"] = True
        if self.streams:
            common["follow"] = True
        # Runs of earlier versions have none of it.
        common["eval_data"] = self.eval_path
        common["schema"] = None if self.schema == CRITEO else self.schema.describe()
        return common | {k: list(v) if isinstance(v, tuple) else v for k, v in shape.items()}


def parser(kind: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return the argument parser, whose help is the reference of the trainer."""
    p = kind(
        prog="python -m oe_runtime.train",
        description="Train a click model with its embeddings on parameter servers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = p.add_argument_group("where the embeddings live (one of the three)")
    groups = {
        "data": p,
        "where": where.add_mutually_exclusive_group(required=True),
        "kept": p.add_mutually_exclusive_group(),
        "workers": p.add_argument_group(*worker_options.GROUP),
        **{name: p.add_argument_group(name) for name in ("model", "training", "run")},
    }
    _add_model(groups["model"], groups["training"])
    add_flags(groups, (*fields(RunOptions), *fields(Options)))
    _add_columns(p)
    return p


def _add_columns(p: argparse.ArgumentParser) -> None:
    """Add the flags that become the schema, and that of the program."""
    add(p, "label", metavar="COLUMN")
    add(p, "categories", metavar="COLUMN[:IDS],…")
    add(p, "numbers", metavar="COLUMN[:SCALE],…")
    p.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="Run this Python program in place of a built-in model; what follows a lone -- is the program's. "
        "It trains through oe_runtime.job, decides the model and the optimizer, and may read --data by "
        "job.batches.",
    )


def _add_model(m: argparse._ActionsContainer, t: argparse._ActionsContainer) -> None:
    """Add the flags of ModelOptions."""
    add(m, "model")
    add(m, "dim", 9)
    for name, layers in (
        ("hidden", models.Shape.hidden),
        ("cin", models.Shape.cin),
        ("bottom", models.Shape.bottom),
    ):
        add(m, name, layers, type=widths, metavar="N,N")
    add(m, "interaction", models.Shape.interaction)
    add(m, "precision", "float32")
    add(m, "row_precision", "float32")
    add(m, "state_precision", "float32")
    add(m, "exchange_precision", "float32")
    add(m, "index", "array")
    add(m, "admission", type=policies.admission, metavar="RULE")
    add(m, "eviction", [], type=policies.eviction, metavar="RULE,…")
    add(t, "optimizer", "adagrad", choices=tuple(LEARNING_RATES))
    add(t, "learning_rate", more=", ".join(f"{k} {v}" for k, v in LEARNING_RATES.items()) + ".")
    add(t, "seed", 0)


# Options that a script decides by itself: they do not go with --script.
_MODEL_OPTIONS = {
    *scoped("model"),
    *("stock", "export", "device", "deterministic", "inter_threads", "intra_threads"),
}
# Options of the rows, for scripts that read by job.batches.
ROW_OPTIONS = scoped("rows")
# Options of a launcher, which a script that runs by itself has not.
_LAUNCHER_OPTIONS = {"upload_to", "upload_bandwidth", "exit_with_parent", "script", "help"}


def parse(argv: Sequence[str] | None = None) -> RunOptions:
    """Return the checked options, those of a built-in model as Options.

    A mistake ends the process with status 2, as argparse does.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    p = parser()
    a = p.parse_args(words[:end])
    if a.script is not None:
        return _parse_script(p, a, words[:end], words[end + 1 :])
    if end < len(words):
        p.error("-- goes with --script: what follows it is the script's")
    if a.data is None:
        p.error("the following arguments are required: --data")
    values = _settle(p, a)
    if a.follow or a.data == STDIN:
        _settle_stream(p, a, _given(words), values)
    return Options(**values)


def _settle_stream(
    p: argparse.ArgumentParser, a: argparse.Namespace, given: set[str], values: dict[str, Any]
) -> None:
    """Refuse what a stream cannot have: several workers, epochs, rows held out."""
    flag = "--follow" if a.follow else f"--data {STDIN}"
    if values["size"] > 1 or a.workqueue:
        p.error(f"{flag} is for one worker: several would not know which rows the others have seen arrive")
    if "epochs" in given:
        p.error(f"--epochs does not go with {flag}: a stream is read once")
    if "holdout" in given or is_share(a.eval_data or ""):
        p.error(f"{flag} holds out no rows; name others with --eval-data PATH")
    if a.data == STDIN and (a.follow or a.exit_with_parent):
        p.error(f"--data {STDIN} does not go with {'--follow' if a.follow else '--exit-with-parent'}")
    values |= {"epochs": None, "holdout": 0.0}


def _parse_script(
    p: argparse.ArgumentParser, a: argparse.Namespace, words: Sequence[str], arguments: Sequence[str]
) -> RunOptions:
    given = _given(words)
    for name in vars(a):
        if name in given and name in _MODEL_OPTIONS:
            flag = "--" + name.replace("_", "-")
            p.error(f"{flag} does not go with --script: {a.script.name} decides that (give it after --)")
    path = a.script.absolute()
    if not path.is_file():
        p.error(f"--script {a.script}: {'not a file' if path.exists() else 'there is no such file'}")
    values = _settle(p, a, path.stem)
    if a.follow or a.data == STDIN:
        _settle_stream(p, a, given, values)
    return RunOptions(
        **_select_run_options(values) | _whole_paths(values),
        script=path,
        arguments=tuple(arguments),
        input_flags=_input_flags(given, values),
    )


def outside(
    script: Path, *, servers: Sequence[str] = (), token_file: Path | None = None, **more: Any
) -> RunOptions:
    """Return the options of a script that runs by itself: tables in this process, unless `servers` are named.

    `more` are other flags by name: run_dir, resume, checkpoint_steps, data, …
    """
    p = parser(_Raising)
    words = ["--servers", ",".join(servers)] if servers else ["--in-process"]
    if token_file is not None:
        words += ["--token-file", str(token_file)]
    for name, value in more.items():
        known = {action.dest for action in p._actions} - _MODEL_OPTIONS - _LAUNCHER_OPTIONS
        if name not in known:
            raise TypeError(f"{name} is not an option of a job; known are {', '.join(sorted(known))}")
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is False and p.get_default(name) is True:
            words.append(f"--no-{flag[2:]}")
        elif name == "data" and not isinstance(value, (str, os.PathLike, type(None))):
            raise TypeError(f"data is {value!r}; a job has one path, directory, glob or URL")
        elif value is not None and value is not False:  # 0 is a value
            words += [flag, str(value)]
    a = p.parse_args(words)
    values = _settle(p, a, script.stem)
    if a.follow or a.data == STDIN:
        _settle_stream(p, a, {*more}, values)
    flags = _input_flags({*more}, values)
    values |= {"run_dir": values["run_dir"].absolute(), "data": values["data"] or ""}
    return RunOptions(**_select_run_options(values), script=script, input_flags=flags)


def _select_run_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are also a script's."""
    return {one.name: values[one.name] for one in fields(RunOptions) if one.name in values}


def _input_flags(given: Collection[str], values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the given flags of the rows."""
    found = [name for name in ROW_OPTIONS if name in given]
    if is_share(values["eval_data"]):
        found.append("eval_data")
    return tuple("--" + name.replace("_", "-") for name in found)


class _Raising(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise ValueError: there is no command line to explain."""
        raise ValueError(message)


def _given(words: Sequence[str]) -> set[str]:
    """Return the names of the flags that a command line has."""
    p = parser()
    for action in p._actions:
        action.default, action.required = argparse.SUPPRESS, False
    return set(vars(p.parse_args(list(words))))


def _whole_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run directory and the data so that they hold after a change of the working directory."""
    data, apart = values["data"] or "", values["eval_data"]
    return {
        "run_dir": values["run_dir"].absolute(),
        "data": _whole_data(data),
        "eval_data": apart if is_share(apart) else _whole_data(apart),
    }


def _whole_data(data: str) -> str:
    """Return a path as an absolute one, and a URL or another name of data as it is."""
    if data in ("", STDIN) or "://" in data or data.startswith("generate:"):
        return data
    return os.path.abspath(data)


def _settle(p: argparse.ArgumentParser, a: argparse.Namespace, name: str | None = None) -> dict[str, Any]:
    """Check what belongs together; return the options by name. `name`: the script's."""
    if a.resume and a.run_dir is None:
        p.error("--resume needs --run-dir, the directory of the run to go on with")
    _check_storage(p, a)
    servers = worker_options.endpoints(p, "--servers", a.servers) if a.servers is not None else ()
    place = worker_options.settle(p, a)
    for_servers = {
        "--token-file": a.token_file is not None,
        "--checkpoint-transfer": a.checkpoint_transfer != "shared",
        "--job": a.job,
        "--checkpoint-rows pool": a.checkpoint_rows == "pool",
    }
    for flag, given in for_servers.items():
        if given and not servers:
            p.error(f"{flag} goes with --servers")
    if a.admission is not None and a.index != "hash":
        p.error("--admission goes with --index hash: an array has a place for each id anyway")
    _check_upload(p, a)
    if a.export_rows != "trained" and a.export is None:
        p.error("--export-rows goes with --export, the directory of the SavedModel")
    if a.epochs == 0 and not a.steps:
        p.error("--epochs 0 goes with --steps, which then says when training ends")
    _check_stock(p, a)
    if a.eval_every and a.workqueue:
        p.error("--eval-every: with --workqueue worker 0 evaluates at the end only")
    if (a.eval_every or a.eval_data) and not a.eval:
        p.error("--no-eval does not go with --eval-data and --eval-every")
    try:
        schema = row_schema.chosen(a.schema, a.label, a.categories, a.numbers)
    except DataError as error:
        p.error(str(error))
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    own = {name: value for name, value in vars(a).items() if name not in ("label", "categories", "numbers")}
    values = own | {
        "schema": schema,
        "eval_data": a.eval_data or "",
        "holdout": float(a.eval_data) if is_share(a.eval_data or "") else a.holdout,
        "servers": servers,
        **place._asdict(),
        "storage": a.storage or "dram",
        "storage_path": a.storage_path or "",
        "storage_size": a.storage_size or 0,
        "storage_cache": a.storage_cache or 0,
        "epochs": a.epochs or (None if a.steps else EPOCHS),
        "steps": a.steps or None,
        "learning_rate": LEARNING_RATES[a.optimizer] if a.learning_rate is None else a.learning_rate,
        "run_dir": a.run_dir or Path("runs") / f"{name or a.model}-{stamp}",
    }
    del values["script"]
    return values


def _check_storage(p: argparse.ArgumentParser, a: argparse.Namespace) -> None:
    kept = a.storage_recover or a.storage_fresh
    if not a.in_process and (a.storage or a.storage_path or a.storage_size or a.storage_cache or kept):
        p.error("--storage and --storage-* go with --in-process; servers have their own")
    if a.storage in DURABLE and not a.storage_path:
        where = "an NVMe drive" if a.storage == "dram_ssd" else "an fsdax mount"
        p.error(f"--storage {a.storage} needs --storage-path, a directory (on {where})")
    if a.storage_path and a.storage in (None, "dram"):
        p.error(f"--storage-path goes with --storage {', '.join(DURABLE)} or pmem_memkind")
    if kept and a.storage not in DURABLE:
        p.error(f"--storage-recover and --storage-fresh go with --storage {', '.join(DURABLE)}")
    if bool(a.storage_cache) != (a.storage in CACHED):
        p.error(f"--storage {' or '.join(CACHED)} and --storage-cache go together")


def _check_upload(p: argparse.ArgumentParser, a: argparse.Namespace) -> None:
    if a.upload_to:
        try:
            remote = is_remote(a.upload_to)
        except InvalidUrl as error:
            p.error(f"--upload-to: {error}")
        if not remote:
            p.error(f"--upload-to {a.upload_to} is no URL of a store; --run-dir is the local directory")
    elif a.upload_bandwidth:
        p.error("--upload-bandwidth goes with --upload-to")


def _check_stock(p: argparse.ArgumentParser, a: argparse.Namespace) -> None:
    if a.stock and a.micro_batch > 1:
        p.error("--micro-batch: plain Keras, --stock, has none")
    if a.stock and (a.index == "hash" or a.eviction):
        p.error("--stock: plain Keras has neither --index hash nor --admission nor --eviction")
    if a.stock and a.row_precision != "float32":
        p.error("--stock: --row-precision is of tables; plain Keras would round the optimizer's state too")
    if a.stock and a.state_precision != "float32":
        p.error("--stock: --state-precision is of tables")
    if a.stock and a.exchange_precision != "float32":
        p.error("--stock: --exchange-precision is of tables")
    if a.stock and a.export_rows != "trained":
        p.error("--stock: --export-rows is of tables; plain Keras exports its weights as they are")
