"""Fits the calibration of the judge and the second opinion, on the tuning split alone.

    python -m bench.faults.calibrate [--cache DIR] [--write]

Every tuning run that raised a finding with suspects gives one case: what the judge knew two steps after the alarm, and
the true cause (`undetermined` where the truth is none of the suspects of that finding). Temperature and the sum at
which `undetermined` stands minimise the log loss; the isotonic map and the choice of model for the second opinion are
cross-validated over base seeds, so that no case is judged by a fit that saw its base.
"""

import argparse
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench.faults import store
from bench.faults.cli import default_cache
from scipy.optimize import minimize
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.isotonic import IsotonicRegression
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
CAP = 0.995  # no number of cases of this size supports more
LEAST_P = 0.02
WORTH_IT = 0.01  # what the isotonic map must win over the softmax alone to be worth its knots


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One case: the finding two steps after the alarm, and the truth."""

    run: str
    seed: int
    cause: str
    finding: Finding

    @property
    def truth(self) -> str:
        return self.cause if self.cause in self.raws else UNDETERMINED

    @property
    def raws(self) -> dict[str, float]:
        able = (s for s in self.finding.suspects if s.suspect != UNDETERMINED)
        return {s.suspect: raw_sum(s.evidence) for s in able if s.status not in (Status.NOT_OBSERVED, Status.CRASHED)}


def judged(cache: Path, name: str) -> Judged | None:
    """What is said of a run two steps after its first alarm; None where nothing is."""
    label = store.label(cache, name)
    onset = label["onset_step"]
    if onset is None:
        return None
    engine, alarm = Engine(), None

    def found() -> list[Finding]:
        said = engine._findings("")
        relevant = (f for f in said if f.suspects and f.onset_step >= onset - BEFORE_STEPS)
        return [f for f in relevant if f.severity is not Severity.INFO]

    for record in store.records(cache, name):
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
    return Judged(run=name, seed=label["seed"], cause=label["cause"], finding=first)


# -- probabilities ---------------------------------------------------------------------------------------


def log_loss(cases: Sequence[Judged], temperature: float, undetermined: float) -> float:
    fit = Calibration(temperature=temperature, undetermined_nats=undetermined)
    total = 0.0
    for case in cases:
        found = fit.probabilities({**case.raws, UNDETERMINED: undetermined})
        total -= float(np.log(max(1e-6, found[case.truth])))
    return total / len(cases)


def fit_softmax(cases: Sequence[Judged]) -> tuple[float, float]:
    best = minimize(
        lambda x: log_loss(cases, float(np.exp(x[0])), float(x[1])) + 0.01 * (x[0] ** 2 + (x[1] - 2.0) ** 2),
        x0=[0.0, 2.0],
        method="Nelder-Mead",
        options={"maxiter": 200},
    )
    return float(np.exp(best.x[0])), float(best.x[1])


def tops(cases: Sequence[Judged], fit: Calibration) -> tuple[np.ndarray, np.ndarray]:
    """(n,) probability of the best suspect or of undetermined, and whether it is the truth."""
    ps, right = [], []
    for case in cases:
        found = fit.probabilities({**case.raws, UNDETERMINED: fit.undetermined_nats})
        best = max(found, key=lambda name: (found[name], name))
        ps.append(found[best])
        right.append(best == case.truth)
    return np.array(ps), np.array(right, dtype=float)


def fit_knots(ps: np.ndarray, right: np.ndarray) -> tuple[tuple[float, float], ...]:
    model = IsotonicRegression(y_min=LEAST_P, y_max=CAP, out_of_bounds="clip").fit(ps, right)
    xs, ys = model.X_thresholds_, model.y_thresholds_
    kept: dict[float, float] = {}
    for x, y in zip(xs, ys, strict=True):
        kept[round(float(x), 4)] = max(round(float(y), 4), *kept.values(), 0.0)
    return tuple(kept.items())


def calibration_error(ps: np.ndarray, right: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error over `bins` equal bins."""
    at = np.minimum((ps * bins).astype(int), bins - 1)
    return float(
        sum(abs(ps[at == b].mean() - right[at == b].mean()) * (at == b).mean() for b in range(bins) if (at == b).any())
    )


def cross_validated(cases: Sequence[Judged], *, isotonic: bool) -> tuple[np.ndarray, np.ndarray]:
    ps, right = [], []
    for seed in sorted({case.seed for case in cases}):
        train = [case for case in cases if case.seed != seed]
        test = [case for case in cases if case.seed == seed]
        fit = Calibration(temperature=(fitted := fit_softmax(train))[0], undetermined_nats=fitted[1])
        if isotonic:
            fit = Calibration(temperature=fitted[0], undetermined_nats=fitted[1], knots=fit_knots(*tops(train, fit)))
        p, r = tops(test, fit)
        ps.append(p)
        right.append(r)
    return np.concatenate(ps), np.concatenate(right)


# -- second opinion --------------------------------------------------------------------------------------


def matrix(cases: Sequence[Judged], names: Sequence[str]) -> np.ndarray:
    return np.array([[features_of(c.finding.suspects, c.finding.kind).get(n, 0.0) for n in names] for c in cases])


def opinions(cases: Sequence[Judged], names: Sequence[str]) -> dict[str, float]:
    """Cross-validated accuracy of the models that were tried, and of the judge on the same cases."""
    x, y = matrix(cases, names), np.array([case.cause for case in cases])
    seeds = np.array([case.seed for case in cases])
    makers: dict[str, Any] = {
        "logistic": lambda: LogisticRegression(C=0.3, max_iter=2000),
        "boosting": lambda: HistGradientBoostingClassifier(max_iter=40, max_leaf_nodes=8, min_samples_leaf=3),
    }
    scores: dict[str, float] = {}
    for name, make in makers.items():
        hits = 0
        for seed in set(seeds):
            scaler = StandardScaler().fit(x[seeds != seed])
            model = make().fit(scaler.transform(x[seeds != seed]), y[seeds != seed])
            hits += int((model.predict(scaler.transform(x[seeds == seed])) == y[seeds == seed]).sum())
        scores[name] = hits / len(y)
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
    parser.add_argument("--write", action="store_true", help="replace the package's calibration and second opinion")
    args = parser.parse_args(argv)
    tuning = [n for n in store.names(args.cache) if store.label(args.cache, n)["split"] == "tuning"]
    cases = [case for name in tuning if (case := judged(args.cache, name)) is not None]
    temperature, undetermined = fit_softmax(cases)
    fit = Calibration(temperature=temperature, undetermined_nats=undetermined)
    plain, lifted = (calibration_error(*cross_validated(cases, isotonic=i)) for i in (False, True))
    knots = fit_knots(*tops(cases, fit)) if lifted < plain - WORTH_IT else ()
    ps, right = cross_validated(cases, isotonic=bool(knots))
    sure = ps >= 0.9
    names = sorted({name for case in cases for name in features_of(case.finding.suspects, case.finding.kind)})
    scores = opinions(cases, names)
    print(
        f"{len(cases)} cases of {len(tuning)} tuning runs; temperature {temperature:.3f}, "
        f"undetermined {undetermined:.2f}"
    )
    print(
        f"cross-validated over base seeds: calibration error {plain:.3f} by softmax alone, {lifted:.3f} with isotonic"
    )
    print(f"p >= 0.9: {right[sure].mean():.3f} right of {int(sure.sum())}; all: {right.mean():.3f}")
    print("second opinion, cross-validated: " + ", ".join(f"{name} {score:.3f}" for name, score in scores.items()))
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
            "knots": [list(knot) for knot in knots],
            **origin,
            "calibration_error_cross_validated": round(lifted if knots else plain, 4),
        }
        (PACKAGE / "calibration.json").write_text(json.dumps(body, indent=1) + "\n")
        opinion = {"version": VERSION, **origin, "accuracy_cross_validated": round(scores["logistic"], 4)}
        opinion |= fit_opinion(cases, names)
        (PACKAGE / "second_opinion.json").write_text(json.dumps(opinion) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
