"""What ``oeprov plan`` looks at, gathered by pyinfra's facts; reads of a kind are one command."""

from pyinfra import host
from pyinfra.facts.deb import DebPackages
from pyinfra.facts.server import Command, Kernel, KernelVersion, LinuxDistribution, Mounts

host.get_fact(LinuxDistribution)
host.get_fact(Kernel)
host.get_fact(KernelVersion)
host.get_fact(Mounts)
host.get_fact(DebPackages)
host.get_fact(
    Command, command="cat /proc/cmdline /proc/cpuinfo /etc/fstab; lsblk -J -o NAME,FSTYPE,UUID,LABEL"
)
host.get_fact(Command, command="ls /boot; grep -h CONFIG_FS_DAX /boot/config-* 2>/dev/null || true")
host.get_fact(
    Command,
    command="cat /proc/sys/kernel/random/boot_id /sys/devices/system/memory/auto_online_blocks "
    "/sys/devices/system/memory/block_size_bytes; grep -H . /sys/devices/system/node/node*/cpulist "
    "/sys/devices/system/node/node*/distance; cat /sys/devices/system/node/node*/meminfo; "
    "ls /sys/bus/nd/devices /sys/bus/dax/devices 2>/dev/null || true",
)
host.get_fact(Command, command="cat /opt/oeprov/venv/pyvenv.cfg /opt/oeprov/venv/.oeprov-wheel")
