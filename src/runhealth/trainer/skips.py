"""The samples that must not be trained on, by shard. Kept with the run, so that every later resume honours them."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from runhealth.diagnose.plans import SkipRange
from runhealth.storage.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SkipSet:
    """Sorted, disjoint, inclusive sample ranges by shard name."""

    ranges: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def covers(self, shard: str, sample: int) -> bool:
        ranges = self.ranges.get(shard)
        if not ranges:
            return False
        index = bisect_right(ranges, (sample, 1 << 62)) - 1
        return index >= 0 and ranges[index][0] <= sample <= ranges[index][1]

    def add(self, skips: Iterable[SkipRange]) -> "SkipSet":
        merged: dict[str, list[tuple[int, int]]] = {shard: list(ranges) for shard, ranges in self.ranges.items()}
        for skip in skips:
            merged.setdefault(skip.shard, []).append((skip.first_sample, skip.last_sample))
        return SkipSet({shard: _merge(ranges) for shard, ranges in merged.items()})

    def samples(self) -> int:
        return sum(last - first + 1 for ranges in self.ranges.values() for first, last in ranges)

    def to_json(self) -> dict[str, list[list[int]]]:
        return {shard: [list(pair) for pair in ranges] for shard, ranges in sorted(self.ranges.items())}

    @classmethod
    def from_json(cls, raw: object) -> "SkipSet":
        if not isinstance(raw, dict):
            raise ConfigError(f"skip set: expected an object of shards, met {type(raw).__name__}")
        try:
            return cls({str(shard): _merge([(int(a), int(b)) for a, b in ranges]) for shard, ranges in raw.items()})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"skip set: expected [first, last] pairs, met {raw!r}") from error


def _merge(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)
