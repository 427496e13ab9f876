"""From evidence to probabilities: gates, vetoes, clipped log-likelihood ratios, and the bench's calibration.

A suspect whose signals were not recorded is `not_observed`: it gets probability 0 here and its missing signals are
listed, which is no innocence. `undetermined` stands in the softmax with a raw sum of its own, so that weak evidence
never adds up to certainty.
"""

import math
import traceback
from collections.abc import Sequence

from runhealth.diagnose.calibration import current
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import UNDETERMINED, Evidence, Status, SuspectResult
from runhealth.diagnose.roots import unexplained
from runhealth.diagnose.suspect import Suspect, missing_signals, raw_sum
from runhealth.diagnose.tracked import CAUSAL_KINDS

LEAST_NATS = 3.0  # the best raw sum must reach this
LEAST_PROBABILITY = 0.7
EXONERATED_NATS = -3.0
PASSING = ("benign",)  # what only more data can confirm


Judgement = tuple[tuple[SuspectResult, ...], str]


def settled(before: Judgement | None, now: Judgement) -> Judgement:
    """Of two looks at the same trouble, the one that stands: the newer, unless it names another cause, or none, without
    being surer of it than the older was. A cause shows first; what it brings with it comes later and lasts longer, and
    would otherwise take its place."""
    if before is None or before[1] in (UNDETERMINED, now[1]) or before[1] in PASSING:
        return now
    return now if now[1] != UNDETERMINED and _surest(now) > _surest(before) else before


def _surest(judgement: Judgement) -> float:
    return max(result.probability for result in judgement[0])


def walk(case: Case, suspects: Sequence[Suspect]) -> tuple[tuple[SuspectResult, ...], str]:
    """Investigate every suspect. Returns results sorted by probability, `undetermined` included, and the verdict."""
    calibration = current()
    kinds = {alarm.kind for alarm in case.incident.alarms}
    seen: list[tuple[Suspect, Status, tuple[Evidence, ...], str, float]] = []
    missing = {}
    for suspect in suspects:
        if not kinds.intersection(suspect.kinds or CAUSAL_KINDS):
            continue
        missing[suspect.name], able = missing_signals(suspect, case)
        if not able and case.incident.id not in suspect.shown_in:
            seen.append((suspect, Status.NOT_OBSERVED, (), "", -math.inf))
            continue
        try:
            evidence = tuple(suspect.investigate(case))
            evidence = (*evidence, *unexplained(suspect.name, evidence, case))
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
    raws[UNDETERMINED] = calibration.undetermined_nats
    probabilities = calibration.probabilities(raws)
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
