"""Frames: everything that all ranks said about one step of one attempt, in one object.

Records arrive interleaved, late, in chunks. The assembler closes frames in (attempt, step) order, and the frames it
closes do not depend on how the records were interleaved, as long as no rank is more than `MAX_PENDING` frames behind:

- a frame closes once every rank that is known to write in this attempt has moved on to a later step;
- while the number of ranks is unknown, the first `MAX_PENDING` frames of an attempt are held, so that a rank that
  starts late is still counted;
- when more than `MAX_PENDING` frames are pending, the oldest closes without the ranks that lag;
- an attempt closes once all its ranks write in a later one; `finish()` closes what is left.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from runhealth.diagnose.batches import BatchOutlier
from runhealth.storage.records import BatchRecord, LayerSample, Scalar, StepRecord

MAX_PENDING = 64


class Frame:
    """One step of one attempt over all ranks.

    `ranks` maps a rank to its scalars. `batches` is sorted by (rank, micro_batch), `layers` by (rank, layer).
    `values` holds, of each signal, the value of the lowest rank that has it. `loss` is the mean over the ranks whose
    loss is finite; NaN when ranks reported a loss and none is finite; None when no rank reported one. Both are there
    once the frame is sealed.
    """

    __slots__ = ("attempt", "batches", "layers", "loss", "new_attempt", "outliers", "ranks", "step", "ts_ns", "values")

    def __init__(self, attempt: int, step: int) -> None:
        self.attempt = attempt
        self.step = step
        self.ts_ns = 0
        self.ranks: dict[int, Mapping[str, Scalar]] = {}
        self.values: Mapping[str, Scalar] = {}
        self.batches: list[BatchRecord] = []
        self.layers: list[LayerSample] = []
        self.loss: float | None = None
        self.outliers: tuple[BatchOutlier, ...] = ()  # filled by the engine, see `batches.BatchHabit`
        self.new_attempt = False

    def get(self, name: str) -> Scalar | None:
        """The value of a signal of the whole job: the lowest rank's that has it."""
        return self.values.get(name)

    def per_rank(self, name: str) -> dict[int, Scalar]:
        """rank -> value, for the ranks that reported the signal."""
        return {rank: values[name] for rank, values in self.ranks.items() if name in values}

    def total(self, name: str) -> Scalar | None:
        """Sum over the ranks that reported the signal, None when none did."""
        if name not in self.values:
            return None
        return sum(values[name] for values in self.ranks.values() if name in values)

    def largest(self, name: str) -> Scalar | None:
        """Maximum over the ranks that reported the signal (NaN ignored), None when none did."""
        if name not in self.values:
            return None
        found = [v for values in self.ranks.values() if (v := values.get(name)) is not None and v == v]
        return max(found) if found else None

    def seal(self) -> None:
        """Put everything in an order that does not depend on arrival, and compute `values` and `loss`."""
        ranks = self.ranks
        if len(ranks) == 1:
            (self.values,) = ranks.values()
        elif ranks:
            order = sorted(ranks)
            self.ranks = ranks = {rank: ranks[rank] for rank in order}
            merged: dict[str, Scalar] = {}
            for rank in reversed(order):
                merged.update(ranks[rank])
            self.values = merged
        if len(self.batches) > 1:
            self.batches.sort(key=_batch_order)
        if len(self.layers) > 1:
            self.layers.sort(key=_layer_order)
        if "loss" not in self.values:
            return
        total, finite, seen = 0.0, 0, False
        for values in ranks.values():
            loss = values.get("loss")
            if loss is not None:
                seen = True
                if math.isfinite(loss):
                    total += loss
                    finite += 1
        if seen:
            self.loss = total / finite if finite else math.nan


_batch_order = attrgetter("rank", "micro_batch")
_layer_order = attrgetter("rank", "layer")


class _Attempt:
    """Pending frames of one attempt and how far each rank has come."""

    def __init__(self) -> None:
        self.frames: dict[int, Frame] = {}
        self.latest: dict[int, int] = {}
        self.at: dict[int, int] = {}  # step -> number of ranks whose latest step it is
        self.floor = -1
        self.held = True


def _add(frame: Frame, record: StepRecord | BatchRecord | LayerSample) -> None:
    if isinstance(record, BatchRecord):
        frame.batches.append(record)
    elif isinstance(record, StepRecord):
        known = frame.ranks.get(record.rank)
        frame.ranks[record.rank] = record.values if known is None else {**known, **record.values}
    else:
        frame.layers.append(record)
    if record.ts_ns > frame.ts_ns:
        frame.ts_ns = record.ts_ns


class FrameAssembler:
    """Records in, closed frames out. `world_size` may be told by an event; otherwise the start of each attempt is
    held until the ranks are known."""

    def __init__(self) -> None:
        self._attempts: dict[int, _Attempt] = {}
        self._worlds: dict[int, int] = {}
        self._current: int | None = None
        self._closed_step: int | None = None
        self._last_attempt: int | None = None
        self._open: Frame | None = None  # the frame that the last record went into, while it is pending,
        self._open_rank = -1  # and the rank that wrote it: most records continue the one before
        self.late_records = 0

    def expect_ranks(self, attempt: int, world_size: int) -> None:
        self._worlds[attempt] = world_size

    def feed(self, record: StepRecord | BatchRecord | LayerSample) -> list[Frame]:
        """Add a record; return the frames that it closes, oldest first."""
        step, rank, frame = record.step, record.rank, self._open
        if frame is not None and frame.step == step and self._open_rank == rank and frame.attempt == record.attempt:
            _add(frame, record)
            return []
        number = record.attempt
        if self._current is None:
            self._current = number
        elif number < self._current and not self._reopen(number):
            self.late_records += 1
            return []
        attempt = self._attempts.get(number)
        if attempt is None:
            attempt = self._attempts[number] = _Attempt()
        if number == self._last_attempt and self._closed_step is not None and step <= self._closed_step:
            self.late_records += 1
            return []
        frame = attempt.frames.get(step)
        if frame is None:
            frame = attempt.frames[step] = Frame(number, step)
        _add(frame, record)
        self._open, self._open_rank = frame, rank
        before = attempt.latest.get(rank)
        if before == step:
            return []
        if before is None or step > before:
            attempt.latest[rank] = step
            at = attempt.at
            at[step] = at.get(step, 0) + 1
            if before is not None:
                at[before] -= 1
                if not at[before]:
                    del at[before]
            if before is None or before == attempt.floor:
                attempt.floor = min(at)
        return self._close()

    def follows(self, attempt: int, ranks: Sequence[int], step: int) -> bool:
        """Whether each of these ranks, and no other, is at the one frame that is pending, and that before `step`: then
        a step that all of them write closes the one before it, and nothing else."""
        state = self._attempts.get(attempt)
        return (
            state is not None
            and self._current == attempt
            and len(self._attempts) == 1
            and not state.held
            and len(state.frames) == 1
            and len(state.at) == 1
            and next(iter(state.at)) in state.frames
            and state.floor < step
            and len(state.latest) == len(ranks)
            and all(rank in state.latest for rank in ranks)
        )

    def advance(self, last: Frame, before: int | None) -> list[Frame]:
        """All ranks have written a number of steps that `follows`; `last` is the frame of the last, `before` the one
        before that if there is one. Returns what was pending, closed; closing the steps between is up to the caller."""
        number, step = last.attempt, last.step
        state = self._attempts[number]
        closed = self._take(number, None)
        if before is not None:
            self._closed_step = before
        state.frames[step] = last
        state.latest = dict.fromkeys(state.latest, step)
        state.at = {step: len(state.latest)}
        state.floor = step
        return closed

    def finish(self) -> list[Frame]:
        """The data ends here: close everything."""
        closed: list[Frame] = []
        for number in sorted(self._attempts):
            closed.extend(self._take(number, None))
        self._attempts.clear()
        return closed

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(copy.deepcopy(dict(state)))

    def _reopen(self, number: int) -> bool:
        """A record of an earlier attempt may still join while no frame of a later attempt has closed."""
        if self._last_attempt is None or number >= self._last_attempt:
            self._current = number
            return True
        return False

    def _close(self) -> list[Frame]:
        closed: list[Frame] = []
        while self._current is not None:
            number = self._current
            attempt = self._attempts.get(number)
            later = [n for n in self._attempts if n > number] if len(self._attempts) > 1 else []
            if attempt is not None and attempt.frames:
                limit = self._limit(number, attempt)
                if limit is not None:
                    closed.extend(self._take(number, limit))
            if not later or not self._over(attempt, later):
                break
            closed.extend(self._take(number, None))
            self._attempts.pop(number, None)
            self._current = min(later)
        return closed

    def _limit(self, number: int, attempt: _Attempt) -> int | None:
        """Frames below this step close; None: nothing closes yet."""
        pending = len(attempt.frames)
        limit: int | None = None
        world = self._worlds.get(number)
        if attempt.held and ((world is not None and len(attempt.latest) >= world) or pending > MAX_PENDING):
            attempt.held = False
        if not attempt.held:
            limit = attempt.floor
        if pending > MAX_PENDING:
            overdue = sorted(attempt.frames)[pending - MAX_PENDING]
            limit = overdue if limit is None else max(limit, overdue)
        return limit

    def _over(self, attempt: _Attempt | None, later: list[int]) -> bool:
        if attempt is None:
            return True
        newer: set[int] = set()
        for number in later:
            newer |= self._attempts[number].latest.keys()
            if len(self._attempts[number].frames) > MAX_PENDING:
                return True
        return attempt.latest.keys() <= newer

    def _take(self, number: int, limit: int | None) -> list[Frame]:
        attempt = self._attempts.get(number)
        if attempt is None:
            return []
        frames = attempt.frames
        steps = [step for step in frames if limit is None or step < limit]
        if not steps:
            return []
        steps.sort()
        self._open = None
        taken = [frames.pop(step) for step in steps]
        for frame in taken:
            frame.new_attempt = number != self._last_attempt
            self._last_attempt = number
            frame.seal()
        self._closed_step = steps[-1]
        return taken
