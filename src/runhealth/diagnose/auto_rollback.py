"""What a watch does about a finding that asks for a rollback: say so, prepare the plan for a person, or hand it to the
run's supervisor."""

from dataclasses import replace
from enum import StrEnum

from runhealth.diagnose import apply as applying
from runhealth.diagnose.findings import Finding, Report
from runhealth.diagnose.guard import Act, Decision, Guard
from runhealth.diagnose.plans import RollbackPlan
from runhealth.diagnose.replay_measure import CHANNELS
from runhealth.diagnose.report.output import write_output
from runhealth.diagnose.report.plain import safe
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
        self._said: dict[str, set[str]] = {}  # by incident
        self._plans: dict[str, RollbackPlan] = {}  # those that were spoken of, until it is known what became of them
        self._written: dict[str, int] = {}  # incident -> checkpoint of the plan that was written
        self._handed: dict[str, int] = {}  # the same of the plan that was handed over

    def look(self, report: Report) -> bool:
        """Decide about every finding. What cannot be written is said and tried again at the next look. Returns whether
        one of them is given time or in the supervisor's hands, so that more steps may change what is to be said."""
        waits = False
        for finding in report.findings:
            if finding.remedy.plan is None:
                continue
            plan = replace(finding.remedy.plan, run=self._run)
            pending, applied = applying.waits(self._path), applying.applied_plans(self._path)
            decision = self._guard.decide(finding, report, applied, pending=pending)
            if decision.act is Act.WAIT:
                waits = True
                under_way = pending or any(made.attempt >= finding.attempt for made in applied)
                self._wait(plan, decision.why, under_way=under_way)
            elif decision.act in (Act.APPLY, Act.ASK):
                try:
                    self._act(finding, plan, decision)
                except (PlanError, StoreError) as error:
                    self._say(plan, f"no rollback for {finding.id}: {error}")
        self._conclude(report)
        return waits or not self._handed.keys().isdisjoint(self._plans)

    def _act(self, finding: Finding, plan: RollbackPlan, decision: Decision) -> None:
        where, why = _where(plan), decision.why
        if self._mode is Mode.DRY_RUN:
            would = "would be applied" if decision.act is Act.APPLY else "would be left to you"
            self._say(plan, f"{where} {would}: {why}. Nothing was written")
            return
        apply = self._mode is Mode.AUTO and decision.act is Act.APPLY
        written = self._written.get(plan.incident) == plan.checkpoint_step
        if self._handed.get(plan.incident) == plan.checkpoint_step or (written and not apply):
            return  # this very plan was handed over, or lies there for a person
        path = applying.plan_path(self._path, plan.incident)
        if not written:
            applying.write_atomically(path, plan.dumps() + "\n")
        if apply:
            broken = [check for check in applying.check(plan, self._run, self._path) if not check.holds]
            if broken:
                why = f"it does not hold that {broken[0].sentence}: {broken[0].why}"
            elif applying.live_supervisor(self._path) is None:
                why = "no supervisor is at work that could take it"
            else:
                applying.drop(plan, self._path)
                self._handed[plan.incident] = plan.checkpoint_step
                self._say(plan, f"{where} was handed to the supervisor: {why}")
                return
        self._written[plan.incident] = plan.checkpoint_step
        run = word(self._path)
        command = f"diagnose rollback apply --run {run} {word(path)}"
        if decision.replay and finding.kind in CHANNELS:
            command = f"diagnose replay --run {run} --incident {word(plan.incident)} to settle it, or {command}"
        self._say(plan, f"{where} is prepared: {why}. Next: {command}")

    def _wait(self, plan: RollbackPlan, why: str, *, under_way: bool) -> None:
        if under_way and applying.live_supervisor(self._path) is None:
            why = f"{why}, and no supervisor is at work. Next: runhealth train --run {word(self._run)}"
        self._say(plan, f"{_where(plan)} waits: {why}")

    def _conclude(self, report: Report) -> None:
        """Say what became of the plans that were spoken of."""
        asks = {finding.remedy.plan.incident for finding in report.findings if finding.remedy.plan is not None}
        newest = report.attempts[-1] if report.attempts else None
        for incident, plan in list(self._plans.items()):
            ended = applying.conclusion(plan, self._path)
            if ended is not None and ended[0]:
                if newest is None or newest.attempt <= plan.attempt:
                    continue  # taken; no attempt has begun since
                begins = f"attempt {newest.attempt} begins at step {newest.first_step:,}"
                self._say(plan, f"{_where(plan)} was made: {begins}")
                del self._plans[incident]
            elif ended is not None and incident in self._handed:
                self._say(plan, f"{_where(plan)} was refused by the supervisor: {ended[1]}")
                del self._plans[incident]
            elif incident not in asks and not applying.waits(self._path):
                self._say(plan, f"{_where(plan)} is not asked for any more")
                del self._plans[incident]

    def _say(self, plan: RollbackPlan, sentence: str) -> None:
        said = self._said.setdefault(plan.incident, set())
        if sentence not in said:
            said.add(sentence)
            self._plans[plan.incident] = plan
            write_output(f"{safe(sentence)}\n", None)


def _where(plan: RollbackPlan) -> str:
    return f"rollback of {plan.incident} to checkpoint {plan.checkpoint_step:,}"
