"""A second opinion on an incident: a model trained on the fault bench, out of the judge's own evidence.

A multinomial logistic regression over the suspects' sums of nats and the kind of finding. It knows only what it was
trained on, so it never overrules the judge: where the two disagree, the finding says so, and a replay decides. The
model is a plain JSON file beside this module, written by `python -m bench.faults.calibrate` from the tuning split.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from runhealth.diagnose.findings import UNDETERMINED, Status, SuspectResult
from runhealth.diagnose.suspect import raw_sum

VERSION = 1
LEAST_PROBABILITY = 0.5  # what is less sure is no opinion
LOWEST, HIGHEST = -6.0, 12.0  # sums beyond say no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """What the model thinks. `agrees`: whether that is what the judge holds most likely."""

    suspect: str
    probability: float
    agrees: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`weights`: (classes, features); a feature that was never met in training is not looked at."""

    classes: tuple[str, ...]
    features: tuple[str, ...]
    weights: tuple[tuple[float, ...], ...]
    intercepts: tuple[float, ...]

    def probabilities(self, values: dict[str, float]) -> dict[str, float]:
        x = [values.get(name, 0.0) for name in self.features]
        scores = [
            b + sum(w * v for w, v in zip(row, x, strict=True))
            for row, b in zip(self.weights, self.intercepts, strict=True)
        ]
        top = max(scores)
        exps = [math.exp(score - top) for score in scores]
        total = sum(exps)
        return {name: e / total for name, e in zip(self.classes, exps, strict=True)}


def features_of(suspects: Sequence[SuspectResult], kind: str) -> dict[str, float]:
    """feature -> value: the sum of nats of each suspect that could look, which ones could, and the kind of finding."""
    found: dict[str, float] = {f"kind:{kind}": 1.0}
    for result in suspects:
        if result.suspect == UNDETERMINED or result.status in (Status.NOT_OBSERVED, Status.CRASHED):
            continue
        found[f"sum:{result.suspect}"] = min(HIGHEST, max(LOWEST, raw_sum(result.evidence)))
        found[f"able:{result.suspect}"] = 1.0
    return found


def opinion(suspects: Sequence[SuspectResult], kind: str) -> Opinion | None:
    """The model's opinion; None where it has none, or where its answer is no suspect of this finding."""
    model = current()
    if model is None:
        return None
    named = {r.suspect for r in suspects if r.status is not Status.NOT_OBSERVED}
    found = model.probabilities(features_of(suspects, kind))
    best = max(found, key=lambda name: (found[name], name))
    if found[best] < LEAST_PROBABILITY or best not in named:
        return None
    judge = max((r for r in suspects if r.suspect != UNDETERMINED), key=lambda r: r.probability)
    return Opinion(suspect=best, probability=round(found[best], 4), agrees=best == judge.suspect)


def detail(suspects: Sequence[SuspectResult], kind: str) -> dict[str, object]:
    """What a finding keeps of it under `second_opinion`; empty without an opinion."""
    found = opinion(suspects, kind)
    if found is None:
        return {}
    return {
        "second_opinion": {"suspect": found.suspect, "probability": found.probability, "agrees": found.agrees},
    }


@cache
def current() -> Model | None:
    """The model of this package; None if it has none.

    Raises:
        ValueError: the file is of another version, or its parts do not fit together.
    """
    path = files("runhealth.diagnose") / "second_opinion.json"
    if not path.is_file():
        return None
    raw = json.loads(path.read_text(encoding="utf-8"))
    if raw.get("version") != VERSION:
        raise ValueError(f"second_opinion.json: expected version {VERSION}, met {raw.get('version')}")
    model = Model(
        classes=tuple(raw["classes"]),
        features=tuple(raw["features"]),
        weights=tuple(tuple(row) for row in raw["weights"]),
        intercepts=tuple(raw["intercepts"]),
    )
    fits = len(model.weights) == len(model.intercepts) == len(model.classes)
    if not fits or any(len(row) != len(model.features) for row in model.weights):
        raise ValueError("second_opinion.json: expected one weight a class and feature")
    return model
