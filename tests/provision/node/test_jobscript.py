"""Training scripts on a host: their archives, a job's copy, and the environment of their packages."""

import base64
import fcntl
import os
import socket
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sample_wheel import wheel

from provision.jobs import script_files, script_packages
from provision.jobs.script_files import ScriptFiles
from provision.node import jobfiles, jobscript
from provision.node.command import CommandError, Result, System

DIRECTORY = jobfiles.HOME + "/jobs/mine"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    monkeypatch.setattr(jobfiles, "ensure_user", lambda system, user: (os.getuid(), os.getgid()))
    monkeypatch.setattr(os, "umask", lambda mask: mask)  # of an errand's own process
    system = System(str(tmp_path / "host"))
    os.makedirs(system.path(DIRECTORY))
    return system


def files_of(directory: Path, text: str) -> ScriptFiles:
    directory.mkdir(exist_ok=True)
    (directory / "train.py").write_text(text)
    return script_files.collect(directory / "train.py")


def deliver(host: System, files: ScriptFiles, *, ask: bool = False) -> dict[str, Any]:
    archive = "" if ask else base64.b64encode(zlib.compress(files.archive)).decode()
    args = {"digest": files.digest, "archive": archive, "environment": {}, "user": "oeprov"}
    return jobscript.deliver(host, args)


class TestArchive:
    def test_is_sent_once(self, host: System, tmp_path: Path) -> None:
        files = files_of(tmp_path / "mine", "print(1)\n")
        assert deliver(host, files, ask=True) == {"missing": True, "made": False}
        assert deliver(host, files) == {"missing": False, "made": False}
        assert deliver(host, files, ask=True) == {"missing": False, "made": False}

    def test_only_root_reads_it(self, host: System, tmp_path: Path) -> None:
        files = files_of(tmp_path / "mine", "PASSWORD = 'secret'\n")
        deliver(host, files)
        assert os.stat(host.path(jobscript.archive_path(files.digest))).st_mode & 0o077 == 0

    def test_that_did_not_come_whole_is_not_kept(self, host: System, tmp_path: Path) -> None:
        files, other = files_of(tmp_path / "mine", "print(1)\n"), files_of(tmp_path / "other", "print(2)\n")
        args = {"digest": other.digest, "archive": base64.b64encode(zlib.compress(files.archive)).decode()}
        with pytest.raises(CommandError, match="did not come whole"):
            jobscript.deliver(host, {**args, "environment": {}, "user": ""})
        assert not host.exists(jobscript.archive_path(other.digest))

    def test_old_ones_go(self, host: System, tmp_path: Path) -> None:
        digests = []
        for number in range(jobscript.KEPT + 2):
            files = files_of(tmp_path / "mine", f"print({number})\n")
            deliver(host, files)
            os.utime(host.path(jobscript.archive_path(files.digest)), (number, number))
            digests.append(files.digest)
        files = files_of(tmp_path / "mine", "print(0)\n")
        deliver(host, files)
        left = [digest for digest in digests if host.exists(jobscript.archive_path(digest))]
        assert left == [files.digest, *digests[-jobscript.KEPT + 1 :]]


class TestCopy:
    def test_of_the_job_is_its_own(self, host: System, tmp_path: Path) -> None:
        files = files_of(tmp_path / "mine", "print(1)\n")
        deliver(host, files)
        jobscript.unpack(host, DIRECTORY, "oeprov", files.digest)
        copy = Path(host.path(DIRECTORY)) / "script"
        assert (copy / "train.py").read_text() == "print(1)\n"
        (copy / "written.txt").touch()
        jobscript.unpack(host, DIRECTORY, "oeprov", files.digest)
        assert (copy / "written.txt").exists(), "a worker that starts again finds what the script wrote"
        changed = files_of(tmp_path / "mine", "print(2)\n")
        deliver(host, changed)
        jobscript.unpack(host, DIRECTORY, "oeprov", changed.digest)
        assert sorted(os.listdir(copy)) == ["train.py"]
        assert (copy / "train.py").read_text() == "print(2)\n"

    def test_without_an_archive(self, host: System) -> None:
        with pytest.raises(CommandError, match=r"00\.tar is missing"):
            jobscript.unpack(host, DIRECTORY, "oeprov", "00")


class TestEnvironment:
    @pytest.fixture
    def wanted(self, tmp_path: Path) -> dict[str, Any]:
        wheel(tmp_path / "wheels", "oeprov_sample", "1.0", 7)
        packages = script_packages.Packages("requirements.txt", {"requirements.txt": "oeprov-sample\n"})
        path = str(tmp_path / "environments" / "key")
        return packages.environment(path, sys.executable, str(tmp_path / "wheels"))

    def test_has_the_runtime_s_packages_and_its_own(self, wanted: dict[str, Any]) -> None:
        assert jobscript.make_environment(System(), wanted)
        program = (
            "import oeprov_sample, numpy, provision; print(oeprov_sample.VALUE, numpy.__file__, sep='\\n')"
        )
        python = f"{wanted['path']}/bin/python"
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True, cwd="/")
        value, numpy = done.stdout.splitlines()
        assert value == "7"
        assert not numpy.startswith(wanted["path"])
        assert not jobscript.make_environment(System(), wanted), "it is there already"

    def test_is_made_again_when_the_runtime_s_has_changed(
        self, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert jobscript.make_environment(System(), wanted)
        monkeypatch.setattr(jobscript, "_installed", lambda system, sites: "other")
        assert jobscript.make_environment(System(), wanted)

    def test_that_cannot_be_made_leaves_nothing(self, wanted: dict[str, Any]) -> None:
        wanted["files"] = {"requirements.txt": "oeprov-sample==2.0\n"}
        with pytest.raises(CommandError) as caught:
            jobscript.make_environment(System(), wanted)
        assert "the packages of requirements.txt cannot be installed: " in str(caught.value)
        assert "oeprov-sample==2.0" in str(caught.value)
        assert not os.path.exists(wanted["path"])

    def test_a_stop_request_ends_pip_and_leaves_nothing(self, wanted: dict[str, Any], tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            wanted["index"] = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
            with pytest.raises(CommandError, match=r"stopped while the packages of requirements\.txt were"):
                jobscript.make_environment(System(), wanted, is_wanted=lambda: False)
        assert os.listdir(Path(wanted["path"]).parent) == [".lock"]

    def test_a_stop_request_ends_the_wait_for_another_launch(self, wanted: dict[str, Any]) -> None:
        parent = Path(wanted["path"]).parent
        parent.mkdir()
        with (parent / ".lock").open("w") as lock, ThreadPoolExecutor(1) as pool:
            fcntl.flock(lock, fcntl.LOCK_EX)
            made = pool.submit(jobscript.make_environment, System(), wanted, is_wanted=lambda: False)
            try:
                with pytest.raises(CommandError, match="stopped while the packages of"):
                    made.result(timeout=30)
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)

    def test_nobody_reads_an_errand_whose_connection_is_gone(self) -> None:
        program = (
            "import os, sys, provision.node.jobscript as s; h = s._is_heard(); print(h, flush=True); "
            "sys.stdin.read(); print(s._is_heard(), file=sys.stderr)"
        )
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "True\n"
            process.stdout.close()
            process.stdin.close()
            assert process.stderr.readline() == "False\n"

    def test_that_must_be_built_and_cannot_be(self, wanted: dict[str, Any]) -> None:
        said = """\
  error: subprocess-exited-with-error
  × python setup.py bdist_wheel did not run successfully.
      gcc -fPIC -c cext.c -o build/temp.linux-x86_64-cpython-311/cext.o
      cext.c:1:10: fatal error: Python.h: No such file or directory
      error: command '/usr/bin/gcc' failed with exit code 1
  ERROR: Failed building wheel for cext
ERROR: Could not build wheels for cext, which is required to install pyproject.toml-based projects"""
        why = jobscript._why(Result(["pip"], 1, "", said), wanted)
        assert "cext has no wheel for this Python, and it cannot be built here (command '/usr/bin/gcc'" in why

    def test_without_a_network(self, wanted: dict[str, Any]) -> None:
        wanted["index"] = "http://127.0.0.1:9/simple"
        with pytest.raises(CommandError, match="pip reaches no index from here; set runtime_index"):
            jobscript.make_environment(System(), wanted)
