"""What a kind of run is."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.faults.clock import WORLD

from runhealth.trainer.config import FaultSpec

JITTER = 1.4
DENSE = ("fp32", "fp32", "fp8", "fp16", "moe")  # drawn from; fp32 twice as often
Params = Mapping[str, float | int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`severities` goes from low to high; where `cap` is set a drawn severity stays at or under it, where `whole` it
    is rounded. `resume`: the fault begins at a resume. `tail` steps follow the onset. `ranked`: a rank is drawn.
    `visit`: the onset is the first step of a visit of a shard. `scene`: instead of a fault, something healthy that
    happens at the onset."""

    name: str
    cause: str
    fault: str = ""
    severities: tuple[float, float, float] = (0.0, 1.0, 2.0)
    params: Params = field(default_factory=dict)
    precisions: tuple[str, ...] = DENSE
    tail: int = 36
    cap: float | None = None
    whole: bool = False
    resume: bool = False
    ranked: bool = False
    visit: bool = False
    held_out: bool = False
    scene: str = ""
    fixed: bool = False  # severities are levels, not amounts: never jittered

    @property
    def benign(self) -> bool:
        return self.cause == "benign"

    def severity(self, level: int, jitter: random.Random | None) -> float:
        """Of level 0 to 2."""
        value = self.severities[level]
        if jitter is not None and not self.fixed:
            value *= JITTER ** jitter.uniform(-1.0, 1.0)
        if self.cap is not None:
            value = min(value, self.cap)
        return float(round(value)) if self.whole else value

    def spec(self, onset: int, level: int, severity: float, draw: random.Random) -> FaultSpec | None:
        if not self.fault:
            return None
        params: dict[str, Any] = {"step": onset, **self.params}
        if not self.fixed:
            params["severity"] = int(severity) if self.whole else severity
        if self.ranked:
            params["rank"] = draw.randrange(WORLD)
        for key, value in params.items():
            if isinstance(value, tuple):  # by level
                params[key] = value[level]
        return FaultSpec(name=self.fault, params=params)
