"""Plans from case files: ``cases/*.json`` say state + desired → steps, one case a file.

``base`` names a freshly installed kind (``provision.converge.assumed_state``); ``state`` replaces parts of
it. With ``ready`` (the default) packages and runtime are there already, so that a case shows only what it is
about. ``steps`` lists every expected step in order; fields that a case does not mention are not compared.
``notes`` and ``problems`` are pieces of text, one for each expected line.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from provision.converge import assumed_state
from provision.node import packages
from provision.node.plan import Desired, make_plan
from provision.node.state import Runtime, State, decode, encode
from provision.node.step import Plan

CASES = sorted(Path(__file__).parent.joinpath("cases").glob("*.json"))


def load(path: Path) -> dict[str, Any]:
    case: dict[str, Any] = json.loads(path.read_text())
    unknown = set(case) - {
        "about",
        "pitfalls",
        "base",
        "ready",
        "state",
        "desired",
        "steps",
        "notes",
        "problems",
    }
    assert not unknown, unknown
    return case


def inputs(case: dict[str, Any]) -> tuple[State, Desired]:
    desired = decode(
        Desired, {"host": "h", "kind": case["base"], "runtime_venv": "/opt/v", **case["desired"]}
    )
    base = encode(assumed_state.state(desired)._replace(assumed=False))
    for name, value in case.get("state", {}).items():
        base[name] = {**base[name], **value} if isinstance(value, dict) else value
    state = decode(State, base)
    if case.get("ready", True):
        names = packages.needed(desired, state.os)
        state = state._replace(
            packages=dict.fromkeys(names, "1"),
            runtime=Runtime("/opt/v", exists=True, writable=True, python="3.11.2", oeprov="0.1.0"),
        )
    return state, desired


def make(case: dict[str, Any]) -> Plan:
    return make_plan(*inputs(case))


def test_there_are_cases() -> None:
    assert len(CASES) >= 80


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_steps_of_each_case_file(path: Path) -> None:
    case = load(path)
    plan = make(case)
    assert [step.id for step in plan.steps] == [step["id"] for step in case["steps"]]
    for step, wanted in zip(plan.steps, case["steps"], strict=True):
        found = step._asdict()
        for name, value in wanted.items():
            assert found[name] == value, f"{step.id}.{name}"
        # What is not said to destroy or reboot must not.
        assert step.destroys == wanted.get("destroys", [])
        assert step.reboots == wanted.get("reboots", False)
        assert step.action
        assert step.why
    for name in ("notes", "problems"):
        found_lines = getattr(plan, name)
        expected = case.get(name, [])
        assert len(found_lines) == len(expected), found_lines
        for line, piece in zip(found_lines, expected, strict=True):
            assert piece in line


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_planning_is_pure_and_travels(path: Path) -> None:
    state, desired = inputs(load(path))
    before = json.dumps(encode(state), sort_keys=True)
    plan = make_plan(decode(State, json.loads(json.dumps(encode(state)))), desired)
    assert plan == make_plan(state, desired)
    assert json.dumps(encode(state), sort_keys=True) == before
    assert decode(Plan, json.loads(json.dumps(encode(plan)))) == plan
    assert len({step.id for step in plan.steps}) == len(plan.steps)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_steps_say_who_does_them_and_what_they_interrupt(path: Path) -> None:
    for step in make(load(path)).steps:
        assert step.role in ("kernel", "runtime", "pmem", "gpu", "carrier")
        assert step.scope in ("host", "training")
        assert not (step.preparing and (step.disturbs or step.reboots or step.destroys)), step.id
        assert step.disturbs or not step.reboots, step.id


def test_every_planned_pitfall_has_a_case() -> None:
    covered = {number for path in CASES for number in load(path).get("pitfalls", [])}
    assert covered == set(range(1, 26))


def test_the_table_of_pitfalls_names_cases_that_exist() -> None:
    text = Path(__file__).parent.joinpath("cases", "README.md").read_text()
    rows = {int(row.split("|")[1]): row for row in text.splitlines() if re.match(r"\| \d+ \|", row)}
    assert sorted(rows) == list(range(1, 26))
    names = {path.stem for path in CASES}
    for number, row in rows.items():
        words = set(re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)+", row.rsplit("|", 2)[1]))
        # A case, or a test that is named by its path.
        assert words & names or "test_" in row or "/" in row, number
        assert {word for word in words if word.split("-")[0] in ("re6p", "re7p", "metal", "cxl")} <= names
