"""Pictures of the report as plain SVG that reads on light and dark pages."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

INK, GRID, FIRST, SECOND = "#6b7280", "#9ca3af55", "#2f6fb3", "#c2703d"
FONT = 'font-family="system-ui, sans-serif" font-size="12"'


def all_of(figures: Mapping[str, Any]) -> dict[str, str]:
    """Name -> SVG."""
    return {
        "calibration": calibration(figures["calibration"]),
        "classes": bars(
            "share of runs, by true cause",
            [(name, g["detected"] or 0.0, g["recall"] or 0.0) for name, g in figures["classes"].items()],
            ("detected", "detected and named"),
        ),
        "delays": delays(figures["kinds"]),
        "abstaining": abstaining(figures["abstaining"]),
        "rules": rules(figures),
    }


def _svg(width: int, height: int, title: str, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img"><title>{escape(title)}</title>' + "".join(body) + "</svg>\n"
    )


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {FONT} fill="{colour}" text-anchor="{anchor}">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = GRID) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def calibration(curve: Sequence[Mapping[str, Any]]) -> str:
    """Accuracy over stated probability; the area of a point is the number of answers."""
    left, top, side = 50, 24, 260
    body = [_text(left, 14, "accuracy by stated probability")]
    for tick in (0.0, 0.5, 1.0):
        x, y = left + side * tick, top + side * (1 - tick)
        body += [_line(left, y, left + side, y), _line(x, top, x, top + side)]
        body += [_text(left - 6, y + 4, f"{tick:g}", "end"), _text(x, top + side + 16, f"{tick:g}", "middle")]
    body.append(_line(left, top + side, left + side, top, INK))
    largest = max((b["count"] for b in curve), default=1)
    for b in curve:
        radius = 3 + 12 * (b["count"] / largest) ** 0.5
        x, y = left + side * b["confidence"], top + side * (1 - b["accuracy"])
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{FIRST}" fill-opacity="0.7"/>')
    return _svg(left + side + 20, top + side + 26, "calibration", body)


def abstaining(curves: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Accuracy over the share of detected runs that get an answer, one line a group."""
    left, top, wide, high, floor = 50, 24, 360, 200, 0.5
    body = [_text(left, 14, "right, by share of the detected runs that are answered")]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = left + wide * tick
        body += [_line(x, top, x, top + high), _text(x, top + high + 16, f"{tick:g}", "middle")]
    for tick in (0.5, 0.75, 1.0):
        y = top + high * (1 - (tick - floor) / (1 - floor))
        body += [_line(left, y, left + wide, y), _text(left - 6, y + 4, f"{tick:g}", "end")]
    for at, (name, curve) in enumerate(curves.items()):
        colour = (FIRST, SECOND)[at % 2]
        places = [
            (left + wide * p["answered"], top + high * (1 - (max(p["right"], floor) - floor) / (1 - floor)))
            for p in curve
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        body.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        body.append(_text(left, top + high + 36 + 16 * at, f"■ {name}", colour=colour))
    return _svg(left + wide + 20, top + high + 44 + 16 * len(curves), "abstaining", body)


def bars(title: str, rows: Sequence[tuple[str, float, float]], names: tuple[str, str]) -> str:
    """Two bars a row, both shares of 1."""
    left, wide, row = 150, 300, 26
    body = [
        _text(left, 14, title),
        _text(left, 32, f"■ {names[0]}", colour=SECOND),
        _text(left + 110, 32, f"■ {names[1]}", colour=FIRST),
    ]
    top = 44
    for at, (name, first, second) in enumerate(rows):
        y = top + at * row
        body.append(_text(left - 8, y + 14, name, "end"))
        body.append(f'<rect x="{left}" y="{y}" width="{wide * first:.1f}" height="9" fill="{SECOND}"/>')
        body.append(f'<rect x="{left}" y="{y + 10}" width="{wide * second:.1f}" height="9" fill="{FIRST}"/>')
        body.append(_text(left + wide + 8, y + 14, f"{first:.2f} / {second:.2f}"))
    return _svg(left + wide + 110, top + row * len(rows) + 6, title, body)


def delays(kinds: Mapping[str, Mapping[str, Any]]) -> str:
    """Median and 90th percentile of the delay of each kind, in steps."""
    rows = [(name, g["delay_median"], g["delay_p90"]) for name, g in kinds.items() if g["delay_median"] is not None]
    left, wide, row, top = 150, 300, 18, 44
    limit = max([10, *(p90 for _, _, p90 in rows)])
    title = "steps from onset to alarm: median (dot) and 90th percentile"
    body = [_text(left, 14, title)]
    for tick in (0, limit // 2, limit):
        x = left + wide * tick / limit
        body += [_line(x, top - 8, x, top + row * len(rows)), _text(x, top - 12, str(tick), "middle")]
    for at, (name, middle, p90) in enumerate(rows):
        y = top + at * row + 8
        x1, x2 = left + wide * max(0, middle) / limit, left + wide * max(0, p90) / limit
        body += [_text(left - 8, y + 4, name, "end"), _line(x1, y, x2, y, FIRST)]
        body.append(f'<circle cx="{x1:.1f}" cy="{y}" r="4" fill="{FIRST}"/>')
    return _svg(left + wide + 40, top + row * len(rows) + 10, title, body)


def rules(figures: Mapping[str, Any]) -> str:
    """Recall of the engine and of each rule as a bar, false alarms as a number."""
    steps = figures["twin_steps"]
    ours = 1e4 * figures["false_alarms_twins"] / steps if steps else 0.0
    rows = [("this engine", figures["recall"] or 0.0, ours)]
    rows += [(n, r["recall"] or 0.0, r["false_alarms_per_10k"] or 0.0) for n, r in figures["rules"].items()]
    left, wide, row, top = 170, 240, 22, 30
    title = "recall on true spikes; alarms per 10,000 healthy steps"
    body = [_text(left, 14, title)]
    for at, (name, recall, false) in enumerate(rows):
        y = top + at * row
        colour = FIRST if at == 0 else SECOND
        body.append(_text(left - 8, y + 12, name, "end"))
        body.append(f'<rect x="{left}" y="{y}" width="{wide * recall:.1f}" height="14" fill="{colour}"/>')
        body.append(_text(left + wide * recall + 6, y + 12, f"{recall:.2f}, {false:.1f} false"))
    return _svg(left + wide + 130, top + row * len(rows) + 6, title, body)
