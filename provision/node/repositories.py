"""Repositories that a package is installed from beyond those that a host has enabled, and mirrors of them.

``given`` is what the inventory names: a repository's name and its address, after a space the address of its
key, or ``unsigned``. Without either, its packages must be signed with a key that the host knows. For apt the
value is a whole line of sources.list. A directory of packages on the host is taken for either. Names that a
family does not know are used as well.
"""

from typing import Dict, List, NamedTuple

from . import families
from .state import OsInfo

YUM = "/etc/yum.repos.d/oeprov.repo"  # the inventory's repositories, disabled but for our own commands
APT = "/etc/apt/sources.list.d/oeprov.list"  # the inventory's repositories for apt
BUNDLE = "/var/lib/oeprov/bundle"  # directory that `bootstrap --bundle` fills
UNSIGNED = "unsigned"
LOCAL = "local"  # a directory: unsigned, and what was read of it does not hold when it is another
ARCHIVE = "archive"  # what stands in for all of the distribution's own repositories, whose addresses are gone


# The other sources are not asked, and what they said earlier is kept.
_ONLY_APT = [
    word
    for option in ("Dir::Etc::sourcelist=" + APT, "Dir::Etc::sourceparts=-", "APT::Get::List-Cleanup=0")
    for word in ("-o", option)
]
_LOCAL_APT = "deb [trusted=yes] file:{} ./"


class Use(NamedTuple):
    """A file to write (``path`` is empty for none), and options that make the package manager use it."""

    path: str = ""
    text: str = ""
    options: List[str] = []

    @property
    def commands(self) -> List[List[str]]:
        """The file, as plans show it."""
        return [["write", self.path, self.text]] if self.path else []


ENABLED = Use()


def use(os: OsInfo, given: Dict[str, str], wanted: List[str]) -> Use:
    """What makes ``wanted`` repositories and all of ``given`` that the family does not know available."""
    family = families.of(os)
    known = {} if family is None else family.repositories
    if os.package_manager == "apt":
        if not given:
            return ENABLED
        lines = [_LOCAL_APT.format(item) if item.startswith("/") else item for item in given.values() if item]
        text = "".join(line + "\n" for line in dict.fromkeys(lines))
        return Use(APT, text, _ONLY_APT if given.get(ARCHIVE) else [])
    sections, options = [], []
    if given.get(ARCHIVE):
        # The distribution's own addresses do not answer, and one that does not fails the whole command.
        options.append("--disablerepo=*")
    if given.get(ARCHIVE, "").startswith("/"):
        wanted = [name for name in wanted if given.get(name)]  # a directory has all: there is no network
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
    text = "[{0}]\nname={0}\nbaseurl={1}\nenabled=0\n".format(name, url)
    if key in (UNSIGNED, LOCAL):
        return text + "gpgcheck=0\n" + ("metadata_expire=1\n" if key == LOCAL else "")
    return text + ("gpgcheck=1\ngpgkey={}\n".format(key) if key else "")


def problems(os: OsInfo, given: Dict[str, str]) -> List[str]:
    """What the inventory says that this system's package manager cannot use."""
    found = []
    for name, value in given.items():
        if value.startswith("/"):
            continue
        line = value.startswith("deb ")
        if os.package_manager == "apt" and not line:
            found.append(
                "runtime_repositories {}: apt wants a whole line, such as 'deb [signed-by=/path/key.gpg] "
                "https://mirror/debian bookworm main'; found {!r}".format(name, value)
            )
        if os.package_manager in ("dnf", "yum") and (line or len(value.split()) > 2 or ":/" not in value):
            found.append(
                "runtime_repositories {}: {} wants an address, then that of the key, or unsigned; "
                "found {!r}".format(name, os.package_manager, value)
            )
    return found
