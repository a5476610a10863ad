"""Every platform of the registry, whichever they are; what each one plans is in ``cases/*.json``."""

import re
from pathlib import Path

import pytest
from test_plan_cases import CASES, load

from provision.cluster.settings import Kind
from provision.converge import assumed_state
from provision.node import platforms
from provision.node.kernelinstall import OPTIONS
from provision.node.plan import make_plan
from provision.node.step import Desired

ALL_MODES = sorted({mode for kind in platforms.kinds() for mode in platforms.get(kind).modes})
NODE = Path(platforms.__file__).parent


def test_each_file_of_a_platform_is_in_the_registry() -> None:
    files = {path.stem for path in NODE.glob("platform_*.py")} - {"platform_base"}
    assert {type(platforms.get(kind)).__module__.rpartition(".")[2] for kind in platforms.kinds()} == files


@pytest.mark.parametrize("kind", platforms.kinds())
def test_each_platform_has_its_name_modes_and_cases(kind: str) -> None:
    platform = platforms.get(kind)
    assert platform.name == kind
    assert platform.modes[-1] == "none"
    assert any(load(path)["base"] == kind for path in CASES)


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("kind", platforms.kinds())
def test_a_new_host_can_be_planned_for_in_each_mode_that_it_has(kind: str, mode: str) -> None:
    desired = Desired(host="h", kind=kind, pmem_mode=mode, pmem_directory="/d", runtime_venv="/v")
    platform, plan = platforms.get(kind), make_plan(assumed_state.state(desired), desired)
    refusal = platform.refuse(mode)
    assert bool(refusal) == (mode not in platform.modes)
    assert (refusal in plan.problems) == bool(refusal)
    assert mode != platform.modes[0] or not plan.problems


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("kind", platforms.kinds())
def test_each_kernel_option_that_a_mode_needs_is_observed(kind: str, mode: str) -> None:
    desired = Desired(kind=kind, pmem_mode=mode, pmem_dram_weight=1)
    needed = platforms.get(kind).needed_options(assumed_state.state(desired), desired)
    assert {option.name for option in needed} <= set(OPTIONS)


def test_nobody_asks_which_platform_a_host_is() -> None:
    names = "|".join(platforms.kinds())
    asks = re.compile(rf"\bkind (==|!=|in|not in|is|is not) [(]?(Kind[.]|\"({names})\")")
    found = [path.name for path in NODE.parent.rglob("*.py") if asks.search(path.read_text())]
    assert found == []


def test_users_choose_among_the_platforms_of_the_registry() -> None:
    assert [kind.value for kind in Kind] == platforms.kinds()
