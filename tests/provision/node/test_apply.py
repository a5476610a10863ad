import os
import stat
from pathlib import Path

import pytest

from provision.node import directory, runtime
from provision.node.apply import apply, can_apply
from provision.node.command import CommandError, Result, System
from provision.node.packages import apply as install
from provision.node.step import Step


def step(path: Path, size: int = 0) -> Step:
    return Step("directory", "make", "why", action="make_directory", args={"path": str(path), "size": size})


def test_a_directory_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "pmem0"
    assert apply(step(path)).changed is True
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert apply(step(path)).changed is False
    assert list(path.iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "pmem0").write_text("mine")
    with pytest.raises(CommandError, match="pmem0: File exists"):
        apply(step(tmp_path / "pmem0"))
    assert (tmp_path / "pmem0").read_text() == "mine"


def test_too_little_space_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"has .* free"):
        apply(step(tmp_path / "pmem0", size=1 << 62))
    assert not (tmp_path / "pmem0").exists()


def test_an_action_of_a_later_version_is_refused() -> None:
    unknown = Step("mkfs-pmem0", "make ext4", "why", action="of_a_later_version")
    assert not can_apply(unknown)
    with pytest.raises(CommandError, match="plans 'of_a_later_version' but does not carry it out"):
        apply(unknown)


def test_directories_are_seen_as_they_are(tmp_path: Path) -> None:
    system = System()
    absent = directory.observe(system, str(tmp_path / "a" / "b"))
    assert (absent.exists, absent.writable, absent.blocked_by) == (False, True, "")
    assert absent.free > 0
    (tmp_path / "file").write_text("")
    under_file = directory.observe(system, str(tmp_path / "file" / "b"))
    assert (under_file.writable, under_file.blocked_by) == (False, str(tmp_path / "file"))
    there = directory.observe(system, str(tmp_path))
    assert (there.exists, there.is_directory) == (True, True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_seen(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert directory.observe(System(), str(tmp_path / "x")).blocked_by == str(tmp_path)


class Scripted(System):
    """Answers commands from a list; remembers what was asked."""

    def __init__(self, answers: dict[str, list[Result]]) -> None:
        super().__init__("/no-such-root")  # no file of this machine answers
        self.answers = answers
        self.asked: list[list[str]] = []

    def run(self, argv, timeout=0.0, environment=None):  # type: ignore[no-untyped-def]
        self.asked.append(argv)
        name = " ".join(argv[:2])
        return self.answers[name if name in self.answers else argv[0]].pop(0)


def ok(out: str = "") -> Result:
    return Result(["x"], 0, out, "")


INSTALLED = ok("libpmem1\tinstalled\t1.12\n")
KNOWN = ok("libpmem1:\n  Installed: (none)\n  Candidate: 1.12\n")
UNKNOWN = ok("libpmem1:\n  Installed: (none)\n  Candidate: (none)\n")


def apt(answers: dict[str, list[Result]]) -> Scripted:
    """A Debian host with nothing interrupted, where libpmem1 is known and not installed."""
    given = {"dpkg-query -W": [ok(), INSTALLED], "dpkg --audit": [ok()], "apt-cache policy": [KNOWN]}
    return Scripted({**given, **answers})


def asked(system: Scripted, program: str) -> list[str]:
    """What a program was asked to do, without options and package names."""
    words = {"update", "install", "check", "--audit", "--configure", "--fix-broken"}
    return [" ".join(w for w in argv if w in words) for argv in system.asked if argv[0] == program]


def failed(*argv: str, err: str) -> Result:
    return Result(list(argv), 100, "", err)


def test_packages_are_installed_from_the_index_that_is_there() -> None:
    system = apt({"apt-get": [ok()]})
    assert install(system, "apt", ["libpmem1"]) == ["libpmem1"]
    assert asked(system, "apt-get") == ["install"]
    assert install(Scripted({"dpkg-query -W": [INSTALLED]}), "apt", ["libpmem1"]) == []


@pytest.mark.parametrize("why", ["no candidate", "gone from the mirror"])
def test_the_package_index_is_refreshed_only_when_an_install_needs_it(why: str) -> None:
    if why == "no candidate":
        system = apt({"apt-cache policy": [UNKNOWN], "apt-get": [ok(), ok()]})
        expected = ["update", "install"]
    else:
        gone = failed("apt-get", "install", err="E: 404  Not Found")
        system = apt({"apt-get": [gone, ok(), ok()]})
        expected = ["install", "update", "install"]
    assert install(system, "apt", ["libpmem1"]) == ["libpmem1"]
    assert asked(system, "apt-get") == expected


def test_packages_are_installed_although_the_index_cannot_be_refreshed() -> None:
    offline = failed("apt-get", "update", err="no network")
    system = apt({"apt-cache policy": [ok()], "apt-get": [offline, ok()]})
    assert install(system, "apt", ["libpmem1"]) == ["libpmem1"]


def test_a_locked_package_index_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    held = failed("apt-get", "update", err="E: Could not get lock /var/lib/apt/lists/lock.")
    system = apt({"apt-cache policy": [UNKNOWN], "apt-get": [held, held, ok(), ok()]})
    assert install(system, "apt", ["libpmem1"]) == ["libpmem1"]
    assert asked(system, "apt-get") == ["update", "update", "update", "install"]
    assert len(pauses) == 2


def test_an_interrupted_dpkg_is_repaired_first() -> None:
    broken = failed("apt-get", "check", err="E: dpkg was interrupted")
    system = apt(
        {
            "dpkg --audit": [ok("half configured: libc6"), ok("half installed: tzdata")],
            "dpkg --force-confdef": [ok()],
            "apt-get": [broken, ok(), ok()],
        }
    )
    assert install(system, "apt", ["libpmem1"]) == ["libpmem1"]
    assert asked(system, "apt-get") == ["check", "install --fix-broken", "install"]
    assert asked(system, "dpkg") == ["--audit", "--configure", "--audit"]


def test_a_package_that_is_missing_after_a_successful_install_is_an_error() -> None:
    system = apt({"dpkg-query -W": [ok(), ok()], "apt-get": [ok()]})
    with pytest.raises(CommandError, match="said that it installed libpmem1, but it did not"):
        install(system, "apt", ["libpmem1"])


def test_a_failed_installation_says_what_failed() -> None:
    absent = failed("apt-get", "install", "nope", err="E: Unable to locate package nope")
    system = apt({"dpkg-query -W": [ok()], "apt-get": [ok(), absent], "apt-cache policy": [ok()]})
    with pytest.raises(CommandError, match="Unable to locate package nope"):
        install(system, "apt", ["nope"])


def test_failures_of_install_and_refresh_are_both_reported() -> None:
    absent = failed("apt-get", "install", "nope", err="E: Unable to locate package nope")
    offline = failed("apt-get", "update", err="E: Could not resolve the mirror")
    system = apt({"dpkg-query -W": [ok()], "apt-get": [offline, absent], "apt-cache policy": [ok()]})
    with pytest.raises(CommandError, match=r"Unable to locate package nope / .*Could not resolve the mirror"):
        install(system, "apt", ["nope"])


def test_the_runtime_is_probed_in_its_own_interpreter(tmp_path: Path) -> None:
    import sys

    found = runtime.observe(
        System(),
        sys.prefix,
        ["pytest>=1", "pytest>=99999", "no-such-dist-here", "other; platform_machine == 'pdp11'"],
    )
    assert found.exists
    assert found.python.startswith("3.")
    assert found.missing == ["pytest>=99999", "no-such-dist-here"]
    assert "other" not in found.distributions
    absent = runtime.observe(System(), str(tmp_path / "none"), ["a"])
    assert (absent.exists, absent.missing) == (False, ["a"])


def test_a_broken_interpreter_is_reported(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    python.chmod(0o755)
    assert runtime.observe(System(), str(tmp_path), []).error == "broken"


def test_a_complete_environment_is_not_changed() -> None:
    import sys

    args = {
        "venv": sys.prefix,
        "python": "python3",
        "build": "",
        "offline": False,
        "requirements": ["pytest>=1"],
    }
    done = apply(Step("runtime", "install", "why", action="install_runtime", args=args))
    assert done.changed is False
