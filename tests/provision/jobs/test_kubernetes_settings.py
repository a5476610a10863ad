"""Every variable of an inventory is in the manifests, refused or noted by name, or known to mean nothing."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from test_kubernetes_manifests import inventory_file

from provision.cli import main as cli
from provision.cluster import settings
from provision.cluster.errors import OeprovError
from provision.inventory.loader import load
from provision.inventory.schema import shown
from provision.jobs.backends.kubernetes import manifests, plan
from provision.jobs.backends.kubernetes.differences import NO_MEANING
from provision.jobs.request import LaunchOptions

CLASS = {"kubernetes_storage_class": "pmem", "kubernetes_storage_size": "100G"}
# Where `other` does not do: variable -> another value than its default, and what else is set with it.
OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "oeprov_kind": ("cpu", {}),
    "rollout_shares": ([2], {}),
    "rollout_quorum": ("20%", {}),
    "rollout_failures": (3, {}),
    "kernel_version": ("newest", {}),
    "kernel_repository_url": ("https://mirror", {}),
    "pmem_mode": ("system-ram", {}),
    "pmem_memmap": ("4G!4G", {"oeprov_kind": "re7p"}),
    "pmem_namespaces": (["namespace0.0"], {}),
    "pmem_mount_prefix": ("/mnt/other", {}),
    "ssd_devices": (["/data"], {}),
    "ssd_mount_prefix": ("/mnt/other", {}),
    "runtime_flavor": ("deeprec", {}),
    "runtime_index": ("https://mirror", {}),
    "runtime_tensorflow": ("2.4.1", {}),
    "runtime_sources": ("/src", {}),
    "gpu_driver": ("newest", {}),
    "parameter_server_storage": ("dram", {}),
    "parameter_server_storage_cache": ("1G", {"parameter_server_storage": "dram_pmem"}),
    "training_data": ("/shared/other", {}),
    "training_eval_data": ("0.05", {}),
    "training_hidden": ("8", {}),
    "training_cin": ("8", {}),
    "training_bottom": ("8", {}),
    "training_admission": ("counter:2", {"training_index": "hash"}),
    "training_eviction": ("cap:100", {}),
    "training_staleness": (1, {}),
    "training_optimizer": ("adam", {}),
    "training_holdout": (0.2, {}),
    "training_tls": ("on", {}),
    "training_checkpoint_increments": (2, {"training_checkpoint_rows": "files"}),
    "kubernetes_claim_path": ("/shared/criteo", {}),
    "kubernetes_servers": (5, CLASS),
    "kubernetes_server_memory": ("2G", {}),
    "kubernetes_server_nodes": ({"a": "b"}, CLASS),
    "kubernetes_storage_class": ("other", CLASS),
    "kubernetes_storage_size": ("7G", CLASS),
    "kubernetes_worker_memory": ("2G", {}),
}
SETTINGS = {model.prefix + name: item for model in settings.MODELS for name, item in shown(model).items()}
ON_SERVERS = {"oeprov_kind", "pmem_mode", "pmem_memmap", "pmem_directory", "parameter_server_count"}


def other(key: str) -> tuple[Any, dict[str, Any]]:
    """Another value than the variable's default, and what else is set with it."""
    if key in OTHERS:
        return OTHERS[key]
    item = SETTINGS[key]
    default = item.get("default")
    if "enum" in item:
        return next(choice for choice in item["enum"] if choice != default), {}
    match item.get("type"):
        case "boolean":
            return not default, {}
        case "array":
            return ["x"], {}
        case "object":
            return {"a": "b"}, {}
        case "string":
            return "x", {}
    return (default or item.get("minimum", 0)) + 1, {}


def settled(directory: Path, variables: dict[str, Any]) -> plan.PodPlan:
    """The plan with these variables, on the parameter servers or for all."""
    path = inventory_file(directory)
    content = yaml.safe_load(path.read_text())
    servers = content["all"]["children"]["parameter_servers"]
    for key, value in variables.items():
        if key in ON_SERVERS:
            for host in servers["hosts"].values():
                host[key] = value
        else:
            content["all"]["vars"][key] = value
            for host in servers["hosts"].values():
                host.pop(key, None)
            content["all"]["children"]["workers"]["hosts"]["gpu-1"].pop(key, None)
    path.write_text(yaml.safe_dump(content))
    return plan.settle(load(path), LaunchOptions(), "ctr")


def said(directory: Path, variables: dict[str, Any]) -> tuple[str, str]:
    """The manifests and the notes; instead of both, the refusal."""
    try:
        found = settled(directory, variables)
    except OeprovError as error:
        return "", str(error)
    return "\n".join(map(str, manifests.build(found))), "\n".join(found.notes)


def test_only_known_variables_are_here() -> None:
    assert set(OTHERS) <= set(settings.KNOWN)


@pytest.mark.parametrize("key", settings.KNOWN)
def test_no_variable_is_dropped_in_silence(key: str, tmp_path: Path) -> None:
    value, others = other(key)
    before, _ = said(tmp_path, others)
    after, words = said(tmp_path, {**others, key: value})
    assert before
    if key in NO_MEANING:
        assert after == before, "it has a meaning there"
        assert NO_MEANING[key]
    elif after == before or not after:
        assert key in words, "dropped in silence"


def test_the_list_of_those_without_a_meaning_has_no_others() -> None:
    assert set(NO_MEANING) <= set(settings.KNOWN)
    of_jobs = ("training_", "parameter_server_", "worker_")
    assert [key for key in NO_MEANING if key.startswith(of_jobs)] == ["training_tls"]


def test_a_note_is_in_the_text_and_on_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = inventory_file(tmp_path, "parameter_server_cpus: all, worker_count: 2")
    assert cli.run(["manifests", "-i", str(path)]) == 0
    out, err = capsys.readouterr()
    line = "worker_count has no effect on Kubernetes: kubernetes_workers says how many there are"
    assert f"note: {line}\n" in err
    assert f"# Note: {line}\n" in out
    assert "parameter_server_cpus has no effect on Kubernetes: the kubelet" in err
    assert cli.run(["manifests", "-i", str(inventory_file(tmp_path))]) == 0
    assert capsys.readouterr().err == ""


def test_settings_that_need_others(tmp_path: Path) -> None:
    dram = {"parameter_server_storage": "dram", **CLASS, "parameter_server_storage_cache": "1G"}
    assert settled(tmp_path, dram).notes == (
        "parameter_server_storage_cache has no effect on Kubernetes: it is for storage dram_pmem and "
        "dram_ssd, not dram",
        "kubernetes_storage_class has no effect on Kubernetes: servers with storage dram have no volumes",
        "kubernetes_storage_size has no effect on Kubernetes: servers with storage dram have no volumes",
    )


def test_ports_and_sizes_are_those_of_the_inventory(tmp_path: Path) -> None:
    wanted = {
        "parameter_server_port": 9000,
        "parameter_server_metrics_port": 9100,
        "parameter_server_storage_size": "64G",
    }
    found = {item["kind"]: item for item in manifests.build(settled(tmp_path, wanted))}
    container = found["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]
    words = container["args"]
    for option, value in (("--port", 9000), ("--metrics-port", 9100), ("--storage-size", 64 << 30)):
        assert words[words.index(option) + 1] == str(value)
    assert [item["containerPort"] for item in container["ports"]] == [9000, 9100]
    assert [item["port"] for item in found["Service"]["spec"]["ports"]] == [9000, 9100]
    rules = found["NetworkPolicy"]["spec"]["ingress"]
    assert [rule["ports"][0]["port"] for rule in rules] == [9000, 9100]
    annotations = found["StatefulSet"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == "9100"
    assert ":9000," in " ".join(found["Job"]["spec"]["template"]["spec"]["containers"][0]["args"])
    with pytest.raises(
        OeprovError, match=r"parameter_server_port and parameter_server_metrics_port: .* 7701"
    ):
        settled(tmp_path, {"parameter_server_port": 7701})


@pytest.mark.parametrize(
    ("key", "one", "two"),
    [
        ("parameter_server_threads", 2, 3),
        ("parameter_server_storage_size", "1G", "2G"),
        ("parameter_server_storage_cache", "1G", "2G"),
        ("parameter_server_port", 9000, 9001),
        ("parameter_server_metrics_port", 9000, 9001),
        ("worker_threads", 2, 3),
        ("worker_environment", {"A": "1"}, {"A": "2"}),
    ],
)
def test_hosts_that_differ_are_refused(tmp_path: Path, key: str, one: Any, two: Any) -> None:
    path = inventory_file(tmp_path)
    content = yaml.safe_load(path.read_text())
    groups = content["all"]["children"]
    groups["workers"]["hosts"]["gpu-2"] = {"oeprov_kind": "gpu", "worker_threads": 4}
    names = ("gpu-1", "gpu-2") if key.startswith("worker_") else ("re6p-1", "re6p-2")
    for name, value in zip(names, (one, two), strict=True):
        group = "workers" if key.startswith("worker_") else "parameter_servers"
        groups[group]["hosts"][name][key] = value
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(
        OeprovError, match=f"^{key}: pods of one job are alike, but it is .* on {names[0]} and"
    ):
        plan.settle(load(path), LaunchOptions())
    assert plan.settle(load(path, f"all:!{names[1]}"), LaunchOptions())
