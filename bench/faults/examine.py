"""What the engine says about one run: live, step by step, and post-mortem; and what simple rules say beside it.

Nothing is judged here: a result holds what was said and the truth, and `score.py` holds one against the other.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench.faults import rules, store

from runhealth.diagnose.engine import Engine, verdict_hash
from runhealth.diagnose.findings import UNDETERMINED, Finding
from runhealth.diagnose.tracked import CAUSAL_KINDS
from runhealth.storage.records import Record, SourceInfo, StepRecord

SOURCE = SourceInfo(name="bench", source="bench", format="bench")
_ALARM_STEP = re.compile(r"a\d+-s(\d+)")


def examine(cache: Path, name: str) -> dict[str, Any]:
    truth = store.label(cache, name)
    records = list(store.records(cache, name))
    live, said = _live(records)
    post = Engine()
    for record in sorted(records, key=lambda r: (r.attempt, r.step, r.rank)):  # as a store yields them
        post.feed_quietly(record)
    post.finish()
    report = post.report(SOURCE)
    losses, norms = _series(records)
    twin = _series(list(store.records(cache, truth["twin"])))[0] if truth["kind"] else losses
    return {
        "name": name,
        "truth": {key: truth[key] for key in _KEPT if key in truth},
        "last_step": max(record.step for record in records if isinstance(record, StepRecord)),
        "said": said,
        "final": [_finding(finding) for finding in report.findings],
        "hash_live": live,
        "hash_post": verdict_hash(report),
        "spike": _spike(losses, twin, truth["onset_step"]),
        "rules": {rule.name: rule.alarms(losses, norms) for rule in rules.RULES},
    }


_KEPT = (
    "split",
    "kind",
    "cause",
    "held_out",
    "level",
    "severity",
    "base",
    "precision",
    "fork_step",
    "onset_step",
    "last_step",
    "ranks",
    "distractor",
    "distractor_step",
)


def _live(records: Sequence[Record]) -> tuple[str, list[dict[str, Any]]]:
    """Feed the records as they would arrive: ranks interleaved, each up to two steps behind the first. Returns the
    hash of the verdict at the end, and everything that was said with the step of the last closed frame."""
    engine = Engine()
    said: list[dict[str, Any]] = []

    def note(found: Iterable[Finding]) -> None:
        for finding in found:
            # what ends a run is told of a step that no frame was closed for
            at = max(engine.last_step or 0, finding.onset_step)
            said.append({"at": at, **_finding(finding)})

    for record in _interleaved(records):
        note(engine.feed(record))
    note(engine.finish())
    return verdict_hash(engine.report(SOURCE)), said


def _interleaved(records: Iterable[Record]) -> Iterable[Record]:
    """Within an attempt, rank r's records of a step come with those that rank 0 writes (r mod 3) steps later."""
    attempts: dict[int, dict[tuple[int, int], list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        lag = max(record.rank, 0) % 3
        step = record.step
        attempts[record.attempt][step + lag, -record.rank].append(record)
    for attempt in sorted(attempts):
        for key in sorted(attempts[attempt]):
            yield from attempts[attempt][key]


def _finding(finding: Finding) -> dict[str, Any]:
    suspects = [(s.suspect, round(s.probability, 4)) for s in finding.suspects[:3] if s.probability > 0]
    alarm = _ALARM_STEP.match(finding.id)
    return {
        "id": finding.id,
        "kind": finding.kind,
        "severity": finding.severity.value,
        "outcome": finding.outcome.value,
        "attempt": finding.attempt,
        "onset": finding.onset_step,
        # an incident is named after the step of its first alarm; a fact after its onset
        "alarm": int(alarm[1]) if alarm and finding.kind in CAUSAL_KINDS else None,
        "ranks": list(finding.ranks) if finding.ranks is not None else None,
        "verdict": finding.verdict if finding.suspects else UNDETERMINED,
        "suspects": suspects,
        "crashed": sorted(s.suspect for s in finding.suspects if s.error),
    }


def _series(records: Iterable[Record]) -> tuple[dict[int, float], dict[int, float]]:
    """Step -> mean loss over the ranks, and global gradient norm; of the last attempt that did the step. A step that
    the loss scaler skipped has no norm: the optimizer never sees it."""
    losses: dict[tuple[int, int], list[float]] = defaultdict(list)
    norms: dict[int, float] = {}
    for record in records:
        if isinstance(record, StepRecord):
            if "loss" in record.values:
                losses[record.attempt, record.step].append(float(record.values["loss"]))
            if "grad_norm" in record.values and not record.values.get("step_skipped"):
                norms[record.step] = float(record.values["grad_norm"])
    return {step: sum(values) / len(values) for (_, step), values in sorted(losses.items())}, norms


def _spike(losses: dict[int, float], twin: dict[int, float], onset: int | None) -> dict[str, Any] | None:
    """The first step at or after the onset at which the loss is over its exact twin's by 10 % and 5 robust sigma (of
    the twin's step-to-step scatter) or not finite; the largest excess in nats of log-loss; how many such steps there
    are. None if there is none."""
    if onset is None:
        return None
    steady = np.log([twin[step] for step in sorted(twin) if onset - 96 <= step < onset])
    jumps = np.diff(steady)
    sigma = 1.4826 * float(np.median(np.abs(jumps - np.median(jumps)))) / math.sqrt(2)
    limit = max(math.log(1.1), 5 * sigma)
    first, largest, steps = None, 0.0, 0
    for step in sorted(losses):
        if step < onset or step not in twin:
            continue
        bad = not math.isfinite(losses[step])
        excess = math.inf if bad else math.log(losses[step] / twin[step]) if losses[step] > 0 else 0.0
        largest = max(largest, excess)
        if excess >= limit:
            steps += 1
            first = step if first is None else first
    if first is None:
        return None
    return {"step": first, "excess": round(largest, 4) if math.isfinite(largest) else None, "steps": steps}
