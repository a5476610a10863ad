"""Kill a command at every event: before each change of a file, and before each start of a program."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_CHANGES = {
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.chmod",
    "os.truncate",
    "shutil.rmtree",
    "subprocess.Popen",
    "os.posix_spawn",
    "os.kill",
    "os.killpg",
    "http.client.send",
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def run_apart(command: Callable[[], int], directory: Path, *, at: int | None = None) -> tuple[int, list[str]]:
    """Run it in a process of its own; its exit status (-9: killed) and its events.

    Events are changes below ``directory``, starts of programs, signals and HTTP requests. One that comes
    again with other digits or random letters counts once. ``at``: kill it before this one.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 3
        gc.disable()  # it would free objects of threads that this process lacks
        try:
            os.close(reading)
            os.setpgid(0, 0)
            _watch(str(directory), at, writing)
            code = command()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as file:
        found = file.read().splitlines()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), found


def _watch(directory: str, at: int | None, report: int) -> None:
    seen: set[str] = set()
    counts: dict[str, int] = {}
    mine = os.getpid()

    def see(event: str, arguments: tuple[object, ...]) -> None:
        if os.getpid() != mine or not (name := _name(event, arguments, directory)):
            return
        if name.endswith("state.json"):  # each of its versions
            counts[name] = counts.get(name, 0) + 1
            name += f" {counts[name]}"
        if name in seen:
            return
        number = len(seen)
        seen.add(name)  # first: the kill is an event too
        if number == at:
            os.kill(mine, signal.SIGKILL)
        os.write(report, f"{name}\n".encode())

    sys.addaudithook(see)


def _name(event: str, arguments: tuple[object, ...], directory: str) -> str:
    if event == "open":
        flags = arguments[2]
        if not isinstance(flags, int) or not flags & _WRITES:
            return ""
    elif event not in _CHANGES:
        return ""
    if event == "subprocess.Popen":
        words = arguments[1]
        assert isinstance(words, (list, tuple))
        return "start " + _alike(" ".join(_text(word) for word in words)[:200])
    if event in ("os.kill", "os.killpg"):
        return event
    if event == "http.client.send":
        data = arguments[1]
        line = data.split(b"\r\n", 1)[0].decode() if isinstance(data, bytes) else ""
        return f"send {_alike(line)}" if " HTTP/" in line else ""
    paths = [_text(item) for item in arguments[:2] if isinstance(item, (str, bytes, os.PathLike))]
    if not paths or not any(directory in path for path in paths):
        return ""
    return _alike(f"{event} " + " ".join(path.replace(directory, "") for path in paths))


def _text(value: object) -> str:
    return os.fsdecode(value) if isinstance(value, (str, bytes, os.PathLike)) else str(value)


def _alike(text: str) -> str:
    text = re.sub(r"-[a-z0-9_]{8}(?=[/ \"]|$)", "-?", text)
    return re.sub(r"\d+", "#", re.sub(r"/(collections|job_events)\b\S*", r"/\1/…", text))
