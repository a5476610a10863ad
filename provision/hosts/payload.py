"""Sends the node package to a host, on the standard input of a short Python program.

Nothing is installed or written on the host.
"""

from __future__ import annotations

import json
import marshal
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

from provision.cluster import share
from provision.cluster.inventory import DEFAULT_PYTHON
from provision.node.ansible_python import CARRIERS
from provision.node.answer import MARKER

# Hosts with this machine's Python version use bytecode: source text takes 17 % more processor time for one
# observation with its SSH connection. The program says its version first, and then gets one of both forms.
BYTECODE = f"{sys.implementation.cache_tag} {sys.version_info[3]}"
NO_PYTHON = "there is no Python 3"
_OTHER = "another"
_FORMAT = 2  # of marshal: known to every Python 3
# The node package's imports of its own modules: `from .state import …`, `from . import (…)`.
_IMPORT = re.compile(r"^from \.(\w*) import (\([^)]*\)|.*)", re.MULTILINE)
_LOADER = """\
import sys
if sys.version_info < (3, 6):
    sys.exit("Python 3.6 or newer is needed, this is " + sys.version.split()[0])
import gc, os
gc.disable()
version = "%s %s" % (sys.implementation.cache_tag, sys.version_info[3])
os.write(2, ("OEPROV-BEGUN %s\\n" % version).encode())
import json, marshal, zlib
sent = marshal.load(sys.stdin.buffer)
wanted = json.loads(marshal.load(sys.stdin.buffer))
bytecode = "code" in sent and sent["bytecode"] == version
ModuleSpec = type(sys.__spec__)  # importing importlib takes a while
def import_module(name):
    __import__(name)
    return sys.modules[name]
class Later(type(sys)):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        sys.modules.pop(self.__name__)
        self.__dict__.update(import_module(self.__name__).__dict__)
        return self.__dict__[name]
modules = sent["code"] if bytecode else marshal.loads(zlib.decompress(sent["text"]))
# The package imports these and its own modules at the top, and only what changes a host uses most of them.
late = ["hashlib", "platform", "shutil", "struct", "subprocess", "tempfile", "uuid", "zipfile"]
for name in late + list(modules):
    sys.modules[name] = Later(name)
del sys.modules["oeprov_node"]
class Finder:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package="." not in name) if name in modules else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        code = modules[module.__name__]
        if bytecode:
            code = marshal.loads(zlib.decompress(code))
        else:
            code = compile(code, module.__name__, "exec")
        exec(code, module.__dict__)
sys.meta_path.insert(0, Finder())
import_module("oeprov_node." + sent["module"]).main(wanted)
sys.stdout.flush()
os._exit(0)  # skips the interpreter's cleanup, which takes longer
"""


def first(pythons: Sequence[str]) -> str:
    """A line of shell that runs $0 by the first of these interpreters that is there."""
    return (
        f"for python in {' '.join(pythons)}; do "
        'command -v "$python" >/dev/null 2>&1 && exec "$python" -I -S -c "$0"; done; '
        f'echo "{NO_PYTHON}" >&2; exit 127'
    )


_FIRST = first(CARRIERS)


@cache
def _package(module: str, form: str) -> bytes:
    """A module of the node package with its imports, as ``oeprov_node``: bytecode, source text, or both."""
    there = {path.stem: path for path in share.node_package().glob("*.py")}
    text, missing = {}, {"__init__", module}
    while missing:
        stem = missing.pop()
        source = there[stem].read_bytes()
        text[_name(stem)] = source
        for dotted, names in _IMPORT.findall(source.decode()):
            wanted = [dotted] if dotted else re.findall(r"\w+", names)
            missing |= {item for item in wanted if _name(item) not in text}
    sent: dict[str, Any] = {"bytecode": BYTECODE, "module": module}
    if form != _OTHER:
        # Bytecode is unpacked per module, since a host uses some only; text is smaller in one piece.
        sent["code"] = {name: _compiled(name, str(there[_stem(name)])) for name in text}
    if form != BYTECODE:
        sent["text"] = zlib.compress(marshal.dumps(text, _FORMAT), 6)
    return marshal.dumps(sent, _FORMAT)


def _name(stem: str) -> str:
    return "oeprov_node" if stem == "__init__" else f"oeprov_node.{stem}"


def _stem(name: str) -> str:
    return name.partition(".")[2] or "__init__"


def _compiled(name: str, path: str) -> bytes:
    """The bytecode of a module; the loader uses Python's cached one."""
    return zlib.compress(marshal.dumps(_without_lines(SourceFileLoader(name, path).get_code(name))), 6)


def _without_lines(code: Any) -> Any:
    """The code object without line and column numbers, which are a third of it since Python 3.11."""
    if sys.version_info < (3, 11):
        return code
    # Entries of kind 15, "no location", for up to 8 code units each: Objects/locations.md of CPython.
    count = len(code.co_code) // 2
    table = b"\xff" * (count // 8) + (bytes([0xF8 | (count % 8 - 1)]) if count % 8 else b"")
    constants = tuple(_without_lines(item) if isinstance(item, CodeType) else item for item in code.co_consts)
    return code.replace(co_linetable=table, co_consts=constants)


def command(python: str) -> list[str]:
    """The command that runs ``payload`` from its standard input; DEFAULT_PYTHON: by the first there is."""
    if python == DEFAULT_PYTHON:
        return ["sh", "-c", _FIRST, _LOADER]
    # -I and -S: start fast, without the site packages and settings of the host's users.
    return [python, "-I", "-S", "-c", _LOADER]


def pack(module: str, wanted: Mapping[str, Any], python: str = "") -> bytes:
    """The standard input of ``command``, which calls ``main(wanted)`` of that module.

    ``python``: the version that the program announces, which gets what it can use; empty: not known yet.
    """
    form = python if python in ("", BYTECODE) else _OTHER
    return _package(module, form) + marshal.dumps(json.dumps(wanted), _FORMAT)


def read_answer(out: str) -> dict[str, Any] | None:
    """What the module answers, in its program's output; None if it does not. ValueError if unreadable."""
    line = next((line for line in reversed(out.splitlines()) if line.startswith(MARKER)), None)
    found = None if line is None else json.loads(line[len(MARKER) :])
    if not (found is None or isinstance(found, dict)):
        raise ValueError(f"{type(found).__name__} instead of an object")
    return found
