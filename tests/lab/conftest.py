"""Virtual nodes for tests that ``make test-lab`` runs; ``make test`` leaves their marker out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from provision.lab import Lab, programs

IMAGES = Path(__file__).parents[2] / ".oeprov/lab/images"


@pytest.fixture(scope="session")
def lab_possible() -> None:
    """Skips where virtual nodes cannot be made, and says why."""
    if os.geteuid() != 0:
        pytest.skip("the lab needs root to build its image")
    missing = programs.missing()
    if missing:
        pytest.skip("the lab needs " + " ".join(programs.install_command(missing)))


@pytest.fixture(scope="module")
def new_lab(lab_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Lab]]:
    """Brings up a lab of a shape (the arguments of ``Lab.up``); the one before it is taken down first."""
    made: list[Lab] = []

    def make(**shape: Any) -> Lab:
        take_down(made)
        directory = tmp_path_factory.mktemp("lab")
        lab = Lab(directory, images=IMAGES, inventory=directory / "lab.yml", report=print)
        made.append(lab)
        lab.up(**shape)
        return lab

    yield make
    take_down(made)


def take_down(labs: list[Lab]) -> None:
    while labs:
        labs.pop().down()
