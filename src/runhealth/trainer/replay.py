"""A stretch of a run once more on one rank, with one thing changed (`diagnose replay`).

The replay is the training loop itself with the attempt's own config, data plan, skips and repairs, from a checkpoint
on. It saves nothing and evaluates nothing. What it changes, it changes in training: it knows nothing of injected
faults, except that those which stand for a machine's passing fault (`Fault.transient`) do not happen again, as a
machine would not do it again either.

Sources of the changes: clipping of updates after Wortsman et al. (arXiv:2304.13013, section 3.5), here of the update
that was made; the cap on logits after QK-clip (Kimi K2, arXiv:2507.20534), here of the matrices they are made of.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from runhealth.diagnose.plans import ReplayOrder, SkipRange
from runhealth.storage.errors import ConfigError
from runhealth.trainer import dcp
from runhealth.trainer.data import BatchPlan, Part, shard_name
from runhealth.trainer.folders import join
from runhealth.trainer.hooks import FaultHooks
from runhealth.trainer.layout import place
from runhealth.trainer.loop import Trainer
from runhealth.trainer.model import Block
from runhealth.trainer.parallel.zero1 import local
from runhealth.trainer.precision.fp8 import Fp8Linear
from runhealth.trainer.schedule import learning_rate

LOGIT_HEADROOM = 1.05  # a matrix may outgrow the norm that it was loaded with by so much
_LOGIT_MATRICES = ("qkv.weight", "q.weight", "k.weight", "head.weight")


class Replay(Trainer):
    """One rank of a replay; `spec.replay` is the order."""

    order: ReplayOrder
    _lane: int  # the data-parallel rank whose data are read
    _lane_hooks: FaultHooks  # what that rank's data went through
    _without: BatchPlan | None = None  # the data plan without the masked shards

    def _load(self, folder: str) -> None:
        """Called once, before the monitor puts its own hooks on the optimizer: what it measures is what was changed."""
        assert self.spec.replay is not None
        self.order = self.spec.replay
        self._choose_data()
        self._hook_optimizer()
        if self.order.resumes:
            super()._load(folder)
        else:  # the attempt trained through this step and loaded nothing here
            self.step = dcp.load(folder, self.model, self.optimizer, rank=self.rank)
        self._change_state()

    def _needs_warm_up(self) -> bool:
        """Also where two ranks sum the same in either order: the norm of what a rank sends is summed bucket by bucket,
        and to be equal to the last bit is the point. An attempt that began here began with its own first buckets."""
        return super()._needs_warm_up() or (bool(self.engine.replicas) and not self.order.resumes)

    def _choose_data(self) -> None:
        self._lane, self._lane_hooks = self.place.dp, self.hooks
        self._masked: list[int] = []  # rows of the batch at hand
        if self.order.change == "swap_lanes":
            self._lane = (self.place.dp + 1) % self.config.dp
            same = (self.place.pp, self.place.tp)
            neighbour = next(
                rank
                for rank in range(self.world)
                if (at := place(self.config, rank)).dp == self._lane and (at.pp, at.tp) == same
            )
            self._lane_hooks = FaultHooks(self.spec, neighbour)
        elif self.order.change == "mask_shards":
            last = self.config.data.samples_per_shard - 1
            masked = [SkipRange(shard=shard, first_sample=0, last_sample=last) for shard in self.order.shards]
            self._without = BatchPlan(
                data=self.config.data,
                seed=self.config.seed,
                world=self.config.dp,
                skips=self.spec.skips.add(masked),
            )

    def _hook_optimizer(self) -> None:
        change = self.order.change
        if change == "scheduled_lr":
            self.optimizer.register_step_pre_hook(lambda *_: self._apply_lr(self._scheduled(self.step)))
        elif change in ("restore_optimizer", "configured_optimizer"):
            local(self.optimizer).register_step_pre_hook(lambda *_: self._configure())
        elif change == "clip_updates":
            _UpdateClip(local(self.optimizer))

    def _change_state(self) -> None:
        change = self.order.change
        if change == "restore_optimizer":
            self._take_moments(join(self.spec.checkpoint_base, self.order.before or self.spec.checkpoint))
        elif change == "fp32":
            self._raise_precision()
        elif change == "cap_logits":
            if not self.engine.is_replicated:
                raise ConfigError("replay: cap_logits needs a layout in which each rank holds the whole model")
            cap = _cap_on(self.model)
            self.optimizer.register_step_post_hook(lambda *_: cap())

    def _clip(self) -> None:
        whole = self.clip_threshold
        if self.order.change == "half_clip":
            self.clip_threshold = whole / 2
        super()._clip()
        self.clip_threshold = whole

    def _checkpoint(self) -> None:
        """A replay leaves no checkpoint behind."""

    def _evaluate_if_due(self) -> None:
        """Nor does it evaluate."""

    def _set_learning_rate(self, step: int) -> float:
        if self.order.change != "scheduled_lr":
            return super()._set_learning_rate(step)
        lr = self._scheduled(step)
        self._apply_lr(lr)
        return lr

    def _scheduled(self, step: int) -> float:
        return learning_rate(self.config.optim, step, self.config.steps)

    def _apply_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _configure(self) -> None:
        """The settings of the config, whatever changed them; the learning rate is another matter."""
        optim = self.config.optim
        for group in local(self.optimizer).param_groups:
            group["betas"] = (optim.beta1, optim.beta2)
            group["weight_decay"] = optim.weight_decay
            group["eps"] = local(self.optimizer).defaults["eps"]

    def _take_moments(self, folder: str) -> None:
        """The optimizer's state of another checkpoint, or of the same one as it lies on the disk; weights and buffers
        stay what they are."""
        kept = [*self.model.parameters(), *self.model.buffers()]
        values = [tensor.detach().clone() for tensor in kept]
        dcp.load(folder, self.model, self.optimizer, rank=self.rank)
        with torch.no_grad():
            for tensor, value in zip(kept, values, strict=True):
                tensor.copy_(value)

    def _raise_precision(self) -> None:
        if self.config.model.precision == "fp8_torchao":
            raise ConfigError("replay: the layers of fp8_torchao cannot be put back to fp32")
        for module in self.model.modules():
            if isinstance(module, Fp8Linear):
                module.high_precision = True
            elif isinstance(module, Block):
                module.autocast_dtype = None
        if self.scaler is not None:
            self.scaler.state.scale.fill_(1.0)  # float32 has the range: nothing needs to be scaled

    def _batch(self, step: int) -> tuple[tuple[Part, ...], Tensor, Tensor]:
        parts = self._lane_hooks.parts(step, self.plan.batch(step, self._lane))
        tokens = torch.from_numpy(self.reader.rows(parts))
        inputs, labels = self._lane_hooks.tokens(step, tokens[:, :-1], tokens[:, 1:])
        if self._without is None:
            return parts, inputs, labels
        masked = {row for part in parts if shard_name(part.shard) in self.order.shards for row in part.positions}
        self._masked = sorted(masked)
        if not masked:
            return parts, inputs, labels
        others = self._without.batch(step, self._lane)
        fresh = torch.from_numpy(self.reader.rows(others))
        rows = self._masked
        inputs, labels = inputs.clone(), labels.clone()
        inputs[rows], labels[rows] = fresh[rows, :-1], fresh[rows, 1:]
        return _merged(parts, others, masked), inputs, labels

    def _gain(self, step: int, samples: int) -> Tensor | None:
        gain = self._lane_hooks.gains(step, samples)
        gain[self._masked] = 1.0
        return self.hooks.give(gain)


def _merged(parts: tuple[Part, ...], others: tuple[Part, ...], masked: set[int]) -> tuple[Part, ...]:
    """The rows of `parts`, those in `masked` taken from `others`."""
    owners: dict[int, tuple[int, int]] = {}
    for source, wanted in ((parts, False), (others, True)):
        for part in source:
            for row, sample in zip(part.positions, part.samples, strict=True):
                if (row in masked) is wanted:
                    owners[row] = (part.shard, sample)
    found = []
    for shard in dict.fromkeys(owners[row][0] for row in sorted(owners)):
        rows = tuple(row for row in sorted(owners) if owners[row][0] == shard)
        found.append(Part(shard=shard, samples=tuple(owners[row][1] for row in rows), positions=rows))
    return tuple(found)


class _UpdateClip:
    """Divides a tensor's update by its RMS in units of the learning rate, where that is over 1. Adam's updates are of
    about that size at most (Kingma & Ba, arXiv:1412.6980, section 2.1), unless the second moment is behind."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before: list[Tensor] = []
        optimizer.register_step_pre_hook(lambda *_: self._remember())
        optimizer.register_step_post_hook(lambda *_: self._clip())

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]

    def _remember(self) -> None:
        self._before = [p.detach().clone() for p in self._parameters()]

    @torch.no_grad()
    def _clip(self) -> None:
        lr = float(self._optimizer.param_groups[0]["lr"])
        for parameter, before in zip(self._parameters(), self._before, strict=True):
            update = parameter - before
            mean = update.square().mean()
            whole: Callable[[], Tensor] | None = getattr(mean, "full_tensor", None)
            rms = float(mean if whole is None else whole()) ** 0.5
            if rms > lr > 0:
                parameter.copy_(before + update * (lr / rms))
        self._before = []


def _cap_on(model: nn.Module) -> Callable[[], None]:
    """Bounds the matrices that attention and output logits are made of by the norms that they have now."""
    parts: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if name.endswith(_LOGIT_MATRICES):
            weight = parameter.data
            parts += list(weight.chunk(3)[:2]) if name.endswith("qkv.weight") else [weight]
    limits = [LOGIT_HEADROOM * float(part.norm()) for part in parts]

    def cap() -> None:
        for part, limit in zip(parts, limits, strict=True):
            norm = float(part.norm())
            if norm > limit:
                part.mul_(limit / norm)

    return cap
