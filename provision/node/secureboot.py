"""Secure Boot: whether it is on, the keys that the machine knows, and whether an image has a signature.

No signature is verified here.
"""

import struct

from .command import System

_EFI = "/sys/firmware/efi/efivars/"
_STATE = _EFI + "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
# shim's own switch: `mokutil --disable-validation`.
_UNCHECKED = _EFI + "MokSBStateRT-605dab50-e046-4300-abb6-3dd810dd8b23"
# The second has all of a long list; the third is the firmware's own.
_KEYS = (
    _EFI + "MokListRT-605dab50-e046-4300-abb6-3dd810dd8b23",
    "/sys/firmware/efi/mok-variables/MokListRT",
    _EFI + "db-d719b2cb-3d3a-4596-a3bc-dad00e67656f",
)
_HEADERS = 4096  # of an image: enough for its list of tables


def is_on(system: System) -> bool:
    """Kernels without a known signature are refused."""
    # Four bytes of attributes, then the value.
    enforced, unchecked = (system.read(path, "latin-1")[4:5] for path in (_STATE, _UNCHECKED))
    return enforced == "\x01" and unchecked != "\x01"


def keys(system: System) -> str:
    """The certificates that kernels and modules may be signed with, byte by byte; empty without EFI."""
    return "".join(system.read(path, "latin-1") for path in _KEYS)


def is_unsigned(system: System, path: str) -> bool:
    """A kernel image has no signature; False for an image that is not EFI, such as one in gzip."""
    try:
        with open(system.path(path), "rb") as file:
            image = file.read(_HEADERS)
        (start,) = struct.unpack_from("<I", image, 0x3C)
        if image[:2] != b"MZ" or image[start : start + 4] != b"PE\0\0":
            return False
        # Tables begin behind 24 bytes and a header that is longer in 64 bits. The fifth: certificates.
        (kind,) = struct.unpack_from("<H", image, start + 24)
        tables = start + 24 + (112 if kind == 0x20B else 96)
        _, size = struct.unpack_from("<II", image, tables + 4 * 8)
    except (OSError, struct.error):
        return False
    return bool(size == 0)
