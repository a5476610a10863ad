"""Criteo's columns: a label, 13 integers, 26 categories."""

from __future__ import annotations

INTEGERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = ("label", *INTEGERS, *CATEGORIES)

# Distinct values of C1..C26 in Criteo's Kaggle data after the usual rare-value filter.
CARDINALITIES = (
    1396, 553, 2594031, 698469, 290, 23, 12048, 608, 3, 65156, 5309, 2186509, 3128,
    26, 12750, 1537323, 10, 5002, 2118, 4, 1902327, 17, 15, 135790, 94, 84305,
)  # fmt: skip


def field_cardinalities(max_cardinality: int = 0) -> tuple[int, ...]:
    """Return the distinct values of each of the 26 fields; 0 means Criteo's own numbers."""
    if max_cardinality <= 0:
        return CARDINALITIES
    return tuple(min(c, max_cardinality) for c in CARDINALITIES)


def field_rows(max_cardinality: int = 0) -> tuple[int, ...]:
    """Return the rows of each field's embedding: its cardinality plus one for 'missing'."""
    return tuple(c + 1 for c in field_cardinalities(max_cardinality))
