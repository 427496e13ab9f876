"""Charts of the HTML report as inline SVG: no script, no font, nothing to fetch. Colours are the page's variables."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from runhealth.diagnose.report.plain import safe, short_number

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 920, 64, 12, 12, 22
LOG_RATIO = 30.0  # largest over smallest value from which on the axis is logarithmic
LEAST_BAND = 3.0  # pixels: an incident of one step is to be seen
Point = tuple[int, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A stretch of steps to mark. `look` is a class of the page's style sheet."""

    first: int
    last: int
    look: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    low: float
    high: float
    pixels_low: float
    pixels_high: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, value = (
            (math.log10(self.low), math.log10(self.high), math.log10(value))
            if self.log
            else (self.low, self.high, value)
        )
        share = (value - low) / (high - low) if high > low else 0.5
        return self.pixels_low + share * (self.pixels_high - self.pixels_low)


def chart(
    name: str, points: Sequence[Point], steps: tuple[int, int], bands: Sequence[Band], *, height: int = 150
) -> str:
    """A line over steps. None, NaN and infinities break it and are marked on the upper edge; `bands` lie behind."""
    shown = [(step, value) for step, value in points if steps[0] <= step <= steps[1]]
    finite = [value for _, value in shown if value is not None and math.isfinite(value)]
    x = _Scale(low=steps[0], high=max(steps[1], steps[0] + 1), pixels_low=LEFT, pixels_high=WIDTH - RIGHT)
    parts = [_band(band, x, height) for band in bands if band.last >= steps[0] and band.first <= steps[1]]
    log = bool(finite) and min(finite) > 0 and max(finite) / min(finite) > LOG_RATIO
    if finite:
        low, high = min(finite), max(finite)
        if low == high:
            low, high = (low * 0.9, high * 1.1) if low > 0 else (low - 1, high + 1)
        y = _Scale(low=low, high=high, pixels_low=height - BOTTOM, pixels_high=TOP, log=log)
        parts += [_tick_y(value, y) for value in _ticks(low, high, log)]
        parts += _lines(shown, x, y)
    parts += [_not_finite(step, x) for step, value in shown if value is None or not math.isfinite(value)]
    parts += _axis_x(steps, x, height)
    what = f"{safe(name)} over steps {steps[0]:,} to {steps[1]:,}"
    if log:
        what += ", logarithmic"
    parts.append(f'<text class="name" x="{LEFT + 6}" y="{TOP + 12}">{_text(name)}{" (log)" if log else ""}</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{_text(what)}" preserveAspectRatio="none">'
        f"{''.join(parts)}</svg>"
    )


def _lines(points: Sequence[Point], x: _Scale, y: _Scale) -> list[str]:
    parts: list[str] = []
    current: list[str] = []
    for step, value in [*points, (0, None)]:
        if value is not None and math.isfinite(value):
            current.append(f"{x.at(step):.1f},{y.at(value):.1f}")
            continue
        if len(current) == 1:
            cx, cy = current[0].split(",")
            parts.append(f'<circle class="dot" cx="{cx}" cy="{cy}" r="1.6"/>')
        elif current:
            parts.append(f'<polyline class="line" points="{" ".join(current)}"/>')
        current = []
    return parts


def _band(band: Band, x: _Scale, height: int) -> str:
    first = max(x.at(max(band.first, x.low)), LEFT)
    last = min(x.at(min(band.last, x.high)), WIDTH - RIGHT)
    width = max(LEAST_BAND, last - first)
    first = min(first, WIDTH - RIGHT - width)
    tall = height - TOP - BOTTOM
    return (
        f'<rect class="band {band.look}" x="{first:.1f}" y="{TOP}" width="{width:.1f}" height="{tall}">'
        f"<title>{_text(band.label)}</title></rect>"
    )


def _not_finite(step: int, x: _Scale) -> str:
    at = x.at(step)
    return f'<path class="nan" d="M{at - 4:.1f} {TOP - 9}h8l-4 8z"><title>NaN or Inf at step {step:,}</title></path>'


def _tick_y(value: float, y: _Scale) -> str:
    at = y.at(value)
    return (
        f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{at + 3.5:.1f}" text-anchor="end">{_tick_text(value)}</text>'
    )


def _tick_text(value: float) -> str:
    return short_number(value) if abs(value) < 1e6 else f"{value:.3g}".replace("e+0", "e").replace("e+", "e")


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        decades = [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
        return decades[:: max(1, len(decades) // 4)] or [low, high]
    return _round_values(low, high, 3)


def _round_values(low: float, high: float, about: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within [low, high]."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    size = next((factor * power for factor in (1, 2, 5) if factor * power >= raw), 10 * power)
    first = math.ceil(low / size)
    return [index * size for index in range(first, math.floor(high / size) + 1)]


def _axis_x(steps: tuple[int, int], x: _Scale, height: int) -> list[str]:
    base = height - BOTTOM
    parts = [f'<path class="axis" d="M{LEFT} {base}H{WIDTH - RIGHT}"/>']
    for value in _round_values(steps[0], max(steps[1], steps[0] + 1), 8):
        if value != int(value):
            continue
        at = x.at(value)
        parts.append(f'<path class="axis" d="M{at:.1f} {base}v4"/>')
        anchor = "end" if at > WIDTH - 40 else "middle"
        parts.append(f'<text class="tick" x="{at:.1f}" y="{base + 16}" text-anchor="{anchor}">{int(value):,}</text>')
    return parts


def _text(text: str) -> str:
    return html.escape(safe(text))
