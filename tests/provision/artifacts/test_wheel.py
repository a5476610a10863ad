"""The wheel that hosts get: its name, that it is made once, and that a failure leaves nothing."""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import pytest

from provision.artifacts import wheel
from provision.cluster import own_sources
from provision.cluster.errors import WheelError
from provision.node import build
from provision.node.command import CommandError, System
from provision.node.state import OsInfo, Runtime, State
from provision.node.step import Desired

REPOSITORY = Path(__file__).parents[3]
NEVER = "no host may be asked"


@pytest.fixture(autouse=True)
def fresh_digest() -> None:
    own_sources.digest.cache_clear()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose build takes no compiler: pip is replaced by a copy of a file."""
    root = tmp_path / "checkout"
    for name in ("oe_runtime", "provision", "roles", "playbooks"):
        (root / name).mkdir(parents=True)
        (root / name / "a.py").write_text("1\n")
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        (root / name).write_text(name)
    monkeypatch.setattr(own_sources.share, "root", lambda: root)
    return root


def here(root: Path) -> str:
    return f"{own_sources.own_key()}-{own_sources.digest_of(root)[:16]}"


def elsewhere(root: Path) -> str:
    return f"debian-11-x86_64-py3.9-{own_sources.digest_of(root)[:16]}"


def never(packed: Path, log: Path) -> Path:
    raise AssertionError(NEVER)


def put_wheel(into: Path) -> Path:
    with zipfile.ZipFile(into / "oeprov-0.1.0-py3-none-any.whl", "w") as file:
        file.writestr("oe_runtime/__init__.py", "")
    return into / "oeprov-0.1.0-py3-none-any.whl"


def test_keys_say_what_a_compiled_wheel_is_bound_to() -> None:
    debian = OsInfo("debian", "12", "debian", architecture="x86_64")
    rocky = OsInfo("rocky", "9.4", "rhel", architecture="aarch64")
    assert build.wheel_key(debian, "3.11.2") == "debian-12-x86_64-py3.11"
    assert build.wheel_key(rocky, "3.11.9") == "rocky-9-aarch64-py3.11"  # 9.5 runs what 9.4 does
    assert build.wheel_key(OsInfo("debian", "", "debian", architecture="x86_64"), "3.13.1") == (
        "debian-rolling-x86_64-py3.13"
    )
    desired = Desired(kind="cpu", runtime_wheel_digest="f" * 64)
    state = State(os=rocky._replace(python="3.9.18"))
    # EL: python3.11 is not installed yet when the plan is made, and its name says what it will be.
    assert build.build_of(state, desired) == "rocky-9-aarch64-py3.11-ffffffffffffffff"
    state = State(os=debian._replace(python="3.9.18"), runtime=Runtime(base="3.12.1"))
    assert build.key_of(build.build_of(state, desired)) == "debian-12-x86_64-py3.12"
    assert build.build_of(state, desired._replace(kind="local")) == ""
    assert own_sources.own_key().endswith("-py{}.{}".format(*sys.version_info[:2]))


def test_the_processor_that_is_checked_is_the_one_that_is_compiled_for() -> None:
    text = (REPOSITORY / "CMakeLists.txt").read_text()
    assert f'set(OE_MARCH "x86-64-v{build.CPU_LEVEL}"' in text


def test_processor_levels() -> None:
    two = "fpu lm cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"
    three = two + " avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
    four = three + " avx512f avx512bw avx512cd avx512dq avx512vl"
    levels = {"": 0, "fpu": 0, "fpu lm": 1, two: 2, three: 3, three.replace(" fma", ""): 2, four: 4}
    for flags, level in levels.items():
        assert build.cpu_level(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: x\n") == level
    assert build.cpu_level("processor\t: 0\nFeatures\t: fp asimd\n") == 0  # ARM
    assert build.cpu_level(Path("/proc/cpuinfo").read_text()) in (0, 1, 2, 3, 4)


def test_the_digest_is_of_the_runtime_alone(checkout: Path) -> None:
    first = own_sources.digest_of(checkout)
    for path in ("playbooks/a.py", "provision/a.py", "oe_runtime/__pycache__/x.pyc", "oe_runtime/_core.so"):
        (checkout / path).parent.mkdir(exist_ok=True)
        (checkout / path).write_text("changed")
    assert own_sources.digest_of(checkout) == first
    (checkout / "oe_runtime" / "a.py").write_text("2\n")
    second = own_sources.digest_of(checkout)
    (checkout / "oe_runtime" / "a.py").rename(checkout / "oe_runtime" / "b.py")
    assert len({first, second, own_sources.digest_of(checkout)}) == 3


def test_of_pyproject_only_what_decides_the_build_counts(checkout: Path) -> None:
    path = checkout / "pyproject.toml"
    path.write_text(
        '[build-system]\nrequires = [\n  "a",\n]\n\n[project]\nversion = "1"\n\n[tool.ruff]\nx = 1\n'
    )
    first = own_sources.digest_of(checkout)
    path.write_text(path.read_text().replace("x = 1", "x = 2"))
    assert own_sources.digest_of(checkout) == first
    for old, new in (('"a"', '"b"'), ('version = "1"', 'version = "2"')):
        path.write_text(path.read_text().replace(old, new))
        assert own_sources.digest_of(checkout) != first
        path.write_text(path.read_text().replace(new, old))
    assert own_sources.digest_of(checkout) == first


def test_sources_that_travel_are_all_that_the_build_takes(tmp_path: Path) -> None:
    tools = tmp_path / "wheels"
    tools.mkdir()
    (tools / "tool.whl").write_text("")
    wheel.archive(REPOSITORY, tools, tmp_path / "build.tar.gz")
    with tarfile.open(tmp_path / "build.tar.gz") as file:
        names = set(file.getnames())
    wanted = (
        "pyproject.toml",
        "oe_runtime/core/CMakeLists.txt",
        "provision/cli/main.py",
        "roles/runtime/tasks/main.yml",
    )
    assert {"tools/tool.whl", *(f"source/{name}" for name in wanted)} <= names
    assert not [name for name in names if re.search(r"(^|/)(\.|__pycache__|tests/|build/)|\.so$", name)]


def test_a_wheel_is_made_once_however_many_ask(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def slowly(root: Path, into: Path, log: Path) -> None:
        made.append(root)
        time.sleep(0.3)
        put_wheel(into)

    monkeypatch.setattr(wheel, "_build_here", slowly)
    found: list[Path] = []
    name, state_dir = here(checkout), tmp_path / "state"
    threads = [
        threading.Thread(target=lambda: found.append(wheel.provide(name, state_dir, never))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [checkout]
    assert len(found) == 4
    assert len(set(found)) == 1
    assert (
        found[0].parent == state_dir / "wheels" / own_sources.own_key() / own_sources.digest_of(checkout)[:16]
    )
    assert wheel.provide(name, state_dir, never) == found[0]


def test_a_failed_build_leaves_its_log_and_nothing_else(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real pip; setuptools, its fallback, takes this checkout for a project and does not know its files.
    (checkout / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "no_such"\n')
    state_dir = tmp_path / "state"
    with pytest.raises(WheelError, match=r"could not be built here: .*no_such.* \(log: (.*)\)") as caught:
        wheel.provide(here(checkout), state_dir, never)
    log = Path(str(caught.value).rpartition("log: ")[2].rstrip(")"))
    assert "pip wheel" in log.read_text()
    left = [path for path in (state_dir / "wheels").rglob("*") if path.suffix != ".lock"]
    assert left == [state_dir / "wheels" / own_sources.own_key()]


def test_who_waited_for_a_build_that_failed_does_not_try_again(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Path] = []
    begun: set[int] = set()
    find = wheel._only_wheel

    def finds(directory: Path) -> Path | None:
        begun.add(threading.get_ident())
        return find(directory)

    def fails(root: Path, into: Path, log: Path) -> None:
        tried.append(root)
        while len(begun) < 3:
            time.sleep(0.01)
        time.sleep(0.05)  # a file's time may be some milliseconds behind
        log.write_text("x.cc:1:2: error: expected ';'\nninja: build stopped\n")
        raise WheelError("first")

    monkeypatch.setattr(wheel, "_only_wheel", finds)
    monkeypatch.setattr(wheel, "_build_here", fails)
    said: list[str] = []

    def ask() -> None:
        try:
            wheel.provide(here(checkout), tmp_path / "state", never)
        except WheelError as error:
            said.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tried) == 1
    assert len([text for text in said if "built here: x.cc:1:2: error: expected ';' (log" in text]) == 2
    ask()  # a later run does
    assert len(tried) == 2


def test_what_a_killed_build_left_is_cleared_away(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = (
        tmp_path
        / "state"
        / "wheels"
        / own_sources.own_key()
        / f".making-{own_sources.digest_of(checkout)[:16]}"
        / "wheel"
    )
    left.mkdir(parents=True)
    (left / "oeprov-half.whl").write_text("half")
    monkeypatch.setattr(wheel, "_build_here", lambda root, into, log: put_wheel(into))
    found = wheel.provide(here(checkout), tmp_path / "state", never)
    assert [path.name for path in found.parent.iterdir()] == [found.name]
    assert not left.parent.exists()


def test_sources_that_changed_since_the_plan_are_not_built(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = here(checkout)
    monkeypatch.setattr(
        wheel, "_build_here", lambda root, into, log: (root / "oe_runtime/a.py").write_text("3")
    )
    for _ in range(2):  # the first time they change while they are built
        with pytest.raises(WheelError, match="have changed since the plan was made; plan again"):
            wheel.provide(name, tmp_path / "state", never)
    assert not list((tmp_path / "state").rglob("*.whl"))


def test_another_kind_of_host_builds_its_own(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[list[str]] = []
    monkeypatch.setattr(wheel, "_logged", lambda argv, log, what: fetched.append(argv))

    def there(packed: Path, log: Path) -> Path:
        assert tarfile.is_tarfile(packed)
        return put_wheel(packed.parent)

    found = wheel.provide(elsewhere(checkout), tmp_path / "state", there)
    assert found.parent.parent.name == "debian-11-x86_64-py3.9"
    assert "--python-version=3.9" in fetched[0]
    assert "tomli" in fetched[0]
    assert wheel.provide(elsewhere(checkout), tmp_path / "state", never) == found


def installed_from_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A controller without sources: site-packages as pip leaves them, and the path of what was installed."""
    original = tmp_path / "oeprov-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(original, "w") as file:
        info = "oeprov-0.1.0.dist-info"
        content = {
            "oe_runtime/__init__.py": "",
            "oe_runtime/server.py": "print('served')\n",
            f"{info}/METADATA": "Metadata-Version: 2.1\nName: oeprov\nVersion: 0.1.0\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/entry_points.txt": "[console_scripts]\noeprov = oe_runtime.server:main\n",
        }
        for name, text in content.items():
            file.writestr(name, text)
        sums = {name: hashlib.sha256(text.encode()).digest() for name, text in content.items()}
        rows = [
            f"{name},sha256={base64.urlsafe_b64encode(sums[name]).rstrip(b'=').decode()},{len(content[name])}\n"
            for name in content
        ]
        file.writestr(f"{info}/RECORD", "".join(rows) + f"{info}/RECORD,,\n")
    site = tmp_path / "prefix"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--ignore-installed",
        "--prefix",
        str(site),
    ]
    subprocess.run([*pip, str(original)], check=True)
    packages = next(site.glob("lib/python*/site-packages"))
    monkeypatch.setattr(own_sources.share, "root", lambda: packages / "provision" / "share")
    monkeypatch.setattr(
        wheel.Distribution,
        "from_name",
        lambda name: next(iter(wheel.Distribution.discover(path=[str(packages)]))),
    )
    return packages


def test_an_installed_wheel_is_put_together_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = installed_from_a_wheel(tmp_path, monkeypatch)
    assert (packages / "oe_runtime" / "__pycache__").exists()
    found = wheel.provide(f"{own_sources.own_key()}-{own_sources.digest()[:16]}", tmp_path / "state", never)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target"]
    subprocess.run([*pip, str(tmp_path / "again"), str(found)], check=True)
    assert (tmp_path / "again" / "oe_runtime" / "server.py").read_text() == "print('served')\n"
    assert (tmp_path / "again" / "bin" / "oeprov").exists()
    with zipfile.ZipFile(found) as file:
        assert sorted(file.namelist()) == sorted(
            zipfile.ZipFile(tmp_path / "oeprov-0.1.0-py3-none-any.whl").namelist()
        )


def test_an_installed_wheel_that_was_tampered_with_is_not_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = installed_from_a_wheel(tmp_path, monkeypatch)
    name = f"{own_sources.own_key()}-{own_sources.digest()[:16]}"
    (packages / "oe_runtime" / "server.py").write_text("changed\n")
    with pytest.raises(WheelError, match=r"oe_runtime/server.py was changed since oeprov was installed"):
        wheel.provide(name, tmp_path / "state", never)


def test_without_sources_no_other_kind_of_host_can_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_from_a_wheel(tmp_path, monkeypatch)
    name = f"debian-11-x86_64-py3.9-{own_sources.digest()[:16]}"
    with pytest.raises(
        WheelError, match=r"no wheel for debian-11.*run oeprov from a checkout, or put"
    ) as caught:
        wheel.provide(name, tmp_path / "state", never)
    directory = Path(str(caught.value).rpartition(" into ")[2])
    directory.mkdir()
    given = put_wheel(directory)
    assert wheel.provide(name, tmp_path / "state", never) == given


def test_a_wheel_that_did_not_arrive_whole_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "WHEELS", str(tmp_path / "wheels"))
    name = "debian-12-x86_64-py3.11-0123456789abcdef"
    with pytest.raises(CommandError, match=build.WHEEL_WANTED + name):
        build.wheel_file(System(), name)
    directory = tmp_path / "wheels" / name
    directory.mkdir(parents=True)
    path = put_wheel(directory)
    assert build.wheel_file(System(), name) == str(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CommandError, match=build.WHEEL_WANTED + name):
        build.wheel_file(System(), name)
    shutil.rmtree(directory)
