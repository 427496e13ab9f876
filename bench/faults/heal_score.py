"""How many runs came back, and what it cost. A function of what `heal.py` has stored."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

BACK_NATS = 0.03  # held-out, of the exact twin without the fault
POLICIES = ("nothing", "auto", "asked")  # asked: a person applies what the guard leaves to a person
Result = dict[str, Any]


def is_back(result: Result) -> bool:
    """A run whose loss is not finite at the end, or that has ended, is not back."""
    return result["gap_nats"] is not None and abs(result["gap_nats"]) <= BACK_NATS


def by_kind(results: Sequence[Result], policies: Sequence[str]) -> Iterator[tuple[str, int, list[int]]]:
    """Kind, runs, and how many of them are back under each policy."""
    faults = [r for r in results if r["spiky"]]
    for kind in sorted({r["kind"] for r in faults}):
        mine = [[r for r in faults if r["kind"] == kind and r["policy"] == policy] for policy in policies]
        yield kind, len(mine[0]), [sum(map(is_back, part)) for part in mine]


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """By policy: runs, how many are back, what it cost. Healthy runs are watched once, by the policy that acts most."""
    found: dict[str, Any] = {}
    watched = [r for r in results if not r["spiky"]]
    for policy in POLICIES:
        mine = [r for r in results if r["policy"] == policy and r["spiky"]]
        if not mine:
            continue
        rolled = [r for r in mine if r["rollbacks"]]
        healthy = watched if policy != "nothing" else []
        found[policy] = {
            "runs": len(mine),
            "rolled_back": len(rolled),
            "back": round(sum(map(is_back, mine)) / len(mine), 4),
            "back_of_rolled_back": round(sum(map(is_back, rolled)) / len(rolled), 4) if rolled else None,
            "steps_again": round(statistics.fmean(r["steps_again"] for r in rolled), 1) if rolled else 0.0,
            "batches_skipped": round(statistics.fmean(r["batches_skipped"] for r in rolled), 1) if rolled else 0.0,
            "healthy_rolled_back": sum(bool(r["rollbacks"]) for r in healthy),
            "healthy_runs": len(healthy),
        }
    return found
