"""A batch's bytes there and back over loopback, by the libraries that could carry them.

    python benchmarks/transports.py [--rounds 5] [--seconds 1]

A client and a server, a process and a thread each, exchange messages of the sizes of a pull: the keys of so
many distinct ids, and their rows, which must arrive in memory that the client has for them. `socket` is
blocking send and recv of all that is left, `asio` what our servers and clients do: at most 1 MiB a call.
Contenders take turns; the table has medians of the rounds. Debian's packages of ZeroMQ and nng are unpacked
in a cache that git ignores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

import processes
from reporting import RESULTS, header, table

SOURCE = Path(__file__).resolve().parent / "peers" / "transports.cc"
KINDS = ("socket", "asio", "zeromq", "nng")
DEBIAN = ("libzmq3-dev", "libzmq5", "libnng-dev", "libnng1")
NEEDED = ("libsodium23", "libpgm-5.3-0", "libnorm1", "libbsd0", "libmd0", "libgssapi-krb5-2")
TLS_OF_NNG = ("libmbedtls14", "libmbedx509-1", "libmbedcrypto7")
# What is exchanged: bytes there, bytes back. Skewed ids repeat: 36,000 of a batch of 4096 x 26 are distinct.
SHAPES = {
    "64 B and 64 B": (64, 64),
    "36,000 keys, rows of dim 9": (36_000 * 8, 36_000 * 36),
    "36,000 keys, rows of dim 64": (36_000 * 8, 36_000 * 256),
}


def build() -> tuple[Path, Path]:
    """The program, and the directory of the libraries that it needs. Raises `Missing`."""
    usr = processes.debian("transports", (*DEBIAN, *NEEDED, *TLS_OF_NNG)) / "usr"
    libraries = usr / "lib" / "x86_64-linux-gnu"
    where = [f"-isystem{usr / 'include'}", f"-L{libraries}", f"-Wl,-rpath-link,{libraries}"]
    return processes.compile_peer(SOURCE, *where, "-lzmq", "-lnng", "-lpthread"), libraries


def measure(
    program: Path, libraries: Path, kind: str, shape: tuple[int, int], seconds: float
) -> tuple[float, ...]:
    """Median, 99th percentile and processor time of both sides of a round trip, in microseconds."""
    done = subprocess.run(
        [str(program), kind, str(shape[0]), str(shape[1]), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
    )
    return tuple(float(word) for word in done.stdout.split())


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "transports.md")
    options = parser.parse_args()
    try:
        program, libraries = build()
    except processes.Missing as missing:
        print(f"error: {missing}", file=sys.stderr)
        return 1
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for _ in range(options.rounds):
        for name, shape in SHAPES.items():
            for kind in KINDS:
                found.setdefault((name, kind), []).append(
                    measure(program, libraries, kind, shape, options.seconds)
                )
    text = header("A batch's bytes over loopback, by library")
    text += (
        f"Medians of {options.rounds} rounds in turns, and as a multiple of plain sockets in each round.\n"
    )
    for name in SHAPES:
        rows = []
        for kind in KINDS:
            runs, plain = found[name, kind], found[name, "socket"]
            middle, high, cpu = (statistics.median(run[i] for run in runs) for i in range(3))
            ratios = [
                statistics.median(a[i] / b[i] for a, b in zip(runs, plain, strict=True)) for i in (0, 2)
            ]
            cells = [
                f"{middle:,.0f}",
                f"{ratios[0]:.2f} ×",
                f"{high:,.0f}",
                f"{cpu:,.0f}",
                f"{ratios[1]:.2f} ×",
            ]
            rows.append([kind, *cells])
        text += f"\n## {name}\n\n"
        columns = ["", "round trip, µs", "of sockets", "99th percentile", "processor time, µs", "of sockets"]
        text += table(columns, rows)
    options.out.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
