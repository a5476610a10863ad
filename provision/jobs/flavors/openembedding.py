"""OpenEmbedding unchanged: its own server and scripts under our launch, status, logs and stop.

Command lines are those of its documents (documents/en/pmem.md and README.md of its repository).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Host, Inventory
from provision.jobs import placement, request
from provision.jobs.backends import endpoint
from provision.jobs.backends.runners import runner_of
from provision.jobs.backends.units import Place
from provision.jobs.flavors import programs
from provision.jobs.placement import Placement
from provision.jobs.request import Request
from provision.jobs.storage import place_of, servers_of, storage_of
from provision.jobs.store import SERVERS, Job, ProcessSpec
from provision.jobs.worker_group import free_endpoints
from provision.node import families
from provision.node import openembedding as node
from provision.node.state import State

PORT = 34567  # of its documents; used on hosts where parameter_server_port does not say
MODELS = {"deepfm": "DeepFM", "wdl": "WDL", "xdeepfm": "xDeepFM"}
OPTIMIZERS = {"adagrad": "Adagrad", "adam": "Adam", "ftrl": "Ftrl", "sgd": "SGD"}
# A line that Keras prints at the end of an epoch; under horovodrun those of the first process count.
PROGRESS = (
    r"^(?:\[(?:1,)?0\](?:<stdout>:)?)?\s*(?P<more>\d+)/\d+ - .*?loss: (?P<loss>[\d.e+-]+)"
    r"(?:.*?auc\w*: (?P<auc>[\d.e+-]+))?"
)
COLUMNS = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))


class Variant(NamedTuple):
    """One way to train; ``flags`` maps our setting names to its script's flags."""

    script: str
    launcher: tuple[str, ...]
    server: bool  # parameter servers of their own, not in the training process
    flags: Mapping[str, str]


_EXAMPLE = {"data": "--data", "batch_size": "--batch_size", "optimizer": "--optimizer", "model": "--model"}
_EXPORTING = {**_EXAMPLE, "export": "--export"}
VARIANTS = {
    "horovod": Variant(
        "test/benchmark/criteo_deepctr.py",
        ("horovodrun", "-np"),
        True,
        {**_EXAMPLE, "epochs": "--epochs", "dim": "--embedding_dim"},
    ),
    # At its end the script above passes a misspelt word on to Keras, which refuses it: so only these export.
    "standalone": Variant("examples/criteo_deepctr_network.py", (), False, _EXPORTING),
    "mirrored": Variant("examples/criteo_deepctr_network_mirrored.py", (), False, _EXPORTING),
    "mpi": Variant("examples/criteo_deepctr_network_mpi.py", ("mpirun", "-np"), False, _EXPORTING),
}


def _variant(inventory: Inventory) -> tuple[str, Variant]:
    name = placement.worker_hosts(inventory)[0].runtime.variant
    return name, VARIANTS[name]


def settle(inventory: Inventory, wanted: Request) -> Request:
    """See ``Flavor``."""
    wanted = programs.settled(inventory, wanted, "openembedding", list(MODELS))
    name, variant = _variant(inventory)
    training = wanted.training
    if not training.epochs:
        raise TrainingError("training_epochs: found 0; OpenEmbedding's scripts train for epochs, from 1")
    if training.optimizer not in OPTIMIZERS:
        raise TrainingError(
            f"--optimizer: found {training.optimizer!r}; OpenEmbedding's scripts have {', '.join(OPTIMIZERS)}"
        )
    servers = [inventory.hosts[host] for host in inventory.parameter_servers]
    for host in servers if variant.server else []:
        _check_storage(host, storage_of(host, wanted))
    count = sum(servers_of(host, wanted) for host in servers)
    if variant.server and count != 1:
        raise TrainingError(
            f"{count} parameter servers: OpenEmbedding's server.py is master and only server, and its "
            "criteo_deepctr.py waits for one: use one host with parameter_server_count: 1 (--limit, "
            "--servers 1)"
        )
    total = sum(_counts(inventory, wanted))
    if name in ("standalone", "mirrored") and total != 1:
        raise TrainingError(
            f"{total} workers: runtime_variant {name} is one process; use horovod or mpi, or --workers 1"
        )
    if (training.batch_size or 0) % total:
        raise TrainingError(
            f"--batch-size: {training.batch_size} rows cannot be shared out evenly to {total} workers"
        )
    # Without an export of ours, `export` says whether there will be one.
    exports = training.export and "export" in variant.flags
    return replace(wanted, training=training.model_copy(update={"export": exports}))


def _check_storage(host: Host, found: str) -> None:
    if found == "dram_ssd":
        raise TrainingError(
            f"host {host.name}: storage dram_ssd: OpenEmbedding has no such storage: use --storage dram, "
            "or the flavor oe_runtime"
        )
    if found == "pmem_memkind":
        raise TrainingError(
            f"host {host.name}: storage pmem_memkind: OpenEmbedding keeps rows in DRAM or in pools on a file "
            "system with DAX; use --storage dram or pmem_libpmem (deeprec and oe_runtime have pmem_memkind)"
        )
    if found != "dram" and node.has_no_pmem(host.runtime.package):
        package = host.runtime.package or node.PACKAGE
        raise TrainingError(
            f"host {host.name}: storage {found}: {package} from PyPI does not support persistent "
            "memory; use --storage dram, or set runtime_package to source, or to an archive such as "
            "openembedding-0.1.2-pmem.tar.gz"
        )


def _counts(inventory: Inventory, wanted: Request) -> list[int]:
    return [wanted.workers or host.worker.count for host in placement.worker_hosts(inventory)]


def check_data(inventory: Inventory, wanted: Request) -> None:
    """See ``Flavor``: a CSV with a header, or with servers of their own also TFRecords with ``meta``."""
    hosts, data = placement.worker_hosts(inventory), wanted.training.data
    if not data or data.startswith("generate:"):
        raise TrainingError(
            f"--data: found {data!r}; OpenEmbedding's scripts read a .csv with a header (label, I1…, C1…); "
            f"to make it from Criteo's TSV: {_convert(hosts[0])}"
        )
    request.check_path("data", data, hosts)


def data_check(host: Host, wanted: Request) -> list[str]:
    """See ``Flavor``."""
    data = wanted.training.data
    if host.runtime.variant == "horovod" and not data.endswith("csv"):
        kind = "any" if data.endswith("1T") else "records"
        return programs.data_check(host, kind, data, f"from Criteo's TSV: {_convert(host)}")
    hint = f"a .csv with a header is made from Criteo's TSV by: {_convert(host)}"
    return programs.data_check(host, "header", data, hint, *COLUMNS)


def _convert(host: Host) -> str:
    return (
        f"{programs.program(host, 'python')} {programs.sources_of(host)}/examples/criteo_preprocess.py "
        "DAY.tsv DAY.csv"
    )


def place(
    job: Job, inventory: Inventory, states: Mapping[str, State], wanted: Request, *, fresh: bool = True
) -> Placement:
    """See ``Flavor``."""
    workers = placement.worker_hosts(inventory)
    _, variant = _variant(inventory)
    started: dict[str, list[dict[str, Any]]] = {name: [] for name in inventory.hosts}
    processes: list[ProcessSpec] = []
    pmem: list[str] = []
    if variant.server:
        host = inventory.hosts[inventory.parameter_servers[0]]
        where = place_of(host, states.get(host.name), wanted, job.id, "server-0", 0)
        spec, port = _server(job, host, wanted, where)
        pmem = _pmem(host, wanted, where)
        processes.append(spec)
        started[host.name] += runner_of(host).server_start(job, spec, where, port, fresh=fresh)
    first = states.get(workers[0].name)
    family = families.find(first.os) if first is not None else None
    mpi = family.mpi if family is not None else ""
    processes.append(_worker(job, workers, wanted, variant, _counts(inventory, wanted), mpi, pmem))
    return Placement(processes, started)


def _server(job: Job, host: Host, wanted: Request, where: Place) -> tuple[ProcessSpec, int]:
    port = host.server.port
    if not port:
        port = int(free_endpoints(1).rpartition(":")[2]) if host.is_here else PORT
    listens = endpoint(host.address, host.server.host, port)
    argv = [
        programs.program(host, "python"),
        f"{programs.sources_of(host)}/{node.SERVER}",
        "--bind_ip",
        listens,
    ]
    argv += ["--server_concurrency", str(host.server.threads or os.cpu_count() or 1)]
    argv += _pmem(host, wanted, where)
    ready = runner_of(host).directory(job) / "ready" / "server-0.json"
    options = ["--ready-file", str(ready), "--listens", listens, "--storage", where.storage]
    more = {"storage": where.mount, "pools": where.path, "start_timeout": host.server.start_timeout}
    return programs.process(job, host, "parameter_server", "server-0", options, argv, **more), port


def _pmem(host: Host, wanted: Request, where: Place) -> list[str]:
    """The words of server and workers for rows in persistent memory on the server's ``host``."""
    if not where.path:
        return []
    cache = wanted.storage_cache or host.server.storage_cache
    return ["--pmem", where.path, *(["--cache_size", str(max(1, cache >> 20))] if cache else [])]


def _worker(
    job: Job,
    hosts: list[Host],
    wanted: Request,
    variant: Variant,
    counts: list[int],
    mpi: str,
    pmem: Sequence[str],
) -> ProcessSpec:
    host, training, total = hosts[0], wanted.training, sum(counts)
    values = {
        "data": training.data,
        "batch_size": str((training.batch_size or 0) // total),
        "optimizer": OPTIMIZERS[str(training.optimizer)],
        "model": MODELS[training.model],
        "epochs": str(training.epochs),
        "dim": str(training.dim),
    }
    export = str(runner_of(host).directory(job) / "run" / "export" / "1") if training.export else ""
    if export:
        values["export"] = export
    argv = _launcher(hosts, variant, counts, mpi)
    argv += [programs.program(host, "python"), f"{programs.sources_of(host)}/{variant.script}"]
    argv += [word for name, flag in variant.flags.items() if name in values for word in (flag, values[name])]
    if variant.server:
        # Exactly this word is replaced by where the server listens.
        argv += ["--server", "--master_endpoint", SERVERS]
        # "Should be also configured in server": each side tells its own part of the tables where they are.
        argv += pmem
    argv += host.runtime.arguments
    options = programs.worker_options(job, host, training.model, PROGRESS, export)
    environment = programs.environment(host)
    return programs.process(job, host, "worker", "worker-0", options, argv, environment=environment)


def _launcher(hosts: list[Host], variant: Variant, counts: list[int], mpi: str) -> list[str]:
    if not variant.launcher:
        return []
    tool = variant.launcher[0]
    path = programs.program(hosts[0], tool) if tool == "horovodrun" else os.path.join(mpi, tool)
    words = [path, *variant.launcher[1:], str(sum(counts))]
    if len(hosts) > 1:
        listed = ",".join(f"{host.address}:{count}" for host, count in zip(hosts, counts, strict=True))
        words += ["-H" if tool == "horovodrun" else "-hosts", listed]
    return words
