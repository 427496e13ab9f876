"""Handing a rollback plan to the run: which plan, whether it may be applied, where a supervisor looks for it."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from runhealth.diagnose.checkpoint_place import MANIFEST, look
from runhealth.diagnose.plain_file import is_plain, read_text
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
        if not path.name.endswith((APPLY, APPLIED, FAILED)) and not path.name.startswith(".") and is_plain(path)
    ]
    made = {_aim(plan) for plan in applied_plans(run_path)}
    done = {path for path in waiting if made and (plan := _readable(path)) is not None and _aim(plan) in made}
    if done and len(done) == len(waiting):
        raise PlanError(f"{folder}: no plan to apply: {max(path.name for path in done)} was applied already")
    waiting = [path for path in waiting if path not in done]
    if not waiting:
        raise PlanError(
            f"{folder}: no plan to apply; make one with `diagnose rollback plan --run {Path(run_path).name}`"
        )
    return str(max(waiting, key=lambda path: (path.stat().st_mtime_ns, path.name)))


def read_plan(path: str) -> RollbackPlan:
    """Raises PlanError when the file is missing or not a plan."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        met = error.strerror if isinstance(error, OSError) else error
        raise PlanError(f"{path}: expected a rollback plan, met {met}") from error
    return RollbackPlan.loads(text, path)


def check(plan: RollbackPlan, run_name: str, run_path: str) -> list[Check]:
    """Check the preconditions against what is there now."""
    root = Path(run_path).resolve()
    exists, committed, trouble = look(root, run_name, plan.checkpoint_path)
    failed = _aim(plan) in map(_aim, _kept(root, FAILED))
    made = _aim(plan) in map(_aim, _kept(root, APPLIED))
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
        Check(
            sentence="no rollback to this checkpoint was made for this incident",
            holds=not made,
            why=f"{PLANS}/ holds an applied plan for {plan.incident} and checkpoint {plan.checkpoint_step}",
        ),
    ]


def applied_plans(run_path: str) -> list[RollbackPlan]:
    """The rollbacks that were made in this run, oldest first."""
    return _kept(Path(run_path), APPLIED)


def waits(run_path: str) -> bool:
    """Whether a plan was handed over that no supervisor has taken yet. A folder or pipe of that name is no plan."""
    return any(is_plain(path) for path in (Path(run_path) / PLANS).glob(f"*{APPLY}"))


def conclusion(plan: RollbackPlan, run_path: str) -> tuple[bool, str] | None:
    """What became of a plan that was handed over: (True, "") once it is applied, (False, why) when the supervisor
    refused it, None as long as it waits."""
    root = Path(run_path)
    if _aim(plan) in map(_aim, _kept(root, APPLIED)):
        return True, ""
    if _aim(plan) not in map(_aim, _kept(root, FAILED)):
        return None
    try:
        why = read_text(root / PLANS / f"{plan.incident}.failed.txt").strip()
    except (OSError, ValueError):
        why = ""
    return False, why or "it did not say why"


def _aim(plan: RollbackPlan) -> tuple[str, int]:
    return plan.incident, plan.checkpoint_step


def _readable(path: Path) -> RollbackPlan | None:
    try:
        return read_plan(str(path))
    except PlanError:
        return None


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
        pid = int(parse_json(read_text(root / "supervisor.json"))["pid"])
        with open(root / "supervisor.lock", "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return pid if _exists(pid) else None
            fcntl.flock(lock, fcntl.LOCK_UN)
            return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # somebody else's
        return True
    except OSError:
        return False
    return True
