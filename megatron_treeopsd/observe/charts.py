"""Charts as SVG text: lines over a numeric axis and stacked shares. No library, no script, nothing fetched.

A chart carries what a pointer over it shows in `data-points` (JSON: x position, title, label and value of each
series), which the report's script reads and a picture ignores.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

import numpy as np

from megatron_treeopsd.observe.wording import compact, number, percent

MAX_POINTS = 240
"""Longer series are averaged down to this many points, with the range that was averaged over behind the line."""

Style = Literal["line", "dots", "smooth"]


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: float64 [n] x and y, x rising. `colour` is a CSS colour; `smooth` adds a moving mean."""

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: str
    style: Style = "line"


@dataclass(frozen=True, slots=True)
class Axis:
    """The x axis: its title, how a pointer's position on it is written ("step 12"), and where it begins if fixed."""

    title: str
    tip: Callable[[float], str]
    whole: bool = False
    begin: float | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """How values of the y axis are written: at the ticks, and exactly."""

    tick: Callable[[float], str]
    value: Callable[[float], str]


NUMBER = Unit(lambda value: f"{value:g}", number)
SHARE = Unit(lambda value: f"{100 * value:g} %", lambda value: percent(value, 1))
COUNT = Unit(compact, compact)


@dataclass(frozen=True, slots=True)
class Reduced:
    """A series at no more than `MAX_POINTS` points: mean, lowest and highest of each piece."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def reduce(x: np.ndarray, y: np.ndarray, limit: int = MAX_POINTS) -> Reduced:
    """Cut n points into `limit` pieces of nearly equal count; the identity for n <= limit."""
    if len(x) <= limit:
        return Reduced(x, y, y, y)
    pieces = np.array_split(np.arange(len(x)), limit)
    means = [np.array([values[piece].mean() for piece in pieces]) for values in (x, y)]
    low, high = (np.array([pick(y[piece]) for piece in pieces]) for pick in (np.min, np.max))
    return Reduced(means[0], means[1], low, high)


def moving_mean(y: np.ndarray, width: int) -> np.ndarray:
    """Centred mean over `width` points, fewer at the ends."""
    total = np.concatenate([[0.0], np.cumsum(y)])
    left = np.maximum(np.arange(len(y)) - width // 2, 0)
    right = np.minimum(np.arange(len(y)) + (width + 1) // 2, len(y))
    return (total[right] - total[left]) / (right - left)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` different round numbers that cover [low, high].

    A range that is nothing but rounding of one value is treated as that value.
    """
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        margin = abs(low) * 0.5 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(rough))
    step = scale * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * scale >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 2 - math.floor(math.log10(step))
    return [round(index * step, digits) for index in range(first, last + 1)]


class Frame:
    """Plot area of a chart: maps values to pixels and draws grid, ticks and axis titles."""

    def __init__(
        self, width: int, height: int, x_range: tuple[float, float], y_ticks: Sequence[float], series: Sequence[Series]
    ) -> None:
        self.width, self.height = width, height
        self.series = series if len(series) > 1 else []
        self.left, self.right, self.top, self.bottom = 48, 14, 34 if self.series else 10, 36
        self._x0, self._x1 = x_range if x_range[1] > x_range[0] else (x_range[0] - 0.5, x_range[0] + 0.5)
        self.y_ticks = list(y_ticks)

    def x(self, value: float) -> float:
        inner = self.width - self.left - self.right
        return round(self.left + inner * (value - self._x0) / (self._x1 - self._x0), 1)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return round(
            self.height - self.bottom - (self.height - self.top - self.bottom) * (value - low) / (high - low), 1
        )

    def path(self, x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> str:
        return "M" + "L".join(f"{self.x(a)} {self.y(b)}" for a, b in zip(x, y, strict=True))

    def grid(self, axis: Axis, unit: Unit) -> str:
        """Horizontal lines with their values, ticks below, and the title of the x axis."""
        base, parts = self.height - self.bottom, []
        for tick in self.y_ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{self.left}" x2="{self.width - self.right}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text x="{self.left - 7}" y="{y + 4}" text-anchor="end">{escape(unit.tick(tick))}</text>')
        parts.append(f'<line class="axis" x1="{self.left}" x2="{self.width - self.right}" y1="{base}" y2="{base}"/>')
        count = max(2, self.width // 130)
        for tick in nice_ticks(self._x0, self._x1, count):
            if self._x0 - 1e-9 <= tick <= self._x1 + 1e-9 and not (axis.whole and tick % 1):
                parts.append(f'<text x="{self.x(tick)}" y="{base + 15}" text-anchor="middle">{tick:g}</text>')
        middle = (self.left + self.width - self.right) / 2
        parts.append(f'<text x="{middle}" y="{self.height - 4}" text-anchor="middle">{escape(axis.title)}</text>')
        return "".join(parts)

    def legend(self) -> str:
        """Names beside their colours, above the plot; nothing for a single curve."""
        parts, x = [], self.left
        for item in self.series:
            parts.append(f'<circle cx="{x + 5}" cy="14" r="4.5" style="fill:{item.colour}"/>')
            parts.append(f'<text x="{x + 14}" y="18">{escape(item.name)}</text>')
            x += 34 + round(6.1 * len(item.name))
        return "".join(parts)

    def svg(self, body: str, label: str, points: Sequence[dict[str, object]]) -> str:
        data = escape(json.dumps(points, separators=(",", ":")), quote=True)
        cross = f'<line class="cross" y1="{self.top}" y2="{self.height - self.bottom}"/>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-label="{escape(label)}" data-points="{data}">'
            f"{self.legend()}{body}{cross}</svg>"
        )


def line_chart(
    series: Sequence[Series],
    axis: Axis,
    *,
    label: str,
    width: int = 720,
    height: int = 280,
    y_range: tuple[float, float] | None = None,
    unit: Unit = NUMBER,
) -> str:
    """Curves over one axis. `label` says what the picture shows, for people who cannot see it.

    `y_range` is the least that the y axis covers; by default it fits the values (99 % of them where there are many,
    so that one spike does not flatten the curve; what is outside is drawn at the edge).
    """
    shown = [item for item in series if len(item.x)]
    values = np.concatenate([item.y for item in shown])
    low, high = _span(values) if y_range is None else (min(y_range[0], values.min()), max(y_range[1], values.max()))
    ticks = nice_ticks(low, high, max(2, height // 60))
    x = np.concatenate([item.x for item in shown])
    begin = float(x.min()) if axis.begin is None else axis.begin
    frame = Frame(width, height, (begin, float(x.max())), ticks, shown)
    body = frame.grid(axis, unit) + "".join(_curve(frame, item) for item in shown)
    return frame.svg(body, label, _points(frame, shown, axis, unit))


def _span(values: np.ndarray) -> tuple[float, float]:
    if len(values) < 100:
        return float(values.min()), float(values.max())
    low, high = np.quantile(values, [0.005, 0.995])
    return float(low), float(high)


def _curve(frame: Frame, series: Series) -> str:
    low, high = frame.y_ticks[0], frame.y_ticks[-1]
    parts = reduce(series.x, np.clip(series.y, low, high))
    out = []
    if len(series.x) > len(parts.x):
        outline = frame.path(np.concatenate([parts.x, parts.x[::-1]]), np.concatenate([parts.high, parts.low[::-1]]))
        out.append(f'<path class="band" d="{outline}Z" style="fill:{series.colour}"/>')
    y = parts.mean
    if series.style == "smooth" and len(y) >= 10:
        if not out:  # the band shows it otherwise
            out.append(f'<path class="raw" d="{frame.path(parts.x, y)}" style="stroke:{series.colour}"/>')
        y = moving_mean(y, max(5, len(y) // 12))
    if len(y) > 1:
        out.append(f'<path class="curve" d="{frame.path(parts.x, y)}" style="stroke:{series.colour}"/>')
    if series.style == "dots" or len(y) == 1:
        dots = zip(parts.x, y, strict=True)
        out += [
            f'<circle class="dot" cx="{frame.x(a)}" cy="{frame.y(b)}" r="4.5" style="fill:{series.colour}"/>'
            for a, b in dots
        ]
    return "".join(out)


def _points(frame: Frame, series: Sequence[Series], axis: Axis, unit: Unit) -> list[dict[str, object]]:
    """What a pointer shows: for each x that has a value, all series that have one there."""
    at: dict[float, dict[str, object]] = {}
    for item in series:
        parts = reduce(item.x, item.y)
        for x, y in zip(parts.x.tolist(), parts.mean.tolist(), strict=True):
            point = at.setdefault(frame.x(x), {"x": frame.x(x), "t": axis.tip(x), "v": []})
            values = point["v"]
            assert isinstance(values, list)
            values.append([item.name, unit.value(y), item.colour])
    return [at[x] for x in sorted(at)]


def share_chart(series: Sequence[Series], axis: Axis, *, label: str, width: int = 720, height: int = 240) -> str:
    """Stacked areas that fill the height: the share of each series at each x. All series have the same x."""
    parts = [reduce(item.x, item.y) for item in series]
    heights = np.stack([part.mean for part in parts])
    shares = heights / np.maximum(heights.sum(axis=0), 1e-12)
    x = parts[0].x
    if len(x) == 1:  # one step is drawn as a block
        x, shares = np.array([x[0] - 0.5, x[0] + 0.5]), np.repeat(shares, 2, axis=1)
    edges = np.concatenate([np.zeros((1, len(x))), np.cumsum(shares, axis=0)])
    frame = Frame(width, height, (float(x[0]), float(x[-1])), [0.0, 0.25, 0.5, 0.75, 1.0], series)
    areas = []
    for item, below, above in zip(series, edges[:-1], edges[1:], strict=True):
        outline = frame.path(np.concatenate([x, x[::-1]]), np.concatenate([above, below[::-1]]))
        areas.append(f'<path class="area" d="{outline}Z" style="fill:{item.colour}"/>')
    points: list[dict[str, object]] = [
        {
            "x": frame.x(at),
            "t": axis.tip(at),
            "v": [[s.name, SHARE.value(share), s.colour] for s, share in zip(series, column, strict=True)][::-1],
        }
        for at, column in zip(x.tolist(), shares.T.tolist(), strict=True)
    ]
    body = frame.grid(axis, SHARE) + "".join(areas)
    return frame.svg(body, label, points)


def change_track(before: float | None, after: float | None, *, width: int = 300) -> str:
    """Two shares on one rail from 0 to 1: a ring for before, a disc for after, and the way between them."""
    height, edge = 18, 7

    def at(share: float) -> float:
        return round(edge + (width - 2 * edge) * min(max(share, 0.0), 1.0), 1)

    middle = height / 2
    parts = [f'<line class="axis" x1="{edge}" x2="{width - edge}" y1="{middle}" y2="{middle}"/>']
    if before is not None and after is not None:
        ends = f'x1="{at(before)}" x2="{at(after)}" y1="{middle}" y2="{middle}"'
        parts.append(f'<line {ends} style="stroke:var(--s1);stroke-width:3"/>')
    for share, fill in ((before, "surface"), (after, "s1")):
        if share is not None:
            style = f"fill:var(--{fill});stroke:var(--s1);stroke-width:2"
            parts.append(f'<circle cx="{at(share)}" cy="{middle}" r="5" style="{style}"/>')
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} aria-hidden="true">{"".join(parts)}</svg>'
