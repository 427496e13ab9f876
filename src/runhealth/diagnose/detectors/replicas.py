"""Replicated parameters differ between ranks, or do not move in a single bit.

Ranks whose checksums were always different hold different parts of the model (sharding, pipeline stages) and are not
compared: those that once agreed for four frames are, group by group. A resume goes on with the groups of the attempt
before, so that replicas which part right after it are seen. Where its first frame shows other groups the layout may be
another one: then only ranks that are apart from a majority of their group are told. Three rows of one checksum, with a
gradient and a learning rate and no skipped step, tell that no update is applied; two samples of a layer whose update is
exactly 0 while it has a gradient and was updated before tell it of that layer.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame

AGREED_FRAMES = 4
STILL_ROWS = 3
STILL_SAMPLES = 2


class Replicas(Detector):
    name: ClassVar[str] = "replicas"
    kinds: ClassVar[tuple[str, ...]] = ("replica_desync", "optimizer_not_stepping")
    reads: ClassVar[tuple[str, ...]] = ("param_checksum", "layer.update_norm")

    def __init__(self) -> None:
        self._groups: dict[int, int] = {}  # rank -> lowest rank that it agrees with
        self._agreed = 0
        self._resumed = False  # the groups are those of the attempt before, and not seen in this one yet
        self._equal_step: int | None = None  # the last step at which they were the same, as far as is known
        self._apart = False
        self._last: tuple[float, int, int] | None = None  # checksum of the lowest rank, rows, step of the first
        self._still: dict[str, int] = {}  # layer -> samples without an update, at the end
        self._updated: set[str] = set()
        self._told = False
        self._told_layers = False

    def update(self, frame: Frame) -> list[Alarm]:
        if frame.new_attempt:
            self._restart(frame)
        sums = frame.per_rank("param_checksum")
        alarms: list[Alarm] = []
        if len(sums) > 1:
            alarms += self._compare(frame, sums)
        if sums:
            alarms += self._moves(frame, sums[min(sums)])
        if frame.layers:
            alarms += self._layers(frame)
        return alarms

    def _restart(self, frame: Frame) -> None:
        groups, known = self._groups, self._agreed >= AGREED_FRAMES
        self.__init__()  # type: ignore[misc]
        self._equal_step = frame.step - 1
        if known:
            self._groups, self._agreed, self._resumed = groups, AGREED_FRAMES, True

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        sums, layers = block.per_rank("param_checksum"), block.layers()
        rows = set() if sums is None else set(np.flatnonzero(sums.present.any(axis=1)).tolist())
        found: list[tuple[int, Alarm]] = []
        updates = None if layers is None else layers[0].columns.get("update_norm")
        if layers is None or updates is None:
            return self.update_rows(block, sorted(rows))
        columns, starts = layers
        there = np.ones(len(columns.row), dtype=np.bool_) if updates.present is None else updates.present
        moved = there & (updates.values > 0)
        odd = np.concatenate([[0], np.cumsum(there & ~moved)]).tolist()
        moving = {columns.layer_names[layer] for layer in set(columns.layers[moved].tolist())}
        sampled = [row for row, (start, stop) in enumerate(itertools.pairwise(starts)) if stop > start]
        for row in sorted(rows.union(sampled)):
            still = odd[starts[row + 1]] > odd[starts[row]]
            if row in rows or still or self._still or not moving <= self._updated:
                found.extend(self.update_rows(block, (row,)))
        return found

    def _compare(self, frame: Frame, sums: dict[int, float]) -> list[Alarm]:
        first: dict[float, int] = {}
        groups = {rank: first.setdefault(sums[rank], rank) for rank in sorted(sums)}
        if self._agreed < AGREED_FRAMES:
            if groups == self._groups:
                self._agreed += 1
            else:
                self._groups, self._agreed = groups, 1
            self._equal_step = frame.step
            return []
        if groups == self._groups:
            self._apart = self._resumed = False
            self._equal_step = frame.step
            return []
        if self._apart:
            return []
        members: dict[int, dict[float, list[int]]] = {}
        for rank, leader in self._groups.items():
            if rank in sums:
                members.setdefault(leader, {}).setdefault(sums[rank], []).append(rank)
        if self._resumed:
            self._resumed = False
            if sums.keys() != self._groups.keys() or not _few_apart(members):
                self._groups, self._agreed = groups, 1  # another layout
                return []
        odd: list[int] = []
        for versions in members.values():
            if len(versions) > 1:
                most = max(versions.values(), key=lambda ranks: (len(ranks), -ranks[0]))
                some = len(most) > 1 or sum(map(len, versions.values())) == 1
                odd += [r for ranks in versions.values() if ranks is not most for r in ranks] if some else []
                self._apart = True
        if not self._apart:
            return []  # ranks that never agreed do so now, or one is missing
        since = frame.step if self._equal_step is None else self._equal_step + 1
        if odd:
            who = f"rank {', '.join(map(str, sorted(odd)[:8]))} differs from the others"
        elif len(sums) == 2:
            who = f"ranks {' and '.join(map(str, sorted(sums)))} differ from each other"
        else:
            who = "no majority agrees"
        when = f"since step {since:,}" if since == frame.step else f"since some step from {since:,} to {frame.step:,}"
        message = f"the parameters of the replicas are no longer the same: {who} {when}"
        versions_now = len(set(sums.values()))
        return [
            self.fact(
                frame,
                "replica_desync",
                "param_checksum",
                message,
                onset=since,
                value=versions_now,
                baseline=len(set(self._groups.values())),
                ranks=tuple(sorted(odd)),
                severity=Severity.ERROR,
            )
        ]

    def _moves(self, frame: Frame, checksum: float) -> list[Alarm]:
        before = self._last
        if before is None or before[0] != checksum or not _applies(frame):
            self._last = (checksum, 1, frame.step)
            self._told = False
            return []
        self._last = (checksum, before[1] + 1, before[2])
        if before[1] + 1 < STILL_ROWS + 1 or self._told:
            return []
        self._told = True
        message = f"no parameter has moved in a single bit since step {before[2]:,}, though there are gradients"
        return [
            self.fact(frame, "optimizer_not_stepping", "param_checksum", message, onset=before[2] + 1, value=checksum)
        ]

    def _layers(self, frame: Frame) -> list[Alarm]:
        if self._told or self._told_layers or not _applies(frame):
            return []
        for sample in frame.layers:
            update, norm = (
                sample.values.get("update_norm"),
                sample.values.get("grad_norm", sample.values.get("grad_rms")),
            )
            if update is None:
                continue
            if update > 0:
                self._updated.add(sample.layer)
                self._still.pop(sample.layer, None)
            elif update == 0 and norm is not None and norm > 0 and sample.layer in self._updated:
                self._still[sample.layer] = self._still.get(sample.layer, 0) + 1
        held = sorted(layer for layer, samples in self._still.items() if samples >= STILL_SAMPLES)
        if not held:
            return []
        self._told_layers = True
        message = f"{', '.join(held[:4])}: gradients, and no update any more"
        alarm = self.fact(frame, "optimizer_not_stepping", "layer.update_norm", message, value=0.0)
        return [replace(alarm, layers=tuple(held[:8]))]


def _few_apart(members: Mapping[int, Mapping[float, Sequence[int]]]) -> bool:
    """Some ranks left a group in which most still agree: no regular layout of other groups looks like that."""
    shares = [(max(map(len, versions.values())), sum(map(len, versions.values()))) for versions in members.values()]
    return all(2 * most > size for most, size in shares) and any(most < size for most, size in shares)


def _applies(frame: Frame) -> bool:
    """There is something to apply, and nothing says that the step was skipped."""
    norm, rate = frame.get("grad_norm"), frame.get("lr")
    if norm is None:
        norm = frame.largest("grad_norm_rank")
    return norm is not None and math.isfinite(norm) and norm > 0 and rate != 0 and not frame.get("step_skipped")


DETECTOR = Replicas
