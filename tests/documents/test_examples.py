"""The examples of README, docs/ and examples/ work: they are run here, or say why not."""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import run_examples

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "containers/*.md", "tests/*.md")
    for path in ROOT.glob(pattern)
)
SECONDS = 840  # for all of a document, on a machine that is busy with other things
DATA = {"clicks.py", "sequences.py"}  # what the programs train on
PROGRAMS = sorted({path.name for path in ROOT.glob("examples/*.py")} - DATA)
# Of blocks that are no examples: what programs print, files, diagrams.
OTHER_LANGUAGES = {"text", "yaml", "json", "ini", "toml", "diff", "mermaid"}


def is_run(document: str) -> bool:
    text = (ROOT / document).read_text()
    return any(one.is_run and one.language in run_examples.RUN for one in run_examples.examples(text))


def run_in(directory: Path, *command: str) -> None:
    """Run a program in a directory like a checkout, without a network, and leave nothing of it running."""
    for name in ("inventory", "examples"):
        shutil.copytree(ROOT / name, directory / name)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
        **dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost"),
    }
    output = directory / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        code = process.wait(SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.returncode and (directory / ".oeprov").exists():  # a job in the background
            subprocess.run(["oeprov", "stop"], cwd=directory, env=environment, capture_output=True)
    assert code == 0, output.read_text(errors="replace")[-6000:]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("document", [one for one in DOCUMENTS if is_run(one)])
def test_documents(document: str, tmp_path: Path) -> None:
    for module in run_examples.needs((ROOT / document).read_text()):
        if not find_spec(module):
            pytest.skip(f"{module} is not installed")
    run_in(tmp_path, sys.executable, run_examples.__file__, str(ROOT / document))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs(program: str, tmp_path: Path) -> None:
    """By the commands that they begin with."""
    text = ast.get_docstring(ast.parse((ROOT / "examples" / program).read_text())) or ""
    for module in run_examples.needs(text):
        if not find_spec(module):
            pytest.skip(f"{module} is not installed")
    commands = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    assert any(program in line for line in commands)
    document = tmp_path / "commands.md"
    document.write_text("```bash\n" + "\n".join(commands) + "\n```\n")
    run_in(tmp_path, sys.executable, run_examples.__file__, str(document))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_blocks_say_what_they_are(document: str) -> None:
    """So that no example escapes being run by having another language, or none."""
    for example in run_examples.examples((ROOT / document).read_text()):
        assert example.language in {*run_examples.RUN, *OTHER_LANGUAGES}, f"{document}:{example.line}"
        if example.language in run_examples.RUN and not example.is_run:
            assert example.value.strip(), f"{document}:{example.line} says not why it is not run"
