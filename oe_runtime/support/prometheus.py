"""Pages for Prometheus (text format 0.0.4).

The format is written here, not by python3-prometheus-client: servers' hosts have no packages from PyPI, and
the counters live in the core. See https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Samples = list[tuple[dict[str, str], Any]]  # labels and value


def read_metrics(table: str) -> Iterator[list[str]]:
    """Return type, name, place in the statistics and help of each metric; indented lines continue one."""
    for line in table.replace("\n    ", " ").strip().splitlines():
        yield line.split(maxsplit=3)


def find_samples(found: Samples, place: str) -> Samples:
    """Return what is at a place below those `found`, with its labels; nothing if the place is not there.

    LABEL=* are all entries of a place, and LABEL=a,b some, under their keys as that label.
    """
    for name in place.split("."):
        label, is_each, keys = name.partition("=")
        if is_each:
            found = [
                ({**labels, label: key}, value[key])
                for labels, value in found
                for key in (value if keys == "*" else keys.split(","))
            ]
        else:
            found = [(labels, value[name]) for labels, value in found if name in value]
    return found


class Page:
    """Metrics with their samples."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, kind: str, name: str, what: str, samples: Sequence[tuple[Mapping[str, str], Any]]) -> None:
        """Add a metric with its samples, if there are any."""
        if samples:
            self._lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]
        for labels, value in samples:
            if kind == "histogram":
                self._add_histogram(name, labels, value)
            else:
                self._lines.append(_line(name, labels, value))

    def _add_histogram(self, name: str, labels: Mapping[str, str], times: Mapping[str, Any]) -> None:
        """Add the samples of a histogram from the core's counts, which are per bucket."""
        total = 0
        for bound, count in zip([*times["bounds"], None], times["counts"], strict=True):
            total += count
            le = "+Inf" if bound is None else repr(float(bound))
            self._lines.append(_line(f"{name}_bucket", {**labels, "le": le}, total))
        self._lines.append(_line(f"{name}_sum", labels, times["sum_seconds"]))
        self._lines.append(_line(f"{name}_count", labels, total))

    def text(self) -> str:
        """Return the page."""
        return "\n".join(self._lines) + "\n"


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    escaped = ",".join(
        '{}="{}"'.format(key, text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
        for key, text in labels.items()
    )
    return f"{name}{{{escaped}}} {value!r}" if escaped else f"{name} {value!r}"
