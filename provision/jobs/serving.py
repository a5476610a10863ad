"""``oeprov serve-export``: serve a job's export with TensorFlow Serving in a container, and ask it once."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from provision.cluster.errors import TrainingError
from provision.jobs import store
from provision.jobs.backends import registry
from provision.jobs.backends.containers import last_line
from provision.jobs.metrics import summary
from provision.jobs.screen import say
from provision.jobs.store import Job

IMAGE = "tensorflow/serving:latest"
_COMMAND_SECONDS = 600  # an image may have to be pulled
_REQUEST_SECONDS = 30
# An example value for each type, as metadata names it.
_EXAMPLES: dict[str, Any] = {"DT_FLOAT": 0.0, "DT_DOUBLE": 0.0, "DT_STRING": "", "DT_BOOL": False}


@dataclass(frozen=True)
class Serving:
    """One container of TensorFlow Serving."""

    job: Job
    model: str
    export: Path
    image: str = IMAGE
    port: int = 8501  # of REST; gRPC is at the one before it
    seconds: float = 120.0  # until it has loaded the model

    @property
    def name(self) -> str:
        """The container's name."""
        return f"oeprov-serving-{self.job.id}"

    @property
    def address(self) -> str:
        """The URL of the model."""
        return f"http://127.0.0.1:{self.port}/v1/models/{self.model}"

    def command(self) -> list[str]:
        """The command that starts the container; only this machine reaches its ports."""
        ports = [f"--publish=127.0.0.1:{self.port - 1}:8500", f"--publish=127.0.0.1:{self.port}:8501"]
        # Serving wants MODEL/VERSION; an export of ours is a model without a version's number.
        version = self.export.name if self.export.name.isdigit() else "1"
        mount = f"--volume={self.export}:/models/{self.model}/{version}:ro"
        words = ["docker", "run", "--detach", "--rm", f"--name={self.name}", *ports, mount]
        return [*words, f"--env=MODEL_NAME={self.model}", self.image]


def find(state_dir: Path, name: str | None, **more: Any) -> Serving:
    """The serving of a job's export, by default of the last; TrainingError when there is none here."""
    done = [job for job in store.all_jobs(state_dir) if name is None and summary(job.metrics_file).export]
    job = done[-1] if done else store.find(state_dir, name)
    export = summary(job.metrics_file).export
    if not export:
        place = registry.backend_of(job).results(job)
        if place and not job.metrics_file.exists():  # of a run on Kubernetes no events come here
            raise TrainingError(
                f"job {job.id}: its export is not here: once it has exported, it is in {place}/export; serve "
                "it there"
            )
        raise TrainingError(
            f"job {job.id} has no export; jobs export at their end, with --export (OpenEmbedding with "
            "runtime_variant standalone, mirrored and mpi)"
        )
    here = job.here(export)
    if here.exists() and job.is_old("export"):
        raise TrainingError(
            f"{here} was fetched before job {job.id} went on and exported again; fetch the new one: "
            f"oeprov fetch {shlex.quote(job.id)} --replace"
        )
    if not (here / "saved_model.pb").is_file():
        raise TrainingError(
            f"{here} is not a SavedModel; if the worker's host has it: oeprov fetch {shlex.quote(job.id)}"
        )
    return Serving(job, str(job.spec().settings.get("model") or "model"), here, **more)


def serve(serving: Serving, *, check_image: bool = True) -> int:
    """Start it, wait until the model is loaded, ask it once, show request and answer; returns 0.

    Nothing is left running after a TrainingError.
    """
    console = Console()
    if shutil.which("docker") is None:
        raise TrainingError(
            f"there is no docker on this machine's PATH; elsewhere: {shlex.join(serving.command())}"
        )
    if check_image:
        _check_image(serving.image)
    done = _run(serving.command())
    if done.returncode:
        raise TrainingError(f"docker run: {last_line(done)}")
    try:
        with console.status(f"{serving.image} loads {serving.export}"):
            _wait(serving)
        body = request(_ask(f"{serving.address}/metadata"))
        answer = _ask(f"{serving.address}:predict", body)
    except TrainingError:
        _run(["docker", "stop", serving.name])
        raise
    say(console, f"[green]✓[/] {serving.name} serves {serving.model} at {serving.address}")
    data = shlex.quote(json.dumps(body))
    lines = [f"curl -d {data} {serving.address}:predict", json.dumps(answer), f"docker stop {serving.name}"]
    for line in lines:
        say(console, f"  {escape(line)}")
    return 0


def stop(serving: Serving) -> int:
    """Stop the container. Idempotent."""
    done = _run(["docker", "stop", serving.name])
    if done.returncode and "No such container" not in done.stderr:
        raise TrainingError(f"docker stop {serving.name}: {last_line(done)}")
    Console().print(f"{serving.name} is stopped")
    return 0


def request(metadata: Any) -> dict[str, Any]:
    """A request with one row of zeros, from the model's metadata."""
    try:
        inputs = metadata["metadata"]["signature_def"]["signature_def"]["serving_default"]["inputs"]
        found = {}
        for name, item in inputs.items():
            sizes = [int(size["size"]) for size in item["tensor_shape"].get("dim", [])]
            value: Any = _EXAMPLES.get(item["dtype"], 0)
            for size in reversed(sizes):
                value = [value] * (1 if size < 0 else size)
            found[name] = value
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TrainingError(
            f"the model's metadata has no usable signature serving_default: {error!r}"
        ) from None
    return {"inputs": found}


def _check_image(image: str) -> None:
    if not _run(["docker", "image", "inspect", image]).returncode:
        return
    done = _run(["docker", "manifest", "inspect", image])
    if done.returncode:
        raise TrainingError(
            f"--image {image}: neither this machine nor the registry has it ({last_line(done)}); name an "
            "existing one (docker manifest inspect IMAGE), or add --no-check-image"
        )


def _wait(serving: Serving) -> None:
    deadline = time.monotonic() + serving.seconds
    why = "it did not answer"
    while time.monotonic() < deadline:
        try:
            states = _ask(serving.address).get("model_version_status", [])
        except TrainingError as error:
            why = str(error)
            states = []
        if any(item.get("state") == "AVAILABLE" for item in states):
            return
        if any(item.get("status", {}).get("error_code", "OK") != "OK" for item in states):
            raise TrainingError(f"TensorFlow Serving cannot load {serving.export}: {json.dumps(states)}")
        if not _run(["docker", "ps", "--quiet", f"--filter=name={serving.name}"]).stdout.strip():
            raise TrainingError(
                f"{serving.name} ended before it had loaded the model; its image: {serving.image}"
            )
        time.sleep(0.2)
    raise TrainingError(f"the model was not loaded after {serving.seconds:.0f} s: {why}")


def _run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TrainingError(f"{' '.join(argv[:3])}: {error}") from None


def _ask(address: str, body: dict[str, Any] | None = None) -> Any:
    """GET, or POST of a JSON ``body``, from an address of ours on loopback."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(address, data, timeout=_REQUEST_SECONDS) as answer:  # noqa: S310
            return json.load(answer)
    except urllib.error.HTTPError as error:
        words = error.read().decode(errors="replace")
        raise TrainingError(f"{address}: {error.code}: {words}") from None
    except (OSError, ValueError) as error:
        raise TrainingError(f"{address}: {error}") from None
