"""`diagnose rollback plan` and `apply`."""

import shlex
import sys

from runhealth.diagnose import apply as applying
from runhealth.diagnose.findings import probability_text
from runhealth.diagnose.plans import RollbackPlan
from runhealth.diagnose.port import resume_with_plan
from runhealth.diagnose.report.output import write_output
from runhealth.diagnose.report.plain import safe, stdout_style
from runhealth.diagnose.report.words import age
from runhealth.diagnose.rollback import NOT_NEEDED, build_plan
from runhealth.diagnose.service import diagnose
from runhealth.storage.reader import RunReader
from runhealth.storage.store import Store

EXIT_OK, EXIT_REFUSED = 0, 1


def plan(source: object, incident: str | None, output: str | None, store: str | None) -> int:
    """Make the plan, write it, print it readably. A run that ships with the package is nobody's to change: its plan is
    written only where `output` says."""
    assert isinstance(source, RunReader)
    with source:
        report = diagnose(source)
        made = build_plan(report, incident, source)
        path = output or applying.plan_path(source.info.path, made.incident)
    shipped = source.info.bundled
    if output:
        write_output(made.dumps() + "\n", output)
    elif not shipped:
        applying.write_atomically(path, made.dumps() + "\n")
    sys.stdout.write(describe(made))
    if output or not shipped:
        print(f"  written   {safe(path)}")
    if shipped:
        print("  next      nothing: this run ships with runhealth as an example, without its checkpoints")
        return EXIT_OK
    command = ["diagnose", "rollback", "apply", "--run", made.run, *(["--store", store] if store else [])]
    print(f"  next      {safe(shlex.join([*command, path] if output else command))}")
    return EXIT_OK


def apply(run: str, store_root: str | None, plan_file: str | None, *, dry_run: bool) -> int:
    """Check the preconditions again, then hand the plan over. Returns 1 when one does not hold."""
    store = Store(store_root)
    info = store.resolve(run)
    path = plan_file or applying.newest_plan(info.path)
    made = applying.read_plan(path)
    style = stdout_style()
    yes, no = ("✓", "✗") if style.unicode else ("ok", "NOT")
    sys.stdout.write(describe(made))
    refused = False
    for check in applying.check(made, info.name, info.path):
        refused |= not check.holds
        why = "" if check.holds else f": {safe(check.why)}"
        print(f"  {style.paint(yes, 'green') if check.holds else style.paint(no, 'red')} {safe(check.sentence)}{why}")
    if refused:
        print("diagnose: the plan is not applied", file=sys.stderr)
        return EXIT_REFUSED
    if dry_run:
        print("  dry run: nothing was changed")
        return EXIT_OK
    dropped = applying.drop(made, info.path)
    supervisor = applying.live_supervisor(info.path)
    if supervisor is not None:
        print(f"  handed over: the supervisor (process {supervisor}) takes it from here")
        return EXIT_OK
    print("  no supervisor is at work: resuming the run with the plan", flush=True)
    return resume_with_plan(info.name, store.root, dropped)


def describe(made: RollbackPlan) -> str:
    """The plan as a person reads it."""
    lines = [
        (
            f"Rollback plan for {safe(made.run)}, incident {safe(made.incident)} (attempt {made.attempt}, onset "
            f"{made.onset_step:,})"
        ),
        f"  cause     {safe(made.cause)} ({probability_text(made.probability)})",
        f"  go to     checkpoint {made.checkpoint_step:,}  {safe(made.checkpoint_path)}",
    ]
    lines.extend(f"  not       checkpoint {r.step:,}: {safe(r.why)}" for r in made.rejected[:6])
    if len(made.rejected) > 6:
        lines.append(f"  not       and {len(made.rejected) - 6} more")
    lines.extend(
        f"  skip      shard {safe(s.shard)} samples {s.first_sample:,}-{s.last_sample:,}: {safe(s.reason)}"
        for s in made.skip[:6]
    )
    lines.extend(
        f"  repair    {safe(r.kind)}{' ' + safe(r.target) if r.target else ''}"
        f"{f' {r.value:g}' if r.value is not None else ''}: {safe(r.reason)}"
        for r in made.repairs
    )
    cost = made.cost
    seconds = f", about {age(cost.seconds)}" if cost.seconds is not None else ""
    lines.append(
        f"  cost      {cost.steps:,} steps again{seconds}, {cost.tokens:,} tokens, "
        f"{cost.samples_skipped:,} samples skipped"
    )
    if NOT_NEEDED in made.preconditions:
        lines.append(f"  note      {NOT_NEEDED}")
    return "\n".join(lines) + "\n"
