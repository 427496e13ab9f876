"""The strip that shows the whole run and selects the window: drag across it."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from runhealth.dashboard.views.palette import Palette
from runhealth.dashboard.window import Span

SELECTION = "window"
HEIGHT_PX = 54


def overview(run: Span, shown: Span, palette: Palette) -> dict[str, Any]:
    """A Vega-Lite specification for `queries.curve` of the loss. Data: `overview_data(points)`."""
    x = {"field": "step", "type": "quantitative", "scale": {"domain": [run.lo, max(run.hi, run.lo + 1)], "nice": False},
         "axis": {"title": None, "grid": False, "tickCount": 6, "labelColor": palette.muted}}  # fmt: skip
    y = {"field": "value", "type": "quantitative", "scale": {"zero": False}, "axis": None}
    layers: list[dict[str, Any]] = [
        {
            "params": [{"name": SELECTION, "select": {"type": "interval", "encodings": ["x"]}}],
            "mark": {"type": "line", "strokeWidth": 1, "color": palette.faint, "tooltip": False},
            "encoding": {"x": x, "y": y, "detail": {"field": "attempt"}},
        },
    ]
    if shown != run:
        layers.append({
            "data": {"values": [{"lo": shown.lo, "hi": shown.hi}]},
            "mark": {"type": "rect", "color": palette.lines[0], "opacity": 0.18, "tooltip": False},
            "encoding": {"x": {**x, "field": "lo"}, "x2": {"field": "hi"}},
        })  # fmt: skip
    return {"height": HEIGHT_PX, "layer": layers, "padding": {"left": 0, "right": 0, "top": 2, "bottom": 0}}


def overview_data(points: pl.DataFrame) -> pl.DataFrame:
    """attempt, step, value: breaks of the line as nulls."""
    return points.select("attempt", "step", "value")


def selected(event: object) -> tuple[int, int] | None:
    """The steps that were dragged over, from the selection state of the chart; None when nothing is selected."""
    bounds: object = event
    for key in ("selection", SELECTION, "step"):
        bounds = bounds.get(key) if isinstance(bounds, Mapping) else None
    if not isinstance(bounds, list | tuple) or len(bounds) != 2:
        return None
    lo, hi = sorted((float(bounds[0]), float(bounds[1])))
    return (round(lo), round(hi)) if hi - lo >= 1 else None
