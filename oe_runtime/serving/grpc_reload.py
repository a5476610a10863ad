"""TensorFlow Serving's reloading by a request over gRPC, for one model of which one version is served."""

from __future__ import annotations

import os
import threading
from typing import Any

from oe_runtime.errors import InputError, ServingError
from oe_runtime.serving import requests
from oe_runtime.serving.messages import message
from oe_runtime.serving.model import Model, NotServed
from oe_runtime.support import remote_files

_LABELS = 100  # of the model at a time: a refusal of another one names them
_TYPES = {0: "", 1: "tensorflow"}  # platforms by TensorFlow Serving's earlier number


class Reload:
    """Answers ReloadConfigRequest: it names the version to serve, and all labels of it."""

    def __init__(self, name: str, model: Model) -> None:
        self._name, self._model = name, model
        self._one = threading.Lock()  # others would hold the threads that answer

    def answer(self, request: Any) -> Any:
        """Return when that version and those labels are served, and no earlier ones.

        Raises InputError for another model and what has no meaning here, NotKept, NotServed; then nothing
        has changed.
        """
        config = self._find_config(request)
        policy = config.model_version_policy
        step, labels = _read_policy(policy), _read_labels(config.version_labels)
        if not self._one.acquire(blocking=False):
            raise ServingError("another request reloads now; try again after it")
        try:
            self._reload(step, labels, is_chosen=policy.WhichOneof("policy_choice") is not None)
        finally:
            self._one.release()
        said = ", ".join(f"{label!r}" for label in labels) or "none"
        print(f"reloaded by a request: version {self._model.version}, labels: {said}", flush=True)
        reply = message("ReloadConfigResponse")()
        reply.status.SetInParent()
        return reply

    def _reload(self, step: int | None, labels: dict[str, int], *, is_chosen: bool) -> None:
        model = self._model
        if model.steps_from:
            if is_chosen:
                raise NotServed(
                    f"model_version_policy: {model.steps_from} chooses the step; leave it out (oeprov serve "
                    "rollback changes the file)"
                )
            model.use_labels(labels)
        elif model.has_steps:
            model.pin(step, labels)
        elif step is None or (step == model.version and not model.sources):
            model.use_labels(labels)
        else:
            raise NotServed(f"version {step}: only the rows of checkpoints have versions to choose from")

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
        if config.base_path and not _is_same(config.base_path, self._model.source):
            raise InputError(
                f"base_path {config.base_path[:200]!r}: {self._name!r} is served from {self._model.source}, "
                "and no other model can take its place; leave it out"
            )
        for field, platform in (
            ("model_platform", config.model_platform),
            ("model_type", _TYPES.get(config.model_type, "other")),
        ):
            known = self._model.platform  # TensorFlow Serving's has no more than the first word
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


def _read_policy(policy: Any) -> int | None:
    """Return the version to serve; None: the newest. Raises InputError."""
    choice = policy.WhichOneof("policy_choice")
    if choice == "all" or policy.latest.num_versions > 1:
        raise InputError(
            f"model_version_policy: {choice} is for several versions, and one is served at a time; ask for "
            "the latest, or a specific one"
        )
    if choice != "specific":
        return None
    if len(set(policy.specific.versions)) != 1:
        raise InputError(
            "model_version_policy: specific must name one version, because one is served at a time"
        )
    return int(policy.specific.versions[0])


def _read_labels(labels: Any) -> dict[str, int]:
    """Return versions by label. Raises InputError."""
    if len(labels) > _LABELS:
        raise InputError(f"version_labels has {len(labels)} labels; at most {_LABELS} are kept")
    for label in labels:
        requests.check_new_label(label)
    return dict(labels)
