"""Hosts that take kernel arguments by a reboot: Debian's GRUB and ``shutdown``, as far as roll-outs go.

A boot is another boot id and the arguments of the menu, laid over the files of /proc. ``/var/log/turns`` of a
host says when its arguments were changed and when it was rebooted.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ssh_hosts import SshHost

_HERE = Path(__file__).parent
_RELEASE = os.uname().release
_LOG = "/var/log/turns"
_ENTRY = f"""\
menuentry 'Debian, with Linux {_RELEASE}' --id 'gnulinux-{_RELEASE}' {{{{
  linux /boot/vmlinuz-{_RELEASE} root=/dev/vda1 {{}}
}}}}
"""
_MKCONFIG = f"""\
#!/bin/sh
# grub-mkconfig -o FILE
set -e
echo "change $(date +%s.%N)" >>{_LOG}
[ ! -x /etc/spoiled ] || /etc/spoiled
. /etc/default/grub
cat >"$2" <<END
{_ENTRY.format("$GRUB_CMDLINE_LINUX")}END
"""
_SHUTDOWN = f"""\
#!/bin/sh
set -e
echo "reboot $(date +%s.%N)" >>{_LOG}
mkdir -p /run/boot
cat /proc/sys/kernel/random/uuid >/run/boot/id
sed -n 's/^ *linux [^ ]* //p' /boot/grub/grub.cfg >/run/boot/cmdline
mount --bind /run/boot/id /proc/sys/kernel/random/boot_id
mount --bind /run/boot/cmdline /proc/cmdline
"""
# For ``spoil``: how a host goes wrong.
FAILS = "#!/bin/sh\necho 'no space left' >&2\nexit 1\n"
VANISHES = "#!/bin/sh\nkill -9 -1\n"  # all of its process namespace but the sshd, which loses its logins


def add(layer: Path) -> None:
    """Put the stand-ins into a layer of ``converged``."""
    for name, text in (("grub-mkconfig", _MKCONFIG), ("shutdown", _SHUTDOWN)):
        _program(layer / "usr/sbin" / name, text)
    for name in ("systemctl", "journalctl"):
        _program(layer / "usr/bin" / name, (_HERE / "systemd_standin.py").read_text())
    for name, text in (
        ("etc/default/grub", 'GRUB_DEFAULT=0\nGRUB_CMDLINE_LINUX="console=ttyS0"\n'),
        (f"boot/vmlinuz-{_RELEASE}", "a kernel\n"),
        ("boot/grub/grubenv", "# GRUB Environment Block\n"),
        ("boot/grub/grub.cfg", _ENTRY.format("console=ttyS0")),
    ):
        path = layer / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.rmtree(layer / "etc/default/grub.d", ignore_errors=True)


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def spoil(host: SshHost, program: str, how: str) -> None:
    """Let a program of the host do ``how``: its package manager, or what is done in its turn."""
    host.enter("sh", "-c", f"cat >{program} <<'END'\n{how}END\nchmod 755 {program}")


def turns(host: SshHost) -> dict[str, float]:
    """When the host's arguments were changed and when it was rebooted, the last of each; empty: never."""
    lines = host.enter("sh", "-c", f"cat {_LOG} 2>/dev/null || :").splitlines()
    return {what: float(when) for what, when in (line.split() for line in lines)}
