"""A layer that gets no gradient.

The RMS of one layer's gradient falls to the optimizer's epsilon, or to a thousandth of its habit, while the other
layers go on. All layers small at once is the learning rate or the loss, not a layer.
"""

from collections.abc import Iterator

from runhealth.diagnose import observe, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.robust import median
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

SIGNALS = ("grad_rms", "grad_norm")
DEAD = 1e-2  # of its habit, against the other layers


def investigate(case: Case) -> Iterator[Evidence]:
    signal = next((s for s in SIGNALS if case.has(f"layer.{s}")), None)
    if signal is None:
        return
    first, last = case.onset_step, case.horizon_step
    old: dict[str, list[float]] = {}
    for frame in case.before:
        for sample in frame.layers:
            if signal in sample.values:
                old.setdefault(sample.layer, []).append(float(sample.values[signal]))
    now = observe.layer_values(case.layers(first, last), signal)
    told = [a for a in case.incident.alarms if a.kind == "dead_layer"]
    shares = {n: now[n] / median(old[n]) for n in now if n in old and median(old[n]) > 0}
    dead = sorted(n for n in shares if shares[n] < DEAD)
    if told and not dead:
        dead = sorted(set(told[0].layers))
    if not shares and not dead:
        return
    if not dead:
        yield Evidence(
            claim="every layer got its gradient",
            weight_nats=VETO_NATS,
            steps=(first, last),
            value=min(shares.values()),
        )
        return
    few = len(dead) <= max(1, 0.5 * len(now))
    name = dead[0]
    yield Evidence(
        claim=f"the gradient of {', '.join(dead[:4])} fell to {now.get(name, 0.0):.2g} "
        f"(before: {median(old[name]) if name in old else float('nan'):.2g}) while "
        + ("the other layers go on" if few else "most layers did"),
        weight_nats=3.5 if few else -1.5,
        steps=(first, last),
        layers=tuple(dead[:4]),
        value=now.get(name, 0.0),
        baseline=median(old[name]) if name in old else None,
        query=queries.layers("max", signal, case.incident.attempt, first, last, name),
    )
    if few:
        yield from observe.lr_on_course(case, case.onset_step - observe.LEAD_STEPS, case.onset_step)
        yield from observe.data_alike(case, case.onset_step - 2, case.onset_step)


SUSPECT = Suspect(
    name="dead_layer",
    title="dead layer",
    needs=Needs(any=("layer.grad_rms", "layer.grad_norm"), optional=("lr",)),
    investigate=investigate,
    action="rollback_and_repair",
    remedy="go back; check the layer's input, initialisation and normalisation",
    explains="a layer gets no gradient any more",
    kinds=("loss_spike", "loss_divergence", "dead_layer"),
)
