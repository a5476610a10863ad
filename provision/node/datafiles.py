"""Check whether foreign scripts can read data: ``python -c TEXT KIND PATH …``, on the host that reads it.

KIND is ``header`` (HINT COLUMN …: a .csv whose first line names the columns), ``records`` (HINT: a directory
of TFRecords with a file ``meta``), ``tables`` (NUMBER FILE …: a directory with the files, of NUMBER columns
with commas), ``any`` (something is there) or ``match`` (PATH …: the same of each, also for patterns). Ends
with 0, or with 1 and one line ``error: PATH …``. It is one file for any Python 3.6 and later.
"""

import glob
import os
import sys
from typing import List

MOST = 1 << 20  # bytes of a line


def problem(kind: str, path: str, *more: str) -> str:
    """What is wrong with the data; empty if nothing is."""
    try:
        if kind == "header":
            return header(path, more[0], list(more[1:]))
        if kind == "match":
            return match(path, *more)
        os.stat(path)
        if kind == "any" or (kind == "records" and os.path.isfile(os.path.join(path, "meta"))):
            return ""
        if kind == "records":
            return f"{path}: neither a .csv nor a directory of TFRecords with a file `meta`; {more[0]}"
        return tables(path, int(more[0]), list(more[1:]))
    except OSError as error:
        return f"{error.filename or path}: {error.strerror}"


def match(*paths: str) -> str:
    """Whether there is something of each name or pattern."""
    for path in paths:
        if not glob.has_magic(path) or os.path.exists(path):
            os.stat(path)
        elif not glob.glob(path, recursive=True):
            return f"no file matches {path}"
    return ""


def header(path: str, hint: str, columns: List[str]) -> str:
    """Whether the first line of a .csv names the columns."""
    line = first_line(path)
    if not line:
        return f"{path} is empty"
    names = [name.strip() for name in line.split(",")]
    missing = [name for name in columns if name not in names]
    if not missing:
        return ""
    return f"{path}: its first line does not name column {missing[0]}; {hint}"


def tables(path: str, number: int, files: List[str]) -> str:
    """Whether a directory has the files, each with ``number`` columns and without a header."""
    for name in files:
        file = os.path.join(path, name)
        if not os.path.isfile(file):
            return f"{path} has no {name}; DeepRec's scripts read {' and '.join(files)}"
        line = first_line(file)
        found = line.count(",") + 1
        if not line:
            return f"{file} is empty"
        if found != number:
            return f"{file} has {found} comma-separated columns in its first line, expected {number}"
    return ""


def first_line(path: str) -> str:
    """The first line, as far as it is one."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.readline(MOST).strip()


def main(argv: List[str]) -> int:
    """Say what is wrong; the exit status."""
    found = problem(*argv)
    if found:
        sys.stderr.write(f"error: {found}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
