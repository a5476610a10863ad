from pathlib import Path

import pytest

from provision.converge import outlook
from provision.hosts import playbook
from provision.hosts.journal import Journal
from provision.node.step import Plan, Step

PACKAGES = Step("packages", "install", "missing", role="runtime", preparing=True)
REBOOT = Step("reboot", "reboot", "a new kernel", reboots=True, action="reboot")
MOUNT = Step("mount", "mount", "missing")
NAMES = [f"h{number}" for number in range(100)]
TURNS = [NAMES[:1], NAMES[1:11], NAMES[11:]]


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setenv("ANSIBLE_FORKS", "50")
    return Journal(tmp_path / "journal.jsonl", "run-1")


def plans(names: list[str]) -> list[Plan]:
    return [Plan(name, [PACKAGES, REBOOT, MOUNT]) for name in names]


def test_without_a_reboot_there_is_no_outlook(journal: Journal) -> None:
    assert outlook.look([Plan("h0", [PACKAGES, MOUNT])], [["h0"]], journal) is None


@pytest.mark.parametrize("known", [True, False])
def test_reboots_are_assumed_until_the_journal_has_one(journal: Journal, known: bool) -> None:
    found = outlook.look(plans(NAMES), TURNS, journal if known else None)
    assert found is not None
    assert (found.turns, found.is_assumed) == (3, True)
    assert found.seconds == 4 * 310, "the last turn has 89 hosts, and Ansible reboots 50 at once"
    assert found.words == "about 20 min (5 min per reboot is assumed)"


def test_earlier_reboots_and_steps_of_these_hosts_are_the_measure(journal: Journal) -> None:
    for seconds in (200.0, 240.0, 900.0):
        journal.rebooted("h0", seconds)
    journal.rebooted("another", 30.0)
    for seconds in (20.0, 40.0):
        journal.end("h0", "mount", ok=True, seconds=seconds)
    journal.end("h0", "mount", ok=False, seconds=900.0)  # a failure says nothing of the duration
    journal.end("h0", "packages", ok=True, seconds=500.0)  # prepared before the turns
    found = outlook.look(plans(["h0", "h1"]), [["h0"], ["h1"]], journal)
    assert found is not None
    assert (found.reboot, found.is_assumed, found.seconds) == (240.0, False, 2 * 270.0)
    assert found.words == "about 9 min (4 min per reboot, as before)"
    others = outlook.look(plans(["new"]), [["new"]], journal)
    assert others is not None
    assert not others.is_assumed, "reboots of other hosts are a better guess than none"


def test_turns_without_a_reboot_do_not_count(journal: Journal) -> None:
    quiet = Plan("h1", [PACKAGES, MOUNT])
    found = outlook.look([*plans(["h0"]), quiet], [["h1"], ["h0"]], journal)
    assert found is not None
    assert (found.turns, found.seconds) == (1, 310.0)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (1, "about 1 min"),
        (540, "about 9 min"),
        (2990, "about 50 min"),
        (3590, "about 1 h"),
        (7800, "about 2 h 10 min"),
    ],
)
def test_times_in_words(seconds: float, words: str) -> None:
    assert outlook.round_time(seconds) == words


def test_forks_are_those_of_our_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANSIBLE_FORKS", raising=False)
    assert playbook.forks() >= 5
    monkeypatch.setenv("ANSIBLE_FORKS", "7")
    assert playbook.forks() == 7
