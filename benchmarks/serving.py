"""Processor time of a served request: `python -m oe_runtime.serve` over REST beside a loop in Python.

    python benchmarks/serving.py [--dims 9 64] [--sizes 1 32 512] [--before PYTHON]

DeepFM over 26 fields, rows at a server or in the process that answers. "loop" calls the exported model from
Python, without HTTP, one request after the other: what a request costs anybody who loads it there. The others
answer 16 connections that send instances again and again; "merged" with `--max-batch-size 64`, "TLS" with
`--tls-cert`, and "a connection each" with a new connection for each request, of the first size. `--before` is
the Python of an environment with another version of oeprov, which takes turns with this one. A request's time
is that of all threads of the answering process, and of the rows' server.

    python benchmarks/serving.py --freshness 40

Instead: how long after a step the answers are of it, at one step per second, for so many steps, with rows at
a server and with rows that follow checkpoints. `--followers 20` adds as many that follow the same training
without a model.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "training"))

import numpy as np
import serving as training_serving
from processes import Server, server
from reporting import MISSED, RESULTS, header, table
from vocabularies import FIELDS, batches

CONNECTIONS = 16
NAMES = ["integers", *(f"C{i + 1}_id" for i in range(FIELDS))]
OF_LOOP = {1: 0.2, 32: 0.35, 512: 1.0}  # of its time, rows at a server
OF_BEFORE = 0.1
FRESH = {"p50": 200, "p99": 500}  # milliseconds
EACH = ", a connection each"
OF_TRAINING = 0.01  # of a step per second
UNDISTURBED = 5  # steps before each publication
EXAMPLES = 10  # of a step, with some 260 ids, of which each has a row in two tables


def main() -> int:
    """Measure and print the table; MISSED where a target is missed."""
    parser = argparse.ArgumentParser(prog="python benchmarks/serving.py", description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[9, 64])
    parser.add_argument("--rows", type=int, default=40_000, help="a field")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 32, 512], help="examples per request")
    parser.add_argument("--seconds", type=float, default=3, help="of requests of a size in each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", help="the Python of an environment with another version")
    parser.add_argument("--out", type=Path, help="the file of the table")
    parser.add_argument("--freshness", type=int, metavar="STEPS", help="measure that instead")
    parser.add_argument("--followers", type=int, default=0, metavar="N", help="more of them, without a model")
    parser.add_argument("--loop", help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--follow", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        return loop(**json.loads(options.loop))
    if options.follow:
        return follow(**json.loads(options.follow))
    if options.train:
        return train(**json.loads(options.train))
    if options.answer:
        return answer(**json.loads(options.answer))
    if options.freshness:
        return freshness(options)
    found: dict[tuple[int, int, str, str], list[float]] = {}
    for dim in options.dims:
        with tempfile.TemporaryDirectory() as directory, server("dram", Path(directory)) as rows_server:
            setup = {"dim": dim, "rows": options.rows, "endpoint": rows_server.endpoint}
            training_serving.worker({**setup, "directory": directory})
            for _ in range(options.rounds):
                measure(options, dim, Path(directory), rows_server, found)
    return report(options, found)


def measure(
    options: argparse.Namespace, dim: int, place: Path, rows_server: Server, found: dict[Any, list[float]]
) -> None:
    """All kinds once."""
    pythons = {"before": options.before, "now": sys.executable} if options.before else {"now": sys.executable}
    for rows in ("at a server", "inside"):
        model = [str(place / "original")]
        if rows == "at a server":
            model = [str(place / "model"), "--servers", rows_server.endpoint]
        with _loop(model, rows_server, options) as ask:
            for size in options.sizes:
                found.setdefault((dim, size, rows, "loop"), []).append(ask(size))
        merged = [*model, "--max-batch-size", "64"]
        kinds = {kind: (python, model) for kind, python in pythons.items()} | {
            "merged": (sys.executable, merged),
            "TLS": (sys.executable, [*model, *_certificate(place)]),
        }
        for kind, (python, arguments) in kinds.items():
            with _served(python, arguments, place) as (pid, port):
                tls = None if kind != "TLS" else ssl.create_default_context(cafile=place / "tls.crt")
                each = [EACH] if kind in ("now", "TLS") else []
                for size, how in [
                    *((size, "") for size in options.sizes),
                    *((options.sizes[0], one) for one in each),
                ]:
                    pids, sent = [pid, rows_server.pid], bodies(options.rows, size)
                    spent, per_second = over_http(pids, port, sent, options.seconds, tls, is_new=bool(how))
                    found.setdefault((dim, size, rows + how, kind), []).append(spent)
                    found.setdefault((dim, size, rows + how, f"{kind} per second"), []).append(per_second)


def _certificate(place: Path) -> list[str]:
    """Make a certificate of 127.0.0.1, with a key as servers mostly have; return the flags that use it."""
    certificate, key = place / "tls.crt", place / "tls.key"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    )
    if not key.exists():
        files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run([*command.split(), *files], check=True, capture_output=True)
        key.chmod(0o600)
    return ["--tls-cert", str(certificate), "--tls-key", str(key)]


def freshness(options: argparse.Namespace) -> int:
    """Print and keep the table of the time from a step to its answers; MISSED where a target is missed."""
    lines, missed = [], False
    for way in ("rows at a server", "rows that follow checkpoints"):
        with tempfile.TemporaryDirectory() as directory, server("dram", Path(directory)) as rows_server:
            found = _fresh(options, way, Path(directory), rows_server.endpoint)
        blocked = statistics.mean(found.pop("blocked"))
        for who, fresh in found.items():
            points = np.percentile(fresh, [int(name[1:]) for name in FRESH])
            shown = dict(zip(FRESH, points, strict=True))
            missed |= any(shown[name] > most for name, most in FRESH.items()) or blocked > 1000 * OF_TRAINING
            numbers = [shown["p50"], shown["p99"], max(fresh), blocked]
            lines.append([f"dim {options.dims[0]}, {way}{who}", *(f"{number:.1f}" for number in numbers)])
    text = header("Serving: from a step to its answers")
    text += f"""\
Milliseconds from the end of a training step, which pushes {EXAMPLES} examples of {FIELDS} fields, until the
process that serves (`Model.predict`, without HTTP) gives the first answer of it; one step per second,
{options.freshness} steps. "Training waits" is how much longer the next step, which begins at once, takes on
average, publication included, than the median of {UNDISTURBED} steps of the same batch just before. Targets:
{FRESH["p50"]} and {FRESH["p99"]}, and {1000 * OF_TRAINING:.0f} for the training.

"""
    text += table(["model", "p50", "p99", "most", "training waits"], lines)
    (options.out or RESULTS / "serving_freshness.md").write_text(text)
    print(text)
    return MISSED if missed else 0


def _fresh(options: argparse.Namespace, way: str, place: Path, endpoint: str) -> dict[str, list[float]]:
    """What a process that trains says while another one serves."""
    arguments = {"dim": options.dims[0], "rows": options.rows, "endpoint": endpoint, "directory": str(place)}
    arguments |= {"follows": way != "rows at a server", "steps": options.freshness}
    command = [sys.executable, __file__, "--train", json.dumps(arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdin
        _await_ready(training)
        kinds = {"": "--answer"}
        if options.followers:
            kinds[f", {options.followers} followers"] = "--follow"
            arguments["followers"] = options.followers
        with ExitStack() as stack:
            started = {}
            for who, kind in kinds.items():
                answering = [sys.executable, __file__, kind, json.dumps(arguments)]
                process = subprocess.Popen(answering, stdout=subprocess.PIPE, text=True)
                started[who] = stack.enter_context(process)
                _await_ready(process)
            print(file=training.stdin, flush=True)
            stepped = _last_line(training)
            found = {who: _last_line(one) for who, one in started.items()}
    fresh = {
        who: [
            1000 * (min(at for version, at in first.items() if int(version) >= int(step)) - ended)
            for first in each
            for step, (ended, _) in stepped.items()
        ]
        for who, each in found.items()
    }
    return {**fresh, "blocked": [1000 * blocked for _, blocked in stepped.values()]}


def _await_ready(process: subprocess.Popen[str]) -> None:
    """Skip what it says before, as TensorFlow does."""
    assert process.stdout
    while (line := process.stdout.readline()) and line != "ready\n":
        pass


def _last_line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout
    return json.loads(process.stdout.readlines()[-1])


def train(dim: int, rows: int, endpoint: str, directory: str, follows: bool, steps: int, **_: Any) -> int:
    """Export a model and train it, a step per second; print milliseconds as JSON."""
    from oe_runtime.programs.click_model import import_keras

    keras = import_keras(deterministic=False)
    import oe_runtime.keras as embed
    from oe_runtime import checkpoint, models
    from oe_runtime.client import Client
    from oe_runtime.keras import dense
    from oe_runtime.published_weights import WeightsPublisher
    from oe_runtime.shared_values import connect_first
    from oe_runtime.support import dense_file
    from oe_runtime.support.background import Background

    place, fields = Path(directory), [rows] * FIELDS
    client = Client([endpoint])
    model = embed.distributed_model(models.build("deepfm", fields, dim, embedding=embed.Embedding), client)
    model.compile(embed.distributed_optimizer(keras.optimizers.Adagrad(0.01)), "binary_crossentropy")
    data = [([part[:EXAMPLES] for part in x], y[:EXAMPLES]) for x, y in batches(fields, 4096)]
    model.train_on_batch(*data[0])
    model.save_serving_model(place / "model")
    publisher = WeightsPublisher(lambda: connect_first([endpoint]), 0.1, print)
    base: Path | None = None
    background = Background("publication")

    def seconds_of_step(step: int) -> float:
        began = time.monotonic()
        model.train_on_batch(*data[step % len(data)])
        return time.monotonic() - began

    def begin(step: int) -> Future[Path]:  # as a run does (run/checkpoints.py)
        arrays = dense.values(model)

        def take(save: Callable[..., Any]) -> Callable[[], Path]:
            def write(path: Path) -> Callable[[], Mapping[str, Any]]:
                contents: dict[str, bytes] = {}
                tables = save(path, since=base, contents=contents)

                def rest() -> Mapping[str, Any]:
                    for name, held in contents.items():
                        (path / name).write_bytes(held)
                    dense_file.write(arrays, path)
                    return {"tables": tables}

                return rest

            return checkpoint.begin(place / "checkpoints", step, write, base=base)

        begun = client.save_later(background, take)
        return background.submit(lambda: begun.result()())

    if follows:
        base = begin(1).result()
    print("ready", flush=True)
    sys.stdin.readline()  # it is served
    found: dict[int, tuple[float, float]] = {}  # by step: its end, and how much longer the next one took
    for step in range(2, steps + 2):
        undisturbed = statistics.median([seconds_of_step(step) for _ in range(UNDISTURBED)])
        client.stats()  # all is pushed
        ended = time.monotonic()
        published = None
        if follows:
            published = begin(step)
        else:
            publisher.offer(step, lambda: dense.weights(model))
        model.train_on_batch(*data[step % len(data)])  # the next step begins at once
        found[step] = ended, time.monotonic() - ended - undisturbed
        time.sleep(max(0.0, 1 - (time.monotonic() - ended)))
        base = published.result() if published else None
    if not follows:
        publisher.finish(steps + 1, lambda: dense.weights(model))
    print(json.dumps(found), flush=True)
    return 0


def answer(rows: int, endpoint: str, directory: str, follows: bool, steps: int, **_: Any) -> int:
    """Answer requests while another process trains; print when the first answer of each step came."""
    from oe_runtime.programs.click_model import import_keras

    import_keras(deterministic=False)
    from oe_runtime.client import Client
    from oe_runtime.serving import Model

    place, request, first = Path(directory), requests(rows, 1)[0], {}
    if follows:
        model = Model.load(place / "model", place / "checkpoints")
    else:
        model = Model.load(place / "model", client=Client([endpoint], read_only=True))
    with model:
        model.watch(10)
        model.predict(request)
        print("ready", flush=True)
        while steps + 1 not in first:
            _, version = model.predict_versioned(request)
            first.setdefault(version, time.monotonic())
            time.sleep(0.005)
    print(json.dumps([first]), flush=True)
    return 0


class Headless:
    """What a Model is of, without one: it takes weights and computes nothing."""

    def read_weights(self, file: Path) -> Any:
        """Read the arrays of a checkpoint, also the optimizer's."""
        from oe_runtime.support import dense_file

        return dense_file.read(file)

    def select_weights(self, arrays: Any, _what: str) -> Any:
        """Take all that was published."""
        return arrays

    def use_weights(self, weights: Any) -> None:
        """Do nothing."""


def follow(endpoint: str, directory: str, follows: bool, steps: int, followers: int, **_: Any) -> int:
    """Follow training so many times in one process; print when each had each step."""
    from oe_runtime.client import Client
    from oe_runtime.model_description import FILE, Description
    from oe_runtime.serving import Model
    from oe_runtime.serving.checkpoints import ServedCheckpoints, ServedRows
    from oe_runtime.spec import StorageSpec, TableSpec

    place, models = Path(directory), []
    specs = [TableSpec.from_json(spec) for spec in Description.read(place / "model" / FILE).tables]
    for _number in range(followers):
        if follows:
            rows = ServedRows(specs, StorageSpec(), 1)
            models.append(Model(Headless(), rows, None, ServedCheckpoints(place / "checkpoints")))
        else:
            models.append(Model(Headless(), None, Client([endpoint], read_only=True), None))
    first: list[dict[int, float]] = [{} for _ in models]
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model)
            model.refresh()
            model.watch(10)
        print("ready", flush=True)
        while not all(steps + 1 in times for times in first):
            for model, times in zip(models, first, strict=True):
                times.setdefault(model.version, time.monotonic())
            time.sleep(0.005)
    print(json.dumps(first), flush=True)
    return 0


def processor_seconds(pids: list[int]) -> float:
    """Of all threads of the processes, so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def bodies(rows: int, size: int) -> list[bytes]:
    """Sixteen requests."""
    return [
        json.dumps(
            {"instances": [{name: x[name][i].tolist() for name in NAMES} for i in range(size)]}
        ).encode()
        for x in requests(rows, size)
    ]


def requests(rows: int, size: int) -> list[dict[str, Any]]:
    """Arrays by name of sixteen requests."""
    x, _ = batches([rows] * FIELDS, 16 * size)[0]
    return [dict(zip(NAMES, (part[n * size : (n + 1) * size] for part in x), strict=True)) for n in range(16)]


def over_http(
    pids: list[int], port: int, sent: list[bytes], seconds: float, tls: ssl.SSLContext | None, *, is_new: bool
) -> tuple[float, float]:
    """Milliseconds of processor time per request, and requests per second."""
    ended, counts = threading.Event(), [0] * CONNECTIONS
    failed: list[Any] = []

    def ask(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        if tls is not None:
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=tls)
        for body in itertools.islice(itertools.cycle(sent), number, None):
            connection.request("POST", "/v1/models/ctr:predict", body)
            reply = connection.getresponse()
            said = reply.read()
            if reply.status != 200:
                failed.append(said)
            if is_new:
                connection.close()
            if ended.is_set() or failed:
                return
            counts[number] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    while not failed and min(counts) < 1:
        time.sleep(0.01)
    before, began, clock = processor_seconds(pids), sum(counts), time.monotonic()
    time.sleep(seconds)
    spent, answered = processor_seconds(pids) - before, sum(counts) - began
    took = time.monotonic() - clock
    ended.set()
    for thread in threads:
        thread.join()
    if failed:
        raise SystemExit(f"error: {failed[0].decode()}")
    return spent * 1000 / max(answered, 1), answered / took


@contextmanager
def _served(python: str, model: list[str], place: Path) -> Iterator[tuple[int, int]]:
    """A serving process: its pid and port."""
    ready = place / "ready.json"
    ready.unlink(missing_ok=True)
    command = [python, "-m", "oe_runtime.serve", *model, "--name", "ctr", "--port", "0"]
    with subprocess.Popen(
        [*command, "--ready-file", str(ready)], stdout=subprocess.DEVNULL, cwd="/"
    ) as process:
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise SystemExit(f"error: {command} ended with status {process.returncode}")
                time.sleep(0.05)
            yield process.pid, json.loads(ready.read_text())["port"]
        finally:
            process.terminate()


@contextmanager
def _loop(
    model: list[str], rows_server: Server, options: argparse.Namespace
) -> Iterator[Callable[[int], float]]:
    """A process of the loop, as what measures a size."""
    arguments = {
        "model": model[0],
        "endpoint": rows_server.endpoint if len(model) > 1 else "",
        "rows": options.rows,
        "seconds": options.seconds,
    }
    command = [sys.executable, __file__, "--loop", json.dumps(arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout

        def ask(size: int) -> float:
            before = rows_server.cpu_seconds()
            print(size, file=process.stdin, flush=True)
            milliseconds, calls = process.stdout.readline().split()
            return float(milliseconds) + (rows_server.cpu_seconds() - before) * 1000 / int(calls)

        yield ask
        process.stdin.close()


def loop(model: str, endpoint: str, rows: int, seconds: float) -> int:
    """Answer requests of the sizes that come on standard input; print their milliseconds and number."""
    from oe_runtime.programs.click_model import import_keras

    import_keras(deterministic=False)
    from oe_runtime.client import Client
    from oe_runtime.serving import Model

    client = Client([endpoint], read_only=True) if endpoint else None
    predict = Model.load(model, client=client).predict
    for line in sys.stdin:
        asked = requests(rows, int(line))
        for request in asked:
            predict(request)
        began, before, count = time.perf_counter(), time.process_time(), 0
        for request in itertools.cycle(asked):
            predict(request)
            count += 1
            if time.perf_counter() - began > seconds:
                break
        print((time.process_time() - before) * 1000 / count, count + len(asked), flush=True)
    return 0


def report(options: argparse.Namespace, found: dict[tuple[int, int, str, str], list[float]]) -> int:
    """Print and keep the table; MISSED where a target is missed."""
    lines, missed = [], False
    for dim, size, rows in sorted({key[:3] for key in found}):
        median = {
            key[3]: statistics.median(took) for key, took in found.items() if key[:3] == (dim, size, rows)
        }
        loop, before, now = median.get("loop"), median.get("before"), median["now"]
        limit = OF_LOOP.get(size) if rows == "at a server" else None
        missed |= loop is not None and limit is not None and now > limit * loop
        missed |= before is not None and size in OF_LOOP and now > OF_BEFORE * before
        numbers = [
            *((median.get(kind), 3) for kind in ("loop", "before", "now", "merged", "TLS")),
            *((None if base is None else now / base, 3) for base in (loop, before)),
            (limit, 2),
            (median["TLS"] / now, 2),
            *((median[f"{kind} per second"], 0) for kind in ("now", "TLS")),
        ]
        shown = ["" if number is None else f"{number:,.{digits}f}" for number, digits in numbers]
        lines.append([f"dim {dim}, {size} examples, rows {rows}", *shown])
    text = header("Serving over REST: processor time of a request")
    text += f"""\
Milliseconds of processor time per request, of the process that answers and of the rows' server;
{CONNECTIONS} connections; medians of {options.rounds} rounds in turns. The loop calls `Model.predict` in
Python, without HTTP. Targets: the loop's time by the limit, and {OF_BEFORE} of the version before. TLS 1.3
with a key of the curve P-256. Requests per second are those of clients in Python on the same processors.

"""
    columns = ["request", "loop", "before", "now", "merged", "TLS", "now / loop", "now / before", "limit"]
    columns += ["TLS / now", "per second", "per second, TLS"]
    text += table(columns, lines)
    (options.out or RESULTS / "serving.md").write_text(text)
    print(text)
    return MISSED if missed else 0


if __name__ == "__main__":
    sys.exit(main())
