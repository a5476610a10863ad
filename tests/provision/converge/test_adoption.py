"""``oeprov adopt`` without hosts: plans, refusals, routes, passwords and the script's functions."""

import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import paramiko
import pytest
import recorded
from ssh_server import serving

from provision.cluster.errors import ConvergeError, HostError, HostKeyUnknown, LoginRefused
from provision.cluster.inventory import FirstLogin, Host
from provision.converge import adoption_plan
from provision.hosts import carrier, fanout, first_login, host_keys, password_login, remote
from provision.hosts.first_login import Facts
from provision.hosts.passwords import BECOME, LOGIN, Password, PasswordRefused, Passwords
from provision.inventory.loader import load
from provision.node import packages
from provision.node.ansible_python import PROGRAM
from provision.node.state import OsInfo

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIE me@here"
DEBIAN = OsInfo(id="debian", version="12", family="debian", name="Debian 12", package_manager="apt")
ROCKY = OsInfo(id="rocky", version="8.10", family="rhel", name="Rocky 8", package_manager="dnf")
ROOT = Facts(0, "root", "ps-1", "m", "b", "works", "apt-get", DEBIAN, MappingProxyType({"python3": "3.11.2"}))
DEPLOY = ROOT._replace(uid=1000, user="deploy.er", sudo="sudo: a password is required")


@pytest.fixture(autouse=True)
def _no_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (LOGIN, BECOME, "SSH_AUTH_SOCK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    path = tmp_path / "inventory.yml"
    path.write_text(
        "all:\n  hosts:\n    ps-1: {ansible_host: 192.0.2.1, oeprov_kind: cpu, ansible_become: true, "
        "runtime_extra: none}\n  children:\n    workers: {hosts: {ps-1: }}\n"
        "    parameter_servers: {hosts: {ps-1: }}\n"
    )
    return load(path).hosts["ps-1"]


def steps(host: Host, facts: Facts, public_key: str = "", host_key: str = "") -> list[str]:
    found = adoption_plan.plan(
        host, facts, host_key=host_key, record_in="/home/me/.ssh/known_hosts", public_key=public_key
    )
    return [step.id for step in found.steps]


def test_a_host_gets_only_what_it_lacks(host: Host) -> None:
    assert steps(host, ROOT) == []
    assert steps(host, ROOT, KEY, "ED25519 SHA256:x") == ["host-key", "login-key"]
    assert steps(host, DEPLOY, KEY) == ["login-key", "sudoers"]
    assert steps(host, DEPLOY._replace(sudo="missing")) == ["sudo", "sudoers"]
    assert steps(host, ROOT._replace(sudo="missing")) == ["sudo"], "ansible_become uses it for root too"
    assert steps(replace(host, become=False), ROOT._replace(sudo="missing")) == []
    assert steps(host, DEPLOY._replace(sudo="works")) == []


def test_the_line_of_sudoers_is_shown_and_its_file_has_a_name_that_sudo_reads(host: Host) -> None:
    found = adoption_plan.plan(host, DEPLOY, host_key="", record_in="", public_key="")
    assert found.steps[0].what == (
        "write /etc/sudoers.d/oeprov-deploy_er: Defaults:deploy.er !requiretty; "
        "deploy.er ALL=(root) NOPASSWD: ALL"
    )
    odd = adoption_plan.plan(
        host, DEPLOY._replace(user="CORP\\deploy"), host_key="", record_in="", public_key=""
    )
    assert odd.problems[0].startswith("the name CORP\\deploy cannot be written into sudoers safely")
    bare = DEPLOY._replace(sudo="missing", manager="")
    assert (
        "neither apt-get, dnf nor yum"
        in adoption_plan.plan(host, bare, host_key="", record_in="", public_key="").problems[0]
    )
    noted = adoption_plan.plan(replace(host, become=False), DEPLOY, host_key="", record_in="", public_key="")
    assert noted.notes == ["set ansible_become: true: deploy.er is not root, and other commands need root"]


def test_pythons_are_installed_where_there_is_none_or_an_old_one(host: Host) -> None:
    none: MappingProxyType[str, str] = MappingProxyType({})
    old = MappingProxyType({"python3": "3.6.8"})
    both = MappingProxyType({"python3": "3.6.8", PROGRAM: "3.11.9"})
    assert steps(host, ROOT._replace(pythons=none)) == ["first-python"]
    assert steps(host, ROOT._replace(os=ROCKY, pythons=none)) == ["first-python", "python"]
    assert steps(host, ROOT._replace(os=ROCKY, pythons=old)) == ["python"]
    assert steps(host, ROOT._replace(os=ROCKY, pythons=both)) == []
    two = ROOT._replace(pythons=MappingProxyType({"python3": "2.7.18"}))
    assert steps(host, two) == ["first-python"]
    # As another user without ansible_become, nothing can be installed.
    assert steps(replace(host, become=False), DEPLOY._replace(sudo="works", pythons=none)) == []
    broken = ROOT._replace(pythons=none, broken="/usr/bin/python3 -> nowhere")
    found = adoption_plan.plan(host, broken, host_key="", record_in="", public_key=KEY)
    assert found.problems == [
        "a Python there is a broken link (/usr/bin/python3 -> nowhere): remove or repair it"
    ]
    named = adoption_plan.plan(
        replace(host, python="/opt/python3"), ROOT, host_key="", record_in="", public_key=""
    )
    assert named.notes[0].startswith("there is no /opt/python3 yet: correct ansible_python_interpreter")


def test_one_machine_under_two_names_and_the_controller_are_refused() -> None:
    other = ROOT._replace(hostname="ps-2")
    found = adoption_plan.twins({"a": ROOT, "b": ROOT, "c": other}, ("m", "b", "controller"))
    assert found == {
        "b": "is the same machine as a (ps-1, machine-id m): give it one name and put that in all its groups"
    }
    found = adoption_plan.twins({"a": ROOT}, ROOT.identity)
    assert found == {"a": "is this machine, the controller: set ansible_connection: local for it"}
    assert (
        adoption_plan.twins({"a": ROOT._replace(machine=""), "b": ROOT._replace(machine="")}, ROOT.identity)
        == {}
    )
    assert list(adoption_plan.shared_keys({"a": "x", "b": "y", "c": "x"})) == ["c"]


SSH_G = """\
user me
hostname 192.0.2.1
port 2222
hashknownhosts no
identityfile ~/.ssh/one
identityfile /keys/a key
globalknownhostsfile /etc/ssh/ssh_known_hosts
userknownhostsfile /home/me/known hosts /home/me/second
"""


def test_the_route_is_what_ssh_would_take() -> None:
    route = host_keys.parse_route("ps-1", SSH_G)
    assert (route.where, route.user, route.known_as) == ("192.0.2.1 port 2222", "me", "[192.0.2.1]:2222")
    assert route.record_in == Path("/home/me/known hosts")
    assert [str(path) for path in route.files[1:]] == ["/home/me/second", "/etc/ssh/ssh_known_hosts"]
    assert route.identities == (Path.home() / ".ssh/one", Path("/keys/a key"))
    assert route.proxy == ()
    jump = host_keys.parse_route("ps-1", SSH_G + "proxyjump you@gate:2200,inner\n").proxy
    assert jump[0] == "ssh"
    assert jump[-6:] == ("-J", "you@gate:2200", "-W", "[192.0.2.1]:2222", "--", "ssh://inner")
    command = host_keys.parse_route("ps-1", SSH_G + "proxycommand nc %h %p %%\n").proxy
    assert command == ("sh", "-c", "exec nc 192.0.2.1 2222 %")
    nowhere = SSH_G.replace("/home/me/known hosts /home/me/second", "/dev/null")
    assert host_keys.parse_route("ps-1", nowhere).record_in is None
    with pytest.raises(HostError, match="characters that ssh takes for others"):
        host_keys.parse_route("ps-1", SSH_G.replace("hostname 192.0.2.1", "hostname $(reboot)"))


@pytest.mark.parametrize(
    ("said", "kind", "methods"),
    [
        ("root@192.0.2.1: Permission denied (publickey,password).", LoginRefused, ("publickey", "password")),
        (
            "root@real.example: Permission denied (publickey,password).",
            LoginRefused,
            ("publickey", "password"),
        ),
        ("Permission denied (publickey).", LoginRefused, ("publickey",)),
        ("you@gate: Permission denied (publickey,password).", HostError, ()),
        ("Received disconnect from 192.0.2.1: Too many authentication failures", HostError, ()),
        ("No ED25519 host key is known.\nHost key verification failed.", HostKeyUnknown, ()),
        ("REMOTE HOST IDENTIFICATION HAS CHANGED\nHost key verification failed.", HostError, ()),
    ],
)
def test_who_refused_and_why(host: Host, said: str, kind: type[HostError], methods: tuple[str, ...]) -> None:
    """A password is for the host alone, also under the HostName of ssh's configuration."""
    found = remote.failure(replace(host, ssh_arguments=("-oHostName=real.example",)), said, 10)
    assert type(found) is kind
    if isinstance(found, LoginRefused):
        assert found.methods == methods
        assert found.takes_passwords == ("password" in methods) == ("oeprov adopt" in found.reason)


def test_a_host_key_is_recorded_once_as_ssh_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "new" / "known_hosts"
    route = host_keys.parse_route("ps-1", SSH_G.replace("/home/me/known hosts /home/me/second", str(file)))
    key, other = paramiko.ECDSAKey.generate(), paramiko.ECDSAKey.generate()
    host_keys.record(route, key)
    host_keys.record(route, key)
    assert file.read_text() == f"[192.0.2.1]:2222 {key.get_name()} {key.get_base64()}\n"
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text(file.read_text().rstrip())
    hashed = replace(route, hashed=True, known_as="192.0.2.9")
    host_keys.record(hashed, other)
    assert "192.0.2.9" not in file.read_text()
    assert host_keys.known_keys(hashed) == {host_keys.entry(other)}
    assert host_keys.known_keys(route) == {host_keys.entry(key)}
    file.write_text(f"{file.read_text()}@revoked * {key.get_name()} {key.get_base64()}\n")
    assert host_keys.known_keys(route) == set()


def test_a_password_is_not_tried_again_once_it_was_refused(host: Host) -> None:
    tried = []

    def refuse(value: str) -> None:
        tried.append(value)
        raise PasswordRefused("ps-1", "no")

    password = Password("OEPROV_PASSWORD", "root", "secret")
    with pytest.raises(PasswordRefused):
        password.attempt(host, refuse)
    with pytest.raises(HostError, match=r"was not asked: ps-1 refused the password of root from OEPROV_PASS"):
        password.attempt(host, refuse)
    assert tried == ["secret"]
    assert "secret" not in repr(password)


def test_a_password_is_tried_on_one_host_first_and_then_on_all_at_once(host: Host) -> None:
    password = Password("OEPROV_PASSWORD", "root", "secret")
    hosts = {f"h{number}": replace(host, name=f"h{number}") for number in range(4)}
    first: list[str] = []
    together = threading.Barrier(3)

    def use(name: str) -> None:
        if not first:
            first.append(name)
            return
        assert password.is_proven
        together.wait(timeout=30)
        raise PasswordRefused(name, "no")

    found = fanout.on_hosts(hosts, lambda host, _: password.attempt(host, lambda _: use(host.name)))
    assert [str(error) for error in found.values() if error] == [
        f"{name}: no" for name in hosts if name != first[0]
    ]


def test_sources_of_passwords(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    passwords = Passwords()
    monkeypatch.setenv(LOGIN, "from the environment")
    login = passwords.login(host, "root")
    assert (login.source, login.value) == (LOGIN, "from the environment")
    assert passwords.login(host, "root") is login, "one password, whose refusal counts for all hosts"
    own = replace(host, first_login=FirstLogin("own", "", "sudo"))
    assert passwords.login(own, "root").value == "own"
    assert passwords.become(own, "deploy", login).value == "from the environment", "sudo asks for the user's"
    assert passwords.become(own, "deploy", None).value == "own"
    assert passwords.become(replace(own, first_login=FirstLogin("", "more")), "deploy", login).value == "more"
    su = replace(host, first_login=FirstLogin("own", "", "su"))
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        with pytest.raises(
            ConvergeError, match=rf"password of root for su: no terminal to ask at; set {BECOME}"
        ):
            passwords.become(su, "deploy", login)
    monkeypatch.setenv(BECOME, "two\nlines")
    with pytest.raises(ConvergeError, match="has more than one line"):
        passwords.become(su, "deploy", login)


def test_a_server_without_passwords_says_what_it_takes(host: Host, tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        text = SSH_G.replace("192.0.2.1", "127.0.0.1").replace("2222", str(server.port))
        route = host_keys.parse_route("ps-1", text)
        with password_login.Connection(host, route) as connection:
            assert host_keys.entry(connection.key) == host_keys.entry(server.host_key)
            with pytest.raises(HostError, match=r"lets nobody in with a password \(it takes publickey\)"):
                connection.log_in(Password("the prompt", "me", "secret"))
    with pytest.raises(HostError, match=r"the connection to 127.0.0.1 port .* failed"):
        password_login.Connection(host, route)
    jump = replace(route, proxy=("sh", "-c", "echo 'gate: no route' >&2; exit 255"))
    with pytest.raises(
        HostError, match=r"cannot be reached through .*: gate: no route; the way there must work"
    ):
        password_login.Connection(host, jump)


class Here:
    """A session on this machine, with stand-ins for programs; remembers command lines."""

    def __init__(self, programs: recorded.Programs) -> None:
        self.programs = programs
        self.commands: list[str] = []

    def run(self, command: str, given: str, timeout: int) -> tuple[int, str, str]:
        self.commands.append(command)
        done = subprocess.run(
            ["sh", "-c", command],
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "PATH": f"{self.programs.directory}:{os.environ['PATH']}"},
        )
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(recorded.Programs(tmp_path / "programs"))


SUDO = """
word = sys.stdin.readline().rstrip("\\n")
if word != "right":
    sys.exit("Sorry, try again.\\nsudo: no password was provided\\nsudo: 1 incorrect password attempt")
sys.exit(subprocess.run(sys.argv[sys.argv.index("sh"):]).returncode)
"""


def test_the_password_for_sudo_goes_over_standard_input_only(host: Host, here: Here, tmp_path: Path) -> None:
    here.programs.add("sudo", SUDO)
    right, wrong = Password("the prompt", "deploy", "right"), Password("the prompt", "deploy", "wrong one")
    first_login.check_root(host, here, DEPLOY, right)
    made = tmp_path / "made"
    first_login.call_as_root(host, here, DEPLOY, right, "touch", str(made))
    assert made.exists()
    with pytest.raises(PasswordRefused, match="sudo refused the password of deploy from the prompt"):
        first_login.check_root(host, here, DEPLOY, wrong)
    for words in [*here.programs.calls(), here.commands]:
        assert not {"right", "wrong one"} & {piece.strip("'\"") for word in words for piece in word.split()}


APT = """
from pathlib import Path
left = Path(sys.argv[0]).with_name("left")
number = int(left.read_text())
left.write_text(str(number - 1))
if number > 0:
    print("E: Could not get lock /var/lib/apt/lists/lock. It is held by process 812 (unattended-upgr)",
          file=sys.stderr)
    sys.exit(100)
"""


@pytest.mark.parametrize(("locked", "patience", "fails"), [(1, 60, False), (10**6, 0, True)])
def test_a_locked_apt_is_waited_for_within_bounds_and_its_holder_named(
    host: Host, here: Here, locked: int, patience: int, fails: bool
) -> None:
    here.programs.add("apt-get", APT)
    (here.programs.directory / "left").write_text(str(locked))
    call: Callable[[], None] = lambda: first_login.call_as_root(  # noqa: E731
        host, here, ROOT, None, "install_sudo", "apt-get", str(patience)
    )
    if fails:
        with pytest.raises(HostError, match=r"more than 0 s by process 812 \(unattended-upgr\): wait for"):
            call()
    else:
        call()
        assert [words[1] for words in here.programs.calls("apt-get")] == ["update", "update", "install"]


def test_the_first_python_waits_for_apt_too(host: Host, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "UPDATE_PAUSE", 0.0)
    monkeypatch.setattr(remote, "run", lambda host, line, given, *_, **__: here.run(line, given, 60))
    here.programs.add("apt-get", APT)
    here.programs.add("sudo", 'sys.exit(subprocess.run(sys.argv[sys.argv.index("sh"):]).returncode)')
    here.programs.add("python3")
    step = adoption_plan.python_part(host, ROOT._replace(pythons=MappingProxyType({}))).before[0]
    (here.programs.directory / "left").write_text("2")
    assert [item.ok for item in carrier.carry_out({"ps-1": host}, {"ps-1": step}, {}, lambda *_: None)] == [
        True
    ]
    assert [words[-1] for words in here.programs.calls("apt-get")] == [*["update"] * 3, "python3"]
    (here.programs.directory / "left").write_text("1000000")
    (found,) = carrier.carry_out({"ps-1": host}, {"ps-1": step}, {}, lambda *_: None)
    assert "apt-get is locked by process 812 (unattended-upgr): wait for it to end" in found.message
    assert (
        len(here.programs.calls("apt-get")) == 4 + packages.UPDATE_TRIES + 1
    )  # and an installation from the cached index


DNF = APT.replace(
    "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 812 (unattended-upgr)",
    "Error: metadata already locked by 812",
).replace("sys.exit(100)", "sys.exit(200)")


def test_the_first_python_waits_for_dnf(host: Host, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "UPDATE_PAUSE", 0.0)
    monkeypatch.setattr(remote, "run", lambda host, line, given, *_, **__: here.run(line, given, 60))
    here.programs.add("dnf", DNF)
    here.programs.add("python3")
    host = replace(host, become=False)
    step = adoption_plan.python_part(host, ROOT._replace(os=ROCKY, pythons=MappingProxyType({}))).before[0]
    (here.programs.directory / "left").write_text("2")
    (found,) = carrier.carry_out({"ps-1": host}, {"ps-1": step}, {}, lambda *_: None)
    assert (found.ok, len(here.programs.calls("dnf"))) == (True, 3)
    (here.programs.directory / "left").write_text("1000000")
    (found,) = carrier.carry_out({"ps-1": host}, {"ps-1": step}, {}, lambda *_: None)
    assert found.message == "dnf is locked by process 812: wait for it to end, and run this again"
    assert len(here.programs.calls("dnf")) == 3 + packages.UPDATE_TRIES


def test_a_failing_apt_is_not_tried_again(host: Host, here: Here) -> None:
    here.programs.add("apt-get", "sys.exit('E: Unable to locate package sudo')")
    with pytest.raises(HostError, match="apt-get: E: Unable to locate package sudo"):
        first_login.call_as_root(host, here, ROOT, None, "install_sudo", "apt-get", "60")
    assert len(here.programs.calls("apt-get")) == 1


def test_a_key_is_added_once_and_other_keys_stay(host: Host, here: Here, tmp_path: Path) -> None:
    home = tmp_path / "a home"
    (home / ".ssh").mkdir(parents=True)
    file = home / ".ssh" / "authorized_keys"
    file.write_text("ssh-rsa AAAA old")  # its last line has no end
    os.environ["HOME"], before = str(home), os.environ.get("HOME", "")
    try:
        for _ in range(2):
            first_login.call_as_user(host, here, "install_key", KEY)
        assert file.read_text() == f"ssh-rsa AAAA old\n{KEY}\n"
        os.environ["HOME"] = str(tmp_path / "none")
        with pytest.raises(HostError, match=r"the home directory .*none is missing: make it"):
            first_login.call_as_user(host, here, "install_key", KEY)
    finally:
        os.environ["HOME"] = before


def test_facts_of_this_machine(host: Host, here: Here) -> None:
    found = first_login.observe(host, here)
    assert (found.uid, found.hostname) == (os.geteuid(), os.uname().nodename)
    assert found.os.id
    assert found.pythons.get("python3", "3").startswith("3")
