"""A resume does not restore where the data loader was: samples come again, or are left out."""

from runhealth.storage.errors import ConfigError
from runhealth.storage.records import Scalar
from runhealth.trainer.data import Part
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

_MODES = ("repeated", "restarted", "skipped")


class DataOrder(Fault):
    """From the resume at `step` on, every rank reads what step - `severity` (mode repeated), step - `step` (restarted)
    or step + `severity` (skipped) would have read. `honest`: whether the loader's own count is what is logged (1) or a
    count that the loop derives from the step (0)."""

    name = "data_order"

    def __init__(
        self,
        context: FaultContext,
        *,
        step: int = 200,
        mode: str = "repeated",
        severity: int = 50,
        honest: int = 1,
    ) -> None:
        super().__init__(context)
        if mode not in _MODES:
            raise ConfigError(f"fault data_order: expected mode out of {', '.join(_MODES)}, met {mode!r}")
        if severity < 1:
            raise ConfigError(f"fault data_order: expected severity >= 1 step, met {severity}")
        self.step, self.mode, self.honest = step, mode, honest
        self.offset = {"repeated": -min(severity, step), "restarted": -step, "skipped": severity}[mode]

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="data_order",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def parts(self, step: int, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        if step < self.step:
            return parts
        return self.context.plan.batch(step + self.offset, self.context.rank)

    def logged(self, step: int, values: dict[str, Scalar]) -> dict[str, Scalar]:
        if self.honest and step >= self.step and "consumed_samples" in values:
            config = self.context.config
            values["consumed_samples"] += self.offset * config.dp * config.data.batch_size
        return values


FAULT = DataOrder
