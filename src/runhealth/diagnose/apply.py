"""Handing a rollback plan to the run: which plan, whether it may be applied, where a supervisor looks for it."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from runhealth.diagnose.checkpoint_place import MANIFEST, look
from runhealth.diagnose.plans import RollbackPlan
from runhealth.storage.durable import write_whole
from runhealth.storage.errors import PlanError, StoreError
from runhealth.storage.jsontext import parse_json

PLANS = "plans"
APPLY, APPLIED, FAILED = ".apply.json", ".applied.json", ".failed.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One precondition, and whether it holds."""

    sentence: str
    holds: bool
    why: str = ""


def plan_path(run_path: str, incident: str) -> str:
    """Where the plan of an incident is kept. An incident's name that could leave the folder is refused."""
    if not incident or any(c in "/\\\0" for c in incident) or incident.startswith("."):
        raise PlanError(f"expected an incident's name without slashes and leading dots, met {incident!r}")
    return str(Path(run_path) / PLANS / f"{incident}.json")


def write_atomically(path: str, text: str) -> None:
    """Write beside, then rename: a reader sees the old file or the new one.

    Raises:
        StoreError: the folder cannot be written.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, text.encode())
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error


def newest_plan(run_path: str) -> str:
    """The plan that was written last and not applied yet.

    Raises:
        PlanError: there is none.
    """
    folder = Path(run_path) / PLANS
    waiting = [
        path
        for path in folder.glob("*.json")
        if not path.name.endswith((APPLY, APPLIED, FAILED)) and not path.name.startswith(".")
    ]
    if not waiting:
        raise PlanError(
            f"{folder}: no plan to apply; make one with `diagnose rollback plan --run {Path(run_path).name}`"
        )
    return str(max(waiting, key=lambda path: (path.stat().st_mtime_ns, path.name)))


def read_plan(path: str) -> RollbackPlan:
    """Raises PlanError when the file is missing or not a plan."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: expected a rollback plan, met {error}") from error
    return RollbackPlan.loads(text, path)


def check(plan: RollbackPlan, run_name: str, run_path: str) -> list[Check]:
    """Check the preconditions against what is there now."""
    root = Path(run_path).resolve()
    exists, committed, trouble = look(root, run_name, plan.checkpoint_path)
    failed = any(
        earlier.incident == plan.incident and earlier.checkpoint_step == plan.checkpoint_step
        for earlier in _kept(root, FAILED)
    )
    return [
        Check(
            sentence=f"the plan belongs to run {run_name}",
            holds=plan.run == run_name,
            why=f"it was made for {plan.run!r}",
        ),
        Check(
            sentence=f"checkpoint {plan.checkpoint_step} exists",
            holds=exists,
            why=trouble or f"{plan.checkpoint_path} is not a folder of the run",
        ),
        Check(
            sentence="its manifest is committed", holds=committed, why=f"{plan.checkpoint_path}/{MANIFEST} is missing"
        ),
        Check(
            sentence="no rollback to this checkpoint has failed for this incident",
            holds=not failed,
            why=f"{PLANS}/ holds a failed plan for {plan.incident} and checkpoint {plan.checkpoint_step}",
        ),
    ]


def applied_plans(run_path: str) -> list[RollbackPlan]:
    """The rollbacks that were made in this run, oldest first."""
    return _kept(Path(run_path), APPLIED)


def _kept(root: Path, suffix: str) -> list[RollbackPlan]:
    found = []
    for path in (root / PLANS).glob(f"*{suffix}"):
        try:
            found.append((path.stat().st_mtime_ns, path.name, read_plan(str(path))))
        except (PlanError, OSError):
            continue  # a damaged record names no checkpoint
    return [plan for _, _, plan in sorted(found, key=lambda kept: kept[:2])]


def drop(plan: RollbackPlan, run_path: str) -> str:
    """Put the plan where a supervisor picks it up; returns the path."""
    path = plan_path(run_path, plan.incident).removesuffix(".json") + APPLY
    write_atomically(path, plan.dumps() + "\n")
    return path


def live_supervisor(run_path: str) -> int | None:
    """The process id of the run's supervisor if one is at work: it holds the lock as long as it lives."""
    root = Path(run_path)
    try:
        pid = int(parse_json((root / "supervisor.json").read_text(encoding="utf-8"))["pid"])
        with open(root / "supervisor.lock", "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                os.kill(pid, 0)
                return pid
            fcntl.flock(lock, fcntl.LOCK_UN)
            return None
    except PermissionError:
        return pid
    except (OSError, ValueError, KeyError, TypeError):
        return None
