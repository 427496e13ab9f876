"""A case: one incident, and telemetry that answers only up to a horizon. Live and post-mortem see the same."""

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

from runhealth.diagnose.batches import BatchOutlier
from runhealth.diagnose.findings import Alarm, Incident
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline, median
from runhealth.storage.records import BatchRecord, LayerSample

BEFORE_FRAMES = 192
NAN_TELLS = frozenset({"loss", "eval_loss", "grad_norm", "grad_norm_rank"})  # elsewhere a NaN is no measurement
GUARD_FRAMES = 5  # frames before the onset that belong neither to the baseline nor to the incident


class Case:
    """What a suspect may look at.

    `frames` are in step order and end at the horizon; `before` are those that lie more than 5 frames before the onset
    (of earlier attempts too, as far as they were not superseded), `around` the rest.
    """

    def __init__(self, incident: Incident, frames: Sequence[Frame], *, loss_back_step: int | None = None) -> None:
        self.incident = incident
        self.onset_step = incident.onset_step
        self.loss_back_step = loss_back_step
        start = next(
            (i for i, f in enumerate(frames) if f.step >= self.onset_step and f.attempt == incident.attempt),
            len(frames),
        )
        split = max(0, start - GUARD_FRAMES)
        self.before: tuple[Frame, ...] = tuple(frames[max(0, split - BEFORE_FRAMES) : split])
        self.around: tuple[Frame, ...] = tuple(frames[split:])
        self.frames: tuple[Frame, ...] = self.before + self.around

    @property
    def horizon_step(self) -> int:
        return self.frames[-1].step if self.frames else self.onset_step

    @cached_property
    def loss_step(self) -> int:
        """The step at which the loss moved (or turned non-finite); the first alarm where it never did."""
        alarms = [a for a in self.incident.alarms if a.signal == "loss"] or [
            a for a in self.incident.alarms if a.kind != "channel"
        ]
        return min((a.onset_step for a in alarms), default=self.onset_step)

    @property
    def loss_moved(self) -> bool:
        return any(a.signal == "loss" for a in self.incident.alarms)

    def alarms(self, signal: str) -> list[Alarm]:
        return [a for a in self.incident.alarms if a.signal == signal]

    @cached_property
    def signals(self) -> frozenset[str]:
        """Names of what was recorded: step and batch signals as they are, layer signals with the prefix `layer.`."""
        found: set[str] = set()
        for frame in self.frames:
            for values in frame.ranks.values():
                found.update(name for name, value in values.items() if value == value or name in NAN_TELLS)
            for batch in frame.batches:
                found.update(batch.values)
                if batch.shard_hash is not None and batch.manifest_hash is not None:
                    found.add("shard_hash")
                if batch.shard:
                    found.add("shard")
            for sample in frame.layers:
                found.update(f"layer.{name}" for name in sample.values)
        return frozenset(found)

    def has(self, signal: str) -> bool:
        return signal in self.signals

    def between(self, first: int, last: int) -> list[Frame]:
        """The incident's own frames of these steps; those of earlier attempts serve as baseline only."""
        own = self.incident.attempt
        return [frame for frame in self.frames if first <= frame.step <= last and frame.attempt == own]

    def baseline(self, signal: str, *, log: bool = False) -> Baseline:
        """Median and sigma of a signal of the whole job before the incident. Not `ready` when too little is known."""
        habit = Baseline(BEFORE_FRAMES, least=8, every=1)
        for frame in self.before:
            value = frame.loss if signal == "loss" else frame.get(signal)
            if value is not None and math.isfinite(value) and (value > 0 or not log):
                habit.push(math.log(value) if log else float(value))
        return habit

    def rank_baseline(self, signal: str) -> float:
        """Median over ranks and frames before the incident; NaN when not recorded."""
        values = [float(v) for frame in self.before for v in frame.per_rank(signal).values() if math.isfinite(v)]
        return median(values)

    def first(self, signal: str, beyond: float, *, first: int, last: int) -> tuple[int, float] | None:
        """The first step of a range at which the signal is over `beyond`."""
        for frame in self.between(first, last):
            value = frame.get(signal)
            if value is not None and value > beyond:
                return frame.step, float(value)
        return None

    def batches(self, first: int, last: int) -> list[BatchRecord]:
        return [batch for frame in self.between(first, last) for batch in frame.batches]

    def outliers(self, frames: Iterable[Frame] | None = None) -> list[BatchOutlier]:
        """Strong outliers among the batches, around the incident unless other frames are given."""
        chosen = self.around if frames is None else frames
        return [outlier for frame in chosen for outlier in frame.outliers if outlier.strong]

    def layers(self, first: int, last: int) -> list[LayerSample]:
        return [sample for frame in self.between(first, last) for sample in frame.layers]
