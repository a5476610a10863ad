"""Installing and building flavors of others, with recording stand-ins for the programs that do it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from recorded import Programs

from provision.artifacts import wheel
from provision.node import apply, deeprec, foreign, numa, openembedding
from provision.node.command import CommandError, System
from provision.node.state import NumaNode, OsInfo, State, encode
from provision.node.step import Desired, Step


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    found = Programs(tmp_path / "venv" / "bin")
    monkeypatch.setenv("PATH", f"{found.directory}:{os.environ['PATH']}")
    return found


FAKE_PYTHON = """\
import shutil
if sys.argv[1:3] == ["-m", "venv"]:
    os.makedirs(sys.argv[3] + "/bin", exist_ok=True)
    shutil.copy(sys.argv[0], sys.argv[3] + "/bin/python")
elif sys.argv[1] == "-I":
    print(json.dumps({"python": "3.8.18", "oeprov": "", "distributions": {}, "missing": []}))
elif sys.argv[1] == "-c" and "platform" in sys.argv[2]:
    print("3.8.18")
"""


class TestInstalling:
    def desired(self, tmp_path: Path, **more: Any) -> Desired:
        values: dict[str, Any] = {
            "runtime_flavor": "openembedding",
            "runtime_venv": str(tmp_path / "env"),
            "runtime_python": "python3.8",
            "worker": True,
        }
        return Desired(**{**values, **more})

    def steps(self, desired: Desired) -> list[Step]:
        os_info = OsInfo("debian", "12", "debian", architecture="x86_64", python="3.11.2")
        state = State(os=os_info, runtime=openembedding.observe(System(), os_info, desired))
        assert openembedding.problems(state, desired) == []
        return openembedding.plan(state, desired)

    def test_what_the_plan_shows_is_what_is_run(self, tmp_path: Path, programs: Programs) -> None:
        programs.add("python3.8", FAKE_PYTHON)
        script = "os.makedirs(sys.argv[-1] + '/test/benchmark', exist_ok=True)\n"
        programs.add(
            "git",
            "if sys.argv[1] == 'clone':\n    "
            + script
            + "    open(sys.argv[-1] + '/test/benchmark/server.py', 'w')\n",
        )
        desired = self.desired(tmp_path)
        steps = self.steps(desired)
        assert [step.id for step in steps] == ["runtime", "sources"]
        programs.log.write_text("")
        for step in steps:
            assert apply.apply(step).changed
        pip = [words for words in programs.calls() if "pip" in words]
        shown = [argv for argv in steps[0].commands if "pip" in argv]
        # What is set for a command by `env` is seen by its words only here.
        plain = [
            argv[argv.index(next(word for word in argv if word.endswith("bin/python"))) + 1 :]
            for argv in shown
        ]
        assert [words[1:] for words in pip] == plain
        assert shown[-1][-2:] == ["--no-build-isolation", "horovod==0.28.1"]
        assert "HOROVOD_WITH_GLOO=1" in shown[-1]
        assert (tmp_path / "env-sources/test/benchmark/server.py").exists()
        assert self.steps(desired) == []
        for step in steps:
            assert not apply.apply(step).changed

    @pytest.mark.parametrize("new", [True, False])
    def test_a_build_from_its_sources(self, tmp_path: Path, programs: Programs, new: bool) -> None:
        """As its documents have it, with PMDK where the system's is too old."""
        sources = tmp_path / "sources"
        programs.add("python3.8", FAKE_PYTHON)
        for name in ("git", "make", "cmake"):
            programs.add(name)
        programs.add("pkg-config", "" if new else "sys.exit(1)")
        for path in ("test/benchmark/server.py", "pico-ps/pico-core/third_party/prepare.sh", "build.sh"):
            (sources / path).parent.mkdir(parents=True, exist_ok=True)
            said = "$PWD $0 $* $USE_PMEM $VERSION $THIRD_PARTY"
            (sources / path).write_text(f'#!/bin/sh\necho "{said}" >>{tmp_path}/ran\n')
            (sources / path).chmod(0o755)
        desired = self.desired(tmp_path, runtime_package="source", runtime_sources=str(sources))
        (step,) = self.steps(desired)
        programs.log.write_text("")
        assert apply.apply(step).changed
        parts, clean, build = (tmp_path / "ran").read_text().splitlines()
        assert parts.startswith(f"{sources}/pico-ps/pico-core third_party/prepare.sh build gflags glog")
        assert clean.startswith(f"{sources} ./build.sh clean")
        assert build == f"{sources} ./build.sh build 1 0.1.2 {sources}/tools"
        (made,) = (words for words in programs.calls() if words[-1].endswith(".tar.gz"))
        assert made[-2:] == ["--no-build-isolation", f"{sources}/build/pypi/dist/openembedding-0.1.2.tar.gz"]
        cloned = [words[-1] for words in programs.calls("git") if words[1] == "clone"]
        assert cloned == ([] if new else ["tools/pmdk", "tools/libpmemobj-cpp"])
        assert ["git", "submodule", "update", "--init", "--checkout", "--recursive"] in programs.calls("git")
        wanted = openembedding.wanted(desired, "3.8")
        assert (
            wanted.package != openembedding.wanted(desired._replace(runtime_revision="main"), "3.8").package
        )
        assert not openembedding.has_no_pmem("source")

    def test_an_installation_that_fails_is_made_again(self, tmp_path: Path, programs: Programs) -> None:
        programs.add("python3.8", FAKE_PYTHON + "if 'horovod==0.28.1' in sys.argv: sys.exit('no cmake')\n")
        desired = self.desired(tmp_path, runtime_sources=str(tmp_path))
        (tmp_path / "test/benchmark").mkdir(parents=True)
        (tmp_path / "test/benchmark/server.py").touch()
        (step,) = self.steps(desired)
        with pytest.raises(CommandError, match="no cmake"):
            apply.apply(step)
        (again,) = self.steps(desired)
        assert again == step, "nothing runs from what is not finished"
        assert not Path(desired.runtime_venv).exists()
        assert len(list(Path(desired.runtime_venv + ".d").glob("*/bin"))) == 1

    def test_what_compiles_finds_the_family_s_compilers(self, tmp_path: Path, programs: Programs) -> None:
        programs.add(
            "python3.8",
            FAKE_PYTHON
            + f"if 'pip' in sys.argv: open({str(tmp_path / 'path')!r}, 'w').write(os.environ['PATH'])",
        )
        desired = self.desired(tmp_path, runtime_sources="/", parameter_server=True, worker=False)
        centos = OsInfo("centos", "7", "rhel", architecture="x86_64", python="3.6.8", package_manager="yum")
        state = State(os=centos, runtime=openembedding.observe(System(), centos, desired))
        (step,) = (item for item in openembedding.plan(state, desired) if item.id == "runtime")
        assert apply.apply(step).changed
        first = (tmp_path / "path").read_text().split(":")[:3]
        # gcc 4.8 of CentOS 7 is too old for it, and nothing of SCL's is on the PATH.
        bin_ = f"{tmp_path}/{(tmp_path / 'env').readlink()}/bin"
        assert first == [bin_, "/opt/rh/devtoolset-11/root/usr/bin", "/usr/lib64/mpich/bin"]

    def test_sources_of_somebody_else_are_left_alone(self, tmp_path: Path, programs: Programs) -> None:
        programs.add("git")
        (tmp_path / "mine").mkdir()
        args = {"into": str(tmp_path / "mine"), "repository": "r", "revision": "v1", "folders": []}
        with pytest.raises(CommandError, match="oeprov did not make it; move it away"):
            foreign._get_sources(System(), args)
        assert programs.calls() == []


DOCKER = """\
images = os.environ.get("IMAGES", "")
if sys.argv[1:3] in (["image", "inspect"], ["manifest", "inspect"]) and sys.argv[3] != images:
    sys.exit("manifest unknown")
if sys.argv[1] == "run":
    work = next(word for word in sys.argv if word.endswith(":/work"))[: -len(":/work")]
    os.makedirs(work + "/wheels")
    open(work + "/wheels/tensorflow-1.15.5-cp36-cp36m-linux_x86_64.whl", "w")
"""


class TestDeepRecBuild:
    os_info = OsInfo("rocky", "8.10", "rhel", package_manager="dnf")

    def make(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> str:
        monkeypatch.setattr(deeprec, "install_packages", lambda *_: [])
        nodes = [NumaNode(0, 1, cpus=[0]), NumaNode(4, 1)]
        monkeypatch.setattr(numa, "observe_nodes", lambda _: nodes)
        desired = Desired(runtime_flavor="deeprec", **more)
        args = {"desired": encode(desired), "into": str(tmp_path / "build")}
        return deeprec.make(System(), self.os_info, args)

    def test_commands(self, tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("IMAGES", "site/deeprec:py36")
        programs.add("docker", DOCKER)
        programs.add("git")
        wheel = self.make(tmp_path, monkeypatch, pmem_mode="fsdax", runtime_image="site/deeprec:py36")
        assert wheel.endswith("/build/wheels/tensorflow-1.15.5-cp36-cp36m-linux_x86_64.whl")
        assert ["docker", "pull", "site/deeprec:py36"] in programs.calls("docker")
        run = programs.calls("docker")[-1]
        assert (
            run[:8]
            == f"docker run --rm --privileged -v {tmp_path}/build:/work -v /mnt/pmem0:/mnt/pmem0".split()
        )
        assert run[8:11] == ["site/deeprec:py36", "/bin/bash", "-ec"]
        assert [words[1] for words in programs.calls("git")] == ["clone", "-C", "clone"]

    def test_missing_image(self, tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
        programs.add("docker", DOCKER)
        with pytest.raises(CommandError, match=r"site/none: is not available .*manifest unknown"):
            self.make(tmp_path, monkeypatch, runtime_image="site/none")
        assert not (tmp_path / "build").exists()

    @pytest.mark.parametrize(
        ("mode", "linked", "nodes"),
        [("fsdax", ["--copt=-lpmem", "--copt=-lmemkind"], ""), ("system-ram", ["--copt=-lmemkind"], "4")],
    )
    def test_what_runs_in_the_container(
        self, tmp_path: Path, programs: Programs, mode: str, linked: list[str], nodes: str
    ) -> None:
        for name in ("apt-get", "pip", "make"):
            programs.add(name)
        tool = "bazel-bin/tensorflow/tools/pip_package"
        programs.add(
            "bazel",
            f"os.makedirs({tool!r})\nwith open({tool + '/build_pip_package'!r}, 'w') as file:\n"
            "    file.write('#!/bin/sh\\nmkdir -p $1; touch $1/x.whl\\n')\n"
            f"os.chmod({tool + '/build_pip_package'!r}, 0o755)\n"
            "print(json.dumps([os.environ.get('MEMKIND_DAX_KMEM_NODES', ''), "
            "os.environ['TF_ENABLE_PMEM']]))\n",
        )
        for name in ("memkind/autogen.sh", "memkind/configure", "DeepRec/configure"):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/bin/sh\n[ $# = 0 ] && echo {name} >> {tmp_path}/ran\n")
            path.chmod(0o755)
        text = deeprec.script(Desired(pmem_mode=mode), [4]).replace("/work", str(tmp_path))
        done = subprocess.run(["/bin/bash", "-ec", text], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == [nodes, "1"]
        assert (tmp_path / "ran").read_text().split() == [
            "memkind/autogen.sh",
            "memkind/configure",
            "DeepRec/configure",
        ]
        (bazel,) = programs.calls("bazel")
        assert [word for word in bazel if word.startswith("--copt=-l")] == linked
        assert "--cxxopt=-D_GLIBCXX_USE_CXX11_ABI=0" in bazel
        assert bazel[-1] == "//tensorflow/tools/pip_package:build_pip_package"
        assert (tmp_path / "wheels/x.whl").exists()

    def test_one_build_for_all_hosts(self, tmp_path: Path) -> None:
        asked = []

        def build(_packed: Path, _log: Path) -> Path:
            asked.append(1)
            wheel = tmp_path / "x.whl"
            wheel.touch()
            return wheel

        name = deeprec.build_name(Desired())
        provide = wheel.provide_theirs
        first = provide(name, tmp_path / "state", build)
        assert first == provide(name, tmp_path / "state", build)
        assert asked == [1]
        assert name != deeprec.build_name(Desired(pmem_mode="system-ram"))
