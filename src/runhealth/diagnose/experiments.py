"""The experiments of a replay: for whom the anomaly vanishes, what an outcome is worth, and which one to make next.

Rates are those of the experiment behind the design (620 labelled runs, interventions on incidents of known cause); see
docs/decisions/345. An outcome o of a change weighs log(P(o | suspect) / P(o | a cause nobody thought of)) nats.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from runhealth.diagnose.calibration import current
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import UNDETERMINED, Evidence, Finding, Status
from runhealth.diagnose.replays import Replayed, Tried
from runhealth.diagnose.suspect import CLIP_NATS, VETO_NATS, Suspect, missing_signals, raw_sum

MOST_REPLAYS = 3  # the control included
ENOUGH = 0.97
LEAST_EQUAL_STEPS = 3  # bit-equal to the record for so long: the replay computes what the run computed
LEAST_GAIN_NATS = 0.02  # an experiment that is expected to tell less is not made
DECISIVE = 0.5  # a suspect's own test makes its anomaly vanish at least so often

TRANSIENT = "silent_corruption"
REPEATABLE = (
    "bad_shard",
    "lr_change",
    "optimizer_state",
    "adam_staleness",
    "fp_overflow",
    "loss_scale",
    "logit_growth",
    "clip_breach",
    "data_order",
    "benign",
)
AT_LOAD = ("resume_artifact", "checkpoint_io", "dead_layer", "not_stepping", "router_collapse")  # come back as well
UNKNOWN_RATE = 0.1  # a cause that is no suspect
OTHER_RATE = 0.05  # a suspect that the change does not aim at, where nothing was measured
FLOOR = 0.01  # no rate is known better
RATES: Mapping[str, Mapping[str, float | None]] = {
    "as_is": {TRANSIENT: 0.90, **dict.fromkeys((*REPEATABLE, *AT_LOAD), 0.0)},
    "mask_shards": {
        "bad_shard": 1.0,
        "benign": 1.0,  # hard but clean batches
        "data_order": None,
        "lr_change": 0.09,
        "optimizer_state": 0.12,
        "adam_staleness": 0.12,
        "fp_overflow": 0.0,
    },
    "swap_lanes": {"bad_shard": 0.97, "benign": None, "data_order": None, TRANSIENT: 0.03},
    "scheduled_lr": {"lr_change": 1.0, **dict.fromkeys((s for s in REPEATABLE if s != "lr_change"), 0.0)},
    "fp32": {"fp_overflow": 0.89, "loss_scale": 1.0, "bad_shard": 0.0, "lr_change": 0.0},
    "restore_optimizer": {"optimizer_state": 1.0, "adam_staleness": None, "bad_shard": 0.0},
    # moments that are damaged between the checkpoint and the onset are not made whole by it
    "configured_optimizer": {"optimizer_state": 0.8, "adam_staleness": 0.0, "bad_shard": 0.0, "lr_change": 0.0},
    "clip_updates": {"adam_staleness": 0.88, "optimizer_state": None, "lr_change": None, "bad_shard": 0.0},
    "cap_logits": {"logit_growth": 0.67, "bad_shard": 0.0},
    "half_clip": {"clip_breach": 0.3, "bad_shard": None, "lr_change": None},
}
SHARE = "of the steps"  # the unit of a channel that a step has or has not
REPLAYED = "replayed "  # claims of replays begin so
WORDS: Mapping[str, str] = {
    "as_is": "as it was",
    "mask_shards": "with the shard's rows masked",
    "swap_lanes": "with the data lanes swapped between ranks",
    "scheduled_lr": "at the scheduled learning rate",
    "fp32": "in fp32",
    "restore_optimizer": "with the optimizer state of the checkpoint before",
    "configured_optimizer": "with the optimizer settings of the config",
    "clip_updates": "with the RMS of updates clipped",
    "cap_logits": "with the logit matrices capped",
    "half_clip": "with half the clip threshold",
}


def rate(change: str, suspect: str) -> float | None:
    """How often the anomaly vanishes under a change if this suspect is the cause; None where it is not known."""
    known = RATES[change]
    if suspect in known:
        return known[suspect]
    return OTHER_RATE if suspect in REPEATABLE or suspect == TRANSIENT else None


def weight_nats(change: str, suspect: str, vanished: bool) -> float:
    """What an outcome says about a suspect; 0 where nothing is known."""
    found = rate(change, suspect)
    if found is None:
        return 0.0
    p = min(1.0 - FLOOR, max(FLOOR, found))
    nats = math.log(p / UNKNOWN_RATE) if vanished else math.log((1.0 - p) / (1.0 - UNKNOWN_RATE))
    return max(-CLIP_NATS, min(CLIP_NATS, nats))


def evidence(result: Replayed) -> dict[str, tuple[Evidence, ...]]:
    """What the replays of an incident say, by suspect. It has no steps: it is no sign that came first or last."""
    found: dict[str, list[Evidence]] = {}
    for one in result.tried:
        if one.change == "as_is" and one.vanished and not result.deterministic:
            continue  # what differs may be the replay
        if one is not result.tried[0] and one.change == "as_is":
            continue  # a control of the control
        for suspect in (*REPEATABLE, *AT_LOAD, TRANSIENT):
            nats = weight_nats(one.change, suspect, one.vanished)
            if one.change == "as_is" and one.vanished and is_exact(result):
                nats = CLIP_NATS if suspect == TRANSIENT else VETO_NATS  # the same numbers would have come again
            if abs(nats) < 0.1:
                continue
            found.setdefault(suspect, []).append(
                Evidence(
                    claim=f"{claim(result, one)}; {fidelity(result)}" if one.change == "as_is" else claim(result, one),
                    weight_nats=round(nats, 3),
                    ranks=result.parted_ranks
                    if one.change == "as_is" and suspect == TRANSIENT and one.vanished
                    else (),
                    value=one.score,
                    baseline=result.score,
                )
            )
    return {suspect: tuple(items) for suspect, items in found.items()}


def is_exact(result: Replayed) -> bool:
    """Bit-equal to the record for a while: where they part, the record is not what these weights and data give."""
    return result.equal_steps >= LEAST_EQUAL_STEPS


def proven(result: Replayed) -> frozenset[str]:
    """Suspects whose own test made the anomaly vanish. Their vetoes fall: a veto says that the record lacks a trace of
    the cause, and the cause has been seen at work. Not so for data that are merely hard: a replay does not tell them
    from bad ones, what vetoes them does."""
    found = set()
    for one in result.tried:
        if one.vanished and (one.change != "as_is" or is_exact(result)):
            found |= {s for s, p in RATES[one.change].items() if p is not None and p >= DECISIVE}
    return frozenset(found - {"benign"})


def _together(suspect: str, said: Iterable[Evidence], result: Replayed | None) -> tuple[Evidence, ...]:
    """What the record and the replays say of a suspect. One whose numbers would have come again, and did not, is out
    however much speaks for it: what does are consequences."""
    if result is None:
        return tuple(said)
    kept = [e for e in said if suspect not in proven(result) or e.weight_nats > VETO_NATS]
    shown = evidence(result).get(suspect, ())
    if refuted := [e for e in shown if e.weight_nats <= VETO_NATS]:
        shown = tuple(replace(e, weight_nats=VETO_NATS - max(0.0, raw_sum(kept))) for e in refuted)
    return (*kept, *shown)


def claim(result: Replayed, one: Tried) -> str:
    """`replayed in fp32, the anomaly vanishes (loss 2.31 to 0.18 nats over its level)`."""
    return f"{REPLAYED}{outcome(result, one)}"


def outcome(result: Replayed, one: Tried) -> str:
    """`in fp32, the anomaly vanishes (loss 2.31 to 0.18 nats over its level)`."""
    what = WORDS[one.change]
    if one.shards:
        what = f"with the rows of shard {', '.join(one.shards[:3])} masked"
    if one.change == "swap_lanes":
        how = "goes with the data" if one.vanished else "does not go with the data"
        return f"{what}, the anomaly {how}"
    control = one.change == "as_is"
    if control:
        how = "does not come back" if one.vanished else "comes back"
    else:
        how = "vanishes" if one.vanished else "stays"
    return f"{what}, the anomaly {how} ({_moved(result, one, short=control and not one.vanished)})"


def _moved(result: Replayed, one: Tried, *, short: bool) -> str:
    """From what to what: `loss 2.31 to 0.18 nats over its level`; `short` names one number where both are the same."""
    channel = result.channel.replace("_", " ")
    if result.unit == SHARE:
        before, now = f"{100 * result.score:.0f}", f"{100 * one.score:.0f}"
        return f"{channel} in {now if short and now == before else f'{before} to {now}'} % of the scored steps"
    before, now = f"{result.score:.2f}", f"{one.score:.2f}"
    return f"{channel} {now if short and now == before else f'{before} to {now}'} {result.unit} over its level"


def fidelity(result: Replayed) -> str:
    """How exactly the replay as it was repeats the record."""
    if result.parted_step is None:
        return f"bit-equal to the record in all {result.equal_steps} steps"
    on = f"on rank{'s' if len(result.parted_ranks) > 1 else ''} {', '.join(map(str, result.parted_ranks))}"
    if result.equal_steps:
        return (
            f"bit-equal to the record up to step {result.parted_step - 1:,}; they part at step {result.parted_step:,},"
            f" {on}"
        )
    return (
        f"not bit-equal to the record from step {result.checkpoint_step:,} on, {on}; the loss differs by at most"
        f" {result.band:.2g} nats before the onset"
    )


def probabilities(finding: Finding, result: Replayed | None) -> dict[str, float]:
    """Of the finding's suspects with what the replays said so far added to what was said before."""
    raws = {UNDETERMINED: current().undetermined_nats}
    for suspect in finding.suspects:
        if suspect.suspect == UNDETERMINED:
            continue
        out = suspect.status is Status.CRASHED  # one that could not look may still be shown at work
        said = _together(suspect.suspect, suspect.evidence, result)
        raws[suspect.suspect] = -math.inf if out else raw_sum(said)
    return current().probabilities(raws)


def own_test(suspect: str, possible: Collection[str]) -> str | None:
    """The change that makes this suspect's anomaly vanish most often, if one does so often enough."""
    ranked = sorted(((rate(change, suspect) or 0.0, change) for change in possible), reverse=True)
    return ranked[0][1] if ranked and ranked[0][0] >= DECISIVE else None


def choose(beliefs: Mapping[str, float], possible: Sequence[str], tried: Collection[str]) -> str | None:
    """The next change to try; None if the suspect is proven or nothing is left that would tell something. As it was
    comes first; then, if one suspect is ahead, its own test; else what is expected to tell most."""
    if "as_is" not in tried:
        return "as_is"
    left = [change for change in possible if change not in tried]
    leader = max((s for s in beliefs if s != UNDETERMINED), key=lambda s: (beliefs[s], s), default=UNDETERMINED)
    if beliefs.get(leader, 0.0) >= ENOUGH:
        own = own_test(leader, ["as_is", *possible])
        return own if own is not None and own not in tried else None
    ranked = sorted(((gain_nats(change, beliefs), change) for change in left), reverse=True)
    return ranked[0][1] if ranked and ranked[0][0] >= LEAST_GAIN_NATS else None


def gain_nats(change: str, beliefs: Mapping[str, float]) -> float:
    """Expected loss of entropy over the suspects, nats."""
    rates = {
        suspect: min(1.0 - FLOOR, max(FLOOR, UNKNOWN_RATE if (found := rate(change, suspect)) is None else found))
        for suspect in beliefs
    }
    expected = 0.0
    for vanished in (True, False):
        joint = {s: p * (rates[s] if vanished else 1.0 - rates[s]) for s, p in beliefs.items()}
        total = sum(joint.values())
        if total > 0:
            expected += total * _entropy([p / total for p in joint.values()])
    return _entropy(list(beliefs.values())) - expected


def _entropy(ps: Sequence[float]) -> float:
    return -sum(p * math.log(p) for p in ps if p > 0)


def with_replays(suspects: Sequence[Suspect], results: Sequence[Replayed]) -> tuple[Suspect, ...]:
    """The suspects, each of which also knows what the replays of an incident showed."""
    if not results:
        return tuple(suspects)
    by_incident = {result.incident: result for result in results}

    def knowing(suspect: Suspect) -> Suspect:
        def investigate(case: Case) -> list[Evidence]:
            _, able = missing_signals(suspect, case)
            recorded = suspect.investigate(case) if able else ()
            return list(_together(suspect.name, recorded, by_incident.get(case.incident.id)))

        shown = frozenset(name for name, result in by_incident.items() if suspect.name in proven(result))
        return replace(suspect, investigate=investigate, shown_in=shown)

    return tuple(knowing(suspect) for suspect in suspects)
