"""The way back: what the journal keeps of hosts, and what is planned from it."""

import json
from pathlib import Path
from typing import Any

import pytest
from one_host import how, inventory

from provision.cluster.errors import ConvergeError
from provision.cluster.inventory import Inventory
from provision.cluster.settings import Kind
from provision.converge import assumed_state, changes, rollback
from provision.converge.changes import Consent
from provision.hosts import history
from provision.hosts.journal import Journal
from provision.node import platforms, tiering
from provision.node.state import DaxDevice, Dimms, KernelState, State

OLD, NEW = "5.15.0-100-generic", "5.15.0-119-generic"


def seen(monkeypatch: pytest.MonkeyPatch, found: Inventory, **parts: Any) -> State:
    """The host as `observe` brings it."""
    state = assumed_state.state(found.hosts["one"].desired())
    state = state._replace(**parts)
    monkeypatch.setattr(
        "provision.hosts.observe.observe", lambda inventory: dict.fromkeys(inventory.hosts, state)
    )
    return state


def test_modes_are_told_from_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    re6p = seen(monkeypatch, inventory(tmp_path, "re6p"))
    assert platforms.get("re6p").find_mode(re6p) == ""
    used = re6p._replace(namespaces=[re6p.namespaces[0]._replace(mode="fsdax")])
    assert platforms.get("re6p").find_mode(used) == "fsdax"
    assert (
        platforms.get("re6p").find_mode(re6p._replace(dax=[DaxDevice("dax0.0", mode="system-ram")]))
        == "system-ram"
    )
    tiered = re6p._replace(files={tiering.UNIT: "x"}, dax=[DaxDevice("dax0.0", mode="system-ram")])
    assert platforms.get("re6p").find_mode(tiered) == platforms.get("re7p").find_mode(tiered) == "tiered"
    assert platforms.get("re7p").find_mode(re6p) == "system-ram"
    words = re6p.kernel._replace(cmdline=["memmap=1008G!257G"])
    assert platforms.get("re7p").find_mode(re6p._replace(kernel=words)) == "fsdax"
    assert platforms.get("bare_metal_pmem").find_mode(State(dimms=Dimms(volatile=1))) == "memory"


def test_the_last_other_value_counts_and_other_clusters_do_not(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", "run")
    for cluster, release in (("c", "1"), ("c", "2"), ("other", "9"), ("c", "3")):
        states = {"one": State(kernel=KernelState(running=release))}
        history.write(journal, cluster, states, {"one": Kind.cpu})
    assert history.last(journal, "c", "kernel", {"one": "3"}) == {"one": "2"}
    assert history.last(journal, "c", "kernel", {"one": "2"}) == {"one": "3"}
    assert history.last(journal, "c", "kernel", {"two": "2"}) == {}
    assert history.last(journal, "c", "mode", {"one": ""}) == {}


def test_the_old_kernel_boots_on_trial_and_nothing_else_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = inventory(tmp_path, "cpu")
    checked = how(tmp_path, check=True)
    now = KernelState(NEW, [OLD, NEW], "", NEW, ["quiet"])
    state = seen(monkeypatch, found, kernel=now)
    assert rollback.kernel(found, checked) == 0
    assert "has no other kernel of these hosts" in capsys.readouterr().out
    history.write(
        Journal(tmp_path / "journal.jsonl", "run"),
        "c",
        {"one": state._replace(kernel=now._replace(running=OLD))},
        {"one": Kind.cpu},
    )
    assert rollback.kernel(found, how(tmp_path, as_json=True, check=True)) == 2
    [plan] = json.loads(capsys.readouterr().out)["pending"]
    assert [step["id"] for step in plan["steps"]] == ["reboot", "kernel-default"]
    assert plan["steps"][0]["what"] == f"boot {OLD} once on trial"
    seen(monkeypatch, found, kernel=now._replace(installed=[NEW]))
    with pytest.raises(ConvergeError, match=f"its earlier kernel {OLD} is not installed any more"):
        rollback.kernel(found, checked)


def test_the_old_mode_needs_consent_that_names_the_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = inventory(tmp_path, "re6p")
    kernel = KernelState(NEW, [NEW], "", NEW, [], {NEW: {"CONFIG_FS_DAX": "y"}})
    plain = seen(monkeypatch, found, kernel=kernel)
    item = plain.namespaces[0]
    fsdax = plain._replace(namespaces=[item._replace(mode="fsdax", blockdev="pmem0", uuid="u")])
    history.write(Journal(tmp_path / "journal.jsonl", "run"), "c", {"one": fsdax}, {"one": Kind.re6p})
    foreign = item._replace(mode="devdax", blockdev="", chardev="dax0.0", uuid="of-somebody-else")
    seen(
        monkeypatch,
        found,
        kernel=kernel,
        namespaces=[foreign],
        dax=[DaxDevice("dax0.0", item.size, region="region0")],
        packages=dict.fromkeys(["ndctl", "daxctl", "numactl", "libpmem"], "1"),
    )
    with pytest.raises(ConvergeError, match=r"data would be lost; .*--consent one:\S*namespace0.0"):
        rollback.pmem_mode(found, how(tmp_path, Consent(yes=True)))
    code = rollback.pmem_mode(found, how(tmp_path, check=True, as_json=True))
    assert code == 2
    [plan] = json.loads(capsys.readouterr().out.splitlines()[-1])["pending"]
    assert any("namespace0.0" in step["what"] and step["destroys"] for step in plan["steps"])


def test_a_change_writes_down_what_was_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = inventory(tmp_path, "cpu")
    seen(monkeypatch, found, kernel=KernelState(NEW, [NEW], "", NEW))

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(changes.playbook, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        changes.bootstrap(found, how(tmp_path, Consent(yes=True)))
    journal = Journal(tmp_path / "journal.jsonl", "x")
    assert history.last(journal, "c", "kernel", {"one": "another"}) == {"one": NEW}
