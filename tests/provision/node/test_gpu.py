"""GPUs: what is seen of them without NVIDIA's tools, which versions go together, and trying them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from provision.converge import assumed_state
from provision.node import cuda, gpu, gpucheck, gpufabric, packages, secureboot
from provision.node.command import NOT_FOUND, CommandError, Result, System
from provision.node.plan import Desired, make_plan
from provision.node.state import Gpu, OsInfo

SAMPLES = json.loads(Path(__file__).parent.joinpath("gpu_samples.json").read_text())
T4 = SAMPLES["T4"]
DEVICE = "0000:00:07.0"


class Machine(System):
    """A tree of files, and answers to commands by their first words; what was run is in ``ran``."""

    def __init__(self, root: Path, files: dict[str, str], answers: dict[str, Any] | None = None) -> None:
        super().__init__(str(root))
        self.answers = answers or {}
        self.ran: list[list[str]] = []
        for path, text in files.items():
            real = Path(self.path(path))
            real.parent.mkdir(parents=True, exist_ok=True)
            real.write_bytes(text.encode("latin-1"))

    def run(
        self, argv: list[str], timeout: float = 60.0, environment: dict[str, str] | None = None
    ) -> Result:
        self.ran.append(argv)
        line = " ".join(argv)
        found = [value for words, value in self.answers.items() if line.startswith(words)]
        answer = found[-1] if found else (NOT_FOUND, "", "")
        if callable(answer):
            answer = answer()
        return Result(argv, *answer)


def ok(text: str = "") -> tuple[int, str, str]:
    return 0, text, ""


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_seen_of_a_host_with(name: str, tmp_path: Path) -> None:
    sample = SAMPLES[name]
    modinfo = sample["modinfo"]
    machine = Machine(
        tmp_path, sample["files"], {"modinfo -F version nvidia": ok(modinfo)} if modinfo else {}
    )
    found = gpu.observe(machine)
    for field, value in sample["seen"].items():
        assert getattr(found, field) == value, field
    assert [item.name for item in cuda.architectures(found.ids)] == [sample["architecture"]]
    if sample["smi"]:
        rows = gpucheck.parse_smi(sample["smi"])
        assert [row.bus for row in rows] == found.devices
        assert {row.driver for row in rows} == {found.driver}
        assert {row.name for row in rows} == set(found.names)
        assert all(row.memory > 10_000 for row in rows)


def test_other_functions_and_other_vendors_are_no_gpus(tmp_path: Path) -> None:
    pci = "/sys/bus/pci/devices/"
    kinds = {"0000:00:07.0": ("0x10de", "0x030200"), "0000:00:07.1": ("0x10de", "0x040300")}
    kinds.update({"0000:00:08.0": ("0x1af4", "0x030000"), "0000:00:09.0": ("0x10de", "0x068000")})
    files = {pci + name + "/vendor": vendor + "\n" for name, (vendor, _) in kinds.items()}
    files.update({pci + name + "/class": group + "\n" for name, (_, group) in kinds.items()})
    machine = Machine(tmp_path, files)
    found = gpu.observe(machine, whole=False)
    assert (found.devices, found.switches) == (["0000:00:07.0"], 1)
    assert not machine.ran


def test_secure_boot_and_the_key_that_modules_are_signed_with(tmp_path: Path) -> None:
    efi = "/sys/firmware/efi/efivars/"
    secure = efi + "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    keys = efi + "MokListRT-605dab50-e046-4300-abb6-3dd810dd8b23"
    key = "0\x82\x03\xd5\xffcertificate"
    files = {**T4["files"], secure: "\x06\0\0\0\x01", "/var/lib/dkms/mok.pub": key, keys: "\x07\0\0\0another"}
    found = gpu.observe(Machine(tmp_path / "a", files))
    assert not found.key_enrolled
    assert secureboot.is_on(Machine(tmp_path / "a", files))
    files.update({secure: "\x06\0\0\0\0", keys: "\x07\0\0\0head" + key + "tail"})
    found = gpu.observe(Machine(tmp_path / "b", files))
    assert found.key_enrolled
    assert not secureboot.is_on(Machine(tmp_path / "b", files))


def test_the_table_of_versions_is_in_order() -> None:
    assert [item.tensorflow for item in cuda.BUILDS] == [f"2.{number}" for number in range(2, 22)]
    for before, after in zip(cuda.BUILDS, cuda.BUILDS[1:], strict=False):
        for field in ("first_python", "last_python", "cuda", "cudnn", "driver"):
            assert cuda.numbers(getattr(before, field)) <= cuda.numbers(getattr(after, field)), after
        assert after.wheels or not before.wheels
    assert cuda.BUILDS[0] == cuda.Build("2.2", "3.5", "3.8", "10.1", "7.6", "418.39")


@pytest.mark.parametrize(
    ("requirement", "python", "first", "last"),
    [
        ("tensorflow[and-cuda]>=2.16", "3.11.2", "2.16", "2.21"),
        ("tensorflow[and-cuda] >= 2.16, < 2.19", "3.12", "2.16", "2.18"),
        ("tensorflow==2.5.1", "3.8", "2.5", "2.5"),
        ("tensorflow-gpu~=2.4.0; python_version < '3.9'", "3.8", "2.4", "2.4"),
        ("tensorflow~=2.14", "3.9", "2.14", "2.20"),
        ("tensorflow<2.10.1,!=2.9.0", "3.7", "2.2", "2.10"),
        ("tensorflow", "3.13", "2.20", "2.21"),
    ],
)
def test_which_releases_a_requirement_allows(requirement: str, python: str, first: str, last: str) -> None:
    bounds = cuda.clauses(["keras>=3.4", requirement])
    assert bounds is not None
    found = cuda.candidates(bounds, python)
    assert (found[0].tensorflow, found[-1].tensorflow) == (first, last)


def test_tensorflow_for_cpus_is_not_meant() -> None:
    assert cuda.clauses(["tensorflow-cpu>=2.16; platform_machine == 'x86_64'", "keras>=3.4"]) is None


def test_a_release_newer_than_the_table_is_taken_for_its_last() -> None:
    assert cuda.build_of("2.23.1") == cuda.BUILDS[-1]
    assert cuda.build_of("2.1.0") is cuda.build_of("") is None
    state = assumed_state.state(Desired(kind="gpu", runtime_venv="/v"))
    state = state._replace(runtime=state.runtime._replace(exists=True, python="3.15.0", oeprov="0.1.0"))
    for bound, wrong in ((">=2.16", False), ("<2.20", True)):
        desired = Desired(kind="gpu", runtime_venv="/v", runtime_requirements=["tensorflow" + bound])
        said = [line for line in make_plan(state, desired).problems if "no build for Python 3.15" in line]
        assert bool(said) == wrong


def test_the_offline_plan_names_drivers_too() -> None:
    desired = Desired(kind="gpu", gpu_driver="470", runtime_requirements=["tensorflow[and-cuda]>=2.16"])
    assert "470 is too old" in "".join(make_plan(assumed_state.state(desired), desired).problems)


def test_the_kernel_role_alone_does_not_wait_for_the_runtime() -> None:
    """On a host that has neither the runtime's environment nor its packages."""
    desired = Desired(kind="cpu", runtime_venv="/v", kernel_arguments=["oeprov.test=1"])
    plan = make_plan(assumed_state.state(desired), desired)
    assert [step.role for step in plan.steps if step.role == "runtime"], "it has steps that only prepare"
    assert plan.steps_before_reboot() == []
    assert [step.id for step in plan.ready_steps("kernel", False)] == ["reboot"]
    assert "reboot" not in [step.id for step in plan.ready_steps("kernel", True)]


def test_the_way_from_nouveau_to_training() -> None:
    """What each role may do, from state to state: nothing is asked for twice, and the end is converged."""
    desired = Desired(kind="gpu", gpu_driver="580")
    state = assumed_state.state(desired)._replace(assumed=False)
    state = state._replace(
        packages=dict.fromkeys(packages.needed(desired, state.os), "1"),
        runtime=state.runtime._replace(exists=True, oeprov="0.1.0", missing=[]),
        gpu=state.gpu._replace(nouveau=True),
    )

    def doable(role: str) -> list[str]:
        return [step.id for step in make_plan(state, desired).ready_steps(role, False)]

    def destroyed() -> list[str]:
        return make_plan(state, desired).destroys

    assert (doable("gpu"), destroyed()) == (["gpu-driver"], ["nouveau"])
    assert "reboot" not in doable("kernel")  # it waits for the driver
    assert [step.id for step in make_plan(state, desired).steps_before_reboot()] == ["gpu-driver"]
    state = state._replace(gpu=state.gpu._replace(installed="580.95.05"))
    assert (doable("gpu"), destroyed()) == ([], ["nouveau"])
    assert doable("kernel")[-1] == "reboot"
    words = ["modprobe.blacklist=nouveau", "rd.driver.blacklist=nouveau"]
    state = state._replace(
        gpu=state.gpu._replace(nouveau=False, driver="580.95.05"),
        kernel=state.kernel._replace(cmdline=state.kernel.cmdline + words),
    )
    assert (doable("kernel"), destroyed()) == (["boot-arguments"], [])
    assert doable("gpu") == ["gpu-persistence", "gpu-check"]
    cmdline = state.bootloader.cmdline + " " + " ".join(words)
    state = state._replace(
        gpu=state.gpu._replace(
            persistence=True, checked="driver 580.95.05, no TensorFlow, " + state.gpu.devices[0]
        ),
        bootloader=state.bootloader._replace(
            cmdline=cmdline, defaults_file=f'GRUB_DEFAULT=saved\nGRUB_CMDLINE_LINUX="{cmdline}"\n'
        ),
    )
    assert make_plan(state, desired).converged


STEPS = {"losses": [0.69, 0.5], "device": "/job:localhost/replica:0/task:0/device:GPU:0"}


@pytest.mark.parametrize(
    ("found", "count", "said"),
    [
        ({"steps": [STEPS], "sum": 1.0}, 1, ""),
        ({"steps": [STEPS, STEPS], "sum": 2.0}, 2, ""),
        ({"steps": [STEPS], "sum": 1.0}, 2, "uses 1 of 2"),
        ({"steps": [{**STEPS, "losses": [0.6, float("nan")]}], "sum": 1.0}, 1, "does not learn"),
        ({"steps": [{**STEPS, "losses": [0.6, 0.6]}], "sum": 1.0}, 1, "does not learn"),
        ({"steps": [{**STEPS, "device": "/device:CPU:0"}], "sum": 1.0}, 1, "ran on /device:CPU:0"),
        ({"steps": [STEPS, STEPS], "sum": 1.0}, 2, "NCCL"),
    ],
)
def test_steps_are_judged(found: dict[str, Any], count: int, said: str) -> None:
    assert said in gpucheck.judge(found, count)
    assert bool(gpucheck.judge(found, count)) == bool(said)


def check(machine: Machine, python: str = "/v/bin/python") -> str:
    applied = gpucheck.ACTIONS["check_gpu"](machine, {"python": python, "devices": [DEVICE]})
    return applied.message


def trained(steps: list[dict[str, Any]], total: float = 1.0) -> tuple[int, str, str]:
    found = {"tensorflow": "2.21.0", "steps": steps, "sum": total}
    return ok("Hello from a library\nOEPROV-GPU " + json.dumps(found) + "\n")


def test_a_check_that_passed_is_remembered_for_what_it_was_made_with(tmp_path: Path) -> None:
    answers = {
        "nvidia-smi": ok(T4["smi"]),
        "modinfo": ok(T4["modinfo"]),
        "/v/bin/python -I -c \nimport json": trained([STEPS]),
        "/v/bin/python -I -c import importlib": ok("2.21.0\n"),
    }
    machine = Machine(tmp_path, T4["files"], answers)
    assert check(machine) == "Tesla T4 (15360 MiB): TensorFlow 2.21.0 trained a step on each"
    seen = gpu.observe(machine)
    desired = Desired(kind="gpu", runtime_venv="/v", runtime_requirements=["tensorflow[and-cuda]>=2.16"])
    state = assumed_state.state(desired)._replace(gpu=seen._replace(persistence=True))
    runtime = state.runtime._replace(exists=True, python="3.11.2", oeprov="0.1.0", missing=[])
    for version, left in (("2.21.0", []), ("2.20.0", ["gpu-check"])):
        state = state._replace(runtime=runtime._replace(distributions={"tensorflow": version}))
        steps = [step.id for step in make_plan(state, desired).steps]
        assert [name for name in steps if name.startswith("gpu")] == left


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({}, "nvidia-smi is not installed"),
        (
            {"nvidia-smi": (18, "Failed to initialize NVML: Driver/library version mismatch", "")},
            "next reboot",
        ),
        ({"nvidia-smi": (9, "NVIDIA-SMI has failed because it couldn't communicate", "")}, "exit status 9"),
        ({"nvidia-smi": ok(T4["smi"].replace("00:07.0", "00:08.0"))}, "does not see 1 of 1 GPUs: " + DEVICE),
        ({"nvidia-smi": ok(T4["smi"]), "/v/bin/python": trained([])}, "uses 0 of 1 GPUs"),
        ({"nvidia-smi": ok(T4["smi"]), "/v/bin/python": (1, "", "ImportError: libcudart")}, "libcudart"),
    ],
)
def test_a_check_that_fails_says_what_is_wrong(answers: dict[str, Any], said: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, T4["files"], answers)
    with pytest.raises(CommandError, match=said):
        check(machine)
    assert not machine.read(gpucheck.CHECKED)


def test_the_driver_is_kept_loaded_and_read_back(tmp_path: Path) -> None:
    machine = Machine(tmp_path, T4["files"], {"nvidia-smi": ok(T4["smi"])})

    def enable() -> tuple[int, str, str]:
        machine.write(gpucheck.ENABLED, "")
        return ok()

    machine.answers.update({"systemctl daemon-reload": ok(), "systemctl enable": enable})
    assert gpucheck.ACTIONS["keep_gpu_driver"](machine, {}).changed
    assert gpu.observe(machine).persistence
    assert not gpucheck.ACTIONS["keep_gpu_driver"](machine, {}).changed
    machine.answers["nvidia-smi"] = ok(T4["smi"].replace("Enabled", "Disabled"))
    with pytest.raises(CommandError, match="still off on " + DEVICE):
        gpucheck.ACTIONS["keep_gpu_driver"](machine, {})


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("modprobe: ERROR: could not insert 'nvidia': Key was rejected by service", "Secure Boot"),
        ("modprobe: ERROR: could not insert 'nvidia': No such device", "another one has it"),
        ("modprobe: FATAL: Module nvidia not found", "see dmesg"),
    ],
)
def test_a_driver_that_does_not_load(error: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=said):
        gpucheck.ACTIONS["load_gpu_driver"](Machine(tmp_path, {}, {"modprobe": (1, "", error)}), {})


def test_loading_is_read_back(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {})

    def load() -> tuple[int, str, str]:
        machine.write("/sys-module", "")  # /sys is written in place only
        real = Path(machine.path("/sys/module/nvidia/version"))
        real.parent.mkdir(parents=True)
        real.write_text("580.95.05\n")
        return ok()

    machine.answers["modprobe nvidia"] = load
    assert gpucheck.ACTIONS["load_gpu_driver"](machine, {}).message == "loaded NVIDIA driver 580.95.05"
    assert not gpucheck.ACTIONS["load_gpu_driver"](machine, {}).changed


class Rpm(Machine):
    """rpm and dnf that know what was installed."""

    def __init__(self, root: Path, builds: bool) -> None:
        super().__init__(root, {})
        self.there: set[str] = set()
        self.builds = builds

    def run(
        self, argv: list[str], timeout: float = 60.0, environment: dict[str, str] | None = None
    ) -> Result:
        self.ran.append(argv)
        answer: Callable[[], tuple[int, str, str]] = lambda: ok()  # noqa: E731
        if argv[:2] == ["rpm", "-q"]:
            lines = [
                f"{name}\t1-1" if name in self.there else f"package {name} is not installed"
                for name in argv[4:]
            ]
            answer = lambda: ok("\n".join(lines))  # noqa: E731
        elif argv[:2] == ["dnf", "install"]:
            self.there |= {word for word in argv[2:] if not word.startswith("-")}
        elif argv[0] == "modinfo" and not self.builds:
            answer = lambda: (1, "", "Module nvidia not found")  # noqa: E731
        elif argv[0] == "modinfo":
            answer = lambda: ok("580.95.05\n")  # noqa: E731
        return Result(argv, *answer())


@pytest.mark.parametrize("builds", [True, False])
def test_the_driver_is_installed_from_its_stream_and_its_module_looked_for(
    builds: bool, tmp_path: Path
) -> None:
    desired = Desired(
        kind="gpu", gpu_driver="580", runtime_repositories={"nvidia": "https://mirror unsigned"}
    )
    state = assumed_state.state(desired)
    el = state.os._replace(id="rocky", version="8.10", family="rhel", package_manager="dnf")
    step = next(item for item in make_plan(state._replace(os=el), desired).steps if item.id == "gpu-driver")
    machine = Rpm(tmp_path, builds)
    install = gpu.ACTIONS["install_gpu_driver"]
    if not builds:
        with pytest.raises(CommandError, match="has no module nvidia"):
            install(machine, step.args)
        return
    assert install(machine, step.args).changed
    streams = [" ".join(argv) for argv in machine.ran if "module" in argv]
    assert [line.rsplit(" ", 1)[-1] for line in streams] == ["nvidia-driver", "nvidia-driver:580-open"]
    assert all("--enablerepo=oeprov-nvidia" in line for line in streams)
    assert "baseurl=https://mirror\n" in machine.read("/etc/yum.repos.d/oeprov.repo")
    ran = len(machine.ran)
    assert not install(machine, step.args).changed
    assert not [argv for argv in machine.ran[ran:] if argv[0] == "dnf"]


def test_the_fabric_manager_is_brought_to_the_drivers_version(tmp_path: Path) -> None:
    there = {"version": "580.65.06", "up": False}

    def install() -> tuple[int, str, str]:
        there["version"] = "580.95.05"
        return ok()

    def restart() -> tuple[int, str, str]:
        there["up"] = True
        return ok()

    machine = Machine(
        tmp_path,
        {"/sys/module/nvidia/version": "580.95.05\n"},
        {
            "nv-fabricmanager --version": lambda: ok(f"Fabric Manager version is : {there['version']}\n"),
            "dnf install -y --enablerepo=x nvidia-fabric-manager-580.95.05": install,
            "systemctl enable": ok(),
            "systemctl restart": restart,
            "systemctl is-": lambda: (0 if there["up"] else 3, "", ""),
        },
    )
    before = gpufabric.observe(machine, Gpu(switches=6))
    assert (before.fabric, before.fabric_runs) == ("580.65.06", False)
    assert gpufabric.observe(machine, Gpu()) == Gpu(), "without switches nothing is asked"
    args = {
        "manager": "dnf",
        "package": "nvidia-fabric-manager",
        "repositories": packages.repositories.Use(options=["--enablerepo=x"])._asdict(),
    }
    act = gpufabric.ACTIONS["run_gpu_fabric"]
    assert act(machine, args).message == "nvidia-fabricmanager 580.95.05 runs, at the next boot too"
    after = gpufabric.observe(machine, Gpu(switches=6))
    assert (after.fabric, after.fabric_runs) == ("580.95.05", True)

    there.update(version="580.65.06", up=True)
    machine.answers["dnf install"] = (1, "", "Error: Unable to find a match: nvidia-fabric-manager-580.95.05")
    with pytest.raises(CommandError, match="no repository has that, update the driver"):
        act(machine, args)
    (tmp_path / "sys/module/nvidia/version").unlink()
    with pytest.raises(CommandError, match="driver is not loaded"):
        act(machine, args)


def test_bundles_have_drivers_for_new_and_old_gpus() -> None:
    rocky = OsInfo("rocky", "8.10", "rhel", architecture="x86_64", package_manager="dnf")
    wanted = Desired(kind="gpu", gpu_driver="newest", kernel_version="newest")
    assert gpu.bundle_drivers(rocky, wanted) == [
        gpu.BundledDriver(
            ["kernel-devel", "nvidia-open", "nvidia-fabric-manager"],
            ["nvidia-driver:open-dkms"],
            ["nvidia", "epel"],
        ),
        gpu.BundledDriver(
            ["kernel-devel", "cuda-drivers", "nvidia-fabric-manager"],
            ["nvidia-driver:580-dkms"],
            ["nvidia", "epel"],
        ),
    ]
    pinned = wanted._replace(
        gpu_driver="590", kernel_version="5.4.278-1.el8.elrepo.x86_64", kernel_source="elrepo-lt"
    )
    [driver] = gpu.bundle_drivers(rocky, pinned._replace(gpu_fabric_manager=False))
    assert driver.names == ["kernel-lt-devel-5.4.278-1.el8.elrepo", "nvidia-open"]
    ubuntu = OsInfo("ubuntu", "22.04", "debian", architecture="x86_64", package_manager="apt")
    for item in gpu.bundle_drivers(ubuntu, wanted):
        assert not item.streams
        assert "nvidia-fabricmanager-580" in item.names
        assert not any("newest" in name for name in item.names)
