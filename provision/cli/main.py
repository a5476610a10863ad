"""The program ``oeprov``: its commands and how their errors are printed.

Exit codes: 0 fine, 1 error, 2 changes pending (``plan``, and ``--check``), 130 stopped by the user.
"""

from __future__ import annotations

import os
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from provision import __version__
from provision.cli import (
    checkpoint,
    cost,
    data,
    elastic,
    inventory,
    jobs,
    lab,
    operations,
    serve,
    servers,
    training,
)
from provision.cli.options import (
    DEFAULT_INVENTORY,
    DEFAULT_STATE_DIR,
    ChangeOptions,
    Check,
    InventoryPath,
    Json,
    Limit,
    StateDir,
    System,
    WithScriptArguments,
    Yes,
    add_vault_options,
    changes_hosts,
    open_inventory,
)
from provision.cluster.errors import Interrupted, OeprovError
from provision.inventory import vault
from provision.node.command import CommandError

if TYPE_CHECKING:  # slow to import
    from provision.artifacts.bundle import Bundle

app = typer.Typer(
    name="oeprov",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Turns hosts with persistent memory, CXL memory and GPUs into a training cluster for recommendation "
    "models, and trains on it.",
    epilog="First steps on this machine alone:  oeprov bootstrap -i inventory/local.yml --yes  and then  "
    "oeprov launch-training -i inventory/local.yml",
)
app.add_typer(inventory.app, name="inventory")
app.add_typer(lab.app, name="lab")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(data.app, name="data")
_PROVISION, _TRAIN = "Hosts", "Training"


def _version(value: bool) -> None:
    if value:
        typer.echo(f"oeprov {__version__}")
        raise typer.Exit


BundleDirectory = Annotated[
    Path | None,
    typer.Option("--bundle", metavar="DIR", help="Take all packages from this bundle (oeprov bundle)."),
]


def _opened(bundle: Path | None) -> Bundle | None:
    from provision.artifacts.bundle import Bundle

    return None if bundle is None else Bundle(bundle)


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(
    rich_help_panel=_PROVISION,
    epilog="Examples:  oeprov plan -i inventory.yml --limit parameter_servers  |  "
    "oeprov plan --host re6p-1  |  "
    "oeprov plan -i inventory/sample.yml --offline  |  "
    "oeprov plan --offline --system centos-7.8 --system gpu-1=ubuntu-24.04  |  oeprov plan --json",
)
def plan(
    inventory: InventoryPath = DEFAULT_INVENTORY,
    limit: Limit = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Contact no host: plan for freshly installed hosts.")
    ] = False,
    system: System = None,
    commands: Annotated[
        bool, typer.Option("--commands", help="Also show the commands of every step.")
    ] = False,
    host: Annotated[str | None, typer.Option("--host", metavar="NAME", help="Plan only this host.")] = None,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Show what would change, on which host and why; what destroys data and what reboots.

    Observes all hosts at once and changes nothing. Hosts with the same steps are one block; --host shows one
    host alone. With --offline, --system names the hosts' systems;
    default: Rocky Linux 8 for hosts with persistent memory, Ubuntu for the others. Exit code 0: nothing to
    do; 2: changes are pending; 1: a host could not be observed, or cannot be brought to the wanted state.
    """
    from provision.cli.views.terminal import Terminal
    from provision.converge import planning

    found = open_inventory(inventory, limit, state_dir)
    return planning.plan(
        found,
        Terminal(as_json=as_json),
        offline=offline,
        systems=system or [],
        commands=commands,
        host=host or "",
        state_dir=state_dir,
    )


@app.command(
    rich_help_panel=_PROVISION,
    epilog="Examples:  oeprov adopt -i inventory.yml --known-hosts keys.txt  |  "
    "oeprov adopt --limit workers --accept-new --check",
)
def adopt(
    inventory: InventoryPath = DEFAULT_INVENTORY,
    limit: Limit = None,
    accept_new: Annotated[
        bool,
        typer.Option("--accept-new", help="Accept and record all host keys that ssh does not know yet."),
    ] = False,
    known_hosts: Annotated[
        Path | None,
        typer.Option(
            "--known-hosts",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Accept and record only host keys of this file, which has the format of known_hosts.",
        ),
    ] = None,
    bundle: BundleDirectory = None,
    yes: Yes = False,
    check: Check = False,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Log in to new hosts with a password once, so that all other commands get in with keys.

    Installs your public key, and for users other than root a line of sudoers; shows both first and asks. The
    password is ansible_password of the inventory, OEPROV_PASSWORD, or asked for; for sudo and su it is
    ansible_become_password or OEPROV_BECOME_PASSWORD. Host keys are shown; without --accept-new or
    --known-hosts it asks before it records them. A second run changes nothing.
    """
    from provision.cli.views.terminal import Terminal
    from provision.converge import adoption
    from provision.converge.changes import Consent, How

    trust = adoption.Trust(accept_new, known_hosts)
    found = open_inventory(inventory, limit, state_dir)
    how = How(state_dir, Consent(yes), Terminal(as_json=as_json), check)
    return adoption.adopt(found, how, trust=trust, bundle=_opened(bundle))


@app.command(
    rich_help_panel=_PROVISION,
    epilog="Examples:  oeprov bootstrap -i inventory/local.yml --yes  |  oeprov bootstrap --check",
)
@changes_hosts
def bootstrap(
    change: ChangeOptions,
    bundle: BundleDirectory = None,
) -> int:
    """Set up every host as the inventory says: kernel, packages, memory, runtime.

    Shows the plan, asks, applies it through Ansible, and observes the hosts again. A second run on a healthy
    cluster changes nothing. After a killed run, run it again: it plans from the current state.

    Data is never destroyed unless --consent names the host and the object.
    """
    from provision.converge import changes

    found = change.open()
    return changes.bootstrap(found, change.how, bundle=_opened(bundle))


@app.command(
    rich_help_panel=_PROVISION,
    epilog="Examples:  oeprov bundle all  |  oeprov bundle all --system debian-12  |  then, where there "
    "is no network:  oeprov bootstrap --bundle all",
)
def bundle(
    output: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory for the bundle.")],
    inventory: InventoryPath = DEFAULT_INVENTORY,
    limit: Limit = None,
    system: System = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Collect all packages and wheels that the hosts need in one directory, for sites without a network.

    Contacts no host. Hosts without --system are taken to run this machine's system. MANIFEST.json lists every
    file with its SHA-256; `oeprov bootstrap --bundle` checks them.
    """
    from provision.artifacts import bundle as bundling

    found = open_inventory(inventory, limit, state_dir)
    for line in bundling.make(found, output, system or [], state_dir):
        typer.echo(line)
    typer.echo(f"{output}: use it with: oeprov bootstrap -i {inventory} --bundle {output}")
    return 0


@app.command(
    rich_help_panel=_PROVISION,
    epilog="Examples:  oeprov pmem-mode system-ram --limit re7p-1 --check  |  oeprov pmem-mode fsdax --yes",
)
@changes_hosts
def pmem_mode(
    mode: Annotated[
        str,
        typer.Argument(help="fsdax, system-ram, tiered, memory, or on kind local directory.", metavar="MODE"),
    ],
    change: ChangeOptions,
    write_inventory: Annotated[
        bool,
        typer.Option("--write-inventory", help="Write MODE into the inventory and show the change."),
    ] = False,
) -> int:
    """Switch how hosts use their persistent memory.

    fsdax: a file system whose files are the memory itself. system-ram: the memory becomes a node without
    CPUs. memory: DRAM becomes a cache of it (bare metal only). A host that cannot do MODE says why.

    At the end it shows the matching change of the inventory, and asks whether to write it.
    """
    from provision.converge import changes, planning

    planning.check_mode(mode)
    return changes.pmem_mode(change.open(), mode, change.how, write_inventory=write_inventory)


class Rollback(str, Enum):
    """What `oeprov rollback` restores."""

    kernel = "kernel"
    pmem_mode = "pmem-mode"


@app.command(
    rich_help_panel=_PROVISION,
    epilog="Examples:  oeprov rollback kernel --check  |  oeprov rollback pmem-mode --limit re6p-1",
)
@changes_hosts
def rollback(
    what: Annotated[Rollback, typer.Argument(help="What to restore.")],
    change: ChangeOptions,
) -> int:
    """Restore the kernel, or the mode of persistent memory, from before the last change.

    The journal in the state directory has the earlier value. The way back is a plan like any other: it is
    shown and needs consent, and the old kernel boots on trial. Data is lost only with --consent that names
    the host and the object.
    """
    from provision.converge import rollback as back

    way = back.kernel if what is Rollback.kernel else back.pmem_mode
    return way(change.open(), change.how)


@app.command(
    rich_help_panel=_PROVISION,
    epilog="Examples:  oeprov destroy --check  |  oeprov destroy --limit re6p-1 --consent "
    "re6p-1:job/deepfm-20261122-101500",
)
@changes_hosts
def destroy(
    change: ChangeOptions,
) -> int:
    """Remove what oeprov made on hosts: services, environments, mounts, configuration, kernel arguments.

    Shows the plan and asks; refuses while a job runs. Checkpoints, rows in persistent memory and namespaces
    stay, unless --consent names the host and each object as the plan does. A named object that does not exist
    is reported. System packages and kernels stay too (oeprov rollback kernel), and so do this machine's
    records of jobs (jobs in the state directory). Running it twice does no harm.
    """
    from provision.converge import destroy as removing

    return removing.run(change.open(), change.how)


@app.command(
    rich_help_panel=_PROVISION,
    epilog="Examples:  oeprov doctor -i inventory.yml  |  oeprov doctor --limit re6p-1 --json",
)
def doctor(
    inventory: InventoryPath = DEFAULT_INVENTORY,
    limit: Limit = None,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Report what is wrong on each host and what to do about it. Changes nothing.

    Exit code 0: nothing is wrong; 1: something is, or a host could not be observed.
    """
    from provision.cli.views import doctor as view
    from provision.converge.doctor import examine_all

    found = open_inventory(inventory, limit, state_dir)
    return view.show(found.cluster, examine_all(found), as_json=as_json)


app.command(rich_help_panel=_TRAIN, epilog=training.LAUNCH_EXAMPLES, cls=WithScriptArguments)(
    training.launch_training
)
app.command(rich_help_panel=_TRAIN, epilog=training.RESUME_EXAMPLES, cls=WithScriptArguments)(training.resume)
app.command(rich_help_panel=_TRAIN, epilog=training.STATUS_EXAMPLES)(training.status)
app.command(rich_help_panel=_TRAIN, epilog=training.LOGS_EXAMPLES)(training.logs)
app.command(rich_help_panel=_TRAIN, epilog=training.STOP_EXAMPLES)(training.stop)
app.command(rich_help_panel=_TRAIN, epilog=elastic.SCALE_EXAMPLES)(elastic.scale)
app.command(rich_help_panel=_TRAIN, epilog=elastic.DRAIN_EXAMPLES)(elastic.drain)
app.command(rich_help_panel=_TRAIN, epilog=elastic.UNDRAIN_EXAMPLES)(elastic.undrain)
app.command(rich_help_panel=_TRAIN, epilog=training.FETCH_EXAMPLES)(training.fetch)
app.add_typer(jobs.app, name="jobs", rich_help_panel=_TRAIN)
app.add_typer(servers.app, name="servers", rich_help_panel=_TRAIN)
app.add_typer(serve.app, name="serve", rich_help_panel=_TRAIN)
app.command(rich_help_panel=_PROVISION, epilog=operations.HISTORY_EXAMPLES)(operations.history)
app.command(rich_help_panel=_PROVISION, epilog=operations.MONITORING_EXAMPLES)(operations.monitoring)
app.command(rich_help_panel=_PROVISION, epilog=operations.DASHBOARD_EXAMPLES)(operations.dashboard)
app.command(rich_help_panel=_PROVISION, epilog=operations.REPORT_EXAMPLES)(operations.report)
app.command(rich_help_panel=_TRAIN, epilog=training.SERVE_EXAMPLES)(training.serve_export)
app.command(rich_help_panel=_TRAIN, epilog=cost.COST_EXAMPLES)(cost.cost)
app.command(rich_help_panel=_TRAIN, epilog=training.MANIFESTS_EXAMPLES, cls=WithScriptArguments)(
    training.manifests
)
app.command(rich_help_panel=_TRAIN, epilog=checkpoint.RESHARD_EXAMPLES)(checkpoint.reshard)


add_vault_options(app)

# Typer carries its own copy of click or uses the installed one; this is the base of its errors in either.
_ClickError: type[Exception] = typer.BadParameter.__mro__[2]


def run(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code; an OeprovError becomes one line on standard error."""
    words = sys.argv[1:] if arguments is None else arguments
    if "" in words and words[:2] != ["lab", "ssh"]:
        before = f"the one after {words[words.index('') - 1]}" if words.index("") else "the first one"
        return _fail(f"an argument is empty: {before}; is a variable of your command line not set?")
    with vault.guarded_output():
        return _run(arguments)


def _run(arguments: list[str] | None) -> int:
    try:
        # Typer's own handling would exit with 2 on a wrong option, which means "changes pending" here.
        code = app(args=arguments, standalone_mode=False, prog_name="oeprov")
        sys.stdout.flush()  # finds a closed pipe here, not at the interpreter's exit
    except Interrupted as error:
        _fail(str(error))
        return 130
    except OeprovError as error:
        return _fail(str(error))
    except CommandError as error:
        return _fail(str(error))
    except _ClickError as error:
        path = error.ctx.command_path if getattr(error, "ctx", None) else "oeprov"  # type: ignore[attr-defined]
        message = _usage_error(error)
        if not message:  # no arguments at all: the help was the answer
            return 1
        return _fail(f"{message.rstrip('.')}; see `{path} --help`")
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a read-only one, a file where a directory should be, …
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")
    return code if isinstance(code, int) else 0


def _usage_error(error: Any) -> str:
    """What is wrong with the command line; of a wrong value, the option first."""
    from provision.cluster.setting_types import explain

    if not isinstance(error, typer.BadParameter) or not error.message:
        return " ".join(error.format_message().split())
    wrong: Any = error.__cause__  # pydantic's, in the versions of Typer that use it
    words = explain(wrong.errors()[0]) if hasattr(wrong, "errors") else error.message
    names = getattr(error.param, "opts", None) or [error.param_hint]
    option = max((str(name) for name in names if name), key=len, default="")
    return f"{option}: {words}" if option else words


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1
