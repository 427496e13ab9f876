"""Turning a rollback plan into the state of the next attempt: everything that can be wrong is found before a single
rank is stopped. Importable without torch."""

import contextlib
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runhealth.diagnose.plans import RollbackPlan
from runhealth.storage.errors import CheckpointError, PlanError, StoreError
from runhealth.trainer import checkpoints
from runhealth.trainer.config import TrainConfig
from runhealth.trainer.data import shard_name
from runhealth.trainer.folders import is_url, join
from runhealth.trainer.launch import RunState

PLAN_BYTES = 8_000_000  # a larger file is no plan, and would not fit into memory
INCIDENT_BYTES = 200  # it becomes the name of a file
PENDING, APPLIED, FAILED = ".apply.json", ".applied.json", ".failed.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """A plan that was checked against the run, and the state that the run has once it is applied."""

    plan: RollbackPlan
    checkpoint: str  # relative to the run's folder
    state: RunState


def pending(run_path: str) -> list[Path]:
    """Plans that wait to be applied, oldest first. Only plain files: a pipe would hold the supervisor up."""
    found = []
    for path in (Path(run_path) / "plans").glob(f"*{PENDING}"):
        with contextlib.suppress(OSError):  # it went away between two looks, or is a link to nothing
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime_ns, path.name, path))
    return [path for _, _, path in sorted(found)]


def read_plan(path: str) -> RollbackPlan:
    """Raises PlanError."""
    try:
        if (size := Path(path).stat().st_size) > PLAN_BYTES:
            raise PlanError(f"{path}: expected a rollback plan of at most {PLAN_BYTES:,} bytes, met {size:,}")
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: expected a rollback plan, met {error}") from error
    return RollbackPlan.loads(text, where=path)


def check(plan: RollbackPlan, *, run: str, run_path: str, config: TrainConfig, state: RunState) -> Rollback:
    """Hold a plan against the run it is meant for.

    Raises:
        PlanError: another run, a path outside the run's checkpoints, a checkpoint that is missing, damaged, of another
            step or already left behind, an unknown shard or sample, a repair that this run cannot make, or the same
            rollback for the second time.
    """
    if not re.fullmatch(r"[^/\\\0.][^/\\\0]*", plan.incident) or len(plan.incident.encode()) > INCIDENT_BYTES:
        raise PlanError(
            f"expected an incident's name without slashes and leading dots, of at most {INCIDENT_BYTES} bytes, met"
            f" {plan.incident[:INCIDENT_BYTES]!r}"
        )
    if plan.run != run:
        raise PlanError(f"plan {plan.incident}: expected a plan for run {run!r}, met {plan.run!r}")
    base = checkpoints.base_of(config.checkpoint.target, run, run_path)
    path = _checkpoint_of(plan, base)
    if path in state.superseded:
        raise PlanError(f"plan {plan.incident}: {path} belongs to a past that an earlier rollback left behind")
    if (plan.incident, path) in state.applied:
        raise PlanError(
            f"plan {plan.incident}: a rollback to {path} was already applied for this incident;"
            " go further back, or repair the cause"
        )
    try:
        manifest = checkpoints.verify(join(base, path))
    except CheckpointError as error:
        raise PlanError(f"plan {plan.incident}: its checkpoint fails verification: {error}") from error
    if manifest.step != plan.checkpoint_step:
        raise PlanError(
            f"plan {plan.incident}: expected step {plan.checkpoint_step} in {path}, met step {manifest.step}"
        )
    _check_skips(plan, config)
    _check_repairs(plan, config)
    skips = state.skips.add(plan.skip)
    if skips.samples() >= config.data.shards * config.data.samples_per_shard:
        raise PlanError(
            f"plan {plan.incident}: with it every sample of every shard is skipped; nothing is left to train on"
        )
    return Rollback(
        plan=plan,
        checkpoint=path,
        state=replace(
            leave_behind(state, base, manifest.step),
            skips=skips,
            repairs=(*state.repairs, *(repair for repair in plan.repairs if repair not in state.repairs)),
            applied=(*state.applied, (plan.incident, path)),
            returning=path,
        ),
    )


def leave_behind(state: RunState, base: str, step: int) -> RunState:
    """The state in which every checkpoint past `step` that is there now belongs to a past nobody resumes from."""
    left = [info.path for info in checkpoints.committed(base) if info.step > step]
    return replace(state, superseded=tuple(dict.fromkeys((*state.superseded, *left))))


def unfinished(run_path: str, base: str, state: RunState) -> tuple[RunState, str, dict[str, Any]]:
    """The state of a run whose supervisor ended after it had accepted a rollback and before an attempt began with it,
    with the words and facts of the event. What the ranks saved in between is left behind now.

    Raises:
        CheckpointError: it is no checkpoint of the run, or fails verification.
    """
    path = state.returning
    if path not in {info.path for info in checkpoints.committed(base)}:
        raise CheckpointError(f"{path[:INCIDENT_BYTES]} is no checkpoint of this run")
    step = checkpoints.verify(join(base, path)).step
    incident = next((incident for incident, to in reversed(state.applied) if to == path), "")
    for waiting in pending(run_path):
        if waiting.name == f"{incident}{PENDING}":
            with contextlib.suppress(StoreError):
                conclude(waiting, APPLIED)
    facts: dict[str, Any] = {"checkpoint_step": step, "incident": incident}
    if incident and "/" not in incident:
        with contextlib.suppress(PlanError):
            facts = read_plan(str(Path(run_path) / "plans" / f"{incident}{APPLIED}")).to_json()
    message = f"back to step {step} for {incident}: this rollback was accepted before, and nothing had begun with it"
    return leave_behind(state, base, step), message, facts


def conclude(path: Path, suffix: str, reason: str = "") -> None:
    """Rename a pending plan to its `.applied` or `.failed` twin; the reason of a failure lies beside it as text.
    Raises StoreError."""
    base = path.name.removesuffix(PENDING).removesuffix(".json")
    try:
        if path.name.endswith(PENDING):
            path.replace(path.with_name(f"{base}{suffix}"))
        if reason:
            path.with_name(f"{base}.failed.txt").write_text(f"{reason}\n")
    except OSError as error:
        raise StoreError(f"{path}: what became of the plan cannot be kept: {error.strerror}") from error


def _checkpoint_of(plan: RollbackPlan, base: str) -> str:
    """The plan's checkpoint as a path relative to the base; a plan may come from anywhere, so it cannot leave the
    run's own checkpoints."""
    if "://" in plan.checkpoint_path:
        raise PlanError(f"plan {plan.incident}: expected a checkpoint of this run, met the URL {plan.checkpoint_path}")
    root = Path("/") if is_url(base) else Path(base)  # a URL has nothing to resolve: its names are checked as they are
    folder = (root / checkpoints.FOLDER).resolve()
    path = (root / plan.checkpoint_path).resolve()
    if path.parent != folder:
        raise PlanError(
            f"plan {plan.incident}: expected a folder in {checkpoints.FOLDER}/, met {plan.checkpoint_path!r}"
        )
    return f"{checkpoints.FOLDER}/{path.name}"


def _check_skips(plan: RollbackPlan, config: TrainConfig) -> None:
    known = {shard_name(index) for index in range(config.data.shards)}
    for skip in plan.skip:
        if skip.shard not in known:
            raise PlanError(f"plan {plan.incident}: expected a shard 0000 to {max(known)}, met {skip.shard!r}")
        if skip.last_sample >= config.data.samples_per_shard:
            raise PlanError(
                f"plan {plan.incident}: expected samples below {config.data.samples_per_shard} in shard {skip.shard},"
                f" met {skip.last_sample}"
            )


def _check_repairs(plan: RollbackPlan, config: TrainConfig) -> None:
    for repair in plan.repairs:
        if repair.kind == "reset_loss_scale" and config.model.precision != "fp16":
            raise PlanError(f"plan {plan.incident}: reset_loss_scale: this run has no loss scale")
        if repair.kind in ("fresh_amax", "higher_precision") and config.model.precision != "fp8":
            raise PlanError(f"plan {plan.incident}: {repair.kind}: this run has no fp8 tensors")
        if repair.kind == "lower_clip_threshold" and not (repair.value and repair.value > 0):
            raise PlanError(f"plan {plan.incident}: lower_clip_threshold: expected a value > 0, met {repair.value}")


def describe(rollback: Rollback) -> str:
    """One line for people."""
    plan = rollback.plan
    parts: Iterable[str] = (
        f"back to step {plan.checkpoint_step} for {plan.incident} ({plan.cause})",
        f"{sum(s.last_sample - s.first_sample + 1 for s in plan.skip)} samples skipped" if plan.skip else "",
        f"repairs: {', '.join(dict.fromkeys(repair.kind for repair in plan.repairs))}" if plan.repairs else "",
    )
    return ", ".join(filter(None, parts))
