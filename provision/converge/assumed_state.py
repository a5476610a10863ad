"""The assumed state of a freshly installed host, for ``oeprov plan --offline``."""

from __future__ import annotations

from provision.node import drives, families, platforms
from provision.node.family import Family
from provision.node.state import Bootloader, KernelState, MemoryPolicy, OsInfo, State
from provision.node.step import Desired

MIB = 1 << 20
_CMDLINE = "console=tty0 console=ttyS0,115200n8"


def _install_system(base: State, os: OsInfo) -> State:
    """The same hardware with a freshly installed system."""
    family = families.find(os)
    if family is None:
        return base
    fresh = family.fresh[families.release(family, os)]
    return base._replace(
        os=os._replace(python=fresh.python, is_root=True, mirrors_gone=os.id in family.gone),
        kernel=KernelState(
            fresh.kernel, [fresh.kernel], "", fresh.kernel, _CMDLINE.split(), {fresh.kernel: fresh.options}
        ),
        bootloader=_grub(family),
        memory=MemoryPolicy(family.auto_online, 128 * MIB),
        assumed=True,
    )


def _grub(family: Family) -> Bootloader:
    cmdline = _CMDLINE + (" crashkernel=auto" if family.grubby else "")
    return Bootloader(
        kind="grub",
        defaults_file=f'GRUB_DEFAULT={"saved" if family.grubby else "0"}\nGRUB_CMDLINE_LINUX="{cmdline}"\n',
        cmdline=cmdline,
        cmdline_lines=1,
        saved_default=family.grubby,
        grubenv_on="plain",
        has_grubby=family.grubby,
        bls=family.bls,
        mkconfig=f"{family.grub}-mkconfig",
        config_path=f"/boot/{family.grub}/grub.cfg",
    )


def state(desired: Desired, os: OsInfo | None = None) -> State:
    """The assumed state of a freshly installed host of ``desired.kind``; ``os``: with that system."""
    platform = platforms.get(desired.kind)
    base = platform.fresh(desired)
    base = base._replace(
        drives=drives.fresh(desired),
        runtime=base.runtime._replace(venv=desired.runtime_venv, missing=desired.runtime_requirements),
    )
    if not platform.managed:
        return base
    return _install_system(base, os or base.os)._replace(hostname=desired.host)
