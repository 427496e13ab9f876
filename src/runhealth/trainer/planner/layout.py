"""How a model is laid over a cluster."""

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`tp` GPUs share each layer (with sequence parallelism between the matrices), `pp` stages of consecutive layers,
    `dp` replicas, or shards where `zero` > 0. Each replica works through `microbatches` of `micro_batch` sequences a
    step; `interleave` is the number of chunks of layers that a stage holds."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    micro_batch: int = 1
    microbatches: int = 1
    interleave: int = 1
    recompute: Recompute = "none"

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def bubble(self) -> float:
        """Share of the step in which a stage waits: (p-1) / (v·m + p-1), Narayanan et al. (arXiv:2104.04473)."""
        idle = self.pp - 1
        return idle / (self.interleave * self.microbatches + idle)

    @property
    def in_flight(self) -> float:
        """Micro-batches whose activations the first stage holds at the peak: 1F1B p, interleaved p·(1 + (p-1)/(p·v))
        (arXiv:2205.05198, section 4.2.3), never more than there are."""
        if self.pp == 1:
            return 1.0
        held = self.pp if self.interleave == 1 else self.pp + (self.pp - 1) / self.interleave
        return float(min(held, self.microbatches))

    def words(self) -> str:
        parts = []
        if self.dp > 1 or (self.tp == 1 and self.pp == 1):
            parts.append(f"ZeRO-{self.zero} over {self.dp}" if self.zero else f"data parallel {self.dp}")
        if self.tp > 1:
            parts.append(f"tensor parallel {self.tp}")
        if self.pp > 1:
            chunks = f", {self.interleave} chunks a stage" if self.interleave > 1 else ""
            parts.append(f"pipeline {self.pp}{chunks}")
        recompute = {"none": "nothing", "selective": "attention", "full": "every layer"}[self.recompute]
        batches = f"{self.microbatches:,} micro-batch{'' if self.microbatches == 1 else 'es'} of {self.micro_batch}"
        return f"{' x '.join(parts)}; {batches}; recomputes {recompute}"
