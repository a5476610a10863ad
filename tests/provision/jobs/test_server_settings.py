"""A setting that servers get as a flag reaches them here, on hosts, in containers and on Kubernetes."""

from pathlib import Path

import pytest
from fake_processes import make_job
from test_containers import made
from test_flavors import inventory as of_others
from test_kubernetes_settings import settled
from test_training_launch import inventory, planned
from test_training_tiers import FSDAX, place, unit
from test_training_tiers import inventory as hosts

from oe_runtime.server.cli import _parser
from provision.cluster.errors import TrainingError
from provision.cluster.setting_types import ProcessFlag
from provision.cluster.settings import ServerSettings
from provision.jobs import jobspec
from provision.jobs.backends.kubernetes import manifests
from provision.jobs.request import LaunchOptions

VALUE = 7654321


@pytest.mark.parametrize("name", ServerSettings.marked(ProcessFlag()))
def test_a_setting_reaches_servers_wherever_they_run(name: str, tmp_path: Path) -> None:
    variable, flag = f"parameter_server_{name}", "--" + name.replace("_", "-")
    state_dir = tmp_path / ".oeprov"
    state_dir.mkdir()
    own = planned(inventory(state_dir, f"{variable}: {VALUE}"), make_job(tmp_path / "own"), LaunchOptions())
    boxed = made(state_dir, LaunchOptions(on="docker"), f"{variable}: {VALUE}").spec()
    for spec in (own, boxed):
        argv = spec.processes[0].argv
        assert argv[argv.index(flag) + 1] == str(VALUE)
    assert f"{flag} {VALUE} " in unit(
        place(hosts(tmp_path, "fsdax", f"{variable}: {VALUE}"), FSDAX, tmp_path)
    )
    (tmp_path / "kubernetes").mkdir()
    pods = str(manifests.build(settled(tmp_path / "kubernetes", {variable: VALUE})))
    assert f"'{flag}', '{VALUE}'" in pods
    assert getattr(_parser().parse_args([flag, str(VALUE)]), name) == VALUE
    assert flag not in str(planned(inventory(state_dir), make_job(tmp_path / "unset"), LaunchOptions()))


def test_servers_of_others_have_no_such_flag(tmp_path: Path) -> None:
    found = of_others(tmp_path, more="parameter_server_max_connections: 5")
    with pytest.raises(TrainingError, match="parameter_server_max_connections is for servers of oe_runtime"):
        jobspec.request(found, LaunchOptions())
