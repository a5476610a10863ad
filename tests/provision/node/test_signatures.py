"""What package managers say about a wrong signature, in one sentence with repository, key and cure."""

import pytest

from provision.node import repositories
from provision.node.repositories import APT, ENABLED, YUM, Use
from provision.node.state import OsInfo

ROCKY = OsInfo("rocky", "8.10", "rhel", package_manager="dnf")
BOTH = repositories.use(
    ROCKY,
    {"archive": "https://mirror/os https://mirror/key", "kernel": "https://mirror/elrepo file:///key-elrepo"},
    [],
)
YUM_3 = """\
warning: /var/cache/yum/x86_64/7/oeprov-kernel/kernel-lt-5.4.rpm: Header V4 DSA/SHA1: NOKEY
Retrieving key from file:///key-elrepo

The GPG keys listed for the "oeprov-kernel" repository are already installed but they are not \
correct for this package.
Check that the correct key URLs are configured for this repository.

 Failing package is: kernel-lt-5.4.278-1.el7.elrepo.x86_64
 GPG Keys are configured as: file:///key-elrepo
"""
DNF = """\
Importing GPG key 0x1234:
 From       : https://mirror/key
Public key for libpmem-1.6.1-1.el8.x86_64.rpm is not installed. Failing package is: \
libpmem-1.6.1-1.el8.x86_64
 GPG Keys are configured as: https://mirror/key
Error: GPG check FAILED
"""
APT_SAYS = """\
W: GPG error: http://mirror/debian bookworm InRelease: The following signatures couldn't be verified because
 the public key is not available: NO_PUBKEY 0123456789ABCDEF
E: The repository 'http://mirror/debian bookworm InRelease' is not signed.
"""


@pytest.mark.parametrize(
    ("said", "use", "start", "setting"),
    [
        (
            YUM_3,
            BOTH,
            "repository kernel (https://mirror/elrepo): kernel-lt-5.4.278-1.el7.elrepo.x86_64 is not signed "
            "with its key file:///key-elrepo: ",
            "(kernel_repository_url)",
        ),
        (
            DNF,
            BOTH,
            "repository archive (https://mirror/os): libpmem-1.6.1-1.el8.x86_64.rpm is not signed with its "
            "key https://mirror/key: ",
            "(kernel_archive_url)",
        ),
        (
            "Curl error (37): Couldn't read a file:// file for file:///key-elrepo",
            BOTH,
            "repository kernel (https://mirror/elrepo): its key file:///key-elrepo cannot be read: ",
            "(kernel_repository_url)",
        ),
        (
            "Package x-1.rpm is not signed\nError: GPG check FAILED",
            Use(YUM, "[oeprov-scl]\nname=oeprov-scl\nbaseurl=https://scl\nenabled=0\n"),
            "repository scl (https://scl): this host has no key of it: ",
            "(runtime_repositories: scl)",
        ),
        (
            "Package x-1.rpm is not signed\nError: GPG check FAILED",
            ENABLED,
            "x-1.rpm is not signed with a key of its repository, which this host has enabled: ",
            "/etc/yum.repos.d",
        ),
        (
            APT_SAYS,
            Use(APT, "deb http://mirror/debian bookworm main\n"),
            "repository http://mirror/debian bookworm: its index is not signed with a key that apt trusts "
            "(NO_PUBKEY 0123456789ABCDEF): ",
            "[signed-by=/path/key.gpg]",
        ),
    ],
)
def test_a_signature_that_is_wrong(said: str, use: Use, start: str, setting: str) -> None:
    found = repositories.signature_problem(said, use)
    assert found.startswith(start)
    assert setting in found
    assert found.endswith("; nothing was installed")
    assert "\n" not in found


@pytest.mark.parametrize(
    "said",
    [
        "",
        "Error: Unable to find a match: no-such-package",
        "Importing GPG key 0x1234:\n From : https://mirror/key\nError: Unable to find a match: x",
        "Error: Failed to download metadata for repo 'oeprov-archive': Cannot download repomd.xml",
    ],
)
def test_other_failures_are_not_taken_for_it(said: str) -> None:
    assert repositories.signature_problem(said, BOTH) == ""
