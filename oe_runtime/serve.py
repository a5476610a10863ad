"""`python -m oe_runtime.serve`: answer TensorFlow Serving's requests with a model and its rows."""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from oe_runtime import checkpoint
from oe_runtime.client import Client
from oe_runtime.errors import OeError, ServingError
from oe_runtime.serving import requests
from oe_runtime.serving.access import AccessFiles
from oe_runtime.spec import ROW_PRECISIONS, STORAGES, TLS, StorageSpec
from oe_runtime.support import durable, interrupt, remote_files
from oe_runtime.support.argument_types import count, number, size
from oe_runtime.support.tensorflow_noise import without_noise
from oe_runtime.support.token_file import read_token

if TYPE_CHECKING:
    from oe_runtime.serving.grpc import GrpcServer
    from oe_runtime.serving.model import Model
    from oe_runtime.serving.rest import RestServer
    from oe_runtime.serving.versions import Versions

_DIGITS = 18  # of a step
_PIN_SECONDS = 60.0  # between two renewals of what training must keep
_FILES = 12_000  # that may be open: a connection is one, and shells allow 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit status."""
    options = _parser().parse_args(arguments)
    options.version = options.version or [None]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if options.compile_to is not None:  # a request's thread is enough
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    ended = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        # In a thread: a handler that interrupts the beginning of a wait would wait for its lock forever.
        signal.signal(name, lambda *_: threading.Thread(target=ended.set).start())
    if options.exit_with_parent:
        threading.Thread(target=_end_with_input, args=(ended,), daemon=True).start()
    try:
        if options.servers is not None and options.step_file is not None:
            raise ServingError("--step-file does not go with --servers: servers have no earlier rows")
        if options.servers is not None and options.row_precision != "trained":
            raise ServingError("--row-precision does not go with --servers: servers keep rows as trained")
        if options.batch_timeout_ms is not None and options.max_batch_size == 1:
            raise ServingError("--batch-timeout-ms needs --max-batch-size above 1; add it, or leave this out")
        options.version_label = _read_labels(options.version_label)
        if options.servers is not None and options.version != [None]:
            raise ServingError("--version does not go with --servers: servers have no earlier rows")
        if options.servers is None:
            return _answer(options, None, ended)
        token = "" if options.token_file is None else read_token(options.token_file)
        client = Client(
            options.servers,
            token=token,
            timeout=options.request_seconds,
            tls=options.tls,
            job=options.job,
            read_only=True,
        )
        with contextlib.closing(client):
            return _answer(options, client, ended)
    except OSError as error:
        print(f"error: {remote_files.describe(error)}", file=sys.stderr)
        return 1
    except (OeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m oe_runtime.serve",
        description="Answer TensorFlow Serving's requests (POST /v1/models/NAME:predict, GET "
        "/v1/models/NAME[/metadata], and gRPC) and those of the Open Inference Protocol "
        "(/v2/models/NAME/infer, and gRPC) with a trained model. Its rows come from checkpoints, also "
        "while training publishes new ones, or from running servers, read-only. Where it listens on other "
        "addresses than loopback, set --tls-cert, --tls-key and --request-token-file, or use a proxy.",
    )
    parser.add_argument(
        "model",
        help="a model of save_serving_model or oe_runtime.torch.export, the directory of a run, or a "
        "SavedModel that includes its rows; "
        "also by URL: s3://…",
    )
    parser.add_argument(
        "--rows",
        metavar="DIR",
        help="checkpoints: a run's directory or its checkpoints/, or one checkpoint; also by URL: s3://… "
        "(default: the run's)",
    )
    parser.add_argument(
        "--servers",
        type=lambda text: text.split(","),
        metavar="HOST:PORT,…",
        help="ask these running servers for rows; --rows then only gives the other weights",
    )
    parser.add_argument("--token-file", type=Path, help="file with the token of --servers")
    parser.add_argument("--tls", choices=TLS, default="auto", help="to --servers (default: %(default)s)")
    parser.add_argument("--job", default="", help="the tables' job, on servers of several jobs")
    _add_addresses(parser)
    parser.add_argument(
        "--refresh-seconds",
        type=number(least=0),
        default=10.0,
        help="seconds between checks for a newer checkpoint at a URL (default: %(default)s; 0: not at all)",
    )
    parser.add_argument(
        "--request-seconds",
        type=number(above=0),
        default=5.0,
        help="seconds that a request waits for --servers before it is refused (default: %(default)s)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=number(least=0),
        default=25.0,
        help="seconds after SIGTERM for requests; a computation is waited for (default: %(default)s)",
    )
    _add_access(parser)
    parser.add_argument(
        "--compile-to",
        type=Path,
        metavar="DIR",
        help="compile a model of oe_runtime.torch.export for this machine by PyTorch's AOTInductor, which "
        "takes up to some minutes and needs g++, and keep it in this directory for the next start",
    )
    _add_limits(parser)
    _add_storage(parser)
    _add_launcher_options(parser)
    return parser


def _add_addresses(parser: argparse.ArgumentParser) -> None:
    """Add where and by which names it answers."""
    parser.add_argument("--name", default="model", help="the model's name in requests (default: %(default)s)")
    parser.add_argument(
        "--version-label",
        action="append",
        default=[],
        metavar="LABEL[=STEP]",
        help="a label by which requests may ask for this step, which --version names, or for the newest that "
        "is served; may be given several times",
    )
    parser.add_argument(
        "--version",
        action="append",
        type=_read_version,
        metavar="STEP|newest",
        help="serve this kept step; may be given several times, for steps side by side, each with its rows "
        "in memory (default: newest, which follows training)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8501, help="for HTTP (default: %(default)s; 0: any free)")
    parser.add_argument("--grpc-port", type=int, help="for gRPC (default: none; 0: any free)")


def _add_access(parser: argparse.ArgumentParser) -> None:
    """Add what clients need."""
    parser.add_argument(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="encrypt connections over HTTP and gRPC with this certificate in PEM, with those of its issuers "
        "after it; read again when it changes (default: not encrypted)",
    )
    parser.add_argument(
        "--tls-key", type=Path, metavar="FILE", help="the certificate's key in PEM; mode 0640 or less"
    )
    parser.add_argument(
        "--request-token-file",
        type=Path,
        metavar="FILE",
        help="file with a token that requests need, as Authorization: Bearer TOKEN; read again when it "
        "changes; mode 0640 or less (default: they need none)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add how much is answered at a time."""
    from oe_runtime.serving.rest import BATCH_TIMEOUT_MS, MAX_BODY_BYTES, MAX_QUEUED_REQUESTS

    parser.add_argument(
        "--max-body-bytes",
        type=size(1),
        default=MAX_BODY_BYTES,
        metavar="SIZE",
        help="maximum size of a request, and of all larger requests in progress together; JSON takes about "
        "forty times as much memory (default: %(default)s)",
    )
    parser.add_argument(
        "--max-queued-requests",
        type=count(1),
        default=MAX_QUEUED_REQUESTS,
        metavar="N",
        help="maximum number of requests over HTTP that wait or are computed; more are refused at once "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--max-batch-size",
        type=count(1),
        default=1,
        metavar="EXAMPLES",
        help="compute requests over HTTP that wait at the same time together, up to as many examples; only "
        "for a model whose answer for an example does not depend on others (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-timeout-ms",
        type=number(0, 10_000),
        metavar="MS",
        help="milliseconds, at most 10,000, that a request waits for others with --max-batch-size "
        f"(default: {BATCH_TIMEOUT_MS:g}; 0: only while the processors are busy)",
    )


def _add_storage(parser: argparse.ArgumentParser) -> None:
    """Add where rows from --rows lie, and of how many bits they are."""
    parser.add_argument(
        "--storage", choices=STORAGES, default="dram", help="memory of the rows (default: %(default)s)"
    )
    parser.add_argument("--storage-path", default="", metavar="DIR", help="an empty directory for --storage")
    parser.add_argument(
        "--storage-cache", type=size(), default=0, metavar="SIZE", help="DRAM of dram_pmem and dram_ssd"
    )
    parser.add_argument(
        "--row-precision",
        choices=("trained", *ROW_PRECISIONS),
        default="trained",
        help="of the rows from --rows in memory: trained: as they are; int8: 8-bit integers and a scale for "
        "each row, about a quarter of the bytes; bfloat16: half (default: %(default)s)",
    )


def _add_launcher_options(parser: argparse.ArgumentParser) -> None:
    """Add what `oeprov serve` tells its processes, and other launchers may."""
    parser.add_argument(
        "--ready-file",
        type=Path,
        help="JSON file with ports, pid and the served version, written at the start and when these change",
    )
    parser.add_argument(
        "--step-file",
        type=Path,
        metavar="FILE",
        help="file with the step to serve, or several of them and newest, which may change at any time; "
        "without it, those of --version",
    )
    parser.add_argument("--exit-with-parent", action="store_true", help="end at the end of standard input")


def _end_with_input(ended: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    ended.set()


def _read_version(text: str) -> int | None:
    """Return a step; None for the newest."""
    if text == "newest":
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is neither a step, such as 1000, nor newest")
    return int(text)


def _read_labels(texts: Sequence[str]) -> dict[str, int | None]:
    """Return the version of each --version-label. Raises InputError, ServingError."""
    labels: dict[str, int | None] = {}
    for text in texts:
        label, _, step = text.rpartition("=")
        is_step = bool(label) and step.isascii() and step.isdecimal() and len(step) <= _DIGITS
        label, version = (label, int(step)) if is_step else (text, None)
        requests.check_new_label(label)
        if labels.setdefault(label, version) != version:
            raise ServingError(f"--version-label: {label!r} is for two versions; leave one of them out")
    return labels


def _read_steps(file: Path | None) -> list[int | None]:
    """Return the steps in a --step-file, None: the newest. Raises ServingError for any other content."""
    try:
        text = "" if file is None else file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return []
    try:
        return [_read_version(word) for word in text.split()]
    except argparse.ArgumentTypeError:
        raise ServingError(
            f"{file}: found {text[:40]!r}; it must have one step, such as 1000, or several, or newest"
        ) from None


def _read_storage(options: argparse.Namespace) -> StorageSpec:
    precision = "" if options.row_precision == "trained" else options.row_precision
    return StorageSpec(
        options.storage,
        options.storage_path,
        cache_bytes=options.storage_cache,
        row_precision=precision,
    )


def _import_grpc() -> type[GrpcServer]:
    """Raises ServingError without the packages that it needs."""
    try:
        from oe_runtime.serving.grpc import GrpcServer
    except ImportError as error:
        raise ServingError(
            f"gRPC needs grpcio and protobuf ({error}): pip install grpcio protobuf"
        ) from error
    return GrpcServer


def _load(options: argparse.Namespace, client: Client | None, steps: Sequence[int | None]) -> Model:
    """Load the model with one of these steps: the newest, if it is among them."""
    from oe_runtime.serving.model import Model

    return Model.load(
        options.model,
        options.rows,
        client=client,
        storage=_read_storage(options),
        seconds=options.request_seconds,
        step=None if None in steps else max(one for one in steps if one is not None),
        compile_to=options.compile_to,
    )


def _answer(options: argparse.Namespace, client: Client | None, ended: threading.Event) -> int:
    from oe_runtime.serving.model import is_torch
    from oe_runtime.serving.rest import BATCH_TIMEOUT_MS, RestServer
    from oe_runtime.serving.versions import Versions

    files = AccessFiles(options.tls_cert, options.tls_key, options.request_token_file)
    access = files.read()
    grpc_server = None if options.grpc_port is None else _import_grpc()
    # Model.load refuses what is neither at once.
    is_there = remote_files.is_remote(options.model) or Path(options.model).is_dir()
    if is_there and not is_torch(options.model):
        with without_noise():
            import tensorflow  # noqa: F401
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    given = _read_steps(options.step_file)
    steps = given or options.version
    with (
        _load(options, client, steps) as model,
        contextlib.closing(Versions(model, options.name)) as versions,
    ):
        versions.source = options.model
        versions.steps_from = "" if options.step_file is None else f"--step-file {options.step_file}"
        versions.serve(steps, options.version_label)
        address = (options.name, versions, options.host)
        body = options.max_body_bytes
        rest = RestServer(
            *address,
            options.port,
            max_body_bytes=body,
            max_queued_requests=options.max_queued_requests,
            max_batch_size=options.max_batch_size,
            batch_timeout_ms=BATCH_TIMEOUT_MS
            if options.batch_timeout_ms is None
            else options.batch_timeout_ms,
        )
        rest.use_access(access)
        servers: list[RestServer | GrpcServer] = [rest]
        if grpc_server is not None:
            over_grpc = grpc_server(*address, options.grpc_port, max_body_bytes=body, access=access)
            rest.grpc_calls = over_grpc.calls
            servers.append(over_grpc)
        started: list[RestServer | GrpcServer] = []
        seconds = 0.0  # to end in
        try:
            for server in servers:
                server.start()
                started.append(server)
            if options.refresh_seconds > 0 or client is not None:
                model.watch(options.refresh_seconds)
            ports = dict(zip(("port", "grpc_port"), (server.port for server in servers), strict=False))
            facts = {"pid": os.getpid(), "host": options.host, "scheme": files.scheme, **ports}
            follower = _Follower(versions, options, given, facts, files, servers)
            _announce(versions, options, files, ports)
            follower.run(ended)
            seconds = options.drain_seconds
        finally:
            versions.is_ending = True
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda server: server.stop(seconds), started))
            if started and options.ready_file is not None:
                options.ready_file.unlink(missing_ok=True)
    return 0


def _announce(
    versions: Versions, options: argparse.Namespace, files: AccessFiles, ports: dict[str, int]
) -> None:
    model = versions.main
    served = ", ".join(str(one.checkpoint or options.model) for one in versions.models.values())
    grpc = f", gRPC on port {ports['grpc_port']}" if "grpc_port" in ports else ""
    token = "" if options.request_token_file is None else ", with a token only"
    place = f"{files.scheme}://{options.host}:{ports['port']}/v1/models/{options.name}"
    print(f"serving {served} at {place}{grpc}{token}", flush=True)
    if risk := files.describe_risk(options.host):
        print(f"warning: {risk}", file=sys.stderr, flush=True)
    if model.sources:
        print(model.sources, flush=True)


class _Follower:
    """Follows --step-file and the files of access, writes --ready-file, and reports each problem once."""

    def __init__(
        self,
        versions: Versions,
        options: argparse.Namespace,
        steps: list[int | None],
        facts: dict[str, object],
        files: AccessFiles,
        servers: Sequence[RestServer | GrpcServer],
    ) -> None:
        self._versions, self._options = versions, options
        self._steps = steps  # of the step file, if it names some
        self._files, self._servers = files, servers
        self._facts = {**facts, "storage": options.storage, "is_pmem": False}
        self._said: dict[str, str] = {}
        self._written: dict[str, object] = {}
        self._problem = ""  # of the step file
        self._access_problem = ""
        self._kept: dict[tuple[Path, bool], float] = {}  # when it was last said of which checkpoints
        self._keep()
        self._write()

    def run(self, ended: threading.Event) -> None:
        """Return at the end."""
        while not ended.wait(1.0 if self._options.step_file is None else 0.1):
            if self._options.step_file is not None:
                self._follow()
            self._keep()
            if self._files.have_changed():
                self._admit()
            for what, problem in (
                ("requests need what they needed before", self._access_problem),
                ("still serving the previous checkpoint", self._problem or self._versions.main.problem),
                ("requests are refused", self._versions.unavailable),
            ):
                if problem and problem != self._said.get(what):
                    print(f"warning: {what}: {problem}", file=sys.stderr, flush=True)
                self._said[what] = problem
            with contextlib.suppress(OSError):  # a full disk must not end requests
                self._write()

    def _admit(self) -> None:
        """Let requests need what the files say now."""
        try:
            access = self._files.read()
            for server in self._servers:
                server.use_access(access)
            self._access_problem = ""
        except (OeError, OSError, ValueError) as error:
            self._access_problem = str(error)

    def _follow(self) -> None:
        try:
            steps = _read_steps(self._options.step_file)
            if steps == self._steps:
                return
            self._steps = steps  # else a bad one would be tried ten times per second
            self._problem = ""
            self._versions.serve(steps or self._options.version)
        except (OeError, OSError) as error:
            self._problem = str(error)

    def _keep(self) -> None:
        """Let training keep the pinned checkpoints, which are loaded again when this starts again."""
        now = time.monotonic()
        kept, self._kept = self._kept, {}
        for model in self._versions.pinned:
            path, is_named = model.checkpoint, model.version in self._steps
            if path is None:
                continue
            last = kept.get((path, is_named))
            if last is not None and now < last + _PIN_SECONDS:
                self._kept[path, is_named] = last
                continue
            self._kept[path, is_named] = now
            try:
                checkpoint.pin(path, self._options.step_file if is_named else None)
            except OSError as error:
                said = f"warning: training may remove the pinned {path}: {error}"
                if last is None:
                    print(said, file=sys.stderr, flush=True)

    def _write(self) -> None:
        facts = {
            **self._facts,
            "version": self._versions.newest.version,
            "versions": list(self._versions.models),
            "step": next(iter(self._steps), None),
            "problem": self._problem,
        }
        if self._options.ready_file is not None and facts != self._written:
            durable.write_json(self._options.ready_file, facts)
            self._written = facts


if __name__ == "__main__":
    sys.exit(interrupt.run(main))
