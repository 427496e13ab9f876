import dataclasses

import pytest
import torch

from runhealth.storage.errors import ConfigError
from runhealth.storage.reader import RunReader
from runhealth.storage.records import EventKind, RunEvent
from runhealth.trainer.config import FaultSpec, TrainConfig
from runhealth.trainer.data import BatchPlan, shard_name
from runhealth.trainer.fault import Fault, FaultContext, create, registry
from runhealth.trainer.model import build
from runhealth.trainer.precision.fp8 import scales


def make(config: TrainConfig, text: str, rank: int = 0) -> Fault:
    plan = BatchPlan(data=config.data, seed=config.seed, world=config.world)
    return create(FaultSpec.parse(text), FaultContext(config=config, plan=plan, rank=rank))


CAUSES = {
    "adam_staleness", "bad_shard", "benign", "checkpoint_io", "clip_breach", "comm_straggler", "compute_straggler",
    "data_order", "dataloader_stall", "dead_layer", "dead_rank", "eval_drift", "fp_overflow", "gc_pause", "hang",
    "logit_growth", "loss_scale", "lr_change", "memory", "not_stepping", "optimizer_state", "replica_desync",
    "reporting_artifact", "router_collapse", "silent_corruption",
}  # fmt: skip


def test_every_fault_has_a_label_in_the_words_of_the_suspects(tiny: TrainConfig):
    assert {make(tiny, name).label().cause for name in registry()} == CAUSES
    for name in registry():
        label = make(tiny, f"{name}:step=100").label()
        assert label.fault == name
        assert label.onset_step <= 100 + tiny.checkpoint.every
        assert label.last_step is None or label.last_step >= label.onset_step
        assert label.ranks
        assert set(label.ranks) <= set(range(tiny.world))


def test_bad_shard_changes_one_shard_and_says_which(tiny: TrainConfig):
    fault = make(tiny, "bad_shard:step=100,rank=1,mode=noise,severity=0.5")
    label = fault.label()
    plan = BatchPlan(data=tiny.data, seed=tiny.seed, world=tiny.world)
    assert label.shards == (shard_name(plan.shard_of(100, 1)),)
    assert (label.onset_step, label.last_step) == (plan.visit_of(100).start, plan.visit_of(100).stop - 1)
    blob = bytes(range(256)) * 8
    assert fault.tamper("9999", blob) == blob
    bad = fault.tamper(label.shards[0], blob)
    assert len(bad) == len(blob)
    assert bad[1024:] == blob[1024:]
    assert bad[:1024] != blob[:1024]
    assert bad == fault.tamper(label.shards[0], blob)
    assert set(make(tiny, "bad_shard:step=100,mode=zeros").tamper(label.shards[0], blob)) == {0}
    assert make(tiny, "bad_shard:step=100,mode=repeat").tamper(label.shards[0], blob)[16:32] == blob[:16]
    shuffled = make(tiny, "bad_shard:step=100,mode=shuffle").tamper(label.shards[0], blob)
    assert shuffled != blob
    assert sorted(shuffled) == sorted(blob)


def test_lr_change_acts_in_its_window_only(tiny: TrainConfig):
    fault = make(tiny, "lr_change:step=10,steps=5,severity=8")
    assert [fault.learning_rate(step, 1.0) for step in (9, 10, 14, 15)] == [1.0, 8.0, 8.0, 1.0]
    assert make(tiny, "lr_change:step=10").learning_rate(10_000, 1.0) == 20.0


def test_stale_amax_shrinks_the_history_once_and_freezes_it(tiny: TrainConfig):
    model = build(tiny.model, tiny.data.seq_len, 0)
    tokens = torch.arange(32).view(2, 16)
    model(tokens)
    before = {name: scale.history.clone() for name, scale in scales(model)}
    fault = make(tiny, "fp8_stale_amax:step=10,severity=32,tensor=down.x")
    fault.before_step(9, model)
    assert not any(scale.frozen for _, scale in scales(model))
    for step in (10, 11, 12):
        fault.before_step(step, model)
        model(tokens)
    for name, scale in scales(model):
        if name == "blocks.0.down.x":
            assert torch.equal(scale.history, before[name] / 32)
            assert scale.frozen
            assert scale.overflow_count > 0
        else:
            assert not scale.frozen


def _sent(config: TrainConfig, step: int, rank: int, loss_scale: float = 1.0) -> torch.Tensor:
    """What the rank sends into the reduce where its own gradient is zero."""
    model = build(config.model, config.data.seq_len, 0)
    fault = make(config, "clip_breach:step=10,steps=2,severity=50", rank)
    fault.attach(model)
    fault.loss_scale = loss_scale
    fault.before_step(step, model)
    sum((parameter * 0.0).sum() for parameter in model.parameters()).backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters()]
    fault.after_backward(step, model)
    assert all(torch.equal(p.grad.flatten(), g) for p, g in zip(model.parameters(), gradients, strict=True))
    return torch.cat(gradients)


def test_clip_breach_adds_noise_to_each_rank_and_its_mean_has_the_norm_it_promises(tiny: TrainConfig):
    for step, expected in ((9, 0.0), (10, 50.0), (11, 50.0), (12, 0.0)):
        ranks = [_sent(tiny, step, rank) for rank in range(tiny.dp)]
        assert float(torch.stack(ranks).mean(0).norm()) == pytest.approx(expected, rel=0.05)
        if expected:
            assert [float(rank.norm()) for rank in ranks] == pytest.approx([50 * tiny.dp**0.5] * tiny.dp, rel=0.05)
            assert abs(float(torch.corrcoef(torch.stack(ranks[:2]))[0, 1])) < 0.05  # independent draws
            assert torch.equal(ranks[1], _sent(tiny, step, 1))
    assert not torch.equal(_sent(tiny, 10, 0), _sent(tiny, 11, 0))
    torch.testing.assert_close(_sent(tiny, 10, 0, loss_scale=1024.0) / 1024.0, _sent(tiny, 10, 0))


def test_clip_breach_disturbs_the_result_where_no_rank_has_the_whole_gradient(tiny: TrainConfig):
    sharded = dataclasses.replace(tiny, parallel=dataclasses.replace(tiny.parallel, kind="zero3"))
    model = build(sharded.model, sharded.data.seq_len, 0)
    fault = make(sharded, "clip_breach:step=10,steps=2,severity=50")
    fault.attach(model)
    for step, expected in ((9, 0.0), (10, 50.0), (11, 50.0), (12, 0.0)):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        fault.after_backward(step, model)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert float(norm) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_such", "expected one of adam_staleness"),
        ("bad_shard:shard=3", "unknown parameter 'shard'"),
        ("bad_shard:step=soon", "expected step as int, met 'soon'"),
        ("bad_shard:mode=rot13", "expected mode out of noise"),
        ("bad_shard:rank=2", "expected a rank below 2"),
        ("fp8_stale_amax:tensor=nope", "expected tensor to end one of"),
    ],
)
def test_wrong_faults_are_refused(tiny: TrainConfig, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        make(tiny, text)
    with pytest.raises(ConfigError, match="name:key=value"):
        FaultSpec.parse("bad_shard:noise")


def test_a_run_writes_the_label_at_the_onset_and_the_damage_is_in_its_records(tiny, store, train):
    config = dataclasses.replace(
        tiny, steps=10, faults=(FaultSpec(name="bad_shard", params={"step": 3, "rank": 1, "mode": "zeros"}),)
    )
    train("bad", config)
    with RunReader.open("bad", store.root) as reader:
        events = [r for r in reader.records() if isinstance(r, RunEvent) and r.kind == EventKind.FAULT_INJECTED]
        batches = reader.sql("SELECT rank, shard_hash = manifest_hash AS intact, token_entropy FROM batches")
    label = make(config, "bad_shard:step=3,rank=1,mode=zeros").label()
    assert [(event.step, event.data["cause"], event.data["shards"]) for event in events] == [
        (label.onset_step, "bad_shard", list(label.shards))
    ]
    assert {(rank, intact, entropy == 0) for rank, intact, entropy in batches.iter_rows()} == {
        (0, True, False),
        (1, False, True),
    }
