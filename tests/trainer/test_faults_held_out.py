"""The faults of the held-out kinds at the hooks they use: on their rank and in their steps, and nowhere else."""

import pytest
import torch
from torch import Tensor

from runhealth.storage.errors import ConfigError
from runhealth.trainer.config import FaultSpec, TrainConfig
from runhealth.trainer.data import BatchPlan
from runhealth.trainer.fault import Fault, FaultContext, create
from runhealth.trainer.model import Transformer, build, next_byte_loss


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


def test_a_looping_loader_reads_the_same_batches_in_turn(tiny):
    plan = BatchPlan(data=tiny.data, seed=tiny.seed, world=tiny.world)
    fault = make(tiny, "loader_loop:step=5,rank=1,severity=2", rank=1)
    read = [fault.parts(at, plan.batch(at, 1)) for at in range(4, 9)]
    assert read == [plan.batch(at, 1) for at in (4, 5, 6, 5, 6)]
    assert fault.label().onset_step == 7  # the first batch that comes again
    other = make(tiny, "loader_loop:step=5,rank=1,severity=2", rank=0)
    assert other.parts(8, plan.batch(8, 0)) == plan.batch(8, 0)


def test_another_tokenizer_permutes_the_ids_of_its_shard_alone(tiny):
    plan = BatchPlan(data=tiny.data, seed=tiny.seed, world=tiny.world)
    fault = make(tiny, "wrong_tokenizer:step=5,rank=1,severity=1", rank=1)
    label = fault.label()
    tokens = torch.arange(4 * (tiny.data.seq_len + 1)).view(4, -1) % 256
    for rank in range(tiny.world):  # whoever reads the shard
        fault.parts(5, plan.batch(5, rank))
        inputs, labels = fault.tokens(5, tokens[:, :-1], tokens[:, 1:])
        changed = not torch.equal(inputs, tokens[:, :-1])
        assert changed is (rank == 1)
        assert torch.equal(inputs[:, 1:], labels[:, :-1])  # inputs and labels by the same table
    assert label.shards
    assert label.onset_step <= 5 <= (label.last_step or 0)
    ids = torch.arange(256).view(1, -1).expand(4, -1)
    fault.parts(5, plan.batch(5, 1))
    assert sorted(fault.tokens(5, ids, ids)[0][0].tolist()) == list(range(256))


def test_another_tokenizer_takes_its_share_of_the_samples(tiny):
    fault = make(tiny, "wrong_tokenizer:step=5,severity=0.5")
    assert len(fault.samples) == round(0.5 * tiny.data.samples_per_shard)


def test_remapped_ranks_read_the_same_batch_between_them(tiny):
    plan = BatchPlan(data=tiny.data, seed=tiny.seed, world=tiny.world)
    faults = [make(tiny, "rank_remap:step=5", rank=rank) for rank in range(tiny.world)]
    assert [fault.parts(4, plan.batch(4, rank)) for rank, fault in enumerate(faults)] == [
        plan.batch(4, rank) for rank in range(tiny.world)
    ]
    assert [fault.parts(5, plan.batch(5, rank)) for rank, fault in enumerate(faults)] == [
        plan.batch(5, rank) for rank in (1, 0)
    ]


def test_padding_fills_the_end_of_every_held_out_sample(tiny):
    tokens = torch.arange(1, 9).view(2, 4)
    fault = make(tiny, "eval_padding:step=5,severity=0.5")
    assert fault.heldout(5, tokens).tolist() == [[1, 2, 0, 0], [5, 6, 0, 0]]
    assert torch.equal(fault.heldout(4, tokens), tokens)


# --------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize(("rank", "at", "changed"), [(1, 5, True), (1, 4, False), (0, 5, False)])
def test_a_wrong_lane_changes_the_loss_of_one_rank(tiny, rows, rank, at, changed):
    clean = backward(build(tiny.model, tiny.data.seq_len, 0), rows)
    model = build(tiny.model, tiny.data.seq_len, 0)
    fault = make(tiny, "wrong_lane:step=5,rank=1,severity=100", rank=rank)
    fault.attach(model)
    fault.before_step(at, model)
    assert (backward(model, rows) != clean) is changed


def test_a_wrong_lane_spares_the_evaluation(tiny, model, rows):
    clean = model(rows[:, :-1])
    fault = make(tiny, "wrong_lane:step=5,rank=1", rank=1)
    fault.attach(model)
    fault.before_step(5, model)
    seen: list[Tensor] = []
    model.get_submodule("blocks.0.out").register_forward_hook(lambda _m, _a, out: seen.append(out.detach()))
    model(rows[:, :-1])
    model.eval()
    assert torch.allclose(model(rows[:, :-1]), clean)
    wrong, right = seen
    assert int(((wrong - right).abs() > 1e-3).flatten(0, 1).any(dim=0).sum()) == 1  # one channel


def test_a_stale_bucket_holds_the_reduced_gradient_of_the_step_before(tiny):
    fault = make(tiny, "stale_bucket:step=5,severity=0.5")
    for at in range(3, 9):
        for bucket, size in ((0, 10), (1, 4)):
            buffer = torch.full((size,), float(at + 100 * bucket))
            fault.reduced(at, bucket, buffer)
            stale = [at - 1 + 100 * bucket] * (size // 2) if fault.loses(at) else [at + 100 * bucket] * (size // 2)
            assert buffer.tolist() == [at + 100 * bucket] * (size // 2) + stale
    assert fault.loses(5)
    assert not fault.loses(4)


@pytest.mark.parametrize(("rank", "at", "share", "own"), [(1, 5, 1.0, True), (1, 5, 0.3, True), (0, 5, 1.0, False)])
def test_a_local_gradient_takes_the_place_of_the_reduced_one(tiny, model, rows, rank, at, share, own):
    fault = make(tiny, f"local_gradient:step=5,rank=1,severity={share}", rank=rank)
    fault.attach(model)
    fault.before_step(at, model)
    backward(model, rows)
    mine = gradients(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # what the reduce gave
    fault.after_backward(at, model)
    names = list(mine)
    hit = names[len(names) - round(share * len(names)) :] if own else []
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, mine[name] if name in hit else torch.zeros_like(gradient))


def test_a_closed_gate_takes_the_gradient_of_its_layer(tiny, model, rows):
    backward(model, rows)
    before = gradients(model)
    fault = make(tiny, "closed_gate:step=5,block=blocks.0,severity=60")
    fault.attach(model)
    fault.before_step(5, model)
    backward(model, rows)
    for name, gradient in gradients(model).items():
        dead = name.startswith(fault.label().layers)
        assert (float(gradient.norm()) < 1e-6 * float(before[name].norm())) is dead, name
    assert any(name.startswith(fault.label().layers) for name in before)
    with pytest.raises(ConfigError, match="expected a block"):
        make(tiny, "closed_gate:block=blocks.7").attach(model)


# --------------------------------------------------------------------------------------------- optimizer and weights


def test_a_climbing_rate_reaches_its_factor_and_stays(tiny):
    fault = make(tiny, "lr_climb:step=10,steps=4,severity=3")
    assert [fault.learning_rate(at, 1.0) for at in (9, 10, 11, 13, 14, 99)] == [1.0, 1.5, 2.0, 3.0, 3.0, 3.0]


@pytest.mark.parametrize(("mode", "at", "moved"), [("all", 5, True), ("all", 4, False), ("ends", 5, True)])
def test_swapped_moments_belong_to_other_parameters_of_the_shape(tiny, model, rows, mode, at, moved):
    optimizer = optimizer_of(model, rows)
    embed, head = (optimizer.state[model.get_parameter(name)] for name in ("embed.weight", "head.weight"))
    norm = optimizer.state[model.get_parameter("blocks.0.norm_attn.weight")]
    before = [{key: value.clone() for key, value in state.items()} for state in (embed, head, norm)]
    make(tiny, f"moments_swapped:step=5,mode={mode}").after_load(at, model, optimizer)
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(embed[key], before[1 if moved else 0][key])
        assert torch.equal(head[key], before[0 if moved else 1][key])
        assert torch.equal(norm[key], before[2][key]) is (mode == "ends" or not moved)


def test_squares_that_underflow_never_reach_the_second_moment(tiny, model, rows):
    optimizer = optimizer_of(model, rows)
    state = optimizer.state[model.get_parameter("blocks.0.gate_up.weight")]
    other = optimizer.state[model.get_parameter("head.weight")]
    old, old_other = state["exp_avg_sq"].flatten().clone(), other["exp_avg_sq"].clone()
    step(make(tiny, "squares_underflow:step=5,severity=0.5,tensor=gate_up"), 5, model, optimizer)
    now, half = state["exp_avg_sq"].flatten(), len(old) // 2
    assert torch.equal(now[:half], old[:half] * 0.999)
    assert bool((now[half:] > old[half:] * 0.999).any())
    assert bool((other["exp_avg_sq"] > old_other * 0.999).any())
    with pytest.raises(ConfigError, match="a part of a parameter's name"):
        make(tiny, "squares_underflow:tensor=nope").attach(model)


def test_idle_steps_leave_weights_and_moments_as_they_were(tiny, model, rows):
    optimizer = optimizer_of(model, rows)
    fault = make(tiny, "noop_steps:step=5,severity=3")
    moved = []
    for at in range(4, 11):
        before = weights(model)
        count = float(optimizer.state[model.get_parameter("head.weight")]["step"])
        step(fault, at, model, optimizer)
        counted = float(optimizer.state[model.get_parameter("head.weight")]["step"]) - count
        moved.append(any(not torch.equal(value, before[name]) for name, value in weights(model).items()))
        assert counted == float(moved[-1])
    assert moved == [True, False, False, True, False, False, True]


def test_a_drift_of_all_logits_leaves_the_loss_alone(tiny, model, rows):
    optimizer = optimizer_of(model, rows)
    before, loss = model(rows[:, :-1]).detach(), backward(model, rows)
    fault = make(tiny, "logit_drift:step=5,steps=2,severity=2")
    for at in range(4, 9):
        fault.before_optimizer(at, model, optimizer)
    moved = model(rows[:, :-1]).detach() - before
    assert float(moved.abs().max()) > 1.0
    assert torch.allclose(moved, moved[..., :1].expand_as(moved), atol=1e-4)
    assert backward(model, rows) == pytest.approx(loss, abs=1e-4)


def test_a_partial_load_leaves_a_layer_as_it_was_initialised(tiny, model, rows):
    optimizer = optimizer_of(model, rows)
    before, fresh = weights(model), weights(build(tiny.model, tiny.data.seq_len, tiny.seed))
    fault = make(tiny, "partial_load:step=5,layer=blocks.0.out")
    fault.attach(model)
    fault.after_load(4, model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    fault.after_load(5, model, optimizer)
    for name, value in weights(model).items():
        assert torch.equal(value, (fresh if name == "blocks.0.out.weight" else before)[name])
    with pytest.raises(ConfigError, match="expected a layer"):
        make(tiny, "partial_load:layer=nope").attach(model)


# ------------------------------------------------------------------------------------------------------ time and log


def test_a_throttled_rank_slows_down_step_by_step(tiny):
    fault = make(tiny, "throttle:step=5,rank=1,ramp=4,severity=1", rank=1)
    slow = [fault.stall_s(at, "forward") + fault.stall_s(at, "backward") for at in range(4, 13)]
    assert slow[0] == 0
    assert slow[1:5] == sorted(slow[1:5])
    assert slow[4] == pytest.approx(1.0)
    assert 0 < min(slow[5:]) < slow[4]
    assert max(slow[5:]) == pytest.approx(1.0)
    assert make(tiny, "throttle:step=5,rank=1", rank=0).stall_s(9, "forward") == 0


def test_the_steps_after_a_save_are_slow(tiny):
    fault = make(tiny, "save_shadow:step=7,steps=2,severity=1")  # a checkpoint after each 6th step
    assert [at for at in range(24) if fault.stall_s(at, "forward") > 0] == [12, 13, 18, 19]
    assert fault.label().onset_step == 12
    assert all(fault.stall_s(at, "checkpoint") == 0 for at in range(24))


def test_compilation_and_planned_collection_hold_up_all_ranks_alike(tiny):
    for rank in range(tiny.world):
        compiling = make(tiny, "compile_warmup:step=5,steps=2,severity=8", rank=rank)
        assert [compiling.stall_s(at, "forward") for at in (4, 5, 6, 7)] == pytest.approx([0.0, 4.8, 1.2, 0.0])
        collecting = make(tiny, "synchronised_gc:step=5,every=3", rank=rank)
        assert [at for at in range(12) if collecting.stall_s(at, "gc") > 0] == [5, 8, 11]


def test_a_scaled_log_shows_a_multiple_of_the_loss(tiny):
    fault = make(tiny, "scaled_log:step=5,factor=4")
    assert fault.logged(4, {"loss": 2.0, "lr": 1.0}) == {"loss": 2.0, "lr": 1.0}
    assert fault.logged(5, {"loss": 2.0, "lr": 1.0}) == {"loss": 8.0, "lr": 1.0}
    assert fault.logged(5, {"lr": 1.0}) == {"lr": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        "lr_climb:severity=1", "loader_loop:severity=0", "loader_loop:rank=2", "wrong_tokenizer:severity=0",
        "wrong_tokenizer:rank=2", "moments_swapped:mode=none", "squares_underflow:severity=2", "logit_drift:severity=0",
        "wrong_lane:rank=2", "wrong_lane:severity=0", "stale_bucket:severity=2", "local_gradient:rank=2",
        "local_gradient:severity=0", "noop_steps:severity=1", "closed_gate:severity=0", "throttle:rank=2",
        "throttle:ramp=0", "save_shadow:steps=0", "scaled_log:factor=1", "eval_padding:severity=1",
        "compile_warmup:steps=0", "synchronised_gc:every=0", "rank_remap:shift=2",
    ],
)  # fmt: skip
def test_values_without_a_meaning_are_refused(tiny, text):
    with pytest.raises(ConfigError, match=f"fault {text.partition(':')[0]}: expected"):
        make(tiny, text)
