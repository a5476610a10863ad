"""TensorFlow Serving's reloading by a request over gRPC, for one model: its versions and their labels."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from oe_runtime.errors import InputError, ServingError
from oe_runtime.serving import requests
from oe_runtime.serving.messages import message
from oe_runtime.serving.model import NotServed
from oe_runtime.serving.versions import Versions
from oe_runtime.support import remote_files

MOST_VERSIONS = 16  # at a time, each with its rows in memory
_LABELS = 100  # of the model at a time: a refusal of another one names them
_TYPES = {0: "", 1: "tensorflow"}  # platforms by TensorFlow Serving's earlier number


class Reload:
    """Answers ReloadConfigRequest: it names the versions to serve, and all their labels."""

    def __init__(self, versions: Versions) -> None:
        self._name, self._versions = versions.name, versions
        self._one = threading.Lock()  # others would hold the threads that answer

    def answer(self, request: Any) -> Any:
        """Return when those versions and labels are served, and no earlier ones.

        Raises InputError for another model and what has no meaning here, NotKept, NotServed; then nothing
        has changed.
        """
        config = self._find_config(request)
        policy = config.model_version_policy
        steps, labels = _read_policy(policy), _read_labels(config.version_labels)
        if not self._one.acquire(blocking=False):
            raise ServingError("another request reloads now; try again after it")
        try:
            if self._versions.steps_from:
                if policy.WhichOneof("policy_choice") is not None:
                    raise NotServed(
                        f"model_version_policy: {self._versions.steps_from} chooses the step; leave it out "
                        "(oeprov serve rollback changes the file)"
                    )
                steps = self._versions.steps
            self._versions.serve(steps, labels)
        finally:
            self._one.release()
        said = ", ".join(f"{label!r}" for label in labels) or "none"
        found = ", ".join(map(str, self._versions.models))
        print(f"reloaded by a request: version {found}, labels: {said}", flush=True)
        reply = message("ReloadConfigResponse")()
        reply.status.SetInParent()
        return reply

    def _find_config(self, request: Any) -> Any:
        """Return the configuration of this model. Raises InputError."""
        if request.metric_names:
            raise InputError("metric_names: changes of metrics are not told; read /metrics")
        if request.config.WhichOneof("config") != "model_config_list":
            raise InputError("the config must be a model_config_list; a custom_model_config is not read")
        configs = request.config.model_config_list.config
        for config in configs:
            if config.name != self._name:
                raise InputError(
                    f"the model_config_list names the model {config.name[:40]!r}; only {self._name!r} is "
                    "served here"
                )
        if len(configs) != 1:
            raise InputError(
                f"the model_config_list has {len(configs)} entries; one, for {self._name!r}, is needed (to "
                "unload it, end the process)"
            )
        (config,) = configs
        if config.base_path and not _is_same(config.base_path, self._versions.source):
            raise InputError(
                f"base_path {config.base_path[:200]!r}: {self._name!r} is served from "
                f"{self._versions.source}, and no other model can take its place; leave it out"
            )
        for field, platform in (
            ("model_platform", config.model_platform),
            ("model_type", _TYPES.get(config.model_type, "other")),
        ):
            known = self._versions.main.platform  # TensorFlow Serving's has no more than the first word
            if platform not in ("", known, known.partition("_")[0]):
                raise InputError(f"{field}: the model is of {known}, not {platform[:40]!r}")
        if config.HasField("logging_config"):
            raise InputError("logging_config: requests are not logged here; leave it out")
        return config


def _is_same(path: str, source: str) -> bool:
    """Whether both name one directory or URL, by their text alone: clients must not look at files."""
    if remote_files.is_remote(path) or remote_files.is_remote(source):
        return path.rstrip("/") == source.rstrip("/")
    return os.path.abspath(path) == os.path.abspath(source)


def _read_policy(policy: Any) -> Sequence[int | None]:
    """Return the versions to serve; None: the newest. Raises InputError."""
    choice = policy.WhichOneof("policy_choice")
    if choice == "all" or policy.latest.num_versions > 1:
        raise InputError(
            f"model_version_policy: {choice} would keep earlier steps in memory as training goes on; ask for "
            "the latest one, or for specific ones"
        )
    if choice != "specific":
        return [None]
    steps = sorted(set(policy.specific.versions))
    if not 1 <= len(steps) <= MOST_VERSIONS:
        raise InputError(
            f"model_version_policy: specific names {len(steps)} versions; name one, or up to {MOST_VERSIONS}"
        )
    return steps


def _read_labels(labels: Any) -> dict[str, int]:
    """Return versions by label. Raises InputError."""
    if len(labels) > _LABELS:
        raise InputError(f"version_labels has {len(labels)} labels; at most {_LABELS} are kept")
    for label in labels:
        requests.check_new_label(label)
    return dict(labels)
