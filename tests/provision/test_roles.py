"""The roles under plain ``ansible-playbook``, and that they say the same as provision/cluster/settings.py."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_processes import make_job
from test_training_supervisor import assert_nothing_left, until

from provision.cluster import settings
from provision.cluster.runtime_settings import RuntimeSettings
from provision.cluster.setting_types import Settings
from provision.cluster.settings import Kind
from provision.inventory.loader import host_of, load
from provision.jobs.background import start_detached
from provision.jobs.store import ACTIVE

REPOSITORY = Path(__file__).parents[2]
MODELS: dict[str, type[Settings]] = {
    "kernel": settings.KernelSettings,
    "pmem": settings.PmemSettings,
    "runtime": RuntimeSettings,
    "gpu": settings.GpuSettings,
    "parameter_server": settings.ServerSettings,
    "worker": settings.WorkerSettings,
}
OWN = {  # variables of a role that no inventory sets: playbooks/launch_training.yml does
    "parameter_server": {"job_directory", "token_source", "storage_directory", "user", "units"},
    "worker": {"job_directory", "token_source", "user"},
}
TYPES = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "array": "list",
    "object": "dict",
}
INVENTORY = """\
all:
  children:
    parameter_servers: {hosts: {one: }}
    workers: {hosts: {one: }}
  hosts:
    one: {ansible_connection: local, oeprov_kind: local, runtime_extra: none}
"""


def role_file(role: str, path: str) -> Any:
    return yaml.safe_load((REPOSITORY / "roles" / role / path).read_text())


def read_by_tasks(role: str) -> set[str] | None:
    """The role's variables that its tasks and other defaults name; None: `oeprov_converge` reads all."""
    files = sorted((REPOSITORY / "roles" / role).rglob("*"))
    texts = [path.read_text() for path in files if path.parent.name in ("tasks", "templates", "handlers")]
    if any("oeprov_converge:" in text for text in texts):
        return None
    values = [str(value) for value in role_file(role, "defaults/main.yml").values()]
    return set(re.findall(rf"\b{role}_\w+", "".join([*texts, *values])))


@pytest.mark.parametrize("role", MODELS)
def test_each_variable_of_a_role_is_read(role: str) -> None:
    read = read_by_tasks(role)
    for name in [] if read is None else role_file(role, "defaults/main.yml"):
        assert name in read, f"roles/{role}/defaults has {name}, which no task, template or default reads"


@pytest.mark.parametrize("role", MODELS)
def test_argument_specs_and_defaults_follow_the_settings(role: str) -> None:
    model = MODELS[role]
    options = role_file(role, "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    defaults = role_file(role, "defaults/main.yml")
    own = {model.prefix + name for name in OWN.get(role, set())}
    read = read_by_tasks(role)
    variables = [name for name in model.variables() if read is None or name in read]
    assert set(options) - own - {"oeprov_kind"} == set(variables)
    assert set(defaults) - own == set(variables)
    schema = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        if model.prefix + name not in variables:
            continue
        option, described = options[model.prefix + name], schema[name]
        assert option["description"] == field.description
        assert option["default"] == field.default == defaults[model.prefix + name]
        assert option.get("choices") == described.get("enum")
        assert option["type"] == TYPES.get(described.get("type"), "raw")


@pytest.mark.parametrize("kind", list(Kind))
def test_role_defaults_mean_what_the_inventory_means(kind: Kind, tmp_path: Path) -> None:
    """A host that sets nothing is the same to `oeprov` and to a role, which sees its defaults spelled out."""
    bare: dict[str, Any] = {"oeprov_kind": kind.value}
    if kind is Kind.local:
        bare["ansible_connection"] = "local"
    if kind is Kind.nvme:
        bare["ssd_devices"] = ["/data"]
    spelled = dict(bare)
    for role in MODELS:
        spelled.update(role_file(role, "defaults/main.yml"))
    spelled = {name: value for name, value in spelled.items() if name in settings.KNOWN or name in bare}
    groups = ["parameter_servers", "workers"]
    assert host_of("one", groups, spelled, state_dir=tmp_path).desired() == (
        host_of("one", groups, bare, state_dir=tmp_path).desired()
    )


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("plugins/modules/*.py")), ids=lambda path: path.stem)
def test_modules_run_on_the_nodes_own_python(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 6))


def ansible(directory: Path, playbook: str, *words: str, expect: int = 0) -> str:
    """Run a playbook as anybody would, from outside the repository; gives its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "ansible-playbook"),
            "-i",
            "inventory.yml",
            str(REPOSITORY / "playbooks" / f"{playbook}.yml"),
            *words,
        ],
        cwd=directory,
        env={
            **environment,
            "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg"),
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
            "OEPROV_STATE_DIR": str(directory / "state"),
            "PYTHONPATH": str(REPOSITORY),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


@pytest.mark.process
def test_bootstrap_without_oeprov(tmp_path: Path) -> None:
    (tmp_path / "inventory.yml").write_text(INVENTORY)
    directory = tmp_path / "state" / "pmem0"

    planned = ansible(tmp_path, "bootstrap", "--check", "--diff")
    assert f"+make {directory}" in planned
    assert "changed=1" in planned
    assert not directory.exists()
    assert f"Left to do: make {directory}" in ansible(tmp_path, "verify", expect=2)

    assert "changed=1" in ansible(tmp_path, "bootstrap")
    assert directory.is_dir()
    again = ansible(tmp_path, "bootstrap")
    assert "changed=0" in again
    assert "failed=0" in again


@pytest.mark.process
def test_role_refuses_what_the_settings_refuse(tmp_path: Path) -> None:
    (tmp_path / "inventory.yml").write_text(INVENTORY)
    out = ansible(tmp_path, "pmem_mode", "-e", "pmem_mode=fsdax", expect=2)
    assert "pmem_mode: found 'fsdax': kind local is this machine" in out.replace("\n", " ")
    assert not (tmp_path / "state").exists()


@pytest.mark.process
def test_stop_training_without_oeprov(tmp_path: Path) -> None:
    (tmp_path / "inventory.yml").write_text(INVENTORY)
    job = make_job(tmp_path / "state", worker="waits")
    supervisor = start_detached(job, resume=False)
    until(job.run_dir / "waiting")
    words = ["-e", f"training_job_directory={job.directory}"]
    assert "changed=1" in ansible(tmp_path, "stop_training", *words)
    os.waitpid(supervisor, 0)
    state = job.state()
    assert state.phase not in ACTIVE
    assert state.message == "stopped at step 3, which is saved"
    assert_nothing_left(job)


def test_local_inventory_is_valid(tmp_path: Path) -> None:
    found = load(REPOSITORY / "inventory" / "local.yml", state_dir=tmp_path)
    assert found.parameter_servers == found.workers == ["localhost"]
