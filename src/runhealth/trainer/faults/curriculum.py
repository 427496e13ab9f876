"""Benign: from some step on all ranks read another, clean kind of text, as a curriculum has it."""

from runhealth.storage.errors import ConfigError
from runhealth.trainer.data import Part
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel


class Curriculum(Fault):
    """From `step` on a share `severity` of the samples of every batch comes from the shards `first` to `first` +
    `count` - 1, which must be in the data's manifest."""

    name = "curriculum"

    def __init__(
        self, context: FaultContext, *, step: int = 200, first: int = 0, count: int = 1, severity: float = 0.5
    ) -> None:
        super().__init__(context)
        if not 0 < severity <= 1 or count < 1:
            raise ConfigError(
                f"fault curriculum: expected 0 < severity <= 1 and count >= 1, met {severity} and {count}"
            )
        self.step, self.first, self.count, self.severity = step, first, count, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="benign",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def parts(self, step: int, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        return parts if step < self.step else mixed(parts, self._shard(step), self.severity)

    def _shard(self, step: int) -> int:
        return self.first + (step * self.context.config.world + self.context.rank) % self.count


def mixed(parts: tuple[Part, ...], shard: int, share: float) -> tuple[Part, ...]:
    """The batch with a share of its rows, the last ones, read from another shard at the same sample numbers."""
    rows = sorted((position, part.shard, sample) for part in parts for position, sample in _rows(part))
    kept = len(rows) - round(share * len(rows))
    rows = [(row, shard if row >= kept else owner, sample) for row, owner, sample in rows]
    return tuple(
        Part(
            shard=owner,
            samples=tuple(sample for _, o, sample in rows if o == owner),
            positions=tuple(row for row, o, _ in rows if o == owner),
        )
        for owner in dict.fromkeys(owner for _, owner, _ in rows)
    )


def _rows(part: Part) -> list[tuple[int, int]]:
    return list(zip(part.positions, part.samples, strict=True))


FAULT = Curriculum
