"""The Ansible collection, built and installed: what is in it, and its roles on this machine."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from installed_collection import REPOSITORY, Collection

from provision import __version__
from provision.cluster import own_sources, share

ROLES = sorted(path.name for path in (REPOSITORY / "roles").iterdir() if path.is_dir())
LOCAL = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "oeprov_kind": "local"}
# Those of ansible-test that install nothing; `tools/ansible-sanity.sh` runs all.
SANITY = (
    *("action-plugin-docs", "changelog", "compile", "empty-init", "line-endings", "no-assert"),
    *("no-illegal-filenames", "no-smart-quotes", "shebang", "symlinks", "use-argspec-type-path"),
)


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Collection:
    return Collection(tmp_path_factory.mktemp("a collection"))


def inventory(directory: Path, **variables: str) -> Path:
    path = directory / "inventory.yml"
    path.write_text(yaml.safe_dump({"all": {"hosts": {"one": {**LOCAL, **variables}}}}))
    return path


def test_it_has_what_the_product_is_made_of_and_no_more(collection: Collection) -> None:
    with_it = {path.name for path in collection.path.iterdir()}
    assert with_it - {"FILES.json", "MANIFEST.json"} == {
        *("CHANGELOG.md", "CMakeLists.txt", "LICENSE", "README.md", "ansible.cfg", "pyproject.toml"),
        *("inventory", "meta", "oe_runtime", "playbooks", "plugins", "provision", "roles"),
    }
    assert collection.archive.stat().st_size < 2**21
    # Role runtime builds the same wheel from it: hosts that `oeprov` has converged stay as they are.
    assert own_sources.digest_of(collection.path) == own_sources.digest_of(REPOSITORY)
    assert (collection.path / "plugins" / "module_utils" / "node").resolve() == (
        collection.path / "provision" / "node"
    )


def test_its_version_is_the_projects(collection: Collection) -> None:
    assert collection.archive.name == f"oeprov-oeprov-{__version__}.tar.gz"


def test_what_oeprov_runs_is_laid_out_like_it() -> None:
    """The checkout's links and the wheel's files; `playbook` makes the same of them for each run."""
    links = REPOSITORY / "collections" / "ansible_collections" / "oeprov" / "oeprov"
    assert (links / "plugins").resolve() == share.root() / "plugins"
    assert (links / "roles").resolve() == share.root() / "roles"


def test_no_oeprov_is_installed_here(collection: Collection) -> None:
    """What the tests below stand on."""
    said = collection.run("python", "-c", "import provision", cwd=collection.directory, expect=1)
    assert "No module named 'provision'" in said


@pytest.mark.parametrize("role", ROLES)
def test_a_role_says_what_it_takes(role: str, collection: Collection) -> None:
    said = collection.run("ansible-doc", "-t", "role", f"oeprov.oeprov.{role}", cwd=collection.directory)
    directory = REPOSITORY / "roles" / role
    specs = yaml.safe_load((directory / "meta" / "argument_specs.yml").read_text())["argument_specs"]
    options = specs["main"]["options"]
    assert all(name in said for name in options)
    documents = [directory / "README.md", *(directory / "examples").iterdir()]
    assert directory / "examples" / f"{role}.yml" in documents
    for path in documents:
        named = set(re.findall(rf"\b{role}_\w+", path.read_text())) - {"pmem_consent"}
        assert named <= set(options), path


@pytest.mark.process
def test_a_role_copied_out_works_alone(collection: Collection, tmp_path: Path) -> None:
    shutil.copytree(collection.path / "roles" / "kernel", tmp_path / "roles" / "kernel")
    play = tmp_path / "play.yml"
    play.write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "roles": ["kernel"]}]))
    said = collection.play(play, inventory(tmp_path, oeprov_kind="cpu"), "--check", "--diff")
    assert "failed=0" in said


@pytest.mark.process
def test_a_variable_that_is_wrong_is_refused(collection: Collection, tmp_path: Path) -> None:
    example = Path(shutil.copy(collection.path / "roles" / "pmem" / "examples" / "pmem.yml", tmp_path))
    said = collection.play(example, inventory(tmp_path), "-e", "pmem_mode=fsdax", "--check", expect=2)
    assert "pmem_mode: found 'fsdax': kind local is this machine" in said.replace("\n", " ")


@pytest.mark.process
def test_it_says_what_the_controller_lacks(collection: Collection, tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text("raise ImportError(\"No module named 'pydantic'\")\n")
    example = Path(shutil.copy(collection.path / "roles" / "gpu" / "examples" / "gpu.yml", tmp_path))
    variables = inventory(tmp_path)
    paths = f"{collection.environment['PYTHONPATH']}:{tmp_path}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(collection.environment, "PYTHONPATH", paths)
        said = collection.play(example, variables, expect=2)
    assert "No module named 'pydantic'; install pydantic there with pip" in said.replace("\n", " ")


def test_it_is_sane() -> None:
    tests = [word for name in SANITY for word in ("--test", name)]
    version = "{}.{}".format(*sys.version_info)
    argv = [str(REPOSITORY / "tools" / "ansible-sanity.sh"), "--python", version, *tests]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
