"""Holds what was said against the truth. Everything here is a function of the stored results."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.faults.clock import WORLD
from bench.faults.rules import RULES, WARM_STEPS

from runhealth.diagnose.findings import UNDETERMINED

Result = dict[str, Any]
Said = dict[str, Any]
LOSS_KINDS = ("loss_spike", "loss_divergence", "gradient_spike")
NO_NEWS = ("restart", "epoch_staircase")  # facts about what somebody did on purpose
AFTER_ALARM_STEPS = 2
HIT_STEPS = 20  # a spike counts as seen when an alarm comes so soon
LEVELS = ("info", "warning", "error")
BINS = 10
KEYS = (
    "recall",
    "false_alarms_per_10k",
    "top1",
    "top2",
    "top1_unseen_kinds",
    "ece",
    "accuracy_p90",
    "rank_accuracy",
)

# findings without suspects: the kind is the whole answer
CAUSE_OF_KIND = {
    "eval_drift": "eval_drift",
    "memory_growth": "memory",
    "out_of_memory": "memory",
    "checkpoint_slow": "checkpoint_io",
    "checkpoint_corrupt": "checkpoint_io",
    "dead_rank": "dead_rank",
    "hang": "hang",
    "replica_desync": "replica_desync",
    "optimizer_not_stepping": "not_stepping",
    "dead_layer": "dead_layer",
    "router_collapse": "router_collapse",
    "logit_growth": "logit_growth",
    "data_repeated": "data_order",
    "data_restarted": "data_order",
    "masked_non_finite": "reporting_artifact",
    "optimizer_state_lost": "optimizer_state",
    "rank_outlier": "silent_corruption",
}


def is_fault(result: Result) -> bool:
    return bool(result["truth"]["kind"]) and result["truth"]["cause"] != "benign"


def is_alarm(said: Said) -> bool:
    """Whether a finding calls for attention: anything from a warning on, and every bump of the loss or the gradient."""
    return said["kind"] not in NO_NEWS and (LEVELS.index(said["severity"]) > 0 or said["kind"] in LOSS_KINDS)


def alarm_step(said: Said) -> int:
    """The step at which the first alarm of a finding was raised; what was told of it may come later."""
    return int(said["alarm"] if said["alarm"] is not None else said["at"])


# --------------------------------------------------------------------------------------------------- of one fault run


def of_fault(result: Result, said: Iterable[Said]) -> list[Said]:
    """What was told of after the fault began, facts about restarts left out; `first` is the step of the first alarm.
    The onset that a finding claims may lie earlier: that is an error of the onset, which is counted by itself."""
    onset = result["truth"]["onset_step"]
    told: dict[str, int] = {}
    for one in result["said"]:
        told[one["id"]] = min(alarm_step(one), told.get(one["id"], alarm_step(one)))
    found = [{**one, "first": told.get(one["id"], one["onset"])} for one in said if one["kind"] not in NO_NEWS]
    return [one for one in found if one["first"] >= onset]


def first_alarm(result: Result) -> Said | None:
    """The earliest alarm after the onset."""
    return min((one for one in of_fault(result, result["said"]) if is_alarm(one)), key=alarm_step, default=None)


def answer_at(result: Result) -> Said | None:
    """The main finding as it stood two steps after the first alarm: the most severe, then the first to be told."""
    first = first_alarm(result)
    if first is None:
        return None
    until = alarm_step(first) + AFTER_ALARM_STEPS
    latest: dict[str, Said] = {}
    for one in of_fault(result, result["said"]):
        if one["at"] <= until or (one["id"] == first["id"] and one["id"] not in latest):
            latest[one["id"]] = one
    return _main([one for one in latest.values() if is_alarm(one)])


def final_answer(result: Result) -> Said | None:
    """The main finding once all data were seen; one that turned out to need no action only where there is no other."""
    found = of_fault(result, result["final"])
    return _main([one for one in found if is_alarm(one)]) or _main([one for one in found if one["suspects"]])


def _main(found: Sequence[Said]) -> Said | None:
    return min(
        found, key=lambda one: (-LEVELS.index(one["severity"]), one["first"], one["onset"], one["id"]), default=None
    )


def named(said: Said | None, place: int = 1) -> list[tuple[str, float]]:
    """The `place` most probable causes with their probabilities."""
    if said is None:
        return []
    if said["suspects"]:
        return [(name, probability) for name, probability in said["suspects"][:place]]
    cause = CAUSE_OF_KIND.get(said["kind"])
    return [(cause, 1.0)] if cause else []


def is_named(result: Result, said: Said | None, place: int = 1) -> bool:
    return result["truth"]["cause"] in [name for name, _ in named(said, place)]


# ---------------------------------------------------------------------------------------------------------- of a split


def share(hits: int, of: int) -> float | None:
    return round(hits / of, 4) if of else None


def healthy(results: Iterable[Result]) -> list[tuple[Result, int, int]]:
    """Twins and the stretch (first, last) of each that counts: what two twins of one base share counts once."""
    known: dict[str, int] = {}
    found = []
    for result in sorted((r for r in results if not r["truth"]["kind"]), key=lambda r: r["truth"]["fork_step"]):
        base = result["truth"]["base"]
        found.append((result, known.get(base, WARM_STEPS), result["last_step"]))
        known[base] = result["truth"]["fork_step"]
    return found


def benign(results: Iterable[Result]) -> list[tuple[Result, int, int]]:
    """Benign runs, from their fork on."""
    return [(r, r["truth"]["fork_step"], r["last_step"]) for r in results if r["truth"]["cause"] == "benign"]


def false_alarms(stretches: Iterable[tuple[Result, int, int]], *, loud: bool) -> tuple[int, int, Counter[str]]:
    """Alarms on healthy steps, the steps, and the alarms by kind of run. `loud`: warnings and errors only."""
    count = steps = 0
    kinds: Counter[str] = Counter()
    for result, first, last in stretches:
        steps += last - first + 1
        spike = result["spike"]
        for one in result["final"]:
            if not first <= one["onset"] <= last or not is_alarm(one):
                continue
            quiet = one["severity"] == "info"
            if quiet and (loud or spike is not None):
                continue  # the loss did leave its twin, and the finding says that nothing needs to be done
            count += 1
            kinds[f"{result['truth']['kind'] or 'twin'}: {one['kind']} ({one['severity']}, {one['verdict']})"] += 1
    return count, steps, kinds


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """All figures of one split."""
    faults = [r for r in results if is_fault(r)]
    spiky = [r for r in faults if r["spike"] is not None]
    detected = [r for r in faults if first_alarm(r) is not None]
    seen = [r for r in detected if not r["truth"]["held_out"]]
    unseen = [r for r in detected if r["truth"]["held_out"]]
    stretches = [*healthy(results), *benign(results)]
    false, steps, false_kinds = false_alarms(stretches, loud=False)
    loud, _, _ = false_alarms(stretches, loud=True)
    twins_false, twin_steps, _ = false_alarms(healthy(results), loud=False)
    points = [point for r in detected if (point := _point(r, answer_at(r))) is not None]
    finals = [point for r in detected if (point := _point(r, final_answer(r))) is not None]
    sure = [right for probability, right in points if probability >= 0.9]
    culprits = [r for r in detected if 0 < len(r["truth"]["ranks"]) < WORLD]
    return {
        "runs": len(results),
        "fault_runs": len(faults),
        "recall": share(sum(_hit(r) for r in spiky), len(spiky)),
        "spikes": len(spiky),
        "false_alarms_per_10k": round(1e4 * false / steps, 2) if steps else None,
        "false_alarms": false,
        "healthy_steps": steps,
        "false_alarms_loud": loud,
        "false_alarms_twins": twins_false,
        "twin_steps": twin_steps,
        "false_alarm_kinds": dict(false_kinds.most_common()),
        "detected": share(len(detected), len(faults)),
        "top1": share(sum(is_named(r, answer_at(r)) for r in seen), len(seen)),
        "top2": share(sum(is_named(r, answer_at(r), 2) for r in seen), len(seen)),
        "top1_final": share(sum(is_named(r, final_answer(r)) for r in seen), len(seen)),
        "top1_unseen_kinds": share(sum(is_named(r, answer_at(r)) for r in unseen), len(unseen)),
        "top1_final_unseen_kinds": share(sum(is_named(r, final_answer(r)) for r in unseen), len(unseen)),
        "unseen_runs": len(unseen),
        "ece": calibration_error(points),
        "ece_tuned_kinds": calibration_error([p for r in seen if (p := _point(r, answer_at(r))) is not None]),
        "ece_final": calibration_error(finals),
        "accuracy_p90": share(sum(sure), len(sure)),
        "answers_p90": len(sure),
        "abstained": share(sum(_abstains(answer_at(r)) for r in detected), len(detected)),
        "accuracy_answered": _accuracy_answered(detected),
        "rank_accuracy": share(sum(_ranks_right(r) for r in culprits), len(culprits)),
        "rank_accuracy_tuned_kinds": share(
            sum(_ranks_right(r) for r in culprits if not r["truth"]["held_out"]),
            sum(not r["truth"]["held_out"] for r in culprits),
        ),
        "rank_runs": len(culprits),
        "errors_on_healthy": sum(
            one["severity"] == "error" for r, first, _ in stretches for one in r["final"] if one["onset"] >= first
        ),
        "hashes_equal": share(sum(r["hash_live"] == r["hash_post"] for r in results), len(results)),
        "crashed_suspects": dict(Counter(name for r in results for one in r["final"] for name in one["crashed"])),
        "calibration": calibration_curve(points),
        "abstaining": {"tuned kinds": abstaining(seen), "kinds never tuned on": abstaining(unseen)},
        "confusion": confusion(detected),
        "classes": by(faults, lambda r: r["truth"]["cause"]),
        "kinds": by(faults, lambda r: r["truth"]["kind"]),
        "severity": by(faults, lambda r: LEVEL_NAMES[r["truth"]["level"]]),
        "precision": by(faults, lambda r: r["truth"]["precision"]),
        "rules": rules_table(results),
    }


LEVEL_NAMES = ("low", "middle", "high")


def _point(result: Result, said: Said | None) -> tuple[float, bool] | None:
    """(probability, right?) of the most probable suspect; None where the engine names none."""
    if said is None or not said["suspects"]:
        return None
    best = next(((name, p) for name, p in said["suspects"] if name != UNDETERMINED), None)
    return (best[1], best[0] == result["truth"]["cause"]) if best else None


def _abstains(said: Said | None) -> bool:
    return said is None or (bool(said["suspects"]) and said["verdict"] == UNDETERMINED)


def _accuracy_answered(detected: Iterable[Result]) -> float | None:
    answered = [r for r in detected if not _abstains(answer_at(r))]
    return share(sum(is_named(r, answer_at(r)) for r in answered), len(answered))


def _ranks_right(result: Result) -> bool:
    said = final_answer(result)
    return said is not None and sorted(said["ranks"] or ()) == sorted(result["truth"]["ranks"])


def _hit(result: Result) -> bool:
    """Whether some alarm came between the onset and 20 steps after the loss left its twin."""
    first = first_alarm(result)
    return first is not None and alarm_step(first) <= result["spike"]["step"] + HIT_STEPS


def calibration_error(points: Sequence[tuple[float, bool]]) -> float | None:
    """Expected calibration error over 10 bins of equal width (Guo et al., arXiv:1706.04599)."""
    if not points:
        return None
    curve = calibration_curve(points)
    return round(sum(b["count"] * abs(b["accuracy"] - b["confidence"]) for b in curve) / len(points), 4)


def calibration_curve(points: Sequence[tuple[float, bool]]) -> list[dict[str, Any]]:
    bins: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for probability, right in points:
        bins[min(BINS - 1, int(probability * BINS))].append((probability, right))
    return [
        {
            "bin": f"{at / BINS:.1f}-{(at + 1) / BINS:.1f}",
            "count": len(found),
            "confidence": round(sum(p for p, _ in found) / len(found), 4),
            "accuracy": round(sum(right for _, right in found) / len(found), 4),
        }
        for at, found in sorted(bins.items())
    ]


THRESHOLDS = (0.0, *(round(0.3 + 0.05 * step, 2) for step in range(14)))


def abstaining(detected: Sequence[Result]) -> list[dict[str, float]]:
    """What is right of the answers at or over a probability, and how many of the detected runs get one."""
    points = [_point(r, answer_at(r)) for r in detected]
    curve = []
    for threshold in THRESHOLDS:
        kept = [p[1] for p in points if p is not None and p[0] >= threshold]
        if kept:
            share_kept = round(len(kept) / len(points), 4)
            curve.append({"p": threshold, "answered": share_kept, "right": round(sum(kept) / len(kept), 4)})
    return curve


def confusion(detected: Iterable[Result]) -> dict[str, dict[str, int]]:
    """True cause -> what was named most probable two steps after the alarm -> runs."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for result in detected:
        found = named(answer_at(result))
        said = answer_at(result)
        table[result["truth"]["cause"]][found[0][0] if found else f"({said['kind']})" if said else "-"] += 1
    return {cause: dict(counts.most_common()) for cause, counts in sorted(table.items())}


def by(faults: Iterable[Result], key: Callable[[Result], str]) -> dict[str, dict[str, Any]]:
    """Detection, naming, delay and onset error of groups of fault runs. Delays and errors in steps."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in faults:
        groups[key(result)].append(result)
    found = {}
    for name, group in sorted(groups.items()):
        detected = [r for r in group if first_alarm(r) is not None]
        delays = sorted(alarm_step(first_alarm(r)) - r["truth"]["onset_step"] for r in detected)  # type: ignore[arg-type]
        errors = sorted(
            abs(said["onset"] - r["truth"]["onset_step"]) for r in detected if (said := final_answer(r)) is not None
        )
        found[name] = {
            "runs": len(group),
            "detected": share(len(detected), len(group)),
            "top1": share(sum(is_named(r, answer_at(r)) for r in detected), len(detected)),
            "top1_final": share(sum(is_named(r, final_answer(r)) for r in detected), len(detected)),
            "recall": share(sum(is_named(r, final_answer(r)) for r in detected), len(group)),
            "delay_median": _quantile(delays, 0.5),
            "delay_p90": _quantile(delays, 0.9),
            "onset_error_median": _quantile(errors, 0.5),
            "spikes": sum(r["spike"] is not None for r in group),
            "ranks_right": share(
                sum(_ranks_right(r) for r in detected if len(r["truth"]["ranks"]) < WORLD),
                sum(len(r["truth"]["ranks"]) < WORLD for r in detected),
            ),
            "held_out": any(r["truth"]["held_out"] for r in group),
        }
    return found


def _quantile(ordered: Sequence[int], q: float) -> int | None:
    return (
        ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1 if q * len(ordered) >= 1 else 0)]
        if ordered
        else None
    )


def rules_table(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """The rules of others on the same spikes and the same healthy steps: any alarm from the onset to 20 steps after the
    spike is a hit; alarms less than 20 steps apart are one."""
    spiky = [r for r in results if is_fault(r) and r["spike"] is not None]
    table: dict[str, dict[str, Any]] = {}
    for rule in RULES:
        hits = sum(
            any(r["truth"]["onset_step"] <= s <= r["spike"]["step"] + HIT_STEPS for s in r["rules"][rule.name])
            for r in spiky
        )
        false = steps = 0
        for result, first, last in healthy(results):
            steps += last - first + 1
            previous = -math.inf
            for s in result["rules"][rule.name]:
                if first <= s <= last and s - previous > HIT_STEPS:
                    false += 1
                    previous = s
        table[rule.name] = {
            "recall": share(hits, len(spiky)),
            "false_alarms_per_10k": round(1e4 * false / steps, 2) if steps else None,
        }
    return table
