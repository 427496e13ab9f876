"""How often to save: the optimum interval between checkpoints, what it costs, and the arithmetic behind it.

Young (1974), "A first order approximation to the optimum checkpoint interval", CACM 17(9): the interval that loses
least is sqrt(2 C M), with C the time that a save takes away from training and M the mean time between failures.
Daly (2006), "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), eq. 37 and 20:

    interval = sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C    for C < 2 M, else M
    wall time of T seconds of training = M exp(R / M) (exp((interval + C) / M) - 1) T / interval

with R the time from a failure to the first new step. Failures are taken as independent (exponential gaps).

A save that is written in the background takes only its blocking part away from training, yet the work of its writing
time is lost as well if a failure comes before it is committed: that time (`write_s`) is added to R, and no interval is
shorter than it, since one save at most is under way. All times are seconds. Importable without torch.
"""

import math
from dataclasses import dataclass

from runhealth.storage.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """The answer, with what it was derived from. `interval_s` is training time between the ends of two saves."""

    save_s: float  # C: training stands still
    write_s: float  # from the end of the blocking part until the checkpoint is committed
    mtbf_s: float  # M, of the whole job
    restart_s: float  # R
    young_s: float
    daly_s: float
    interval_s: float
    effective: float  # expected share of the wall time that ends up in training

    @property
    def save_share(self) -> float:
        """Share of the wall time that saves take, between two failures."""
        return self.save_s / (self.interval_s + self.save_s)

    @property
    def lost_per_failure_s(self) -> float:
        """Expected time that one failure costs: on average half an interval of work, what was not yet committed, and
        the restart (first order)."""
        return (self.interval_s + self.save_s) / 2 + self.write_s + self.restart_s

    def every_steps(self, step_s: float) -> int:
        """The interval in whole steps of `step_s` seconds, at least 1. Raises ConfigError unless step_s > 0."""
        _positive("step_s", step_s)
        return max(1, round(self.interval_s / step_s))

    def to_json(self) -> dict[str, float]:
        return {
            "save_s": self.save_s,
            "write_s": self.write_s,
            "mtbf_s": self.mtbf_s,
            "restart_s": self.restart_s,
            "young_s": self.young_s,
            "daly_s": self.daly_s,
            "interval_s": self.interval_s,
            "effective": self.effective,
        }

    def explain(self) -> tuple[str, ...]:
        """The arithmetic, one line a step."""
        c, m = duration(self.save_s), duration(self.mtbf_s)
        lines = [
            f"save cost C = {c} blocking, W = {duration(self.write_s)} in the background",
            f"MTBF M = {m}, restart R = {duration(self.restart_s)}",
            f"Young 1974: sqrt(2 C M) = sqrt(2 * {self.save_s:.4g} * {self.mtbf_s:.4g}) = {duration(self.young_s)}",
            f"Daly 2006: sqrt(2 C M) (1 + sqrt(C/2M)/3 + (C/2M)/9) - C = {duration(self.daly_s)}"
            if self.save_s < 2 * self.mtbf_s
            else f"Daly 2006: C >= 2 M, so the interval is M = {m}",
        ]
        if self.interval_s > self.daly_s:
            lines.append(f"raised to {duration(self.interval_s)}: the save before must be committed first")
        lines.append(
            f"effective training time = interval / (M exp((R+W)/M) (exp((interval+C)/M) - 1)) = {self.effective:.2%};"
            f" saves take {self.save_share:.2%}, a failure costs {duration(self.lost_per_failure_s)}"
        )
        return tuple(lines)


def young_s(save_s: float, mtbf_s: float) -> float:
    """sqrt(2 C M), Young 1974."""
    _positive("save_s", save_s)
    _positive("mtbf_s", mtbf_s)
    return math.sqrt(2.0 * save_s * mtbf_s)


def daly_s(save_s: float, mtbf_s: float) -> float:
    """Daly 2006, eq. 37: training time between two saves, without the save itself."""
    first = young_s(save_s, mtbf_s)
    if save_s >= 2.0 * mtbf_s:
        return mtbf_s
    x = save_s / (2.0 * mtbf_s)
    return first * (1.0 + math.sqrt(x) / 3.0 + x / 9.0) - save_s


def effective_training(interval_s: float, save_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Expected share of the wall time that is training, 0..1 (Daly 2006, eq. 20: solve time over wall time)."""
    for name, value in (("interval_s", interval_s), ("mtbf_s", mtbf_s)):
        _positive(name, value)
    cycle = (interval_s + save_s) / mtbf_s
    if cycle > 700.0 or restart_s / mtbf_s > 700.0:
        return 0.0  # exp would overflow: nothing is ever finished between two failures
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(cycle))


def job_mtbf_s(part_mtbf_s: float, parts: int) -> float:
    """MTBF of a job that any one of its `parts` (GPUs, nodes) ends: failures of parts add up."""
    _positive("part_mtbf_s", part_mtbf_s)
    if parts < 1:
        raise ConfigError(f"cadence: expected parts >= 1, met {parts}")
    return part_mtbf_s / parts


def cadence(*, save_s: float, mtbf_s: float, restart_s: float = 0.0, write_s: float = 0.0) -> Cadence:
    """The optimum for a measured save (`save_s` blocking, `write_s` in the background), MTBF and restart time.

    Raises:
        ConfigError: a time that is not positive (save_s, mtbf_s), or negative, or not finite.
    """
    for name, value in (("restart_s", restart_s), ("write_s", write_s)):
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"cadence: expected {name} >= 0 seconds, met {value}")
    daly = daly_s(save_s, mtbf_s)
    interval = max(daly, write_s)
    return Cadence(
        save_s=save_s,
        write_s=write_s,
        mtbf_s=mtbf_s,
        restart_s=restart_s,
        young_s=young_s(save_s, mtbf_s),
        daly_s=daly,
        interval_s=interval,
        effective=effective_training(interval, save_s, mtbf_s, restart_s + write_s),
    )


def duration(seconds: float) -> str:
    """Seconds for people: `230 ms`, `4.2 s`, `12.5 min`, `3.1 h`, `2.0 days`."""
    for limit, unit, size in ((1.0, "ms", 1e-3), (120.0, "s", 1.0), (7200.0, "min", 60.0), (172_800.0, "h", 3600.0)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86_400:.3g} days"


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"cadence: expected {name} > 0 seconds, met {value}")
