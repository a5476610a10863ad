"""What benchmarks of the C++ core share: building their programs, and naming the machine."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "bench"
FOLDER = BUILD / "oe_runtime" / "core"  # of the programs


def build(*names: str) -> None:
    """Build programs, whose sources lie beside the benchmarks."""
    options = ("-DOE_BUILD_PYTHON=OFF", "-DOE_BUILD_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release")
    subprocess.run(["cmake", "-G", "Ninja", "-S", ROOT, "-B", BUILD, *options], check=True, stdout=sys.stderr)
    subprocess.run(["cmake", "--build", BUILD, "--target", *names], check=True, stdout=sys.stderr)


def machine() -> str:
    """When, and on which machine."""
    text = Path("/proc/cpuinfo").read_text()
    names = [line.split(":")[1].strip() for line in text.splitlines() if "model name" in line]
    processor = names[0] if names else platform.machine()
    return (
        f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, {os.cpu_count()} × {processor}, "
        f"Linux {platform.release()}"
    )
