"""``oeprov serve-export``: TensorFlow Serving with a job's export."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from provision.cli.options import DEFAULT_STATE_DIR, StateDir

SERVE_EXAMPLES = (
    "Examples:  oeprov serve-export  |  oeprov serve-export JOB --print  |  oeprov serve-export --stop"
)


def serve_export(
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="Which job's export; default: the last that there is."),
    ] = None,
    image: Annotated[
        str, typer.Option(help="Image of TensorFlow Serving; pin it in production.")
    ] = "tensorflow/serving:latest",
    port: Annotated[
        int, typer.Option(min=2, max=65535, help="Port of REST; gRPC is at the one before it.")
    ] = 8501,
    check_image: Annotated[
        bool, typer.Option("--check-image/--no-check-image", help="Ask the registry for the image first.")
    ] = True,
    show: Annotated[bool, typer.Option("--print", help="Print the command and do nothing.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the container.")] = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Serve the SavedModel that a job exported by TensorFlow Serving in docker, and ask it once.

    Of any flavor. It listens on this machine only. `python -m oe_runtime.serve` serves tables that are too
    large for a SavedModel.
    """
    from provision.jobs import serving

    found = serving.find(state_dir, job, image=image, port=port)
    if show:
        print(shlex.join(found.command()))
        return 0
    return serving.stop(found) if stop else serving.serve(found, check_image=check_image)
