"""`make lint` finds what tools/check_tidy.py looks for."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("check_tidy", ROOT / "tools" / "check_tidy.py")
assert spec
assert spec.loader
check_tidy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_tidy)

LINES = "    x = 1\n" * check_tidy.LONGEST
CLEAN = {
    "provision/jobs/store.py": "class Job:\n    def load(self):\n        pass\n",
    "provision/cli/main.py": "from provision.jobs import store\n",
    "oe_runtime/core/table/table.h": "class Table {\n};\n",
    "oe_runtime/core/table/table.cc": '#include "table.h"\nvoid Table::Pull() {\n}\n',
    "tests/provision/jobs/test_store.py": "",
    "README.md": "main, table, longer",
}


def found(planted):
    return dict(check_tidy.findings({**CLEAN, **planted}))


def test_nothing_is_found_in_tidy_files():
    assert found({}) == {}


@pytest.mark.parametrize(
    ("name", "text", "key", "said"),
    [
        ("provision/jobs/main.py", "class Job:\n    pass\n", "provision:Job", "main.py:1"),
        ("oe_runtime/core/server/main.h", "struct Table final : Base {\n};\n", "core:Table", "table.h:1"),
        ("provision/jobs/main.py", "def _of_rank():\n    pass\n", "main.py:_of_rank", "verb"),
        ("provision/jobs/longer.py", "main", "provision/jobs/longer.py", "says what is in it"),
        ("provision/jobs/main.py", f"def run():\n{LINES}", "main.py:run:80", "71 lines"),
        (
            "oe_runtime/core/table/more.cc",
            "size_t Table::Push(\n    int x) {\n" + LINES + "}\n",
            "more.cc:Table::Push:80",
            "73 lines",
        ),
        ("tests/provision/launch/test_a.py", "", "tests/provision/launch/test_a.py", "no folder"),
        ("docs/forgotten.md", "forgotten", "docs/forgotten.md", "no other file names it"),
    ],
)
def test_a_violation_is_found(name, text, key, said):
    planted = found({name: text})
    assert list(planted) == [key]
    assert said in planted[key]


def test_exceptions_only_shrink(monkeypatch, tmp_path, capsys):
    listed = (ROOT / "tools" / "tidy_exceptions.txt").read_text()
    monkeypatch.setattr(check_tidy, "EXCEPTIONS", tmp_path / "exceptions.txt")
    (tmp_path / "exceptions.txt").write_text(listed + "provision:NoSuchClass  for a test\n")
    assert check_tidy.main() == 1
    assert (
        capsys.readouterr().out
        == "exceptions.txt: provision:NoSuchClass is not needed any more; remove the line\n"
    )
    # A pair of public names, which stay.
    without = re.sub(r"^oe_runtime:TableLayer .*$", "", listed, flags=re.MULTILINE)
    (tmp_path / "exceptions.txt").write_text(without)
    assert check_tidy.main() == 1
    assert capsys.readouterr().out.startswith("class TableLayer: ")
