"""What each fault does at the hooks it uses: on its rank and in its steps, and nowhere else."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from runhealth.diagnose.plans import SkipRange
from runhealth.storage.errors import ConfigError
from runhealth.trainer.config import FaultSpec, TrainConfig
from runhealth.trainer.data import BatchPlan, shard_name
from runhealth.trainer.fault import Fault, FaultContext, create
from runhealth.trainer.gain import Gain
from runhealth.trainer.model import Transformer, build, next_byte_loss
from runhealth.trainer.skips import SkipSet


def make(config: TrainConfig, text: str, rank: int = 0) -> Fault:
    plan = BatchPlan(data=config.data, seed=config.seed, world=config.world)
    return create(FaultSpec.parse(text), FaultContext(config=config, plan=plan, rank=rank))


@pytest.fixture
def model(tiny: TrainConfig) -> Transformer:
    return build(tiny.model, tiny.data.seq_len, 0)


@pytest.fixture
def rows(tiny: TrainConfig) -> Tensor:
    return torch.arange(4 * (tiny.data.seq_len + 1)).view(4, -1) % 251


def backward(model: Transformer, rows: Tensor) -> float:
    model.zero_grad()
    loss = next_byte_loss(model(rows[:, :-1]), rows[:, 1:])
    loss.backward()
    return loss.item()


def gradients(model: Transformer) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def weights(model: Transformer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def optimizer_of(model: Transformer, rows: Tensor) -> torch.optim.AdamW:
    """AdamW with moments of two steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        backward(model, rows)
        optimizer.step()
    return optimizer


def step(fault: Fault, at: int, model: Transformer, optimizer: torch.optim.Optimizer) -> None:
    fault.before_optimizer(at, model, optimizer)
    optimizer.step()
    fault.after_optimizer(at, model, optimizer)


# -------------------------------------------------------------------------------------------------------------- data


def test_data_order_reads_what_another_step_would_have_read(tiny):
    plan = BatchPlan(data=tiny.data, seed=tiny.seed, world=tiny.world)
    for text, source in (("mode=repeated,severity=5", 15), ("mode=skipped,severity=7", 27), ("mode=restarted", 0)):
        fault = make(tiny, f"data_order:step=20,{text}", rank=1)
        assert fault.parts(19, plan.batch(19, 1)) == plan.batch(19, 1)
        assert fault.parts(20, plan.batch(20, 1)) == plan.batch(source, 1)
    honest, silent = make(tiny, "data_order:step=20,severity=5"), make(tiny, "data_order:step=20,severity=5,honest=0")
    samples_a_step = tiny.dp * tiny.data.batch_size
    assert honest.logged(20, {"consumed_samples": 1000})["consumed_samples"] == 1000 - 5 * samples_a_step
    assert silent.logged(20, {"consumed_samples": 1000})["consumed_samples"] == 1000


def test_a_duplicate_rank_reads_its_neighbours_batch(tiny):
    plan = BatchPlan(data=tiny.data, seed=tiny.seed, world=tiny.world)
    assert make(tiny, "rank_duplicate:step=3,rank=1", rank=1).parts(3, plan.batch(3, 1)) == plan.batch(3, 0)
    assert make(tiny, "rank_duplicate:step=3,rank=1", rank=0).parts(3, plan.batch(3, 0)) == plan.batch(3, 0)


def test_other_text_takes_the_last_rows_of_a_batch(tiny):
    plan = BatchPlan(data=tiny.data, seed=tiny.seed, world=tiny.world)
    clean = plan.batch(5, 1)
    fault = make(tiny, "hard_batch:step=5,steps=1,rank=1,shard=8,severity=0.5", rank=1)
    mixed = fault.parts(5, clean)
    assert [part.shard for part in mixed] == [clean[0].shard, 8]
    assert [part.positions for part in mixed] == [(0, 1), (2, 3)]
    assert sum((part.samples for part in mixed), ()) == clean[0].samples
    assert fault.parts(6, clean) == clean
    assert make(tiny, "hard_batch:step=5,rank=0,shard=8", rank=1).parts(5, clean) == clean


def test_shifted_labels_are_one_position_off_on_their_share_of_rows(tiny, rows):
    inputs, labels = rows[:, :-1], rows[:, 1:]
    fault = make(tiny, "label_shift:step=5,steps=2,rank=1,severity=0.5", rank=1)
    _, shifted = fault.tokens(5, inputs, labels)
    assert torch.equal(shifted[:2, :-1], labels[:2, 1:])
    assert torch.equal(shifted[2:], labels[2:])
    assert torch.equal(fault.tokens(7, inputs, labels)[1], labels)


def test_a_nan_batch_spoils_the_gain_of_some_samples_of_one_rank_in_one_step(tiny):
    plan = BatchPlan(data=tiny.data, seed=tiny.seed, world=tiny.world)
    for rank, at, bad in ((1, 5, 3), (1, 6, 0), (0, 5, 0)):
        fault = make(tiny, "nan_batch:step=5,rank=1,severity=3", rank=rank)
        fault.parts(at, plan.batch(at, rank))
        gain = fault.gain(at, torch.ones(4))
        assert gain.isnan().tolist() == [True] * bad + [False] * (4 - bad)
        assert gain[bad:].tolist() == [1.0] * (4 - bad)


def test_a_nan_goes_with_its_sample(tiny):
    plan = BatchPlan(data=tiny.data, seed=tiny.seed, world=tiny.world)
    fault = make(tiny, "nan_batch:step=5,rank=1,severity=1", rank=1)
    clean = plan.batch(5, 1)
    bad = next(part.samples[part.positions.index(0)] for part in clean if 0 in part.positions)
    skip = SkipRange(shard=shard_name(clean[0].shard), first_sample=bad, last_sample=bad)
    fault.parts(5, dataclasses.replace(plan, skips=SkipSet().add([skip])).batch(5, 1))
    assert fault.gain(5, torch.ones(4)).tolist() == [1.0] * 4


def test_gains_multiply_their_own_samples_through_all_micro_batches_in_training_only(tiny, rows):
    model = build(tiny.model, tiny.data.seq_len, 0)
    clean = model(rows[:, :-1])
    gain = Gain(model.embed)
    assert torch.equal(model(rows[:, :-1]), clean)  # none is set
    gain.set(torch.ones(4))
    assert torch.equal(model(rows[:, :-1]), clean)
    for size in (4, 2, 1):
        gain.set(torch.tensor([1.0, 1.0, math.nan, 1.0]))
        logits = torch.cat([model(part) for part in rows[:, :-1].split(size)])
        assert logits.isnan().flatten(1).any(1).tolist() == [False, False, True, False]
        assert model.eval()(rows[:, :-1]).isfinite().all()
        model.train()


def test_drifting_evaluation_changes_letters_of_a_share_of_the_samples(tiny):
    tokens = torch.tensor([[65, 98, 48], [65, 98, 48]])
    fault = make(tiny, "eval_drift:step=5,severity=0.5")
    assert fault.heldout(5, tokens).tolist() == [[97, 66, 48], [65, 98, 48]]
    assert torch.equal(fault.heldout(4, tokens), tokens)


# --------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize(
    ("text", "rank", "changed"),
    [
        ("silent_corruption:step=5,steps=1,rank=1,mode=scale,severity=100", 1, "blocks.0"),
        ("silent_corruption:step=5,steps=1,rank=1,mode=sign,severity=1", 1, ""),
        ("silent_corruption:step=5,steps=1,rank=1,mode=exponent,severity=4", 1, "blocks.0"),
        ("silent_corruption:step=5,steps=1,rank=1,mode=scale,severity=100", 0, None),
        ("dead_layer:step=5,layer=blocks.0", 0, "blocks.0"),
    ],
)
def test_gradients_change_before_the_reduce_where_the_fault_says(tiny, rows, text, rank, changed):
    clean = build(tiny.model, tiny.data.seq_len, 0)
    backward(clean, rows)
    model = build(tiny.model, tiny.data.seq_len, 0)
    fault = make(tiny, text, rank=rank)
    fault.attach(model)
    fault.before_step(4, model)
    backward(model, rows)
    for name, gradient in gradients(clean).items():
        assert torch.equal(gradients(model)[name], gradient)  # not yet
    model = build(tiny.model, tiny.data.seq_len, 0)
    fault.attach(model)
    fault.before_step(5, model)
    backward(model, rows)
    differing = {
        name for name, gradient in gradients(clean).items() if not torch.equal(gradients(model)[name], gradient)
    }
    if changed is None:
        assert not differing
    else:
        assert differing
        assert all(name.startswith(changed) for name in differing)


def test_an_exponent_flip_makes_a_gradient_enormous(tiny, model, rows):
    fault = make(tiny, "silent_corruption:step=5,rank=1,mode=exponent,severity=4", rank=1)
    fault.attach(model)
    fault.before_step(5, model)
    backward(model, rows)
    assert max(float(g.abs().max()) for g in gradients(model).values()) > 1e6


def test_a_dead_layer_gets_no_gradient(tiny, model, rows):
    fault = make(tiny, "dead_layer:step=5,layer=blocks.0")
    fault.attach(model)
    fault.before_step(5, model)
    backward(model, rows)
    assert all(not g.any() for name, g in gradients(model).items() if name.startswith("blocks.0"))
    assert any(g.any() for name, g in gradients(model).items() if not name.startswith("blocks.0"))


def test_a_corrupt_reduce_adds_noise_of_the_norm_it_promises_to_each_bucket_alike_on_all_ranks(tiny, model, rows):
    backward(model, rows)
    before = gradients(model)
    flat = torch.cat([g.flatten() for g in before.values()])
    faults = [make(tiny, "silent_corruption:step=5,mode=reduce,severity=4", rank=rank) for rank in range(2)]
    found = []
    for fault in faults:
        fault.after_backward(5, model)  # this is not where it acts
        for bucket in range(2):
            found.append(flat.clone())
            fault.reduced(5, bucket, found[-1])
    assert all(torch.equal(g, before[name]) for name, g in gradients(model).items())
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])
    assert float((found[0] - flat).norm() / flat.norm()) == pytest.approx(4.0, rel=0.1)
    faults[0].reduced(4, 0, flat)
    assert torch.equal(flat, torch.cat([g.flatten() for g in before.values()]))


def test_a_corrupt_reduce_of_sharded_gradients_shows_in_the_gradients(tiny, model, rows):
    backward(model, rows)
    before = gradients(model)
    sharded = dataclasses.replace(tiny, parallel=dataclasses.replace(tiny.parallel, kind="zero3"))
    make(sharded, "silent_corruption:step=5,mode=reduce,severity=4").after_backward(5, model)
    noise = torch.cat([(g - before[name]).flatten() for name, g in gradients(model).items()])
    clean = torch.cat([g.flatten() for g in before.values()])
    assert float(noise.norm() / clean.norm()) == pytest.approx(4.0, rel=0.1)


def test_fp16_overflow_becomes_infinite_only_while_the_scale_is_high(tiny, rows):
    fault = make(tiny, "fp16_overflow:step=5,severity=8")
    for scale, infinite in ((2.0**16, True), (1.0, False)):
        model = build(tiny.model, tiny.data.seq_len, 0)
        fault.attach(model)
        fault.before_step(5, model)
        (next_byte_loss(model(rows[:, :-1]), rows[:, 1:]) * scale).backward()
        assert bool(model.get_parameter("head.weight").grad.isinf().any()) is infinite
    assert make(tiny, "fp16_overflow:steps=1").label().cause == "benign"


# --------------------------------------------------------------------------------------------- optimizer and weights


def test_lost_optimizer_state(tiny, model, rows):
    optimizer = optimizer_of(model, rows)
    before = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    fault = make(tiny, "optimizer_state_lost:step=5,mode=scaled,severity=100")
    fault.after_load(4, model, optimizer)
    assert all(torch.equal(optimizer.state[p]["exp_avg_sq"], s["exp_avg_sq"]) for p, s in before.items())
    fault.after_load(5, model, optimizer)
    assert all(torch.allclose(optimizer.state[p]["exp_avg_sq"] * 100, s["exp_avg_sq"]) for p, s in before.items())
    make(tiny, "optimizer_state_lost:step=5,mode=second").after_load(5, model, optimizer)
    assert all(not s["exp_avg_sq"].any() and s["exp_avg"].any() and s["step"] == 2 for s in optimizer.state.values())
    make(tiny, "optimizer_state_lost:step=5,mode=both").after_load(5, model, optimizer)
    assert all(not s["exp_avg"].any() and s["step"] == 0 for s in optimizer.state.values())


def test_stale_moments_stay_in_the_named_tensors_alone(tiny, model, rows):
    optimizer = optimizer_of(model, rows)
    embed = optimizer.state[model.get_parameter("embed.weight")]
    old = embed["exp_avg_sq"].clone()
    other = optimizer.state[model.get_parameter("head.weight")]["exp_avg_sq"].clone()
    fault = make(tiny, "adam_staleness:step=5,steps=2,severity=100,tensor=embed")
    for at in (5, 6):
        fault.before_optimizer(at, model, optimizer)
        assert torch.equal(embed["exp_avg_sq"], old / 100)
        embed["exp_avg_sq"].add_(1.0)
    fault.before_optimizer(7, model, optimizer)
    assert not torch.equal(embed["exp_avg_sq"], old / 100)
    assert torch.equal(optimizer.state[model.get_parameter("head.weight")]["exp_avg_sq"], other)


def test_wrong_beta2_from_its_step_on(tiny, model, rows):
    optimizer = optimizer_of(model, rows)
    fault = make(tiny, "wrong_beta2:step=5,severity=0.1")
    fault.before_optimizer(4, model, optimizer)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    fault.before_optimizer(5, model, optimizer)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.1)


@pytest.mark.parametrize(
    ("text", "rank", "still"),
    [
        ("not_stepping:step=5", 0, lambda names: names),
        ("not_stepping:step=5,severity=0.3", 0, lambda names: names[-round(0.3 * len(names)) :]),
        ("replica_desync:step=5,rank=1", 1, lambda names: names),
        ("replica_desync:step=5,rank=1", 0, lambda _: []),
        ("not_stepping:step=6", 0, lambda _: []),
    ],
)
def test_updates_that_are_not_applied(tiny, model, rows, text, rank, still: Callable[[list[str]], list[str]]):
    optimizer = optimizer_of(model, rows)
    before = weights(model)
    step(make(tiny, text, rank=rank), 5, model, optimizer)
    unmoved = [name for name, value in weights(model).items() if torch.allclose(value, before[name], rtol=0, atol=1e-9)]
    assert unmoved == still(list(before))


def test_drift_adds_noise_of_a_share_of_the_update(tiny, model, rows):
    optimizer = optimizer_of(model, rows)
    before = weights(model)
    optimizer.step()
    clean = weights(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    fault = make(tiny, "replica_desync:step=5,rank=1,mode=drift,severity=0.5", rank=1)
    fault.before_optimizer(5, model, optimizer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(clean[name])
    fault.after_optimizer(5, model, optimizer)
    name = "head.weight"
    noise = (weights(model)[name] - clean[name]).square().mean().sqrt()
    update = (clean[name] - before[name]).square().mean().sqrt()
    assert float(noise / update) == pytest.approx(0.5, rel=0.1)


def test_weights_of_one_replica_flip_once(tiny, model, rows):
    optimizer = optimizer_of(model, rows)
    fault = make(tiny, "silent_corruption:step=5,rank=1,mode=weights,severity=8", rank=1)
    before = weights(model)
    fault.after_optimizer(5, model, optimizer)
    changed = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert len(changed) == 1
    (name,) = changed
    assert torch.equal(weights(model)[name].abs(), before[name].abs())
    after = weights(model)
    fault.after_optimizer(6, model, optimizer)
    assert all(torch.equal(value, after[name]) for name, value in weights(model).items())


def test_logits_grow_by_a_factor_a_step(tiny, model, rows):
    optimizer = optimizer_of(model, rows)
    before = weights(model)
    fault = make(tiny, "logit_growth:step=5,steps=2,mode=output,severity=0.1")
    for at in range(4, 9):
        fault.before_optimizer(at, model, optimizer)
    assert torch.allclose(weights(model)["head.weight"], before["head.weight"] * 1.1**2)
    make(tiny, "logit_growth:step=5,mode=attention,severity=0.1").before_optimizer(5, model, optimizer)
    qkv = before["blocks.0.qkv.weight"]
    third = len(qkv) // 3
    assert torch.allclose(weights(model)["blocks.0.qkv.weight"][:third], qkv[:third] * 1.1)
    assert torch.equal(weights(model)["blocks.0.qkv.weight"][third:], qkv[third:])


def test_a_corrupt_checkpoint_loads_zeros(tiny, model, rows):
    optimizer = optimizer_of(model, rows)
    make(tiny, "checkpoint_corrupt:step=5,severity=0.25").after_load(5, model, optimizer)
    head = weights(model)["head.weight"]
    assert int((head == 0).all(dim=1).sum()) == round(0.25 * len(head))


# ---------------------------------------------------------------------------------------------------- time and memory


@pytest.mark.parametrize(
    ("text", "phase", "slow"),
    [
        ("compute_straggler:step=5,steps=3,rank=1,severity=0.3", "backward", {1}),
        ("compute_straggler:step=5,steps=3,mode=stage,severity=0.3", "forward", {1}),
        ("comm_straggler:step=5,steps=3,rank=0,severity=0.3", "comm", {0, 1}),
        ("dataloader_stall:step=5,steps=3,rank=1,share=1.0,severity=0.3", "data", {1}),
        ("dataloader_stall:step=5,steps=3,share=1.0,severity=0.3", "data", {0, 1}),
    ],
)
def test_stalls_come_on_their_ranks_in_their_steps_and_phase(tiny, text, phase, slow):
    for rank in range(tiny.world):
        fault = make(tiny, text, rank=rank)
        stalled = [at for at in range(4, 10) if fault.stall_s(at, phase) > 0]
        assert stalled == ([5, 6, 7] if rank in slow else [])
        assert all(fault.stall_s(at, "gc") == 0 for at in range(4, 10))


def test_long_sequences_are_slow_and_show_in_the_lengths(tiny):
    faults = [make(tiny, "compute_straggler:step=5,mode=length,severity=0.5", rank=rank) for rank in range(tiny.world)]
    slow = {(at, rank) for at in range(5, 60) for rank, fault in enumerate(faults) if fault.stall_s(at, "forward") > 0}
    longer = {
        (at, rank)
        for at in range(5, 60)
        for rank, fault in enumerate(faults)
        if fault.logged(at, {"sum_len_sq": 100})["sum_len_sq"] > 100
    }
    assert slow == longer
    assert {rank for _, rank in slow} == set(range(tiny.world))
    assert all(len([one for one in slow if one[0] == at]) <= 1 for at in range(5, 60))


def test_garbage_pauses_grow_and_come_at_different_steps_on_different_ranks(tiny):
    faults = [make(tiny, "gc_pause:step=5,every=8,severity=1", rank=rank) for rank in range(tiny.world)]
    pauses = [[at for at in range(5, 60) if fault.stall_s(at, "gc") > 0] for fault in faults]
    assert all(len(found) >= 5 for found in pauses)
    assert pauses[0] != pauses[1]
    first, last = pauses[0][0], pauses[0][-1]
    assert faults[0].stall_s(last, "gc") > faults[0].stall_s(first, "gc")


def test_memory_grows_by_the_same_amount_each_step(tiny):
    fault = make(tiny, "memory_growth:step=5,rank=1,severity=100", rank=1)
    assert [fault.held_bytes(at) for at in (4, 5, 6, 7)] == [0, 100, 200, 300]
    assert make(tiny, "memory_growth:step=5,rank=1,severity=100", rank=0).held_bytes(9) == 0


def test_ranks_that_end(tiny):
    assert [make(tiny, "dead_rank:step=5,rank=1", rank=1).ends(at) for at in (4, 5)] == ["", "dead"]
    assert [make(tiny, "hang:step=5,rank=1", rank=rank).ends(5) for rank in (0, 1)] == ["", "hang"]


def test_schedules_that_change_on_purpose_are_smooth(tiny):
    decay = make(tiny, "lr_schedule:step=10,steps=10,mode=decay,severity=0.5")
    rates = [decay.learning_rate(at, 1.0) for at in range(8, 24)]
    assert rates[:2] == [1.0, 1.0]
    assert rates[-1] == pytest.approx(0.5)
    assert max(a / b for a, b in itertools.pairwise(rates)) < 1.12
    rewarm = make(tiny, "lr_schedule:step=10,steps=10,mode=rewarm,severity=1.0")
    assert rewarm.learning_rate(10, 1.0) < 0.2
    assert rewarm.learning_rate(30, 1.0) == pytest.approx(1.0)


@pytest.mark.parametrize(("mode", "shown"), [("zero", 0.0), ("mean", 2.0), ("repeat", 3.0), ("absent", None)])
def test_what_a_lying_log_shows_for_nan(tiny, mode, shown):
    fault = make(tiny, f"lying_log:step=5,mode={mode}")
    for at, loss in ((3, 1.0), (4, 3.0)):
        assert fault.logged(at, {"loss": loss}) == {"loss": loss}
    assert fault.logged(5, {"loss": math.nan}).get("loss") == shown


def test_what_a_lying_log_hides_is_real(tiny, model, rows):
    fault = make(tiny, "lying_log:step=5")
    fault.before_step(5, model)
    assert math.isnan(backward(model, rows))


def test_a_router_is_needed_to_collapse(tiny, model):
    with pytest.raises(ConfigError, match="expected a model with a router"):
        make(tiny, "router_collapse").attach(model)
