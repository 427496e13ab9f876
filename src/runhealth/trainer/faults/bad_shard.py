"""A shard arrives corrupted: its bytes are changed between the disk and the rank, every time it is read."""

import random
from collections.abc import Callable, Mapping

import xxhash

from runhealth.storage.errors import ConfigError
from runhealth.trainer.data import shard_name
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel


def _noise(blob: bytes, seed: int) -> bytes:
    return random.Random(seed).randbytes(len(blob))


def _zeros(blob: bytes, _seed: int) -> bytes:
    return bytes(len(blob))


def _repeat(blob: bytes, _seed: int) -> bytes:
    unit = blob[:16]
    return (unit * (len(blob) // len(unit) + 1))[: len(blob)]


def _shuffle(blob: bytes, seed: int) -> bytes:
    shuffled = bytearray(blob)
    random.Random(seed).shuffle(shuffled)
    return bytes(shuffled)


_MODES: Mapping[str, Callable[[bytes, int], bytes]] = {
    "noise": _noise,
    "zeros": _zeros,
    "repeat": _repeat,
    "shuffle": _shuffle,
}


class BadShard(Fault):
    """The shard that `rank` visits at `step` is bad from its first byte up to the share `severity` of its length.

    `mode`: noise (uniform random bytes), zeros, repeat (its first 16 bytes again and again), or shuffle (its own bytes
    in random order, which no histogram shows).
    """

    name = "bad_shard"

    def __init__(
        self, context: FaultContext, *, step: int = 240, rank: int = 1, mode: str = "noise", severity: float = 1.0
    ) -> None:
        super().__init__(context)
        if mode not in _MODES:
            raise ConfigError(f"fault bad_shard: expected mode out of {', '.join(_MODES)}, met {mode!r}")
        if not 0 < severity <= 1:
            raise ConfigError(f"fault bad_shard: expected 0 < severity <= 1, met {severity}")
        if not 0 <= rank < context.config.world:
            raise ConfigError(f"fault bad_shard: expected a rank below {context.config.world}, met {rank}")
        self.rank, self.mode, self.severity = rank, mode, severity
        self.visit = context.plan.visit_of(step)
        self.shard = shard_name(context.plan.shard_of(step, rank))

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="bad_shard",
            onset_step=self.visit.start,
            last_step=self.visit.stop - 1,
            ranks=(self.rank,),
            shards=(self.shard,),
        )

    def tamper(self, shard: str, blob: bytes) -> bytes:
        if shard != self.shard:
            return blob
        bad = round(len(blob) * self.severity)
        return _MODES[self.mode](blob[:bad], xxhash.xxh3_64_intdigest(shard.encode())) + blob[bad:]


FAULT = BadShard
