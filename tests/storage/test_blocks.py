"""A run as blocks of columns says exactly what it says as records, in the same order."""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from runhealth.storage import blockwise
from runhealth.storage.blocks import BlockSource, StepBlock
from runhealth.storage.publish import Publisher
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import (
    BatchRecord,
    CheckpointRecord,
    CheckpointStatus,
    LayerSample,
    Record,
    RunEvent,
    StepRecord,
)
from runhealth.storage.store import RunInfo, Store

LogFor = Callable[..., RankLog]
OneStep = Callable[..., list[Record]]


def flat(reader: RunReader) -> tuple[list[Record], list[StepBlock]]:
    """What the blocks stand for, and the blocks alone."""
    records: list[Record] = []
    blocks: list[StepBlock] = []
    for one in reader.blocks():
        if isinstance(one, StepBlock):
            blocks.append(one)
            records += one.records()
        else:
            records.append(one)
    return records, blocks


def exact(records: Sequence[Record]) -> list[str]:
    """Everything about the records, NaN and the type of each number included; the order of values says nothing."""
    return [
        repr((type(one).__name__, {name: getattr(one, name) for name in one.__slots__ if name != "values"}))
        + repr(sorted(getattr(one, "values", {}).items(), key=lambda item: item[0]))
        for one in records
    ]


NUMBERS = st.one_of(
    st.floats(width=32), st.just(math.nan), st.just(math.inf), st.integers(-5, 5), st.integers(-(2**63), 2**64 - 1),
    st.just(2**53 + 1),
)  # fmt: skip
VALUES = st.dictionaries(st.sampled_from(["loss", "tokens", "loss_scale", "free", "eval_loss"]), NUMBERS, max_size=4)
HASHES = st.none() | st.integers(0, 2**64 - 1)


@st.composite
def steps_of_a_rank(draw: st.DrawFn, attempt: int, rank: int) -> list[Record]:
    """What one rank logs: mostly each step once, but it may miss steps, repeat them, and log other things between."""
    records: list[Record] = []
    for step in range(draw(st.integers(0, 3)), draw(st.integers(3, 12))):
        at = {"attempt": attempt, "step": step, "rank": rank}
        what = draw(st.integers(0, 11))
        if what:
            records.append(StepRecord(**at, ts_ns=step * 7 + rank, values=draw(VALUES)))
        if what == 1:
            records.append(StepRecord(**at, values=draw(VALUES)))
        if what in (2, 3):
            for _ in range(what - 1):
                hashes = [draw(HASHES) for _ in range(3)]
                records.append(
                    BatchRecord(
                        **at, micro_batch=draw(st.integers(0, 2)), shard=draw(st.sampled_from(["a", "b", "ü"])),
                        first_sample=step, last_sample=step + 3, samples=4, content_hash=hashes[0],
                        shard_hash=hashes[1], manifest_hash=hashes[2], values=draw(VALUES),
                    )
                )  # fmt: skip
        if what in (4, 5):
            layers = draw(st.lists(st.sampled_from(["h.10", "h.2", "head"]), max_size=3))
            records += [LayerSample(**at, layer=layer, ts_ns=step, values=draw(VALUES)) for layer in layers]
        if what == 6:
            records.append(RunEvent(**at, kind="config", message="m", data={"step": step}))
        if what == 7:
            records.append(CheckpointRecord(**at, path="p", status=CheckpointStatus.SAVED, seconds=0.5))
    return records


@st.composite
def made_runs(draw: st.DrawFn) -> list[list[Record]]:
    ranks = draw(st.integers(1, 3))
    return [draw(steps_of_a_rank(attempt, rank)) for attempt in range(draw(st.integers(1, 2))) for rank in range(ranks)]


@settings(
    max_examples=30,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    logs=made_runs(), published=st.sampled_from(["not", "whole", "half", "sealed"]), chunk=st.sampled_from([60, 10**6])
)
def test_blocks_of_made_runs(
    logs: list[list[Record]], published: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "_CELLS_A_CHUNK", chunk)
    monkeypatch.setattr(blockwise, "STEPS_A_BLOCK", 4)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        run = store.create_run("made")
        claims = [store.claim_attempt(run, f"launch {attempt}") for attempt in (0, 1)]
        open_logs = {}
        for half in (0, 1):
            for number, records in enumerate(filter(None, logs)):
                if half == 0:
                    open_logs[number] = RankLog.create(claims[records[0].attempt].path, records[0].rank)
                middle = len(records) // 2
                open_logs[number].append(records[middle:] if half else records[:middle])
            if published == "sealed" or (published, half) in (("half", 0), ("whole", 1)):
                Publisher(run.path).publish(seal=published == "sealed")
        with RunReader.open(run.path) as reader:
            wanted = list(reader.records())
            got, blocks = flat(reader)
    assert exact(got) == exact(wanted)
    assert len(got) == sum(map(len, logs))
    for block in blocks:
        assert len(block) <= 4
        assert (block.steps[1:] > block.steps[:-1]).all()
        assert block.ts_ns.shape == (len(block), len(block.ranks))


def regular(log_for: LogFor, steps: range, ranks: int, *, more_of_rank_1: Sequence[Record] = ()) -> None:
    for rank in range(ranks):
        with log_for(rank) as log:
            log.append([
                StepRecord(attempt=0, step=step, rank=rank, values={"loss": step / 2, "tokens": step}) for step in steps
            ])  # fmt: skip
            if rank == 1 and more_of_rank_1:
                log.append(more_of_rank_1)


def test_whole_steps_come_as_blocks_and_others_as_records(log_for: LogFor, run: RunInfo) -> None:
    more: list[Record] = [
        StepRecord(attempt=0, step=40, rank=1, values={"loss": 1.0}),  # has it twice now
        LayerSample(attempt=0, step=41, rank=1, layer="head", values={"amax": 2.0}),
        StepRecord(attempt=0, step=100, rank=1),  # the others lack it
        StepRecord(attempt=0, step=60, rank=1, values={"tokens": 2**64 - 1}),
    ]
    regular(log_for, range(100), 3, more_of_rank_1=more)
    with log_for(7) as log:
        log.append([RunEvent(attempt=0, step=41, rank=7, kind="x"), RunEvent(attempt=0, step=500, rank=7, kind="y")])
    reader = RunReader.open(run.path)
    assert isinstance(reader, BlockSource)
    came = [
        (one.steps[0], one.steps[-1], [(i, other.step) for i, other in one.others]) if isinstance(one, StepBlock)
        else (type(one).__name__, one.step)
        for one in reader.blocks()
    ]  # fmt: skip
    assert came == [
        (0, 39, []), *[("StepRecord", 40)] * 4, (41, 59, [(0, 41)]), *[("StepRecord", 60)] * 4, (61, 99, []),
        ("StepRecord", 100), ("RunEvent", 500),
    ]  # fmt: skip
    got, blocks = flat(reader)
    assert exact(got) == exact(list(reader.records()))
    assert all(block.ranks == (0, 1, 2) for block in blocks)
    assert [block.layers is not None for block in blocks] == [False, True, False]


def test_every_kind_of_record_in_its_place(log_for: LogFor, run: RunInfo, one_step_of: OneStep) -> None:
    wanted = [one for step in range(30) for one in one_step_of(step, 2)]
    for rank in (0, 1):
        with log_for(rank) as log:
            log.append([one for one in reversed(wanted) if one.rank == rank])
    got, _ = flat(RunReader.open(run.path))
    assert exact(got) == exact(wanted)


def test_a_long_run_comes_in_bounded_blocks(log_for: LogFor, run: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    regular(log_for, range(9000), 1)
    _, blocks = flat(RunReader.open(run.path))
    assert [len(block) for block in blocks] == [4096, 4096, 808]
    monkeypatch.setattr(blockwise, "_CELLS_A_CHUNK", 6 * 1000)  # two values, four keys
    _, blocks = flat(RunReader.open(run.path))
    assert sum(map(len, blocks)) == 9000
    assert max(map(len, blocks)) <= 1000


@pytest.fixture
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunReader]:
    with RunReader.open("40k-spike", str(tmp_path_factory.mktemp("empty"))) as reader:
        yield reader


def test_blocks_of_the_bundled_run(bundled: RunReader) -> None:
    got, blocks = flat(bundled)
    wanted = list(bundled.records())
    assert got == wanted
    assert exact(got[::50]) == exact(wanted[::50])
    assert sum(map(len, blocks)) == 41_400  # so nothing but events and checkpoints came as single records
    assert max(map(len, blocks)) == 4096
