"""README, docs and the examples of --help: their commands can be parsed, what they name is there."""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from provision.cli import main as cli
from provision.cluster import settings

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "containers/README.md", "docs/deeprec-flags.md"]
_MODULE = re.compile(r"python -m (oe_runtime[.\w]*)(.*)")
MADE = {"inventory/lab.yml"}  # by a command
_FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def code(text: str) -> Iterator[str]:
    """Lines of blocks for a shell, and what stands between backticks."""
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if not kind:
            for line in block.replace("\\\n", " ").splitlines():
                yield from (part.strip() for part in re.sub(r"(^|\s)#.*", "", line).split(";"))
    for span in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        yield span.strip()


def examples(command: Any) -> Iterator[str]:
    """Those that `oeprov … --help` ends with."""
    for part in re.split(r"\s[|&]+\s|:\s\s|\sand then\s", command.epilog or ""):
        if part.strip().startswith("oeprov "):
            yield " ".join(part.split())
    for child in getattr(command, "commands", {}).values():
        yield from examples(child)


@cache
def program() -> Any:
    return typer.main.get_command(cli.app)


def check_oeprov(words: list[str]) -> None:
    command, words = program(), words[1:]
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    known = {flag for item in command.params for flag in (*item.opts, *item.secondary_opts)} | {
        "-h",
        "--help",
    }
    for word in words if not command.context_settings.get("ignore_unknown_options") else ():
        if word.startswith("-"):
            assert word.partition("=")[0] in known, f"{command.name} has no {word}"


@cache
def help_of(module: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return done.stdout


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_can_be_parsed(document: str) -> None:
    seen = 0
    for line in code(text_of(document)):
        if line.startswith("oeprov "):
            check_oeprov(shlex.split(re.sub(r"\s*[/,].*", "", line) if " / " in line else line))
            seen += 1
        if found := _MODULE.search(line):
            for flag in re.findall(r"(?<=\s)--[\w-]+", found[2]):
                assert re.search(rf"{flag}\b", help_of(found[1])), line
            seen += 1
        if found := re.match(r"make ([a-z][\w-]*)", line):
            assert re.search(rf"^{found[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
            seen += 1
    assert seen or document.startswith("docs")


def test_examples_of_help_can_be_parsed() -> None:
    found = list(examples(program()))
    assert len(found) > 40
    for line in found:
        check_oeprov(shlex.split(line))


def test_flags_of_the_trainer_beside_deeprecs() -> None:
    """The second column of the table."""
    rows = [
        row.split("|") for row in text_of("docs/deeprec-flags.md").splitlines() if row.startswith("| `--")
    ]
    flags = {flag for row in rows for flag in re.findall(r"`(--[\w-]+)`", row[2])}
    assert len(flags) > 20
    assert {flag for flag in flags if not re.search(rf"{flag}\b", help_of("oe_runtime.train"))} == set()


@pytest.mark.parametrize("document", [*DOCUMENTS, "docs/decisions.md"])
def test_files_that_are_named_are_there(document: str) -> None:
    text, place = text_of(document), (ROOT / document).parent
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    for link in links:
        assert (place / link.partition("#")[0]).exists(), link
    if document == "docs/decisions.md":
        return  # of the past, too
    for span in code(text):
        for word in span.split():
            if word.partition("/")[0] in _FOLDERS and "/" in word and word not in MADE:
                assert (ROOT / word.rstrip(",.:")).exists(), word


def test_variables_that_are_named_are_known() -> None:
    prefixes = "|".join(prefix for prefix in settings.PREFIXES if prefix != "oeprov_")
    others = {"pmem_libpmem", "pmem_memkind", "training_"}
    for document in DOCUMENTS:
        spans = [
            found for span in code(text_of(document)) if (found := re.match(rf"({prefixes})[a-z_]+", span))
        ]
        assert {found[0] for found in spans} - others <= set(settings.KNOWN)


def test_metrics_that_are_named_are_served() -> None:
    source = (ROOT / "oe_runtime" / "server" / "metrics.py").read_text()
    for name in set(re.findall(r"`oe_(\w+)`", text_of("README.md"))) - {"runtime"}:
        assert name in source or name.removesuffix("_total") in source, name


def test_python_that_is_shown_names_what_there_is() -> None:
    last = "oe_runtime.keras"
    for block in re.findall(r"^```python\n(.*?)^```", text_of("README.md"), re.DOTALL | re.MULTILINE):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("oe_runtime"):
                assert {item.name for item in node.names} <= names_in(str(node.module)), node.module
        if found := re.search(r"import (oe_runtime\.\w+) as embed", block):
            last = found[1]
        assert set(re.findall(r"\bembed\.(\w+)", block)) <= names_in(last), block


def names_in(module: str) -> set[str]:
    """Words of a module's file: it is not imported, for some take seconds."""
    path = ROOT.joinpath(*module.split("."))
    return set(
        re.findall(r"\w+", (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    )
