"""README, docs and the examples of --help: their commands can be parsed, what they name is there.

What examples of the documents do is tested in tests/documents; here are those too that cannot be run there.
"""

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
from provision.cli.options import WithScriptArguments
from provision.cluster import settings

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "containers/README.md", "examples/README.md"),
    *("docs/deeprec-flags.md", "docs/get-started.md"),
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/guides/*.md")),
]
DECISIONS = ROOT / "docs" / "design" / "decisions"
_MODULE = re.compile(r"python -m (oe_runtime[.\w]*)(.*)")
MADE = {"inventory/lab.yml"}  # by a command
GENERATED = ROOT / "docs" / "reference"  # when the site is built, which checks the links there
_FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."} - {"build"}


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def code(text: str) -> Iterator[str]:
    """Lines of blocks for a shell, and what stands between backticks."""
    for kind, block in re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if kind == "bash":
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
    if words[0] == "serve" and words[1:2] and words[1] not in command.commands["serve"].commands:
        words.insert(1, command.commands["serve"].default_command)
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    if "--" in words and isinstance(command, WithScriptArguments):
        words = words[: words.index("--")]  # what follows is a script's
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
    for line in code(text_of(document)):
        if line.startswith("oeprov "):
            check_oeprov(shlex.split(line))
        if found := _MODULE.search(line):
            own = found[2].partition(" -- ")[0]  # what follows is a script's
            for flag in re.findall(r"(?<=\s)--[\w-]+", own):
                assert re.search(rf"{flag}\b", help_of(found[1])), line
        if found := re.match(r"make ([a-z][\w-]*)", line):
            assert re.search(rf"^{found[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line


def test_commands_are_found() -> None:
    lines = [line for document in DOCUMENTS for line in code(text_of(document))]
    assert sum(line.startswith("oeprov ") for line in lines) > 100
    assert sum("python -m oe_runtime" in line for line in lines) > 20


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


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_are_there(document: str) -> None:
    text, place = text_of(document), (ROOT / document).parent
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    for link in links:
        path = (place / link.partition("#")[0]).resolve()
        assert path.exists() or GENERATED in path.parents, link
    for span in code(text):
        for word in span.split():
            if word.partition("/")[0] in _FOLDERS and "/" in word and "NAME" not in word and word not in MADE:
                assert (ROOT / word.rstrip(",.:")).exists(), word


def test_decisions_are_in_their_index_once() -> None:
    listed = re.findall(r"^- \[(.*)\]\((.*\.md)\)$", (DECISIONS / "index.md").read_text(), re.MULTILINE)
    pages = {path.name: path.read_text() for path in DECISIONS.glob("*.md") if path.name != "index.md"}
    assert sorted(name for _, name in listed) == sorted(pages)
    for title, name in listed:
        assert pages[name].startswith(f"# {title}\n\nStatus: accepted, "), name
        assert re.findall(r"^## (.*)$", pages[name], re.MULTILINE) == ["Context", "Decision", "Consequences"]


def test_files_of_the_walks_exist() -> None:
    """Both walks of the architecture go through at most 15 files, which are where it says."""
    walks = text_of("docs/design/architecture.md").split("### Walk: ")[1:]
    assert len(walks) == 2
    for walk in walks:
        rooms = re.findall(r"^\| (\d+) \| (.*?) \|", walk, re.MULTILINE)
        assert [number for number, _ in rooms] == [str(n + 1) for n in range(len(rooms))]
        assert 5 < len(rooms) <= 15
        for file in re.findall(r"`([\w/]+/\w+\.\w+)`", " ".join(room for _, room in rooms)):
            assert any((ROOT / above / file).exists() for above in ("provision", "oe_runtime", "")), file


def test_variables_that_are_named_are_known() -> None:
    prefixes = "|".join(prefix for prefix in settings.PREFIXES if prefix != "oeprov_")
    others = {"pmem_libpmem", "pmem_memkind", "training_"}
    others.add("pmem_pool_root_path")  # of OpenEmbedding's flags.config
    others.add("pmem_consent")  # of the roles used alone; `oeprov` has --consent
    for document in DOCUMENTS:
        spans = [
            found
            for span in code(text_of(document))
            if (found := re.match(rf"({prefixes})[a-z_]+\b(?!\.py|\()", span))
        ]
        blocks = re.findall(r"^```yaml[^\n]*\n(.*?)^```", text_of(document), re.DOTALL | re.MULTILINE)
        keys = {found[0] for block in blocks for found in re.finditer(rf"\b({prefixes})[a-z_]+(?=:)", block)}
        assert ({found[0] for found in spans} | keys) - others <= set(settings.KNOWN), document


def test_metrics_that_are_named_are_served() -> None:
    source = "".join(
        (ROOT / "oe_runtime" / part / "metrics.py").read_text() for part in ("server", "serving")
    )
    named = {name for document in DOCUMENTS for name in re.findall(r"`oe_(\w+)`", text_of(document))}
    assert len(named) > 5
    for name in named - {"runtime"}:
        assert name in source or name.removesuffix("_total") in source, name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_examples_use_names_that_exist(document: str) -> None:
    last = "oe_runtime.keras"
    for block in re.findall(r"^```python[^\n]*\n(.*?)^```", text_of(document), re.DOTALL | re.MULTILINE):
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
    if not path.is_dir():
        return set(re.findall(r"\w+", path.with_suffix(".py").read_text()))
    modules = {child.stem for child in path.iterdir()}
    return modules | set(re.findall(r"\w+", (path / "__init__.py").read_text()))


def test_rows_of_the_evidence_can_be_read() -> None:
    lines = (ROOT / "docs/evidence/index.md").read_text().splitlines()
    cells = [cell.strip() for line in lines if line.startswith("|") for cell in line.strip("|").split("|")]
    assert [cell for cell in cells if len(cell) > 260] == []
