"""One path: live in any interleaving, in chunks with saved state, and whole give the same verdict."""

import pickle
import random

import pytest

from runhealth.diagnose.engine import Engine
from runhealth.diagnose.findings import Severity
from runhealth.diagnose.service import diagnose, verdict_hash
from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.records import RunEvent


def interleaved(records, seed, drift=20):
    """Each rank's records in its own order, ranks up to about `drift` steps apart."""
    rng = random.Random(seed)
    queues = {}
    for record in records:
        queues.setdefault(record.rank, []).append(record)
    positions = dict.fromkeys(queues, 0)
    out = []
    while True:
        open_ranks = [r for r in queues if positions[r] < len(queues[r])]
        if not open_ranks:
            return out
        steps = {r: (queues[r][positions[r]].attempt, queues[r][positions[r]].step) for r in open_ranks}
        slowest = min(steps.values())
        allowed = [r for r in open_ranks if steps[r][0] == slowest[0] and steps[r][1] - slowest[1] < drift]
        rank = rng.choice(allowed)
        out.append(queues[rank][positions[rank]])
        positions[rank] += 1


def run_through(records, source, *, chunk=0, live=False):
    engine = Engine()
    for index, record in enumerate(records):
        if live:
            engine.feed(record)
        else:
            engine.feed_quietly(record)
        if chunk and index % chunk == chunk - 1:
            state = pickle.loads(pickle.dumps(engine.state_dict()))
            engine = Engine()
            engine.load_state_dict(state)
    engine.finish()
    return verdict_hash(engine.report(source.describe()))


@pytest.mark.parametrize("cause", ["bad_shard", "fp_overflow", "lr_change", "benign"])
def test_live_chunked_and_whole_agree(records_of, list_source, cause):
    records = records_of(cause=cause, seed=101, ranks=3)
    source = list_source(records)
    whole = verdict_hash(diagnose(source))
    assert run_through(interleaved(records, 1), source, live=True) == whole
    assert run_through(interleaved(records, 2), source, chunk=1500) == whole
    assert run_through(interleaved(records, 3), source, chunk=997, live=True) == whole


def test_the_hash_tells_different_verdicts_apart(records_of, list_source):
    hashes = {
        verdict_hash(diagnose(list_source(records_of(cause=cause, seed=101))))
        for cause in ("bad_shard", "lr_change", None)
    }
    assert len(hashes) == 3


def test_a_world_of_unknown_size_waits_for_the_late_rank(records_of, list_source):
    records = [r for r in records_of(cause="bad_shard", seed=102) if not isinstance(r, RunEvent)]
    late = sorted(records, key=lambda r: (r.step + 30 * r.rank, r.rank))
    source = list_source(records)
    assert run_through(late, source) == verdict_hash(diagnose(source))


def test_a_silent_rank_does_not_hold_the_frames_back(records_of):
    records = [r for r in records_of(cause="bad_shard", seed=103) if not (r.rank == 0 and r.step > 150)]
    engine = Engine()
    for record in records:
        engine.feed_quietly(record)
    assert engine.last_step is not None
    assert engine.last_step > 300


def test_live_findings_come_two_steps_after_the_alarm(records_of):
    engine = Engine()
    seen = None
    for record in records_of(cause="bad_shard", seed=104):
        if any(f.verdict == "bad_shard" for f in engine.feed(record)):
            seen = record.step
            break
    assert seen is not None
    assert 300 < seen <= 304


def test_a_restart_rewinds_the_baseline_and_heals(records_of, list_source):
    first = records_of(cause="bad_shard", seed=105)
    second = records_of(cause=None, seed=105, attempt=1, first_step=250)
    report = diagnose(list_source([*first, *second]))
    spike = next(f for f in report.findings if f.kind == "loss_spike")
    assert spike.verdict == "bad_shard"
    assert spike.attempt == 0
    assert spike.details["healed_by_attempt"] == 1
    assert "Attempt 1" in spike.summary
    assert [f.onset_step for f in report.findings if f.kind == "restart"] == [250]
    assert report.attempts[0].superseded_steps == 420 - 250
    assert not [f for f in report.findings if f.attempt == 1 and f.severity is not Severity.INFO]


def test_a_restart_with_the_same_fault_is_found_again(records_of, list_source):
    first = records_of(cause="bad_shard", seed=106)
    second = records_of(cause="bad_shard", seed=106, attempt=1, first_step=250)
    report = diagnose(list_source([*first, *second]))
    spikes = [f for f in report.findings if f.kind == "loss_spike"]
    assert {f.attempt for f in spikes} == {0, 1}
    assert all("healed_by_attempt" not in f.details for f in spikes)


def test_interleaved_attempts_agree_with_ordered_ones(records_of, list_source):
    both = [*records_of(cause="bad_shard", seed=107), *records_of(seed=107, attempt=1, first_step=250)]
    source = list_source(both)
    # rank 0 is already in the new attempt while rank 1 still delivers the end of the old one
    tail = [r for r in both if r.attempt == 0 and r.rank == 1 and r.step > 400]
    head = [r for r in both if r.attempt == 1 and r.rank == 0 and r.step < 270]
    rest = [r for r in both if r.attempt == 1 and not (r.rank == 0 and r.step < 270)]
    start = [r for r in both if r.attempt == 0 and not (r.rank == 1 and r.step > 400)]
    assert run_through([*start, *head, *tail, *rest], source) == verdict_hash(diagnose(source))


def test_window_and_attempt_restrict_what_is_judged(source_of):
    source = source_of(cause="bad_shard", seed=108)
    assert not [f for f in diagnose(source, window=(50, 250)).findings if f.suspects]
    assert [f for f in diagnose(source, window=(280, 330)).findings if f.suspects]
    with pytest.raises(NoUsableDataError):
        diagnose(source, attempt=3)


def test_probabilities_add_to_one(source_of):
    report = diagnose(source_of(cause="clip_breach", seed=109))
    for finding in report.findings:
        if finding.suspects:
            assert sum(s.probability for s in finding.suspects) == pytest.approx(1.0, abs=1e-9)
            assert {"undetermined"} <= {s.suspect for s in finding.suspects}
