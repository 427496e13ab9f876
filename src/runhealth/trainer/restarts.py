"""Whether another restart makes sense. Importable without torch."""

from runhealth.trainer.failure import Failure

IDENTICAL_LIMIT = 3  # the same failure so often in a row is no accident


class RestartPolicy:
    """Counts failures since the last progress: a verified checkpoint that is newer than any before starts the count
    anew, so that a run of weeks may survive many single failures. The same failure again and again (kind, ranks,
    message, step) ends the run even so: restarting does not help against bad code, bad data or a bad machine."""

    def __init__(self, max_restarts: int, identical_limit: int = IDENTICAL_LIMIT) -> None:
        self._max_restarts, self._identical_limit = max_restarts, identical_limit
        self._best_step = -1
        self._last: Failure | None = None
        self.failures = 0  # since the last progress
        self.identical = 0

    def give_up(self, failure: Failure, newest_step: int) -> str:
        """Take one failure in; `newest_step` is the step of the checkpoint to go on from (0: none). Returns why no
        restart is to follow, or an empty text."""
        if newest_step > self._best_step:
            self._best_step, self.failures = newest_step, 0
        self.failures += 1
        same = self._last is not None and self._last.signature == failure.signature
        self.identical = self.identical + 1 if same else 1
        self._last = failure
        if self.identical >= self._identical_limit:
            where = f" at step {failure.step:,}" if failure.step >= 0 else ""
            return f"the same failure came {self.identical} times{where}; another restart would meet it again"
        if self.failures > self._max_restarts:
            times = "once" if self.failures == 1 else f"{self.failures} times"
            return f"the ranks failed {times} without a new checkpoint"
        return ""
