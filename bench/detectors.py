"""Recall and false alarms of the loss-spike detector beside the rules of other systems, on synthetic curves.

    python bench/detectors.py [--seeds 8] [--steps 20000] [--tuning] [--report FILE]

Curves: a power-law descent with noise that is normal or Student t with 5 degrees of freedom, sigma 0.01 to 0.1 nats,
some with a shift of the data mix. Spikes of 0.1, 0.3, 1 and 3 nats are added to the loss, ten a run, three rows high
with a short tail. A hit is an alarm within 20 steps after a spike began; false alarms are counted on the same curves
without spikes, apart for the first 2,000 steps. The alarm at a shift of the data mix counts as a false one. Tuning
seeds are 0 to 99, report seeds 3000 and up; nothing was tuned on the latter.

The other rules are written from their formulas: mean + 6 standard deviations of the last 128 points (OLMo-core, and in
the same way levanter and MaxText), 3 x the running mean of 10 (Lightning's SpikeDetection), 2 x the mean of the last
100 for 5 points in a row (llm-foundry's KillLossSpike).
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runhealth.diagnose.detectors.loss_spike import LossSpike
from runhealth.diagnose.findings import Severity
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.service import diagnose
from runhealth.storage.blocks import Column, StepBlock
from runhealth.storage.records import SourceInfo, StepRecord

DESCENT_STEPS = 2000
HIT_STEPS = 20
DELAY_STEPS = 2
HEIGHTS = (0.1, 0.3, 1.0, 3.0)
SPIKES_A_RUN, LEAST_STEPS = 10, 10_000  # ten spikes 600 steps apart need as many
Series = npt.NDArray[np.float64]
Rule = Callable[[Series], list[int]]  # losses -> steps of alarms


def ours(series: Series) -> list[int]:
    """Alarms of the detector as it runs."""
    n = len(series)
    block = StepBlock(
        attempt=0,
        ranks=(0,),
        steps=np.arange(n),
        ts_ns=np.zeros((n, 1), dtype=np.int64),
        columns={"loss": Column(values=series.reshape(n, 1))},
    )
    return [alarm.step for _, alarm in LossSpike().update_block(FrameBlock.of(block))]


def _before(series: Series, width: int) -> Series:
    """(n - width, width): the `width` values before each from the one at `width` on."""
    return np.lib.stride_tricks.sliding_window_view(series, width)[:-1]


def mean_6_sigma(series: Series) -> list[int]:
    before = _before(series, 128)
    high = series[128:] > before.mean(axis=1) + 6 * before.std(axis=1, ddof=1)
    return (np.flatnonzero(high) + 128).tolist()


def running_mean_x3(series: Series) -> list[int]:
    return (np.flatnonzero(series[10:] >= 3 * _before(series, 10).mean(axis=1)) + 10).tolist()


def mean_100_x2_for_5(series: Series) -> list[int]:
    high = series[100:] >= 2 * _before(series, 100).mean(axis=1)
    found, run = [], 0
    for step, is_high in enumerate(high.tolist(), start=100):
        run = run + 1 if is_high else 0
        if run == 5:
            found.append(step)
    return found


RULES: dict[str, Rule] = {
    "runhealth": ours,
    "olmo_core_mean_6_sigma_128": mean_6_sigma,
    "lightning_3x_mean_10": running_mean_x3,
    "llm_foundry_2x_mean_100_for_5": mean_100_x2_for_5,
}


def curve(rng: np.random.Generator, steps: int, sigma: float, heavy: bool, shift: bool) -> Series:
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


def kinds() -> Iterator[tuple[float, bool, bool]]:
    for sigma in (0.01, 0.02, 0.05, 0.1):
        for heavy in (False, True):
            yield sigma, heavy, False
    yield 0.02, True, True


class Tally:
    """What one rule did on one kind of curve."""

    def __init__(self) -> None:
        self.hits = dict.fromkeys(HEIGHTS, 0)
        self.prompt = dict.fromkeys(HEIGHTS, 0)  # hits at most two steps after the spike began
        self.spikes = dict.fromkeys(HEIGHTS, 0)
        self.late = self.early = self.steps = 0  # false alarms after the descent and in it; steps after it

    def add(self, other: "Tally") -> None:
        for name, value in vars(other).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
            else:
                mine = getattr(self, name)
                for height, count in value.items():
                    mine[height] += count

    def clean(self, alarms: list[int], steps: int) -> None:
        self.late += sum(s >= DESCENT_STEPS for s in alarms)
        self.early += sum(s < DESCENT_STEPS for s in alarms)
        self.steps += steps - DESCENT_STEPS

    def spiked(self, height: float, alarms: list[int], at: list[int]) -> None:
        for step in at:
            after = min((s - step for s in alarms if step <= s < step + HIT_STEPS), default=None)
            self.spikes[height] += 1
            self.hits[height] += after is not None
            self.prompt[height] += after is not None and after <= DELAY_STEPS

    def summary(self) -> dict[str, object]:
        return {
            "recall": {f"+{h:g}": round(self.hits[h] / self.spikes[h], 3) for h in HEIGHTS},
            "recall_in_2_steps": {f"+{h:g}": round(self.prompt[h] / self.spikes[h], 3) for h in HEIGHTS},
            "false_per_10k": round(1e4 * self.late / self.steps, 2),
            "false_in_early_descent": self.early,
        }


def measure(seeds: range, steps: int) -> tuple[dict[str, dict[str, Tally]], dict[str, int]]:
    """rule -> kind of curve -> tally; and what the whole engine says of some of the curves."""
    tallies: dict[str, dict[str, Tally]] = {name: {} for name in RULES}
    incidents = {"spikes": 0, "findings": 0, "loud_healthy": 0, "healthy_runs": 0}
    for sigma, heavy, shift in kinds():
        kind = f"sigma {sigma:g} {'t5' if heavy else 'normal'}{' shift' if shift else ''}"
        mine = {name: tallies[name].setdefault(kind, Tally()) for name in RULES}
        for seed in seeds:
            rng = np.random.default_rng([seed, int(1000 * sigma), heavy, shift])
            clean = curve(rng, steps, sigma, heavy, shift)
            for name, rule in RULES.items():
                mine[name].clean(rule(clean), steps)
            incidents["loud_healthy"] += told(clean)[1]
            incidents["healthy_runs"] += 1
            for height in HEIGHTS:
                series = clean.copy()
                at = spike_steps(rng, steps)
                for step in at:  # three steps high, then back within a few
                    series[step : step + 12] += height * np.exp(-np.maximum(0, np.arange(12) - 2) / 2)
                for name, rule in RULES.items():
                    mine[name].spiked(height, rule(series), at)
                if height >= 1.0 and sigma <= 0.02 and not shift:
                    incidents["spikes"] += len(at)
                    incidents["findings"] += told(series)[0]
    return tallies, incidents


class _Curve:
    def __init__(self, series: Series) -> None:
        self._series = series

    def records(self) -> Iterator[StepRecord]:
        for step, loss in enumerate(self._series.tolist()):
            yield StepRecord(attempt=0, step=step, rank=0, values={"loss": loss})

    def describe(self) -> SourceInfo:
        return SourceInfo(name="curve", source="curve", format="made")


def told(series: Series) -> tuple[int, int]:
    """What the whole engine says: incidents of the loss counted one by one, and findings louder than info."""
    findings = diagnose(_Curve(series)).findings
    count = sum(f.count for f in findings if f.kind in ("loss_spike", "loss_divergence"))
    return count, sum(f.severity is not Severity.INFO for f in findings)


def together(tallies: dict[str, Tally], word: str = "") -> Tally:
    total = Tally()
    for kind, tally in tallies.items():
        if word in kind:
            total.add(tally)
    return total


def line(name: str, tally: Tally) -> str:
    shares = "  ".join(f"+{h:g} {tally.hits[h] / tally.spikes[h]:.3f}" for h in HEIGHTS)
    return f"  {name:30} {shares}   {1e4 * tally.late / tally.steps:6.2f}   {tally.early:4}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=8, help="curves of each kind")
    parser.add_argument("--steps", type=int, default=20_000, help="of each curve")
    parser.add_argument("--tuning", action="store_true", help="use the tuning seeds")
    parser.add_argument("--report", type=Path, help="also write the JSON object to this file")
    args = parser.parse_args()
    if args.steps < LEAST_STEPS or args.seeds < 1:
        parser.error(f"expected at least {LEAST_STEPS} steps and one seed, met {args.steps} and {args.seeds}")
    first = 0 if args.tuning else 3000
    tallies, incidents = measure(range(first, first + args.seeds), args.steps)
    result: dict[str, object] = {"bench": "detectors", "seeds": [first, first + args.seeds], "steps": args.steps}
    rules: dict[str, object] = {}
    for name, by_kind in tallies.items():
        rules[name] = {
            **together(by_kind).summary(),
            "sigma_0.02": together(by_kind, "sigma 0.02").summary(),
            "by_kind": {kind: tally.summary() for kind, tally in by_kind.items()},
        }
    result |= {"rules": rules, "incidents": incidents}
    print("recall by height in nats, false alarms in 10,000 steps, false alarms in the early descent")
    for kind in tallies["runhealth"]:
        print(kind)
        for name in RULES:
            print(line(name, tallies[name][kind]))
    print("all kinds")
    for name in RULES:
        print(line(name, together(tallies[name])))
    if args.report:
        args.report.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
