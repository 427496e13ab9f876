"""When the loop saves, what it records of a save, and which old checkpoints go: between the loop and the `Saver`."""

import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from runhealth.instrument import Monitor
from runhealth.storage.jsontext import parse_json
from runhealth.storage.records import CheckpointStatus
from runhealth.trainer import checkpoints
from runhealth.trainer.async_save import SaveOutcome, Saver
from runhealth.trainer.cadence import Cadence, cadence
from runhealth.trainer.launch import PROGRESS_PREFIX, LaunchSpec, write_json

PROBE_STEPS = 5  # after so many steps of a run without a measured save comes the first one
SAVES_KEPT = 5  # the median of so many is the cost of a save
LEAST_S = 1e-4
FILE = "cadence.json"


class Saves:
    """One for an attempt, on every rank. `due`, `make` and `finish` are called by all ranks at the same step."""

    def __init__(self, spec: LaunchSpec, monitor: Monitor, first_step: int) -> None:
        config = spec.config.checkpoint
        self._spec, self._monitor, self._first_step = spec, monitor, first_step
        self._saver = Saver(
            spec.checkpoint_base,
            attempt=spec.attempt,
            background=config.background,
            timeout_s=spec.config.timeout_s,
        )
        self._leader = dist.get_rank() == 0
        self._measured: deque[tuple[float, float]] = deque(maxlen=SAVES_KEPT)  # blocking_s, write_s
        self._first_end_s = 0.0  # when the first step of the attempt had ended
        self._step_s = 0.0
        self._restart_s = 0.0
        self._explained = False
        self.every = config.every
        if not self.every:
            self._read()
            self._decide(first_step)

    def due(self, step: int) -> bool:
        """Whether to save after `step` steps in all."""
        if step == self._first_step + 1:
            self._first_end_s = time.monotonic()
            if self._spec.failed_ns:
                self._restart_s = max(0.0, (time.time_ns() - self._spec.failed_ns) / 1e9)
        elif step > self._first_step + 1:
            self._step_s = (time.monotonic() - self._first_end_s) / (step - self._first_step - 1)
        if step == self._spec.stop_step:
            return True
        if self.every:
            return step % self.every == 0
        return step == self._first_step + PROBE_STEPS

    def make(self, state: Mapping[str, Tensor], step: int) -> None:
        """Save; training stands still for the copy only if saves are made in the background."""
        self._record(self._saver.start(state, step))
        if not self.every:
            self._record(self._saver.wait())
            self._decide(step)
        else:
            self.look()

    def look(self) -> None:
        """Record the save that has ended since, if one has. Costs nothing in a step without one."""
        self._record(self._saver.poll())

    def finish(self) -> None:
        """Wait for the save that is under way."""
        self._record(self._saver.wait())

    def _record(self, outcome: SaveOutcome | None) -> None:
        if outcome is None or not self._leader:
            return
        step, seconds, size = outcome.step, outcome.seconds, outcome.size_bytes
        if size:
            self._monitor.checkpoint(step, outcome.path, CheckpointStatus.SAVED, seconds=seconds, size_bytes=size)
        status = CheckpointStatus.VERIFIED if outcome.verified else CheckpointStatus.FAILED
        self._monitor.checkpoint(step, outcome.path, status, seconds=seconds, size_bytes=size, reason=outcome.error)
        if not outcome.verified:
            _say(f"checkpoint {step} is not usable, training goes on: {outcome.error}")
            return
        self._measured.append((outcome.blocking_s, outcome.write_s))
        spec = self._spec
        try:
            checkpoints.retire(spec.checkpoint_base, spec.config.checkpoint.keep, spec.needed, spec.superseded)
        except OSError as error:
            _say(f"old checkpoints cannot be removed, training goes on: {error}")
        if self.every and not self._explained:
            self._explain(step)

    def _decide(self, step: int) -> None:
        """All ranks take over the interval that rank 0 computes; 0 if nothing was measured yet."""
        every = torch.tensor(0)
        if self._leader:
            found = self._cadence()
            if found is not None:
                every.fill_(found.every_steps(self._step_s))
        dist.broadcast(every, src=0)
        self.every = int(every)
        if self._leader and self.every:
            self._explain(step)

    def _explain(self, step: int) -> None:
        """Say the arithmetic, and keep it: as an event of the run, and for the next attempt."""
        self._explained = True
        found = self._cadence()
        if found is None:
            return
        best = found.every_steps(self._step_s)
        chosen = "so" if not self._spec.config.checkpoint.every else f"the optimum is every {best:,} steps; by config"
        lines = (*found.explain(), f"{chosen} a save every {self.every:,} steps of {self._step_s:.3g} s")
        for line in lines:
            _say(f"checkpoint cadence: {line}")
        facts = {**found.to_json(), "step_s": self._step_s, "every": self.every, "optimum_every": best}
        self._monitor.event("cadence", lines[-1], {**facts, "arithmetic": list(lines), "at_step": step})
        try:
            write_json(Path(self._spec.run_path) / FILE, facts)
        except OSError:
            return  # a full disk: the next attempt measures anew

    def _cadence(self) -> Cadence | None:
        """None without an MTBF, a measured save or a measured step."""
        mtbf_h = self._spec.config.checkpoint.mtbf_h
        if not (mtbf_h and self._measured and self._step_s > 0):
            return None
        return cadence(
            save_s=max(LEAST_S, statistics.median(blocking for blocking, _ in self._measured)),
            write_s=statistics.median(write for _, write in self._measured),
            mtbf_s=mtbf_h * 3600.0,
            restart_s=self._restart_s,
        )

    def _read(self) -> None:
        """What an earlier attempt measured."""
        if not self._leader:
            return
        try:
            raw = parse_json((Path(self._spec.run_path) / FILE).read_text())
            measured = (float(raw["save_s"]), float(raw["write_s"]))
            step_s, restart_s = float(raw["step_s"]), float(raw["restart_s"])
        except (OSError, ValueError, KeyError, TypeError):
            return  # none yet, or not ours: it is measured anew
        self._measured.append(measured)
        self._step_s, self._restart_s = step_s, restart_s


def _say(line: str) -> None:
    """Have the supervisor tell whoever watches."""
    sys.stdout.write(f"{PROGRESS_PREFIX}{json.dumps({'say': line})}\n")
    sys.stdout.flush()
