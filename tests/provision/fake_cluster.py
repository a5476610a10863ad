"""A small API server on loopback: it keeps objects, and does for pods what controllers do."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from provision.jobs import store
from provision.jobs.store import Job

Document = dict[str, Any]
STEPS = ["reading /shared/criteo", "step 20/40  loss 0.61", "step 40/40  loss 0.52"]


def all_jobs(state_dir: Path) -> list[Job]:
    """Every job on Kubernetes, oldest first."""
    return [job for job in store.directories(state_dir) if job.place == "kubernetes"]


class FakeCluster:
    """What ``worker`` does: "runs" until it is deleted, or is "done" or "failed" at once."""

    def __init__(self, directory: Path, *, worker: str = "runs", namespace: str = "ads") -> None:
        self.worker = worker
        self.errors: list[str] = []  # what the worker says at last
        self.images = True  # that nodes can pull them
        self.denied: set[tuple[str, str]] = set()  # verb and resource
        self.refused: dict[str, tuple[int, str]] = {}  # kind → what POST answers
        self.busy = 0  # how many more questions about pods it is too busy to answer
        self.posts: list[str] = []  # kinds that were really made
        self.patches: list[str] = []  # kinds that were really changed
        self.broken: dict[str, str] = {}  # word of a replica's command line → the error with which it ends
        self.lock = threading.RLock()
        self.objects: dict[str, Document] = {
            f"/api/v1/namespaces/{namespace}": {},
            "/version": {"gitVersion": "v1.37.0"},
        }
        claim = {"spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
        self.claim_path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/deeprec"
        self.objects[self.claim_path] = claim
        self.pods: dict[str, Document] = {}
        self.logs: dict[str, list[str]] = {}
        self.silent: set[str] = set()  # pods that have no log yet
        handler = type("Handler", (_Handler,), {"cluster": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self.thread.start()
        self.kubeconfig = directory / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(self._config()))

    def _config(self) -> Document:
        address = f"http://127.0.0.1:{self.server.server_address[1]}"
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "c", "cluster": {"server": address}}],
            "users": [{"name": "u", "user": {"token": "abc"}}],
            "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u"}}],
        }

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def kinds(self) -> list[str]:
        """What a job has left here."""
        with self.lock:
            return sorted(str(item["kind"]) for item in self.objects.values() if "kind" in item)

    def made(self, path: str, body: Document) -> None:
        """An object is made; its pods come up."""
        self.objects[f"{path}/{body['metadata']['name']}"] = body
        self.posts.append(body["kind"])
        name = body["metadata"]["name"]
        if body["kind"] == "StatefulSet":
            for index in range(body["spec"]["replicas"]):
                self._pod(f"{name}-{index}", body["spec"]["template"], ready=True)
                for claim in body["spec"].get("volumeClaimTemplates", []):
                    place = f"{path.replace('apis/apps', 'api').rpartition('/')[0]}/persistentvolumeclaims"
                    full = f"{claim['metadata']['name']}-{name}-{index}"
                    self.objects[f"{place}/{full}"] = {"kind": "PersistentVolumeClaim"}
        if body["kind"] == "Deployment":
            self._roll(path, body)
        if body["kind"] == "Job":
            self._pod(f"{name}-0-x7k2p", body["spec"]["template"], ready=False)
            if self.worker == "failed" and self.images:
                ended = {"exitCode": 1, "reason": "Error", "message": "\n".join([*STEPS, *self.errors, ""])}
                status = self.pods[f"{name}-0-x7k2p"]["status"]
                status["phase"], status["containerStatuses"][0]["state"] = "Failed", {"terminated": ended}
            self.logs[f"{name}-0-x7k2p"] = [*STEPS, *self.errors]
            ends = {"done": "Complete", "failed": "Failed"}.get(self.worker)
            if ends:
                condition = {
                    "type": ends,
                    "status": "True",
                    "message": "Job has reached the specified backoff limit",
                }
                body["status"] = {"conditions": [condition]}

    def _roll(self, path: str, body: Document) -> None:
        """Give a Deployment its pods; of another template than before new ones, if these can start."""
        meta, wanted, template = body["metadata"], body["spec"]["replicas"], body["spec"]["template"]
        meta["generation"] = meta.get("generation", 0) + 1
        digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:8]
        name, before = meta["name"], [item for item in self.pods if item.startswith(f"{meta['name']}-")]
        kept = [item for item in before if item.startswith(f"{name}-{digest}-")]
        (container,) = template["spec"]["containers"]
        words = [*container["args"], *(item["value"] for item in container["env"])]
        if error := next((text for word, text in self.broken.items() if word in words), ""):
            self._pod(f"{name}-{digest}-x", template, ready=False)
            ended = {"exitCode": 1, "reason": "Error", "message": f"error: {error}\n"}
            self.pods[f"{name}-{digest}-x"]["status"]["containerStatuses"][0]["state"] = {"terminated": ended}
            body["status"] = {"observedGeneration": meta["generation"], "replicas": len(before) + 1}
            return
        for item in [item for item in before if item not in kept] + kept[wanted:]:
            del self.pods[item]
        for number in range(wanted):
            self.logs.setdefault(f"{name}-{digest}-{number}", ["serving /shared/run"])
            if f"{name}-{digest}-{number}" not in self.pods:
                self._pod(f"{name}-{digest}-{number}", template, ready=self.images)
        names = ["replicas", "updatedReplicas"]
        names += ["availableReplicas", "readyReplicas"] if self.images else []
        body["status"] = {"observedGeneration": meta["generation"], **dict.fromkeys(names, wanted)}

    def merge(self, path: str, patch: Document) -> Document:
        """What a merge patch makes of an object."""
        found: Document = _merged(self.objects[path], patch)
        self.objects[path] = found
        if found["kind"] == "Deployment":
            self._roll(path, found)
        return found

    def _pod(self, name: str, template: Document, *, ready: bool) -> None:
        container: Document = {"name": "main", "restartCount": 0, "state": {"running": {}}}
        phase = "Running"
        if not self.images:
            message = 'Back-off pulling image "registry.example/oeprov-server:0.1.0"'
            container["state"] = {"waiting": {"reason": "ImagePullBackOff", "message": message}}
            phase, ready = "Pending", False
        self.pods[name] = {
            "metadata": {"name": name, "uid": f"uid-{name}", "labels": template["metadata"]["labels"]},
            "spec": {"nodeName": "re6p-1"},
            "status": {
                "phase": phase,
                "containerStatuses": [container],
                "conditions": [{"type": "Ready", "status": str(ready)}],
            },
        }

    def deleted(self, path: str) -> bool:
        body = self.objects.pop(path, None)
        if body is None:
            return False
        gone = body["metadata"]["name"] if body.get("kind") in ("StatefulSet", "Job", "Deployment") else None
        for name in [item for item in self.pods if gone and item.startswith(f"{gone}-")]:
            if name in self.logs:
                self.logs[name].append("stopped (SIGTERM) after step 40: checkpoint step-0000000040")
            del self.pods[name]
        return True


def _merged(found: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result = {**found} if isinstance(found, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result


class _Handler(BaseHTTPRequestHandler):
    cluster: FakeCluster
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def answer(self, code: int, body: Document) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def fail(self, code: int, message: str) -> None:
        self.answer(
            code,
            {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code},
        )

    def not_found(self, path: str) -> None:
        self.fail(404, f'{path.split("/")[-2]} "{path.split("/")[-1]}" not found')

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query, cluster = parse_qs(parts.query), self.cluster
        if self.headers["Authorization"] != "Bearer abc":
            return self.fail(401, "Unauthorized")
        if parts.path.endswith("/log"):
            return self.log(parts.path.split("/")[-2], query)
        with cluster.lock:
            if parts.path.endswith("/pods"):
                if cluster.busy:
                    cluster.busy -= 1
                    return self.fail(503, "apiserver is shutting down")
                wanted = dict(item.split("=") for item in query["labelSelector"][0].split(","))
                items = [
                    p for p in cluster.pods.values() if wanted.items() <= p["metadata"]["labels"].items()
                ]
                return self.answer(200, {"kind": "PodList", "items": items})
            found = cluster.objects.get(parts.path)
            return self.not_found(parts.path) if found is None else self.answer(200, found)

    def log(self, pod: str, query: dict[str, list[str]]) -> None:
        cluster = self.cluster
        with cluster.lock:
            lines = cluster.logs.get(pod, ["server 0 listens"] if pod in cluster.pods else None)
        if pod in cluster.silent:
            return self.fail(400, f'container "main" in pod "{pod}" is waiting to start: PodInitializing')
        if lines is None:
            return self.not_found(f"pods/{pod}")
        shown = 0 if "tailLines" not in query else max(0, len(lines) - int(query["tailLines"][0]))
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while True:
            with cluster.lock:
                new, ended = lines[shown:], pod not in cluster.pods or cluster.worker != "runs"
            for line in new:
                data = f"{line}\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            shown += len(new)
            if ended or "follow" not in query:
                self.wfile.write(b"0\r\n\r\n")
                return None
            threading.Event().wait(0.01)

    def do_POST(self) -> None:
        parts = urlsplit(self.path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        cluster = self.cluster
        with cluster.lock:
            if body["kind"] == "SelfSubjectAccessReview":
                asked = body["spec"]["resourceAttributes"]
                allowed = (asked["verb"], asked["resource"]) not in cluster.denied
                return self.answer(201, {**body, "status": {"allowed": allowed}})
            if body["kind"] in cluster.refused:
                return self.fail(*cluster.refused[body["kind"]])
            if f"{parts.path}/{body['metadata']['name']}" in cluster.objects:
                return self.fail(409, f'"{body["metadata"]["name"]}" already exists')
            if "dryRun" not in parse_qs(parts.query):
                cluster.made(parts.path, body)
            return self.answer(201, body)

    def do_PATCH(self) -> None:
        parts, cluster = urlsplit(self.path), self.cluster
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Content-Type"] != "application/merge-patch+json":
            return self.fail(415, f"the body of the request was in an unknown format: {parts.path}")
        with cluster.lock:
            if body["kind"] in cluster.refused:
                return self.fail(*cluster.refused[body["kind"]])
            if parts.path not in cluster.objects:
                return self.not_found(parts.path)
            if "dryRun" in parse_qs(parts.query):
                return self.answer(200, _merged(cluster.objects[parts.path], body))
            cluster.patches.append(body["kind"])
            return self.answer(200, cluster.merge(parts.path, body))

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        with self.cluster.lock:
            if ("delete", path.split("/")[-2]) in self.cluster.denied:
                return self.fail(403, f"{path.split('/')[-2]} is forbidden")
            return self.answer(200, {}) if self.cluster.deleted(path) else self.not_found(path)

    def log_message(self, *_: object) -> None:
        pass
