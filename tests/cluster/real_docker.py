"""A docker daemon of one's own, with the image of the test cluster; it ends with all that it has made."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import kube_image
from kube_cluster import until

IMAGES = ("oeprov-server", "oeprov-worker")
_NEEDED = ("dockerd", "docker", "containerd", "runc", "unshare", "mmdebstrap")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CGROUPS = Path("/sys/fs/cgroup")
# Neither networks nor anything else of this machine's is changed.
_WORDS = (
    *("--storage-driver", "overlay2", "--iptables=false", "--ip6tables=false", "--ip-forward=false"),
    *("--ip-masq=false", "--bridge=none"),
)


def why_not() -> str:
    """Why there can be no daemon here; empty when there can."""
    if os.geteuid() != 0:
        return "a docker of one's own needs root"
    absent = [name for name in _NEEDED if not shutil.which(name, path=_PATH)]
    return f"docker needs {', '.join(absent)}: see make test-kubernetes" if absent else kube_image.why_not()


class Docker:
    """The running daemon; a context manager. ``directory`` gets its data and its log."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.host = f"unix://{directory}/socket"
        self._cgroup = f"oeprov-docker-{os.getpid()}"
        self._daemon: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Docker:
        self.directory.mkdir(parents=True)
        own = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "dockerd"]
        places = [f"--{name}-root={self.directory / name}" for name in ("data", "exec")]
        more = [f"--pidfile={self.directory}/pid", f"--cgroup-parent=/{self._cgroup}", f"--host={self.host}"]
        with self.log.open("wb") as log:
            self._daemon = subprocess.Popen(
                [*own, *_WORDS, *places, *more], stdout=log, stderr=log, env={"PATH": _PATH}
            )
        try:
            until(lambda: self._ask("info").returncode == 0, 120, self.log.read_text)
            self._load()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the daemon with its containers, and remove its data."""
        assert self._daemon is not None
        self._daemon.send_signal(
            signal.SIGKILL
        )  # the first process of the namespace takes all others with it
        self._daemon.wait()
        for found in _CGROUPS.glob(f"*/{self._cgroup}"):
            for place, _, _ in os.walk(found, topdown=False):
                until(lambda place=place: _removed(Path(place)), 30)
        for name in ("data", "exec"):
            shutil.rmtree(self.directory / name)

    @property
    def log(self) -> Path:
        """What the daemon said."""
        return self.directory / "dockerd.log"

    def containers(self, *filters: str) -> list[str]:
        """Ids of the containers that there are, by their labels."""
        return self._ask("ps", "-aq", *(f"--filter=label={item}" for item in filters)).stdout.split()

    def kill(self, container: str) -> None:
        """Kill a container."""
        done = self._ask("kill", container)
        assert done.returncode == 0, done.stderr

    def _ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["docker", *words],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "DOCKER_HOST": self.host},
        )

    def _load(self) -> None:
        layout = self.directory / "image"
        layout.mkdir()
        kube_image.write(layout)
        first = json.loads((layout / "index.json").read_text())["manifests"][0]
        manifest = json.loads(_blob(layout, first).read_text())
        found = {
            "Config": str(_blob(layout, manifest["config"]).relative_to(layout)),
            "RepoTags": [f"{name}:latest" for name in IMAGES],
            "Layers": [str(_blob(layout, item).relative_to(layout)) for item in manifest["layers"]],
        }
        (layout / "manifest.json").write_text(json.dumps([found]))
        words = ["tar", "-c", "-C", str(layout), "manifest.json", "blobs"]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as pack:
            subprocess.run(
                ["docker", "load"],
                stdin=pack.stdout,
                check=True,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "DOCKER_HOST": self.host},
            )
        shutil.rmtree(layout)


def _blob(layout: Path, item: dict[str, str]) -> Path:
    return layout / "blobs" / item["digest"].replace(":", "/")


def _removed(cgroup: Path) -> bool:
    """Whether a cgroup is gone; its last processes may still be ending."""
    try:
        cgroup.rmdir()
    except OSError:
        return not cgroup.exists()
    return True
