"""Pods that do not start, on a small API server: what is said of them, when, and what is given up."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_cluster import FakeCluster, all_jobs
from rich.console import Console
from test_kubernetes_manifests import inventory_file

from provision.cli import main as cli
from provision.jobs.backends.kubernetes import follow, record
from provision.jobs.backends.kubernetes.api import Api

pytest.importorskip("kubernetes")


class TestPodsThatDoNotStart:
    @pytest.fixture(autouse=True)
    def _launched(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """A job of which one server's pod and the worker's are not there yet, and a follower of it."""
        self.cluster, self.said = FakeCluster(tmp_path), io.StringIO()
        monkeypatch.setenv("KUBECONFIG", str(self.cluster.kubeconfig))
        self.state = tmp_path / "state"
        path = inventory_file(tmp_path)
        assert self.oeprov("launch-training", "-i", str(path), "--on", "kubernetes", "--detach") == 0
        (self.job,) = all_jobs(self.state)
        found, documents = record.read(self.job), record.documents(self.job)
        self.follower = follow.Follower(Api(), found, documents, Console(file=self.said, width=200))
        self.server = f"{self.job.id}-server-1"
        for name, pod in self.cluster.pods.items():
            if "-worker-" in name or name == self.server:
                pod["status"] = {"phase": "Pending"}
        yield
        self.cluster.close()

    def oeprov(self, *words: str) -> int:
        return cli.run([*words, "--state-dir", str(self.state)])

    def complain(self, kind: str, name: str, reason: str, message: str) -> None:
        about = {"kind": kind, "name": name, "uid": f"uid-{name}"}
        place = "/api/v1/namespaces/ads/events"
        self.cluster.objects[place] = {
            "items": [{"involvedObject": about, "reason": reason, "message": message}]
        }

    def test_a_pod_may_wait_for_a_node(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        condition = {"type": "PodScheduled", "status": "False", "message": "1 Insufficient memory"}
        self.cluster.pods[self.server]["status"]["conditions"] = [condition]
        assert self.follower.observe() == ""
        assert "no node" not in self.said.getvalue()
        monkeypatch.setattr(follow, "PASSING_SECONDS", 0)
        assert self.follower.observe() == ""
        assert f"pod {self.server}: no node takes it yet: 1 Insufficient memory" in self.said.getvalue()
        capsys.readouterr()
        assert self.oeprov("status") == 0
        assert f"! {self.server}: no node takes it yet" in capsys.readouterr().out

    def test_a_registry_may_be_late(self, monkeypatch: pytest.MonkeyPatch) -> None:
        state = {"waiting": {"reason": "ErrImagePull", "message": "dial tcp: i/o timeout"}}
        self.cluster.pods[self.server]["status"]["containerStatuses"] = [{"name": "server", "state": state}]
        assert self.follower.observe() == ""
        assert "ErrImagePull: dial tcp: i/o timeout" in self.said.getvalue()
        monkeypatch.setattr(follow, "HOPELESS_SECONDS", 0)
        assert self.follower.observe() == f"pod {self.server}: ErrImagePull: dial tcp: i/o timeout"

    def test_training_that_has_begun_is_not_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(follow, "HOPELESS_SECONDS", 0)
        state = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off"}}
        self.cluster.pods[self.server]["status"]["containerStatuses"] = [{"name": "server", "state": state}]
        (worker,) = [pod for name, pod in self.cluster.pods.items() if "-worker-" in name]
        worker["status"] = {"phase": "Running"}
        assert self.follower.observe() == ""
        assert "ImagePullBackOff: Back-off" in self.said.getvalue()

    def test_volumes_that_cannot_be_mounted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(follow, "PASSING_SECONDS", 0)
        self.complain("Pod", self.server, "FailedMount", 'path "/mnt/pmem1" does not exist')
        assert self.follower.observe() == ""
        assert f'pod {self.server}: FailedMount: path "/mnt/pmem1" does not exist' in self.said.getvalue()

    def test_pods_that_may_not_be_made(self, capsys: pytest.CaptureFixture[str]) -> None:
        del self.cluster.pods[self.server]
        words = "pods are forbidden: exceeded quota: compute"
        self.complain("StatefulSet", f"{self.job.id}-server", "FailedCreate", words)
        assert self.follower.observe() == ""
        assert f"statefulset/{self.job.id}-server: FailedCreate: {words}" in self.said.getvalue()
        capsys.readouterr()
        assert self.oeprov("status") == 0
        assert words in capsys.readouterr().out

    def test_a_log_that_is_not_there_yet(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.cluster.silent = {self.server}
        capsys.readouterr()
        assert self.oeprov("logs", "--process", "server-1") == 0
        words = f'(container "main" in pod "{self.server}" is waiting to start: PodInitializing)\n'
        assert capsys.readouterr().out == words

    def test_a_server_that_ends_says_why(self) -> None:
        message = "listening\nerror: /pool/ctr: Permission denied\n"
        state = {
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": message}},
        }
        self.cluster.pods[self.server]["status"]["containerStatuses"] = [{"name": "server", **state}]
        assert self.follower.observe() == ""
        words = "container server ends again and again with exit status 1: /pool/ctr: Permission denied"
        assert words in self.said.getvalue()
