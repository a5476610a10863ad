"""Admission and eviction rules of the command line: `cbf:3`, `global_step:4000`.

`oe_runtime.TableSpec` explains them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

_FALSE_POSITIVES = 0.01  # DeepRec's model zoo

ADMISSION_HELP = "counter:TIMES[:MOST_IDS] or cbf:TIMES[:MOST_IDS[:PROBABILITY]]"
EVICTION_HELP = (
    "global_step:STEPS[:EVERY], l2_weight:THRESHOLD[:EVERY], ttl:SECONDS[:EVERY], cap:ROWS[:lru|lfu]"
)


def admission(text: str) -> dict[str, Any]:
    """Parse ADMISSION_HELP's forms to `TableSpec.admission`; argparse's error for anything else.

    Without MOST_IDS, a cbf's `max_element_size` is left out: a field knows its number of ids.
    """
    name, *words = text.split(":")
    policy: dict[str, Any] = {"name": name}
    if name == "counter":
        _take(policy, text, words, ADMISSION_HELP, {"filter_freq": int, "max_keys": int})
    elif name == "cbf":
        policy["false_positive_probability"] = _FALSE_POSITIVES
        kinds = {"filter_freq": int, "max_element_size": int, "false_positive_probability": float}
        _take(policy, text, words, ADMISSION_HELP, kinds)
    else:
        raise argparse.ArgumentTypeError(f"'{text}' is none of {ADMISSION_HELP}")
    return policy


def eviction(text: str) -> list[dict[str, Any]]:
    """Parse a comma-separated list of EVICTION_HELP's forms to `TableSpec.eviction`."""
    return [_eviction(part) for part in text.split(",")]


def _eviction(text: str) -> dict[str, Any]:
    name, *words = text.split(":")
    forms: Mapping[str, Mapping[str, Callable[[str], Any]]] = {
        "global_step": {"steps_to_live": int, "every_steps": int},
        "l2_weight": {"threshold": float, "every_steps": int},
        "ttl": {"seconds": int, "every_steps": int},
        "cap": {"max_rows": int, "policy": _cap_policy},
    }
    if name not in forms:
        raise argparse.ArgumentTypeError(f"'{text}' is none of {EVICTION_HELP}")
    policy: dict[str, Any] = {"name": name}
    if name == "cap":
        policy["policy"] = "lru"
    _take(policy, text, words, EVICTION_HELP, forms[name])
    return policy


def _cap_policy(word: str) -> str:
    if word not in ("lru", "lfu"):
        raise ValueError(word)
    return word


def _take(
    policy: dict[str, Any], text: str, words: list[str], forms: str, kinds: Mapping[str, Callable[[str], Any]]
) -> None:
    """Put the words into `policy` under the names of `kinds`; the first is required."""
    if not 1 <= len(words) <= len(kinds):
        raise argparse.ArgumentTypeError(f"'{text}' is none of {forms}")
    for word, (name, kind) in zip(words, kinds.items(), strict=False):
        try:
            policy[name] = kind(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}': '{word}' cannot be {name}") from None
