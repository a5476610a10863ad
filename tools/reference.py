"""MkDocs hook: writes reference pages from the code and adds the benchmark results, when the site is built.

Nothing that it writes is committed. Not for settings (`docs/reference/settings.md`) and the Python API, which
mkdocstrings reads.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = (
    "server",
    "train",
    "serve",
    "report",
    "checkpoint",
    "data.generate",
    "data.check",
    "data.inspect",
)


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to those of `docs/`."""
    from mkdocs.structure.files import File

    sys.path.insert(0, str(ROOT))
    pages = {
        "reference/commands.md": commands(),
        "reference/programs.md": programs(),
        "reference/metrics.md": metrics(),
        "reference/optimizers.md": optimizers(),
        "reference/exit-codes.md": exit_codes(),
        "reference/files.md": files_page(),
    }
    for page in sorted((ROOT / "benchmarks" / "results").glob("*.md")):
        pages[f"evidence/results/{page.name}"] = _with_links(page.read_text(), "benchmarks/results")
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for picture in sorted((ROOT / "benchmarks" / "results").glob("*.svg")):
        files.append(File.generated(config, f"evidence/results/{picture.name}", abs_src_path=str(picture)))
    return files


# Commands.


def commands() -> str:
    """Every command of `oeprov` with its options and examples, from the Typer application."""
    import typer

    from provision.cli.main import app

    lines = [
        "# Commands",
        "",
        "`oeprov COMMAND --help` prints the same text. See also [exit codes](exit-codes.md).",
        "",
    ]
    for command, path in sorted(_walk(typer.main.get_command(app), "oeprov"), key=lambda found: found[1]):
        lines += _command(command, path)
    return "\n".join(lines)


def _walk(command: Any, path: str) -> Iterator[tuple[Any, str]]:
    if not command.hidden:
        yield command, path
        for name, child in getattr(command, "commands", {}).items():
            yield from _walk(child, f"{path} {name}")


def _command(command: Any, path: str) -> Iterator[str]:
    if getattr(command, "commands", None) and path != "oeprov":
        yield f"## {path}\n\n{_plain(command.help)}\n"
        return
    words = [f"`{_usage(item)}`" for item in command.params if item.param_type_name == "argument"]
    yield f"## {path}\n"
    if path != "oeprov":
        yield f"`{path}` {' '.join(words)} {'`[OPTIONS]`' if len(command.params) > len(words) else ''}\n"
    yield _plain(command.help) + "\n"
    rows = [item for item in command.params if not getattr(item, "hidden", False)]
    if rows:
        yield "| Option | Default | Meaning |\n|---|---|---|"
        for item in rows:
            option = item.param_type_name == "option"
            names = sorted([*item.opts, *item.secondary_opts], key=len) if option else [_usage(item)]
            value = f" `{_value_name(item)}`" if option and not item.is_flag else ""
            shown = ", ".join(f"`{name}`" for name in names) + value
            yield f"| {shown} | {_default(item)} | {_cell(getattr(item, 'help', '') or '')} |"
        yield ""
    examples = re.split(r"\s[|&]+\s|:\s\s|\sand then\s", command.epilog or "")  # as test_documents.py has it
    if found := [" ".join(part.split()) for part in examples if part.strip().startswith("oeprov ")]:
        yield "\n".join(["```", *found, "```", ""])


def _usage(item: Any) -> str:
    name = str(item.metavar or item.name.upper())
    return name + (" …" if item.nargs == -1 else "") if item.required else f"[{name}]"


def _value_name(item: Any) -> str:
    annotation = getattr(getattr(item, "type_descriptor", None), "annotation", None)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "\\|".join(str(choice.value) for choice in annotation)
    return str(item.metavar or getattr(annotation, "__name__", "value")).upper().replace("|", "\\|")


def _default(item: Any) -> str:
    value = item.default.value if isinstance(item.default, Enum) else item.default
    return f"`{value}`" if isinstance(value, (str, int, float, Path)) and value is not False else ""


def programs() -> str:
    """The `--help` of the runtime's programs, as they print it."""
    lines = ["# Programs of the runtime", "", "`oeprov` starts these; they also work alone.", ""]
    for name in PROGRAMS:
        module = f"oe_runtime.{name}"
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={"COLUMNS": "110", "PATH": "/usr/bin:/bin"},
        )
        lines += [f"## python -m {module}", "", "```text", done.stdout.rstrip(), "```", ""]
    return "\n".join(lines)


# Metrics.


def metrics() -> str:
    """The metrics of a parameter server and of a serving process, from pages with everything switched on."""
    from oe_runtime.server import metrics as server
    from oe_runtime.serving import metrics as serving

    model: Any = SimpleNamespace(version=1, freshness=1.0, seconds_behind=0.0)
    versions: Any = SimpleNamespace(main=model, newest=model, models={1: model}, unavailable="")
    lines = [
        "# Metrics",
        "",
        "A parameter server started with `--metrics-port` serves these at `/metrics`. Some appear only where",
        "they mean something: with pools, a cache, drives, admission, eviction, several workers.",
        "",
        *_metrics_table(server.text(_STATISTICS, now=1_000_000.0)),
        "",
        "`python -m oe_runtime.serve` serves these at `/metrics` and `/monitoring/prometheus/metrics` of its",
        "port for HTTP:",
        "",
        *_metrics_table(serving.text(_SERVING, versions)),
    ]
    return "\n".join([*lines, ""])


def _metrics_table(page: str) -> list[str]:
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    lines = ["| Metric | Type | Labels | Meaning |", "|---|---|---|---|"]
    for name, what in re.findall(r"^# HELP (\S+) (.*)$", page, re.MULTILINE):
        samples = re.findall(rf"^{name}(?:_bucket)?{{(.*?)}} ", page, re.MULTILINE)
        labels = sorted({label for sample in samples for label in re.findall(r"(\w+)=", sample)})
        lines.append(f"| `{name}` | {kinds[name]} | {', '.join(f'`{x}`' for x in labels)} | {_cell(what)} |")
    return lines


_COUNTS = dict.fromkeys(("hits", "misses", "rows", "bytes", "evictions", "write_backs"), 1)
_TABLE = {
    "name": "C1",
    "job": "ctr",
    "rows": 1,
    "pushes_at_risk": 1,
    "nonfinite_gradients": 0,
    "cache": _COUNTS,
    "damage": dict.fromkeys(("quarantined_rows", "repaired_rows", "scrubbed_rows", "scrubs"), 0),
    "pool": dict.fromkeys(("slots", "free", "reserved", "changed", "headroom", "refused"), 1),
    "drive": dict.fromkeys(
        ("reads", "read_bytes", "written_bytes", "segments", "free_segments", "live", "retired", "moved"), 1
    ),
    "admission": dict.fromkeys(("admitted_rows", "filter_bytes", "forgotten_keys", "refused_keys"), 1),
    "eviction": {
        "cap": {"evicted_rows": 1, "refused_keys": 1},
        "ttl": {"evicted_rows": 1, "clock_jumps": 0},
    },
}
_TIMES = {"bounds": [0.001], "counts": [1, 0], "sum_seconds": 0.0005}
_STATISTICS: dict[str, Any] = {
    "index": 0,
    "count": 1,
    "storage": "dram_ssd",
    "tables": [_TABLE],
    "memory": dict.fromkeys(("dram", "pmem", "index", "rss"), 1),
    "pulls": {"requests": 1, "keys": 1},
    "pushes": {"requests": 1, "keys": 1},
    "traffic": dict.fromkeys(("requests", "bytes_in", "bytes_out"), 1),
    "connections": {"open": 1, "sharing_memory": 0, "accepted": 1, "resumed": 0, "refused": {"token": 0}},
    "queue": dict.fromkeys(("requests", "bytes", "waiting_for_memory"), 0),
    "workers": [
        {
            "job": "ctr",
            "of": 2,
            "connected": 2,
            "lost": 0,
            "batches": 1,
            "waiting": {"pull": 0},
            "held": {"pushes": 0, "bytes": 0},
        }
    ],
    "times": {"pull": _TIMES, "push": _TIMES, "queue_wait": _TIMES},
    "saved": 1.0,
}
_SERVING: dict[str, Any] = {
    "requests": {"POST": {"200": 1}},
    "examples": 1,
    "in_progress": 0,
    "traffic": {"bytes_in": 1, "bytes_out": 1},
    "connections": {"open": 1, "accepted": 1, "closed": {"refused": 0, "displaced": 0, "late": 0}},
    "times": {"answer": _TIMES},
}


def optimizers() -> str:
    """The optimizers of tables, from the core's registry."""
    import oe_runtime._core as core

    lines = [
        "# Optimizers",
        "",
        "The rules that tables have (`TableSpec.optimizer`), with the parameters of the Keras class of that "
        "name. A parameter that is left out has this default. The learning rate comes with each push.",
        "",
        "Every rule has these options:",
        "",
        "- `weight_decay`: decoupled, as in Keras and AdamW: the row shrinks by learning rate times decay "
        "first.",
        "- `coupled_weight_decay`: decay times the row is added to its gradient first, as `weight_decay` of "
        "PyTorch's Adam and others.",
        "- `learning_rate_decay`: the learning rate is divided by 1 + (pushes before) times this value, as "
        "`lr_decay` of PyTorch's Adagrad.",
        "- `maximize`: the gradient's sign is turned first.",
        "",
        "They change only rows that a push has gradients for. `torch` chooses PyTorch's form of a rule: "
        "where epsilon is added, momenta without the learning rate, and exact bias corrections. "
        "`epsilon_hat` with it is PyTorch's SparseAdam. `rowwise_adagrad` is FBGEMM's, with one accumulator "
        "per row; on the data sets that were measured it loses 0.0007 to 0.0012 of Adagrad's AUC.",
        "",
        "| name | parameters and defaults |",
        "|---|---|",
    ]
    for name, (defaults, _) in core.optimizers().items():
        values = (
            f"`{key}={value if isinstance(value, bool) else f'{value:g}'}`" for key, value in defaults.items()
        )
        lines.append(f"| `{name}` | {', '.join(values)} |")
    return "\n".join([*lines, ""])


# Exit codes and errors.


def exit_codes() -> str:
    """What the programs end with, and the errors of both packages by class."""
    lines = ["# Exit codes and errors", "", *_statement("provision.cli.main", "Exit codes:")]
    lines += [
        "",
        "| Code | `oeprov` | `python -m oe_runtime.train` and other programs |",
        "|---:|---|---|",
        "| 0 | done; `plan`: nothing to do; `doctor`: nothing is wrong | done |",
        "| 1 | an error, in one line on standard error | an error, in one line on standard error |",
        "| 2 | `plan` and `--check`: changes are pending; `checkpoint diff`: the checkpoints differ "
        "| wrong arguments; `checkpoint diff`: the checkpoints differ |",
        "| 3 | | a worker that could not go on without another worker |",
        "| 130 | stopped by the user (Ctrl-C) | stopped on request; training leaves a checkpoint |",
        "",
    ]
    for title, module in (
        ("Errors of the runtime", "oe_runtime.errors"),
        ("Errors of oeprov", "provision.cluster.errors"),
    ):
        lines += [f"## {title}", "", f"In `{module}`.", "", "| Error | Is a | Meaning |", "|---|---|---|"]
        source = importlib.import_module(module)
        for item in vars(source).values():
            if isinstance(item, type) and issubclass(item, Exception) and item.__module__ == module:
                base = item.__mro__[1].__name__
                lines.append(f"| `{item.__name__}` | `{base}` | {_cell(_first(item.__doc__ or ''))} |")
        lines.append("")
    return "\n".join(lines)


def _statement(module: str, start: str) -> list[str]:
    text = importlib.import_module(module).__doc__ or ""
    found = re.search(rf"{start}.*?(?=\n\n|\Z)", text, re.DOTALL)
    if not found:
        raise SystemExit(f"tools/reference.py: the docstring of {module} has no '{start}' any more")
    return [_plain(found[0])]


# Files.

_LAYOUTS = (
    ("A job's directory", "provision.jobs.store"),
    ("Checkpoints", "oe_runtime.checkpoint.store"),
    ("The journal", "provision.hosts.journal"),
)


def files_page() -> str:
    """Paths that oeprov writes on hosts, from the constants that name them; layouts, from the docstrings."""
    lines = [
        "# Files",
        "",
        "## On hosts",
        "",
        "`oeprov destroy` removes what oeprov made. Each path is declared in the module named beside it.",
        "",
        "| Path | Meaning | Declared in |",
        "|---|---|---|",
    ]
    found: dict[str, str] = {}
    modules = (ROOT / "provision").rglob("*.py")
    for path in sorted(modules, key=lambda path: ("node" not in path.parts, path)):
        for name, what in _paths(path):
            found.setdefault(name, f"| `{name}` | {_cell(what)} | `{path.relative_to(ROOT)}` |")
    lines += [found[name] for name in sorted(found)]
    for title, module in _LAYOUTS:
        source = ROOT.joinpath(*module.split("."))
        source = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
        text = ast.get_docstring(ast.parse(source.read_text())) or ""
        lines += ["", f"## {title}", "", _layout(text), "", f"(`{source.relative_to(ROOT)}`)"]
    return "\n".join([*lines, ""])


def _paths(path: Path) -> Iterator[tuple[str, str]]:
    """System paths of ours in a module, each with its comment or the docstring around it."""
    text = path.read_text()
    rows = text.splitlines()

    def visit(node: ast.AST, about: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            about = _first(ast.get_docstring(node) or "") or about
        if isinstance(node, ast.Constant) and re.fullmatch(
            r"/(etc|var|run|opt)/\S*oeprov[^\s{]*", str(node.value)
        ):
            comment = re.search(r"\s#\s*(?:noqa: \w+ - )?(.*)$", rows[node.lineno - 1])
            yield str(node.value), comment[1] if comment else about
        for child in ast.iter_child_nodes(node):
            yield from visit(child, about)

    return visit(ast.parse(text), "")


def _layout(docstring: str) -> str:
    """A module's docstring; indented drawings become blocks of code, and lists of names lists."""
    parts = []
    for part in docstring.split("\n\n"):
        if re.match(r"``\S+``\s{2,}|``\S+``,", part) or part.startswith("``"):
            rows = re.findall(r"(``[^\s`]+``(?:,\s+``[^\s`]+``)*)\s+(.*?)(?=\n``|;\s+``|\Z)", part, re.DOTALL)
            parts.append("\n".join(f"- {names}: {' '.join(what.split())}" for names, what in rows))
        else:
            parts.append(part)
    return "\n\n".join(parts).replace("``", "`")


# Text.


def _plain(text: str | None) -> str:
    return (
        re.sub(r"\[/?(?:bold|dim|italic|cyan|green|red|yellow)\]", "", text or "").replace("``", "`").strip()
    )


def _first(docstring: str) -> str:
    return " ".join(docstring.split("\n\n")[0].split())


def _cell(text: str) -> str:
    return " ".join(_plain(text).split()).replace("|", "\\|").replace("<", "&lt;")


def _with_links(text: str, folder: str) -> str:
    """Links to files that the site does not have become their names."""

    def mend(found: re.Match[str]) -> str:
        shown, target = found.groups()
        if "://" in target or target.startswith("#") or target.endswith((".svg", ".md")):
            return found[0]
        return f"{shown} (`{(ROOT / folder / target).resolve().relative_to(ROOT)}`)"

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", mend, text)
