"""A shard that was tokenized with another tokenizer of the same vocabulary size.

All ids are valid, the shard is what its manifest says, its histogram is as uneven as any other's; only the ids mean
something else. No check of ids against the vocabulary size sees it: github.com/Lightning-AI/litgpt/issues/471.
"""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.data import Part, permutation, shard_name
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor

_VOCABULARY, _KEY = 256, 471


class WrongTokenizer(Fault):
    """A share `severity` of the samples of the shard that `rank` visits at `step`, scattered over it, has its ids
    permuted, the same way each time, whoever reads them."""

    name = "wrong_tokenizer"

    def __init__(self, context: FaultContext, *, step: int = 240, rank: int = 1, severity: float = 1.0) -> None:
        super().__init__(context)
        if not 0 < severity <= 1:
            raise ConfigError(f"fault wrong_tokenizer: expected 0 < severity <= 1, met {severity}")
        if not 0 <= rank < context.config.world:
            raise ConfigError(f"fault wrong_tokenizer: expected a rank below {context.config.world}, met {rank}")
        self.rank = rank
        self.visit = context.plan.visit_of(step)
        self.shard = context.plan.shard_of(step, rank)
        samples = context.config.data.samples_per_shard
        self.samples = frozenset(permutation(samples, _KEY)[: max(1, round(severity * samples))])
        self._parts: tuple[Part, ...] = ()

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="bad_shard",
            onset_step=self.visit.start,
            last_step=self.visit.stop - 1,
            ranks=(self.rank,),
            shards=(shard_name(self.shard),),
        )

    def parts(self, step: int, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        del step
        self._parts = parts
        return parts

    def tokens(self, step: int, inputs: "Tensor", labels: "Tensor") -> "tuple[Tensor, Tensor]":
        del step
        rows = [
            row
            for part in self._parts
            if part.shard == self.shard
            for row, sample in zip(part.positions, part.samples, strict=True)
            if sample in self.samples
        ]
        if not rows:
            return inputs, labels
        import torch

        other = torch.tensor(permutation(_VOCABULARY, _KEY))
        inputs, labels = inputs.clone(), labels.clone()
        inputs[rows], labels[rows] = other[inputs[rows]], other[labels[rows]]
        return inputs, labels


FAULT = WrongTokenizer
