"""Fits the calibration of the judge and the second opinion, on the tuning split alone.

    python -m bench.faults.calibrate [--cache DIR] [--write]

Every tuning run that raised a finding with suspects gives one case: what the judge knew two steps after the alarm, and
the true cause (`undetermined` where the truth is none of the suspects of that finding). Temperature and the sum at
which `undetermined` stands minimise the log loss. How well they do on cases that they were not fitted to is measured
twice: leaving one base seed out at a time, and one kind of fault, the nearest thing to kinds that nobody has met yet.
The second opinion is judged both ways as well.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from bench.faults import store
from bench.faults.cli import default_cache
from scipy.optimize import minimize
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from runhealth.diagnose.calibration import VERSION, Calibration
from runhealth.diagnose.engine import Engine
from runhealth.diagnose.findings import UNDETERMINED, Finding, Severity, Status
from runhealth.diagnose.second_opinion import features_of
from runhealth.diagnose.suspect import raw_sum
from runhealth.storage.records import StepRecord

HERE = Path(__file__).resolve().parents[2]
PACKAGE = HERE / "src" / "runhealth" / "diagnose"
AFTER_STEPS = 2
BEFORE_STEPS = 30  # a shard may have been bad, memory may have crept, before the step at which the label begins
FOLDS = ("seed", "kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One case: the finding two steps after the alarm, and the truth."""

    run: str
    seed: int
    kind: str
    cause: str
    finding: Finding

    @property
    def truth(self) -> str:
        return self.cause if self.cause in self.raws else UNDETERMINED

    @property
    def raws(self) -> dict[str, float]:
        able = (s for s in self.finding.suspects if s.suspect != UNDETERMINED)
        return {s.suspect: raw_sum(s.evidence) for s in able if s.status not in (Status.NOT_OBSERVED, Status.CRASHED)}


def judged(cache: Path, name: str, base: Mapping[str, Any]) -> Judged | None:
    """What is said of a run two steps after its first alarm; None where nothing is. `base`: the state of an engine that
    has read the base up to the fork, which runs share."""
    label = store.label(cache, name)
    onset = label["onset_step"]
    if onset is None:
        return None
    engine, alarm = Engine(), None
    engine.load_state_dict(base)

    def found() -> list[Finding]:
        said = engine._findings("")
        relevant = (f for f in said if f.suspects and f.onset_step >= onset - BEFORE_STEPS)
        return [f for f in relevant if f.severity is not Severity.INFO]

    for record in store.own_records(cache, name):
        if alarm is not None and isinstance(record, StepRecord) and record.step > alarm + AFTER_STEPS + 1:
            break
        if engine.feed_quietly(record) and alarm is None and found():
            alarm = engine.last_step
    else:
        engine.finish()
    findings = found()
    if not findings:
        return None
    first = min(findings, key=lambda f: (-f.severity.level, f.onset_step, f.id))
    return Judged(run=name, seed=label["seed"], kind=label["kind"], cause=label["cause"], finding=first)


def judged_of_base(cache: Path, names: Sequence[str]) -> list[Judged | None]:
    """Of runs that fork from one base at one step."""
    engine = Engine()
    for record in store.base_records(cache, names[0]):
        engine.feed_quietly(record)
    state = engine.state_dict()
    return [judged(cache, name, state) for name in names]


def judged_all(cache: Path, names: Sequence[str], jobs: int) -> list[Judged]:
    bases: dict[tuple[str, int], list[str]] = {}
    for name in names:
        label = store.label(cache, name)
        if label["onset_step"] is not None:
            bases.setdefault((label["base"], label["fork"]), []).append(name)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        found = pool.map(judged_of_base, [cache] * len(bases), bases.values())
        return sorted((case for part in found for case in part if case is not None), key=lambda case: case.run)


# -- probabilities ---------------------------------------------------------------------------------------


def log_loss(cases: Sequence[Judged], temperature: float, undetermined: float) -> float:
    fit = Calibration(temperature=temperature, undetermined_nats=undetermined)
    total = 0.0
    for case in cases:
        found = fit.probabilities({**case.raws, UNDETERMINED: undetermined})
        total -= float(np.log(max(1e-6, found[case.truth])))
    return total / len(cases)


def fit_softmax(cases: Sequence[Judged]) -> tuple[float, float]:
    """Temperature and the sum at which `undetermined` stands. The temperature is not under 1: the weights were set with
    the tuning runs in sight and separate them better than they will separate kinds that are met for the first time."""
    best = minimize(
        lambda x: log_loss(cases, _temperature(x[0]), float(x[1])) + 0.01 * (x[0] ** 2 + (x[1] - 2.0) ** 2),
        x0=[0.0, 2.0],
        method="Nelder-Mead",
        options={"maxiter": 200},
    )
    return _temperature(best.x[0]), float(best.x[1])


def _temperature(log: float) -> float:
    return max(1.0, float(np.exp(log)))


def tops(cases: Sequence[Judged], fit: Calibration) -> tuple[np.ndarray, np.ndarray]:
    """(n,) probability of the best suspect or of undetermined, and whether it is the truth."""
    ps, right = [], []
    for case in cases:
        found = fit.probabilities({**case.raws, UNDETERMINED: fit.undetermined_nats})
        best = max(found, key=lambda name: (found[name], name))
        ps.append(found[best])
        right.append(best == case.truth)
    return np.array(ps), np.array(right, dtype=float)


def calibration_error(ps: np.ndarray, right: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error over `bins` equal bins."""
    at = np.minimum((ps * bins).astype(int), bins - 1)
    return float(
        sum(abs(ps[at == b].mean() - right[at == b].mean()) * (at == b).mean() for b in range(bins) if (at == b).any())
    )


def folds(cases: Sequence[Judged], by: str) -> Iterator[tuple[list[Judged], list[Judged]]]:
    """(train, test) for each base seed (`by` "seed") or each kind of fault ("kind")."""
    for value in sorted({getattr(case, by) for case in cases}):
        yield [c for c in cases if getattr(c, by) != value], [c for c in cases if getattr(c, by) == value]


def cross_validated(cases: Sequence[Judged], by: str) -> tuple[np.ndarray, np.ndarray]:
    ps, right = [], []
    for train, test in folds(cases, by):
        temperature, undetermined = fit_softmax(train)
        p, r = tops(test, Calibration(temperature=temperature, undetermined_nats=undetermined))
        ps.append(p)
        right.append(r)
    return np.concatenate(ps), np.concatenate(right)


# -- second opinion --------------------------------------------------------------------------------------


def matrix(cases: Sequence[Judged], names: Sequence[str]) -> np.ndarray:
    return np.array([[features_of(c.finding.suspects, c.finding.kind).get(n, 0.0) for n in names] for c in cases])


def opinions(cases: Sequence[Judged], names: Sequence[str], by: str) -> dict[str, float]:
    """Cross-validated accuracy of the models that were tried, and of the judge on the same cases."""
    makers: dict[str, Any] = {
        "logistic": lambda: LogisticRegression(C=0.3, max_iter=2000),
        "boosting": lambda: HistGradientBoostingClassifier(max_iter=40, max_leaf_nodes=8, min_samples_leaf=3),
    }
    if by == "kind":
        del makers["boosting"]  # dozens of fits that take minutes
    scores: dict[str, float] = {}
    for name, make in makers.items():
        hits = 0
        for train, test in folds(cases, by):
            scaler = StandardScaler().fit(matrix(train, names))
            model = make().fit(scaler.transform(matrix(train, names)), np.array([case.cause for case in train]))
            found = model.predict(scaler.transform(matrix(test, names)))
            hits += int((found == np.array([case.cause for case in test])).sum())
        scores[name] = hits / len(cases)
    scores["judge"] = float(np.mean([case.finding.verdict == case.cause for case in cases]))
    return scores


def fit_opinion(cases: Sequence[Judged], names: Sequence[str]) -> dict[str, Any]:
    x, y = matrix(cases, names), np.array([case.cause for case in cases])
    scaler = StandardScaler().fit(x)
    model = LogisticRegression(C=0.3, max_iter=2000).fit(scaler.transform(x), y)
    weights = model.coef_ / scaler.scale_
    intercepts = model.intercept_ - weights @ scaler.mean_
    return {
        "classes": [str(name) for name in model.classes_],
        "features": list(names),
        "weights": [[round(float(w), 4) for w in row] for row in weights],
        "intercepts": [round(float(b), 4) for b in intercepts],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.faults.calibrate", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    parser.add_argument("--write", action="store_true", help="replace the package's calibration and second opinion")
    args = parser.parse_args(argv)
    tuning = [n for n in store.names(args.cache) if store.label(args.cache, n)["split"] == "tuning"]
    cases = judged_all(args.cache, tuning, args.jobs)
    temperature, undetermined = fit_softmax(cases)
    names = sorted({name for case in cases for name in features_of(case.finding.suspects, case.finding.kind)})
    print(
        f"{len(cases)} cases of {len(tuning)} tuning runs; temperature {temperature:.3f}, "
        f"undetermined {undetermined:.2f}"
    )
    errors, scores = {}, {}
    for by in FOLDS:
        ps, right = cross_validated(cases, by)
        sure = ps >= 0.9
        errors[by], scores[by] = calibration_error(ps, right), opinions(cases, names, by)
        print(f"one {by} left out: calibration error {errors[by]:.4f}")
        print(f"  p >= 0.9: {right[sure].mean():.4f} right of {int(sure.sum())}; all: {right.mean():.4f}")
        print("  second opinion: " + ", ".join(f"{name} {score:.4f}" for name, score in scores[by].items()))
    if args.write:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True
        )
        origin = {
            "seeds": sorted({case.seed for case in cases}),
            "runs": len(cases),
            "commit": commit.stdout.strip(),
        }
        body = {
            "version": VERSION,
            "temperature": round(temperature, 3),
            "undetermined_nats": round(undetermined, 3),
            "knots": [],
            **origin,
            "calibration_error_cross_validated": round(errors["seed"], 4),
            "calibration_error_kind_left_out": round(errors["kind"], 4),
        }
        (PACKAGE / "calibration.json").write_text(json.dumps(body, indent=1) + "\n")
        opinion = {
            "version": VERSION,
            **origin,
            "accuracy_cross_validated": round(scores["seed"]["logistic"], 4),
            "accuracy_kind_left_out": round(scores["kind"]["logistic"], 4),
        }
        opinion |= fit_opinion(cases, names)
        (PACKAGE / "second_opinion.json").write_text(json.dumps(opinion) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
