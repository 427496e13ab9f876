"""What replicas differ in: one layer, or all of them. Two suspects read it, each with its own sign.

A bit that flips in one replica's weights stays in the tensor that it hit, since all replicas then apply the same
update; an update that one replica does not apply, or applies otherwise, leaves all layers different.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runhealth.diagnose import queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.frames import Frame

LEAST_LAYERS = 3  # with fewer, "one" and "all" are hardly different
ALL_SHARE = 0.8  # frozen layers and layers without gradient stay equal in a desync too
BOTH_NATS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersApart:
    """`differing` of `compared` layers had more than one checksum among replicas, in the samples `first` to `last`."""

    differing: tuple[str, ...]
    compared: int
    first: Frame
    last: Frame
    samples: int

    @property
    def is_one(self) -> bool:
        return self.compared >= LEAST_LAYERS and len(self.differing) == 1

    @property
    def is_all(self) -> bool:
        return self.compared >= LEAST_LAYERS and len(self.differing) >= ALL_SHARE * self.compared


def layers_apart(case: Case, first: int, last: int) -> LayersApart | None:
    """All samples of the steps taken together; None where no layer's checksum differs, or none was recorded."""
    peers = _peers(case)
    differing: set[str] = set()
    compared: set[str] = set()
    frames = []
    for frame in case.between(first, last):
        by_layer: dict[str, dict[int, set[float]]] = {}
        for sample in frame.layers:
            checksum = sample.values.get("param_checksum")
            if checksum is not None:
                group = peers.get(sample.rank, 0)
                by_layer.setdefault(sample.layer, {}).setdefault(group, set()).add(float(checksum))
        apart = {layer for layer, groups in by_layer.items() if any(len(sums) > 1 for sums in groups.values())}
        if apart:
            differing |= apart
            compared |= by_layer.keys()
            frames.append(frame)
    if not frames:
        return None
    return LayersApart(
        differing=tuple(sorted(differing)),
        compared=len(compared),
        first=frames[0],
        last=frames[-1],
        samples=len(frames),
    )


def layer_evidence(apart: LayersApart, *, one_nats: float, all_nats: float) -> Evidence | None:
    """Evidence of a suspect that gains `one_nats` where one layer differs and `all_nats` where all do. None between."""
    if not (apart.is_one or apart.is_all):
        return None
    name = apart.differing[0]
    if apart.is_one:
        again = f", and still at step {apart.last.step:,}" if apart.samples > 1 else ""
        claim = f"the replicas differ in {name} alone, the other {apart.compared - 1} layers are the same{again}"
    else:
        claim = f"the replicas differ in {len(apart.differing)} of {apart.compared} layers: an update went apart"
    return Evidence(
        claim=claim,
        weight_nats=one_nats if apart.is_one else all_nats,
        steps=(apart.first.step, apart.last.step),
        layers=(name,) if apart.is_one else (),
        value=float(len(apart.differing)),
        baseline=float(apart.compared),
        query=queries.distinct_layer("param_checksum", apart.first.attempt, apart.first.step, name),
    )


def _peers(case: Case) -> Mapping[int, int]:
    """rank -> lowest rank with the same checksum, before the incident: what was never equal is no replica. Empty where
    nothing is known of it, and all ranks are taken as replicas."""
    found: Sequence[Frame] = [f for f in reversed(case.before) if len(f.per_rank("param_checksum")) > 1][:1]
    if not found:
        return {}
    leaders: dict[float, int] = {}
    sums = found[0].per_rank("param_checksum")
    return {rank: leaders.setdefault(float(sums[rank]), rank) for rank in sorted(sums)}
