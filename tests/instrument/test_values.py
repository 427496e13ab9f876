"""Each number against a reference worked out by hand or with plain torch."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from runhealth.instrument import Monitor
from runhealth.storage.errors import ConfigError

Make = Callable[..., Monitor]


def _linear(weights: list[float]) -> nn.Linear:
    layer = nn.Linear(len(weights), 1, bias=False)
    layer.weight.data = torch.tensor([weights])
    return layer


def test_norm_clip_update_and_rate_of_one_sgd_step(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    model = _linear([1.0, 2.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = monitor_for(model=model, optimizer=optimizer)
    with monitor.step(0) as s:
        loss = model(torch.tensor([[3.0, 4.0]])).sum()  # gradient (3, 4): norm 5
        loss.backward()
        s.loss(loss)
        total = monitor.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad()
    assert float(total) == 5.0
    values = log.steps[0].values
    assert values["loss"] == 11.0
    assert values["grad_norm"] == values["grad_norm_rank"] == 5.0
    assert values["clip_threshold"] == 2.0
    assert values["clip_coef"] == pytest.approx(0.4)
    assert values["lr"] == 0.1
    assert values["weight_norm"] == pytest.approx(math.sqrt(5))  # before the update
    assert values["update_ratio"] == pytest.approx(0.1 * 2.0 / math.sqrt(5), rel=1e-5)
    assert values["nonfinite_count"] == 0
    assert log.layers(0)["weight"] == pytest.approx(
        {"grad_norm": 5.0, "grad_rms": 5.0 / math.sqrt(2), "weight_norm": math.sqrt(5), "update_norm": 0.2}, rel=1e-5
    )


def test_without_clipping_the_optimizer_hook_sees_the_norm(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    model = _linear([1.0, 2.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    monitor = monitor_for(model=model, optimizer=optimizer)
    with monitor.step(7):
        model(torch.tensor([[6.0, 8.0]])).sum().backward()
        optimizer.step()
    values = log.steps[0].values
    assert values["grad_norm"] == 10.0
    assert values["lr"] == 0.5
    assert "clip_coef" not in values
    assert log.steps[0].step == 7
    assert log.steps[0].attempt == 3


def test_other_norm_types_clip_as_asked_and_record_the_l2_norm(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    model = _linear([1.0, 2.0])
    monitor = monitor_for(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with monitor.step(0):
        model(torch.tensor([[3.0, 4.0]])).sum().backward()
        assert float(monitor.clip_grad_norm_(model.parameters(), 2.0, norm_type=math.inf)) == 4.0
    assert log.steps[0].values["grad_norm"] == 5.0


def test_accumulation_takes_the_mean_loss_and_numbers_micro_batches(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    model = _linear([1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = monitor_for(model=model, optimizer=optimizer)
    with monitor.step(0) as s:
        for value in (1.0, 3.0):
            x = torch.tensor([[value]])
            s.batch(x, shard=f"s{value}")
            loss = model(x).sum()
            (loss / 2).backward()
            s.loss(loss)
            loss.detach().zero_()  # what the caller does to the tensor afterwards does not matter
        optimizer.step()
    assert log.steps[0].values["loss"] == 2.0
    assert log.steps[0].values["grad_norm"] == 2.0
    assert [(b.micro_batch, b.shard, b.values["batch_loss"]) for b in log.batches] == [
        (0, "s1.0", 1.0),
        (1, "s3.0", 3.0),
    ]


def test_token_statistics(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for(vocab_size=8)
    x = torch.tensor([[0, 0, 1, 2], [3, 3, 3, 3]])  # counts 2, 1, 1, 4 of 8
    y = torch.tensor([[0, 1, 2, 5], [3, 7, -100, 3]])  # of 5 judged labels one (7) is wrong; the last column is unknown
    with monitor.step(0) as s:
        s.batch(x, y, shard="a", first_sample=10, shard_hash=2**64 - 1, manifest_hash=5)
    batch = log.batches[0]
    assert (batch.first_sample, batch.last_sample, batch.samples) == (10, 11, 2)
    assert (batch.shard_hash, batch.manifest_hash) == (2**64 - 1, 5)
    assert batch.values["token_entropy"] == pytest.approx(0.25 * 2 + 2 * 0.125 * 3 + 0.5 * 1)
    assert batch.values["token_unique_share"] == 0.5
    assert batch.values["token_repeat_share"] == pytest.approx(4 / 6)
    assert batch.values["label_mismatch_share"] == pytest.approx(1 / 5)
    assert log.steps[0].values["tokens"] == 8


def test_labels_of_a_mapping_are_aligned_with_its_inputs(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    ids = torch.tensor([[4, 5, 6]])
    with monitor_for().step(0) as s:
        s.batch({"input_ids": ids, "labels": ids.clone()})
        s.batch(ids, ids.clone())  # as next tokens the same labels are wrong
    assert [batch.values["label_mismatch_share"] for batch in log.batches] == [0.0, 1.0]


def test_the_content_hash_is_xxh3_of_the_bytes_whatever_the_strides(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    import xxhash

    x = torch.arange(12).reshape(3, 4)
    with monitor_for().step(0) as s:
        s.batch(x)
        s.batch(x.t().contiguous().t())
        s.batch(x + 1)
    wanted = xxhash.xxh3_64_intdigest(x.numpy().tobytes())
    assert [batch.content_hash == wanted for batch in log.batches] == [True, True, False]


def test_layers_are_named_by_block_and_part(monitor_for: Make, log, tiny, tokens) -> None:  # type: ignore[no-untyped-def]
    optimizer = torch.optim.SGD(tiny.parameters(), lr=0.1)
    monitor = monitor_for(model=tiny, optimizer=optimizer, layers_every=2, watch_activations=["blocks.0.attn", "head"])
    outputs: list[Tensor] = []
    tiny.head.register_forward_hook(lambda _module, _args, output: outputs.append(output.detach()))
    reference = {}
    for step in range(2):
        x, y = tokens(step)
        with monitor.step(step) as s:
            logits = tiny(x)
            s.logits(logits)
            nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
            if step == 0:
                attn = list(tiny.blocks[0]["attn"].parameters())
                reference["attn"] = float(nn.utils.get_total_norm([p.grad for p in attn]))
            with torch.no_grad():
                tiny(x * 0)  # an evaluation: not among the activations
            optimizer.step()
            optimizer.zero_grad()
    layers = log.layers(0)
    assert set(layers) == {"embed", "blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp", "head"}
    assert layers["blocks.0.attn"]["grad_norm"] == pytest.approx(reference["attn"], rel=1e-5)
    assert log.layers(1) == {}
    largest = float(outputs[0].abs().max())
    assert log.steps[0].values["logit_max"] == pytest.approx(largest)
    assert layers["head"]["activation_max"] == pytest.approx(largest)
    assert log.steps[1].values["activation_max"] == pytest.approx(float(outputs[2].abs().max()))


def test_a_burst_has_its_layers_written_whatever_the_cadence(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    model = _linear([1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = monitor_for(model=model, optimizer=optimizer, layers_every=1000, updates_every=0)
    for step in range(1, 40):
        with monitor.step(step):
            model(torch.tensor([[1000.0 if step == 30 else 1.0 + 0.01 * step]])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [step for step in range(1, 40) if log.layers(step)] == [30]
    assert log.layers(30) == {"weight": {"grad_norm": 1000.0, "grad_rms": 1000.0}}


def test_phases_waiting_and_step_time(monitor_for: Make, log, time) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for(clock=time.clock)

    def loader():  # type: ignore[no-untyped-def]
        for item in range(2):
            time.s += 5.0
            yield item

    for step, _ in enumerate(monitor.iterate(loader())):
        with monitor.step(step) as s:
            with s.phase("forward"):
                time.s += 1.0
                with s.phase("data"):
                    time.s += 0.5
            with s.phase("backward"):
                time.s += 2.0
        with monitor.phase("checkpoint"):
            time.s += 7.0
    first, second = (record.values for record in log.steps)
    assert (first["t_data_s"], first["t_forward_s"], first["t_backward_s"]) == (5.5, 1.0, 2.0)
    assert first["t_step_s"] == 8.5  # with the wait for its batch
    assert "t_checkpoint_s" not in first
    assert second["t_checkpoint_s"] == 7.0
    assert log.steps[0].ts_ns == int(108.5e9)


def test_the_optimizer_is_timed_by_itself_unless_the_loop_does(monitor_for: Make, log, time) -> None:  # type: ignore[no-untyped-def]
    class Slow(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def]  # noqa: ARG002
            time.s += 3.0

    model = _linear([1.0])
    optimizer = Slow(model.parameters(), lr=0.1)
    monitor = monitor_for(model=model, optimizer=optimizer, clock=time.clock)
    with monitor.step(0):
        optimizer.step()
    with monitor.step(1) as s, s.phase("optimizer"):
        time.s += 1.0
        optimizer.step()
    assert [record.values["t_optimizer_s"] for record in log.steps] == [3.0, 4.0]


@pytest.mark.parametrize("fused", [False, True])
def test_loss_scale_and_skipped_steps(monitor_for: Make, log, fused: bool) -> None:  # type: ignore[no-untyped-def]
    model = _linear([1.0, 2.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    monitor = monitor_for(model=model, optimizer=optimizer, scaler=scaler)
    for step, x in enumerate([[3.0, 4.0], [math.inf, 1.0], [3.0, 4.0]]):
        with monitor.step(step):
            scaler.scale(model(torch.tensor([x])).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    values = [record.values for record in log.steps]
    assert [v["loss_scale"] for v in values] == [8.0, 8.0, 4.0]
    assert [v["step_skipped"] for v in values] == [0, 1, 0]
    assert [v["grad_norm"] for v in (values[0], values[2])] == [5.0, 5.0]  # unscaled


def test_precision_counters_are_differences_of_what_modules_count(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    class Fp8(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.over = torch.tensor(100)  # counted before the monitor came: not this run's
            self.amax = 1.0

        def runhealth_precision_stats(self) -> dict[str, dict[str, Tensor | float]]:
            return {
                "x": {
                    "amax": torch.tensor(self.amax),
                    "amax_believed": 2.0,
                    "overflow_count": self.over,
                    "underflow_count": 3,
                    "elements": 64,
                }
            }

    model = nn.Sequential(Fp8(), Fp8())
    monitor = monitor_for(model=model, layers_every=1000)
    for step in (1, 2):
        with monitor.step(step):
            if step == 2:
                model[1].over += 7
                model[1].amax = 9.0
    assert [record.values["overflow_count"] for record in log.steps] == [0, 7]
    assert [record.values["underflow_count"] for record in log.steps] == [0, 0]
    assert [record.values["amax_ratio"] for record in log.steps] == [0.5, 4.5]
    assert log.layers(1) == {}
    assert log.layers(2) == {
        "1.x": {"amax": 9.0, "amax_believed": 2.0, "overflow_count": 7, "underflow_count": 0, "elements": 0}
    }
    assert all(type(log.steps[1].values[name]) is int for name in ("overflow_count", "underflow_count"))


def test_memory_is_read_every_few_steps(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for(memory_every=2)
    for step in range(3):
        with monitor.step(step):
            pass
    assert [record.values.get("mem_rss_bytes", 0) > 10 << 20 for record in log.steps] == [True, False, True]


def test_numbers_recorded_between_steps_belong_to_the_next(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for()
    with monitor.step(0) as s:
        s.record("epoch", 0.5)
    monitor.record("eval_loss", torch.tensor(2.5))
    with monitor.step(1):
        pass
    monitor.record("eval_loss", 1.5)
    monitor.close()
    assert [record.values.get("eval_loss") for record in log.steps] == [None, 2.5, 1.5]
    assert log.steps[0].values["epoch"] == 0.5
    assert log.steps[2].step == 2
    assert "t_step_s" not in log.steps[2].values  # there was no third step


def test_global_numbers_are_written_by_rank_0_only(monitor_for: Make, log, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = _linear([1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = monitor_for(model=model, optimizer=optimizer)
    with monitor.step(0) as s:
        model(torch.ones(1, 1)).sum().backward()
        s.loss(1.0)
        s.record("eval_loss", 1.0)
        monitor.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert log.steps[0].rank == 1
    assert {n for n in log.steps[0].values if not n.startswith(("t_", "mem_"))} == {"loss", "dropped", "param_checksum"}


def test_events_and_checkpoints_are_written_at_once(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for()
    with monitor.step(4):
        monitor.event("note", "hello", {"a": 1})
        assert log.events[-1].kind == "note"
        assert log.events[-1].step == 4
    monitor.checkpoint(5, "/c", "saved", seconds=1.5, size_bytes=10)
    record = log.records[-1]
    assert (record.step, record.path, record.status, record.seconds, record.size_bytes) == (5, "/c", "saved", 1.5, 10)
    monitor.close()
    assert [event.kind for event in log.events] == ["attempt_start", "note", "attempt_end"]


@pytest.mark.parametrize(
    "arguments",
    [{"layers_every": -1}, {"watch_activations": ["nothing"], "model": nn.Linear(1, 1)}, {"watch_activations": ["x"]}],
)
def test_wrong_arguments_are_refused_before_training(monitor_for: Make, arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        monitor_for(**arguments)


@pytest.mark.parametrize("scaled", [True, False])
def test_with_a_loss_scale_non_finite_gradients_are_overflows(monitor_for: Make, log, scaled: bool) -> None:  # type: ignore[no-untyped-def]
    model = _linear([1.0, 2.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    monitor = monitor_for(model=model, optimizer=optimizer, scaler=scaler)
    for step, x in enumerate([[1.0, 1.0], [1.0, math.inf]]):
        with monitor.step(step):
            optimizer.zero_grad()
            scaler.scale(model(torch.tensor([x])).sum()).backward()
            scaler.unscale_(optimizer)
            monitor.clip_grad_norm_(model.parameters(), 1e9)
            scaler.step(optimizer)
            scaler.update()
    assert [record.values["nonfinite_count"] for record in log.steps] == [0, 1]
    assert [record.values.get("overflow_count") for record in log.steps] == ([0, 1] if scaled else [None, None])
