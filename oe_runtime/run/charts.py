"""Line charts as SVG text: axes with round ticks, any number of points, standard SVG only.

A plotting library would add megabytes of scripts to each report (Plotly, Bokeh, Vega) or seconds to each run
(Matplotlib).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def plain(value: float, step: float) -> str:
    """Format a value with as many decimals as the distance between ticks needs."""
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def si(value: float, _step: float = 0) -> str:
    """Format a value with an SI prefix: `0`, `250`, `1.5 k`, `20 M`."""
    for letter, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g} {letter}"
    return f"{value:.4g}"


def binary(value: float, _step: float = 0) -> str:
    """Format bytes in powers of 1024: `512 MiB`."""
    for letter, size in (("Ti", 2**40), ("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}B"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """Format seconds: `1:02` or `3:01:02`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass(frozen=True)
class Series:
    """A line: `y` over ascending `x` ≥ 0, both finite and of one length, at least 1."""

    name: str
    color: str
    x: Floats
    y: Floats


@dataclass(frozen=True)
class Mark:
    """An event at `x`: a line from top to bottom, or a tick on the axis."""

    name: str
    color: str
    x: float
    tick: bool = False


@dataclass(frozen=True)
class Size:
    """The size of a drawing, in pixels."""

    width: int
    height: int


@dataclass(frozen=True)
class Chart:
    """A chart; `level` is a value to compare with, drawn across."""

    title: str
    unit: str
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    level: tuple[str, float] | None = None
    zero: bool = False  # whether the axis begins at 0
    powers_of_two: bool = False  # bytes
    x_name: str = "step"
    form: Callable[[float, float], str] = plain  # a tick, and the distance between ticks, as text

    def buckets(self, size: Size) -> int:
        """Return half the number of points that fit into a line of this size."""
        return (size.width - _LEFT - _RIGHT) // 2


_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 24, 44
LEVEL_COLOR = "#6b4fa0"


def draw(chart: Chart, size: Size, kind: str) -> str:
    """Return the chart as an <svg> of class `kind`."""
    xs = np.concatenate([s.x for s in chart.series])
    ys = np.concatenate([s.y for s in chart.series] + ([np.array([chart.level[1]])] if chart.level else []))
    x_low, x_high = _widened(0.0, float(xs.max()))
    y_low, y_high = _widened(0.0 if chart.zero else float(ys.min()), float(ys.max()))
    y_ticks = ticks(y_low, y_high, max(3, size.height // 45), chart.powers_of_two)
    y_low, y_high = min(y_low, y_ticks[0]), max(y_high, y_ticks[-1])
    x_ticks = [t for t in ticks(x_low, x_high, max(3, size.width // 60)) if t <= x_high]
    inner_width, inner_height = size.width - _LEFT - _RIGHT, size.height - _TOP - _BOTTOM
    bottom = _TOP + inner_height

    def at_x(x: Floats) -> Floats:
        return np.asarray(_LEFT + (x - x_low) / (x_high - x_low) * inner_width)

    def at_y(y: Floats) -> Floats:
        return np.asarray(bottom - (y - y_low) / (y_high - y_low) * inner_height)

    parts = [
        f'<svg class="{kind}" viewBox="0 0 {size.width} {size.height}" role="img" '
        f'aria-label="{escape(chart.title)}">'
    ]
    for tick in y_ticks:
        y = float(at_y(np.array(tick)))
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{size.width - _RIGHT}"/>')
        parts.append(_text(_LEFT - 8, y + 4, chart.form(tick, y_ticks[1] - y_ticks[0]), "end"))
    for tick in x_ticks:
        x = float(at_x(np.array(tick)))
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom}v9"/>')
        parts.append(_text(x, bottom + 22, si(tick), "middle"))
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{size.width - _RIGHT}"/>')
    parts.append(_text(2, 13, chart.unit, "start", "unit"))
    parts.append(_text(size.width - _RIGHT, size.height - 6, chart.x_name, "end", "unit"))
    parts += _marks(chart.marks, at_x, bottom, (x_low, x_high))
    if chart.level is not None:
        y = float(at_y(np.array(chart.level[1])))
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{size.width - _RIGHT}" stroke="{LEVEL_COLOR}" stroke-width="1.5" '
            'stroke-dasharray="6 4" fill="none"/>'
        )
    for series in chart.series:
        parts += _line(series, at_x, at_y, chart.buckets(size))
    parts.append("</svg>")
    return "".join(parts)


def _line(
    series: Series, at_x: Callable[[Floats], Floats], at_y: Callable[[Floats], Floats], buckets: int
) -> list[str]:
    """Draw the line; if points do not fit, the means of `buckets` groups over the range of each."""
    x, mean, low, high = condense(series.x, series.y, buckets)
    parts = []
    if len(x) < len(series.x):
        there = _points(at_x(x), at_y(high))
        back = _points(at_x(x)[::-1], at_y(low)[::-1])
        parts.append(f'<path class="range" d="M{there}L{back}Z" fill="{series.color}"/>')
    parts.append(f'<path class="line" d="M{_points(at_x(x), at_y(mean))}" stroke="{series.color}"/>')
    if len(x) <= 40:
        points = zip(at_x(x), at_y(mean), strict=True)
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{series.color}"/>' for a, b in points]
    return parts


def _marks(
    marks: Sequence[Mark], at_x: Callable[[Floats], Floats], bottom: int, limits: tuple[float, float]
) -> list[str]:
    parts, drawn = [], set()
    for mark in marks:
        x = float(at_x(np.array(min(max(mark.x, limits[0]), limits[1]))))
        place = (mark.name, round(x))  # marks within a pixel are drawn once
        if place in drawn:
            continue
        drawn.add(place)
        about = f"<title>{escape(mark.name)}, step {mark.x:,.0f}</title>"
        if mark.tick:
            shape = f'<path d="M{x:.1f} {bottom + 1}l3.5 7h-7z" fill="{mark.color}">{about}</path>'
        else:
            shape = (
                f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="{mark.color}" stroke-width="1.5" '
                f'stroke-dasharray="2 3" fill="none">{about}</path>'
            )
        parts.append(shape)
    return parts


def condense(x: Floats, y: Floats, buckets: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Return (x, mean, lowest, highest) of at most `buckets` equally wide groups, or of all points."""
    if len(x) <= 2 * buckets:
        return x, y, y, y
    width = (x[-1] - x[0]) / buckets
    group = np.minimum(((x - x[0]) / width).astype(np.int64), buckets - 1)
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    counts = np.diff(np.append(starts, len(x)))
    means = [np.add.reduceat(values, starts) / counts for values in (x, y)]
    return means[0], means[1], np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)


def ticks(low: float, high: float, most: int, powers_of_two: bool = False) -> list[float]:
    """Return round values, about `most` at most; the first is ≤ `low`, the last ≥ `high`."""
    step = (high - low) / most
    if powers_of_two:
        step = 2.0 ** math.ceil(math.log2(step))
    else:
        power = 10.0 ** math.floor(math.log10(step))
        step = next(power * n for n in (1, 2, 5, 10) if power * n >= step * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return limits with some room between them, for a constant too."""
    if high > low:
        return low, high
    room = abs(low) / 10 or 1.0
    return (low, low + room) if low == 0 else (low - room, high + room)


def _points(x: Floats, y: Floats) -> str:
    return "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))


def _text(x: float, y: float, words: str, anchor: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
