"""Virtual nodes with persistent memory, to try everything on without hardware: ``oeprov lab``."""

from __future__ import annotations

from provision.lab.lab import Lab
from provision.lab.node import Node

__all__ = ["Lab", "Node"]
