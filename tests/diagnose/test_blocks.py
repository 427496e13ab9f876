"""Blocks, records and chunks of records say the same: alarms, states, frames and verdicts, to the last bit."""

import dataclasses
import math
import pickle
import random
from array import array
from collections import deque

import numpy as np
import pytest

from runhealth.diagnose.batches import BatchHabit
from runhealth.diagnose.detector import detector_classes
from runhealth.diagnose.engine import Engine
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame, FrameAssembler
from runhealth.diagnose.robust import Baseline
from runhealth.diagnose.service import diagnose, verdict_hash
from runhealth.diagnose.windows import Ahead, settled, take, take_looking
from runhealth.storage.blocks import BatchColumns, Column, LayerColumns, StepBlock
from runhealth.storage.records import (
    BatchRecord,
    CheckpointRecord,
    CheckpointStatus,
    EventKind,
    LayerSample,
    RunEvent,
    SourceInfo,
    StepRecord,
)

INFO = SourceInfo(name="made", source="made", format="csv")
SEEDS = range(4)


# -- runs as blocks -------------------------------------------------------------------------------------------------


def column(values, present=None):
    return Column(values=np.asarray(values), present=present)


def made(seed, attempt=0, first=0, rows=None, ranks=None):
    """One attempt with a bit of everything that detectors look for."""
    rng = np.random.default_rng([seed, attempt])
    n = rows or int(rng.integers(150, 400))
    width = ranks or int(rng.choice([1, 1, 2, 4]))
    shape = (n, width)
    stride = int(rng.choice([1, 1, 1, 10]))
    steps = first + stride * np.arange(n, dtype=np.int64)
    t = np.arange(n)[:, None] / 200

    def some(share):
        """Where a signal was measured."""
        return rng.random(shape) < share

    def onset():
        return int(rng.integers(40, n))

    sigma = float(rng.choice([0.005, 0.02, 0.1]))
    loss = (2 + 3 * np.exp(-t)) * np.exp(rng.normal(0, sigma, shape))
    norm = np.exp(rng.normal(-0.5, 0.2, shape))
    rank_norm = np.exp(rng.normal(-0.3, 0.2, shape))
    lr = np.broadcast_to(3e-4 * np.minimum(1, (steps[:, None] + 1) / 100), shape).copy()
    ratio = 1e-3 * np.exp(rng.normal(0, 0.1, shape))
    seconds = 0.5 + 0.02 * np.abs(rng.normal(0, 1, shape))
    forward = 0.2 + 0.01 * rng.random(shape)
    wait = 0.05 + 0.01 * rng.random(shape)
    scale = np.full(shape, 65536.0)
    skipped = np.zeros(shape, dtype=np.int64)
    overflow = rng.poisson(0.3, shape)
    amax = 0.7 * np.exp(rng.normal(0, 0.1, shape))
    eval_loss = loss.mean(axis=1, keepdims=True) * np.ones(shape) * 1.05
    memory = np.full(shape, 8e9) + rng.normal(0, 1e6, shape)
    logit = 10 + 0.5 * rng.random(shape)
    weight = 100 + 0.01 * np.cumsum(np.ones(shape), axis=0)
    nonfinite = np.zeros(shape, dtype=np.int64)
    checkpoint = np.zeros(shape)
    save_at = np.zeros(shape, dtype=np.bool_)
    save_at[25::50] = True
    checkpoint[25::50] = rng.choice([1.0, 4.0, 30.0])
    samples = np.broadcast_to(512 * (steps[:, None] + 1), shape).copy()
    lost = np.zeros(shape, dtype=np.bool_)

    chosen = rng.choice(
        ["spike", "plateau", "climb", "nan", "inf", "zeros", "same", "scale", "lr", "ratio", "clip", "overflow",
         "amax", "slow", "stall", "slower", "straggler", "leak", "logits", "factor", "outlier", "masked", "vanish",
         "skips", "drift", "overfit", "negative", "gap", "quiet", "placeholder", "gone"],
        size=int(rng.integers(1, 6)), replace=False,
    )  # fmt: skip
    gaps = np.full(n, 1_000_000_000, dtype=np.int64) + rng.integers(0, 10**7, n)
    for what in chosen:
        a, r = onset(), int(rng.integers(0, width))
        b = min(n, a + int(rng.choice([1, 3, 20, 80])))
        if what == "spike":
            loss[a:b] *= 1 + 3 * rng.random()
        elif what == "plateau":
            loss[a:] *= 2
        elif what == "climb":
            loss[a:] *= np.exp(0.01 * np.arange(n - a))[:, None]
        elif what == "nan":
            loss[a:b, r], norm[a:b] = np.nan, np.nan
        elif what == "inf":
            norm[a:b], nonfinite[a:b, r] = np.inf, 7
        elif what == "zeros":
            loss[a:b] = 0.0
        elif what == "same":
            loss[a:b], weight[a:] = loss[a], 123.456
            eval_loss[a:] = eval_loss[a]
        elif what == "scale":
            scale[a:] = 65536.0 * 0.5 ** np.minimum(np.arange(n - a), 12)[:, None]
            skipped[a : a + 12] = 1
        elif what == "lr":
            lr[a:] *= 8
        elif what == "ratio":
            ratio[a:b] *= 6
        elif what == "clip":
            norm[a:b] *= 40
            rank_norm[a:b, r] *= 40
        elif what == "overflow":
            overflow[a:b, r] += 4000
        elif what == "amax":
            amax[a:b, r] *= 5
        elif what == "slow":
            seconds[a] = 9.0
        elif what == "stall":
            seconds[a::37] = 2.5
        elif what == "slower":
            seconds[a:] = 6.0
        elif what == "straggler":
            forward[a:, r] *= 8
        elif what == "leak":
            memory[:, r] += 1e7 * np.arange(n)
        elif what == "logits":
            logit[:, r] += 0.3 * np.arange(n)
        elif what == "factor":
            loss[a:] *= 8
        elif what == "outlier":
            loss[a:b, r], rank_norm[a:b, r] = loss[a:b, r] * 3, rank_norm[a:b, r] * 9
        elif what == "masked":
            norm[a:b], loss[a:b] = np.nan, loss[a - 1]
        elif what == "vanish":
            lost[a:b] = True
        elif what == "skips":
            skipped[a:b] = 1
        elif what == "drift":
            eval_loss[a:] *= 1.3
        elif what == "overfit":
            eval_loss[a:] *= np.exp(0.003 * np.arange(n - a))[:, None]
        elif what == "negative":
            loss[a:b] = -loss[a:b]
        elif what == "gap":
            gaps[a] = 10**13
        elif what == "placeholder":
            norm[:], loss[:, r] = 0.0, -1.0
        elif what == "gone":
            norm[:] = 0.0
            loss[:] = 0.0
    epoch = (steps[:, None] + 1) / 100 * np.ones(shape)
    if rng.random() < 0.4:
        loss *= 0.9 ** np.floor(epoch)

    head = np.zeros(shape, dtype=np.bool_)
    head[:, 0] = True
    every = stride * int(rng.choice([7, 40]))
    evals = np.broadcast_to((steps[:, None] // every) % 2 == 0, shape) & head
    all_of_it = {
        "loss": column(loss, ~lost if lost.any() else None),
        "grad_norm": column(norm, head | some(0.2)),
        "grad_norm_rank": column(rank_norm),
        "lr": column(lr, head),
        "update_ratio": column(ratio, head & some(0.9)),
        "t_step_s": column(seconds),
        "t_forward_s": column(forward, some(0.98)),
        "t_backward_s": column(2 * forward),
        "t_wait_s": column(wait),
        "loss_scale": column(scale, head & some(0.95)),
        "step_skipped": column(skipped, head),
        "overflow_count": column(overflow),
        "amax_ratio": column(amax, some(0.8)),
        "eval_loss": column(eval_loss, evals),
        "mem_allocated_bytes": column(memory.astype(np.int64)),
        "mem_rss_bytes": column(memory, some(0.5)),
        "logit_max": column(logit, some(0.9)),
        "weight_norm": column(weight, head),
        "nonfinite_count": column(nonfinite),
        "t_checkpoint_s": column(checkpoint, save_at),
        "consumed_samples": column(samples, head),
        "clip_threshold": column(np.ones(shape), head),
        "epoch": column(epoch, head),
        "tokens": column(np.full(shape, 4096)),
        "mystery": column(rng.random(shape), some(0.01)),
        **phases_and_optimizer(np.random.default_rng([seed, attempt, 1]), n, width),
        **directions_and_settings(np.random.default_rng([seed, attempt, 2]), n, width),
    }
    kept = [name for name in all_of_it if name == "loss" or rng.random() < 0.7]
    ts_ns = (np.cumsum(gaps) + 10**15 * (attempt + 1))[:, None] + np.arange(width)
    others = [
        (0, RunEvent(attempt=attempt, step=first, rank=0, kind=EventKind.ATTEMPT_START,
                     data={"world_size": width} if rng.random() < 0.7 else {})),
    ]  # fmt: skip
    for i in range(50, n, 50):
        record = CheckpointRecord(
            attempt=attempt, step=int(steps[i]), rank=0, path=f"c{i}", status=CheckpointStatus.VERIFIED
        )
        others.append((i, record))
    return StepBlock(
        attempt=attempt,
        ranks=tuple(range(width)),
        steps=steps,
        ts_ns=ts_ns,
        columns={name: all_of_it[name] for name in kept},
        batches=batches_of(rng, n, width) if rng.random() < 0.6 else None,
        layers=layers_of(rng, n, width) if rng.random() < 0.5 else None,
        others=tuple(others),
    )


def phases_and_optimizer(rng, n, width):
    """Columns with waits that grow, stalls, pauses in what is measured, and values that run away."""
    shape = (n, width)
    start = int(rng.integers(60, n))
    rank = int(rng.integers(0, width))

    def noisy(level, sigma, *what):
        values = level * np.exp(rng.normal(0, sigma, shape))
        for change in what:
            if rng.random() < 0.5:
                change(values)
        return values

    def longer(values):
        values[start:, rank] *= 8

    def stalls(values):
        values[start::9] *= 30

    def lost(values):
        values[start : start + 5, rank] = np.nan

    def grows(values):
        values[start:] *= np.exp(0.02 * np.arange(n - start))[:, None]

    sums = np.broadcast_to(rng.random(n)[:, None], shape).copy()
    if rng.random() < 0.5:
        sums[start:, rank] += 1
    if rng.random() < 0.5:
        sums[start:] = sums[start]
    present = np.ones(shape, dtype=np.bool_) if rng.random() < 0.5 else rng.random(shape) < 0.9
    return {
        "t_data_s": column(noisy(0.1, 0.05, longer, stalls, lost), present),
        "t_comm_s": column(noisy(0.05, 0.2, longer)),
        "t_gc_s": column(noisy(0.01, 0.1, stalls), rng.random(shape) < 0.3),
        "attn_logit_max": column(noisy(10, 0.02, grows, lost)),
        "adam_rms": column(noisy(1.0, 0.1, longer, lost)),
        "router_load_max": column(np.minimum(noisy(0.2, 0.1, longer, lost), 1.0)),
        "param_checksum": column(sums),
        "stage": column(np.broadcast_to(np.arange(width) * int(rng.integers(0, 2)), shape).copy()),
    }


def directions_and_settings(rng, n, width):
    """A reduce that returns the mean until it does not, a rank that points elsewhere, settings that drift or jump."""
    shape = (n, width)
    start, rank = int(rng.integers(60, n)), int(rng.integers(0, width))
    cosine = np.clip(0.6 + rng.choice([0.02, 0.1]) * rng.normal(size=shape), -1, 1)
    projection = 1 + 0.2 * rng.normal(size=shape)
    projection += 1 - projection.mean(axis=1, keepdims=True) + rng.choice([1e-6, 1e-2]) * rng.normal(size=(n, 1))
    if rng.random() < 0.6:
        cosine[start : start + 9, rank] *= -1
    if rng.random() < 0.6:
        projection[start : start + int(rng.choice([1, 5, 300]))] *= rng.choice([0.5, 0.97, 1.03])
    cosine[rng.random(n) < 0.01, rank] = np.nan
    beta2 = np.full(shape, 0.95)
    beta2[start:] = rng.choice([0.95, 0.5, 0.94])
    decay = 0.1 * np.ones(shape)
    if rng.random() < 0.5:
        decay[start:] = np.maximum(0.0, 0.1 - 0.002 * np.arange(n - start))[:, None]
    head = np.zeros(shape, dtype=np.bool_)
    head[:: int(rng.choice([1, 7])), 0] = True
    some = None if rng.random() < 0.5 else rng.random(shape) < 0.98
    return {
        "grad_projection_rank": column(projection, some),
        "grad_cosine_rank": column(cosine, some),
        "beta2": column(beta2, head),
        "weight_decay": column(decay, head),
    }


def batches_of(rng, n, width):
    micro = int(rng.choice([1, 2]))
    row, rank, batch = (a.ravel() for a in np.meshgrid(np.arange(n), np.arange(width), np.arange(micro), indexing="ij"))
    size = len(row)
    shards = (row // 31 * width + rank) % 16
    entropy, unique = 4.8 + 0.06 * rng.normal(size=size), 0.35 + 0.008 * rng.normal(size=size)
    bad = np.zeros(size, dtype=np.bool_)
    start = int(rng.integers(40, n))
    kind = rng.choice(["none", "stats", "hash", "lasting"])
    if kind != "none":
        stop = n if kind == "lasting" else start + 25
        bad = (row >= start) & (row < stop) & (rank == 0)
        if kind != "hash":
            entropy = np.where(bad, 7.9, entropy)
            unique = np.where(bad, 0.99, unique)
    entropy[rng.integers(0, size, 3)] = np.nan
    known = rng.random(size) < 0.9
    nonfinite = np.where(rng.random(size) < rng.choice([0.0, 0.002, 0.3]), 0.25, 0.0)
    nonfinite[(row >= start) & (row < start + 3) & (rank == 0)] = 0.5
    recorded = np.ones(size, dtype=np.bool_) if rng.random() < 0.5 else nonfinite > 0
    return BatchColumns(
        row=row, rank=rank, micro_batch=batch, ts_ns=10**15 + row, shards=shards,
        shard_names=tuple(f"{i:04d}" for i in range(16)), first_sample=row, last_sample=row + 15,
        samples=np.full(size, 16), content_hash=hashes_of(np.random.default_rng([size, start]), size),
        shard_hash=[(2**63 + 5 if b and kind == "hash" else 7) if k else None for b, k in zip(bad, known, strict=True)],
        manifest_hash=[7] * size,
        columns={"token_entropy": column(entropy), "token_unique_share": column(unique, rng.random(size) < 0.9),
                 "label_mismatch_share": column(np.zeros(size)), "nonfinite_share": column(nonfinite, recorded)},
    )  # fmt: skip


def hashes_of(rng, size):
    """Of batches that are known or not, with a stretch that is read again."""
    if rng.random() < 0.3:
        return [None] * size
    hashes = (2**63 + np.arange(size, dtype=np.uint64)).tolist()
    start, stop = sorted(rng.integers(0, size, 2).tolist())
    if rng.random() < 0.5:
        hashes[start : start + 40] = hashes[: len(hashes[start : start + 40])]
    if rng.random() < 0.3:
        hashes[start:stop] = [None] * (stop - start)
    if rng.random() < 0.4:  # batches of a step in common
        hashes[start + 1 : start + 60 : 2] = hashes[start : start + 59 : 2][: len(hashes[start + 1 : start + 60 : 2])]
    return hashes


def layers_of(rng, n, width):
    axes = np.arange(0, n, 10), np.arange(width), np.arange(3)
    row, rank, layer = (a.ravel() for a in np.meshgrid(*axes, indexing="ij"))
    size = len(row)
    norms, updates = np.exp(rng.normal(0, 0.2, size)), np.exp(rng.normal(0, 0.2, size))
    start, dead = int(rng.integers(0, n)), rng.random() < 0.5
    norms[(row > start) & (layer == 1) & dead] *= 1e-4
    updates[(row > start) & (layer == 2) & dead] = 0.0
    return LayerColumns(
        row=row, rank=rank, ts_ns=10**15 + row, layer_names=("a", "b", "c"), layers=layer,
        columns={"overflow_count": column(rng.poisson(0.5, size)), "amax": column(rng.random(size)),
                 "amax_believed": column(np.ones(size), rng.random(size) < 0.5),
                 "grad_rms": column(norms, rng.random(size) < 0.9), "grad_norm": column(10 * norms),
                 "update_norm": column(updates), "router_load_max": column(np.minimum(updates / 4, 1.0))},
    )  # fmt: skip


def run_of(seed):
    """Some attempts: the next begins before the end of the one before, with other ranks at times."""
    rng = random.Random(seed)
    found = [made(seed)]
    for attempt in range(1, rng.choice([1, 1, 2, 3])):
        before = found[-1]
        first = int(before.steps[len(before) * 3 // 4])
        width = len(before.ranks) if rng.random() < 0.7 else None
        found.append(made(seed, attempt, first, ranks=width))
    return found


def cut(block, start, stop):
    """Rows start to stop; what comes at the cut goes to the later part."""

    def columns(part, low, high):
        return {
            name: Column(values=c.values[low:high], present=None if c.present is None else c.present[low:high])
            for name, c in part.items()
        }

    def rows(part):
        if part is None:
            return None
        low, high = np.searchsorted(part.row, (start, stop)).tolist()
        fields = {}
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.name == "columns":
                value = columns(value, low, high)
            elif not field.name.endswith("_names"):
                value = value[low:high]
            fields[field.name] = value
        fields["row"] = fields["row"] - start
        return type(part)(**fields)

    last = stop == len(block)
    return StepBlock(
        attempt=block.attempt, ranks=block.ranks, steps=block.steps[start:stop], ts_ns=block.ts_ns[start:stop],
        columns=columns(block.columns, start, stop), batches=rows(block.batches), layers=rows(block.layers),
        others=tuple((i - start, r) for i, r in block.others if start <= i and (i < stop or last)),
    )  # fmt: skip


def cuts(block, rng):
    """The block in pieces of random size, some of a single row."""
    found, at = [], 0
    while at < len(block):
        stop = min(len(block), at + rng.choice([1, 2, 7, 66, 300, 5000]))
        found.append(cut(block, at, stop))
        at = stop
    return found


class BlockList:
    """A source of blocks and single records."""

    def __init__(self, items):
        self.items = items

    def blocks(self):
        yield from self.items

    def records(self):
        for item in self.items:
            if isinstance(item, StepBlock):
                yield from item.records()
            else:
                yield item

    def describe(self):
        return INFO


# -- states -----------------------------------------------------------------------------------------------------------


def plain(value):
    """A state in comparable form: types count, NaN equals NaN, and so do a frame and the row that it is."""
    if isinstance(value, float):
        return ("float", value.hex() if not math.isnan(value) else "nan")
    if isinstance(value, Frame):
        return ("Frame", [(name, plain(getattr(value, name))) for name in Frame.__slots__])
    if isinstance(value, dict):
        return ("dict", sorted(((repr(k), plain(v)) for k, v in value.items()), key=lambda pair: pair[0]))
    if isinstance(value, list | tuple | deque | array):
        return (type(value).__name__, [plain(v) for v in value])
    if isinstance(value, set | frozenset):
        return ("set", sorted(map(repr, value)))
    if isinstance(value, int | str | bytes | type(None) | np.dtype):
        return (type(value).__name__, value)
    assert not isinstance(value, np.generic), f"a NumPy scalar in a state: {value!r}"
    if isinstance(value, np.ndarray):
        return ("ndarray", [plain(v) for v in value.tolist()])
    names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    names.extend(getattr(value, "__dict__", ()))
    return (type(value).__name__, [(name, plain(getattr(value, name, None))) for name in names])


def state_of(engine):
    state = engine.state_dict()
    for name in ("_open", "_open_rank"):  # which record came last: only says where the next one may go quickly
        state["assembler"].pop(name)
    return plain(state)


def frames_of(block):
    """The frames of a block by way of records."""
    assembler = FrameAssembler()
    found = []
    for record in block.records():
        if isinstance(record, StepRecord | BatchRecord | LayerSample):
            found.extend(assembler.feed(record))
    found.extend(assembler.finish())
    for frame in found:
        frame.new_attempt = False
    return found


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_baseline_ahead_says_what_it_says_when_values_are_pushed(seed):
    rng = np.random.default_rng(seed)
    size, least = int(rng.choice([16, 64, 256])), int(rng.choice([4, 8]))
    every, floor = int(rng.choice([1, 4, 16])), float(rng.choice([0.0, 0.05]))
    one, other = (Baseline(size, least=least, every=every, floor=floor, floor_share=floor / 2) for _ in range(2))
    for _ in range(6):
        values = np.round(rng.normal(1, 0.1, int(rng.integers(1, 400))), int(rng.choice([2, 12])))
        ahead = Ahead(other, values) if settled(other) else None
        said = []
        for value in values.tolist():
            if one.ready:
                said.append((one.center, one.sigma, one.quantile(0.95)))
            one.push(value)
        if ahead is not None:
            found = zip(ahead.center().tolist(), ahead.sigma().tolist(), ahead.quantile(0.95).tolist(), strict=True)
            assert list(found) == said
        take(other, values)
        assert plain(other) == plain(one)


@pytest.mark.parametrize("seed", range(10))
def test_a_baseline_that_is_looked_at_now_and_then(seed):
    rng = np.random.default_rng(seed)
    one, other = (Baseline(64, least=8, every=int(every)) for every in [rng.choice([1, 4, 16])] * 2)
    for baseline in (one, other):
        take(baseline, np.random.default_rng(seed).normal(size=100))
    for _ in range(6):
        values = rng.normal(1, 0.1, int(rng.integers(1, 200)))
        looks = np.flatnonzero(rng.random(len(values)) < rng.choice([0.02, 0.3, 1.0]))
        ahead, said = Ahead(other, values, looks), []
        for i, value in enumerate(values.tolist()):
            if i in looks:
                said.append((one.center, one.sigma))
            one.push(value)
        assert list(zip(ahead.center()[looks].tolist(), ahead.sigma()[looks].tolist(), strict=True)) == said
        take_looking(other, values, looks)
        assert plain(other) == plain(one)


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_a_block_says_what_its_frames_say(seed):
    block = made(seed)
    rows, frames = FrameBlock.of(block), frames_of(block)
    assert [plain(rows.frame(i)) for i in range(len(rows))] == [plain(frame) for frame in frames]
    part = rows.part(10, len(rows) - 5)
    for view, seen in ((rows, frames), (part, frames[10:-5])):
        assert view.ts_ns.tolist() == [frame.ts_ns for frame in seen]
        for name in [*block.columns, "absent"]:
            for ask, of in (("get", Frame.get), ("largest", Frame.largest), ("total", Frame.total)):
                expected = [of(frame, name) for frame in seen]
                signal = getattr(view, ask)(name)
                if signal is None:
                    assert expected == [None] * len(seen)
                    continue
                got = [v if p else None for v, p in zip(signal.values.tolist(), signal.present, strict=True)]
                assert plain(got) == plain([None if v is None else float(v) for v in expected])
                assert plain([getattr(view.frame(i), ask)(name) for i in range(len(view))]) == plain(expected)
            ranks = [Frame.per_rank(frame, name) for frame in seen]
            assert plain([view.frame(i).per_rank(name) for i in range(len(view))]) == plain(ranks)
        loss = view.loss
        got = [v if p else None for v, p in zip(loss.values.tolist(), loss.present, strict=True)]
        assert plain(got) == plain([frame.loss for frame in seen])
        met = set()
        for i, frame in enumerate(seen):
            fresh = {*frame.values} - met
            met |= fresh
            assert {view.first((name,)) for name in fresh} <= {i}
    assert plain(pickle.loads(pickle.dumps(rows.frame(3)))) == plain(frames[3])


@pytest.mark.parametrize("seed", SEEDS)
def test_each_detector_sees_the_same_in_blocks_as_in_frames(seed):
    pairs = [(cls(), cls()) for cls in detector_classes()]
    habit, again = BatchHabit(), BatchHabit()
    rng = random.Random(seed)
    for whole in run_of(seed):
        for block in cuts(whole, rng):
            rows, frames = FrameBlock.of(block), frames_of(block)
            rows.judge_batches(habit)
            for frame in frames:
                frame.outliers = again.judge(frame.batches)
            assert plain(habit.state_dict()) == plain(again.state_dict())
            for one, other in pairs:
                expected = [(i, alarm) for i, frame in enumerate(frames) for alarm in one.update(frame)]
                assert plain(other.update_block(rows)) == plain(expected), one.name
                assert plain(vars(other)) == plain(vars(one)), one.name
    for one, other in pairs:
        assert plain(other.finish()) == plain(one.finish()), one.name


@pytest.mark.parametrize("seed", SEEDS)
def test_the_engine_is_in_the_same_state_after_blocks_as_after_records(seed):
    rng = random.Random(seed)
    one, other = Engine(), Engine()
    for whole in run_of(seed):
        for block in cuts(whole, rng):
            changed = [one.feed_quietly(record) for record in block.records()]
            assert other.feed_block(block) == any(changed)
        assert state_of(other) == state_of(one)
    one.finish()
    other.finish()
    assert state_of(other) == state_of(one)
    assert verdict_hash(other.report(INFO)) == verdict_hash(one.report(INFO))


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_chunks_and_records_give_one_verdict(seed):
    rng = random.Random(seed)
    items = []
    for whole in run_of(seed):
        for block in cuts(whole, rng):
            if len(block) <= 7 and rng.random() < 0.5:  # steps that a rank lacks, or that came too late for a block
                drop = rng.random() < 0.5
                items.extend(r for r in block.records() if not (drop and r.rank == 1))
            else:
                items.append(block)
    source = BlockList(items)
    window = (100, 400) if rng.random() < 0.2 else None
    report = diagnose(source, window=window)
    engine = Engine(window=window)
    for index, record in enumerate(source.records()):
        engine.feed_quietly(record)
        if index % 1499 == 1498:
            state = pickle.loads(pickle.dumps(engine.state_dict()))
            engine = Engine()
            engine.load_state_dict(state)
    engine.finish()
    assert verdict_hash(report) == verdict_hash(engine.report(INFO))
