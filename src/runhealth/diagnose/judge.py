"""From evidence to probabilities: gates, vetoes, clipped log-likelihood ratios, temperature, softmax.

A suspect whose signals were not recorded is `not_observed`: it gets probability 0 here and its missing signals are
listed, which is no innocence. `undetermined` stands in the softmax with a raw sum of its own, so that weak evidence
never adds up to certainty.
"""

import math
import traceback
from collections.abc import Sequence

from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import UNDETERMINED, Evidence, Status, SuspectResult
from runhealth.diagnose.suspect import CLIP_NATS, VETO_NATS, Suspect, missing_signals

TEMPERATURE = 1.5
UNDETERMINED_NATS = 2.0
LEAST_NATS = 3.0  # the best raw sum must reach this
LEAST_PROBABILITY = 0.7
EXONERATED_NATS = -3.0


def raw_sum(evidence: Sequence[Evidence]) -> float:
    """Sum of the weights in nats, each clipped to ±3.5 except vetoes."""
    return sum(
        e.weight_nats if e.weight_nats <= VETO_NATS else max(-CLIP_NATS, min(CLIP_NATS, e.weight_nats))
        for e in evidence
    )


def walk(case: Case, suspects: Sequence[Suspect]) -> tuple[tuple[SuspectResult, ...], str]:
    """Investigate every suspect. Returns results sorted by probability, `undetermined` included, and the verdict."""
    kinds = {alarm.kind for alarm in case.incident.alarms}
    seen: list[tuple[Suspect, Status, tuple[Evidence, ...], str, float]] = []
    missing = {}
    for suspect in suspects:
        if suspect.kinds and not kinds & set(suspect.kinds):
            continue
        missing[suspect.name], able = missing_signals(suspect, case)
        if not able:
            seen.append((suspect, Status.NOT_OBSERVED, (), "", -math.inf))
            continue
        try:
            evidence = tuple(suspect.investigate(case))
            if not all(math.isfinite(e.weight_nats) for e in evidence):
                raise ValueError("expected finite weights in nats, met one that is not")
            raw = raw_sum(evidence)
        except Exception:  # noqa: BLE001 - a broken suspect is reported and harms nobody
            error = traceback.format_exc().strip().splitlines()[-1]
            seen.append((suspect, Status.CRASHED, (), error, -math.inf))
            continue
        status = Status.EXONERATED if raw <= EXONERATED_NATS else Status.INCONCLUSIVE
        seen.append((suspect, status, evidence, "", raw))
    raws = {suspect.name: raw for suspect, *_, raw in seen}
    raws[UNDETERMINED] = UNDETERMINED_NATS
    probabilities = softmax(raws)
    best = max((name for name in raws if name != UNDETERMINED), key=lambda n: (raws[n], n), default=UNDETERMINED)
    sure = best != UNDETERMINED and raws[best] >= LEAST_NATS and probabilities[best] >= LEAST_PROBABILITY
    verdict = best if sure else UNDETERMINED
    results = [
        SuspectResult(
            suspect=suspect.name,
            status=Status.IMPLICATED if suspect.name == verdict else status,
            probability=probabilities[suspect.name],
            evidence=evidence,
            missing=missing[suspect.name],
            error=error,
        )
        for suspect, status, evidence, error, _ in seen
    ]
    results.append(
        SuspectResult(suspect=UNDETERMINED, status=Status.INCONCLUSIVE, probability=probabilities[UNDETERMINED])
    )
    results.sort(key=lambda r: (-r.probability, r.suspect))
    return tuple(results), verdict


def softmax(raws: dict[str, float]) -> dict[str, float]:
    """Probabilities exp(raw / T) / sum; a raw of minus infinity gives exactly 0."""
    top = max(raws.values())
    weights = {name: math.exp((raw - top) / TEMPERATURE) for name, raw in raws.items()}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
