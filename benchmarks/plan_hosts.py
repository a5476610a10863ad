"""``oeprov plan`` and a converged ``oeprov bootstrap`` over many hosts, beside Ansible and pyinfra.

    python benchmarks/plan_hosts.py [--hosts 10 50 100] [--repetitions 3] [--only NAME ...]

As root. The hosts are network namespaces with an sshd of their own on this machine
(tests/hosts/ssh_hosts.py), so that they share its cores with whoever looks at them: processor time is given
apart for both sides. All hosts are of kind cpu and converged; a stand-in lies where the runtime is installed
(tests/hosts/converged.py), and their Python is the controller's, so that oeprov's code arrives compiled.
Every run begins without open connections, and with warm caches, by a run that is not counted. Numbers are
medians; Ansible, which takes minutes, runs once over the fewest and the most hosts.
oeprov and the rows of ssh use provision/hosts/ssh_config, Ansible OpenSSH's own choice of key exchange, which
takes about 90 ms of processor time a host more.
The rows are explained below the table. Results go to benchmarks/results/plan_hosts.md.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import itertools
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "hosts")]

import converged  # noqa: E402
import processes  # noqa: E402
from reporting import RESULTS, header  # noqa: E402
from ssh_hosts import SshHost, SshHosts, why_not  # noqa: E402

PYINFRA = processes.CACHE / "pyinfra" / "bin" / "pyinfra"
SSH_CONFIG = ROOT / "provision" / "hosts" / "ssh_config"
_SAMPLE = 0.5  # seconds between two looks at the memory
_FILES = 1024  # open files of what is measured
SLOW = ("ansible", "ansible-roles")  # minutes: once, and only over the fewest and the most hosts
ROWS = {
    "plan": "`oeprov plan`: looks at everything and plans",
    "bootstrap": "`oeprov bootstrap --yes` on hosts that have all: the same look, nothing to do, no Ansible",
    "pyinfra": "`pyinfra INVENTORY benchmarks/peers/plan_hosts_pyinfra.py`: the same facts, in 9 commands, "
    "all hosts in parallel",
    "ansible": "`ansible-playbook benchmarks/peers/plan_hosts.yml`: the same facts by setup, package_facts, "
    "slurp and shell, in 6 tasks; forks = hosts, pipelining, ControlPersist",
    "ansible-roles": "`ansible-playbook playbooks/bootstrap.yml`: our own roles on hosts that have all",
    "ssh-python": "`ssh HOST python3 -I -S -c pass`, 64 at once: the least for a tool that runs Python there",
    "ssh-true": "`ssh HOST true`, 64 at once: the least for a tool that connects by OpenSSH",
    "plan-99": "`oeprov plan` of all hosts but one in a hundred",
    "plan-hung": "the same of all hosts: this one in a hundred hangs when connecting, before sshd's "
    "banner, in the login shell, or while Python looks",
}
HUNG = ("plan-99", "plan-hung")  # last, since these hosts stay as they are


@dataclass
class Cost:
    """What one run took, in seconds, and the most memory of its processes on the controller together."""

    wall: float
    controller: float
    hosts: float
    mib: float = 0.0


class Bench:
    """Commands over one set of hosts."""

    def __init__(self, directory: Path, hosts: SshHosts) -> None:
        self.directory = directory
        self.hosts = hosts
        self.hung: list[SshHost] = []
        self.mib = 0.0
        self.inventory = converged.inventory(directory / "inventory.yml", hosts)
        self.pyinfra = directory / "pyinfra_inventory.py"
        data = {
            "ssh_user": "root",
            "ssh_key": str(hosts.key),
            "ssh_known_hosts_file": str(hosts.known_hosts),
            "ssh_strict_host_key_checking": "yes",
        }
        self.pyinfra.write_text(f"hosts = ({[host.address for host in hosts]!r}, {data!r})\n")

    def runs(self, *, warm_up: bool = False) -> dict[str, Callable[[], None]]:
        """Row → what it runs; ``warm_up``: the slow ones on one host only."""
        oeprov = [sys.executable, "-m", "provision.cli"]
        playbook = str(Path(sys.executable).with_name("ansible-playbook"))
        inventory = ["-i", str(self.inventory)]
        pyinfra = [str(self.pyinfra), str(ROOT / "benchmarks" / "peers" / "plan_hosts_pyinfra.py")]
        forks = ["--forks", str(len(self.hosts)), *(["--limit", self.hosts[0].name] if warm_up else [])]
        return {
            "plan": lambda: self._command([*oeprov, "plan", *inventory]),
            "bootstrap": lambda: self._command([*oeprov, "bootstrap", "--yes", *inventory]),
            "pyinfra": lambda: self._command(
                [str(PYINFRA), "-y", "--parallel", str(len(self.hosts)), *pyinfra]
            ),
            "ansible": lambda: self._command(
                [playbook, *inventory, *forks, str(ROOT / "benchmarks" / "peers" / "plan_hosts.yml")]
            ),
            "ansible-roles": lambda: self._command(
                [playbook, *inventory, *forks, str(ROOT / "playbooks" / "bootstrap.yml")]
            ),
            "ssh-python": lambda: self._ssh("python3 -I -S -c pass"),
            "ssh-true": lambda: self._ssh("true"),
            "plan-99": lambda: self._command([*oeprov, "plan", *inventory, "--limit", self._but_hung()]),
            "plan-hung": lambda: self._command([*oeprov, "plan", *inventory], code=1),
        }

    def hang(self) -> None:
        """Let one host in a hundred hang, each in another way than the one before it."""
        ways = (
            self.hosts.cut,
            SshHost.freeze,
            SshHost.hang_logins,
            lambda host: host.hang_reading("/var/lib/dpkg/status"),
        )
        chosen = random.Random(1).sample(list(self.hosts), max(1, len(self.hosts) // 100))
        self.hung = chosen
        for host, way in zip(chosen, itertools.cycle(ways), strict=False):
            way(host)

    def _but_hung(self) -> str:
        return ":".join(["all", *(f"!{host.name}" for host in self.hung)])

    def measure(self, run: Callable[[], None]) -> Cost:
        """One run, from the first process to the end of the last on either side."""
        shutil.rmtree(self.directory / "run", ignore_errors=True)
        (self.directory / "run").mkdir()
        controller, hosts = _children_cpu(), self._hosts_cpu()
        self.mib = 0.0
        begun = time.perf_counter()
        run()
        wall = time.perf_counter() - begun
        _end_orphans()
        time.sleep(0.5)  # the hosts take leave of their logins
        return Cost(wall, _children_cpu() - controller, self._hosts_cpu() - hosts, self.mib)

    def _hosts_cpu(self) -> float:
        return sum(host.cpu_seconds() for host in self.hosts)

    def _command(self, argv: list[str], code: int = 0) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.directory / "run" / "cp"),
            "ANSIBLE_CACHE_PLUGIN": "memory",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        run = self.directory / "run"
        with (self.directory / "output.txt").open("w") as output:
            process = subprocess.Popen(
                ["prlimit", f"--nofile={_FILES}:", *argv],
                cwd=run,
                env=environment,
                stdout=output,
                stderr=output,
            )
            while process.poll() is None:
                self.mib = max(self.mib, _resident(process.pid) / (1 << 20))
                time.sleep(_SAMPLE)
        if process.returncode != code:
            said = Path(output.name).read_text()[-3000:]
            raise SystemExit(f"{argv}: exit status {process.returncode}\n{said}")

    def _ssh(self, command: str) -> None:
        def one(host: SshHost) -> None:
            argv = ["ssh", "-F", str(SSH_CONFIG), "-oBatchMode=yes", *self.hosts.ssh_options()]
            subprocess.run([*argv, f"root@{host.address}", command], stdin=subprocess.DEVNULL, check=True)

        with ThreadPoolExecutor(max_workers=64) as pool:
            list(pool.map(one, self.hosts))


def _children_cpu() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _resident(pid: int) -> int:
    """Bytes of memory of a process and of all below it; pages that they share count for each."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        threads = [name for name in os.listdir(f"/proc/{pid}/task") if name != str(pid)]
        for name in threads:
            children += Path(f"/proc/{pid}/task/{name}/children").read_text().split()
    except OSError:  # it has ended
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(_resident(int(child)) for child in children)


def _adopt_orphans() -> None:
    """Become the parent of orphans, so that Ansible's connections can be ended and counted."""
    subreaper = 36  # PR_SET_CHILD_SUBREAPER
    ctypes.CDLL(None).prctl(subreaper, 1, 0, 0, 0)


def _end_orphans() -> None:
    """End ssh connections that were left open for a next run."""
    mine = Path(f"/proc/self/task/{os.getpid()}/children")
    for pid in map(int, mine.read_text().split()):
        if Path(f"/proc/{pid}/comm").read_text().strip() == "ssh":
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)


def _bury_hosts() -> None:
    """Take note of the ends of hosts that were closed, so that they do not count for the next run."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def install_peers() -> str:
    """pyinfra in an environment of its own; its version."""
    python = processes.environment("pyinfra", ["pyinfra>=3,<4"], "pyinfra")
    code = "import importlib.metadata; print(importlib.metadata.version('pyinfra'))"
    return subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def made_of(found: dict[tuple[str, int], list[Cost]], rows: list[str], counts: list[int]) -> Table:
    """Medians: wall seconds, with the ratio to ``plan``, and processor seconds of both sides."""
    words = "seconds (processor seconds of controller + hosts), MiB on the controller"
    table = Table(title=f"{words}, {os.cpu_count()} cores")
    table.add_column("")
    for count in counts:
        table.add_column(f"{count} hosts", justify="right")
        table.add_column("× plan", justify="right")
    for row in rows:
        cells = []
        for count in counts:
            costs = found.get((row, count), [])
            if not costs:
                cells += ["–", "–"]
                continue
            wall = statistics.median(cost.wall for cost in costs)
            ours = statistics.median(cost.wall for cost in found.get(("plan", count), costs))
            controller = statistics.median(cost.controller for cost in costs)
            hosts = statistics.median(cost.hosts for cost in costs)
            mib = max(cost.mib for cost in costs)
            memory = f", {mib:.0f} MiB" * bool(mib)
            cells += [f"{wall:.2f} ({controller:.1f} + {hosts:.1f}){memory}", f"{wall / ours:.2f}"]
        table.add_row(row, *cells)
    return table


def main() -> None:
    """Print the table and save it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[10, 50, 100])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/plan_hosts.md")
    options = parser.parse_args()
    why = why_not()
    if why:
        raise SystemExit(why)
    pyinfra = install_peers() if "pyinfra" in options.only else ""
    _adopt_orphans()
    # Two pipes per host; what is measured keeps the usual limit.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found: dict[tuple[str, int], list[Cost]] = {}
    ends = (min(options.hosts), max(options.hosts))
    rows = [row for row in options.only if row not in HUNG]
    hung = [row for row in HUNG if row in options.only]

    def note(row: str, bench: Bench) -> None:
        cost = bench.measure(bench.runs()[row])
        found.setdefault((row, len(bench.hosts)), []).append(cost)
        print(f"{len(bench.hosts)} {row}: {cost}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="oeprov-bench-") as name:
        directory = Path(name)
        layer = converged.layer(directory / "layer")
        for count in options.hosts:
            with SshHosts(directory / f"hosts{count}", count, layer=layer) as hosts:
                bench = Bench(directory, hosts)
                if count == options.hosts[0]:
                    for row in rows:
                        bench.measure(bench.runs(warm_up=True)[row])
                for repetition in range(options.repetitions):
                    for row in rows:
                        if row in SLOW and (repetition or count not in ends):
                            continue
                        note(row, bench)
                if hung:
                    bench.hang()
                for row in hung * options.repetitions:
                    note(row, bench)
            _bury_hosts()
    table = made_of(found, options.only, options.hosts)
    Console().print(table)
    if options.save:
        save(table, options.only, pyinfra)


def save(table: Table, rows: list[str], pyinfra: str) -> None:
    """Write the results file."""
    import ansible.release

    text = io.StringIO()
    Console(width=110, file=text).print(table)
    words = "\n".join(f"- `{row}`: {ROWS[row]}" for row in rows)
    ssh = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=True).stderr.strip()
    versions = (f"ansible-core {ansible.release.__version__}", f"pyinfra {pyinfra}", ssh)
    (RESULTS / "plan_hosts.md").write_text(
        f"{header('Looking at many hosts', *versions)}```\n{text.getvalue()}```\n\n"
        f"{words}\n\n{(__doc__ or '').split(chr(10) * 2, 2)[2].strip()}\n"
    )


if __name__ == "__main__":
    main()
