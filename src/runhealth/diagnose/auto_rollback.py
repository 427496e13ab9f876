"""What a watch does about a finding that asks for a rollback: say so, prepare the plan for a person, or hand it to the
run's supervisor."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from runhealth.diagnose import apply as applying
from runhealth.diagnose.findings import Finding, Report
from runhealth.diagnose.guard import Act, Guard
from runhealth.diagnose.plans import RollbackPlan
from runhealth.diagnose.report.output import write_output
from runhealth.diagnose.report.words import word
from runhealth.storage.errors import PlanError, StoreError


class Mode(StrEnum):
    DRY_RUN = "dry-run"  # say what would be done
    ASK = "ask"  # write the plan, name the command that applies it
    AUTO = "auto"  # apply it where the guard allows, else as ask


class AutoRollback:
    """Looks at each report of a run; says a thing once."""

    def __init__(self, mode: Mode, run: str, run_path: str, guard: Guard | None = None) -> None:
        self._mode, self._run, self._path = mode, run, run_path
        self._guard = guard or Guard()
        self._said: dict[str, tuple[int, str]] = {}

    def look(self, report: Report) -> bool:
        """Decide about every finding. What cannot be written is said and tried again at the next look. Returns whether
        one of them is given time, so that more steps may change what is decided."""
        waits = False
        for finding in report.findings:
            if finding.remedy.plan is None:
                continue
            pending = any((Path(self._path) / applying.PLANS).glob(f"*{applying.APPLY}"))
            decision = self._guard.decide(finding, report, applying.applied_plans(self._path), pending=pending)
            waits |= decision.act is Act.WAIT
            if decision.act in (Act.APPLY, Act.ASK):
                plan = replace(finding.remedy.plan, run=self._run)
                try:
                    self._act(finding, plan, decision.act, decision.why)
                except (PlanError, StoreError) as error:
                    self._say(plan, f"no rollback for {finding.id}: {error}")
        return waits

    def _act(self, finding: Finding, plan: RollbackPlan, act: Act, why: str) -> None:
        where = f"rollback of {finding.id} to checkpoint {plan.checkpoint_step:,}"
        if self._mode is Mode.DRY_RUN:
            would = "would be applied" if act is Act.APPLY else "would be left to you"
            self._say(plan, f"{where} {would}: {why}. Nothing was written")
            return
        if self._said.get(plan.incident, (-1, ""))[0] == plan.checkpoint_step:
            return  # this very plan was written or applied
        path = applying.plan_path(self._path, plan.incident)
        applying.write_atomically(path, plan.dumps() + "\n")
        if self._mode is Mode.AUTO and act is Act.APPLY:
            broken = [check for check in applying.check(plan, self._run, self._path) if not check.holds]
            if broken:
                why = f"{broken[0].sentence} does not hold: {broken[0].why}"
            elif applying.live_supervisor(self._path) is None:
                why = "no supervisor is at work that could take it"
            else:
                applying.drop(plan, self._path)
                self._say(plan, f"{where} was handed to the supervisor: {why}")
                return
        self._say(plan, f"{where} is prepared: {why}. Next: diagnose rollback apply --run {word(self._path)}")

    def _say(self, plan: RollbackPlan, sentence: str) -> None:
        if self._said.get(plan.incident) != (plan.checkpoint_step, sentence):
            self._said[plan.incident] = (plan.checkpoint_step, sentence)
            write_output(f"{sentence}\n", None)
