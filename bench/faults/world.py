"""Four data-parallel ranks in one process, simulated exactly: each rank's own forward and backward pass, its gradient
before the reduce, the mean of the gradients, one optimizer step.

The model has one floating-point input, a gain of 1 for each sample, and fits into one bucket of the reduce.

Replicas that are alike share their weights and moments in memory; ranks that a fault may set apart have their own. All
parameters are views of one flat vector, and so are the gradients of each rank, so that norms are one call.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from bench.faults import moe
from bench.faults.clock import WORLD
from bench.faults.corpus import DATA, Corpus
from torch import Tensor

from runhealth.instrument import alignment
from runhealth.instrument.hyper import of_group
from runhealth.instrument.layers import layer_name
from runhealth.trainer.config import CheckpointConfig, FaultSpec, ModelConfig, OptimConfig, TrainConfig
from runhealth.trainer.data import BatchPlan, Part, ShardReader
from runhealth.trainer.fault import Fault, FaultContext, create
from runhealth.trainer.gain import Gain
from runhealth.trainer.model import build, next_byte_loss
from runhealth.trainer.precision.fp8 import Fp8Linear
from runhealth.trainer.schedule import learning_rate

PRECISIONS = ("fp32", "fp8", "fp16", "moe")
CHECKPOINT_EVERY, EVAL_EVERY, EVAL_SAMPLES = 25, 10, 24
FP16_MAX = 65_504.0
FIRST_SCALE, GROWTH_STEPS = 2.0**22, 64  # of the loss scale: too large at first, as always


def config(seed: int, precision: str, faults: Sequence[FaultSpec] = ()) -> TrainConfig:
    """`moe` is fp32 with experts; `fp16` keeps fp32 weights and casts the scaled gradients."""
    return TrainConfig(
        steps=2_000,
        seed=seed,
        world=WORLD,
        data=DATA,
        model=ModelConfig(layers=2, width=32, heads=2, ffn_width=64, precision="fp8" if precision == "fp8" else "fp32"),
        optim=OptimConfig(lr=4e-3, warmup_steps=40, horizon=2_000),
        checkpoint=CheckpointConfig(every=CHECKPOINT_EVERY),
        eval_every=EVAL_EVERY,
        eval_samples=EVAL_SAMPLES,
        faults=tuple(faults),
    )


@dataclass(slots=True)
class Replica:
    """Weights and moments that `ranks` share; `flat`, `first` and `second` moments and `grad` are (P,)."""

    ranks: tuple[int, ...]
    flat: Tensor
    first: Tensor
    second: Tensor
    grad: Tensor
    optimizer: torch.optim.AdamW


@dataclass(slots=True)
class Batch:
    """What one rank read: `rows` int64 [batch, seq + 1], the inputs and labels that were made of them, and the gain of
    each sample, float32 [batch]."""

    parts: tuple[Part, ...]
    rows: Tensor
    inputs: Tensor
    labels: Tensor
    gain: Tensor


@dataclass(slots=True)
class Outcome:
    """Measurements of one step. Lists go by rank, dictionaries by layer."""

    lr: float = 0.0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)  # before the reduce
    projections: list[float | None] = field(default_factory=list)  # of that on what the reduce gave the rank
    cosines: list[float | None] = field(default_factory=list)
    nonfinite: list[int] = field(default_factory=list)
    logit_max: list[float] = field(default_factory=list)
    attn_logit_max: list[float] = field(default_factory=list)
    router_load_max: list[float] = field(default_factory=list)
    grad_norm: float = 0.0
    clip_coef: float = 1.0
    update_ratio: float = 0.0
    weight_norm: float = 0.0
    loss_scale: float = 1.0
    skipped: bool = False
    hyper: dict[str, float] = field(default_factory=dict)  # what the optimizer used, where it made a step
    adam_rms: float = 0.0
    second_moment_norm: float = 0.0
    checksums: list[int] = field(default_factory=list)
    layer_checksums: list[dict[str, int]] = field(default_factory=list)  # by rank, where replicas differ
    batches: list[Batch] = field(default_factory=list)
    layer_values: dict[str, dict[str, float]] = field(default_factory=dict)
    precision: list[dict[str, dict[str, float]]] = field(default_factory=list)  # by rank: tensor -> stats


class World:
    def __init__(self, seed: int, precision: str, corpus: Corpus, faults: Sequence[FaultSpec] = ()) -> None:
        self.precision = precision
        self.config = config(seed, precision, faults)
        self.plan = BatchPlan(data=DATA, seed=seed, world=WORLD)
        contexts = [FaultContext(config=self.config, plan=self.plan, rank=rank) for rank in range(WORLD)]
        self.faults: list[list[Fault]] = [[create(spec, context) for spec in faults] for context in contexts]
        self._resting: list[list[Fault]] = []
        self.readers = [ShardReader(corpus.folder, corpus.manifest, DATA, self._tamper(rank)) for rank in range(WORLD)]
        self.models = [build(self.config.model, DATA.seq_len, seed) for _ in range(WORLD)]
        if precision == "moe":
            for model in self.models:
                moe.convert(model, seed)
        self.names = [name for name, _ in self.models[0].named_parameters()]
        self.shapes = [parameter.shape for parameter in self.models[0].parameters()]
        sizes = [parameter.numel() for parameter in self.models[0].parameters()]
        self.offsets = np.concatenate([[0], np.cumsum(sizes)])
        self.layers = [layer_name(name) for name in self.names]
        self.grads = torch.zeros(WORLD, int(self.offsets[-1]))
        self.replicas = [self._replica(ranks) for ranks in self._groups()]
        self.scale, self.clean_steps = (FIRST_SCALE, 0) if precision == "fp16" else (1.0, 0)
        self.heldout = torch.from_numpy(self.readers[0].heldout(EVAL_SAMPLES))
        self.lr_factor = 1.0  # of a nudge that somebody made on purpose
        self._attention: list[float] = [0.0] * WORLD
        self._gains = [Gain(model.get_submodule("embed")) for model in self.models]
        for rank, model in enumerate(self.models):
            self._watch_attention(rank, model)
            for fault in self.faults[rank]:
                fault.attach(model)

    # -- set-up -----------------------------------------------------------------------------------------------------

    def _tamper(self, rank: int) -> Any:
        def tamper(shard: str, blob: bytes) -> bytes:
            for fault in self.faults[rank]:
                blob = fault.tamper(shard, blob)
            return blob

        return tamper

    def _groups(self) -> list[tuple[int, ...]]:
        apart = sorted({rank for fault in self.faults[0] if fault.splits for rank in fault.label().ranks})
        together = tuple(rank for rank in range(WORLD) if rank not in apart)
        return [together, *((rank,) for rank in apart)] if together else [tuple(range(WORLD))]

    def _replica(self, ranks: tuple[int, ...]) -> Replica:
        leader = self.models[ranks[0]]
        flat = torch.cat([parameter.detach().flatten() for parameter in leader.parameters()])
        first, second = torch.zeros_like(flat), torch.zeros_like(flat)
        for rank in ranks:
            for at, parameter in enumerate(self.models[rank].parameters()):
                parameter.data = self._view(flat, at)
                parameter.grad = self._view(self.grads[rank], at)
        optim = self.config.optim
        optimizer = torch.optim.AdamW(
            leader.parameters(),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            weight_decay=optim.weight_decay,
            fused=True,
        )
        for at, parameter in enumerate(leader.parameters()):
            optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": self._view(first, at),
                "exp_avg_sq": self._view(second, at),
            }
        return Replica(
            ranks=ranks, flat=flat, first=first, second=second, grad=self.grads[ranks[0]], optimizer=optimizer
        )

    def _view(self, flat: Tensor, at: int) -> Tensor:
        return flat[self.offsets[at] : self.offsets[at + 1]].view(self.shapes[at])

    def _watch_attention(self, rank: int, model: torch.nn.Module) -> None:
        """Largest attention logit of each batch's first sequence, from what the query-key-value matrix gives."""
        heads, cos, sin = self.config.model.heads, model.cos[:, None], model.sin[:, None]
        causal = torch.ones(DATA.seq_len, DATA.seq_len, dtype=torch.bool).tril()

        def turn(x: Tensor) -> Tensor:
            a, b = x.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

        @torch.no_grad()
        def look(module: torch.nn.Module, args: Any, out: Tensor) -> None:  # noqa: ARG001
            if not model.training:
                return
            q, k, _ = out[0].detach().view(DATA.seq_len, 3, heads, -1).unbind(1)
            logits = torch.einsum("qhd,khd->hqk", turn(q), turn(k)) * q.shape[-1] ** -0.5
            largest = float(logits.abs().mul_(causal).max())
            if not largest <= self._attention[rank]:
                self._attention[rank] = largest

        for name, module in model.named_modules():
            if name.endswith(".qkv"):
                module.register_forward_hook(look)

    # -- state ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that a checkpoint holds, copied."""
        lead = self.replicas[0]
        return {
            "flat": lead.flat.clone(),
            "first": lead.first.clone(),
            "second": lead.second.clone(),
            "count": float(next(iter(lead.optimizer.state.values()))["step"]),
            "scale": self.scale,
            "clean_steps": self.clean_steps,
            "buffers": [
                {name: buffer.clone() for name, buffer in model.named_buffers() if not name.endswith(("cos", "sin"))}
                for model in self.models
            ],
        }

    def load(self, state: dict[str, Any]) -> None:
        for replica in self.replicas:
            replica.flat.copy_(state["flat"])
            replica.first.copy_(state["first"])
            replica.second.copy_(state["second"])
            for one in replica.optimizer.state.values():
                one["step"].fill_(state["count"])
        self.scale, self.clean_steps = state["scale"], state["clean_steps"]
        for model, buffers in zip(self.models, state["buffers"], strict=True):
            for name, buffer in model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])

    def rest(self) -> None:
        """No fault acts until `resumed`: they begin at a resume that is still to come."""
        self._resting, self.faults = self.faults, [[] for _ in range(WORLD)]

    def resumed(self, step: int) -> None:
        """Let the faults have their way with what was loaded."""
        if self._resting:
            self.faults, self._resting = self._resting, []
        for replica in self.replicas:
            rank = replica.ranks[0]
            for fault in self.faults[rank]:
                fault.after_load(step, self.models[rank], replica.optimizer)

    # -- one step ---------------------------------------------------------------------------------------------------

    def train(self, step: int) -> Outcome:
        """The order of the hooks is that of the trainer's loop."""
        out = Outcome(lr=self._learning_rate(step), loss_scale=self.scale)
        self._attention = [0.0] * WORLD
        self.grads.zero_()
        for rank in range(WORLD):
            self._backward(step, rank, out)
        scaled = self.precision == "fp16"
        if scaled:
            self.grads[self.grads.abs() > FP16_MAX] = math.inf
        norms = torch.linalg.vector_norm(self.grads, dim=1)
        out.grad_norms = [float(norm) / self.scale for norm in norms]
        out.nonfinite = [
            0 if math.isfinite(norm) else int((~self.grads[rank].isfinite()).sum())
            for rank, norm in enumerate(out.grad_norms)
        ]
        self._reduce(step, out)
        lead = self._lead()
        found_inf = scaled and not all(bool(replica.grad.isfinite().all()) for replica in self.replicas)
        out.skipped = found_inf
        for replica in self.replicas:
            self._update(step, replica, out, replica is lead, found_inf)
        if scaled:
            self._rescale(found_inf)
        sums = {
            rank: xxhash.xxh3_64_intdigest(replica.flat.numpy().data)
            for replica in self.replicas
            for rank in replica.ranks
        }
        out.checksums = [sums[rank] for rank in range(WORLD)]
        if len(set(out.checksums)) > 1:
            out.layer_checksums = self._layer_checksums()
        if self.precision == "fp8":
            out.precision = [self._precision(model) for model in self.models]
        return out

    def _reduce(self, step: int, out: Outcome) -> None:
        """The mean of the ranks' gradients, what faults do to it, how each rank's own gradient lies to that; unscaled
        only then."""
        mean = self.grads.mean(0)
        results = [mean.clone() for _ in self.replicas]
        numbers: dict[int, tuple[float | None, float | None]] = {}
        for replica, result in zip(self.replicas, results, strict=True):
            for fault in self.faults[replica.ranks[0]]:
                fault.reduced(step, 0, result)
            for rank in replica.ranks:
                found = alignment.products(self.grads[rank], result).tolist()
                numbers[rank] = alignment.projection(found), alignment.cosine(found)
        out.projections = [numbers[rank][0] for rank in range(WORLD)]
        out.cosines = [numbers[rank][1] for rank in range(WORLD)]
        for replica, result in zip(self.replicas, results, strict=True):  # a replica's gradient lies in one of `grads`
            replica.grad.copy_(result.div_(self.scale) if self.scale != 1.0 else result)
            rank = replica.ranks[0]
            for fault in self.faults[rank]:
                fault.after_backward(step, self.models[rank])

    def _lead(self) -> Replica:
        """The replica of rank 0, which writes what is said of the whole job."""
        return next(replica for replica in self.replicas if 0 in replica.ranks)

    def _learning_rate(self, step: int) -> float:
        lr = learning_rate(self.config.optim, step, self.config.steps) * self.lr_factor
        for fault in self.faults[0]:
            lr = fault.learning_rate(step, lr)
        for replica in self.replicas:
            for group in replica.optimizer.param_groups:
                group["lr"] = lr
        return lr

    def _backward(self, step: int, rank: int, out: Outcome) -> None:
        model, faults = self.models[rank], self.faults[rank]
        for fault in faults:
            fault.loss_scale = self.scale
            fault.before_step(step, model)
        parts = self.plan.batch(step, rank)
        for fault in faults:
            parts = fault.parts(step, parts)
        rows = torch.from_numpy(self.readers[rank].rows(parts))
        inputs, labels = rows[:, :-1], rows[:, 1:]
        for fault in faults:
            inputs, labels = fault.tokens(step, inputs, labels)
        gain = torch.ones(len(rows))
        for fault in faults:
            gain = fault.gain(step, gain)
        self._gains[rank].set(gain)
        out.batches.append(Batch(parts=parts, rows=rows, inputs=inputs, labels=labels, gain=gain))
        logits = model(inputs)
        loss = next_byte_loss(logits, labels)
        out.losses.append(loss.item())
        out.logit_max.append(float(logits.detach().abs().max()))
        out.attn_logit_max.append(self._attention[rank])
        experts = [m for m in model.modules() if isinstance(m, moe.ExpertProjection)] if self.precision == "moe" else []
        for module in experts:
            loss = loss + moe.BALANCE * module.balance
            out.router_load_max.append(float(module.load.max()))
        (loss * self.scale if self.scale != 1.0 else loss).backward()

    def _update(self, step: int, replica: Replica, out: Outcome, lead: bool, found_inf: bool) -> None:
        rank = replica.ranks[0]
        model, grad = self.models[rank], replica.grad
        norm = float(torch.linalg.vector_norm(grad))
        threshold = self.config.optim.clip_threshold
        coefficient = threshold / (norm + 1e-6)
        if lead:
            self._measure_gradients(grad, out)
        if not coefficient >= 1.0:
            grad.mul_(coefficient)
        if lead:
            out.grad_norm = norm
            out.clip_coef = math.nan if math.isnan(norm) else min(1.0, threshold / norm) if norm > 0 else 1.0
        if not found_inf:
            for fault in self.faults[rank]:
                fault.before_optimizer(step, model, replica.optimizer)
        if lead:
            before = replica.flat.clone()
            out.weight_norm = float(torch.linalg.vector_norm(before))
        if not found_inf:
            if lead:
                out.hyper = of_group(replica.optimizer.param_groups[0])
            replica.optimizer.step()
            for fault in self.faults[rank]:
                fault.after_optimizer(step, model, replica.optimizer)
        if lead:
            self._measure_update(replica, before, out)

    def _measure_gradients(self, grad: Tensor, out: Outcome) -> None:
        with np.errstate(over="ignore"):  # a flipped exponent bit: its square is infinite, and may be
            squares = np.add.reduceat(grad.numpy() ** 2, self.offsets[:-1])
        sizes = np.diff(self.offsets)
        for layer, square, size in zip(self.layers, squares, sizes, strict=True):
            values = out.layer_values.setdefault(layer, {"square": 0.0, "size": 0.0})
            values["square"] += float(square)
            values["size"] += float(size)
        for values in out.layer_values.values():
            square, size = values.pop("square"), values.pop("size")
            values["grad_norm"], values["grad_rms"] = math.sqrt(square), math.sqrt(square / size)

    def _measure_update(self, replica: Replica, before: Tensor, out: Outcome) -> None:
        update = replica.flat - before
        out.update_ratio = float(torch.linalg.vector_norm(update)) / out.weight_norm if out.weight_norm else math.nan
        out.second_moment_norm = float(torch.linalg.vector_norm(replica.second))
        # RMS of g / sqrt(v) by tensor (Wortsman et al., arXiv:2304.13013, section 3.4)
        ratio = replica.grad**2 / torch.clamp(replica.second, min=1e-16)
        sizes = np.diff(self.offsets)
        rms = np.sqrt(np.add.reduceat(ratio.numpy(), self.offsets[:-1]) / sizes)
        out.adam_rms = float(rms.max())
        weights = np.add.reduceat(before.numpy() ** 2, self.offsets[:-1])
        moves = np.add.reduceat(update.numpy() ** 2, self.offsets[:-1])
        totals: dict[str, list[float]] = {}
        for at, layer in enumerate(self.layers):
            one = totals.setdefault(layer, [0.0, 0.0, 0.0])
            one[0] += float(weights[at])
            one[1] += float(moves[at])
            one[2] = max(one[2], float(rms[at]))
        for layer, (weight, move, largest) in totals.items():
            out.layer_values[layer].update(weight_norm=math.sqrt(weight), update_norm=math.sqrt(move), adam_rms=largest)

    def _layer_checksums(self) -> list[dict[str, int]]:
        """By rank: layer -> checksum of its parameters, which tells what two replicas differ in."""
        found: list[dict[str, int]] = [{} for _ in range(WORLD)]
        for replica in self.replicas:
            digests: dict[str, xxhash.xxh3_64] = {}
            for at, layer in enumerate(self.layers):
                part = replica.flat[self.offsets[at] : self.offsets[at + 1]]
                digests.setdefault(layer, xxhash.xxh3_64()).update(part.numpy().data)
            for rank in replica.ranks:
                found[rank] = {layer: digest.intdigest() for layer, digest in digests.items()}
        return found

    def _rescale(self, found_inf: bool) -> None:
        """Dynamic loss scaling (Micikevicius et al., arXiv:1710.03740): halve on overflow, double after a clean run."""
        if found_inf:
            self.scale, self.clean_steps = self.scale / 2.0, 0
            return
        self.clean_steps += 1
        if self.clean_steps >= GROWTH_STEPS:
            self.scale, self.clean_steps = self.scale * 2.0, 0

    @staticmethod
    def _precision(model: torch.nn.Module) -> dict[str, dict[str, float]]:
        return {
            f"{name}.{role}": {key: float(value) for key, value in stats.items()}
            for name, module in model.named_modules()
            if isinstance(module, Fp8Linear)
            for role, stats in module.runhealth_precision_stats().items()
        }

    @torch.no_grad()
    def evaluate(self, step: int) -> float:
        """Held-out loss of the leading replica after `step` steps."""
        tokens = self.heldout
        for fault in self.faults[0]:
            tokens = fault.heldout(step, tokens)
        model = self.models[self._lead().ranks[0]]
        model.eval()
        loss = float(next_byte_loss(model(tokens[:, :-1]), tokens[:, 1:]))
        model.train()
        return loss
