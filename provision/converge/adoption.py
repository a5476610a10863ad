"""The first login to hosts (``oeprov adopt``): see, plan, show, ask, apply, see again.

A host that takes our key is seen by OpenSSH, as by all other commands. Only one that does not gets a
password, by Fabric; afterwards OpenSSH must get in.
"""

from __future__ import annotations

import contextlib
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.markup import escape

from provision.artifacts.bundle import Bundle
from provision.cluster.errors import HostError, HostKeyUnknown, LoginRefused
from provision.cluster.inventory import Host, Inventory
from provision.converge import adoption_plan
from provision.converge.changes import How
from provision.hosts import carrier, fanout, first_login, host_keys, passwords, remote
from provision.hosts.first_login import Facts, KeySession, Session
from provision.hosts.host_keys import Route
from provision.hosts.journal import Journal, cluster_lock, private_files
from provision.hosts.passwords import Password, PasswordRefused, no_passwords
from provision.node.ansible_python import CARRIED
from provision.node.state import State, encode
from provision.node.step import Plan, Step

if TYPE_CHECKING:  # slow to import
    import paramiko

_TRIES = 3  # of a password that is typed
_RECORDING = threading.Lock()  # one host key after the other
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Trust:
    """Which unknown host keys are accepted: all, those of a file like known_hosts, or by a prompt."""

    accept_new: bool = False
    file: Path | None = None


@dataclass
class _Way:
    """How a host is reached now, and what is known of it."""

    host: Host
    new_key: paramiko.PKey | None = None  # its host key, if known_hosts lacks it
    route: Route | None = None
    refused: LoginRefused | None = None  # our keys
    login: Password | None = None  # set: by password, with Fabric
    standing: Password | None = None  # set: by password for good, with OpenSSH
    become: Password | None = None
    public_key: str = ""
    facts: Facts | None = None
    extra: tuple[str, ...] = field(default=())  # options for ssh, which come first

    @property
    def ssh_host(self) -> Host:
        """The host as OpenSSH must be told to reach it: it never records a key by itself."""
        strict = ("-oStrictHostKeyChecking=yes", *self.extra)
        return replace(self.host, ssh_arguments=(*strict, *self.host.ssh_arguments))

    @property
    def final_host(self) -> Host:
        """The host as all other commands reach it, except where ssh is told to record no host keys."""
        return self.ssh_host if self.route is not None and self.route.record_in is None else self.host


def adopt(inventory: Inventory, how: How, *, trust: Trust, bundle: Bundle | None = None) -> int:
    """Set up logins by key and sudo without a password.

    With a bundle, packages come from there. Returns 0 if all hosts have them now, 1 if not; with ``check`` 2
    if steps are pending.
    """
    if bundle is not None:
        inventory = bundle.used_by(inventory, how.state_dir)
    with contextlib.ExitStack() as held:
        place = None
        if not how.check:  # what a killed run leaves goes with the next lock
            held.enter_context(cluster_lock(how.state_dir, inventory.cluster))
            place = private_files(how.state_dir, inventory.cluster)
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = held.enter_context(tempfile.TemporaryDirectory(prefix="oeprov-", dir=place))
        return _Adoption(inventory, how, trust, bundle, Path(scratch)).run()


def _own_identity() -> tuple[str, str, str]:
    """The controller's ``Facts.identity``."""

    def read(path: str) -> str:
        try:
            return Path(path).read_text().strip()
        except OSError:
            return ""

    return read("/etc/machine-id"), read("/proc/sys/kernel/random/boot_id"), platform.node()


class _Adoption:
    """One run of ``oeprov adopt``."""

    def __init__(
        self, inventory: Inventory, how: How, trust: Trust, bundle: Bundle | None, scratch: Path
    ) -> None:
        self.inventory = inventory
        self.how = how
        self.screen = how.screen
        self.trust = trust
        self.bundle = bundle
        self.scratch = scratch  # for host keys that are not recorded yet
        self.passwords = passwords.SHARED
        run = f"adopt-{datetime.now():%Y%m%d-%H%M%S}"
        self.journal = Journal(how.state_dir / "journal.jsonl", run, inventory.cluster)
        self.lost: dict[str, HostError] = {}
        self.done: list[dict[str, Any]] = []

    def run(self) -> int:
        begun = time.monotonic()
        local = [host.name for host in self.inventory.hosts.values() if host.is_here]
        for name in local:
            self.screen.say(f"[dim]note[/]     {name}: is this machine: nothing to set up")
        hosts = [host for host in self.inventory.hosts.values() if host.name not in local]
        with self._status("logging in"):
            ways = self._see(hosts)
        plans = {name: self._plan(way) for name, way in ways.items()}
        problems = {name: plan.problems[0] for name, plan in plans.items() if plan.problems}
        self._refuse({name: f"{problem}; nothing was changed" for name, problem in problems.items()})
        plans = {name: plan for name, plan in plans.items() if not plan.problems}
        self.screen.show_plan(plans.values())
        self._show_lost()
        pending = {name: plan for name, plan in plans.items() if plan.steps}
        if not self.how.check and pending:
            if not self.how.has_consent():
                self.screen.say("nothing was changed")
                return 1
            self._apply(pending, ways)
        return self._report(plans, pending, begun)

    # See

    def _see(self, hosts: list[Host]) -> dict[str, _Way]:
        """Log in to each host and observe it; hosts that failed are in ``lost``."""
        ways = {host.name: _Way(host) for host in hosts}
        for way in ways.values():
            if way.host.login == "password":
                way.standing = self._ask(partial(self.passwords.login, way.host, remote.user(way.host)))
        unknown = self._try_keys(ways)
        if unknown:
            self._look_up_keys(unknown)
            accepted = self._accept({name: way for name, way in unknown.items() if name not in self.lost})
            self._try_keys(accepted)
        asked = {name: way for name, way in self._left(ways).items() if way.refused}
        self._on_all(asked, self._prepare_login)
        asked = self._left(asked)
        self._log_in(asked)
        seen = {name: way.facts for name, way in self._left(ways).items() if way.facts is not None}
        self._refuse(adoption_plan.twins(seen, _own_identity()))
        weak = {name: way for name, way in self._left(ways).items() if way.facts and not way.facts.has_root}
        for way in weak.values():
            user = way.facts.user if way.facts else ""
            login = way.login or way.standing
            way.become = self._ask(partial(self.passwords.become, way.host, user, login))
        self._on_all(weak, self._check_root)
        return self._left(ways)

    def _log_in(self, ways: Mapping[str, _Way]) -> None:
        """Observe hosts by password; one that was typed is asked for again if the first host refused it."""
        for number in range(_TRIES):
            for way in ways.values():
                assert way.route is not None  # noqa: S101 - _prepare_login has set it
                way.login = self._ask(partial(self.passwords.login, way.host, way.route.user))
            self._on_all(ways, self._observe_by_password)
            ways = {name: way for name, way in ways.items() if way.login and way.login.is_mistyped}
            if not ways or number + 1 == _TRIES:
                return
            for name, way in ways.items():
                error = self.lost.pop(name)
                if isinstance(error, PasswordRefused):
                    self.screen.say(f"[red]✗[/] {escape(str(error))}")
                self.passwords.forget(way.login)

    def _left(self, ways: Mapping[str, _Way]) -> dict[str, _Way]:
        return {name: way for name, way in ways.items() if name not in self.lost}

    def _try_keys(self, ways: Mapping[str, _Way]) -> dict[str, _Way]:
        """Observe hosts with our keys; returns those whose host key is unknown."""
        unknown: dict[str, _Way] = {}

        def one(way: _Way) -> None:
            way.refused = None
            try:
                way.facts = first_login.observe(way.host, KeySession(way.ssh_host))
            except LoginRefused as error:
                if "publickey" not in error.methods and error.takes_passwords:
                    raise
                if not error.takes_passwords:
                    where = f"{way.host.address} port {way.host.port}"
                    raise HostError(way.host.name, no_passwords(where, ", ".join(error.methods))) from None
                way.refused = error
            except HostKeyUnknown:
                if way.new_key is not None:
                    raise
                unknown[way.host.name] = way

        self._on_all(ways, one)
        return {name: way for name, way in ways.items() if name in unknown}  # in the inventory's order

    def _look_up_keys(self, ways: Mapping[str, _Way]) -> None:
        """Ask hosts for their keys, and compare them with the file of known ones."""
        from provision.hosts.password_login import Connection, HostKeyRefused  # slow to import

        def one(way: _Way) -> None:
            way.route = host_keys.find_route(way.host)
            names = (way.host.name, way.host.address)
            file = self.trust.file
            wanted = host_keys.known_keys(way.route, file, names) if file else set()
            if file and not wanted:
                raise HostError(
                    way.host.name,
                    f"{file} has no key of {way.route.known_as}; add it there, or check the key yourself "
                    "and use --accept-new",
                )
            try:
                with Connection(way.host, way.route, wanted if file else None) as connection:
                    way.new_key = connection.key
            except HostKeyRefused as error:
                raise HostError(
                    way.host.name,
                    f"{way.route.where} has another host key ({error.found}) than {file} says: another "
                    "machine answers there, or it was reinstalled; find out before you go on",
                ) from None

        self._on_all(ways, one)
        keys = {
            name: host_keys.fingerprint(way.new_key)
            for name, way in self._left(ways).items()
            if way.new_key is not None
        }
        self._refuse(adoption_plan.shared_keys(keys))

    def _accept(self, ways: dict[str, _Way]) -> dict[str, _Way]:
        """The hosts whose new keys the user accepts; ssh then knows them for this run."""
        if not ways:
            return {}
        self.screen.say("Host keys that ssh does not know yet:")
        for name, way in ways.items():
            if way.route is not None and way.new_key is not None:
                found = host_keys.fingerprint(way.new_key)
                self.screen.say(f"  {escape(name)} ({way.route.where}): {found}")
        if not self.trust.accept_new and self.trust.file is None:
            if not self.screen.can_ask:
                self._refuse(
                    dict.fromkeys(
                        ways,
                        "has a host key that is not in known_hosts, and there is no terminal to ask at: add "
                        "--known-hosts FILE or, if you trust the network, --accept-new",
                    )
                )
                return {}
            if not self._ask(partial(self.screen.confirm, "Are these the keys of your hosts?")):
                self._refuse(dict.fromkeys(ways, "its host key was not accepted; nothing was changed there"))
                return {}
        for number, way in enumerate(ways.values()):
            if way.route is not None and way.new_key is not None:
                file = self.scratch / f"known_hosts-{number}"
                file.write_text(host_keys.line_of(way.route, way.new_key))
                way.extra = (f'-oUserKnownHostsFile="{file}"', "-oUpdateHostKeys=no")
        return ways

    def _prepare_login(self, way: _Way) -> None:
        """What a login by password needs; fails before a password is asked for."""
        way.route = way.route or host_keys.find_route(way.host)
        way.public_key = host_keys.public_key(way.host, way.route)

    @contextlib.contextmanager
    def _session(self, way: _Way) -> Iterator[Session]:
        if way.login is None:
            yield KeySession(way.ssh_host)
            return
        assert way.route is not None  # noqa: S101 - _prepare_login has set it
        known = host_keys.known_keys(way.route)
        if way.new_key is not None:
            known = {host_keys.entry(way.new_key)}
        from provision.hosts.password_login import Connection  # slow to import

        with Connection(way.host, way.route, known) as connection:
            connection.log_in(way.login)
            yield connection

    def _observe_by_password(self, way: _Way) -> None:
        with self._session(way) as session:
            way.facts = first_login.observe(way.host, session)

    def _check_root(self, way: _Way) -> None:
        """Become root once, before anything is changed."""
        assert way.facts is not None  # noqa: S101 - it was seen
        assert way.become is not None  # noqa: S101 - it was asked for
        with self._session(way) as session:
            first_login.check_root(way.host, session, way.facts, way.become)

    # Plan

    def _plan(self, way: _Way) -> Plan:
        assert way.facts is not None  # noqa: S101 - it was seen
        record_in = way.route.record_in if way.route is not None and way.new_key is not None else None
        found = adoption_plan.plan(
            way.host,
            way.facts,
            host_key=host_keys.fingerprint(way.new_key) if way.new_key is not None else "",
            record_in=str(record_in or ""),
            public_key=way.public_key,
        )
        if self.bundle is not None and any(step.role == CARRIED for step in found.steps):
            lacks = self.bundle.lacks(way.facts.os)
            found.problems.extend([lacks] if lacks else [])
        return found

    # Apply

    def _apply(self, plans: Mapping[str, Plan], ways: Mapping[str, _Way]) -> None:
        self.journal.write("run", cluster=self.inventory.cluster, hosts=list(plans))
        with self._status("setting up the hosts"):
            self._on_all({name: ways[name] for name in plans}, lambda way: self._carry_out(way, plans))
            self._on_all(self._left({name: ways[name] for name in plans}), self._verify)
            self._install_pythons(plans, ways)
        failed = sorted(name for name in plans if name in self.lost)
        self.journal.write("finished", outcome="failed" if failed else "ok", failed=failed)
        for name in failed:
            self.screen.say(f"[red]✗[/] {escape(str(self.lost[name]))}")

    def _carry_out(self, way: _Way, plans: Mapping[str, Plan]) -> None:
        with self._session(way) as session:
            for step in plans[way.host.name].steps:
                if step.role != CARRIED:
                    self._do(way, session, step)

    def _do(self, way: _Way, session: Session, step: Step) -> None:
        name, begun = way.host.name, time.monotonic()
        self.journal.begin(name, step.id, step.what)
        ok, message = False, ""
        try:
            self._carry_out_step(way, session, step)
            ok = True
        except HostError as error:
            message = error.reason
            raise HostError(name, f"{step.what}: {message}") from None
        finally:
            self._note_end(name, step, ok, message, time.monotonic() - begun)

    def _note_end(self, host: str, step: Step, ok: bool, message: str, seconds: float) -> None:
        self.journal.end(host, step.id, ok=ok, message=message)
        self.done.append({"host": host, "id": step.id, "what": step.what, "ok": ok, "seconds": seconds})
        if ok:
            self.screen.say(f"[green]✓[/] {host}: {escape(step.what)} ({seconds:.1f} s)")

    def _carry_out_step(self, way: _Way, session: Session, step: Step) -> None:
        assert way.facts is not None  # noqa: S101 - it was seen
        if step.id == "host-key":
            if way.route is not None and way.new_key is not None:
                with _RECORDING:
                    host_keys.record(way.route, way.new_key)
        elif step.id == "login-key":
            first_login.call_as_user(way.host, session, "install_key", way.public_key)
        elif step.id == "sudo":
            words = ("install_sudo", way.facts.manager, str(first_login.LOCK_PATIENCE))
            first_login.call_as_root(way.host, session, way.facts, way.become, *words)
        else:
            words = ("install_sudoers", *adoption_plan.sudoers(way.facts.user))
            first_login.call_as_root(way.host, session, way.facts, way.become, *words)

    def _install_pythons(self, plans: Mapping[str, Plan], ways: Mapping[str, _Way]) -> None:
        """Carry out the steps that need a host to take our key already, one on each host at a time."""
        left = {
            name: [step for step in plan.steps if step.role == CARRIED]
            for name, plan in plans.items()
            if name not in self.lost
        }
        hosts = {name: ways[name].final_host for name, steps in left.items() if steps}
        states = {name: State(os=facts.os) for name in hosts if (facts := ways[name].facts) is not None}
        for error in self.bundle.send_all(hosts, states) if self.bundle is not None and hosts else ():
            self.lost[error.host] = error
            left.pop(error.host)
        run = self.how.identity(self.journal.run, self.inventory.cluster)
        while first := {name: steps.pop(0) for name, steps in left.items() if steps}:
            for item in carrier.carry_out(
                hosts, first, run, lambda name, step: self.journal.begin(name, step.id, step.what)
            ):
                self._note_end(item.host, item.step, item.ok, item.message, item.seconds)
                if not item.ok:
                    self._refuse({item.host: f"{item.step.what}: {item.message}"})
                    left.pop(item.host)

    def _verify(self, way: _Way) -> None:
        """See the host as all other commands will: by OpenSSH, with keys, and sudo without a password."""
        host = way.final_host
        try:
            now = first_login.observe(host, KeySession(host))
        except LoginRefused as error:
            raise HostError(
                host.name,
                f"its sshd still refuses the installed key ({', '.join(error.methods)}): see "
                "PubkeyAuthentication and AuthorizedKeysFile there, and that nobody else may write to the "
                "home directory",
            ) from None
        if not now.has_root:
            raise HostError(
                host.name,
                f"sudo still refuses ({now.sudo}): a later line there overrules /etc/sudoers.d/"
                f"{adoption_plan.sudoers(now.user)[0]}; see `sudo -l`",
            )

    # Report

    def _report(self, plans: Mapping[str, Plan], pending: Mapping[str, Plan], begun: float) -> int:
        check = self.how.check
        good = [name for name in plans if name not in self.lost]
        if not check and good:
            changed = bool(self.done)
            hosts = f"{len(good)} host" + ("" if len(good) == 1 else "s")
            words = "adopted" if changed else "adopted already: nothing to do"
            self.screen.say(f"[green]✓[/] {hosts} {words} ({time.monotonic() - begun:.1f} s)")
        self.screen.report(
            {
                "adopted": [name for name in good if not check or name not in pending],
                "changed": [item for item in self.done if item["ok"]],
                "failed": [item for item in self.done if not item["ok"]],
                "pending": [encode(plan) for plan in pending.values()] if check else [],
                "unreachable": {name: error.reason for name, error in self.lost.items()},
            }
        )
        if self.lost:
            return 1
        return 2 if check and pending else 0

    # Shared

    def _on_all(self, ways: Mapping[str, _Way], do: Callable[[_Way], None]) -> None:
        """Call ``do`` for all hosts at once; those that fail are lost."""
        hosts = {name: way.host for name, way in ways.items()}
        found = fanout.on_hosts(hosts, lambda host, _: do(ways[host.name]), cut_off=False)
        self.lost.update({name: said for name, said in found.items() if isinstance(said, HostError)})

    def _refuse(self, refused: Mapping[str, str]) -> None:
        for name, why in refused.items():
            self.lost[name] = HostError(name, why)

    def _show_lost(self) -> None:
        for name in self.inventory.hosts:
            if name in self.lost:
                self.screen.say(f"[red]✗[/] {escape(str(self.lost[name]))}")

    @contextlib.contextmanager
    def _status(self, words: str) -> Iterator[None]:
        with self.screen.status(words) as self._spinner:
            yield

    def _ask(self, question: Callable[[], _Result]) -> _Result:
        """Ask at the terminal without the spinner."""
        self._spinner.stop()
        try:
            return question()
        finally:
            self._spinner.start()
