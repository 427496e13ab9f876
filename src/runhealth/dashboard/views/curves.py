"""The stacked curves: loss, gradient norm, learning rate and step time on one x-axis, with what happened as marks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from runhealth.dashboard.queries import Attempt
from runhealth.dashboard.views.palette import Palette, Spec
from runhealth.dashboard.views.text import escape
from runhealth.dashboard.views.verdict import is_open, superseded_by
from runhealth.dashboard.window import Span
from runhealth.diagnose.findings import Finding, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    signal: str
    title: str
    log: bool = False


PANELS = (
    Panel(signal="loss", title="loss (nats, mean of ranks)"),
    Panel(signal="grad_norm", title="gradient norm (before clipping, log)", log=True),
    Panel(signal="lr", title="learning rate"),
    Panel(signal="t_step_s", title="step time (s, slowest rank)"),
)

TOP_PX, PANEL_PX, GAP_PX, BOTTOM_PX = 38, 118, 34, 42
LEFT_PX, RIGHT_PX = 64, 18  # the heat map has the same margins, so the steps of both line up
MOST_LABELS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """`steps` non-finite steps between `first` and `last`, both included."""

    first: int
    last: int
    steps: int


def height_px(panels: int) -> int:
    return TOP_PX + panels * PANEL_PX + (panels - 1) * GAP_PX + BOTTOM_PX


def non_finite(points: pl.DataFrame) -> list[NonFinite]:
    """The non-finite stretches of a curve; neighbours with no finite point between them become one."""
    stretches: list[NonFinite] = []
    previous: tuple[int, bool] | None = None
    for attempt, step, bad, last in points.select("attempt", "step", "bad_steps", "bad_last").iter_rows():
        if bad and stretches and previous == (attempt, True):
            before = stretches[-1]
            stretches[-1] = NonFinite(first=before.first, last=max(before.last, last), steps=before.steps + bad)
        elif bad:
            stretches.append(NonFinite(first=step, last=last, steps=bad))
        previous = (attempt, bad > 0)
    return stretches


def line_points(points: pl.DataFrame) -> pl.DataFrame:
    """step, value with a null row wherever the line must break: where a non-finite step lies between two points.

    `points` holds one attempt. The null rows lie half a step before the point that follows them.
    """
    line = points.filter(pl.col("bad_steps") == 0).select("step", "value", "broken").sort("step")
    breaks = line.filter(pl.col("broken") != pl.col("broken").shift(1)).select(
        pl.col("step").cast(pl.Float64) - 0.5, pl.lit(None, dtype=pl.Float64).alias("value")
    )
    return pl.concat([line.select(pl.col("step").cast(pl.Float64), "value"), breaks]).sort("step")


def lone_points(line: pl.DataFrame) -> pl.DataFrame:
    """The points of `line_points` with a break on both sides: a line would not show them."""
    nothing = pl.col("value").shift(1).is_null() & pl.col("value").shift(-1).is_null()
    return line.filter(pl.col("value").is_not_null() & nothing)


def curves(
    points: Mapping[str, pl.DataFrame],
    span: Span,
    *,
    attempts: Sequence[Attempt],
    findings: Sequence[Finding],
    checkpoints: pl.DataFrame,
    palette: Palette,
    attempt: int | None = None,
) -> Spec:
    """The chart of all panels that `points` (from `queries.curve`, by signal) has rows for."""
    panels = [panel for panel in PANELS if panel.signal in points]
    spec: Spec = {
        "animation": False,
        "grid": [], "xAxis": [], "yAxis": [], "title": [], "dataset": [], "series": [],
        "axisPointer": {"link": [{"xAxisIndex": "all"}]},
        "tooltip": {"trigger": "axis", "confine": True, "valueFormatter": "%.5g", "axisPointer": {"type": "line"}},
    }  # fmt: skip
    for index, panel in enumerate(panels):
        frame = points[panel.signal]
        _frame(spec, index, panel, last=index == len(panels) - 1, span=span, palette=palette)
        if panel.log:
            spec["yAxis"][-2] |= log_bounds(frame["value"])
        colour = palette.lines[PANELS.index(panel) % len(palette.lines)]
        for superseded, faint in ((True, True), (False, False)):
            for part in _by_attempt(frame.filter(pl.col("superseded") == superseded)):
                number = part["attempt"][0]
                hide = faint and attempt is None
                _line(
                    spec,
                    index,
                    panel,
                    part,
                    name=f"{panel.signal}" + (f" (attempt {number}, superseded)" if hide else ""),
                    colour=palette.faint if hide else colour,
                    opacity=0.7 if hide else 1.0,
                )
        _marks(spec, index, span, non_finite(frame), attempts, findings, checkpoints, palette, attempt)
    return spec


def log_bounds(values: pl.Series) -> Spec:
    """Ends of a log axis at 1, 2 or 5 times a power of ten; by itself it would span whole decades."""
    positive = values.filter(values > 0)
    low, high = positive.min(), positive.max()
    if not isinstance(low, float) or not isinstance(high, float):
        return {}
    decades = {math.floor(math.log10(low)), math.floor(math.log10(high)), math.floor(math.log10(high)) + 1}
    steps = [m * 10.0**decade for decade in decades for m in (1, 2, 5)]
    return {"min": max(s for s in steps if s <= low), "max": min(s for s in steps if s >= high and s > low)}


def _by_attempt(points: pl.DataFrame) -> list[pl.DataFrame]:
    return points.partition_by("attempt", maintain_order=True) if points.height else []


def _frame(spec: Spec, index: int, panel: Panel, *, last: bool, span: Span, palette: Palette) -> None:
    """Grid, axes and title of one panel. Its second y-axis runs from 0 to 1 and is hidden: marks sit on it."""
    top = TOP_PX + index * (PANEL_PX + GAP_PX)
    spec["grid"].append({"left": LEFT_PX, "right": RIGHT_PX, "top": top, "height": PANEL_PX, "outerBoundsMode": "none"})
    spec["title"].append({
        "text": panel.title, "left": LEFT_PX - 6, "top": top - 25,
        "textStyle": {"fontSize": 12, "fontWeight": 600, "color": palette.muted},
    })  # fmt: skip
    spec["xAxis"].append({
        "type": "value", "gridIndex": index, "min": span.lo, "max": max(span.hi, span.lo + 1), "scale": True,
        "axisLabel": {"show": last, "color": palette.muted, "hideOverlap": True}, "splitLine": {"show": False},
        "axisTick": {"show": last}, "axisLine": {"onZero": False, "lineStyle": {"color": palette.grid}},
        "name": "step" if last else "", "nameLocation": "middle", "nameGap": 26,
        "nameTextStyle": {"color": palette.muted},
    })  # fmt: skip
    spec["yAxis"].append({
        "type": "log" if panel.log else "value", "gridIndex": index, "scale": True, "splitNumber": 3,
        "axisLabel": {"color": palette.muted, "hideOverlap": True},
        "splitLine": {"lineStyle": {"color": palette.grid}},
    })  # fmt: skip
    spec["yAxis"].append({"type": "value", "gridIndex": index, "min": 0, "max": 1, "show": False})


def _line(
    spec: Spec, index: int, panel: Panel, points: pl.DataFrame, *, name: str, colour: str, opacity: float
) -> None:
    line = line_points(points)
    if panel.log:
        # zero and below have no place on a log axis: they sit on the lower edge instead of vanishing
        floor = line.filter(pl.col("value") > 0)["value"].min()
        low = float(floor) if isinstance(floor, int | float) else 1e-9
        line = line.with_columns(pl.when(pl.col("value") <= 0).then(low).otherwise(pl.col("value")).alias("value"))
    common = {"name": name, "xAxisIndex": index, "yAxisIndex": 2 * index, "encode": {"x": "step", "y": "value"}}
    spec["dataset"].append({"source": line})
    spec["series"].append({
        **common, "type": "line", "datasetIndex": len(spec["dataset"]) - 1, "showSymbol": False, "connectNulls": False,
        "lineStyle": {"width": 1.4, "color": colour, "opacity": opacity},
        "itemStyle": {"color": colour, "opacity": opacity}, "z": 3 if opacity == 1.0 else 2,
    })  # fmt: skip
    lone = lone_points(line)
    if lone.height:
        spec["dataset"].append({"source": lone})
        spec["series"].append({
            **common, "type": "scatter", "datasetIndex": len(spec["dataset"]) - 1, "symbolSize": 4,
            "itemStyle": {"color": colour, "opacity": opacity}, "tooltip": {"show": False}, "z": 3,
        })  # fmt: skip


def _marks(
    spec: Spec, index: int, span: Span, bad: Sequence[NonFinite], attempts: Sequence[Attempt],
    findings: Sequence[Finding], checkpoints: pl.DataFrame, palette: Palette, attempt: int | None,
) -> None:  # fmt: skip
    """What happened, on one panel: bands and lines for findings, dashed lines for restarts, triangles for checkpoints,
    diamonds and a band for non-finite values. Labels are drawn on the first panel only."""
    last_steps = {a.attempt: a.last_step for a in attempts}
    bands, lines = [], []
    shown = [f for f in findings if f.onset_step <= span.hi and _end(f, last_steps) >= span.lo]
    for position, finding in enumerate(shown):
        colour = palette.severity(finding.severity)
        faint = attempt is None and superseded_by(finding, attempts) is not None
        lo, hi = max(span.lo, finding.onset_step), min(span.hi, _end(finding, last_steps))
        if hi > lo:
            bands.append(
                [{"xAxis": lo, "itemStyle": {"color": colour, "opacity": 0.03 if faint else 0.1}}, {"xAxis": hi}]
            )
        if finding.onset_step >= span.lo:
            lines.append({
                "xAxis": finding.onset_step, "lineStyle": {"color": colour, "type": "dotted" if faint else "solid"},
                "label": {
                    "show": index == 0 and position < MOST_LABELS and finding.severity is not Severity.INFO,
                    "formatter": finding.code, "color": colour, "fontSize": 11, "fontWeight": 600, "distance": 3,
                },
            })  # fmt: skip
    lines += [
        {
            "xAxis": a.first_step, "lineStyle": {"color": palette.muted, "type": "dashed", "width": 1},
            "label": {"show": index == 0, "formatter": f"attempt {a.attempt}", "color": palette.muted, "fontSize": 10,
                      "position": "insideStartBottom", "rotate": 90, "distance": 2},
        }
        for a in attempts[1:] if span.lo <= a.first_step <= span.hi
    ]  # fmt: skip
    bands += [
        [{"xAxis": b.first, "itemStyle": {"color": palette.bad_value, "opacity": 0.14}}, {"xAxis": b.last}]
        for b in bad if b.last > b.first
    ]  # fmt: skip
    spec["series"].append({
        "name": "marks", "type": "line", "xAxisIndex": index, "yAxisIndex": 2 * index + 1, "data": [],
        "tooltip": {"show": False},
        "markArea": {"silent": True, "data": bands},
        "markLine": {"silent": True, "symbol": "none", "animation": False, "data": lines},
    })  # fmt: skip
    _symbols(spec, index, "not finite", [(b.first, 0.9) for b in bad], "diamond", 9, palette.bad_value)
    good = checkpoints.filter(pl.col("status") != "failed")["step"].to_list()
    failed = checkpoints.filter(pl.col("status") == "failed")["step"].to_list()
    _symbols(spec, index, "checkpoint", [(s, 0.04) for s in good], "triangle", 6, palette.good)
    _symbols(spec, index, "failed checkpoint", [(s, 0.04) for s in failed], "triangle", 8, palette.error)


def _end(finding: Finding, last_steps: Mapping[int, int]) -> int:
    """Where a finding's band ends. An incident that is not over lasts as long as its attempt. A fact is a moment, and
    so is the first of several events that came and went: between them there is nothing to mark."""
    if finding.count > 1 and not is_open(finding):
        end = finding.onset_step
    elif finding.end_step is not None:
        end = finding.end_step
    else:
        end = last_steps.get(finding.attempt, finding.onset_step) if is_open(finding) else finding.onset_step
    return max(end, finding.onset_step)


def _symbols(
    spec: Spec, index: int, name: str, at: Sequence[tuple[int, float]], symbol: str, size: int, colour: str
) -> None:
    if at:
        spec["series"].append({
            "name": name, "type": "scatter", "xAxisIndex": index, "yAxisIndex": 2 * index + 1, "z": 4,
            "data": [[step, y] for step, y in at], "symbol": symbol, "symbolSize": size,
            "itemStyle": {"color": colour, "opacity": 1}, "tooltip": {"show": False},
        })  # fmt: skip


def legend_html(points: Mapping[str, pl.DataFrame], palette: Palette) -> str:
    """What the marks mean, and how many non-finite steps there are."""
    entries = [
        ("▲", palette.good, "checkpoint"),
        ("▲", palette.error, "failed checkpoint"),
        ("┆", palette.muted, "restart"),
        ("▮", palette.error, "finding"),
        ("━", palette.faint, "superseded attempt"),
    ]
    bad = {signal: int(frame["bad_steps"].sum()) for signal, frame in points.items()}
    counts = ", ".join(f"{signal} {count:,}" for signal, count in bad.items() if count)
    entries.append(("◆", palette.bad_value, f"NaN or Inf{f' (steps: {counts})' if counts else ''}"))
    spans = "".join(
        f'<span style="white-space:nowrap"><span style="color:{colour}">{symbol}</span> {escape(text)}</span>'
        for symbol, colour, text in entries
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;font-size:.8rem;opacity:.85">{spans}</div>'
