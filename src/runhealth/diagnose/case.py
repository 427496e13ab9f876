"""A case: one incident, and telemetry that answers only up to a horizon. Live and post-mortem see the same."""

import math
from collections.abc import Iterable, Sequence, Set
from functools import cached_property

from runhealth.diagnose.batches import BatchOutlier
from runhealth.diagnose.findings import Alarm, Incident
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline, median
from runhealth.storage.records import BatchRecord, LayerSample

BEFORE_FRAMES = 192
NAN_TELLS = frozenset({"loss", "eval_loss", "grad_norm", "grad_norm_rank"})  # elsewhere a NaN is no measurement
LAYER_PREFIX = "layer."
GUARD_FRAMES = 5  # frames before the onset that belong neither to the baseline nor to the incident


class Case:
    """What a suspect may look at.

    `frames` are in step order and end at the horizon; `before` are those that lie more than 5 frames before the onset
    (of earlier attempts too, as far as they were not superseded), `around` the rest. `met` are the signals of the whole
    run, where they are known: one that is not among them is not looked for.
    """

    def __init__(
        self,
        incident: Incident,
        frames: Sequence[Frame],
        *,
        loss_back_step: int | None = None,
        met: Set[str] | None = None,
    ) -> None:
        self.incident = incident
        self._met = met
        self._has: dict[str, bool] = {}
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

    @property
    def cause_until(self) -> int:
        """The last step at which a signal still counts as before what it is to explain: updates are measured after
        the loss of their step, so one of the step in which the loss moved is a consequence."""
        return self.loss_step - 1 if self.loss_moved else self.loss_step

    def alarms(self, signal: str) -> list[Alarm]:
        return [a for a in self.incident.alarms if a.signal == signal]

    def has(self, signal: str) -> bool:
        """Was it recorded? Step and batch signals go by their names, layer signals carry the prefix `layer.`."""
        found = self._has.get(signal)
        if found is None:
            found = self._has[signal] = (self._met is None or signal in self._met) and self._find(signal)
        return found

    def _find(self, signal: str) -> bool:
        frames = self.frames
        if signal.startswith(LAYER_PREFIX):
            name = signal.removeprefix(LAYER_PREFIX)
            return any(name in sample.values for frame in frames for sample in frame.layers)
        if signal in NAN_TELLS:
            of_step = any(frame.get(signal) is not None for frame in frames)
        else:
            of_step = any(frame.largest(signal) is not None for frame in frames)
        return of_step or any(_tells(batch, signal) for frame in frames for batch in frame.batches)

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


def _tells(batch: BatchRecord, signal: str) -> bool:
    if signal == "shard_hash" and batch.shard_hash is not None and batch.manifest_hash is not None:
        return True
    return signal in batch.values or (signal == "shard" and bool(batch.shard))
