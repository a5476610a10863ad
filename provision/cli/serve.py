"""``oeprov serve``: replicas of a model that answer requests, and the step that they serve."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import typer.core

from provision.cli.elastic import asking
from provision.cli.options import (
    DEFAULT_STATE_DIR,
    DoNotAsk,
    Json,
    StateDir,
    WithScriptArguments,
    script_words,
)

START = "start"  # the command that `oeprov serve MODEL` means


class _Group(typer.core.TyperGroup):
    """``oeprov serve MODEL`` is ``oeprov serve start MODEL``."""

    default_command = START

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the command's name where the first word is none."""
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Group,
    help="Answer requests for a trained model: `oeprov serve JOB|RUN`; return to an earlier step.",
    epilog="Examples:  oeprov serve JOB  |  oeprov serve run --replicas 2 --name ctr  |  "
    "oeprov serve rollback",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB|RUN]",
        help="A job, the directory of a run or of an exported model, or a URL (s3://…); default: the "
        "last job that trained.",
    ),
]
Rows = Annotated[
    str | None,
    typer.Option(
        metavar="JOB|RUN", help="Whose checkpoints have the rows, of a model that a script exported."
    ),
]
Port = Annotated[
    int,
    typer.Option(min=0, max=65535, help="For HTTP; replica N gets the Nth port after it. 0: any free ones."),
]
Certificate = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Encrypt connections with this certificate, in PEM."),
]
Key = Annotated[str | None, typer.Option(metavar="FILE", help="The certificate's key.")]
Token = Annotated[str | None, typer.Option(metavar="FILE", help="File with a token that requests need.")]
CompileTo = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Compile a PyTorch export, and keep the result for the next start."),
]


@app.command(START, cls=WithScriptArguments)
def start(
    context: typer.Context,
    model: Model = None,
    rows: Rows = None,
    replicas: Annotated[
        int, typer.Option(min=1, max=1024, metavar="N", help="Processes, each with its rows and its port.")
    ] = 1,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Name of the model in requests; default: the job's."),
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Port = 8501,
    grpc_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="For gRPC, in the same way; default: none.")
    ] = None,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    request_token_file: Token = None,
    compile_to: CompileTo = None,
    start_timeout: Annotated[
        int, typer.Option(min=1, metavar="SECONDS", help="Time for loading the model and its rows.")
    ] = 600,
    show_manifests: Annotated[
        bool,
        typer.Option("--print", help="Only print the Kubernetes manifests, for a job that runs there."),
    ] = False,
    yes: DoNotAsk = False,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Start replicas that answer TensorFlow Serving's requests for a model, as a job in the background.

    They serve the newest checkpoint of the job or run, also while it trains, and are started again when they
    end. `oeprov status`, `oeprov logs` and `oeprov stop` work on them. Words after a lone -- are options of
    each `python -m oe_runtime.serve`, such as -- --refresh-seconds 1. Files are where the replicas run.
    A job on Kubernetes gets a Deployment and a Service; to serve it again changes them, and asks first.
    """
    from provision.cli.views.replicas import show
    from provision.cli.views.training import JobTerminal
    from provision.jobs import replicas as served
    from provision.jobs.request import ServeOptions

    files = {
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "request_token_file": request_token_file,
        "compile_to": compile_to,
    }
    options = ServeOptions(
        model=model,
        rows=rows,
        replicas=replicas,
        name=name,
        host=host,
        port=port,
        grpc_port=grpc_port,
        start_timeout=start_timeout,
        files={name: value for name, value in files.items() if value is not None},
        arguments=script_words(context) or (),
        confirm=asking(yes=yes, as_json=as_json),
    )
    if show_manifests:
        typer.echo(served.manifests(options, state_dir=state_dir), nl=False)
        return 0
    job = served.serve(options, state_dir=state_dir, screen=JobTerminal(as_json=as_json))
    return show(job, state_dir, as_json=as_json)


@app.command(epilog="Examples:  oeprov serve rollback  |  oeprov serve rollback ctr --step 1000")
def rollback(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Which replicas: the model's name, or the name or id of their job; default: those that run.",
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="STEP", help="A kept checkpoint's step; default: the last before the served one."
        ),
    ] = None,
    newest: Annotated[
        bool, typer.Option("--newest", help="Serve the newest checkpoint again, and follow training.")
    ] = False,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Serve the checkpoint of an earlier step, in all replicas, while requests go on.

    They stay at that step, also when they are started again, until the next rollback or --newest; training
    keeps its checkpoint as long. If one cannot load it, all keep the step that they serve.
    """
    from provision.cli.views import replicas as view
    from provision.cli.views.training import JobTerminal
    from provision.jobs import replicas

    if newest and step is not None:
        raise typer.BadParameter("--newest and --step exclude each other: give one of them")
    screen = JobTerminal(as_json=as_json)
    job, version, seconds = replicas.roll_back(state_dir, name, step, newest=newest, screen=screen)
    return view.show_step(job, version, seconds, as_json=as_json)
