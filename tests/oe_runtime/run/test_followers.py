"""Workers other than worker 0 get a checkpoint's arrays from it: they see no file, and leave none."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from oe_runtime.errors import CheckpointError
from oe_runtime.keras.job_state import KerasScriptState
from oe_runtime.run.followers import FollowingCheckpoints
from oe_runtime.run.ranks import Ranks
from oe_runtime.run.script_state import FILE
from oe_runtime.support import dense_file


class SecondOfTwo(Ranks):
    """Worker 1, to which worker 0 sends the given contents, in this order."""

    rank, count = 1, 2

    def __init__(self, *contents: bytes) -> None:
        super().__init__()
        self._contents = list(contents)

    def share(self, content: bytes, root: int = 0) -> bytes:
        return self._contents.pop(0)


class Servers:
    def restore(self, *paths: Path) -> None:
        pass


def state() -> KerasScriptState:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="out")], name="net")
    model.compile("adagrad", "mse", metrics=["mae"])
    return KerasScriptState(model)


def followed(following: KerasScriptState, path: Path, *contents: bytes) -> None:
    """Go to worker 0's checkpoint at `path`, of which it sends the contents of the files."""
    target = {"path": str(path), "position": {"step": 7}, "pool": None, "files": [str(path)]}
    ranks, client = SecondOfTwo(json.dumps(target).encode(), *contents), Servers()
    saved, _ = FollowingCheckpoints(following, client, ranks).roll_back()  # type: ignore[arg-type]
    assert saved.path == path
    assert saved.position.step == 7
    following.share_extra(ranks, path)


@pytest.fixture(autouse=True)
def no_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be written: a worker that is killed meanwhile would leave it."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a temporary file")

    for name in ("mkdtemp", "mkstemp", "TemporaryDirectory"):
        monkeypatch.setattr(tempfile, name, refuse)


def test_followers_take_all_arrays_without_a_file(tmp_path: Path) -> None:
    leading, following = state(), state()
    leading.model.train_on_batch(np.ones((4, 2)), np.ones((4, 3)))
    following.model.train_on_batch(np.zeros((4, 2)), np.ones((4, 3)))  # to have metrics
    leading.write(leading.values(), tmp_path)
    files = [(tmp_path / name).read_bytes() for name in (dense_file.FILE, FILE)]
    for name in (dense_file.FILE, FILE):
        (tmp_path / name).unlink()
    followed(following, tmp_path, *files)
    following.restore_metrics()
    expected, found = leading.values(), following.values()
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)


def test_a_model_that_was_compiled_anew_takes_the_weights_once_more(tmp_path: Path) -> None:
    leading, following = state(), state()
    leading.model.train_on_batch(np.ones((4, 2)), np.ones((4, 3)))
    leading.write(leading.values(), tmp_path)
    content = (tmp_path / dense_file.FILE).read_bytes()
    (tmp_path / dense_file.FILE).unlink()
    followed(following, tmp_path, content, b"")
    following.model.compile("adagrad", "mse")
    following.load_again(SecondOfTwo(content), tmp_path)
    assert int(following.model.optimizer.iterations.numpy()) == 1


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04"])
def test_errors_name_the_file_of_worker_0(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CheckpointError, match="cannot be read as a dense checkpoint") as found:
        followed(state(), tmp_path / "step-7", content)
    assert str(found.value).startswith(f"{tmp_path}/step-7/{dense_file.FILE}: ")
