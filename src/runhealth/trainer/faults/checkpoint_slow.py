"""Saving a checkpoint takes far longer than it should: a slow or shared file system."""

from runhealth.trainer.fault import Fault, FaultContext, FaultLabel, Phase


class CheckpointSlow(Fault):
    """From `step` on each checkpoint takes `severity` seconds longer."""

    name = "checkpoint_slow"
    transient = True

    def __init__(self, context: FaultContext, *, step: int = 200, severity: float = 20.0) -> None:
        super().__init__(context)
        self.step, self.severity = step, severity

    def label(self) -> FaultLabel:
        every = self.context.config.checkpoint.every
        first = -(-self.step // every) * every  # the first one that is saved at or after `step`
        return FaultLabel(
            fault=self.name,
            cause="checkpoint_io",
            onset_step=max(first, 1) - 1,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def stall_s(self, step: int, phase: Phase) -> float:
        return self.severity if phase == "checkpoint" and step >= self.step else 0.0


FAULT = CheckpointSlow
