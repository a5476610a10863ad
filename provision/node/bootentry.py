"""GRUB's menu: parse and copy entries of grub.cfg and of Boot Loader Specification (BLS) files."""

import re
from typing import Dict, List, NamedTuple, Optional

from .state import BootEntry

# The name of oeprov's one-time entry.
TRIAL = "oeprov-trial"
# Kernel arguments of a trial boot: its mark with an id, and those that make a bad kernel reboot, not hang.
MARK = "oeprov.trial="
GIVE_UP = ["panic=15", "oops=panic"]
GIVE_UP_DRACUT = ["rd.shell=0", "rd.emergency=reboot"]
_BEGIN, _END = "# oeprov-trial begin", "# oeprov-trial end"
_HEAD = re.compile(
    r"""^\s*(menuentry|submenu)\s+(?:'(?P<single>[^']*)'|"(?P<double>[^"]*)")(?P<rest>.*)\{\s*$"""
)
_ID = re.compile(r"""(?:--id|\$menuentry_id_option)[\s=]+(?:'([^']*)'|"([^"]*)"|(\S+))""")
_LINUX = re.compile(r"^(?P<indent>\s*)(?P<command>linux(?:16|efi)?)\s+(?P<kernel>\S+)(?P<rest>.*)$")


class Menu(NamedTuple):
    """An entry and the lines between its braces."""

    entry: BootEntry
    body: List[str]


def release_of(kernel: str) -> str:
    """Release in the path of a kernel: /boot/vmlinuz-6.1.0-44-amd64 → 6.1.0-44-amd64; empty for others."""
    name = kernel.rsplit("/", 1)[-1]
    return name[8:] if name.startswith("vmlinuz-") and "rescue" not in name else ""


def parse_grubenv(text: str) -> Dict[str, str]:
    """Variables of GRUB's environment block."""
    lines = [line for line in text.splitlines() if "=" in line and not line.startswith("#")]
    return {line.split("=", 1)[0]: line.split("=", 1)[1] for line in lines}


def parse_menu(text: str) -> List[Menu]:
    """The menu entries of grub.cfg in order; the id of a submenu and ``>`` precede those of its entries."""
    found: List[Menu] = []
    parents: List[str] = []
    header: Optional["re.Match[str]"] = None
    body: List[str] = []
    for line in text.splitlines():
        match = _HEAD.match(line)
        if header is not None:
            if line.strip() == "}":
                found.append(_menu(header, parents, body))
                header = None
            else:
                body.append(line)
        elif match is not None and match.group(1) == "submenu":
            parents.append(_name(match))
        elif match is not None:
            header, body = match, []
        elif line.strip() == "}" and parents:
            parents.pop()
    return found


def _name(header: "re.Match[str]") -> str:
    """The name of an entry for GRUB: its id, else its title."""
    match = _ID.search(header.group("rest"))
    named = next((text for text in match.groups() if text), "") if match else ""
    return named or header.group("single") or header.group("double") or ""


def _menu(header: "re.Match[str]", parents: List[str], body: List[str]) -> Menu:
    lines = [match for match in map(_LINUX.match, body) if match]
    entry = BootEntry(
        id=">".join(parents + [_name(header)]),
        title=header.group("single") or header.group("double") or "",
        release=release_of(lines[0].group("kernel")) if lines else "",
        arguments=lines[0].group("rest").split() if lines else [],
    )
    return Menu(entry, body)


def parse_bls(name: str, text: str, environment: Dict[str, str]) -> BootEntry:
    """One file of /boot/loader/entries; ``$kernelopts`` comes from GRUB's environment block."""
    fields = bls_fields(text)
    words: List[str] = []
    for word in fields.get("options", "").split():
        if word.startswith("$"):
            words += environment.get(word[1:], "").split()
        else:
            words.append(word)
    release = release_of(fields.get("linux", ""))
    return BootEntry(re.sub(r"\.conf$", "", name), fields.get("title", ""), release, words)


def bls_fields(text: str) -> Dict[str, str]:
    """Keys and values of a Boot Loader Specification file."""
    pairs = [line.split(None, 1) for line in text.splitlines() if not line.startswith("#")]
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


def find(entries: List[BootEntry], release: str) -> Optional[BootEntry]:
    """The entry of exactly this release, neither a recovery entry nor "the newest"."""
    mine = [
        item
        for item in entries
        if item.release == release
        and "recovery" not in item.id + item.title
        and "single" not in item.arguments
    ]
    return next((item for item in mine if release in item.id or release in item.title), None)


def default_release(entries: List[BootEntry], default: str, saved_entry: str) -> str:
    """Release that an ordinary boot starts; empty if unknown.

    ``default`` is the value of GRUB_DEFAULT. GRUB starts the first entry if it does not find the named one;
    positions (``1>2``) are not resolved here.
    """
    name = saved_entry if default == "saved" else default
    if not entries or re.match(r"[1-9]\d*(>|$)|0>", name):
        return ""
    for item in entries:
        # An entry of a submenu may be named by its own name, or behind that of the submenu.
        names = {item.id, item.title, item.id.rsplit(">", 1)[-1]}
        if name and names & {name, name.rsplit(">", 1)[-1]}:
            return item.release
    return entries[0].release


def changed(words: List[str], add: List[str], remove: List[str]) -> List[str]:
    """Remove and add kernel arguments; the others keep their order."""
    kept = [word for word in words if word not in remove]
    return kept + [word for word in add if word not in kept]


def trial_words(words: List[str]) -> List[str]:
    """A trial's own arguments among these; none without its mark, since others may reboot on panic too."""
    if not any(word.startswith(MARK) for word in words):
        return []
    return [word for word in words if word.startswith(MARK) or word in GIVE_UP + GIVE_UP_DRACUT]


def trial_entry(menu: Menu, title: str, arguments: List[str], old: Menu) -> str:
    """An entry for custom.cfg that starts the kernel of ``menu`` with these arguments.

    If GRUB cannot load the kernel or its initial ramdisk, it starts ``old``. (GRUB 2.06 has ``fallback``, but
    it takes entry numbers only, which depend on the firmware.)
    """
    lines = [f"menuentry '{title}' --id {TRIAL} {{", "\tset loaded=no"]
    for line in menu.body:
        text = line.strip()
        match = _LINUX.match(line)
        if match:
            words = " ".join([match.group("command"), match.group("kernel")] + arguments)
            lines.append(f"\tif {words}; then set loaded=yes; fi")
        elif text.startswith("initrd"):
            lines.append("\tif [ $loaded = yes ]; then")
            lines.append(f"\t\tif {text}; then set loaded=yes; else set loaded=no; fi")
            lines.append("\tfi")
        elif text != "savedefault":
            lines.append("\t" + text)
    lines.append("\tif [ $loaded = no ]; then")
    lines += ["\t\t" + line.strip() for line in old.body if line.strip() != "savedefault"]
    return "\n".join(lines + ["\tfi", "}"])


def copy_bls(text: str, title: str, arguments: List[str]) -> str:
    """A Boot Loader Specification file with another title and these kernel arguments."""
    lines = []
    for line in text.splitlines():
        key = line.split(None, 1)[0] if line.strip() else ""
        if key == "title":
            line = "title " + title
        if key == "options":
            line = "options " + " ".join(arguments)
        if key != "id":
            lines.append(line)
    return "\n".join(lines) + "\n"


def with_block(text: str, block: str) -> str:
    """Replace our block in custom.cfg; an empty block removes it."""
    kept = re.sub(rf"(?ms)^{re.escape(_BEGIN)}$.*?^{re.escape(_END)}$\n?", "", text)
    if not block:
        return kept
    if kept and not kept.endswith("\n"):
        kept += "\n"
    return f"{kept}{_BEGIN}\n{block}\n{_END}\n"
