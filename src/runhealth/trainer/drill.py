"""Failures of a rank's process, on order and once: RUNHEALTH_DRILL=MODE:step=N,rank=R[,attempt=A][;MODE:…].

Unlike a fault of a config, which belongs to the run and comes back after every resume, a drill belongs to one attempt
(the first, unless told otherwise): what it tests is detection, naming and restart. Modes: kill, segv, stop (signals to
the process itself), exception, exit (leaves without a word), hang (never comes back), mismatch (runs a collective that
its peers do not).
"""

import os
import signal
import time
from dataclasses import dataclass

from runhealth.storage.errors import ConfigError
from runhealth.trainer.config import FaultSpec

ENVIRONMENT = "RUNHEALTH_DRILL"
MODES = ("kill", "segv", "stop", "exception", "exit", "hang", "mismatch")
_SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
EXIT_CODE = 7


class DrillError(RuntimeError):
    """The exception of a drill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """`attempt` -1: in every attempt."""

    mode: str
    step: int
    rank: int
    attempt: int = 0

    @classmethod
    def ordered(cls) -> "tuple[Drill, ...]":
        """The drills that the environment asks for. Raises ConfigError for one that cannot be."""
        return tuple(cls._parse(text) for text in filter(None, os.environ.get(ENVIRONMENT, "").split(";")))

    @classmethod
    def _parse(cls, text: str) -> "Drill":
        spec = FaultSpec.parse(text)
        if spec.name not in MODES:
            raise ConfigError(f"{ENVIRONMENT}: expected a mode of {', '.join(MODES)}, met {spec.name!r}")
        numbers = {"attempt": 0, **spec.params}
        if set(numbers) != {"step", "rank", "attempt"} or not all(isinstance(n, int) for n in numbers.values()):
            raise ConfigError(f"{ENVIRONMENT}: expected {spec.name}:step=N,rank=R[,attempt=A], met {text!r}")
        step, rank, attempt = (int(numbers[key]) for key in ("step", "rank", "attempt"))
        return cls(mode=spec.name, step=step, rank=rank, attempt=attempt)

    def strike(self, step: int, rank: int, attempt: int) -> None:
        """Fail now, if it is time."""
        if (step, rank) != (self.step, self.rank) or self.attempt not in (attempt, -1):
            return
        print(f"drill: {self.mode} of rank {rank} at step {step}, {time.time_ns()}", flush=True)
        if self.mode in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[self.mode])
        elif self.mode == "exception":
            raise DrillError(f"ordered at step {step}")
        elif self.mode == "exit":
            os._exit(EXIT_CODE)
        elif self.mode == "mismatch":
            _another_collective()
        else:
            while True:
                time.sleep(3600)


def _another_collective() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(3))
