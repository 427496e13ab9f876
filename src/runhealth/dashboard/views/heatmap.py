"""Rank × step: how far each rank is from the median of the ranks at the same step."""

from collections.abc import Sequence

import polars as pl

from runhealth.dashboard.queries import HEAT_METRICS
from runhealth.dashboard.views.curves import LEFT_PX, RIGHT_PX
from runhealth.dashboard.views.palette import Palette, Spec
from runhealth.dashboard.window import Span

ROW_PX, MIN_PX, MAX_PX = 26, 52, 520
TOP_PX, BOTTOM_PX = 8, 78


def height_px(ranks: int) -> int:
    return TOP_PX + min(MAX_PX, max(MIN_PX, ranks * ROW_PX)) + BOTTOM_PX


def bucket_steps(span: Span, buckets: int) -> list[int]:
    """The first step of each bucket that holds one. A window of fewer steps than buckets has one bucket a step."""
    used = min(buckets, span.steps)
    return [span.lo + -(-bucket * span.steps // used) for bucket in range(used)]


def scale_limit(deviations: pl.Series) -> float:
    """Half-width of the colour scale: the 99.5th percentile, so that one outlier does not bleach the rest, but at least
    three times the median cell, so that a run's habitual jitter stays pale."""
    sizes = deviations.abs()
    limit = max(float(sizes.quantile(0.995, "higher") or 0.0), 3.0 * float(sizes.quantile(0.5) or 0.0))
    return limit or 1e-9


def _ramp(palette: Palette) -> list[str]:
    """From cold to hot, pale around the middle: colour grows with the square of the deviation, so what stands out is
    what differs, not the jitter that every rank has."""
    side = (1.0, 0.69, 0.44, 0.25, 0.11, 0.03)
    return [
        *(_mix(palette.neutral, palette.cold, share) for share in side),
        palette.neutral,
        *(_mix(palette.neutral, palette.hot, share) for share in reversed(side)),
    ]


def _mix(start: str, end: str, share: float) -> str:
    """A hex colour `share` of the way from `start` to `end`."""
    pairs = zip(bytes.fromhex(start[1:]), bytes.fromhex(end[1:]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def heatmap(
    cells: pl.DataFrame, metric: str, span: Span, *, ranks: Sequence[int], buckets: int, palette: Palette
) -> Spec:
    """The chart of `queries.heat` with the same number of buckets. Non-finite cells get their own colour."""
    title, unit, _ = HEAT_METRICS[metric]
    row = {rank: position for position, rank in enumerate(ranks)}
    finite = cells.filter(pl.col("deviation").is_not_null())
    bad = cells.filter(pl.col("bad_steps") > 0)
    limit = scale_limit(finite["deviation"]) if finite.height else 1.0
    labels = [f"{step:,}" for step in bucket_steps(span, buckets)]

    def frame(part: pl.DataFrame, step: str) -> pl.DataFrame:
        return part.select(
            pl.col("bucket"), pl.col("rank").replace_strict(row, return_dtype=pl.Int64).alias("row"),
            pl.col("deviation").alias("deviation"), pl.col("value"), pl.col(step).alias("step"), pl.col("bad_steps"),
        )  # fmt: skip

    axis = {"splitArea": {"show": False}, "splitLine": {"show": False}, "axisTick": {"show": False}}
    series = {"type": "heatmap", "encode": {"x": "bucket", "y": "row", "value": "deviation"}, "progressive": 0}
    suffix = f" {unit}" if unit else ""
    tip = f"{title} at step {{@step}}: {{@value}}{suffix}<br>from the median: {{@deviation}}{suffix}"
    return {
        "animation": False,
        "grid": {"left": LEFT_PX, "right": RIGHT_PX, "top": TOP_PX, "bottom": BOTTOM_PX, "outerBoundsMode": "none"},
        "xAxis": {"type": "category", "data": labels, **axis, "name": "step", "nameLocation": "middle", "nameGap": 26,
                  "nameTextStyle": {"color": palette.muted},
                  "axisLabel": {"color": palette.muted, "hideOverlap": True},
                  "axisLine": {"lineStyle": {"color": palette.grid}}},
        "yAxis": {"type": "category", "data": [f"rank {rank}" for rank in ranks], **axis, "inverse": True,
                  "axisLabel": {"color": palette.muted, "hideOverlap": True},
                  "axisLine": {"lineStyle": {"color": palette.grid}}},
        "tooltip": {"confine": True},
        "visualMap": {
            "min": -limit, "max": limit, "seriesIndex": 0, "dimension": "deviation", "calculable": False,
            "orient": "horizontal", "left": "center", "bottom": 0, "itemHeight": 160, "itemWidth": 10, "precision": 4,
            "text": [f"+{limit:.3g}{suffix}", f"−{limit:.3g}{suffix}"],
            "textStyle": {"color": palette.muted, "fontSize": 11},
            "inRange": {"color": _ramp(palette)},
        },
        "dataset": [{"source": frame(finite, "step")}, {"source": frame(bad, "bad_step")}],
        "series": [
            {**series, "name": title, "datasetIndex": 0, "tooltip": {"formatter": tip}},
            {**series, "name": "not finite", "datasetIndex": 1, "itemStyle": {"color": palette.bad_value}, "tooltip": {
                "formatter": "{@bad_steps} steps not finite, the first at {@step}"}},
        ],
    }  # fmt: skip
