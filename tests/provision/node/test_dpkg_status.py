"""dpkg's status file, read in the place of asking dpkg-query."""

from pathlib import Path

import pytest

from provision.node import packages
from provision.node.command import Result, System
from provision.node.state import OsInfo

STATUS = """\
Package: libpmem1
Status: install ok installed
Architecture: amd64
Version: 1.12.1-2
Description: Persistent Memory
 Version: of this line is text

Package: libpmem1-dev
Status: install ok installed
Version: 9

Package: ndctl
Status: deinstall ok config-files
Version: 76.1-1

Package: libc6
Status: deinstall ok not-installed
Architecture: i386
Version: 2.35

Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36

Package: unpacked
Status: install ok half-configured
Version: 1

Package: held
Status: hold ok installed
Version: 1:2.0~rc1
"""
INSTALLED = {"libpmem1": "1.12.1-2", "libc6": "2.36", "held": "1:2.0~rc1"}
APT = OsInfo(package_manager="apt")


@pytest.mark.parametrize("name", ["libpmem1", "ndctl", "libc6", "unpacked", "held", "pmem1", "absent"])
@pytest.mark.parametrize("text", [STATUS, STATUS.rstrip()])
def test_installed_version(text: str, name: str) -> None:
    assert packages.installed_version(text, name) == INSTALLED.get(name, "")


def test_a_file_that_dpkg_has_not_brought_up_to_date_is_not_trusted(tmp_path: Path) -> None:
    updates = tmp_path / "var/lib/dpkg/updates"
    updates.mkdir(parents=True)
    (updates.parent / "status").write_text(STATUS)

    class Asked(System):
        def run(self, argv, timeout=0.0, environment=None):  # type: ignore[no-untyped-def]
            return Result(argv, 0, "libpmem1\tinstalled\t2\n", "")

    assert packages.observe(Asked(str(tmp_path)), APT, ["libpmem1"]) == {"libpmem1": "1.12.1-2"}
    (updates / "0001").write_text("")
    assert packages.observe(Asked(str(tmp_path)), APT, ["libpmem1"]) == {"libpmem1": "2"}
