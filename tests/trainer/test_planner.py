"""The planner's formulas against the papers' figures and against bytes measured on our own small models."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from runhealth import cli
from runhealth.storage.errors import ConfigError
from runhealth.trainer.config import ModelConfig
from runhealth.trainer.model import VOCABULARY, Block, build
from runhealth.trainer.planner import memory, render
from runhealth.trainer.planner.cluster import Cluster, parse_bytes
from runhealth.trainer.planner.estimate import Job, estimate
from runhealth.trainer.planner.layout import Layout
from runhealth.trainer.planner.shape import PRESETS, ModelShape, from_params, preset
from runhealth.trainer.planner.traffic import all_gather, all_reduce, traffic
from runhealth.trainer.planner.walk import layouts, walk

GPT = ModelShape(
    name="gpt-3", layers=96, width=12288, heads=96, kv_heads=96, ffn_width=49152, vocabulary=51_200, gated=False,
    dropout=True, tied=True,
)  # fmt: skip


@pytest.mark.parametrize(("params", "total"), [(7e9, 112e9), (70e9, 1.12e12)])
def test_sixteen_bytes_a_parameter_or_eighteen(params: float, total: float) -> None:
    held = memory.state(params)
    assert (held.weights, held.gradients, held.master_weights) == (2 * params, 2 * params, 4 * params)
    assert (held.first_moment, held.second_moment) == (4 * params, 4 * params)
    assert held.total == total
    assert memory.state(params, fp32_gradients=True).total == 18 * params


@pytest.mark.parametrize(("zero", "bytes_a_param"), [(0, 16), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)])
def test_zero_shards_what_its_paper_says(zero: int, bytes_a_param: float) -> None:
    """ZeRO, figure 1: 7.5B parameters on 64 GPUs hold 120, 31.4, 16.6 and 1.9 GB."""
    assert memory.state(7.5e9, zero=zero, dp=64).total == pytest.approx(7.5e9 * bytes_a_param)
    paper = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.9}[zero]
    assert memory.state(7.5e9, zero=zero, dp=64).total / 1e9 == pytest.approx(paper, abs=0.06)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.74),
        ("llama-2-13b", 13.02),
        ("llama-2-70b", 68.98),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
        ("llama-3-405b", 405.85),
    ],
)
def test_presets_count_what_the_released_models_have(name: str, billions: float) -> None:
    assert preset(name).params / 1e9 == pytest.approx(billions, rel=1e-3)


@given(tokens=st.sampled_from([512, 2048, 8192]), micro_batch=st.integers(1, 4), tp=st.sampled_from([1, 2, 4, 8]))
def test_gpt_activations_are_those_of_korthikanti(tokens: int, micro_batch: int, tp: int) -> None:
    """arXiv:2205.05198, table 2, each row."""
    s, b, h, a, t = tokens, micro_batch, GPT.width, GPT.heads, tp

    def ours(**options: object) -> float:
        return memory.layer_activations(GPT, seq_len=s, micro_batch=b, tp=t, **options)  # type: ignore[arg-type]

    assert ours(sequence_parallel=False) == pytest.approx(s * b * h * (10 + 24 / t + 5 * a * s / (h * t)))
    assert ours() == pytest.approx(s * b * h / t * (34 + 5 * a * s / h))
    assert ours(sequence_parallel=False, recompute="selective") == pytest.approx(s * b * h * (10 + 24 / t))
    assert ours(recompute="selective") == pytest.approx(34 * s * b * h / t)
    assert ours(recompute="full", sequence_parallel=False) == pytest.approx(2 * s * b * h)


def small(layers: int = 2, width: int = 64, ffn_width: int = 160) -> tuple[ModelConfig, ModelShape]:
    config = ModelConfig(layers=layers, width=width, heads=4, ffn_width=ffn_width)
    shape = ModelShape(
        name="ours", layers=layers, width=width, heads=4, kv_heads=4, ffn_width=ffn_width, vocabulary=VOCABULARY
    )
    return config, shape


@pytest.mark.parametrize(("layers", "width", "ffn_width"), [(2, 64, 160), (3, 128, 384)])
def test_parameters_and_state_equal_those_of_our_model(layers: int, width: int, ffn_width: int) -> None:
    """Our model is fp32: 4 weights + 4 gradients + 8 moments; the planner's split with both in fp32 and no master."""
    config, shape = small(layers, width, ffn_width)
    model = build(config, 32, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 32, dtype=torch.int64)).sum().backward()
    optimizer.step()
    assert sum(p.numel() for p in model.parameters()) == shape.params
    moments = sum(
        tensor.numel() * tensor.element_size()
        for state in optimizer.state.values()
        for key, tensor in state.items()
        if key != "step"
    )
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)
    held = memory.state(shape.params, fp32_gradients=True)
    assert moments == held.first_moment + held.second_moment
    assert gradients == held.gradients


def saved_bytes(block: nn.Module, x: torch.Tensor, *extra: torch.Tensor) -> int:
    """Bytes that autograd keeps for the backward pass: distinct storages that are no parameters."""
    owned = {p.untyped_storage().data_ptr() for p in block.parameters()}
    owned |= {e.untyped_storage().data_ptr() for e in extra}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = block(x, *extra)
    out.sum().backward()
    return sum(kept.values())


@pytest.mark.parametrize(("width", "ffn_width", "seq_len"), [(128, 384, 64), (256, 512, 128)])
def test_activations_of_a_layer_equal_what_autograd_keeps(width: int, ffn_width: int, seq_len: int) -> None:
    """The formula counts 2-byte elements; our block is fp32, so twice as many. Attention is a fused kernel, as
    `selective` assumes. Fused blocks of large models avoid what ours keeps on top, five tensors of the block's width:
    q and k before their rotation (v is a view of the same storage), the normalised input of both norms, and the
    attention's output before it is laid out for the projection."""
    config, shape = small(1, width, ffn_width)
    block = Block(config)
    half = width // 4 // 2
    x = torch.randn(4, seq_len, width, requires_grad=True)
    measured = saved_bytes(block, x, torch.ones(seq_len, half), torch.zeros(seq_len, half))
    formula = 2 * memory.layer_activations(shape, seq_len=seq_len, micro_batch=4, recompute="selective")
    on_top = 5 * x.numel() * x.element_size()
    assert measured == pytest.approx(formula + on_top, rel=0.01)


def test_ring_bytes() -> None:
    assert all_reduce(100.0, 4) == pytest.approx(2 * 3 / 4 * 100)
    assert all_gather(100.0, 4) == pytest.approx(3 / 4 * 100)
    assert all_reduce(100.0, 1) == 0.0


def test_traffic_of_the_zero_stages() -> None:
    """ZeRO, section 7: stages 1 and 2 send what plain data parallel sends, stage 3 half as much again."""
    shape = preset("llama-2-7b")
    cluster = Cluster()

    def sent(zero: int) -> float:
        moved = traffic(shape, Layout(dp=8, zero=zero), cluster, seq_len=4096)
        return sum(flow.size_bytes for flow in moved.flows())

    plain = all_reduce(2 * shape.params, 8)
    assert sent(0) == pytest.approx(plain)
    assert sent(1) == pytest.approx(plain)
    assert sent(2) == pytest.approx(plain)
    assert sent(3) == pytest.approx(1.5 * plain)


def test_tensor_parallel_traffic_is_on_the_link_its_group_spans() -> None:
    shape, cluster = preset("llama-3-70b"), Cluster(nodes=4)
    inside = traffic(shape, Layout(tp=8, dp=4), cluster, seq_len=4096).tensor
    across = traffic(shape, Layout(tp=16, dp=2), cluster, seq_len=4096).tensor
    assert (inside.link, across.link) == ("nvlink", "network")
    one = all_reduce(2 * 4096 * shape.width, 8)
    assert inside.size_bytes == pytest.approx(4 * 80 * one)
    assert across.seconds(cluster) > 5 * inside.seconds(cluster)


def test_bubble_of_one_f_one_b_and_interleaved() -> None:
    assert Layout(pp=4, microbatches=8).bubble == pytest.approx(3 / 11)
    assert Layout(pp=4, microbatches=8, interleave=2).bubble == pytest.approx(3 / 19)
    assert Layout(microbatches=8).bubble == 0.0


@given(
    pp=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2, 8]), microbatches=st.integers(1, 32),
    recompute=st.sampled_from(["none", "selective", "full"]),
)  # fmt: skip
def test_terms_add_to_the_step_and_the_bubble_is_its_share(pp: int, tp: int, microbatches: int, recompute: str) -> None:
    layout = Layout(dp=2, tp=tp, pp=pp, microbatches=microbatches, recompute=recompute)  # type: ignore[arg-type]
    job = Job(shape=preset("llama-2-7b"), seq_len=2048, batch_tokens=2 * microbatches * 2048)
    found = estimate(job, layout, Cluster(nodes=8))
    parts = found.terms.compute + sum(seconds for _, seconds in found.terms.named())
    assert found.step_s == pytest.approx(parts)
    pipeline = found.terms.compute + found.terms.recompute + found.terms.tensor_parallel + found.terms.bubble
    assert found.terms.bubble / pipeline == pytest.approx(layout.bubble)
    assert 0 < found.mfu <= 0.6


def test_a_7b_model_does_not_fit_by_data_parallel_and_fits_sharded() -> None:
    answer = walk(Job(shape=from_params(7e9), seq_len=4096, batch_tokens=2**22), Cluster())
    by_name = {stop.family.name: stop.best for stop in answer.stops}
    plain = by_name["data parallel"]
    assert plain is not None
    assert not plain.fits
    assert plain.bottleneck == "memory (model state)"
    assert plain.over_bytes == pytest.approx(plain.memory.total - 72e9)
    assert answer.chosen is not None
    assert answer.chosen.layout.zero > 0


def test_every_layout_uses_all_gpus_and_the_whole_batch() -> None:
    job = Job(shape=preset("llama-3-70b"), seq_len=4096, batch_tokens=2**22)
    cluster = Cluster(nodes=8)
    answer = walk(job, cluster)
    looked_at = 0
    for stop in answer.stops:
        for layout in layouts(job, cluster, stop.family):
            looked_at += 1
            assert layout.gpus == 64
            assert layout.dp * layout.micro_batch * layout.microbatches == job.sequences
            assert layout.tp <= cluster.gpus_per_node
    assert looked_at == sum(stop.looked_at for stop in answer.stops) > 100


def test_on_one_slow_link_everything_stays_apart_and_on_one_fast_link_tensor_parallel_grows() -> None:
    """Derived, not canned: with links of equal speed the node loses its meaning."""
    job = Job(shape=preset("llama-3-70b"), seq_len=4096, batch_tokens=2**22)
    slow = walk(job, Cluster(nodes=64, inter_bytes_s=50e9))
    equal = walk(job, Cluster(nodes=64, inter_bytes_s=450e9))
    assert slow.wider is not None
    assert equal.wider is not None
    assert slow.chosen is not None
    assert equal.chosen is not None
    cost_slow = slow.wider.step_s / slow.chosen.step_s
    cost_equal = equal.wider.step_s / equal.chosen.step_s
    assert cost_slow > 2 * cost_equal


def test_a_batch_that_is_too_small_is_said_a_stop_at_a_time_or_refused() -> None:
    job = Job(shape=preset("llama-2-7b"), seq_len=4096, batch_tokens=32 * 4096)
    answer = walk(job, Cluster(nodes=8))
    assert answer.stops[0].best is None
    assert "cannot be laid" in render.text(answer)
    with pytest.raises(ConfigError, match="enlarge --batch-tokens"):
        walk(Job(shape=preset("llama-2-7b"), seq_len=4096, batch_tokens=4096), Cluster(nodes=512))


def test_gpus_that_share_no_batch_equally_are_told_which_batch_they_share() -> None:
    cluster = Cluster(gpus_per_node=7)
    with pytest.raises(ConfigError, match=r"expected as many sequences for every replica.*4186112 or 4214784") as met:
        walk(Job(shape=preset("llama-2-7b"), seq_len=4096, batch_tokens=2**22), cluster)
    assert "at least one sequence" not in str(met.value)
    for tokens in (4_186_112, 4_214_784):
        assert walk(Job(shape=preset("llama-2-7b"), seq_len=4096, batch_tokens=tokens), cluster).stops[0].looked_at


@pytest.mark.parametrize(("text", "size"), [("80GB", 80e9), ("80GiB", 80 * 2**30), ("1.5tb", 1.5e12), ("42", 42.0)])
def test_sizes(text: str, size: float) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "80 XB", "GB", "-1GB", "0", "1e", "1..2GB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a size"):
        parse_bytes(text)


def test_the_command_answers_in_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--params", "7e9"]) == 0
    said = capsys.readouterr().out
    assert "112 GB" in said
    assert "RECOMMENDED" in said
    assert cli.main(["plan", "--model", "llama-3-70b", "--nodes", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state_bytes"]["total"] == pytest.approx(16 * found["model"]["params"])
    assert found["recommended"]["fits"]
    assert math.isclose(
        sum(found["recommended"]["memory_bytes"].values()), 2 * found["recommended"]["memory_bytes"]["total"]
    )


def test_the_command_says_when_nothing_fits_and_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--params", "405B", "--nodes", "1"]) == 1
    said = capsys.readouterr().out
    assert "NOTHING FITS" in said
    assert "too much" in said


@pytest.mark.parametrize(
    "wrong",
    [
        ["--params", "7e9", "--nodes", "0"],
        ["--model", "gpt-9"],
        ["--params", "12"],
        ["--params", "7e9", "--gpu-memory", "x"],
        ["--params", "7e9", "--batch-tokens", "10"],
        ["--params", "7e9", "--batch-tokens", "1e308"],
        ["--params", "1e308", "--nodes", "64"],
        ["--params", "7e9", "--gpu-memory", "1e400GB"],
        ["--params", "7e9", "--peak-tflops", "1e300"],
    ],
)
def test_numbers_that_cannot_be_are_usage_errors(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *wrong]) == 2
    assert "expected" in capsys.readouterr().err


def test_the_plan_is_kept_with_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from runhealth.storage.store import Store

    run = Store(str(tmp_path)).create_run("mine")
    assert cli.main(["plan", "--params", "7e9", "--run", "mine", "--store", str(tmp_path), "--json"]) == 0
    assert json.loads((Path(run.path) / "plan.json").read_text()) == json.loads(capsys.readouterr().out)
    assert cli.main(["plan", "--params", "7e9", "--run", "other", "--store", str(tmp_path)]) == 3


def test_the_table_in_the_docs_is_what_the_planner_says() -> None:
    script = Path(__file__).resolve().parents[2] / "bench" / "plans.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, "run: python bench/plans.py --write"


def test_presets_are_listed_by_name() -> None:
    assert all(name == shape.name for name, shape in PRESETS.items())
