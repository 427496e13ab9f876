"""Recall and false alarms of the loss-spike detector beside the rules of other systems, on synthetic curves.

    python bench/detectors.py [--seeds 6] [--steps 20000] [--tuning] [--report FILE]

Curves: a power-law descent with noise that is normal or Student t with 5 degrees of freedom, sigma 0.01 to 0.1 nats,
some with a shift of the data mix. Spikes of 0.1, 0.3, 1 and 3 nats are added to the loss, ten a run, three rows high
with a short tail. A hit is an alarm within 20 steps after a spike began; false alarms are counted on the same curves
without spikes, apart for the first 2,000 steps. Tuning seeds are 0 to 99, report seeds 1000 and up; nothing was tuned
on the latter. `runhealth` is the detector as it runs, `runhealth_any_size` its statistic without the contract's rule
that an excursion of less than 10 % is no spike, and with a sigma down to 0.2 % of the loss.

The other rules are written from their formulas: mean + 6 standard deviations of the last 128 points (OLMo-core, and in
the same way levanter and MaxText), 3 x the running mean of 10 (Lightning's SpikeDetection), 2 x the mean of the last
100 for 5 points in a row (llm-foundry's KillLossSpike).
"""

import argparse
import itertools
import json
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from runhealth.diagnose.detectors.loss_spike import LossSpike
from runhealth.diagnose.findings import Severity
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.service import diagnose
from runhealth.storage.records import SourceInfo, StepRecord

DESCENT_STEPS = 2000
HIT_STEPS = 20
HEIGHTS = (0.1, 0.3, 1.0, 3.0)
SPIKES_A_RUN = 10
Update = Callable[[int, float], bool]


def ours() -> Update:
    """Alarms of the detector as it runs: z >= 5 and at least +10 %."""
    detector = LossSpike()

    def update(step: int, loss: float) -> bool:
        return bool(detector.update(_frame(step, loss)))

    return update


def ours_any_size() -> Update:
    """The same statistic without the rule that an effect under 10 % is no spike."""
    detector = LossSpike(effect=0.0, floor=0.002)

    def update(step: int, loss: float) -> bool:
        return bool(detector.update(_frame(step, loss)))

    return update


def mean_6_sigma() -> Update:
    window: deque[float] = deque(maxlen=128)

    def update(_: int, loss: float) -> bool:
        alarm = False
        if len(window) == 128:
            mean = math.fsum(window) / 128
            sigma = math.sqrt(math.fsum((v - mean) ** 2 for v in window) / 127)
            alarm = loss > mean + 6 * sigma
        window.append(loss)
        return alarm

    return update


def running_mean_x3() -> Update:
    window: deque[float] = deque(maxlen=10)

    def update(_: int, loss: float) -> bool:
        alarm = len(window) == 10 and loss >= 3 * (math.fsum(window) / 10)
        window.append(loss)
        return alarm

    return update


def mean_100_x2_for_5() -> Update:
    window: deque[float] = deque(maxlen=100)
    run = 0

    def update(_: int, loss: float) -> bool:
        nonlocal run
        over = len(window) == 100 and loss >= 2 * (math.fsum(window) / 100)
        run = run + 1 if over else 0
        window.append(loss)
        return run == 5

    return update


RULES: dict[str, Callable[[], Update]] = {
    "runhealth": ours,
    "runhealth_any_size": ours_any_size,
    "mean_6_sigma_128": mean_6_sigma,
    "lightning_3x_mean_10": running_mean_x3,
    "llm_foundry_2x_mean_100_for_5": mean_100_x2_for_5,
}


def _frame(step: int, loss: float) -> Frame:
    frame = Frame(0, step)
    frame.ranks = {0: {"loss": loss}}
    frame.seal()
    return frame


def curve(rng: np.random.Generator, steps: int, sigma: float, heavy: bool, shift: bool) -> np.ndarray:
    """Loss and `sigma` in nats, from about 10.8 down to about 2.5. A shift of the data mix lifts it by 4 % halfway."""
    t = np.arange(steps)
    base = 2.2 + 8.6 * (1 + t / 60) ** -0.6
    if shift:
        base = np.where(t >= steps // 2, 1.04 * base, base)
    # a t5 variable has the standard deviation sqrt(5/3)
    noise = rng.standard_t(5, steps) / math.sqrt(5 / 3) if heavy else rng.normal(size=steps)
    return base + sigma * noise


def spike_steps(rng: np.random.Generator, steps: int) -> list[int]:
    """Spread over what lies behind the early descent, at least 600 steps apart."""
    slots = np.linspace(DESCENT_STEPS + 500, steps - 500, SPIKES_A_RUN + 1)
    return [int(a + rng.uniform(0, (b - a) - 600)) for a, b in itertools.pairwise(slots)]


def alarms_of(rule: Callable[[], Update], series: np.ndarray) -> list[int]:
    update = rule()
    return [step for step, loss in enumerate(series.tolist()) if update(step, loss)]


def kinds() -> Iterator[tuple[float, bool, bool]]:
    for sigma in (0.01, 0.02, 0.05, 0.1):
        for heavy in (False, True):
            yield sigma, heavy, False
    yield 0.02, True, True


def measure(seeds: range, steps: int) -> dict[str, object]:
    recall: dict[str, dict[str, dict[str, list[int]]]] = {}
    healthy: dict[str, dict[str, list[int]]] = {}  # alarms after the descent, alarms in it, steps after it
    incidents = {"spikes": 0, "findings": 0, "loud_healthy": 0, "healthy_runs": 0}
    for sigma, heavy, shift in kinds():
        kind = f"sigma {sigma:g} {'t5' if heavy else 'normal'}{' shift' if shift else ''}"
        for seed in seeds:
            rng = np.random.default_rng([seed, int(1000 * sigma), heavy, shift])
            clean = curve(rng, steps, sigma, heavy, shift)
            for name, rule in RULES.items():
                found = alarms_of(rule, clean)
                tally = healthy.setdefault(name, {}).setdefault(kind, [0, 0, 0])
                tally[0] += sum(s >= DESCENT_STEPS for s in found)
                tally[1] += sum(s < DESCENT_STEPS for s in found)
                tally[2] += steps - DESCENT_STEPS
            _, loud = told(clean)
            incidents["loud_healthy"] += loud
            incidents["healthy_runs"] += 1
            for height in HEIGHTS:
                series = clean.copy()
                at = spike_steps(rng, steps)
                for step in at:  # three steps high, then back within a few
                    series[step : step + 12] += height * np.exp(-np.maximum(0, np.arange(12) - 2) / 2)
                for name, rule in RULES.items():
                    found = alarms_of(rule, series)
                    hits = sum(any(step <= s < step + HIT_STEPS for s in found) for step in at)
                    tally = recall.setdefault(name, {}).setdefault(kind, {}).setdefault(f"+{height:g}", [0, 0])
                    tally[0] += hits
                    tally[1] += len(at)
                if height >= 1.0 and sigma <= 0.02:
                    count, _ = told(series)
                    incidents["spikes"] += len(at)
                    incidents["findings"] += count
    return {"recall": recall, "healthy": healthy, "incidents": incidents}


class _Series:
    def __init__(self, series: np.ndarray) -> None:
        self._series = series

    def records(self) -> Iterator[StepRecord]:
        for step, loss in enumerate(self._series.tolist()):
            yield StepRecord(attempt=0, step=step, rank=0, values={"loss": loss})

    def describe(self) -> SourceInfo:
        return SourceInfo(name="curve", source="curve", format="made")


def told(series: np.ndarray) -> tuple[int, int]:
    """What the whole engine says: incidents of the loss counted one by one, and findings louder than info."""
    findings = diagnose(_Series(series)).findings
    count = sum(f.count for f in findings if f.kind in ("loss_spike", "loss_divergence"))
    return count, sum(f.severity is not Severity.INFO for f in findings)


def summary(measured: dict[str, object]) -> dict[str, object]:
    """Shares and rates, over all kinds of curve and for sigma 0.02."""
    rows: dict[str, object] = {}
    for name in RULES:
        recall, healthy = measured["recall"][name], measured["healthy"][name]  # type: ignore[index]
        rows[name] = {
            "recall": {h: share([recall[k][h] for k in recall]) for h in (f"+{x:g}" for x in HEIGHTS)},
            "recall_sigma_0.02": {
                h: share([recall[k][h] for k in recall if k.startswith("sigma 0.02")])
                for h in (f"+{x:g}" for x in HEIGHTS)
            },
            "false_per_10k": {k: round(1e4 * v[0] / v[2], 2) for k, v in healthy.items()},
            "false_per_10k_all": round(
                1e4 * sum(v[0] for v in healthy.values()) / sum(v[2] for v in healthy.values()), 2
            ),
            "in_early_descent": sum(v[1] for v in healthy.values()),
        }
    return {"rules": rows, "incidents": measured["incidents"]}


def share(tallies: list[list[int]]) -> float:
    return round(sum(t[0] for t in tallies) / sum(t[1] for t in tallies), 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=6, help="curves of each kind")
    parser.add_argument("--steps", type=int, default=20_000, help="of each curve")
    parser.add_argument("--tuning", action="store_true", help="use the tuning seeds")
    parser.add_argument("--report", type=Path, help="also write the numbers of each kind of curve to this file")
    args = parser.parse_args()
    first = 0 if args.tuning else 1000
    measured = measure(range(first, first + args.seeds), args.steps)
    result = {"bench": "detectors", "seeds": [first, first + args.seeds], "steps": args.steps, **summary(measured)}
    if args.report:
        args.report.write_text(json.dumps({**result, "by_kind": measured}, indent=1), encoding="utf-8")
    for name, row in result["rules"].items():  # type: ignore[attr-defined]
        print(f"{name:32} {row['recall']}  false/10k {row['false_per_10k_all']}  descent {row['in_early_descent']}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
