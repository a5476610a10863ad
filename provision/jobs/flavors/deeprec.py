"""DeepRec unchanged: stand-alone training by its model zoo's scripts, under our launch, status, logs, stop.

Its rows lie in the training process: in DRAM, in a pool on a file system with DAX (PMEM_LIBPMEM) or on memory
nodes (PMEM_MEMKIND). So the worker's host is the one with persistent memory, and no servers are started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Host, Inventory
from provision.jobs import placement, request
from provision.jobs.backends import units
from provision.jobs.backends.runners import runner_of
from provision.jobs.flavors import programs
from provision.jobs.placement import Placement
from provision.jobs.request import Request
from provision.jobs.storage import POOLS, place_of, storage_of
from provision.jobs.store import Job
from provision.node import numa
from provision.node.state import State

# Lines of its scripts: "loss = 0.5, steps = 100, …" and "steps = 100, loss = 0.5 (1.2 sec)".
PROGRESS = r"(?=.*\bsteps = (?P<step>\d+))(?=.*\bloss = (?P<loss>[\d.]+(?:e[+-]?\d+)?))"
GIB = 1 << 30
COLUMNS = 40  # of a line of Criteo data
_SHAPE = f"a directory with train.csv and eval.csv, Criteo's {COLUMNS} columns with commas"


class Script(NamedTuple):
    """One script of the model zoo."""

    path: str
    optimizers: Mapping[str, str]  # ours -> its; none: it has one only
    storage: bool  # takes --ev_storage
    flags: Mapping[str, str]  # by our settings' names


_FLAGS = {
    "batch_size": "--batch_size",
    "steps": "--steps",
    "keep_checkpoints": "--keep_checkpoint_max",
    "checkpoint_steps": "--save_steps",
}
SCRIPTS = {
    "wdl": Script(
        "modelzoo/features/embedding_variable/wide_and_deep/train.py",
        {},
        True,
        {**_FLAGS, "learning_rate": "--deep_learning_rate"},
    ),
    "dlrm": Script(
        "modelzoo/dlrm/train.py",
        {name: name for name in ("adam", "adamasync", "adagraddecay", "adagrad")}
        | {"sgd": "gradientdescent"},
        False,
        {
            **_FLAGS,
            "learning_rate": "--learning_rate",
            "seed": "--seed",
            "interaction": "--interaction_op",
        },
    ),
}


def settle(inventory: Inventory, wanted: Request) -> Request:
    """See ``Flavor``."""
    wanted = programs.settled(inventory, wanted, "deeprec", list(SCRIPTS))
    hosts, training = placement.worker_hosts(inventory), wanted.training
    script = SCRIPTS[training.model]
    total = sum(wanted.workers or host.worker.count for host in hosts)
    if total != 1:
        raise TrainingError(
            f"{total} workers: flavor deeprec trains in one process, on the host that has the memory; use "
            "--limit and --workers 1 (on Kubernetes, DeepRec's own TFJob trains on several)"
        )
    if script.optimizers and training.optimizer not in script.optimizers:
        raise TrainingError(
            f"--optimizer: found {training.optimizer!r}; DeepRec's script of {training.model} has "
            f"{', '.join(script.optimizers)}"
        )
    found = storage_of(hosts[0], wanted)
    if found != "dram" and not script.storage:
        named = ", ".join(name for name, item in SCRIPTS.items() if item.storage)
        raise TrainingError(
            f"--storage: found {found!r}; DeepRec's script of {training.model} keeps rows in DRAM: use "
            f"--storage dram, or --model {named}"
        )
    if found == "dram_ssd":
        raise TrainingError(
            f"host {hosts[0].name}: storage dram_ssd: DeepRec has no such storage: use --storage dram, or "
            "the flavor oe_runtime"
        )
    if found in POOLS and not hosts[0].server.storage_size:
        raise TrainingError(
            f"host {hosts[0].name}: storage {found}: DeepRec reserves its whole pool at once; set "
            "parameter_server_storage_size"
        )
    return replace(
        wanted, training=training.model_copy(update={"export": False, "steps": training.steps or 0})
    )


def check_data(inventory: Inventory, wanted: Request) -> None:
    """See ``Flavor``: a directory with train.csv and eval.csv."""
    data = wanted.training.data
    if not data or data.startswith("generate:"):
        raise TrainingError(f"--data: found {data!r}; DeepRec's scripts read {_SHAPE}")
    request.check_path("data", data, placement.worker_hosts(inventory))


def data_check(host: Host, wanted: Request) -> list[str]:
    """See ``Flavor``."""
    return programs.data_check(host, "tables", wanted.training.data, str(COLUMNS), "train.csv", "eval.csv")


def place(
    job: Job, inventory: Inventory, states: Mapping[str, State], wanted: Request, *, fresh: bool = True
) -> Placement:
    """See ``Flavor``."""
    host, training = placement.worker_hosts(inventory)[0], wanted.training
    state, script = states.get(host.name), SCRIPTS[wanted.training.model]
    run = runner_of(host).directory(job) / "run"
    argv = [programs.program(host, "python"), f"{programs.sources_of(host)}/{script.path}"]
    argv += ["--data_location", training.data, "--output_dir", str(run), "--checkpoint", str(run / "model")]
    values = training.model_dump(mode="json")
    argv += [
        word
        for name, flag in script.flags.items()
        if values[name] is not None
        for word in (flag, str(values[name]))
    ]
    if script.optimizers:
        argv += ["--optimizer", script.optimizers[str(training.optimizer)]]
    if training.precision == "bfloat16":
        argv.append("--bf16")
    where = units.Place()
    if script.storage:
        where = place_of(host, state, wanted, job.id, "worker-0", 0)
        argv += ["--ev_storage", where.storage]
    if where.path:
        size = max(1, host.server.storage_size // GIB)
        argv += ["--ev_storage_path", where.path + "/", "--ev_storage_size_gb", str(size)]
    environment = programs.environment(host)
    environment.setdefault("LD_LIBRARY_PATH", "/usr/local/lib")
    if where.storage == "pmem_memkind" and state is not None:
        # Never a constant: which nodes have no CPUs differs from host to host.
        environment[units.NODES] = ",".join(str(node.id) for node in numa.cpuless(state))
    spec = programs.process(
        job,
        host,
        "worker",
        "worker-0",
        programs.worker_options(job, host, training.model, PROGRESS),
        [*argv, *host.runtime.arguments],
        environment=environment,
        storage=where.mount,
        pools=where.path,
    )
    return Placement([spec], {name: [] for name in inventory.hosts})
