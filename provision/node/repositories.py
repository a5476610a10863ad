"""Repositories beyond those that a host has enabled, and mirrors of them.

``given`` are those of the inventory: name -> address, then a space and the address of the key, or
``unsigned``. Without either, the host must know the packages' key. For apt the value is a whole line of
sources.list. Both take a directory of packages on the host instead. Names unknown to the family work too.
"""

import re
from typing import Dict, List, NamedTuple

from . import families
from .command import System
from .state import OsInfo

_YUM_DIRECTORY = "/etc/yum.repos.d"
YUM = "/etc/yum.repos.d/oeprov.repo"  # the inventory's repositories, disabled but for our own commands
APT = "/etc/apt/sources.list.d/oeprov.list"  # the inventory's repositories for apt
BUNDLE = "/var/lib/oeprov/bundle"  # directory that `bootstrap --bundle` fills
UNSIGNED = "unsigned"
LOCAL = "local"  # a directory: unsigned, and its metadata expires at once
ARCHIVE = "archive"  # replaces all repositories of a distribution whose mirrors are gone


# Other sources are left out, and their cached lists are kept.
_ONLY_APT = [
    word
    for option in ("Dir::Etc::sourcelist=" + APT, "Dir::Etc::sourceparts=-", "APT::Get::List-Cleanup=0")
    for word in ("-o", option)
]
_LOCAL_APT = "deb [trusted=yes] file:{} ./"


def archive(os: OsInfo, named: str) -> str:
    """What replaces all repositories of the distribution: ``named``, or where a dead one's packages moved."""
    family = families.find(os)
    if named or family is None or not os.mirrors_gone:
        return named
    return family.gone.get(os.id, "").replace("$basearch", os.architecture or "$basearch")


def observe_gone(system: System, os: OsInfo) -> bool:
    """Whether the enabled repositories are those that the installer left, and their mirrors are gone."""
    family = families.find(os)
    if family is None or os.id not in family.gone:
        return False
    files = [name for name in system.list(_YUM_DIRECTORY) if name.endswith(".repo")]
    lines = [line for name in files for line in system.read(f"{_YUM_DIRECTORY}/{name}").splitlines()]
    return are_gone(os, lines)


def are_gone(os: OsInfo, lines: List[str]) -> bool:
    """Whether lines of repositories name the mirrors that are gone."""
    family = families.find(os)
    if family is None or os.id not in family.gone:
        return False
    words = [line.partition("=")[2] for line in lines if re.match(r"(mirrorlist|baseurl)\s*=", line)]
    return any(mirror in word for word in words for mirror in family.gone_mirrors)


class Use(NamedTuple):
    """A file to write (none if ``path`` is empty), and options with which the package manager uses it."""

    path: str = ""
    text: str = ""
    options: List[str] = []

    @property
    def mode(self) -> int:
        """Permissions of the file; those with a password are for root alone."""
        return 0o600 if re.search(r"://[^/\s]*@", self.text) else 0o644

    @property
    def commands(self) -> List[List[str]]:
        """The file as a command of a step."""
        return [["write", self.path, self.text]] if self.path else []


ENABLED = Use()


def use(os: OsInfo, given: Dict[str, str], wanted: List[str]) -> Use:
    """Make the ``wanted`` repositories available, and those of ``given`` that the family does not know."""
    family = families.find(os)
    known = {} if family is None else family.repositories
    if os.package_manager == "apt":
        if not given:
            return ENABLED
        lines = [_LOCAL_APT.format(item) if item.startswith("/") else item for item in given.values() if item]
        text = "".join(line + "\n" for line in dict.fromkeys(lines))
        return Use(APT, text, _ONLY_APT if given.get(ARCHIVE) else [])
    sections, options = [], []
    if given.get(ARCHIVE):
        # The distribution's own mirrors are gone, and one dead mirror fails the whole command.
        options.append("--disablerepo=*")
    if given.get(ARCHIVE, "").startswith("/"):
        wanted = [name for name in wanted if given.get(name)]  # a directory has all packages
    for name in [item for item in given if item not in known or item in wanted] + wanted:
        section = "oeprov-" + name
        own = [known[name].url, known[name].key] if name in known else ["", ""]
        words = given.get(name, "").split()
        if words and words[0].startswith("/"):
            words = ["file://" + words[0], LOCAL]
        url, key = (words + own[1:])[:2] if words else own
        shipped = known[name].ids.get(os.id, known[name].ids.get("", "")) if name in known else ""
        option = "--enablerepo=" + (section if given.get(name) or not shipped else shipped)
        if option in options or not (shipped or url):
            continue
        options.append(option)
        if option.endswith("=" + section):
            sections.append(_section(section, url, key))
    return Use(YUM if sections else "", "".join(sections), options)


def _section(name: str, url: str, key: str) -> str:
    text = f"[{name}]\nname={name}\nbaseurl={url}\nenabled=0\n"
    if key in (UNSIGNED, LOCAL):
        return text + "gpgcheck=0\n" + ("metadata_expire=1\n" if key == LOCAL else "")
    return text + (f"gpgcheck=1\ngpgkey={key}\n" if key else "")


# Settings that name a repository; for the others: runtime_repositories.
_SETTINGS = {ARCHIVE: "kernel_archive_url", "kernel": "kernel_repository_url"}
_UNSIGNED = re.compile(
    r"not correct for this package|Public key for (\S+) is not installed|GPG check FAILED|"
    r"Package (\S+) is not signed|Failing package is: (\S+)|NO_PUBKEY \w+|(?:BAD|EXP|EXPKEY|REVKEY)SIG|"
    r"The repository '[^']*' is not signed|[Rr]epomd.xml signature could not be verified|BAD signature"
)
_NO_KEY = re.compile(r"GPG key retrieval failed|Failed to retrieve GPG key|[Kk]ey import failed")
_ERROR = re.compile(r"error|errno|fail|couldn't|cannot|status code", re.IGNORECASE)


def signature_problem(said: str, use: Use) -> str:
    """Why a package manager that printed ``said`` did not trust a repository, and what to do; empty: it did.

    ``use`` has the repositories of the command.
    """
    keys = {name: (url, key) for name, url, key in _SECTION.findall(use.text)}
    errors = "\n".join(line for line in said.splitlines() if _ERROR.search(line))
    found, lost = _UNSIGNED.search(said), _NO_KEY.search(said)
    if not found and not lost and not any(key and key in errors for _, key in keys.values()):
        return ""
    if use.path == APT or "NO_PUBKEY" in said or "The repository '" in said:
        return _apt_signature_problem(said)
    # The package manager names the repository, or its key.
    name = next((item for item in keys if f"oeprov-{item}" in said), "")
    name = name or next((item for item, (_, key) in keys.items() if key and key in said), "")
    if not name and len(keys) == 1:
        name = next(iter(keys))
    package = next((word for match in _UNSIGNED.finditer(said) for word in match.groups() if word), "")
    what = package.rstrip(".,") or "a package"
    if not name:
        return (
            f"{what} is not signed with a key of its repository, which this host has enabled: correct gpgkey "
            f"in {_YUM_DIRECTORY}, or disable that repository; nothing was installed"
        )
    url, key = keys[name]
    setting = _SETTINGS.get(name, f"runtime_repositories: {name}")
    if not key:
        why, cure = "this host has no key of it", "name the key after the mirror's address"
    elif not found:
        why, cure = f"its key {key} cannot be read", "correct the key's address, which follows the mirror's"
    else:
        why = f"{what} is not signed with its key {key}"
        cure = "use a mirror of the original packages, or name the key of this one after its address"
    return f"repository {name} ({url}): {why}: {cure} ({setting}); nothing was installed"


_SECTION = re.compile(
    r"^\[oeprov-([^]]+)\]\nname=.*\nbaseurl=(.*)\nenabled=0\n(?:gpgcheck=1\ngpgkey=(.*)\n)?", re.M
)


def _apt_signature_problem(said: str) -> str:
    where = re.search(r"(?:GPG error: |The repository ')(\S+(?: \S+)?)", said)
    key = re.search(r"NO_PUBKEY \w+|(?:BAD|EXP|EXPKEY|REVKEY)SIG \w+", said)
    name = where.group(1).rstrip("':") if where else "of apt"
    which = f" ({key.group(0)})" if key else ""
    return (
        f"repository {name}: its index is not signed with a key that apt trusts{which}: name the file of its "
        "key in its line, as in 'deb [signed-by=/path/key.gpg] …', or use another mirror; nothing was "
        "installed"
    )


def problems(os: OsInfo, given: Dict[str, str]) -> List[str]:
    """Repositories of the inventory that this system's package manager cannot use."""
    found = []
    for name, value in given.items():
        if value.startswith("/"):
            continue
        line = value.startswith("deb ")
        if os.package_manager == "apt" and not line:
            found.append(
                f"runtime_repositories {name}: apt needs a whole line, such as 'deb "
                f"[signed-by=/path/key.gpg] https://mirror/debian bookworm main'; found {value!r}"
            )
        if os.package_manager in ("dnf", "yum") and (line or len(value.split()) > 2 or ":/" not in value):
            found.append(
                f"runtime_repositories {name}: {os.package_manager} needs an address, then that of the key, "
                f"or unsigned; found {value!r}"
            )
    return found
