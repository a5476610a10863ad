"""Parse and edit GRUB's defaults: /etc/default/grub and the files that are sourced after it."""

import re
import shlex
from typing import Dict, List, NamedTuple, Optional, Tuple

DEFAULTS = "/etc/default/grub"
OVERRIDES = "/etc/default/grub.d"
CMDLINE = "GRUB_CMDLINE_LINUX"
CMDLINE_DEFAULT = "GRUB_CMDLINE_LINUX_DEFAULT"
# One assignment alone on its line, as a shell reads it: NAME='value', NAME="value" or NAME=plain.
_LINE = re.compile(
    r"""^(?P<head>[ \t]*(?:export[ \t]+)?(?P<name>GRUB_\w+)=)"""
    r"""(?:'(?P<single>[^']*)'|"(?P<double>(?:[^"\\`]|\\.)*)"|(?P<bare>[\w.,:=+@%/^!-]*|\$\w+|\$\{\w+\}))"""
    r"""(?P<tail>[ \t]*|[ \t]+\#.*)$""",
    re.ASCII,
)
_DEFAULT = "GRUB_DEFAULT"
# Characters without a special meaning for the shell that reads the defaults and for GRUB.
_PLAIN = re.compile(r"[\w.,:=+@%/!~*?\[\]()^-]+")


class Assignment(NamedTuple):
    """One line that sets a variable, as it stands in a file."""

    path: str
    line: int
    name: str
    head: str  # up to the =
    value: str  # between its quotes
    quote: str
    tail: str  # a comment

    @property
    def words(self) -> List[str]:
        """The value as kernel arguments."""
        return _words(self.value)

    @property
    def adds(self) -> bool:
        """The line extends the variable's earlier value."""
        return self.quote != "'" and bool(set(_references(self.name)) & set(self.words))


def _words(text: str) -> List[str]:
    """The arguments in a value; blanks that are not ASCII are letters of theirs."""
    return re.findall(r"[^ \t\n]+", text)


def _references(name: str) -> List[str]:
    return ["$" + name, "${" + name + "}"]


def _parse(path: str, number: int, line: str) -> Optional[Assignment]:
    """The assignment in a line; None for anything else, and for one that oeprov does not understand."""
    match = _LINE.match(line)
    if match is None:
        return None
    quote = "'" if match.group("single") is not None else '"' if match.group("double") is not None else ""
    value = match.group("single") or match.group("double") or match.group("bare") or ""
    name, head, tail = match.group("name", "head", "tail")
    found = Assignment(path, number, name, head, value, quote, tail)
    shown = [word for word in _words(re.sub(r"\\.", "", value)) if quote != "'" and "$" in word]
    # Without quotes, `export` splits what a variable holds.
    if set(shown) - set(_references(found.name)) or (shown and not quote and "export" in found.head):
        return None
    return found


def _all_assignments(files: Dict[str, str], name: str) -> List[Assignment]:
    """Every line of all files that sets ``name`` and is understood, in the order of the shell."""
    parsed = (
        _parse(path, number, line)
        for path, text in files.items()
        for number, line in enumerate(text.split("\n"))
    )
    return [item for item in parsed if item and item.name == name]


def assignments(files: Dict[str, str], name: str) -> List[Assignment]:
    """The lines that set ``name``, from the last one that replaces the earlier value."""
    found: List[Assignment] = []
    for item in _all_assignments(files, name):
        found = found + [item] if item.adds else [item]
    return found


def unreadable(files: Dict[str, str], names: Tuple[str, ...] = (CMDLINE, CMDLINE_DEFAULT)) -> List[str]:
    """Places (file:line) that set one of ``names`` so that oeprov cannot edit them: over two lines, say."""
    sets = re.compile(r"\b(?:{}):?\+?=".format("|".join(names)))
    found = []
    for path, text in files.items():
        before = ""
        for number, line in enumerate(text.split("\n")):
            if line.lstrip().startswith("#"):
                continue
            if sets.search(line) and (_parse(path, number, line) is None or before.endswith("\\")):
                found.append(f"{path}:{number + 1}")
            before = line
    return found


def value_of(files: Dict[str, str], name: str) -> List[str]:
    """Kernel arguments of a variable after all files are sourced in their order."""
    words: List[str] = []
    for item in assignments(files, name):
        own = [word for word in item.words if not (item.adds and word in _references(name))]
        words = words + own if item.adds else own
    return words


def configured_words(files: Dict[str, str]) -> List[str]:
    """Kernel arguments of ordinary entries."""
    return value_of(files, CMDLINE) + value_of(files, CMDLINE_DEFAULT)


def cmdline_values(text: str) -> List[str]:
    """Values of all GRUB_CMDLINE_LINUX lines of one file; a shell sources it, so the last one counts."""
    return [item.value for item in _all_assignments({"": text}, CMDLINE)]


def edit_arguments(files: Dict[str, str], add: List[str], remove: List[str]) -> Dict[str, str]:
    """Add arguments to the effective GRUB_CMDLINE_LINUX line, and remove arguments from all lines.

    A second such line is never appended: it would erase ``console=``, ``crashkernel=`` and the rest. If there
    is no line, the defaults file gets one. Nothing else changes; the second time nothing changes at all.
    """
    lines = {path: text.split("\n") for path, text in files.items()}
    lines.setdefault(DEFAULTS, [""])
    missing = [word for word in add if word not in configured_words(files)]
    own = assignments(files, CMDLINE)
    extends = bool(own) and not (own[0].adds and own[0].path != DEFAULTS)
    for item in own + assignments(files, CMDLINE_DEFAULT):
        words = [word for word in item.words if word not in remove]
        if extends and item is own[0]:
            words += missing
        if words != item.words:
            lines[item.path][item.line] = _line(item, " ".join(words))
    if missing and not extends:
        _append(lines[DEFAULTS], '{}="{}"'.format(CMDLINE, " ".join(missing)))
    return {path: "\n".join(found) for path, found in lines.items()}


def _append(lines: List[str], line: str) -> None:
    """Add a line at the end; the text ends with a newline then."""
    lines[-1:] = [lines[-1], line, ""] if lines[-1] else [line, ""]


def _line(item: Assignment, value: str) -> str:
    quote = item.quote or '"'  # without quotes, it could not hold a second word
    return item.head + quote + value + quote + item.tail


def edit_default(files: Dict[str, str], value: str) -> Dict[str, str]:
    """Set GRUB_DEFAULT to ``value`` in the file that sets it last, else in the defaults file.

    An empty value removes the lines that set it there.
    """
    found = _all_assignments(files, _DEFAULT)
    path = found[-1].path if found else DEFAULTS
    own = {item.line: item for item in found if item.path == path}
    lines = files.get(path, "").split("\n")
    for number, item in sorted(own.items(), reverse=True):
        lines[number : number + 1] = [item.head + _quote(value) + item.tail] if value else []
    if value and not own:
        lines.insert(0, _DEFAULT + "=" + _quote(value))
    return dict(files, **{path: "\n".join(lines)})


def _quote(value: str) -> str:
    """A value as one word for the shell, in a form that ``default_of`` reads too."""
    if "'" not in value:
        return shlex.quote(value)
    return '"' + re.sub(r"""(["\\$`])""", r"\\\1", value) + '"'


def default_of(files: Dict[str, str]) -> str:
    """The last value of GRUB_DEFAULT; empty if it is not set."""
    found = _all_assignments(files, _DEFAULT)
    if not found:
        return ""
    value = found[-1].value
    return re.sub(r"""\\(["\\$`])""", r"\1", value) if found[-1].quote == '"' else value


def shell_script(before: Dict[str, str], after: Dict[str, str]) -> Tuple[List[str], str]:
    """Variables of GRUB that the files name, and a script that prints their values, each ended by a NUL byte.

    The script's arguments are the texts, in their order. It reads them as grub-mkconfig does.
    """
    texts = list(before.values()) + list(after.values())
    names = sorted({name for text in texts for name in re.findall(r"\bGRUB_\w+", text, re.ASCII)})
    values = " ".join('"${' + name + '-}"' for name in names)
    return names, f'exec 3>&1 >/dev/null; for text do eval "$text"; done; printf "%s\\0" {values} >&3'


def wrong_values(
    before: Dict[str, str], after: Dict[str, str], add: List[str], remove: List[str], default: Optional[str]
) -> List[str]:
    """Variables that a shell does not read as an edit meant them; ``default``: the value for GRUB_DEFAULT."""
    words = _words(after.get(CMDLINE, "")) + _words(after.get(CMDLINE_DEFAULT, ""))
    found = [CMDLINE] if set(add) - set(words) or set(remove) & set(words) else []
    for name in sorted(set(before) | set(after)):
        old, new = before.get(name, ""), after.get(name, "")
        if name == _DEFAULT and default is not None:
            same = new == default
        elif name in (CMDLINE, CMDLINE_DEFAULT):
            changed = set(add) | set(remove)
            kept = [[word for word in _words(text) if word not in changed] for text in (old, new)]
            same = kept[0] == kept[1]
        else:
            same = old == new
        found += [] if same else [name]
    return found


def quoting_problems(words: List[str]) -> List[str]:
    """Arguments with characters that GRUB or the shell would interpret."""
    return [
        f"kernel argument {word!r}: GRUB would need it quoted; write it into {DEFAULTS} by hand"
        for word in words
        if not _PLAIN.fullmatch(word)
    ]
