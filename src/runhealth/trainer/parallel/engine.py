"""One code path for all layouts: build the rank's part of the model, run a step's forward and backward passes on it,
and evaluate with it."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from runhealth.trainer import activation, experts, mesh
from runhealth.trainer.config import TrainConfig
from runhealth.trainer.layout import layers_of, place, stages_of
from runhealth.trainer.model import VOCABULARY, Transformer, build, next_byte_loss
from runhealth.trainer.norms import global_norm, total_norm
from runhealth.trainer.parallel import ddp, sharded, tensor, zero1
from runhealth.trainer.parallel.pipeline import Pipeline
from runhealth.trainer.parallel.sharded import PhaseTimer
from runhealth.trainer.precision import fp8


class Watcher(Protocol):
    """What the loop wants to know of, and to decide in, a step."""

    def phase(self, name: str) -> AbstractContextManager[object]: ...

    def forward_done(self, loss: Tensor, logits: Tensor) -> None:
        """After the forward pass of each micro-batch, on the ranks that know its loss (the mean over its tokens)."""

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to derive: multiplied with the loss scale, if there is one."""


class Engine:
    """This rank's part of the model in its layout. Collective to build, to train and to evaluate with.

    `part` holds this rank's parameters under their names in the whole model, `replicas` what DDP wraps, `has_loss` says
    whether the last stage is here.
    """

    def __init__(self, config: TrainConfig, rank: int) -> None:
        self.config, self.parallel = config, config.parallel
        self.place = place(config, rank)
        self.mesh = mesh.build(config)
        self.replicas: list[DistributedDataParallel] = []
        self._pipeline_group = self._group("pp")
        self._watcher: Watcher | None = None
        self.stages = [self._stage(number) for number in stages_of(config, self.place.pp)]
        self.part = _union(self.stages)
        self._wrapped: list[nn.Module] = list(self.stages)
        self._scales = [scale for _, scale in fp8.scales(self.part)]
        for scale in self._scales:
            scale.deferred = self.parallel.microbatches > 1 or self.parallel.recompute != "none"
        self._mixtures = dict(experts.of(self.part))
        self.pipeline: Pipeline | None = None
        self.has_loss = self.place.pp == self.parallel.pp - 1

    def _stage(self, number: int) -> Transformer:
        config = self.config
        model = build(config.model, config.data.seq_len, config.seed)
        if self.parallel.pp > 1:
            last = number == self.parallel.stages - 1
            model.keep(layers_of(config, number), first=number == 0, last=last)
        if self.parallel.tp > 1:
            assert self.mesh is not None
            tensor.apply(model, self.mesh["tp"])
        activation.apply(model, self.parallel.recompute)
        if self.parallel.shards_state:
            sharded.apply(model, self._data_mesh(), keep_gathered=self.parallel.kind == "zero2")
        return model

    def make_optimizer(self) -> torch.optim.Optimizer:
        """AdamW over this rank's parameters. Fused where all of them are of one kind."""
        optim = self.config.optim
        # the fused step cannot be mixed with gradients on two meshes, nor skipped by a loss scaler on all ranks alike
        plain = self.parallel.tp == 1 and self.config.model.precision != "fp16"
        fused = {"fused": True} if plain else {"foreach": True}
        options: dict[str, Any] = {
            "lr": optim.lr,
            "betas": (optim.beta1, optim.beta2),
            "weight_decay": optim.weight_decay,
            **fused,
        }
        if self.parallel.kind == "zero1" and self.config.dp > 1:
            group = self._group("shard") or dist.group.WORLD
            assert group is not None
            return zero1.ShardedAdamW(list(self.part.parameters()), group, **options)
        return torch.optim.AdamW(self.part.parameters(), **options)

    def wrap(self) -> None:
        """Last of all, once a checkpoint is loaded: DDP, which copies rank 0's parameters, and the pipeline."""
        if self.parallel.tp == 1 and not self.parallel.shards_state and (self.config.dp > 1 or self.parallel.pp == 1):
            self.replicas = [ddp.wrap(stage, self._group("shard")) for stage in self.stages]
            self._wrapped = list(self.replicas)
        if self.parallel.pp > 1:
            assert self._pipeline_group is not None
            self.pipeline = Pipeline(
                self.parallel,
                self._wrapped,
                stages_of(self.config, self.place.pp),
                self._stream_shape(self.config.data.batch_size // self.parallel.microbatches),
                VOCABULARY,
                self._pipeline_group,
                self._loss,
            )

    def train(self, inputs: Tensor, labels: Tensor, watcher: Watcher) -> None:
        """Gradients of the mean loss of a batch, int64 [batch, seq] each, reduced over the data-parallel ranks."""
        self._watcher = watcher
        if self.pipeline is not None:
            self.pipeline.train(inputs, labels, watcher.phase)
            return
        parts = self.parallel.microbatches
        for number, (x, y) in enumerate(zip(inputs.chunk(parts), labels.chunk(parts), strict=True)):
            with self._accumulation(last=number == parts - 1):
                with watcher.phase("forward"):
                    logits = self._wrapped[0](x)
                    loss = next_byte_loss(logits, y)
                watcher.forward_done(loss, logits)
                for mixture in self._mixtures.values():
                    loss = loss + experts.BALANCE * mixture.take_balance()
                scaled = watcher.scaled(loss)
                with watcher.phase("backward"):
                    (scaled / parts if parts > 1 else scaled).backward()  # type: ignore[no-untyped-call]

    def end_step(self) -> None:
        """After the backward passes: gradients of replicated parameters are summed over tensor parallelism, once and
        not at each use, and scales that stood for the whole step take in what they saw."""
        if self.parallel.tp > 1:
            tensor.reduce_partial(self.part)
        for scale in self._scales:
            scale.commit()

    def router_loads(self) -> dict[str, Tensor]:
        """The largest share of this rank's tokens that one expert got in the step, by layer; empty without experts."""
        return {name: mixture.take_load().max() for name, mixture in self._mixtures.items()}

    def norm(self) -> Tensor:
        """The true global gradient norm, one plain number; collective."""
        return global_norm(self.part.parameters(), self._pipeline_group)

    def norm_of(self, tensors: list[Tensor]) -> Tensor:
        """L2 norm over all ranks of tensors that are laid out as the parameters are; collective."""
        return total_norm(tensors, self._pipeline_group)

    @torch.no_grad()
    def logits(self, inputs: Tensor) -> Tensor | None:
        """int64 [batch, seq] -> f32 [batch, seq, 256], or None on a rank without the last stage. Every rank of a
        sharded or pipelined layout has to call it equally often."""
        result: Tensor | None
        if self.pipeline is not None:
            result = self.pipeline.relay(inputs, self._stream_shape(len(inputs), inputs.shape[1]))
        else:
            result = self.stages[0](inputs)
        for stage in self.stages:
            sharded.free(stage)
        return result

    def time_waiting(self, phase: PhaseTimer) -> None:
        """Have the collectives of sharded parameters timed as the phase `wait`."""
        for stage in self.stages:
            sharded.time_waiting(stage, phase)

    def warm_up(self, inputs: Tensor, labels: Tensor) -> None:
        """A throw-away pass. DDP sorts its buckets anew after its first backward pass, so a resumed run would sum its
        first step in another order than the run it continues, and from three ranks on that shows in the last bit."""
        before = {name: buffer.clone() for name, buffer in self.part.named_buffers()}
        self.train(inputs, labels, _Silent())
        for name, buffer in self.part.named_buffers():
            buffer.copy_(before[name])
        for scale in self._scales:
            scale.pending = 0.0
        self.router_loads()
        for parameter in self.part.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    @property
    def needs_warm_up(self) -> bool:
        return bool(self.replicas) and self.config.dp > 2

    @property
    def is_replicated(self) -> bool:
        """Whether this rank holds the whole model and its whole gradients."""
        return self.parallel.pp == 1 and self.parallel.tp == 1 and not self.parallel.shards_state

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        assert self._watcher is not None
        loss = next_byte_loss(logits, labels)
        self._watcher.forward_done(loss, logits)
        return self._watcher.scaled(loss)

    @contextlib.contextmanager
    def _accumulation(self, *, last: bool) -> Iterator[None]:
        """Reduce gradients after the last micro-batch only."""
        for model in self._wrapped:
            sharded.synchronise(model, last)
        with contextlib.nullcontext() if last or not self.replicas else self.replicas[0].no_sync():
            yield

    def _stream_shape(self, batch: int, seq: int | None = None) -> tuple[int, int, int]:
        """Of the residual stream between stages: with tensor parallelism each rank has its part of the sequence."""
        whole = seq or self.config.data.seq_len
        return batch, whole // self.parallel.tp, self.config.model.width

    def _group(self, name: str) -> dist.ProcessGroup | None:
        """The group of a mesh dimension; None where the layout has none, or the world takes its place."""
        if self.mesh is None or name not in (self.mesh.mesh_dim_names or ()):
            return None
        return self.mesh[name].get_group()

    def _data_mesh(self) -> DeviceMesh:
        assert self.mesh is not None
        return self.mesh["replica", "shard"] if self.parallel.kind == "hsdp" else self.mesh["shard"]


class _Silent:
    def phase(self, name: str) -> AbstractContextManager[object]:  # noqa: ARG002  the protocol's
        return contextlib.nullcontext()

    def forward_done(self, loss: Tensor, logits: Tensor) -> None:
        pass

    def scaled(self, loss: Tensor) -> Tensor:
        return loss


def _union(stages: Sequence[Transformer]) -> nn.Module:
    """One module that holds the parameters of all stages of a rank under their names in the whole model."""
    if len(stages) == 1:
        return stages[0]
    whole = nn.Module()
    blocks = nn.ModuleDict()
    for stage in stages:
        if stage.embed is not None:
            whole.embed = stage.embed
        blocks.update(dict(stage.blocks.items()))
    whole.blocks = blocks
    for stage in stages:
        if stage.norm is not None and stage.head is not None:
            whole.norm, whole.head = stage.norm, stage.head
    return whole
