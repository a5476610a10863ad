"""Run the examples of a document in their order, as a reader would: python run_examples.py DOCUMENT.

It runs them in the current directory, and the first one that fails ends it. What a document says to it:

- a block in `python` or `bash` is run; all Python of a document has the same variables;
- `title="FILE"` after the language: the block is written to FILE instead;
- `<!-- not run: REASON -->` above a block: it is not run;
- `<!-- exit code: N -->` above a block: its last command ends with N;
- `<!-- run python: … -->` and `<!-- run bash: … -->`: code that is run and not shown;
- `<!-- needs: MODULE … -->`: the document is skipped where one of these Python modules is not installed.

Ports are replaced by free ones. A block that starts a program with ` &` and `--port` waits until it listens.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

RUN = ("python", "bash")
_HIDDEN = re.compile(r"<!-- run (python|bash):\n(.*)-->", re.DOTALL)
_MARKER = re.compile(r"<!-- (not run|exit code): (.+) -->")
_PORT = re.compile(r"(127\.0\.0\.1:|localhost:|-port )(\d{4,5})\b")


@dataclass(frozen=True)
class Example:
    """A block of code in a document."""

    language: str
    code: str
    line: int
    title: str = ""
    marker: str = ""  # what its comment says about it, and the value
    value: str = ""

    @property
    def is_run(self) -> bool:
        """Whether it is run, or written to its file."""
        return self.marker != "not run" and bool(self.title or self.language in RUN)


def examples(text: str) -> Iterator[Example]:
    """All blocks of a document, and the code in it that is not shown."""
    comment = ""
    for token in MarkdownIt().parse(text):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            comment = token.content.strip()
            if found := _HIDDEN.fullmatch(comment):
                yield Example(found[1], found[2], line)
        elif token.type == "fence":
            language, _, rest = token.info.strip().partition(" ")
            marker = _MARKER.fullmatch(comment)
            title = re.search(r'title="([^"]+)"', rest)
            yield Example(
                language, token.content, line, title[1] if title else "", *(marker.groups() if marker else ())
            )
            comment = ""
        elif token.type.endswith("_open") and token.type != "paragraph_open":
            comment = ""


def needs(text: str) -> list[str]:
    """The Python modules that a document needs beyond ours."""
    return [module for found in re.findall(r"<!-- needs: (.+?) -->", text) for module in found.split()]


class FreePorts:
    """Replaces each port of the examples by one that is free, always the same."""

    def __init__(self) -> None:
        self._free: dict[str, str] = {}

    def _replace(self, found: re.Match[str]) -> str:
        if found[2] not in self._free:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self._free[found[2]] = str(listener.getsockname()[1])
        return found[1] + self._free[found[2]]

    def put_in(self, code: str) -> str:
        """The code with free ports."""
        return _PORT.sub(self._replace, code)


def wait_for(ports: list[str]) -> None:
    """Until programs on this machine listen there."""
    deadline = time.monotonic() + 120
    for port in ports:
        while True:
            try:
                socket.create_connection(("127.0.0.1", int(port))).close()
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def run_bash(code: str, expected: int = 0) -> None:
    """Run a block in a shell that ends with the first error."""
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", code], stdin=subprocess.DEVNULL)
    if done.returncode != expected:
        raise SystemExit(f"exit code {done.returncode} instead of {expected}:\n{code}")
    if " &\n" in code:
        wait_for(re.findall(r"-port (\d+)", code))


def run(document: str) -> None:
    """Run the examples of a document here."""
    ports = FreePorts()
    variables: dict[str, Any] = {"__name__": "__main__"}
    for example in examples(Path(document).read_text()):
        if not example.is_run:
            continue
        print(f"--- {document}:{example.line}", flush=True)
        began, code = time.monotonic(), ports.put_in(example.code)
        if example.title:
            Path(example.title).write_text(code)
        elif example.language == "bash":
            run_bash(code, int(example.value or 0))
        else:
            exec(compile("\n" * example.line + code, document, "exec"), variables)  # noqa: S102
        print(f"--- {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    sys.path[0] = ""  # examples import what stands in their directory
    run(sys.argv[1])
