"""Drives that fail under real servers: the kernel says EIO, or makes the file system read-only."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from server_processes import CACHES, Server

from oe_runtime import Client, StorageError, TableSpec

pytestmark = pytest.mark.process

MIB = 1 << 20
SPEC = TableSpec("t", 64, optimizer={"name": "sgd"}, initializer={"name": "zeros"})


def run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system in a file can be mounted here: {done.stderr.strip()}")
    return done.stdout.strip()


class Drive:
    """A file system in a file, which stands in for a drive."""

    def __init__(self, directory: Path) -> None:
        self.image = directory / "image"
        self.path = directory / "drive"
        self.path.mkdir()
        self.image.touch()
        os.truncate(self.image, 200 * MIB)
        run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", self.image)
        self.device = run("losetup", "--find", "--show", self.image)
        run("mount", "-o", "errors=remount-ro", self.device, self.path)

    def lose_all_behind(self, size: int) -> None:
        """Reads and writes behind it fail with EIO."""
        subprocess.run(["sync", "-f", str(self.path)], check=True)
        os.truncate(self.image, size)

    def become_read_only(self) -> None:
        """As ext4 makes it when it finds an error, under open files."""
        name = Path(self.device).name
        Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("test")
        mounts = Path("/proc/mounts").read_text()
        assert re.search(rf"^{re.escape(self.device)} \S+ ext4 (ro,|\S+,emergency_ro)", mounts, re.M)

    def end(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.path)], stderr=subprocess.DEVNULL)
        subprocess.run(["losetup", "--detach", self.device], stderr=subprocess.DEVNULL)


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    made = Drive(tmp_path)
    yield made
    made.end()


def start(drive: Drive, directory: Path, kind: str) -> Server:
    """A server with its rows on the drive, and all else beside it."""
    flags = ["--storage", kind, "--storage-path", str(drive.path / "rows")]
    if kind in CACHES:
        flags += ["--storage-cache", str(CACHES[kind])]
    return Server(directory, *flags)


def push(client: Client, table: int, ids: np.ndarray) -> None:
    pulled = client.pull([ids], [(table, 0)])
    client.push(pulled, [np.ones((len(ids), 64), np.float32)], 1.0)


def test_rows_that_a_drive_does_not_give_back_are_an_error(drive, tmp_path):
    server = start(drive, tmp_path, "dram_ssd")
    try:
        with Client([server.endpoint]) as client:
            table = client.create_table(SPEC)
            ids = np.arange(60_000)
            for _ in range(2):
                push(client, table, ids)
            client.checkpoint(1, wait=True)
            drive.lose_all_behind(drive.image.stat().st_size // 4)
            failed = 0
            for begin in range(0, len(ids), 2_000):
                try:
                    rows = client.pull_rows(table, ids[begin : begin + 2_000])
                except StorageError as error:
                    failed += 1
                    assert re.search(  # noqa: PT017 - some parts are there, some are not
                        r"table 't': .* of key \d+,? cannot be read from \S+\.log: Input/output error; "
                        r"no row was given up\. Check the drive|"
                        r"\.log cannot be read, not even its superblock",
                        str(error),
                    )
                else:
                    assert (rows == -2).all()
            assert failed > 5
            with pytest.raises(StorageError):
                push(client, table, ids)
            with pytest.raises(StorageError):
                client.export_rows(table)
            saved = tmp_path / "saved"
            saved.mkdir()
            with pytest.raises(StorageError):
                client.save(saved)
            of_table = client.stats()["servers"][0]["tables"]["t"]
            assert of_table["rows"] == len(ids)
            assert of_table["damage"]["quarantined_rows"] == 0
    finally:
        server.end()


@pytest.mark.parametrize("kind", ["pmem_libpmem", "dram_pmem", "dram_ssd"])
def test_a_file_system_that_becomes_read_only_takes_no_other_table(drive, tmp_path, kind):
    server = start(drive, tmp_path, kind)
    try:
        with Client.in_process() as client:
            table = client.create_table(SPEC)
            ids = np.arange(100_000)
            client.assign(table, ids, np.ones((len(ids), 64), np.float32))
            saved = tmp_path / "saved"
            saved.mkdir()
            client.save(saved)
        with (
            Client([server.endpoint], job="other") as other,
            Client([server.endpoint], timeout=60) as client,
        ):
            kept = other.create_table(SPEC)
            push(other, kept, ids[:100])
            table = client.create_table(SPEC)
            push(client, table, ids[:100])
            failures = []

            def restore() -> None:
                try:
                    client.restore(saved)
                except StorageError as error:
                    failures.append(error)

            before = len(list(drive.path.rglob("oe-*")))
            thread = threading.Thread(target=restore)
            thread.start()
            while thread.is_alive() and len(list(drive.path.rglob("oe-*"))) == before:
                pass  # until it has a file for the rows
            drive.become_read_only()
            thread.join()
            assert (other.pull_rows(kept, ids[:100]) == -1).all()
            assert (client.pull_rows(table, ids[:100]) == (-1 if failures else 1)).all()
        server.process.send_signal(signal.SIGTERM)
        status, said = server.wait()
        assert status == 0, said
    finally:
        server.end()
