#!/usr/bin/python3 -IS
"""Stands in for systemctl and journalctl on throw-away hosts: starts the ExecStart of a unit as a process.

Only what provision/node/systemd.py and provision/jobs/logview.py ask for. State lies in /run/standin,
which a boot empties. Copied there as /usr/bin/systemctl and /usr/bin/journalctl.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

UNITS = "/etc/systemd/system"
RUN = "/run/standin"
IDLE = {"active": "inactive", "pid": 0, "code": 0, "status": 0, "restarts": 0, "result": "success"}


def path(name, kind):
    return os.path.join(RUN, name + "." + kind)


def state(name):
    try:
        with open(path(name, "json")) as file:
            return json.load(file)
    except OSError:
        return dict(IDLE)


def write(name, **changes):
    with open(path(name, "new"), "w") as file:
        json.dump({**state(name), **changes}, file)
    os.rename(path(name, "new"), path(name, "json"))


def wanted(name):
    """What an enabled unit has: through it the manager keeps the unit loaded."""
    return os.path.join(UNITS, "multi-user.target.wants", name)


def say(name, text):
    with open(path(name, "manager"), "a") as file:
        file.write(f"{name}: {text}\n")


def settings(name):
    found = {}
    with open(os.path.join(UNITS, name)) as file:
        for line in file:
            if "=" in line and not line.startswith("#"):
                key, value = line.rstrip("\n").split("=", 1)
                found.setdefault(key, []).append(value)
    return found


def command(unit):
    (text,) = unit["ExecStart"]
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(text)]


def environment(unit):
    pairs = [word for line in unit.get("Environment", []) for word in shlex.split(line)]
    return dict(os.environ, **dict(pair.split("=", 1) for pair in pairs))


def run(name):
    """What systemd does for one unit; in the background."""
    unit = settings(name)
    (user,) = unit["User"]
    succeed = [0] + [int(code) for code in unit.get("SuccessExitStatus", [])]
    for restarts in range(4):
        with open(path(name, "log"), "ab") as log:
            process = subprocess.Popen(
                command(unit),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=user,
                group=user,
                extra_groups=[],
                cwd=unit["WorkingDirectory"][0],
                env=environment(unit),
                umask=int(unit["UMask"][0], 8),
                start_new_session=True,
            )
        write(name, active="active", pid=process.pid, restarts=restarts)
        code = process.wait()
        how = {"code": 2, "status": -code} if code < 0 else {"code": 1, "status": code}
        asked = os.path.exists(path(name, "asked"))
        failed = code not in succeed and not (asked and code == -signal.SIGTERM)
        result = ("signal" if code < 0 else "exit-code") if failed else "success"
        if failed:
            words = "code=killed, status={}/KILL" if code < 0 else "code=exited, status={}/FAILURE"
            say(name, "Main process exited, " + words.format(abs(code)))
        write(name, pid=0, result=result, active="failed" if failed else "inactive", **how)
        if not failed or asked or unit.get("Restart") != ["on-failure"] or os.path.exists("/run/no-restart"):
            return
        write(name, active="activating")
        time.sleep(0.2)
    write(name, active="failed", result="start-limit-hit")


def start(name):
    if state(name)["active"] in ("active", "activating"):
        return
    if os.path.exists(path(name, "asked")):
        os.unlink(path(name, "asked"))
    write(name, **dict(IDLE, active="activating"))
    with open(path(name, "manager"), "a") as log:
        argv = [sys.executable, "-IS", __file__, "--run", name]
        null = subprocess.DEVNULL
        subprocess.Popen(argv, stdin=null, stdout=null, stderr=log, start_new_session=True)
    while state(name)["active"] == "activating":
        time.sleep(0.02)


def stop(name):
    open(path(name, "asked"), "w").close()
    pid = state(name)["pid"]
    if pid:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            write(name, active="inactive", pid=0)
    while state(name)["active"] in ("active", "activating", "deactivating"):
        time.sleep(0.02)


def show(name):
    found = state(name)
    if found["active"] == "inactive" and not os.path.lexists(wanted(name)):
        found = IDLE  # systemd unloads such a unit, and with it the exit status
    print(f"Id={name}")
    print("ActiveState={active}\nSubState=x\nMainPID={pid}\nResult={result}".format(**found))
    print("ExecMainCode={code}\nExecMainStatus={status}\nNRestarts={restarts}\n".format(**found))


def systemctl(words):
    verb, *rest = words
    names = [word for word in rest if word.endswith(".service")]
    if verb == "--run":
        run(names[0])
    elif verb in ("start", "stop", "show"):
        for name in names:
            {"start": start, "stop": stop, "show": show}[verb](name)
    elif verb == "kill":
        (number,) = [word.split("=")[1] for word in rest if word.startswith("--signal=")]
        os.kill(state(names[0])["pid"], getattr(signal, number))
    elif verb == "reset-failed":
        for name in names:
            if state(name)["active"] == "failed":
                write(name, active="inactive")
    elif verb in ("enable", "disable"):
        for name in names:
            link = wanted(name)
            os.makedirs(os.path.dirname(link), exist_ok=True)
            if verb == "enable":
                assert "WantedBy" in settings(name)
                if not os.path.lexists(link):
                    os.symlink(os.path.join(UNITS, name), link)
            elif os.path.lexists(link):
                os.unlink(link)
    elif verb == "boot":  # not of the real one: what a boot does
        for entry in os.listdir(RUN):
            os.unlink(os.path.join(RUN, entry))
        for name in sorted(os.listdir(os.path.join(UNITS, "multi-user.target.wants"))):
            if name.startswith("oeprov-"):
                start(name)
    elif verb != "daemon-reload":
        sys.exit("stand-in: " + " ".join(words))


def journalctl(words):
    lines, name, manager, follow = "10", "", True, False
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in ("-n", "-u", "-o"):
            word = {"-n": "--lines=", "-u": "--unit=", "-o": "--output="}[word] + rest.pop(0)
        key, _, value = word.partition("=")
        if key == "--lines":
            lines = value
        elif key == "--unit":
            name = value
        elif key == "_SYSTEMD_UNIT":
            name, manager = value, False
        elif key == "--follow":
            follow = True
    files = [path(name, "log")] + ([path(name, "manager")] if manager else [])
    files = [file for file in files if os.path.exists(file)]
    if files:
        os.execvp("tail", ["tail", "-q", "-n", lines] + (["-F"] if follow else []) + files)  # noqa: S606


os.makedirs(RUN, exist_ok=True)
{"systemctl": systemctl, "journalctl": journalctl}[os.path.basename(sys.argv[0])](sys.argv[1:])
