"""Mode tiered: the unit, run by a shell on a copy of sysfs, and its action on a simulated host."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from pmem_host import GIB, Host, Ns, converge

from provision.node import tiering
from provision.node.apply import apply
from provision.node.command import CommandError
from provision.node.step import Desired, Step

# As the kernel takes and shows values: words for switches, and no weights of its own once one is written.
KERNEL = """
echo() {
  file=$(readlink /proc/$$/fd/1)
  case "$file $1" in
    */before" "*) printf '%s\\n' "$*";;
    */demotion_enabled" 1" | */auto" 1") printf 'true\\n' >"$file";;
    */demotion_enabled" 0" | */auto" 0") printf 'false\\n' >"$file";;
    */demotion_enabled* | */auto*) :;;
    */numa_balancing" 2") if [ -e ROOT/too-old ]; then printf '1\\n'; else printf '2\\n'; fi >"$file";;
    */weighted_interleave/node*) printf '%s\\n' "$1" >"$file"
      [ ! -e "${file%/*}/auto" ] || printf 'false\\n' >"${file%/*}/auto";;
    *) printf '%s\\n' "$*";;
  esac
}
"""
FILES = {
    tiering.DEMOTION: "false",
    tiering.BALANCING: "1",
    tiering.WEIGHTS + "/node0": "5",
    tiering.WEIGHTS + "/node1": "5",
    tiering.WEIGHTS + "/node2": "2",
    tiering.WEIGHTS + "/auto": "true",
    "/sys/devices/system/node/node0/cpulist": "0-3",
    "/sys/devices/system/node/node1/cpulist": "4-7",
    "/sys/devices/system/node/node2/cpulist": "",
}


def kernel(root: Path, *absent: str) -> None:
    (root / "run/oeprov-tiering").mkdir(parents=True)  # systemd makes it
    for path, text in FILES.items():
        if not path.endswith(absent or "\0"):
            file = root / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")


def values(root: Path) -> dict[str, str]:
    found = {path.removeprefix(tiering.WEIGHTS + "/"): root / path.lstrip("/") for path in list(FILES)[:6]}
    return {name: path.read_text().strip() for name, path in found.items() if path.exists()}


def run(root: Path, text: str, name: str) -> tuple[int, str]:
    """Exit status and output of one command of the unit."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name}=")]
    script = line.split("/bin/sh -c '", 1)[1].removesuffix("'")
    assert not set(script) & {"'", "\\"}
    script = script.replace("$$", "$").replace("%%", "%")
    for top in ("/sys/", "/proc/sys/", "/run/"):
        script = script.replace(f" {top}", f" {root}{top}").replace(f'"{top}', f'"{root}{top}')
        script = script.replace(f"<{top}", f"<{root}{top}").replace(f">>{top}", f">>{root}{top}")
    done = subprocess.run(
        ["/bin/sh", "-c", KERNEL.replace("ROOT", str(root)) + script],
        env={"PATH": os.environ["PATH"]},
        check=False,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout


BEFORE = {tiering.DEMOTION: "false", tiering.BALANCING: "1"}
WEIGHTS = {"node0": "5", "node1": "5", "node2": "2", "auto": "true"}


def test_the_unit_sets_all_and_its_stop_restores_all(tmp_path: Path) -> None:
    kernel(tmp_path)
    text = tiering.unit_text(3)
    assert run(tmp_path, text, "ExecStart") == (0, "")
    assert values(tmp_path) == {
        tiering.DEMOTION: "true",
        tiering.BALANCING: "2",
        "node0": "3",
        "node1": "3",
        "node2": "1",
        "auto": "false",
    }
    run(tmp_path, text, "ExecStopPost")
    assert values(tmp_path) == {**BEFORE, **WEIGHTS}


def test_without_a_weight_those_of_the_kernel_stay(tmp_path: Path) -> None:
    kernel(tmp_path)
    assert run(tmp_path, tiering.unit_text(0), "ExecStart") == (0, "")
    assert values(tmp_path) == {tiering.DEMOTION: "true", tiering.BALANCING: "2", **WEIGHTS}


def test_a_kernel_before_6_16_has_no_weights_of_its_own(tmp_path: Path) -> None:
    kernel(tmp_path, "auto")
    assert run(tmp_path, tiering.unit_text(9), "ExecStart") == (0, "")
    run(tmp_path, tiering.unit_text(9), "ExecStopPost")
    assert values(tmp_path) == {**BEFORE, "node0": "5", "node1": "5", "node2": "2"}


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0/cpulist").exists(), reason="no NUMA in sysfs")
def test_the_cpus_of_a_node_are_read_from_a_real_kernel(tmp_path: Path) -> None:
    """Its lists of CPUs look empty to a shell that reads them byte by byte."""
    kernel(tmp_path)
    nodes = tmp_path / "sys/devices/system/node"
    shutil.rmtree(nodes)
    nodes.symlink_to("/sys/devices/system/node")
    run(tmp_path, tiering.unit_text(7), "ExecStart")
    assert values(tmp_path)["node0"] == "7"


def test_a_kernel_that_refuses_a_value_fails_the_unit_and_gets_the_rest_back(tmp_path: Path) -> None:
    kernel(tmp_path)
    (tmp_path / "too-old").touch()
    code, said = run(tmp_path, tiering.unit_text(0), "ExecStart")
    assert (code, said) == (1, f"{tmp_path}{tiering.BALANCING} is 1 instead of 2\n")
    run(tmp_path, tiering.unit_text(0), "ExecStopPost")
    assert values(tmp_path) == {**BEFORE, **WEIGHTS}


def test_a_stop_without_a_start_changes_nothing(tmp_path: Path) -> None:
    kernel(tmp_path)
    assert run(tmp_path, tiering.unit_text(0), "ExecStopPost") == (0, "")
    assert values(tmp_path) == {**BEFORE, **WEIGHTS}


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    path = tmp_path / tiering.UNIT_NAME
    path.write_text(tiering.unit_text(3))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, check=False
    )
    assert [line for line in done.stderr.splitlines() if tiering.UNIT_NAME in line] == []


def keep(weight: int = 0) -> Step:
    return Step(id="tiering", what="", why="", action="keep_tiering", args={"weight": weight})


def test_what_the_kernel_shows_is_observed(tmp_path: Path) -> None:
    kernel(tmp_path)
    tiers = tmp_path / "sys/devices/virtual/memory_tiering"
    for name, nodes in (("memory_tier4", "0-1"), ("memory_tier22", "2")):
        (tiers / name).mkdir(parents=True)
        (tiers / name / "nodelist").write_text(nodes + "\n")
    found = tiering.observe(tiering.System(str(tmp_path)))
    assert (found.demotion, found.balancing) == ("false", "1")
    assert found.weights == {"0": "5", "1": "5", "2": "2"}
    assert found.tiers == {"memory_tier4": [0, 1], "memory_tier22": [2]}
    assert tiering.observe(tiering.System(str(tmp_path / "none"))) == tiering.Tiering()


def test_the_action_says_what_the_kernel_did_not_take(tmp_path: Path) -> None:
    host = Host(str(tmp_path), labels=False, spaces={}, memmap_platform=True, refuses_tiering=True)
    with pytest.raises(
        CommandError, match=r"demotion_enabled is false instead of true; .*numa_balancing is 1 "
    ):
        apply(keep(), host)


def test_the_action_refuses_a_node_in_the_tier_of_dram(tmp_path: Path) -> None:
    """Before the boot that makes the node, a plan cannot know it."""
    host = Host(str(tmp_path), labels=False, spaces={}, memmap_platform=True, tiers={"memory_tier4": "0-1"})
    with pytest.raises(CommandError, match="node 1 in memory_tier4, the tier of DRAM"):
        apply(keep(), host)
    assert not host.exists(tiering.UNIT)


def test_the_action_needs_a_memory_node(tmp_path: Path) -> None:
    host = Host(str(tmp_path), labels=False, spaces={0: Ns()}, size=2 * GIB)
    with pytest.raises(CommandError, match="no memory node without CPUs"):
        apply(keep(), host)


def test_leaving_the_mode_restores_the_values(tmp_path: Path) -> None:
    host = Host(str(tmp_path), labels=False)
    converge(host, Desired(kind="re6p", pmem_mode="tiered"), [])
    assert host.read(tiering.BALANCING) == "2\n"
    forget = Step(id="f", what="", why="", action="forget_tiering")
    assert apply(forget, host).changed
    assert not apply(forget, host).changed
    assert (host.read(tiering.BALANCING), host.exists(tiering.UNIT)) == ("1\n", False)
