"""A real Kubernetes cluster of one node: etcd, API server, controllers, scheduler, kubelet, containerd.

All of it is in namespaces of its own, of mounts, network and processes, and ends with them. What is not a
real cluster's: the name server (``kube_dns``), and nothing enforces network policies.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kube_image
from kube_request import ADDRESS

PROGRAMS = Path(os.environ.get("KUBERNETES") or Path(__file__).parents[2] / ".cache" / "kubernetes" / "bin")
NODE, NODE_ADDRESS, PODS, SERVICES = "pmem-1", "10.86.0.1", "10.86.1.0/24", "10.86.2.0/24"
_KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
_SYSTEM = ("etcd", "containerd", "ctr", "runc", "unshare", "nsenter", "ip", "openssl", "mmdebstrap")
_CNI = Path("/usr/lib/cni")
_PATH = f"{PROGRAMS}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_HERE = Path(__file__).parent
_CGROUPS = Path("/sys/fs/cgroup")
# The kubelet sets these for the whole machine, and so they are put back.
_KERNEL = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
_USERS = {
    "admin": "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
    f"system:node:{NODE}": "system:nodes",
    "trainer": "",
}

Document = dict[str, Any]


def why_not() -> str:
    """Why there can be no cluster here; empty when there can."""
    if os.geteuid() != 0:
        return "a cluster of one's own needs root"
    absent = [name for name in (*_KUBERNETES, *_SYSTEM) if not shutil.which(name, path=_PATH)]
    if absent or not (_CNI / "bridge").exists():
        return f"a cluster needs {', '.join(absent) or f'{_CNI}/bridge'}: see make test-kubernetes"
    return kube_image.why_not()


def until(what: Callable[[], Any], seconds: float, told: Callable[[], str] = str) -> Any:
    """The first true answer; AssertionError with what ``told`` says when there is none in time."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, told()
        time.sleep(0.5)
    return found


class Cluster:
    """The running cluster; a context manager. ``directory`` gets its data and logs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokens = {user: secrets.token_hex(16) for user in _USERS}
        self.logs = directory / "logs"
        self.cgroup = f"oeprov-test-{os.getpid()}"
        self.version = subprocess.run(
            ["kubelet", "--version"], capture_output=True, text=True, check=True, env={"PATH": _PATH}
        ).stdout.split()[-1]
        self.minor = int(re.match(r"v1\.(\d+)", self.version)[1])  # type: ignore[index]
        self.times: list[tuple[str, float]] = []
        self._holder: subprocess.Popen[str] | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._kernel = {name: (Path("/proc/sys") / name).read_text() for name in _KERNEL}

    def __enter__(self) -> Cluster:
        self.logs.mkdir(parents=True)
        try:
            begun = time.monotonic()
            self._namespaces()
            self._control_plane()
            self._took("control plane", begun)
            begun = time.monotonic()
            self._node()
            self._took("node", begun)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all of it, and put back what it changed of this machine."""
        if self._holder is not None:
            # The first process of the namespace takes all others with it.
            self._holder.send_signal(signal.SIGKILL)
            self._holder.wait()
        for process in self._processes.values():
            process.wait()
        for name, value in self._kernel.items():
            (Path("/proc/sys") / name).write_text(value)
        for found in _CGROUPS.glob(f"*/{self.cgroup}"):
            for place, _, _ in os.walk(found, topdown=False):
                os.rmdir(place)
        for name in ("containerd", "image"):  # gigabytes, where logs are all that is wanted
            shutil.rmtree(self.directory / name, ignore_errors=True)

    def inside(self, *words: str | Path, directory: Path = Path("/")) -> list[str]:
        """A command line that runs ``words`` in the cluster's namespaces, in a directory of theirs."""
        assert self._holder is not None
        pid = self._holder.pid
        enter = [f"--pid=/proc/{pid}/ns/pid_for_children", f"--mount=/proc/{pid}/ns/mnt"]
        enter.append(f"--net=/proc/{pid}/ns/net")
        return ["nsenter", *enter, "--", "env", "-C", str(directory), *map(str, words)]

    def ask(self, method: str, path: str, body: Document | None = None, user: str = "admin") -> Document:
        """One request to the API."""
        argv = [sys.executable, _HERE / "kube_request.py", self._ca, self.tokens[user], method, path]
        done = subprocess.run(
            self.inside(*argv), input=json.dumps(body) if body else "", capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found: Document = json.loads(done.stdout)
        return found

    def make(self, collection: str, *documents: Document) -> None:
        """Make objects, which must work."""
        for document in documents:
            found = self.ask("POST", collection, document)
            assert found.get("kind") != "Status", found

    def kubeconfig(self, user: str) -> Path:
        """A kubeconfig file of a user, for use within the namespaces."""
        ca = base64.b64encode(self._ca.read_bytes()).decode()
        path = self.directory / f"{user.replace(':', '-')}.kubeconfig"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [
                {"name": "c", "cluster": {"server": ADDRESS, "certificate-authority-data": ca}}
            ],
            "users": [{"name": "u", "user": {"token": self.tokens[user]}}],
            "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u"}}],
        }  # fmt: skip
        path.write_text(json.dumps(document))
        path.chmod(0o600)
        return path

    def log(self, name: str) -> str:
        """The last of what a part of the cluster said."""
        return (self.logs / f"{name}.log").read_text(errors="replace")[-4000:]

    @property
    def _ca(self) -> Path:
        return self.directory / "ca.crt"

    def _took(self, what: str, begun: float) -> None:
        self.times.append((what, time.monotonic() - begun))

    def _start(self, name: str, *words: str | Path) -> None:
        with (self.logs / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                self.inside(*words), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={"PATH": _PATH}
            )

    def _lives(self, name: str) -> bool:
        assert self._processes[name].poll() is None, f"{name} ended: {self.log(name)}"
        return True

    def _namespaces(self) -> None:
        kinds = ["--mount", "--net", "--pid", "--fork", "--kill-child=KILL", "--propagation", "private"]
        self._holder = subprocess.Popen(
            ["unshare", *kinds, "sh", str(_HERE / "kube_node.sh"), NODE_ADDRESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": _PATH},
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n"

    def _control_plane(self) -> None:
        place = self.directory
        lines = [f"{token},{user},{user},{_USERS[user]}" for user, token in self.tokens.items()]
        (place / "tokens.csv").write_text("".join(f"{line}\n" for line in lines))
        (place / "tokens.csv").chmod(0o600)
        make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
        names = "subjectAltName=IP:127.0.0.1"
        make += ["-addext", names, "-keyout", str(place / "ca.key"), "-out", str(self._ca)]
        subprocess.run(make, check=True, capture_output=True)
        self._start("etcd", "etcd", "--data-dir", "/run/etcd", "--log-level", "warn")
        self._start(
            "kube-apiserver",
            "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            "--bind-address=127.0.0.1",
            f"--advertise-address={NODE_ADDRESS}",
            f"--tls-cert-file={self._ca}",
            f"--tls-private-key-file={place / 'ca.key'}",
            f"--token-auth-file={place / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            f"--service-cluster-ip-range={SERVICES}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-account-issuer={ADDRESS}",
            f"--service-account-key-file={place / 'ca.key'}",
            f"--service-account-signing-key-file={place / 'ca.key'}",
        )

        def ready() -> bool:
            try:
                return self._lives("kube-apiserver") and "gitVersion" in self.ask("GET", "/version")
            except AssertionError:
                if self._processes["kube-apiserver"].poll() is not None:
                    raise
                return False

        until(ready, 120, lambda: self.log("kube-apiserver"))
        for name, more in (
            ("kube-controller-manager", [f"--service-account-private-key-file={place / 'ca.key'}"]),
            ("kube-scheduler", []),
        ):
            config = self.kubeconfig(f"system:{name}")
            roles = [f"--kubeconfig={config}", "--leader-elect=false", "--bind-address=127.0.0.1"]
            if name == "kube-controller-manager":
                roles.append("--use-service-account-credentials=true")
            self._start(name, name, *roles, *more)

    def _node(self) -> None:
        place = self.directory
        (place / "cni").mkdir()
        network = {
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "pods",
                    "isGateway": True,
                    "ipam": {
                        "type": "host-local",
                        "subnet": PODS,
                        "dataDir": str(place / "addresses"),
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                }
            ],
        }
        (place / "cni" / "pods.conflist").write_text(json.dumps(network))
        (place / "containerd.toml").write_text(_containerd(place))
        self._start("containerd", "containerd", "--config", place / "containerd.toml")
        self._start(
            "dns", sys.executable, _HERE / "kube_dns.py", self._ca, self.tokens["admin"], NODE_ADDRESS
        )
        self._images()
        for found in _CGROUPS.iterdir():
            if not (_CGROUPS / "cgroup.controllers").exists():
                (found / self.cgroup).mkdir(exist_ok=True)
        (place / "resolv.conf").write_text(f"nameserver {NODE_ADDRESS}\n")
        (place / "kubelet.json").write_text(json.dumps(self._kubelet()))
        remote = ["--container-runtime=remote"] if self.minor < 24 else []
        self._start(
            "kubelet",
            "kubelet",
            *remote,
            "--container-runtime-endpoint=unix:///run/containerd/containerd.sock",
            f"--config={place / 'kubelet.json'}",
            f"--kubeconfig={self.kubeconfig(f'system:node:{NODE}')}",
            f"--hostname-override={NODE}",
            f"--node-ip={NODE_ADDRESS}",
            f"--root-dir={place / 'kubelet'}",
        )
        until(self._ready, 180, lambda: self.log("kubelet"))

    def _ready(self) -> bool:
        self._lives("kubelet")
        node = self.ask("GET", f"/api/v1/nodes/{NODE}")
        conditions = node["status"]["conditions"] if node["kind"] == "Node" else []
        return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)

    def _images(self) -> None:
        layout = self.directory / "image"
        layout.mkdir()
        kube_image.write(layout)
        control = ["ctr", "--address", "/run/containerd/containerd.sock", "--namespace", "k8s.io"]
        pack = subprocess.Popen(
            ["tar", "-c", "-C", str(layout), "oci-layout", "index.json", "blobs"], stdout=subprocess.PIPE
        )
        subprocess.run(
            self.inside(*control, "images", "import", "-"), stdin=pack.stdout, env={"PATH": _PATH}, check=True
        )
        assert pack.wait() == 0
        shutil.rmtree(layout)

    def _kubelet(self) -> Document:
        found: Document = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "clusterDNS": [NODE_ADDRESS],
            "clusterDomain": "cluster.local",
            "resolvConf": str(self.directory / "resolv.conf"),
            "failSwapOn": False,
            "oomScoreAdj": 0,  # lower ones take a capability that containers of this machine may lack
            "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
            "nodeStatusUpdateFrequency": "4s",
        }
        if self.minor >= 22:
            found["featureGates"] = {"KubeletInUserNamespace": True}  # errors of sysctl and the like pass
        if self.minor >= 31:
            found["failCgroupV1"] = False
        return found


def _containerd(place: Path) -> str:
    return f"""\
version = 2
root = "{place}/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{kube_image.PAUSE}"
restrict_oom_score_adj = true
disable_hugetlb_controller = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{_CNI}"
conf_dir = "{place}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""
