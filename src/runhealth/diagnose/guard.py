"""When a rollback may happen without a person: a pure function of what is said and of what was done before.

The modes and limits are those that every rollback loop on record lacked (44 identical restarts of one public run): few
rollbacks, time between them, never the same again for the same incident, and a cause that is named.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from runhealth.diagnose.findings import UNDETERMINED, Finding, Outcome, Report, Severity
from runhealth.diagnose.plans import RollbackPlan

SURE = 0.9  # answers at least so probable are right in 98 of 100 cases (docs/bench.md)


class Act(StrEnum):
    APPLY = "apply"
    ASK = "ask"  # a person decides
    WAIT = "wait"  # it may come back by itself, or something is under way
    LEAVE = "leave"  # there is nothing to do


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`replay`: a replay of the incident may settle what is in doubt."""

    act: Act
    why: str
    replay: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """`most` rollbacks a run; none within `cooldown_steps` of the last one's end; a loss that left gets
    `patience_steps` to come back while its cause is not seen to last."""

    most: int = 3
    cooldown_steps: int = 50
    patience_steps: int = 20

    def decide(self, finding: Finding, report: Report, applied: Sequence[RollbackPlan], *, pending: bool) -> Decision:
        """What to do about one finding. `applied` are the rollbacks of this run so far, oldest first; `pending` says
        that one waits to be applied."""
        plan = finding.remedy.plan
        if plan is None or finding.severity is Severity.INFO:
            return Decision(act=Act.LEAVE, why="no rollback is advised")
        newest = report.attempts[-1]
        if finding.attempt != newest.attempt:
            return Decision(act=Act.LEAVE, why=f"attempt {newest.attempt} went on from there")
        if pending:
            return Decision(act=Act.WAIT, why="a plan waits to be applied")
        if any(p.attempt >= finding.attempt for p in applied):
            return Decision(act=Act.WAIT, why="a rollback of this attempt is under way")
        last_step = newest.last_step
        age = last_step - finding.onset_step
        if finding.outcome is Outcome.ONGOING and not self._is_lasting(finding) and age < self.patience_steps:
            return Decision(act=Act.WAIT, why=f"it may come back within {self.patience_steps} steps")
        return self._may(finding, plan, applied, since=last_step - newest.first_step)

    def _may(self, finding: Finding, plan: RollbackPlan, applied: Sequence[RollbackPlan], *, since: int) -> Decision:
        again = [p for p in applied if p.is_for(finding.onset_step)]
        doubt = ""
        if finding.verdict == UNDETERMINED:
            doubt = "the cause is undetermined"
        elif plan.probability < SURE:
            doubt = f"the cause is only {plan.probability:.2f} likely, under {SURE}"
        elif _disagrees(finding):
            doubt = "the second opinion disagrees"
        if again:
            why = f"it came back after the rollback to checkpoint {again[-1].checkpoint_step:,}"
        elif len(applied) >= self.most:
            why = f"{len(applied)} rollbacks were made already"
        elif applied and since < self.cooldown_steps:
            why = f"the last rollback was {since:,} steps ago, under {self.cooldown_steps}"
        elif doubt:
            why = doubt
        else:
            return Decision(act=Act.APPLY, why=f"{finding.verdict} is {plan.probability:.2f} likely")
        return Decision(act=Act.ASK, why=why, replay=bool(doubt))

    @staticmethod
    def _is_lasting(finding: Finding) -> bool:
        """Waiting would bring nothing: the cause is still at work, or the numbers are gone."""
        return bool(finding.details.get("cause_lasts")) or finding.kind in ("non_finite", "data_corrupt")


def _disagrees(finding: Finding) -> bool:
    other = finding.details.get("second_opinion")
    return isinstance(other, dict) and not other.get("agrees", True)
