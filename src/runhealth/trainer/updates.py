"""What a step did to the parameters, as only the engine can tell: how far the optimizer moved those of the whole model
where no rank holds all of them, and whom the routers of a mixture of experts chose.

Where rank 0 has the whole model the monitor measures updates itself. Here every rank takes part: parameters are copied
before the step and subtracted after it, and both norms are summed over shards and stages.
"""

import torch
from torch import Tensor

from runhealth.instrument.step import Step
from runhealth.trainer.parallel.engine import Engine


class ShardedUpdates:
    """`update_ratio` and `weight_norm` every `every` steps; collective in those. `every` 0 turns it off.
    `router_load_max` in each step of a model with experts: of the most lopsided router of this rank, and by layer."""

    def __init__(self, engine: Engine, every: int) -> None:
        self._engine, self._every = engine, every
        self._before: list[Tensor] = []

    @torch.no_grad()
    def before_optimizer(self, step: int) -> None:
        if self._every and step % self._every == 0:
            self._before = [parameter.detach().clone() for parameter in self._engine.part.parameters()]

    @torch.no_grad()
    def after_optimizer(self, record: Step) -> None:
        loads = {layer: float(load) for layer, load in self._engine.router_loads().items()}
        for layer, load in loads.items():
            record.record_layer(layer, {"router_load_max": load})
        if loads:
            record.record("router_load_max", max(loads.values()))
        before, self._before = self._before, []
        if not before:
            return
        weight = self._engine.norm_of(before)
        torch._foreach_sub_(before, [parameter.detach() for parameter in self._engine.part.parameters()])
        record.record("weight_norm", weight)
        record.record("update_ratio", self._engine.norm_of(before) / weight)
