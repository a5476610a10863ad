"""Draw the pictures of README.md into docs/images: `make pictures`.

It needs chromium with its driver (apt-get install chromium chromium-driver), and takes two minutes.

plan.svg is what `oeprov plan --offline` prints for one host; dashboard.png is `oeprov dashboard` beside a
job on this machine. Look at both before you commit them.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import NIGHT_OWLISH
from rich.text import Text
from selenium import webdriver

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
OEPROV = str(Path(sys.executable).with_name("oeprov"))
WIDTH = 110
INVENTORY = """
all:
  children:
    parameter_servers:
      hosts:
        re6p-1:
          ansible_host: 192.0.2.11
          oeprov_kind: re6p
          kernel_version: newest
          kernel_source: elrepo-lt
          pmem_mode: fsdax
    workers:
      hosts:
        re6p-1:
"""


def draw_plan(directory: Path) -> None:
    """The plan as an SVG that loads no fonts."""
    (directory / "inventory.yml").write_text(INVENTORY)
    printed = subprocess.run(
        [OEPROV, "plan", "--offline"],
        cwd=directory,
        env={**os.environ, "COLUMNS": str(WIDTH), "FORCE_COLOR": "1"},
        capture_output=True,
        text=True,
    ).stdout
    printed = "\n".join(line for line in printed.splitlines() if "note" not in line)  # too long
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere)
        console.print(Text.from_ansi(printed.rstrip()), soft_wrap=True)
        form = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
        svg = console.export_svg(title="oeprov plan --offline", theme=NIGHT_OWLISH, code_format=form)
    svg = svg.replace("Fira Code", "DejaVu Sans Mono")
    (IMAGES / "plan.svg").write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


def draw_dashboard(directory: Path) -> None:
    """The dashboard while a job trains."""
    shutil.copy(ROOT / "inventory" / "local.yml", directory)
    inventory = ["-i", "local.yml"]
    quiet = {"cwd": directory, "stdout": subprocess.DEVNULL}
    subprocess.run([OEPROV, "bootstrap", *inventory, "--yes"], check=True, **quiet)
    job = ["--data", "generate:300000", "--epochs", "100", "--checkpoint-steps", "50", "--detach"]
    subprocess.run([OEPROV, "launch-training", *inventory, *job], check=True, **quiet)
    dashboard = subprocess.Popen(
        [OEPROV, "dashboard", *inventory], cwd=directory, stdout=subprocess.PIPE, text=True
    )
    try:
        address = next(found[0] for line in dashboard.stdout if (found := re.search(r"http://\S+", line)))
        options = webdriver.ChromeOptions()
        for flag in ("--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,765"):
            options.add_argument(flag)
        with webdriver.Chrome(
            options=options, service=webdriver.ChromeService("/usr/bin/chromedriver")
        ) as browser:
            browser.get(address)
            time.sleep(60)  # so that the curves have a shape
            browser.save_screenshot(str(IMAGES / "dashboard.png"))
    finally:
        dashboard.terminate()
        dashboard.wait()
        subprocess.run([OEPROV, "stop"], **quiet)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        draw_plan(Path(scratch))
        if "--plan-only" not in sys.argv:
            draw_dashboard(Path(scratch))
