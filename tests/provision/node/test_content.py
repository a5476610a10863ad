"""Real reads: files stand for block devices, and a preloaded library gives the errors of bad media."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from provision.cluster import share
from provision.node import content, filesystem, owned
from provision.node.apply import apply
from provision.node.command import CommandError, Result, System
from provision.node.state import Namespace, State
from provision.node.step import Applied, Step

MIB = 1 << 20
SIZE = 64 * MIB
TOOLS = ("blkid", "wipefs", "mkfs.ext4", "dumpe2fs")
COMPILER = shutil.which("cc")
# Reads of files whose name ends with EIO_FILE fail from byte EIO_FROM on.
PRELOAD = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static long from(int fd) {
  char link[64], name[4096];
  const char *file = getenv("EIO_FILE"), *start = getenv("EIO_FROM");
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = file ? readlink(link, name, sizeof name - 1) : -1;
  if (length < (ssize_t)(file ? strlen(file) : 0)) return -1;
  name[length] = 0;
  return strcmp(name + length - strlen(file), file) ? -1 : atol(start);
}
static ssize_t limit(int fd, size_t size, off_t at) {
  long bad = from(fd);
  if (bad < 0 || at + (long)size <= bad) return size;
  if (at >= bad) { errno = EIO; return -1; }
  return bad - at;
}
ssize_t pread64(int fd, void *to, size_t size, off64_t at) {
  static ssize_t (*next)(int, void *, size_t, off64_t);
  if (!next) next = dlsym(RTLD_NEXT, "pread64");
  ssize_t allowed = limit(fd, size, at);
  return allowed < 0 ? -1 : next(fd, to, allowed, at);
}
ssize_t pread(int fd, void *to, size_t size, off_t at) { return pread64(fd, to, size, at); }
ssize_t read(int fd, void *to, size_t size) {
  static ssize_t (*next)(int, void *, size_t);
  if (!next) next = dlsym(RTLD_NEXT, "read");
  ssize_t allowed = limit(fd, size, from(fd) < 0 ? 0 : lseek(fd, 0, SEEK_CUR));
  return allowed < 0 ? -1 : next(fd, to, allowed);
}
"""
PROBE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from test_content import Machine
from provision.node import filesystem
trouble = []
found = filesystem.observe(Machine(sys.argv[2]), ["pmem0"], trouble)[0]
print(json.dumps([found.type, found.uuid, found.sample, found.error, trouble]))
"""


class Machine(System):
    """Below a root: /dev/pmem0 is a file, and the tools are this machine's."""

    def which(self, name: str) -> str:
        return super().which(name) if name in TOOLS else ""

    def run(self, argv, timeout=60.0, environment=None):  # type: ignore[no-untyped-def]
        real = [self.path(word) if word.startswith("/dev/") else word for word in argv]
        return super().run(real, timeout, environment)._replace(argv=argv)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    for tool in TOOLS:
        if not System().which(tool):
            pytest.skip(f"there is no {tool}")
    (tmp_path / "dev").mkdir()
    with (tmp_path / "dev/pmem0").open("wb") as file:
        file.truncate(SIZE)
    return Machine(str(tmp_path))


def put(machine: Machine, offset: int, data: bytes) -> None:
    with open(machine.path("/dev/pmem0"), "r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("size", [0, 1, 4096, 6 * MIB, 6 * MIB + 1, SIZE, 1 << 40])
def test_samples_of_a_device_are_within_it_spread_out_and_small(size: int) -> None:
    spans = content.spans(size)
    assert all(offset >= 0 and offset + length <= size for offset, length in spans)
    assert sum(length for _, length in spans) <= min(size, 7 * MIB)
    if size:
        assert spans[0][0] == 0
        assert sum(spans[-1]) == size
    gaps = [after - before for (before, _), (after, _) in itertools.pairwise(spans)]
    assert max(gaps, default=0) <= max(MIB, size / 60), "spread over all of it"
    assert spans == sorted(set(spans))


def test_zeros_are_empty_and_nothing_else_is(machine: Machine) -> None:
    assert content.sample(machine, "/dev/pmem0") == content.ZERO
    seen = set()
    for offset in (0, MIB - 1, SIZE // 2 // 4096 * 4096, SIZE - 1):
        # In the middle, somewhere in a piece that is read.
        near = min((start for start, _ in content.spans(SIZE)), key=lambda start: abs(start - offset))
        at = offset if offset in (0, MIB - 1, SIZE - 1) else near
        put(machine, at, b"x")
        seen.add(content.sample(machine, "/dev/pmem0"))
        put(machine, at, b"\0")
    assert len(seen) == 4
    assert content.ZERO not in seen
    assert content.sample(machine, "/dev/pmem0") == content.ZERO


def test_data_without_a_signature_is_seen_and_named_the_same_way_twice(machine: Machine) -> None:
    put(machine, 4096, os.urandom(4096))
    found = filesystem.probe(machine, "pmem0")
    assert (found.type, len(found.sample)) == ("", 16)
    assert filesystem.probe(machine, "pmem0") == found
    assert filesystem.consent_name(found) == f"pmem0/data/{found.sample}"


def test_a_device_that_is_not_there_is_not_empty(machine: Machine) -> None:
    trouble: list[str] = []
    found = filesystem.observe(machine, ["pmem7"], trouble)[0]
    assert found.type == "unreadable"
    assert "/dev/pmem7 cannot be read: No such file or directory" in found.error
    assert trouble == [found.error]
    state = State(namespaces=[Namespace("namespace7.0", blockdev="pmem7")], filesystems=[found])
    step = Step("id", "what", "why", action="make_filesystem", args={"device": "pmem7"})
    said = filesystem.problems(state, [step])
    assert len(said) == 1
    assert "clear-errors" not in said[0], "no media error, no loss of data"


def test_a_device_without_a_size_is_not_empty(machine: Machine) -> None:
    Path(machine.path("/dev/pmem1")).touch()
    with pytest.raises(CommandError, match="/dev/pmem1 has no bytes to read"):
        content.sample(machine, "/dev/pmem1")


def preload(tmp_path: Path) -> Path:
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    source, library = tmp_path / "eio.c", tmp_path / "eio.so"
    source.write_text(PRELOAD)
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.mark.parametrize(
    ("start", "where"), [(0, 0), (4096, 4096), (SIZE - 4096, SIZE - 4096)], ids=["all", "head", "tail"]
)
def test_a_media_error_is_not_an_empty_device(
    machine: Machine, tmp_path: Path, start: int, where: int
) -> None:
    """blkid says what it says of an empty device, with exit status 2 and no word."""
    environment = {
        **os.environ,
        "LD_PRELOAD": str(preload(tmp_path)),
        "EIO_FILE": "dev/pmem0",
        "EIO_FROM": str(start),
        "PYTHONPATH": str(share.root()),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(Path(__file__).parent), machine.root],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    kind, _, sample, error, trouble = json.loads(done.stdout)
    assert (kind, sample) == ("unreadable", "")
    assert error == f"/dev/pmem0 cannot be read at byte {where} of {SIZE}: Input/output error"
    assert trouble == [error]


@pytest.fixture
def loop(machine: Machine) -> Iterator[Machine]:
    """/dev/pmem0 is a block device, whose reads fail where the file behind it is cut."""
    backing = Path(machine.path("/dev/pmem0")).rename(machine.path("/backing"))
    done = subprocess.run(["losetup", "-f", "--show", backing], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("loop devices cannot be made here")
    device = Path(done.stdout.strip())
    Path(machine.path("/dev/pmem0")).symlink_to(device)
    yield machine
    subprocess.run(["losetup", "-d", device], check=True)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("losetup"), reason="needs root and losetup")
def test_errors_of_the_kernel_itself(loop: Machine) -> None:
    loop.check(["mkfs.ext4", "-q", "/dev/pmem0"])
    assert filesystem.probe(loop, "pmem0").type == "ext4"
    os.truncate(loop.path("/backing"), SIZE // 2)
    subprocess.run(["blockdev", "--flushbufs", loop.path("/dev/pmem0")], check=True)
    # Of this, blkid of util-linux 2.38 says nothing and ends with 2.
    with pytest.raises(CommandError, match="/pmem0"):
        filesystem.probe(loop, "pmem0")


def make(machine: Machine, *lose: str) -> Applied:
    args = {"device": "pmem0", "type": "ext4", "block_size": 4096, "reflink": True, "lose": list(lose)}
    return apply(Step("id", "what", "why", action="make_filesystem", args=args), machine)


def test_a_file_system_is_made_over_zeros_and_over_data_that_was_named(machine: Machine) -> None:
    assert make(machine).changed
    made = filesystem.probe(machine, "pmem0")
    assert made.type == "ext4"
    assert make(machine).changed is False
    # Its entry in fstab ends what is said of a device that is being made.
    assert owned.observe(machine) == [made.uuid, "vacant:pmem0:"]
    owned.change(machine, [], ["vacant:pmem0:"])
    # Its signature goes, and what it held stays.
    machine.check(["wipefs", "-q", "-a", "/dev/pmem0"])
    name = filesystem.consent_name(filesystem.probe(machine, "pmem0"))
    assert name.startswith("pmem0/data/")
    with pytest.raises(CommandError, match=r"pmem0 holds data [0-9a-f]{16}, which appeared after"):
        make(machine)
    with pytest.raises(CommandError, match="nothing was changed"):
        make(machine, "pmem0/data/0123456789abcdef", f"pmem0/ext4/{made.uuid}")
    assert filesystem.consent_name(filesystem.probe(machine, "pmem0")) == name
    assert make(machine, name).changed


def test_no_file_system_is_made_on_bad_blocks(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "sys/class/block/pmem0").mkdir(parents=True)
    (tmp_path / "sys/class/block/pmem0/badblocks").write_text("2048 8\n4096 1\n")
    with pytest.raises(CommandError, match=r"/dev/pmem0 has 9 blocks of 512 bytes that cannot be read"):
        make(machine)
    assert filesystem.probe(machine, "pmem0").sample == content.ZERO


def test_an_interrupted_mkfs_needs_no_consent_to_repeat(machine: Machine) -> None:
    """mkfs ends in the middle: the next run does not take its half for data, nor for ours."""

    class Broken(Machine):
        def run(self, argv, timeout=60.0, environment=None):  # type: ignore[no-untyped-def]
            if argv[0] != "mkfs.ext4":
                return super().run(argv, timeout, environment)  # type: ignore[no-untyped-call]
            put(self, 8 * 4096, b"a group of blocks")
            return Result(argv, 1, "", "killed")

    with pytest.raises(CommandError, match="killed"):
        make(Broken(machine.root))
    assert "vacant:pmem0:" in owned.observe(machine)
    assert make(machine).changed
