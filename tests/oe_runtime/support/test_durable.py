"""Names that outlive a power cut."""

from __future__ import annotations

import os
from pathlib import Path

from oe_runtime.support import durable


def test_a_name_is_durable_after_the_content_and_before_the_return(tmp_path, monkeypatch):
    done = []
    sync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        done.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def note_replace(new: Path, path: Path) -> None:
        done.append(("rename", str(path)))
        replace(new, path)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    new, path = tmp_path / "new", tmp_path / "model"
    (new / "variables").mkdir(parents=True)
    (new / "variables" / "data").write_text("x")
    durable.rename(new, path)
    assert (path / "variables" / "data").read_text() == "x"
    assert done[-2:] == [("rename", str(path)), ("sync", str(tmp_path))]
    assert {str(new), str(new / "variables"), str(new / "variables" / "data")} == {
        name for what, name in done[:-2] if what == "sync"
    }


def test_small_files_are_for_whom_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        durable.write_json(tmp_path / "ready.json", {"port": 1})
    finally:
        os.umask(before)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o640
