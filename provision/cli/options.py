"""Options that several commands share, and opening the inventory that they name."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from provision.cluster.errors import OeprovError
from provision.cluster.state_directory import (
    DEFAULT_STATE_DIR as DEFAULT_STATE_DIR,  # for commands, with StateDir
)

if TYPE_CHECKING:  # the models are slow to import
    from provision.cluster.inventory import Inventory
    from provision.converge.changes import How

InventoryPath = Annotated[
    Path,
    typer.Option(
        "-i",
        "--inventory",
        metavar="FILE",
        envvar="OEPROV_INVENTORY",
        help="The inventory: an ordinary Ansible YAML inventory.",
    ),
]
Limit = Annotated[
    str | None,
    typer.Option(
        "--limit",
        metavar="PATTERN",
        help="Only these hosts or groups; Ansible's patterns, such as 'workers:!gpu-2'.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


def _directory(path: Path) -> Path:
    """The state directory; OeprovError where it is a file, or lies below one."""
    for place in (path, *path.absolute().parents):
        if place.is_dir():
            return path
        if place.exists():
            raise OeprovError(
                f"state directory {path}: {place} is not a directory; choose another with --state-dir or "
                "OEPROV_STATE_DIR"
            )
    return path


StateDir = Annotated[
    Path,
    typer.Option(
        "--state-dir",
        metavar="DIR",
        callback=_directory,
        envvar="OEPROV_STATE_DIR",
        help="Directory of jobs, checkpoints and the journal.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Agree to all steps that destroy nothing.")]
DoNotAsk = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Consent = Annotated[
    list[str] | None,
    typer.Option(
        "--consent",
        metavar="HOST:OBJECT",
        help="Agree to lose this object, named as in the plan; once per object.",
    ),
]
JobConsent = Annotated[
    list[str] | None,
    typer.Option(
        "--consent",
        metavar="JOB",
        help="Agree to lose this job's rows that only persistent memory holds. Whole id; once per job.",
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check", "--plan", help="Only observe and show the plan; exit code 2 when changes are pending."
    ),
]
RetryTrials = Annotated[
    bool,
    typer.Option("--retry-trials", help="Retry kernels and kernel arguments that failed their trial boot."),
]
FailFast = Annotated[
    bool,
    typer.Option("--fail-fast", help="Stop when any host fails, has a problem or cannot be reached."),
]
KeepGoing = Annotated[
    bool,
    typer.Option(
        "--keep-going",
        help="Change the other hosts whatever fails, as long as rollout_quorum servers are up.",
    ),
]
DEFAULT_INVENTORY = Path("inventory.yml")


def open_inventory(path: Path, limit: str | None, state_dir: Path) -> Inventory:
    """Load and check the inventory; imported late, because Ansible's loader takes a while to import."""
    from provision.inventory.loader import load

    return load(path, limit, state_dir=state_dir)


System = Annotated[
    list[str] | None,
    typer.Option(
        "--system",
        metavar="[HOST=]ID-RELEASE",
        help="System of all hosts or of one, such as debian-12; can be repeated.",
    ),
]


_SETTINGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("setting_flags.json").read_text(encoding="utf-8")
)  # by flag; `make generate` writes it, so that a command line needs not wait for the settings' models
_PANEL = "Settings of the job (default: the inventory's)"
_TYPES = {"string": str, "size": str, "integer": int, "number": float, "boolean": bool}


def takes_settings(
    *names: str, panel: str | None = _PANEL, **own: dict[str, Any]
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the flags of these settings (default: all); it gets the used flags as ``given``.

    ``own``: more settings, each with arguments of ``typer.Option`` that differ for this command.
    """
    wanted = {name: own.get(name, {}) for name in [*names, *own] or _SETTINGS}
    flags = [_flag(name, {"rich_help_panel": panel, **otherwise}) for name, otherwise in wanted.items()]

    def wrap(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def run(**words: Any) -> int:
            given = {item.name: words.pop(item.name) for item in flags}
            return command(given={k: v for k, v in given.items() if v is not None}, **words)

        others = inspect.signature(command, eval_str=True).parameters.values()
        return _with_options(run, [*(item for item in others if item.name != "given"), *flags])

    return wrap


def _flag(name: str, own: dict[str, Any]) -> inspect.Parameter:
    setting, flag = _SETTINGS[name], name.replace("_", "-")
    kind = setting["type"]
    word = f"--{flag}/--no-{flag}" if kind == "boolean" else f"--{flag}"
    said = {"help": setting["help"], "min": setting.get("minimum"), "max": setting.get("maximum")}
    if kind == "size":
        said["metavar"] = "SIZE"
    option = Annotated[_TYPES[kind] | None, typer.Option(word, **{**said, **own})]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)


class WithScriptArguments(typer.core.TyperCommand):
    """A command that leaves the words after the first ``--`` to a training script: see ``script_words``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the script's words away before the command's own are parsed."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[_SCRIPT_WORDS] = args[end + 1 :] if end < len(args) else None
        return super().parse_args(ctx, args[:end])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The command's own pieces, and the script's arguments."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENTS…]"]


_SCRIPT_WORDS = "oeprov.script_words"


def script_words(context: typer.Context) -> list[str] | None:
    """What the command line has after ``--``; None without one."""
    found: list[str] | None = context.meta.get(_SCRIPT_WORDS)
    return found


@dataclass(frozen=True)
class ChangeOptions:
    """The options that every command that changes hosts has."""

    path: Path
    limit: str | None
    how: How
    retry_trials: bool = False

    def open(self) -> Inventory:
        """Load the inventory; OeprovError says what is wrong in it."""
        found = open_inventory(self.path, self.limit, self.how.state_dir)
        if not self.retry_trials:
            return found
        hosts = {name: replace(host, retry_trials=True) for name, host in found.hosts.items()}
        return replace(found, hosts=hosts)


def _change(
    inventory: InventoryPath = DEFAULT_INVENTORY,
    limit: Limit = None,
    yes: Yes = False,
    consent: Consent = None,
    check: Check = False,
    retry_trials: RetryTrials = False,
    fail_fast: FailFast = False,
    keep_going: KeepGoing = False,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> ChangeOptions:
    from provision.cli.views.terminal import Terminal
    from provision.cluster.host_names import named_objects
    from provision.converge import changes
    from provision.converge.rolling import Failures

    if fail_fast and keep_going:
        raise OeprovError("--fail-fast and --keep-going exclude each other: give one of them")
    failures = Failures.fail_fast if fail_fast else Failures.keep_going if keep_going else Failures.limited
    agreed = changes.Consent(yes=yes, objects=named_objects(consent or []), failures=failures)
    how = changes.How(state_dir, agreed, Terminal(as_json=as_json), check)
    return ChangeOptions(inventory, limit, how, retry_trials)


def changes_hosts(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options that every command that changes hosts has; it gets them as ``change``."""
    shared = inspect.signature(_change, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True).parameters
    options = [item for name, item in {**own, **shared}.items() if name != "change"]

    @functools.wraps(command)
    def run(**given: Any) -> int:
        return command(change=_change(**{name: given.pop(name) for name in shared}), **given)

    return _with_options(run, options)


def _with_options(run: Callable[..., int], options: list[inspect.Parameter]) -> Callable[..., int]:
    """The function with the signature and annotations that Typer reads the options from."""
    keywords = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in options]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in keywords}
    return run


VaultId = Annotated[
    list[str] | None,
    typer.Option(
        "--vault-id",
        metavar="LABEL@FILE",
        help="Password of a vaulted inventory, as Ansible's: a file, a program, or LABEL@prompt.",
    ),
]
AskVaultPass = Annotated[
    bool, typer.Option("--ask-vault-pass", help="Ask for the password of a vaulted inventory.")
]


def add_vault_options(app: typer.Typer) -> None:
    """Give every command that reads an inventory the options of its vault's passwords."""
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_vault_options(group.typer_instance)
    for item in app.registered_commands:
        if item.callback is not None and "inventory" in inspect.signature(item.callback).parameters:
            item.callback = _unlocking(item.callback)


def _unlocking(command: Callable[..., int]) -> Callable[..., int]:
    def own(vault_id: VaultId = None, ask_vault_pass: AskVaultPass = False) -> None: ...

    options = [
        *inspect.signature(command, eval_str=True).parameters.values(),
        *inspect.signature(own, eval_str=True, locals=globals()).parameters.values(),
    ]

    @functools.wraps(command)
    def run(vault_id: list[str] | None, ask_vault_pass: bool, **given: Any) -> int:
        from provision.inventory import vault

        vault.want(vault_id or (), ask_vault_pass)
        return command(**given)

    return _with_options(run, options)
