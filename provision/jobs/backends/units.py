"""The systemd units that run a job's processes on hosts reached over SSH."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

JOBS = PurePosixPath("/var/lib/oeprov/jobs")  # per job: token, units.json, files of its processes
USER = "oeprov"
MEMORY_FILE = "/etc/oeprov/memory.env"  # written by bootstrap; provision/node/numa.py
NUMACTL = "/usr/bin/numactl"
SYSTEMCTL = "/usr/bin/systemctl"
NODES = "MEMKIND_DAX_KMEM_NODES"
INTERRUPTED = 130  # exit status of a worker after a stop request and its checkpoint
WORKER_LOST = 3  # exit status of a worker that could not continue without another
ONLINE_SECONDS = 60
# mbind, set_mempolicy and move_pages (memkind, numactl) are in none of these groups.
DENIED_CALLS = "@clock @cpu-emulation @module @mount @obsolete @raw-io @reboot @swap bpf"


def job_directory(job: str) -> PurePosixPath:
    """The job's directory on a host reached over SSH."""
    return JOBS / job


@dataclass(frozen=True)
class Place:
    """Where a server keeps its rows; the default is DRAM.

    ``path`` is its own directory below ``mount`` (fsdax). ``bound``: on the memory nodes of MEMORY_FILE
    (system-ram), with memkind only rows, else all memory of the server; ``devices`` are the dax devices that
    bring these nodes online. ``nodes``: those that are the server's; empty: all. ``tiered``: the kernel
    chooses the node of each page.
    """

    storage: str = "dram"
    path: str = ""
    mount: str = ""
    bound: bool = False
    nodes: tuple[int, ...] = ()
    tiered: bool = False
    devices: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()  # CPUs that the server may use, near its memory; empty: any


def server_unit(job: str, name: str, argv: Sequence[str], place: Place) -> str:
    """A parameter server: restarts after a failure and after a reboot, with the rows of its storage."""
    unit = [
        *_head(job, name),
        # A server that keeps failing needs a person, not endless restarts.
        "StartLimitIntervalSec=600",
        "StartLimitBurst=5",
    ]
    # With a dash: else systemd cannot run even the first command before the mount is there.
    service = _common(job, ["-" + place.path] if place.path else [])
    words = list(argv)
    if place.mount:
        # In a slow boot, a device may come after its mount has timed out. A requirement would then keep the
        # server down for good, so the server starts the mount itself, at each of its starts.
        mount = mount_unit(place.mount)
        unit += [f"Wants={mount}", f"After={mount}"]
        # fstab limits the time (pmem_device_timeout); 0: the service has no limit of its own.
        service += [f"ExecStartPre=+{SYSTEMCTL} start {quote(mount, command=True)}", "TimeoutStartSec=0"]
    if place.tiered:
        # Its rows may need more memory than DRAM has.
        unit.append("After=oeprov-system-ram.service oeprov-tiering.service")
    if place.bound:
        bringers = [f"daxdev-reconfigure@{device}.service" for device in place.devices]
        unit.append("After=" + " ".join(["oeprov-system-ram.service", *bringers]))
        # udev starts these late in the boot, unordered: so the server waits for the memory itself.
        waiting = (
            f"n=0; until {NUMACTL} --membind=${NODES} true 2>/dev/null; do n=$((n+1)); "
            f'[ $n -lt {ONLINE_SECONDS} ] || {{ echo "error: memory nodes ${NODES} are not online" >&2; '
            "exit 1; }; sleep 1; done"
        )
        own = f"Environment={NODES}={','.join(map(str, place.nodes))}"
        service += [
            own if place.nodes else f"EnvironmentFile={MEMORY_FILE}",
            f"ExecStartPre=/bin/sh -c {quote(waiting, command=True)}",
            f"TimeoutStartSec={ONLINE_SECONDS + 60}",
        ]
    command = " ".join(quote(word, command=True) for word in words)
    if place.cpus:
        service.append("CPUAffinity=" + " ".join(map(str, place.cpus)))  # EL7's systemd knows no ranges
    if place.bound and place.storage == "dram":
        command = f"{NUMACTL} --membind=${{{NODES}}} {command}"
    service += [
        f"ExecStart={command}",
        "Restart=on-failure",
        "RestartSec=5",
        "TimeoutStopSec=120",
        "OOMPolicy=stop",
        "PrivateDevices=yes",
        # Servers only: ProtectClock closes every device but the clock, also /dev/nvidia* and /dev/infiniband,
        # and frameworks share GPU memory between processes with pidfd_getfd, which is in @debug.
        "ProtectClock=yes",
        "SystemCallFilter=~@debug",
    ]
    return _text(unit, service, ["WantedBy=multi-user.target"])


def worker_unit(
    job: str,
    name: str,
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    seconds: float,
    writable: Sequence[str] = (),
) -> str:
    """A worker: runs once; after SIGTERM it writes a checkpoint, which may take ``seconds``."""
    service = [
        *_common(job, writable),
        *(f"Environment={quote(f'{key}={value}')}" for key, value in environment.items()),
        f"ExecStart={' '.join(quote(word, command=True) for word in argv)}",
        f"SuccessExitStatus={INTERRUPTED}",
        "KillMode=mixed",  # SIGTERM for the trainer only; it ends its own helpers
        f"TimeoutStopSec={seconds:.0f}",
    ]
    return _text(_head(job, name), service, [])


def _head(job: str, name: str) -> list[str]:
    online = "network-online.target"
    return [f"Description=oeprov {name} of job {job}", f"Wants={online}", f"After={online}"]


def _common(job: str, more: Sequence[str]) -> list[str]:
    directory = str(job_directory(job))
    writable = " ".join(quote(path) for path in [directory, *more])
    return [
        "Type=exec",
        "KillSignal=SIGTERM",
        "LimitMEMLOCK=infinity",
        "LimitNOFILE=65536",
        f"User={USER}",
        f"WorkingDirectory={quote(directory)}",
        f"Environment=PYTHONUNBUFFERED=1 {quote(f'HOME={directory}')}",
        "UMask=0077",
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=",
        "ProtectSystem=strict",
        f"ReadWritePaths={writable}",
        "ProtectHome=read-only",  # data and environments may lie there
        "PrivateTmp=yes",
        "ProtectKernelTunables=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelLogs=yes",
        "ProtectControlGroups=yes",
        "RestrictNamespaces=yes",
        "RestrictSUIDSGID=yes",
        "RestrictRealtime=yes",
        "LockPersonality=yes",
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
        "SystemCallArchitectures=native",
        # Denied calls, not allowed ones: systemd 219 (EL7) skips groups, and would allow nothing.
        f"SystemCallFilter=~{DENIED_CALLS}",
        "SystemCallErrorNumber=EPERM",
    ]


def _text(unit: Sequence[str], service: Sequence[str], install: Sequence[str]) -> str:
    parts = [("Unit", unit), ("Service", service), ("Install", install)]
    blocks = ["\n".join([f"[{name}]", *lines]) for name, lines in parts if lines]
    return "# Made by oeprov; `oeprov stop` removes it.\n" + "\n\n".join(blocks) + "\n"


def mount_unit(path: str) -> str:
    """The name that systemd gives the unit of a mount point (systemd-escape --path)."""
    found = []
    for byte in path.strip("/").encode():
        sign = chr(byte)
        plain = sign.isascii() and (sign.isalnum() or sign in ":_.")
        found.append("-" if sign == "/" else sign if plain else f"\\x{byte:02x}")
    return "".join(found) + ".mount"


def quote(word: str, *, command: bool = False) -> str:
    """A word quoted for systemd; in a ``command`` dollar signs are escaped too."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    text = text.replace("\n", "\\n").replace("\r", "\\r")  # each ends a line for systemd
    if command:
        text = text.replace("$", "$$")
    plain = text and not any(sign in text for sign in " \t\"'\\;")
    return text if plain else f'"{text}"'
