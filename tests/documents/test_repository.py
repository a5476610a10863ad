"""Files that people and forges expect of the repository agree with each other."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import provision

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
ROOT = Path(__file__).parents[2]
# The files of tools/setup.sh's profiles; each profile installs those before it too.
LOCKS = ("build", "run", "demo", "test", "lint")


def pyproject() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return found


def pinned(*names: str) -> dict[str, set[Version]]:
    """Versions by package in these files of ``constraints/``."""
    found: dict[str, set[Version]] = {}
    for name in names:
        text = (ROOT / "constraints" / f"{name}.txt").read_text()
        for package, version in re.findall(r"^(\S+)==(\S+)", text, re.MULTILINE):
            found.setdefault(package, set()).add(Version(version))
    return found


def test_one_version() -> None:
    version = pyproject()["project"]["version"]
    assert provision.__version__ == version
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == version


@pytest.mark.parametrize(
    ("extra", "count"),
    [("", 2), ("tensorflow", 3), ("test", 4), ("lint", 5), ("docs", 5)],
    ids=lambda value: str(value),
)
def test_constraints_satisfy_pyproject(extra: str, count: int) -> None:
    project = pyproject()["project"]
    wanted = project["optional-dependencies"][extra] if extra else project["dependencies"]
    versions = pinned(*LOCKS[:count])
    for requirement in map(Requirement, wanted):
        found = versions.get(canonicalize_name(requirement.name), set())
        assert found, f"constraints/ do not pin {requirement.name}: run make constraints"
        wrong = [str(version) for version in found if version not in requirement.specifier]
        assert not wrong, f"constraints/ pin {requirement.name} {wrong}: run make constraints"


@pytest.mark.parametrize("name", [*LOCKS, "no-deps", "release"])
def test_each_pinned_version_has_hashes(name: str) -> None:
    text = (ROOT / "constraints" / f"{name}.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines
    assert [line for line in lines if "==" not in line or "--hash=sha256:" not in line] == []


def test_stand_alone_packages_are_pinned_once() -> None:
    """What setup.sh installs without dependencies must not come a second time, with them."""
    assert not set(pinned("no-deps")) & set(pinned(*LOCKS))
    (tensorflow,) = pinned("demo")["tensorflow-cpu"]
    (tf_keras,) = pinned("no-deps")["tf-keras"]
    assert tf_keras.release[:2] == tensorflow.release[:2]


def test_pre_commit_runs_what_make_lint_runs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"^LINTERS = (.*)$", makefile, re.MULTILINE)
    assert targets
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == [f"make {target}" for target in targets[1].split()]
    for target in targets[1].split():
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_pre_commit_lints_each_folder_that_make_lints() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (files,) = (hook["files"] for hook in hooks if hook["id"] == "lint-ansible")
    linted = re.search(r"/ansible-lint .* -q (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert linted
    for folder in linted[1].split():
        assert re.search(files, f"{folder}/file.yml"), folder
    assert re.search(files, "roles/kernel/meta/main.yml")


@pytest.mark.parametrize(("name", "command"), [("ci", ".ci/run"), ("release", "cibuildwheel")])
def test_workflows_call_what_is_here(name: str, command: str) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert any(command in text for text in steps)
    targets = {word for text in steps for word in re.findall(r"\bmake ([a-z-]+)", text)}
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def test_another_clones_environment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"provision: this Python has it from {ROOT}, not from this clone" in done.stderr
