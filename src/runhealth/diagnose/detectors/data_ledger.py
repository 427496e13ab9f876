"""A ledger of batches: samples that come again before their time.

A batch is known by the hash of its tokens, or, after a resume, by shard and sample numbers. Steps that are done again
read what they read before; everything else should be fresh until the whole data set was seen. Told when over 30 % of
the batches of eight frames were seen before. A new epoch, told by the log or by batches that all repeat those of long
ago, is no fault. Where a resume reads other batches for steps that are done again, and they are fresh, the
data were moved ahead: samples were skipped.

Ranks that begin to read the same batches in the same step are told too, in the second such step. Of those, the ones are
named that left their own sequence (samples that follow each other, or a shard that goes on), unless all did or none.
Ranks that share their data from the start do so on purpose.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.storage.blocks import BatchColumns
from runhealth.storage.records import BatchRecord

SHARE = 0.3
FRAMES = 8
AHEAD_STEPS = 2.0
LEAST_BATCHES = 4
REARM_FRAMES = 256
POSITIONS = 64
KEEP_BATCHES = 100_000  # the newest
LONG_AGO = 0.5  # of the steps of the epoch so far
APART_FRAMES, SHARED_FRAMES = 16, 2

Key = tuple[str, int, int] | int


class DataLedger(Detector):
    name: ClassVar[str] = "data_ledger"
    kinds: ClassVar[tuple[str, ...]] = ("data_repeated", "data_skipped")
    reads: ClassVar[tuple[str, ...]] = ("shard", "consumed_samples")
    replay: ClassVar[bool] = False

    def __init__(self) -> None:
        self._seen: OrderedDict[Key, int] = OrderedDict()  # batch -> step at which it was read first in this epoch
        self._old: Mapping[Key, int] = {}  # the same of the epoch before
        self._recent: deque[tuple[int, int, int, int]] = deque(maxlen=FRAMES)  # step, batches, repeated, other
        self._attempt: int | None = None
        self._start = 0  # first step of the epoch
        self._epoch = -1
        self._until = -1  # last step that an earlier attempt had done
        self._resumed = -1
        self._since = REARM_FRAMES
        self._last_step = -1
        self._positions: deque[tuple[int, float]] = deque(maxlen=POSITIONS)
        self._ends: dict[int, tuple[str, int]] = {}  # rank -> shard and sample at which its last step ended
        self._apart = 0  # steps in which the ranks read different batches
        self._shared: list[int] = []  # steps of this attempt in which some did not
        self._copiers: dict[tuple[int, ...], tuple[int, ...]] = {}  # ranks that read the same -> those that moved

    def update(self, frame: Frame) -> list[Alarm]:
        if self._attempt is None:
            self._start = frame.step
        elif frame.attempt != self._attempt:
            self._until, self._resumed = max(self._until, self._last_step), frame.step
            self._recent.clear()
            self._shared.clear()
            self._copiers.clear()
            self._since = REARM_FRAMES
        self._attempt, self._last_step = frame.attempt, frame.step
        self._since += 1
        ahead = self._ahead(frame)
        if ahead is not None:
            return [ahead]
        groups, copies = _groups(frame)
        keys = [key for i, batch in enumerate(frame.batches) if i not in copies and (key := _key(batch)) is not None]
        if not keys:
            return []
        copied = self._copied(frame, groups)
        self._ends = {batch.rank: (batch.shard, batch.last_sample) for batch in frame.batches}
        if copied is not None:
            return [copied]
        self._apart += not groups and len(keys) > 1
        redone = self._resumed >= 0 and frame.step <= self._until
        again, fresh, oldest = self._enter(frame.step, keys, redone)
        if self._begins_epoch(frame, again == len(keys) and not redone, oldest):
            self._old, self._seen = self._seen, OrderedDict.fromkeys(keys, frame.step)
            self._start = frame.step
            self._recent.clear()
            return []
        self._recent.append((frame.step, len(keys), again, fresh if redone else 0))
        return self._judge(frame)

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        batches = block.batches()
        if block.attempt != self._attempt:
            return super().update_block(block)
        if batches is None:
            self._last_step = int(block.steps[-1])
            self._since += len(block)
            counted = block.get("consumed_samples")
            if counted is not None:
                self._positions.extend(block.pairs(counted, POSITIONS))
            return []
        hashes, starts = batches[0].content_hash, batches[1]
        epochs, positions = _listed(block, "epoch"), _listed(block, "consumed_samples")
        found: list[tuple[int, Alarm]] = []
        odd = any(r[2] or r[3] for r in self._recent)
        quiet = -1  # the last row that was
        for row, step in enumerate(block.steps.tolist()):
            keys = hashes[starts[row] : starts[row + 1]]
            epoch = epochs[row]
            same_epoch = epoch is None or int(epoch) <= self._epoch
            if odd or not same_epoch or step <= self._until or not self._fresh(keys):
                if quiet == row - 1 >= 0:
                    self._ends = _ends(batches[0], starts[quiet], starts[row])
                found.extend(self.update_rows(block, (row,)))
                odd = any(r[2] or r[3] for r in self._recent)
                continue
            quiet = row
            self._apart += len(keys) > 1
            self._last_step = step
            self._since += 1
            position = positions[row]
            if position is not None:
                self._positions.append((step, float(position)))
            self._enter(step, keys, redone=False)
            self._recent.append((step, len(keys), 0, 0))
        if quiet == len(block) - 1:
            self._ends = _ends(batches[0], starts[quiet], starts[quiet + 1])
        return found

    def _copied(self, frame: Frame, groups: Sequence[tuple[int, ...]]) -> Alarm | None:
        """Ranks that read what others read. `groups`: ranks with a batch in common."""
        if not groups or self._apart < APART_FRAMES:
            return None
        if self._shared and frame.step - self._shared[-1] > FRAMES:
            self._shared.clear()  # once in a while, as at the end of an epoch that is filled up
            self._copiers.clear()
        self._shared.append(frame.step)
        del self._shared[1:-SHARED_FRAMES]
        for ranks in groups:
            if ranks not in self._copiers:
                self._copiers[ranks] = self._left(frame, ranks)
        if len(self._shared) != SHARED_FRAMES or self._since < REARM_FRAMES:
            return None
        self._since = 0
        named = tuple(sorted({rank for ranks in self._copiers.values() for rank in ranks}))
        involved = {rank for ranks in self._copiers for rank in ranks}
        who = f"rank{'s' * (len(named) > 1)} {', '.join(map(str, named))}"
        what = "the same batches" if involved == set(named) else "batches that another rank reads as well"
        share = sum(len(ranks) - 1 for ranks in groups) / len(frame.ranks)
        message = f"{who} read{'s' * (len(named) == 1)} {what} since step {self._shared[0]:,}"
        return self.fact(
            frame,
            "data_repeated",
            "shard",
            message,
            onset=self._shared[0],
            value=share,
            baseline=0.0,
            ranks=named,
        )

    def _left(self, frame: Frame, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the ranks that left their own sequence; all where that tells nothing."""
        begins: dict[int, BatchRecord] = {}
        for batch in frame.batches:
            begins.setdefault(batch.rank, batch)
        shards = {rank for rank in ranks if self._ends.get(rank, ("", 0))[0] == begins[rank].shard}
        follow = {rank for rank in shards if begins[rank].first_sample == self._ends[rank][1] + 1}
        left = tuple(rank for rank in ranks if rank not in (follow or shards))
        return left or ranks

    def _fresh(self, keys: Sequence[Key | None]) -> bool:
        """Hashes that were never met, in this epoch or in this step."""
        return bool(keys) and None not in keys and len({*keys}) == len(keys) and self._seen.keys().isdisjoint(keys)

    def _enter(self, step: int, keys: Sequence[Key | None], redone: bool) -> tuple[int, int, int]:
        """Repeated and fresh batches, and the earliest step at which a repeated one was read first."""
        again = fresh = 0
        oldest = step
        for key in keys:
            if key is None:
                continue
            before = self._seen.get(key)
            if before is None and redone and step <= self._start:
                before = self._old.get(key)  # steps of the epoch before are done again
            if before is None:
                self._seen[key] = step
                fresh += isinstance(key, int)  # numbers alone do not prove that samples are others
                if len(self._seen) > KEEP_BATCHES:
                    self._seen.popitem(last=False)  # a dict passes over all that went before to find its first key
            elif not (redone and before >= self._resumed) and (isinstance(key, int) or self._resumed >= 0):
                again += 1
                oldest = min(oldest, before)
        return again, fresh, oldest

    def _begins_epoch(self, frame: Frame, all_repeated: bool, oldest: int) -> bool:
        """The log says so; or all batches repeat those of long ago, and no resume is to blame."""
        epoch = frame.get("epoch")
        if epoch is not None and epoch == epoch:
            before, self._epoch = self._epoch, max(self._epoch, int(epoch))
            return 0 <= before < self._epoch
        resumed = self._resumed >= 0 and frame.step - self._resumed < 2 * FRAMES
        return all_repeated and not resumed and frame.step - oldest > LONG_AGO * (frame.step - self._start)

    def _ahead(self, frame: Frame) -> Alarm | None:
        """The count of samples jumps ahead at a resume."""
        position = frame.get("consumed_samples")
        if position is None:
            return None
        if frame.new_attempt:
            while self._positions and self._positions[-1][0] >= frame.step:
                self._positions.pop()
        points = self._positions
        found = None
        if frame.new_attempt and len(points) >= 4:
            (s0, v0), (s1, v1) = points[0], points[-1]
            a_step = (v1 - v0) / (s1 - s0) if s1 > s0 else 0.0
            expected = v1 + a_step * (frame.step - s1)
            if a_step > 0 and position - expected > AHEAD_STEPS * a_step:
                message = (
                    f"the data jump ahead at the resume: position {position:,.0f} instead of {expected:,.0f}, so "
                    f"{position - expected:,.0f} samples are skipped"
                )
                found = self.fact(frame, "data_skipped", "consumed_samples", message, value=position, baseline=expected)
                self._since = 0
        points.append((frame.step, float(position)))
        return found

    def _judge(self, frame: Frame) -> list[Alarm]:
        batches = sum(n for _, n, _, _ in self._recent)
        again = sum(n for _, _, n, _ in self._recent)
        other = sum(n for _, _, _, n in self._recent)
        if self._since < REARM_FRAMES or batches < LEAST_BATCHES or len(self._recent) < 2:
            return []
        onset = next((s for s, _, a, o in self._recent if a or o), frame.step)
        if again > SHARE * batches:
            self._since = 0
            message = f"{again / batches:.0%} of the batches since step {onset:,} had been read before"
            return [
                self.fact(frame, "data_repeated", "shard", message, onset=onset, value=again / batches, baseline=0.0)
            ]
        if other > SHARE * batches:
            self._since = 0
            message = (
                f"after the resume at step {self._resumed:,} other samples are read than the first time: the position "
                "in the data was not restored, and samples are skipped"
            )
            return [
                self.fact(frame, "data_skipped", "shard", message, onset=onset, value=other / batches, baseline=0.0)
            ]
        return []


def _groups(frame: Frame) -> tuple[list[tuple[int, ...]], set[int]]:
    """Ranks of a step with a batch in common, by content; and which batches are copies of those of a lower rank.
    Degenerate data are alike by themselves."""
    readers: dict[int, tuple[int, ...]] = {}
    copies: set[int] = set()
    odd = {(o.batch.rank, o.batch.micro_batch) for o in frame.outliers if o.strong}
    for i, batch in enumerate(frame.batches):
        if batch.content_hash is None or (batch.rank, batch.micro_batch) in odd:
            continue
        before = readers.get(batch.content_hash, ())
        if batch.rank not in before:
            readers[batch.content_hash] = (*before, batch.rank)
            if before:
                copies.add(i)
    return list(dict.fromkeys(ranks for ranks in readers.values() if len(ranks) > 1)), copies


def _ends(batches: BatchColumns, start: int, stop: int) -> dict[int, tuple[str, int]]:
    """Of the batches of a row, which are in the order of ranks: the last shard and sample of each rank."""
    ranks, shards = batches.rank[start:stop].tolist(), batches.shards[start:stop].tolist()
    lasts = batches.last_sample[start:stop].tolist()
    names = batches.shard_names
    return {rank: (names[shard], last) for rank, shard, last in zip(ranks, shards, lasts, strict=True)}


def _listed(block: FrameBlock, name: str) -> list[float | None]:
    """`Frame.get` of each row; None too where it is not finite."""
    column = block.get(name)
    if column is None:
        return [None] * len(block)
    there = column.present & np.isfinite(column.values)
    return [v if is_there else None for v, is_there in zip(column.values.tolist(), there.tolist(), strict=True)]


def _key(batch: BatchRecord) -> Key | None:
    if batch.content_hash is not None:
        return batch.content_hash
    return (batch.shard, batch.first_sample, batch.last_sample) if batch.first_sample >= 0 else None


DETECTOR = DataLedger
