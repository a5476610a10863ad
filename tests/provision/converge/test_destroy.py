"""`oeprov destroy`: what is planned, what is left, and that doing it twice does no harm."""

import json
import os
import pwd
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_processes import make_job
from one_host import inventory

from provision.cli import main as cli
from provision.cluster.inventory import Removal
from provision.converge import assumed_state
from provision.hosts import history
from provision.hosts.journal import Journal
from provision.jobs.store import JobState
from provision.node import bootloader, daxctl, gpucheck, process, removal, repositories, tiering
from provision.node.apply import apply
from provision.node.command import CommandError, System
from provision.node.observe import observe
from provision.node.plan import Plan, make_plan
from provision.node.runtime import STAMP
from provision.node.state import (
    Bootloader,
    DaxDevice,
    FileSystem,
    FstabEntry,
    JobFiles,
    KernelState,
    Mount,
    Remains,
    Runtime,
    State,
)
from provision.node.step import Desired

OPTIONS = ["dax", "nofail", "x-systemd.device-timeout=90s"]
JOB = "deepfm-20261122-101500"


def desired(kind: str, *objects: str, **more: Any) -> Desired:
    wanted: dict[str, Any] = {
        "remove_jobs": "/var/lib/oeprov/jobs",
        "runtime_venv": "/opt/oeprov/venv",
        **more,
    }
    return Desired(
        host="h", kind=kind, pmem_mode="fsdax", remove=True, remove_objects=list(objects), **wanted
    )


def used(**parts: Any) -> State:
    """A re6p host as bootstrap left it: fsdax, mounted, entered in fstab."""
    ubuntu = assumed_state.state(Desired(kind="cpu")).os
    base = assumed_state.state(desired("re6p"))._replace(assumed=False, os=ubuntu)
    state = base._replace(
        namespaces=[base.namespaces[0]._replace(mode="fsdax", uuid="n-1")],
        filesystems=[FileSystem("pmem0", "ext4", "f-1")],
        mounts=[Mount("/dev/pmem0", "/mnt/pmem0", "ext4", ["rw", "dax=always"])],
        fstab=[
            FstabEntry("UUID=r", "/", "ext4", ["defaults"]),
            FstabEntry("UUID=f-1", "/mnt/pmem0", "ext4", OPTIONS),
        ],
        owned=["n-1", "f-1"],
        runtime=Runtime("/opt/oeprov/venv", exists=True, made=True, oeprov="0.1.0"),
    )
    return state._replace(**parts)


def test_cxl_memory_stays_a_node_until_the_next_boot() -> None:
    state = assumed_state.state(desired("cxl"))._replace(
        assumed=False, files={daxctl.UNIT: daxctl.unit_text([], ["dax0.0"], True), daxctl.ENABLED: ""}
    )
    plan = make_plan(state, desired("cxl"))
    assert "system-ram-forget" in [step.id for step in plan.steps]
    assert "dax0.0 stays a memory node until the next boot" in plan.notes
    assert make_plan(state._replace(files={}), desired("cxl")).notes == []


def ids(plan: Plan) -> list[str]:
    return [step.id for step in plan.steps]


def test_data_stays_unless_it_is_named() -> None:
    remains = Remains(
        jobs=[JobFiles(JOB, [f"oeprov-{JOB}-server-0.service"], pools=[f"/mnt/pmem0/oeprov/{JOB}"])],
        files=["/var/lib/oeprov/wheels"],
        user=True,
    )
    state = used(remains=remains)
    plan = make_plan(state, desired("re6p"))
    assert ids(plan) == [f"units-{JOB}", "unmount-pmem0", "fstab-forget", "remove-files"]
    assert not plan.destroys
    assert not plan.problems
    [job, namespace] = plan.notes
    assert job == (
        f"left: job {JOB} (rows in /mnt/pmem0/oeprov/{JOB}); to lose that too, add: --consent h:job/{JOB}"
    )
    assert namespace.endswith("add: --consent h:namespace0.0/n-1 --consent h:pmem0/ext4/f-1")
    assert plan.steps[2].args == {"remove": ["/mnt/pmem0"], "empty": ["/mnt/pmem0"]}
    assert plan.steps[3].args["paths"] == ["/opt/oeprov/venv", "/var/lib/oeprov/wheels"], (
        "the registry knows what is left"
    )
    shorter = [FstabEntry("UUID=f-1", "/mnt/pmem0", "ext4", [*OPTIONS[:2], "x-systemd.device-timeout=30s"])]
    assert make_plan(state._replace(fstab=shorter), desired("re6p")).steps[2].id == "fstab-forget", (
        "entered with another pmem_device_timeout"
    )


def test_consented_objects_are_removed_and_file_systems_need_their_own_consent() -> None:
    remains = Remains(jobs=[JobFiles(JOB, pools=[f"/mnt/pmem0/oeprov/{JOB}"])], user=True)
    plan = make_plan(used(remains=remains), desired("re6p", f"job/{JOB}", "namespace0.0/n-1"))
    assert ids(plan) == [
        f"files-{JOB}",
        "unmount-pmem0",
        "fstab-forget",
        "destroy-namespace0.0",
        "remove-files",
        "remove-user",
    ]
    assert plan.destroys == [f"job/{JOB}", "namespace0.0/n-1", "pmem0/ext4/f-1"]
    assert plan.steps[3].args["lose"] == ["pmem0/ext4/f-1"]
    assert plan.steps[4].args["paths"] == ["/opt/oeprov/venv", "/var/lib/oeprov/owned"]
    assert not plan.notes


def test_a_namespace_that_cannot_be_read_is_not_destroyed() -> None:
    error = "/dev/pmem0 cannot be read at byte 0 of 541165879296: Input/output error"
    state = used(filesystems=[FileSystem("pmem0", "unreadable", error=error)])
    kept = make_plan(state, desired("re6p"))
    assert kept.problems == []
    doomed = make_plan(state, desired("re6p", "namespace0.0/n-1", "pmem0/unreadable/no-uuid"))
    assert "destroy-namespace0.0" in ids(doomed)
    assert [line.split(";")[0] for line in doomed.problems] == [error]


def test_what_oeprov_did_not_make_is_never_touched() -> None:
    foreign = used(
        owned=[],
        fstab=[FstabEntry("UUID=f-1", "/mnt/pmem0", "ext4", ["defaults"])],
        runtime=Runtime("/opt/oeprov/venv", exists=True, made=False, oeprov="0.1.0"),
    )
    plan = make_plan(foreign, desired("re6p", "namespace0.0/n-1", "pmem0/ext4/f-1"))
    assert (plan.steps, plan.notes, plan.problems) == ([], [], [])


def test_destroy_refuses_a_host_with_a_running_job() -> None:
    plan = make_plan(used(jobs=[JOB]), desired("re6p"))
    assert plan.problems[0] == f"training job {JOB} runs on this host; stop it first: oeprov stop {JOB}"
    busy = make_plan(used(users={"/mnt/pmem0": ["12 vi"]}), desired("re6p"))
    assert busy.problems == ["/mnt/pmem0 is in use and cannot be unmounted: process 12 (vi); stop it first"]


def test_tiering_ends_before_its_memory_goes() -> None:
    state = used(mounts=[], fstab=[], filesystems=[])
    state = state._replace(
        namespaces=[state.namespaces[0]._replace(mode="devdax", blockdev="", chardev="dax0.0")],
        dax=[DaxDevice("dax0.0", 1 << 30, "system-ram", 1, 0, True, 8, 8, "region0")],
        files={tiering.UNIT: "x"},
    )
    assert ids(make_plan(state, desired("re6p")))[:2] == ["tiering-forget", "offline-dax0.0"]


def test_system_ram_goes_back_to_devdax() -> None:
    state = used(mounts=[], fstab=[], filesystems=[])
    state = state._replace(
        namespaces=[state.namespaces[0]._replace(mode="devdax", blockdev="", chardev="dax0.0")],
        dax=[DaxDevice("dax0.0", 1 << 30, "system-ram", 1, 0, True, 8, 8, "region0")],
        files={"/etc/systemd/system/oeprov-system-ram.service": "x"},
    )
    plan = make_plan(state, desired("re6p", "namespace0.0/n-1"))
    assert ids(plan)[:3] == ["offline-dax0.0", "system-ram-forget", "destroy-namespace0.0"]
    stuck = state._replace(dax=[state.dax[0]._replace(movable=False)])
    plan = make_plan(stuck, desired("re6p", "namespace0.0/n-1"))
    assert "destroy-namespace0.0" not in ids(plan)
    assert "stays system RAM until the next boot" in plan.notes[0]


@pytest.mark.parametrize("known", [True, False])
def test_kernel_arguments_go_back_on_trial_where_the_journal_knows(known: bool) -> None:
    release = "5.15.0-119-generic"
    words = ["quiet", "mitigations=off", "memhp_default_state=offline"]
    base = assumed_state.state(Desired(kind="cpu"))._replace(assumed=False, runtime=Runtime())
    state = base._replace(
        kernel=KernelState(release, [release], "", release, words),
        bootloader=base.bootloader._replace(cmdline=" ".join(words)),
    )
    wanted = desired(
        "cpu",
        kernel_arguments=["mitigations=off", "quiet"],
        remove_known=known,
        remove_arguments_before=["quiet"] if known else [],
    )
    plan = make_plan(state._replace(owned=[]), wanted)
    menu, with_grubby = bootloader.mkconfig_command(state), state.bootloader._replace(has_grubby=True)
    if not known:
        assert plan.steps == []
        assert (
            "the journal here does not have the arguments from before oeprov; if these are" in (plan.notes[0])
        )
        assert plan.notes[0].endswith("take them out of /etc/default/grub and run " + " ".join(menu))
        [note] = make_plan(state._replace(bootloader=with_grubby), wanted).notes
        assert note.endswith(
            'grubby --update-kernel=ALL --remove-args="quiet mitigations=off memhp_default_state=offline"'
        )
        return
    [change] = [step for step in plan.steps if step.id == "boot-arguments"]
    assert change.args == {"add": [], "remove": ["mitigations=off", "memhp_default_state=offline"]}
    [reboot] = [step for step in plan.steps if step.reboots]
    assert "trial" in reboot.what


def test_memmap_stays_if_its_range_holds_data() -> None:
    wanted = desired("re7p", remove_known=True)
    base = assumed_state.state(wanted)._replace(assumed=False, runtime=Runtime())
    item = used().namespaces[0]._replace(mode="raw", uuid="", labels=False)
    state = base._replace(
        kernel=base.kernel._replace(cmdline=["memmap=1008G!257G"]),
        bootloader=base.bootloader._replace(cmdline="memmap=1008G!257G"),
        namespaces=[item],
        filesystems=[FileSystem("pmem0", "ext4", "f-1")],
        owned=["f-1"],
    )
    plan = make_plan(state, wanted)
    assert plan.steps == []
    assert plan.notes[-1].endswith("--consent h:pmem0/ext4/f-1")
    named = make_plan(state, desired("re7p", "pmem0/ext4/f-1", remove_known=True))
    assert ids(named)[0] == "give-up-data"
    assert named.destroys == ["pmem0/ext4/f-1"]
    assert any(step.reboots for step in named.steps)


def test_files_of_jobs_are_seen_and_removed_and_others_are_not(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    for path in (
        f"state/jobs/{JOB}/run/checkpoints/step-0000000010/manifest.json",
        f"state/jobs/{JOB}/job.json",
        "state/jobs/notes/readme",
        f"pmem/{JOB}/server-0/pool",
        "pmem/mine/letter",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    wanted = Desired(
        host="here",
        kind="local",
        pmem_mode="directory",
        pmem_directory="/pmem",
        remove=True,
        remove_jobs="/state/jobs",
        remove_objects=[f"job/{JOB}"],
    )
    state = observe(system, wanted)
    assert state.remains.jobs == [
        JobFiles(JOB, [], f"/state/jobs/{JOB}", checkpoints=1, run=True, pools=[f"/pmem/{JOB}"])
    ]
    assert state.remains.foreign == ["/pmem/mine"]
    assert ids(make_plan(state, wanted._replace(remove_objects=[]))) == []
    plan = make_plan(state, wanted)
    [step] = plan.steps
    assert step.destroys == [f"job/{JOB}"]
    assert apply(step, system).changed
    assert not apply(step, system).changed
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "pmem/mine/letter",
        "state/jobs/notes/readme",
    ]
    assert make_plan(observe(system, wanted), wanted).steps == []


def test_the_mount_points_directory_goes_with_its_line(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    system.write("/etc/fstab", "UUID=r / ext4 defaults 0 1\nUUID=f-1 /mnt/pmem0 ext4 dax 0 0\n")
    (tmp_path / "mnt/pmem0").mkdir(parents=True)
    [step] = [step for step in make_plan(used(), desired("re6p")).steps if step.id == "fstab-forget"]
    assert apply(step, system).changed
    assert system.read("/etc/fstab") == "UUID=r / ext4 defaults 0 1\n"
    assert system.list("/mnt") == []
    assert not apply(step, system).changed
    (tmp_path / "mnt/pmem0").mkdir()
    system.write("/mnt/pmem0/mine", "x")
    apply(step, system)
    assert system.list("/mnt/pmem0") == ["mine"]


def test_nothing_that_bootstrap_wrote_is_forgotten(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    (tmp_path / "run/systemd/system").mkdir(parents=True)  # it is booted
    for path in (repositories.BUNDLE + "/pip/x.whl", gpucheck.CHECKED, gpucheck.UNIT):
        system.write(path, "x")
    enabled = Path(system.path(gpucheck.ENABLED))
    enabled.parent.mkdir(parents=True)
    enabled.symlink_to("../" + gpucheck.UNIT_NAME)
    job = f"/var/lib/oeprov/jobs/{JOB}"
    system.write(job + "/job.json", "{}")
    wanted = desired("cpu", f"job/{JOB}")
    state = used(remains=observe(system, wanted).remains, namespaces=[], fstab=[], mounts=[], owned=[])
    plan = make_plan(state._replace(runtime=Runtime()), wanted)
    assert ids(plan) == [f"files-{JOB}", "remove-files"]
    for step in plan.steps:
        assert apply(step, system).changed
    assert sorted(path.name for path in tmp_path.rglob("*") if not path.is_dir()) == []
    assert system.list("/var/lib/oeprov") == [], "its own directory goes with the lease"


def test_an_empty_pmem_directory_is_removed(tmp_path: Path) -> None:
    system = System(str(tmp_path))
    (tmp_path / "pmem").mkdir()
    wanted = Desired(
        kind="local", pmem_mode="directory", pmem_directory="/pmem", remove=True, remove_jobs="/j"
    )
    [step] = make_plan(observe(system, wanted), wanted).steps
    assert apply(step, system).changed
    assert not (tmp_path / "pmem").exists()
    assert make_plan(observe(system, wanted), wanted).steps == []


def test_the_journal_knows_the_first_arguments_and_default(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", "run")
    journal.write("before", cluster="c", host="old", kernel="1", mode="")
    found = inventory(tmp_path, "re6p")
    for words, default in ((["quiet"], "'a b'"), (["quiet", "more"], "saved")):
        loader = Bootloader(defaults_file=f"GRUB_DEFAULT={default}\n")
        state = State(kernel=KernelState("1", cmdline=words), bootloader=loader)
        for host in ("one", "old"):
            history.write(journal, "c", {host: state}, {host: found.hosts["one"].kind})
    assert history.first(journal, "c") == {"one": (("quiet",), "a b"), "old": (None, None)}


def test_the_command_shows_and_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = inventory(tmp_path, "re6p")
    state = used(remains=Remains(jobs=[JobFiles(JOB, pools=["/mnt/pmem0/oeprov/x"])]))
    monkeypatch.setattr("provision.hosts.observe.observe", lambda seen: dict.fromkeys(seen.hosts, state))
    words = ["destroy", "-i", str(found.path), "--state-dir", str(tmp_path)]
    assert cli.run([*words, "--check", "--json"]) == 2
    [plan] = json.loads(capsys.readouterr().out.splitlines()[-1])["pending"]
    assert [step["id"] for step in plan["steps"]] == ["unmount-pmem0", "fstab-forget", "remove-files"]
    assert cli.run([*words, "--consent", "one:namespace0.0/n-1", "--yes"]) == 1
    assert "data would be lost; to agree, add: --consent one:pmem0/ext4/f-1" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115 - ends with the test
    assert cli.run(words) == 1
    assert "no terminal to ask at: add --yes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["bootstrap"], ["pmem-mode", "fsdax"], ["destroy"], ["bootstrap", "--check"]]
)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("one", "--consent one: write HOST:OBJECT, as the plan does; nothing was changed"),
        ("one:", "--consent one:: write HOST:OBJECT, as the plan does; nothing was changed"),
        ("onf:pmem0/ext4/f-1", "has no host onf, or --limit leaves it out; did you mean one?"),
    ],
)
def test_every_command_refuses_consent_that_names_no_object_of_a_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], wrong: str, said: str
) -> None:
    found = inventory(tmp_path, "re6p")
    words = [*command, "-i", str(found.path), "--state-dir", str(tmp_path), "--yes", "--consent", wrong]
    assert cli.run(words) == 1
    assert said in capsys.readouterr().err


def test_json_has_what_needs_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [JobFiles(f"{JOB}{number}", pools=[f"/p/{number}"]) for number in range(3)]
    state = used(remains=Remains(jobs=jobs))
    monkeypatch.setattr("provision.hosts.observe.observe", lambda seen: dict.fromkeys(seen.hosts, state))
    words = ["destroy", "-i", str(inventory(tmp_path, "re6p").path), "--state-dir", str(tmp_path), "--check"]
    cli.run([*words, "--json", "--consent", f"one:job/{JOB}0"])
    named = json.loads(capsys.readouterr().out)["consent"]
    assert {f"one:job/{JOB}1", f"one:job/{JOB}2"} <= set(named)
    assert f"one:job/{JOB}0" not in named


def test_a_running_job_of_another_state_directory_is_named_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = used(jobs=[JOB])
    monkeypatch.setattr("provision.hosts.observe.observe", lambda seen: dict.fromkeys(seen.hosts, state))
    words = ["-i", str(inventory(tmp_path, "re6p").path), "--state-dir", str(tmp_path)]
    cli.run(["destroy", *words, "--yes"])
    stop = f"oeprov stop {JOB}"
    theirs = f"{stop} --state-dir DIR, with that of the user who started it; {tmp_path} has no such job"
    assert theirs in capsys.readouterr().err
    (tmp_path / "jobs" / JOB).mkdir(parents=True)
    cli.run(["destroy", *words, "--yes"])
    said = capsys.readouterr().err
    assert stop in said
    assert "--state-dir DIR" not in said


def test_consent_that_names_nothing_is_said_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, state = inventory(tmp_path, "re6p"), used(remains=Remains(jobs=[JobFiles(JOB, pools=["/p/x"])]))
    bare = used(owned=[], mounts=[], fstab=[], runtime=Runtime("/opt/oeprov/venv"))
    monkeypatch.setattr("provision.hosts.observe.observe", lambda seen: dict.fromkeys(seen.hosts, state))
    words = ["destroy", "-i", str(found.path), "--state-dir", str(tmp_path), "--yes"]
    for wrong, said in (
        (
            "oen:job/x",
            f"--consent oen:job/x: {found.path} has no host oen, or --limit leaves it out; did you mean one",
        ),
        ("job/x", "--consent job/x: write HOST:OBJECT, as the plan does; nothing was changed"),
    ):
        assert cli.run([*words, "--consent", wrong]) == 1
        assert said in capsys.readouterr().err
    # What is there and what is kept for want of another name is no surprise; what is not there is.
    named = [f"one:job/{JOB}", "one:pmem0/ext4/f-1", "one:job/gone"]
    assert cli.run([*words, "--check", *(word for item in named for word in ("--consent", item))]) == 2
    said = capsys.readouterr().out
    assert said.count("was named, but") == 1
    assert "one:job/gone was named, but oeprov made no such object there, or it is gone already" in said
    monkeypatch.setattr("provision.hosts.observe.observe", lambda seen: dict.fromkeys(seen.hosts, bare))
    assert cli.run([*words, "--consent", "one:namespace0.0/n-1"]) == 0, "twice does no harm"
    said = capsys.readouterr().out
    assert "one:namespace0.0/n-1 was named, but" in said
    assert "nothing to do" in said


def test_a_job_of_this_state_directory_that_runs_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, state, job = inventory(tmp_path, "re6p"), used(), make_job(tmp_path)
    monkeypatch.setattr("provision.hosts.observe.observe", lambda seen: dict.fromkeys(seen.hosts, state))
    me = os.getpid()
    job.write_state(JobState(phase="running", supervisor_pid=me, supervisor_started=process.start_time(me)))
    assert cli.run(["destroy", "-i", str(found.path), "--state-dir", str(tmp_path), "--yes"]) == 1
    assert f"training job {job.id} is running on this cluster; stop it first" in capsys.readouterr().err


def test_removal_does_not_travel_with_jobs(tmp_path: Path) -> None:
    from provision.jobs.backends.ssh import connection, restored

    host = inventory(tmp_path, "re6p").hosts["one"]
    doomed = replace(host, removal=Removal((), "/j", None))
    assert not restored(json.loads(json.dumps(connection(doomed)))).desired().remove
    assert doomed.desired().remove


def test_only_the_user_that_oeprov_made_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    me = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(pwd, "getpwnam", lambda name: me)
    [*_, step] = make_plan(used(remains=Remains(user=True), owned=[]), desired("re6p")).steps
    assert step.action == "remove_user"
    assert not apply(step, System()).changed, "a person's account has another home"


def test_an_empty_directory_of_jobs_goes_with_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host where all jobs were stopped has no files of theirs."""
    system, said = System(str(tmp_path)), []
    monkeypatch.setattr(removal, "_has_user", lambda: True)
    monkeypatch.setattr(System, "check", lambda self, argv: said.append(argv))
    (tmp_path / "var/lib/oeprov/jobs").mkdir(parents=True)
    remains = Remains(user=True)
    [*_, step] = make_plan(used(remains=remains, runtime=Runtime(), owned=[]), desired("cpu")).steps
    assert apply(step, system).changed
    assert said == [["userdel", "oeprov"]]
    assert system.list("/var/lib/oeprov") == []


def test_an_environment_that_is_half_gone_is_still_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = tmp_path / "venv"
    (venv / "lib").mkdir(parents=True)
    (venv / STAMP).write_text('{"wheel": "", "made": true, "finished": true}')

    def stop(name: str, *, dir_fd: int) -> None:
        raise OSError(5, "Input/output error", name)

    [*_, step] = make_plan(
        used(remains=Remains(), runtime=Runtime("/venv", made=True)), desired("re6p")
    ).steps
    assert step.args["paths"] == ["/venv"]
    with monkeypatch.context() as broken:
        broken.setattr(os, "rmdir", stop)
        with pytest.raises(CommandError, match=r"venv.lib: Input/output error"):
            apply(step, System(str(tmp_path)))
    assert (venv / STAMP).exists()
    assert apply(step, System(str(tmp_path))).changed
    assert not venv.exists()
