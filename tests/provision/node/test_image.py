"""Image mode: what a system that is not booted shows, gets and refuses."""

from pathlib import Path

import pytest
import tomllib

from provision.node import image, job
from provision.node.apply import apply
from provision.node.command import NOT_FOUND, CommandError, Result, System
from provision.node.observe import observe
from provision.node.plan import make_plan
from provision.node.state import Image, State
from provision.node.step import Desired


class Build(System):
    """A root directory in which nothing is booted; ``says``: systemd's word, empty: there is no systemd."""

    says = "offline"

    def which(self, name: str) -> str:
        return "/usr/bin/" + name if name == "systemctl" and self.says else ""

    def run(self, argv: list[str], timeout: float = 60, environment: dict[str, str] | None = None) -> Result:
        if argv == ["systemctl", "is-system-running"] and self.says:
            return Result(argv, 1, self.says + "\n", "")
        return Result(argv, NOT_FOUND, "", "")


@pytest.fixture
def build(tmp_path: Path) -> Build:
    made = Build(str(tmp_path))
    made.write("/etc/os-release", "ID=rhel\nVERSION_ID=9.6\nPRETTY_NAME=RHEL\n")
    # The hardware of the machine where the image is built: nothing of it is the image's.
    region = tmp_path / "sys/bus/nd/devices/region0"
    region.mkdir(parents=True)
    for name, text in (("size", 1 << 34), ("available_size", 1 << 34), ("devtype", "nd_pmem")):
        (region / name).write_text(f"{text}\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text("ro quiet\n")
    return made


@pytest.mark.parametrize(
    ("says", "files", "found"),
    [
        ("offline", (), Image(booted=False)),
        ("offline", ("/usr/lib/bootc/install/00.toml",), Image(booted=False, bootc=True)),
        ("running", (), Image()),
        ("degraded", ("/run/ostree-booted",), Image(bootc=True)),
        ("", (), Image()),  # no systemd: an ordinary system of another kind
        ("offline", ("/run/systemd/system/x",), Image()),
    ],
)
def test_a_build_is_told_from_a_booted_system(
    build: Build, says: str, files: tuple[str, ...], found: Image
) -> None:
    build.says = says
    for path in files:
        build.write(path, "")
    assert image.observe(build) == found


def test_the_hardware_of_the_build_machine_is_not_looked_at(build: Build) -> None:
    build.write("/usr/lib/bootc/install/00.toml", "")
    wanted = Desired(kind="bare_metal_pmem", pmem_mode="fsdax", kernel_arguments=["quiet"])
    state = observe(build, wanted)
    assert (state.regions, state.kernel.cmdline, state.image.booted) == ([], [], False)
    plan = make_plan(state, wanted)
    assert {step.role for step in plan.steps} <= {"runtime", "kernel"}
    assert not any(step.reboots or step.destroys or step.disturbs for step in plan.steps)
    assert plan.notes[0].endswith("left for the booted host: persistent memory (pmem_mode fsdax)")


def test_the_arguments_of_an_image_are_what_bootc_reads(build: Build) -> None:
    build.write("/usr/lib/bootc/install/00.toml", "")
    arguments = ["transparent_hugepage=never", 'dyndbg="file é.c +p"', "memmap=1G!4G"]
    for wanted in (arguments, arguments[:1], []):
        desired = Desired(kind="cpu", kernel_arguments=wanted)
        (step,) = image.plan(State(image=image.observe(build)), desired).before
        assert apply(step, build).changed
        assert apply(step, build).changed is False
        text = build.read(image.KARGS)
        assert (tomllib.loads(text)["kargs"] if text else []) == wanted
        assert image.plan(State(image=image.observe(build)), desired).before == []
    build.says = "running"
    with pytest.raises(CommandError, match="this host is booted"):
        apply(step, build)


def test_a_job_s_units_and_token_do_not_come_into_an_image(build: Build, tmp_path: Path) -> None:
    args = {"directory": "/var/lib/oeprov/jobs/j", "user": "", "token": "secret", "seconds": 1}
    unit = {"name": "server-0", "role": "parameter_server", "unit": "oeprov-j-server-0.service", "text": ""}
    item = {**unit, "directories": [], "mount": "", "needs": [], "address": "", "port": 0}
    with pytest.raises(CommandError, match="is not booted, as in the build of an image"):
        job.start(build, {**args, "units": [item]})
    assert not (tmp_path / "var/lib/oeprov").exists()
    assert not (tmp_path / "etc/systemd").exists()


def test_nothing_is_removed_in_a_build(build: Build) -> None:
    wanted = Desired(kind="cpu", remove=True)
    plan = make_plan(observe(build, wanted), wanted)
    assert plan.steps == []
    assert "nothing is removed here" in plan.problems[0]
