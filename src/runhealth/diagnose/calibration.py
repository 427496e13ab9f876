"""The calibration of the judge: which probability a sum of nats is worth, as measured on the fault bench.

`calibration.json` beside this module is written by `python -m bench.faults.calibrate`, from the tuning split alone, and
names the commit and the base seeds it comes from. It is applied with plain arithmetic:

- sums of nats go through a softmax at `temperature`, with `undetermined` standing at `undetermined_nats`;
- where a file has `knots`, the largest probability p is then replaced by the non-decreasing, piecewise linear function
  of p that they give, and the others are scaled so that all add to 1. The file of this package has none: what is fitted
  that closely to the kinds of fault of the bench says nothing about others (docs/decisions/335).
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from runhealth.storage.jsontext import parse_json

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """`knots`: (softmax probability, measured share of right answers), ascending in both; empty: as they are."""

    temperature: float
    undetermined_nats: float
    knots: tuple[tuple[float, float], ...] = ()
    seeds: tuple[int, ...] = ()
    runs: int = 0
    commit: str = ""

    def __post_init__(self) -> None:
        xs, ys = [x for x, _ in self.knots], [y for _, y in self.knots]
        if not (self.temperature > 0 and math.isfinite(self.undetermined_nats)):
            raise ValueError(f"expected a temperature over 0, met {self.temperature}")
        if sorted(set(xs)) != xs or sorted(ys) != ys or any(not 0 <= v <= 1 for v in (*xs, *ys)):
            raise ValueError("expected knots that ascend within 0 to 1")

    def probabilities(self, raws: Mapping[str, float]) -> dict[str, float]:
        """Probabilities that add to 1, out of sums of nats; a sum of minus infinity gives exactly 0."""
        top = max(raws.values())
        weights = {name: math.exp((raw - top) / self.temperature) for name, raw in raws.items()}
        total = sum(weights.values())
        found = {name: weight / total for name, weight in weights.items()}
        if not self.knots or len(found) < 2:
            return found
        best = max(found, key=lambda name: (found[name], name))
        before = found[best]
        second = max(p for name, p in found.items() if name != best) / (1 - before) if before < 1 else 0.0
        after = max(self._lift(before), second / (1 + second))  # the best stays the best
        rest = (1 - after) / (1 - before) if before < 1 else 0.0
        return {name: after if name == best else p * rest for name, p in found.items()}

    def _lift(self, p: float) -> float:
        xs = [x for x, _ in self.knots]
        i = bisect_right(xs, p)
        if i == 0:
            return self.knots[0][1]
        if i == len(xs):
            return self.knots[-1][1]
        (x0, y0), (x1, y1) = self.knots[i - 1], self.knots[i]
        return y0 + (y1 - y0) * (p - x0) / (x1 - x0)


def parse(text: str, where: str) -> Calibration:
    """Raises ValueError for another version or a field that is missing or of a wrong type."""
    try:
        raw: Any = parse_json(text)
        if not isinstance(raw, dict):
            raise TypeError(f"expected an object, met {type(raw).__name__}")
        if raw.get("version") != VERSION:
            raise ValueError(f"expected version {VERSION}, met {raw.get('version')}")
        return Calibration(
            temperature=float(raw["temperature"]),
            undetermined_nats=float(raw["undetermined_nats"]),
            knots=tuple((float(x), float(y)) for x, y in raw["knots"]),
            seeds=tuple(int(seed) for seed in raw["seeds"]),
            runs=int(raw["runs"]),
            commit=str(raw["commit"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: not a calibration: {error}") from error


@cache
def current() -> Calibration:
    """The calibration of this package."""
    found = files("runhealth.diagnose") / "calibration.json"
    return parse(found.read_text(encoding="utf-8"), "calibration.json")
