"""The generated pages of the reference have all that the code declares."""

import importlib.util
import re
from pathlib import Path

import typer

from oe_runtime import errors
from provision.cli.main import app

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
assert spec
assert spec.loader
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


def leaves(command, path="oeprov"):
    for name, child in getattr(command, "commands", {}).items():
        yield from leaves(child, f"{path} {name}")
    if not getattr(command, "commands", None) and not command.hidden:
        yield path, command


def test_commands_with_their_options():
    page = reference.commands()
    sections = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", page, re.MULTILINE))
    found = dict(leaves(typer.main.get_command(app)))
    assert len(found) > 30
    for path, command in found.items():
        for item in command.params:
            if item.param_type_name == "option" and not item.hidden:
                assert f"`{item.opts[0]}`" in sections[path], (path, item.opts)


def test_metrics_that_a_server_may_show():
    page = reference.metrics()
    source = (ROOT / "oe_runtime" / "server" / "metrics.py").read_text()
    names = set(re.findall(r'^(?:gauge|counter) +(oe_[a-z_]+)|"(oe_[a-z_]+)"', source, re.MULTILINE))
    names = {one or other for one, other in names} - {"oe_runtime"}
    assert len(names) > 20
    assert names - set(re.findall(r"^\| `(oe_\w+)`", page, re.MULTILINE)) == set()


def test_errors_and_exit_codes():
    page = reference.exit_codes()
    for name in errors.__dict__:
        if isinstance(errors.__dict__[name], type):
            assert f"| `{name}` |" in page
    assert "130 stopped by the user" in page


def test_files_with_their_meaning():
    rows = re.findall(r"^\| `(/\S+)` \| (.*?) \|", reference.files_page(), re.MULTILINE)
    assert {"/etc/oeprov/memory.env", "/opt/oeprov/venv", "/var/lib/oeprov/owned"} <= {
        path for path, _ in rows
    }
    assert all(meaning for _, meaning in rows)
