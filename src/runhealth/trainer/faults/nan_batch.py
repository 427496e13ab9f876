"""Some samples hold a NaN: a feature or a sample weight that was never finite."""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.data import Part
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor


class NanBatch(Fault):
    """The first `severity` samples that `rank` reads at `step` have a gain of NaN in it, and so have their embedded
    inputs. It is the samples that are bad: where they are skipped, there is no NaN."""

    name = "nan_batch"

    def __init__(self, context: FaultContext, *, step: int = 200, rank: int = 1, severity: int = 1) -> None:
        super().__init__(context)
        if not 0 <= rank < context.config.world:
            raise ConfigError(f"fault nan_batch: expected a rank below {context.config.world}, met {rank}")
        self.step, self.rank, self.severity = step, rank, severity
        rows = _rows(context.plan.batch(step, rank))
        self._bad = {sample for row, sample in rows.items() if row < severity}
        self._here: dict[int, tuple[int, int]] = {}

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name, cause="bad_shard", onset_step=self.step, last_step=self.step, ranks=(self.rank,)
        )

    def parts(self, step: int, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        self._here = _rows(parts) if step == self.step else {}
        return parts

    def gain(self, step: int, gain: "Tensor") -> "Tensor":
        bad = [row for row, sample in self._here.items() if sample in self._bad]
        if step != self.step or not bad:
            return gain
        gain = gain.clone()
        gain[bad] = float("nan")
        return gain


def _rows(parts: tuple[Part, ...]) -> dict[int, tuple[int, int]]:
    """Row of the batch -> (shard, sample)."""
    return {
        row: (part.shard, sample) for part in parts for row, sample in zip(part.positions, part.samples, strict=True)
    }


FAULT = NanBatch
