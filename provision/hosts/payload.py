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

# Hosts with this machine's Python version use bytecode, since compiling takes most of the time.
_BYTECODE = f"{sys.implementation.cache_tag} {sys.version_info[3]}"
NO_PYTHON = "there is no Python 3"
_FORMAT = 2  # of marshal: known to every Python 3
# The node package's imports of its own modules: `from .state import …`, `from . import (…)`.
_IMPORT = re.compile(r"^from \.(\w*) import (\([^)]*\)|.*)", re.MULTILINE)
_LOADER = """\
import sys
if sys.version_info < (3, 6):
    sys.exit("Python 3.6 or newer is needed, this is " + sys.version.split()[0])
import gc, json, marshal, os, re, zlib
from importlib import import_module
from importlib.machinery import ModuleSpec
gc.disable()
os.write(2, b"OEPROV-BEGUN\\n")
sent = marshal.load(sys.stdin.buffer)
wanted = json.loads(marshal.load(sys.stdin.buffer))
bytecode = sent["bytecode"] == "%s %s" % (sys.implementation.cache_tag, sys.version_info[3])
class Later(type(sys)):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        sys.modules.pop(self.__name__)
        self.__dict__.update(import_module(self.__name__).__dict__)
        return self.__dict__[name]
# Most patterns of a module are never used, and compiling them takes a quarter of the time.
compile_pattern = re.compile
class Pattern:
    def __init__(self, *given):
        self.__dict__["given"] = given
    def __getattr__(self, name):
        return getattr(compile_pattern(*self.given), name)
re.compile = lambda *given: Pattern(*given)
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
def _package(module: str) -> bytes:
    """A module of the node package with its imports, as ``oeprov_node``: source text and bytecode."""
    there = {path.stem: path for path in share.node_package().glob("*.py")}
    text, code, missing = {}, {}, {"__init__", module}
    while missing:
        stem = missing.pop()
        name = "oeprov_node" if stem == "__init__" else f"oeprov_node.{stem}"
        source = there[stem].read_bytes()
        text[name] = source
        # The loader uses Python's cached bytecode.
        compiled = SourceFileLoader(name, str(there[stem])).get_code(name)
        code[name] = zlib.compress(marshal.dumps(_without_lines(compiled)), 6)
        for dotted, names in _IMPORT.findall(source.decode()):
            wanted = [dotted] if dotted else re.findall(r"\w+", names)
            missing |= {item for item in wanted if f"oeprov_node.{item}" not in text}
    # Bytecode is unpacked per module, since a host uses some only; text is smaller in one piece.
    packed = zlib.compress(marshal.dumps(text, _FORMAT), 6)
    sent = {"bytecode": _BYTECODE, "text": packed, "code": code, "module": module}
    return marshal.dumps(sent, _FORMAT)


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


def pack(module: str, wanted: Mapping[str, Any]) -> bytes:
    """The standard input of ``command``, which calls ``main(wanted)`` of that module."""
    return _package(module) + marshal.dumps(json.dumps(wanted), _FORMAT)
