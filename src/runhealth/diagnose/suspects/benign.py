"""Nothing is wrong: a hard but clean batch, noise with heavy tails.

The loss is back at once, its batches look like the others, and nothing else moved.
"""

import math
from collections.abc import Iterator

from runhealth.diagnose import queries
from runhealth.diagnose.batches import SIGMA_FLOORS
from runhealth.diagnose.case import Case
from runhealth.diagnose.detectors.data_corrupt import degenerate
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.robust import Baseline, median
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

BACK_AT_ONCE_STEPS = 3
SHIFT_Z = 4.0
SHIFT_SHARE = 0.7  # of the batches


def investigate(case: Case) -> Iterator[Evidence]:
    onset, attempt = case.loss_step, case.incident.attempt
    if any(a.kind == "non_finite" for a in case.incident.alarms):
        yield Evidence(claim="a value is not finite", weight_nats=VETO_NATS)
        return
    harder = list(_harder(case))
    yield from harder
    back = case.loss_back_step
    after = [f for f in case.around if f.step > onset and f.loss is not None]
    if back is None and len(after) >= 2 and not harder:
        values = [f.loss for f in after if f.loss is not None and math.isfinite(f.loss)]
        yield Evidence(
            claim=f"the loss was not back {len(after)} logged steps later",
            weight_nats=-3.5,
            steps=(onset, after[-1].step),
            value=max(values, default=None),
        )
        if len(after) >= 16:
            yield Evidence(claim="nor did it come back after that", weight_nats=-1.5)
    elif back is not None:
        quick = back - onset <= BACK_AT_ONCE_STEPS or (after and back <= after[0].step)
        yield Evidence(
            claim=f"the loss was back at step {back:,}",
            weight_nats=2.0 if quick else 0.5,
            steps=(onset, back),
        )
    outliers = case.outliers(case.between(onset - 2, onset))
    if outliers:
        whole = case.has("shard_hash") and not any(o.hash_mismatch or degenerate(o) for o in outliers)
        yield Evidence(
            claim="a batch of the onset is unlike the others"
            + (", but its shard is whole and its tokens are no garbage: hard, not damaged" if whole else ""),
            weight_nats=1.5 if whole else -3.5,
            steps=(onset - 2, onset),
        )
    elif any(b.values for b in case.batches(onset - 2, onset)):
        yield Evidence(claim="the batches of the onset look like all others", weight_nats=1.0, steps=(onset - 2, onset))
    others = sorted({a.signal for a in case.incident.alarms if a.signal not in ("loss", "grad_norm")})
    if others:
        yield Evidence(claim=f"{', '.join(others)} left their habit too", weight_nats=-2.0)
    norm = case.baseline("grad_norm", log=True)
    value = next((f.get("grad_norm") for f in case.between(onset, onset)), None)
    if norm.ready and value is not None and math.isfinite(value) and value > 0:
        factor = value / math.exp(norm.center)
        yield Evidence(
            claim=f"the gradient norm was {factor:.2g} x normal at the onset",
            weight_nats=1.0 if factor < 2 else 0.0 if factor < 4 else -1.0,
            steps=(onset, onset),
            value=float(value),
            baseline=math.exp(norm.center),
            query=queries.steps("max", "grad_norm", attempt, onset, onset),
        )


def _harder(case: Case) -> Iterator[Evidence]:
    """Statistics that shift on all ranks at once, mildly, and stay."""
    step = case.loss_step if case.loss_moved else case.onset_step
    new = [b for b in case.batches(step - 2, case.horizon_step) if b.values]
    if len(new) < 2:
        return
    if any(degenerate(o) for o in case.outliers(case.between(step - 2, case.horizon_step))):
        return
    best: tuple[float, str, float, float] | None = None
    for signal, floor in SIGMA_FLOORS.items():
        usual = Baseline(512, least=16, floor=floor / 4)
        usual.extend(float(b.values[signal]) for f in case.before for b in f.batches if signal in b.values)
        mine = [float(b.values[signal]) for b in new if signal in b.values]
        if not usual.ready or not mine:
            continue
        away = [usual.z(v) for v in mine]
        way = median(away)
        share = sum(z * way > 0 and abs(z) >= SHIFT_Z for z in away) / len(away)
        if share >= SHIFT_SHARE and (best is None or abs(way) > abs(best[0])):
            best = (way, signal, median(mine), usual.center)
    if best is None:
        return
    ranks = {b.rank for b in new}
    everywhere = len(ranks) == len({b.rank for f in case.before[-4:] for b in f.batches}) or len(ranks) == 1
    yield Evidence(
        claim=f"the data changed for good: {best[1].replace('_', ' ')} {best[2]:.3g} on all ranks since about step "
        f"{step:,} (before: {best[3]:.3g})",
        weight_nats=2.5 if everywhere else 1.0,
        steps=(step - 2, case.horizon_step),
        value=best[2],
        baseline=best[3],
    )


SUSPECT = Suspect(
    name="benign",
    title="nothing wrong (a hard batch, noise)",
    needs=Needs(all=("loss",), optional=("grad_norm", "token_entropy")),
    investigate=investigate,
    action="continue",
    remedy="go on; no rollback is needed",
    explains="an ordinary excursion of a noisy loss that is gone at once",
    kinds=("loss_spike", "gradient_spike"),
)
