"""Parse and edit GRUB's defaults: /etc/default/grub and the files that are sourced after it."""

import re
import shlex
from typing import Dict, List, NamedTuple

DEFAULTS = "/etc/default/grub"
OVERRIDES = "/etc/default/grub.d"
CMDLINE = "GRUB_CMDLINE_LINUX"
CMDLINE_DEFAULT = "GRUB_CMDLINE_LINUX_DEFAULT"
_LINE = re.compile(
    r"""^(?P<head>\s*(?:export\s+)?(?P<name>GRUB_CMDLINE_LINUX(?:_DEFAULT)?)=)(?P<quote>["']?)(?P<value>.*?)(?P=quote)"""
    r"""(?P<tail>\s*(?:#.*)?)$"""
)
_STARTS = re.compile(r"^\s*(?:export\s+)?GRUB_CMDLINE_LINUX(?:_DEFAULT)?\+?=")
_DEFAULT = re.compile(
    r"""^\s*GRUB_DEFAULT=(?:(?P<quote>["'])(?P<quoted>.*?)(?P=quote)|(?P<bare>[^"'#\s]*))"""
)
# Characters without a special meaning for the shell that reads the defaults and for GRUB.
_PLAIN = re.compile(r"[\w.,:=+@%/!~*?\[\]()^-]+")


class Assignment(NamedTuple):
    """One line that sets a variable of kernel arguments."""

    path: str
    line: int
    name: str
    words: List[str]

    @property
    def adds(self) -> bool:
        """The line extends the variable's earlier value."""
        return bool({"$" + self.name, "${" + self.name + "}"} & set(self.words))


def assignments(files: Dict[str, str], name: str) -> List[Assignment]:
    """The lines that set ``name``, from the last one that replaces the earlier value."""
    found: List[Assignment] = []
    for path, text in files.items():
        for number, line in enumerate(text.splitlines()):
            match = _LINE.match(line)
            if match and match.group("name") == name:
                item = Assignment(path, number, name, match.group("value").split())
                found = found + [item] if item.adds else [item]
    return found


def unreadable(files: Dict[str, str]) -> List[str]:
    """Places (file:line) that set kernel arguments so that oeprov cannot edit them: over two lines, say."""
    return [
        f"{path}:{number + 1}"
        for path, text in files.items()
        for number, line in enumerate(text.splitlines())
        if _STARTS.match(line) and (not _LINE.match(line) or line.rstrip().endswith("\\"))
    ]


def value_of(files: Dict[str, str], name: str) -> List[str]:
    """Kernel arguments of a variable after all files are sourced in their order."""
    words: List[str] = []
    for item in assignments(files, name):
        words = words + [word for word in item.words if name not in word] if item.adds else item.words
    return words


def configured_words(files: Dict[str, str]) -> List[str]:
    """Kernel arguments of ordinary entries."""
    return value_of(files, CMDLINE) + value_of(files, CMDLINE_DEFAULT)


def cmdline_values(text: str) -> List[str]:
    """Values of all GRUB_CMDLINE_LINUX lines of one file; a shell sources it, so the last one counts."""
    found = [_LINE.match(line) for line in text.splitlines()]
    return [match.group("value") for match in found if match and match.group("name") == CMDLINE]


def edit_arguments(files: Dict[str, str], add: List[str], remove: List[str]) -> Dict[str, str]:
    """Add arguments to the effective GRUB_CMDLINE_LINUX line, and remove arguments from all lines.

    A second such line is never appended: it would erase ``console=``, ``crashkernel=`` and the rest. If there
    is no line, the defaults file gets one. Nothing else changes; the second time nothing changes at all.
    """
    lines = {path: text.splitlines() for path, text in files.items()}
    lines.setdefault(DEFAULTS, [])
    missing = [word for word in add if word not in configured_words(files)]
    own = assignments(files, CMDLINE)
    for number, item in enumerate(own + assignments(files, CMDLINE_DEFAULT)):
        words = [word for word in item.words if word not in remove]
        if number == 0 and own and not item.adds:
            words += missing
        if words != item.words:
            lines[item.path][item.line] = _with_words(lines[item.path][item.line], words)
    if missing and (not own or own[0].adds):
        lines[DEFAULTS].append('{}="{}"'.format(CMDLINE, " ".join(missing)))
    return {
        path: _text(lines[path]) if lines[path] != files.get(path, "").splitlines() else files[path]
        for path in lines
    }


def _text(lines: List[str]) -> str:
    return "".join(line + "\n" for line in lines)


def _with_words(line: str, words: List[str]) -> str:
    match = _LINE.match(line)
    if match is None:
        return line
    quote = match.group("quote") or '"'  # an unquoted value could not hold a second word
    return match.group("head") + quote + " ".join(words) + quote + match.group("tail")


def edit_default(files: Dict[str, str], value: str) -> Dict[str, str]:
    """Set GRUB_DEFAULT to ``value`` in the file that sets it last, else in the defaults file.

    An empty value removes the lines that set it there.
    """
    path = next((path for path in reversed(list(files)) if default_of({path: files[path]})), DEFAULTS)
    lines = files.get(path, "").splitlines()
    others = [line for line in lines if not _DEFAULT.match(line)]
    if not value:
        return dict(files, **{path: _text(others)})
    new = "GRUB_DEFAULT=" + shlex.quote(value)
    lines = [new if _DEFAULT.match(line) else line for line in lines]
    if len(others) == len(lines):
        lines.insert(0, new)
    return dict(files, **{path: _text(lines)})


def default_of(files: Dict[str, str]) -> str:
    """The last value of GRUB_DEFAULT; empty if it is not set."""
    found = [_DEFAULT.match(line) for text in files.values() for line in text.splitlines()]
    return ([match.group("quoted") or match.group("bare") or "" for match in found if match] or [""])[-1]


def quoting_problems(words: List[str]) -> List[str]:
    """Arguments with characters that GRUB or the shell would interpret."""
    return [
        f"kernel argument {word!r}: GRUB would need it quoted; write it into {DEFAULTS} by hand"
        for word in words
        if not _PLAIN.fullmatch(word)
    ]
