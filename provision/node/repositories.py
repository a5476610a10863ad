"""Repositories beyond those that a host has enabled, and mirrors of them.

``given`` are those of the inventory: name -> address, then a space and the address of the key, or
``unsigned``. Without either, the host must know the packages' key. For apt the value is a whole line of
sources.list. Both take a directory of packages on the host instead. Names unknown to the family work too.
"""

from typing import Dict, List, NamedTuple

from . import families
from .state import OsInfo

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


class Use(NamedTuple):
    """A file to write (none if ``path`` is empty), and options with which the package manager uses it."""

    path: str = ""
    text: str = ""
    options: List[str] = []

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
