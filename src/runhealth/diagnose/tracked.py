"""An incident while it is followed: its alarms, and how the loss, the data and the loss scale behave since."""

import math
from collections import deque
from collections.abc import Sequence

from runhealth.diagnose.detector import CHANNEL
from runhealth.diagnose.findings import Alarm, Incident, Outcome
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import median

LOSS_KINDS = ("loss_spike", "loss_divergence")
CAUSAL_KINDS = (
    *LOSS_KINDS,
    "non_finite",
    "loss_scale_collapse",
    "fp_overflow",
    "clip_breach",
    "update_jump",
    "gradient_spike",
    "data_corrupt",
)
BACK_POINTS, BACK_OF = 2, 3  # the loss is back when so many of so many points are at the old level
TRANSIENT_STEPS = 20
SETTLED_POINTS = 16  # points after the onset before an incident may be called non-recovering
LEVEL_POINTS = 16  # losses before the alarm whose median is the level to come back to
SUSTAINED_POINTS, SUSTAINED_OF = 8, 16  # the median of so many points must stay back, or the return did not last
TOUCH_POINTS = 4
SAME_LEVEL = math.log(1.1)
TIE_STEPS = 2  # bad data read so long after the loss moved may still be what moved it
HUGE = math.log(2.0)
FAST_RISE_POINTS = 20  # a spike reaches half its height faster than this; a divergence does not


class Tracked:
    """An incident while it is followed: its alarms and how the loss behaves since. Mutable."""

    def __init__(self, attempt: int, index: int, first: Alarm) -> None:
        self.id = f"a{attempt}-s{first.step}"
        self.attempt = attempt
        self.alarms: list[Alarm] = []
        self.first_index = index
        self.last_index = index
        self.last_step = first.step
        self.seen_step = first.step
        self.closed = False
        self.walks = 0
        self.again: list[int] = []  # frames at which it is walked once more: alarms of a new kind have joined
        self.count = 0
        # loss
        self.baseline = math.nan
        self.sigma = math.nan
        self.peak = -math.inf
        self.peak_value = math.nan
        self.peak_step = first.step
        self.points = 0
        self.points_since_peak = 0
        self.rises: list[tuple[int, float]] = []
        self.recent: deque[float] = deque(maxlen=32)
        self.above_points = 1
        self.backs: deque[tuple[int, bool]] = deque(maxlen=BACK_OF)
        self.back_step: int | None = None
        self.back_from = first.step
        self.after: deque[float] = deque(maxlen=SUSTAINED_OF)  # losses since the return
        self.loss_nan_run = 0
        # bad data
        self.shard: str | None = None
        self.shards: list[str] = []  # bad ones read without a pause
        self.level_before = math.nan
        self.bad_data_step: int | None = None
        self.bad_data_points = 0
        # loss scale
        self.scale_low = math.inf
        self.scale_now = math.nan
        self.scale_points = 0
        # other channels
        self.bad_last_step: int | None = None
        self.bad_points = 0
        self.good_run = 0

    # -- what it is -------------------------------------------------------------------------------------------------

    def of(self, *kinds: str) -> list[Alarm]:
        return [alarm for alarm in self.alarms if alarm.kind in kinds]

    @property
    def has_loss(self) -> bool:
        return not math.isnan(self.baseline)

    @property
    def onset_step(self) -> int:
        return min(alarm.onset_step for alarm in self.alarms)

    @property
    def loss_onset_step(self) -> int | None:
        steps = [alarm.onset_step for alarm in self.alarms if alarm.kind in LOSS_KINDS]
        return min(steps) if steps else None

    @property
    def loss_is_back(self) -> bool:
        """Back at two of three points, and not gone again since: another alarm is another incident."""
        return self.has_loss and self.back_step is not None

    @property
    def only_touched(self) -> bool:
        """The loss lay high for a while and has been back for a few points only: a rise now is the same one still."""
        return self.above_points > TOUCH_POINTS and len(self.after) < SUSTAINED_POINTS

    @property
    def is_return(self) -> bool:
        """The loss had fallen on bad data, and its rise is no more than the way back to the level before them."""
        moved = self.loss_onset_step
        if self.shard is None or moved is None or math.isnan(self.level_before):
            return False
        bad = min(a.onset_step for a in self.of("data_corrupt"))
        seen = sorted(self.recent) or [self.peak]
        return moved > bad + TIE_STEPS and median(seen) <= SAME_LEVEL

    @property
    def scale_collapsed(self) -> bool:
        """The loss scale fell and has not grown since."""
        return bool(self.of("loss_scale_collapse")) and not self.scale_now > self.scale_low

    @property
    def recovered(self) -> bool:
        if self.scale_collapsed:
            return False
        if self.has_loss and self.back_step is None and not self.is_return:
            return False
        if self.has_loss and self.back_step is not None and len(self.after) < SUSTAINED_POINTS:
            return False
        return self.bad_last_step is None or self.good_run > 0

    def incident(self) -> Incident:
        order = {kind: position for position, kind in enumerate(CAUSAL_KINDS)}
        returned = self.is_return
        alarms = [a for a in self.alarms if not (returned and a.kind in LOSS_KINDS)]
        alarms.sort(key=lambda a: (order.get(a.kind, 99), a.onset_step, a.signal))
        return Incident(
            id=self.id,
            attempt=self.attempt,
            onset_step=self.onset_step,
            alarms=tuple(alarms),
            last_alarm_step=self.last_step,
        )

    # -- following it -----------------------------------------------------------------------------------------------

    def add(self, alarm: Alarm, index: int, before: Sequence[float] = ()) -> None:
        """Take in an alarm; `before` are the last losses before it."""
        known = next((a for a in self.alarms if a.signal == alarm.signal and a.kind == alarm.kind), None)
        if (known is None or alarm.kind != CHANNEL) and len(self.alarms) < 64:
            self.alarms.append(alarm)
        if alarm.kind == CHANNEL:
            return
        self.last_index, self.last_step = index, max(self.last_step, alarm.step)
        if alarm.kind == "data_corrupt":
            self._add_bad_data(alarm, before)
        if alarm.kind == "loss_scale_collapse":
            self.scale_low = min(self.scale_low, alarm.value)
            self.scale_now = alarm.value
        if alarm.kind in LOSS_KINDS:
            self.count += 1
            if not self.has_loss:
                self.baseline = alarm.baseline
                self.sigma = abs(self._excess(alarm.value) / alarm.score) if alarm.score else math.nan
                if len(before) >= LEVEL_POINTS:
                    # the detector's centre may lie under the curve where the curve bends
                    level = median(sorted(list(before)[-LEVEL_POINTS:]))
                    if self.baseline < level < alarm.value:
                        self.baseline = level
                if self.level_before > self.baseline:
                    self.baseline = self.level_before  # what it fell to on bad data is no level to come back to
                excess = self._excess(alarm.value)
                self.peak, self.peak_value, self.peak_step = excess, alarm.value, alarm.step
                self.rises.append((0, excess))
            self._not_back()
        elif alarm.kind == "non_finite":
            self.bad_last_step = alarm.step
            self.good_run = 0

    def _add_bad_data(self, alarm: Alarm, before: Sequence[float]) -> None:
        shard = str(alarm.details.get("shard", ""))
        if shard not in self.shards:
            self.shards.append(shard)
        if self.shard is not None:
            return
        self.shard = shard
        self.bad_data_step = alarm.step
        self.bad_data_points = 1
        earlier = list(before)[:LEVEL_POINTS]  # degenerate data are told a few steps after they began
        if self.has_loss:
            self.level_before = self.baseline
        elif len(earlier) >= LEVEL_POINTS // 2:
            self.level_before = median(sorted(earlier))

    def _not_back(self) -> None:
        self.back_step = None
        self.backs.clear()
        self.after.clear()

    def observe(self, frame: Frame, index: int) -> None:
        """Follow the loss, the data, the loss scale, and whether values are finite, frame by frame."""
        self.seen_step = frame.step
        if self.shard is not None and any(o.strong and o.batch.shard in self.shards for o in frame.outliers):
            self.bad_data_step = self.last_step = frame.step
            self.bad_data_points += 1
            self.last_index = index
        if self.scale_low < math.inf:
            scale = frame.get("loss_scale")
            if scale is not None and math.isfinite(scale) and scale > 0:
                self.scale_now = float(scale)
                self.scale_low = min(self.scale_low, self.scale_now)
                self.scale_points += 1
        if self.bad_last_step is not None:
            signals = {a.signal for a in self.alarms if a.kind == "non_finite"}
            bad = any(
                (v := values.get(signal)) is not None and not math.isfinite(v)
                for values in frame.ranks.values()
                for signal in signals
            )
            measured = any(signal in values for values in frame.ranks.values() for signal in signals)
            if bad:
                self.bad_last_step = frame.step
                self.bad_points += 1
                self.good_run = 0
            elif measured:
                self.good_run += 1
        self.observe_loss(frame.step, frame.loss)

    @property
    def follows_loss_only(self) -> bool:
        """Whether `observe` looks at nothing but the loss."""
        return self.shard is None and self.bad_last_step is None and self.scale_low == math.inf

    def observe_loss(self, step: int, loss: float | None) -> None:
        """Follow the loss."""
        self.seen_step = step
        if loss is not None and not math.isnan(self.baseline):
            if self.back_step is None:
                self._observe_loss(step, loss)
            elif math.isfinite(loss):
                self._observe_return(self._excess(loss))

    def _observe_return(self, excess: float) -> None:
        """Two low points are no return if the points after them lie high again."""
        self.after.append(excess)
        if len(self.after) >= SUSTAINED_POINTS and median(sorted(self.after)) > self._tolerance():
            self.recent.extend(self.after)
            self._not_back()

    def _observe_loss(self, step: int, loss: float) -> None:
        self.points += 1
        if not math.isfinite(loss):
            self.loss_nan_run += 1
            self.backs.clear()
            return
        self.loss_nan_run = 0
        excess = self._excess(loss)
        self.recent.append(excess)
        if excess > self.peak:
            self.peak, self.peak_value, self.peak_step = excess, loss, step
            self.points_since_peak = 0
            if excess > 1.02 * self.rises[-1][1]:
                self.rises.append((self.points, excess))
        else:
            self.points_since_peak += 1
        under = excess <= self._tolerance()
        self.backs.append((step, under))
        if not under:
            self.above_points += 1
        unders = [s for s, is_under in self.backs if is_under]
        self.back_from = unders[0] if unders else step
        if len(unders) >= BACK_POINTS:
            self.back_step = self.back_from

    def _excess(self, loss: float) -> float:
        if self.baseline > 0 and loss > 0:
            return math.log(loss / self.baseline)
        return loss - self.baseline

    def _tolerance(self) -> float:
        tenth = math.log(1.1) if self.baseline > 0 else 0.1 * abs(self.baseline)
        return max(3.0 * self.sigma, min(0.25 * self.peak, tenth))

    # -- how it ended -----------------------------------------------------------------------------------------------

    def loss_kind(self) -> str:
        """Spike or divergence: by how long the loss took to half its height, or by the detector that saw it."""
        if not self.of("loss_spike"):
            return "loss_divergence"
        half = next((point for point, excess in self.rises if excess >= 0.5 * self.peak), 0)
        return "loss_divergence" if half > FAST_RISE_POINTS and self.back_step is None else "loss_spike"

    def loss_outcome(self) -> tuple[Outcome, int | None]:
        """How the loss came out of it, and the step at which it was back."""
        if self.loss_nan_run:
            return Outcome.NON_RECOVERING, None
        back = self.back_step
        if back is None and self.backs and self.backs[-1][1]:
            back = self.backs[-1][0]  # the data end with the first point that is back
        onset = self.loss_onset_step or self.onset_step
        if back is not None:
            # Logged now and then, a bump of one point says no more than that it was gone at the next look.
            brief = back - onset <= TRANSIENT_STEPS or (self.above_points <= 1 and self.peak < HUGE)
            return (Outcome.TRANSIENT if brief else Outcome.RECOVERING), back
        if not self.recent or self.points < SETTLED_POINTS:
            return Outcome.ONGOING, None
        now = median(sorted(list(self.recent)[-8:]))
        then = median(sorted(list(self.recent)[:8]))
        falling = len(self.recent) >= SETTLED_POINTS and now < 0.9 * then
        if now < 0.5 * self.peak and falling and self.points_since_peak >= SETTLED_POINTS:
            return Outcome.RECOVERING, None
        return Outcome.NON_RECOVERING, None

    def finite_outcome(self) -> tuple[Outcome, int | None]:
        first = min((a.onset_step for a in self.of("non_finite")), default=self.onset_step)
        last = self.bad_last_step if self.bad_last_step is not None else first
        if self.good_run:
            return (Outcome.TRANSIENT if last - first <= TRANSIENT_STEPS else Outcome.RECOVERING), last
        return (Outcome.NON_RECOVERING if self.bad_points >= SETTLED_POINTS else Outcome.ONGOING), None

    def scale_outcome(self) -> tuple[Outcome, int | None]:
        if not self.scale_collapsed:
            return Outcome.RECOVERING, self.last_step
        return (Outcome.NON_RECOVERING if self.scale_points >= SETTLED_POINTS else Outcome.ONGOING), None

    def data_outcome(self) -> tuple[Outcome, int | None]:
        """Bad data that were read are over; what they did to the weights is not undone by that."""
        last = self.bad_data_step
        lasting = last is None or self.seen_step - last <= TIE_STEPS
        return (Outcome.ONGOING, None) if lasting else (Outcome.NONE, last)

    def burst_outcome(self) -> tuple[Outcome, int | None]:
        """Of incidents without a loss alarm: over once no alarm came for a while."""
        if not self.closed:
            return Outcome.ONGOING, None
        span = self.last_step - self.onset_step
        return (Outcome.TRANSIENT if span <= TRANSIENT_STEPS else Outcome.RECOVERING), self.last_step
