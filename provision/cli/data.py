"""``oeprov data``: the runtime's tools for training data, run as what they are."""

from __future__ import annotations

from typing import Annotated

import typer

from provision.cli.runtime_program import run_program

app = typer.Typer(
    no_args_is_help=True,
    help="Look at training data.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _group() -> None:
    """Look at training data."""


@app.command(
    epilog="Examples:  oeprov data inspect train.csv > schema.yml  |  "
    "oeprov launch-training --data train.csv --schema schema.yml"
)
def inspect(
    file: Annotated[
        str,
        typer.Argument(
            help="Rows: text (.csv, .tsv; also .gz, .zst), .parquet, .arrow or .tfrecord; a file, a "
            "directory or a glob."
        ),
    ],
    label: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="The label, where it is not found; c1 is the first column without a header.",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="Rows to read.")] = 100_000,
    max_bad_rows: Annotated[
        int, typer.Option(min=0, metavar="N", help="Broken rows to skip, as in training.")
    ] = 0,
) -> int:
    """Print a schema to edit for files: what their columns seem to be, from a sample of their rows.

    With the label's rate, distinct values, missing shares, ranges, and what tables of each width take. The
    trainer reads the files with it; columns that it cannot read are ignored, with the reason.
    """
    named = [] if label is None else ["--label", label]
    counts = ["--rows", rows, "--max-bad-rows", max_bad_rows]
    return run_program("oe_runtime.data.inspect", *counts, *named, "--", file)
