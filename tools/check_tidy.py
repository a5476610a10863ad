"""Check what no other linter checks: one class per name, names, long functions, files that nothing names.

``python tools/check_tidy.py`` (part of ``make lint``) prints a line per finding; exit code 1 if there are
any. ``tidy_exceptions.txt`` beside it lists today's exceptions with their reasons. An exception that is not
needed any more is a finding too, so the list can only shrink.
"""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

EXCEPTIONS = Path(__file__).with_name("tidy_exceptions.txt")
LONGEST = 70  # lines of a function; a longer one's exception says how many it may have
PREPOSITIONS = "of|in|at|on|by|for|with|from|to|into|under|over|after|before|as|about|without|beside"
# "_of_rows" says whose, not what is done; "on" alone, not even that.
NO_NAME = re.compile(rf"_*(of_\w+|{PREPOSITIONS})")
# Words that were modules here, and did not say what they held.
NO_MODULE = {"bodies", "come_after_others", "excuse", "fresh", "longer", "misc", "poke", "unchanged", "utils"}
TEST_FOLDERS = {"pytorch": "torch", "tfkeras": "tf_keras"}  # with another name than theirs
# Found by their folder, their ending or a tool's rule, not by their name.
UNNAMED = re.compile(
    r"(^|/)(\.[^/]+|__init__\.py|__main__\.py|conftest\.py|test_[^/]+\.py|[A-Z_]+(\.md)?)$"
    r"|^(roles|examples|\.github|meta|LICENSES)/|^tests/(.*(cases|corpus|doctor|planviews|formats|openembedding)|sanity)/"
    r"|^oe_runtime/core/.+\.cc$|^docs/design/decisions/|\.(json|svg|png|pyi)$"
)
_CPP_CLASS = re.compile(r"^(?:class|struct) (\w+)(?: final)?(?: : .+)? \{", re.MULTILINE)
# clang-format has laid it out: a function outside classes begins and ends at the margin.
_CPP_FUNCTION = re.compile(r"^[A-Za-z][^\n]*(?:\n {4}[^\n]*)*? \{\n.*?^\}", re.MULTILINE | re.DOTALL)
_CPP_BLOCK = re.compile(r"namespace|class|struct|enum|union|extern|template|const(?:expr)?\s|static\s+const")

Finding = tuple[str, str]  # what an exception names, and what is wrong


def main() -> int:
    """Print what is wrong, and return the exit code."""
    top = Path(__file__).parents[1]
    git = ["git", "-C", str(top), "ls-files", "-z"]
    listed = subprocess.run(git, check=True, capture_output=True, text=True).stdout
    texts = {}
    for name in filter(None, listed.split("\0")):
        if (top / name).is_file():
            texts[name] = (top / name).read_text(encoding="utf-8", errors="replace")
    allowed = dict(re.findall(r"^([^#\s]\S*) +(.+)$", EXCEPTIONS.read_text(encoding="utf-8"), re.MULTILINE))
    code, used = 0, set()
    for key, wrong in findings(texts):
        used.add(key)
        if key not in allowed:
            print(wrong)
            code = 1
    for key in allowed.keys() - used:
        print(f"{EXCEPTIONS.name}: {key} is not needed any more; remove the line")
        code = 1
    return code


def findings(texts: dict[str, str]) -> Iterator[Finding]:
    """All that is wrong with files, by their path."""
    python = {
        name: ast.parse(text, name)
        for name, text in texts.items()
        if name.endswith(".py") and name.startswith(("provision/", "oe_runtime/", "plugins/", "tools/"))
    }
    core = {
        name: text
        for name, text in texts.items()
        if name.startswith("oe_runtime/core/") and name.endswith((".h", ".cc")) and "_test.cc" not in name
    }
    yield from duplicate_classes(python, core)
    yield from bad_names(python)
    yield from long_functions(python, core)
    yield from misplaced_tests(texts)
    yield from unnamed_files(texts)


def duplicate_classes(python: dict[str, ast.Module], core: dict[str, str]) -> Iterator[Finding]:
    """Names that several classes of a package have."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, tree in python.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[name.split("/")[0], node.name].append(f"{name}:{node.lineno}")
    for name, text in core.items():
        for match in _CPP_CLASS.finditer(text):
            places["core", match[1]].append(f"{name}:{text.count(chr(10), 0, match.start()) + 1}")
    for (package, name), found in places.items():
        if len(found) > 1:
            where = ", ".join(found)
            yield f"{package}:{name}", f"class {name}: {where}; one class per name (docs/glossary.md)"


def bad_names(python: dict[str, ast.Module]) -> Iterator[Finding]:
    """Functions and modules whose names do not say what they do or hold."""
    for name, tree in python.items():
        if Path(name).stem in NO_MODULE:
            yield name, f"{name}: a module's name says what is in it"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and NO_NAME.fullmatch(node.name):
                yield (
                    f"{Path(name).name}:{node.name}",
                    f"{name}:{node.lineno}: {node.name}: a function's name is a verb",
                )


def long_functions(python: dict[str, ast.Module], core: dict[str, str]) -> Iterator[Finding]:
    """Functions of more lines than fit a screen."""
    for name, tree in python.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _too_long(name, node.lineno, node.name, (node.end_lineno or 0) - node.lineno + 1)
    for name, text in core.items():
        for match in _CPP_FUNCTION.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            function = re.search(r"([\w:~]+)\(", match[0])
            if not _CPP_BLOCK.match(match[0]) and function:
                yield from _too_long(name, line, function[1], match[0].count("\n") + 1)


def _too_long(name: str, line: int, function: str, length: int) -> Iterator[Finding]:
    if length > LONGEST:
        most = -(-length // 10) * 10  # an exception's: the function may grow by less than ten lines
        yield (
            f"{Path(name).name}:{function}:{most}",
            f"{name}:{line}: {function} has {length} lines; most: {LONGEST}",
        )


def misplaced_tests(texts: dict[str, str]) -> Iterator[Finding]:
    """Folders of tests that no folder of the package has."""
    folders = {str(Path(name).parent) for name in texts}
    for name in texts:
        if match := re.match(r"tests/(provision|oe_runtime)/(.+)/test_\w+\.py$", name):
            own = f"{match[1]}/{match[2]}"
            if not folders & {own, f"{match[1]}/{TEST_FOLDERS.get(match[2], match[2])}"}:
                yield name, f"{name}: {own} is no folder; tests lie as what they test"


def unnamed_files(texts: dict[str, str]) -> Iterator[Finding]:
    """Files whose name, without its ending in code, stands in no other file."""
    words = {name: set(re.findall(r"[\w-]+(?:\.[\w-]+)*", text)) for name, text in texts.items()}
    count: dict[str, int] = defaultdict(int)
    for found in words.values():
        for part in {part for word in found for part in (word, *word.split("."))}:
            count[part] += 1
    for name, text in texts.items():
        path = Path(name)
        is_named = any(count[word] > (word in re.split(r"[^\w-]+", text)) for word in (path.name, path.stem))
        if not is_named and not UNNAMED.search(name):
            yield name, f"{name}: no other file names it; remove it, or name it where it is used"


if __name__ == "__main__":
    sys.exit(main())
