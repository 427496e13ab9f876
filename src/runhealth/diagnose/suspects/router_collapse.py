"""A router that sends nearly all tokens to one expert.

The largest load share climbs towards 1 before the loss, on all ranks.
"""

from collections.abc import Iterator

from runhealth.diagnose import observe, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect

COLLAPSED = 0.5
OVER_HABIT = 1.5
NEARLY_ALL = 0.95
RECENT_FRAMES = 64


def investigate(case: Case) -> Iterator[Evidence]:
    globally = case.has("router_load_max")
    read = observe.largest("router_load_max") if globally else observe.layer_largest("router_load_max")
    usual = observe.habit(case, read, frames=RECENT_FRAMES)
    first, last = case.onset_step - observe.LEAD_STEPS, max(case.loss_step, case.incident.last_alarm_step)
    points = observe.values(case.between(first, last), read)
    if not usual.ready or not points:
        return
    limit = max(COLLAPSED, min(NEARLY_ALL, OVER_HABIT * usual.quantile(0.95)))
    high = [(step, value) for step, value in points if value > limit]
    worst = max(points, key=lambda p: p[1])
    query = queries.steps("max", "router_load_max", case.incident.attempt, first, last) if globally else ""
    if not high:
        yield Evidence(
            claim=f"the largest load of an expert was {worst[1]:.2f} at most (habit {usual.center:.2f})",
            weight_nats=VETO_NATS,
            steps=(first, last),
            value=worst[1],
            baseline=usual.center,
            query=query,
        )
        return
    lead = case.loss_step - high[0][0] if case.loss_moved else 0
    layers = observe.layer_values(case.layers(high[0][0], last), "router_load_max")
    named = tuple(sorted((n for n in layers if layers[n] > limit), key=lambda n: (-layers[n], n))[:4])
    yield Evidence(
        claim=f"one expert got {worst[1]:.0%} of the tokens (habit {usual.center:.0%}) from step {high[0][0]:,} on"
        + (f", {lead} steps before the loss moved" if lead > 0 else ""),
        weight_nats=3.5 if lead > 0 or not case.loss_moved else 2.0,
        steps=(high[0][0], last),
        layers=named,
        value=worst[1],
        baseline=usual.center,
        query=query,
    )
    yield from observe.data_alike(case, high[0][0] - 2, high[0][0])
    yield from observe.lr_on_course(case, high[0][0] - 8, high[0][0])


SUSPECT = Suspect(
    name="router_collapse",
    title="router collapse",
    needs=Needs(any=("router_load_max", "layer.router_load_max"), optional=("lr", "token_entropy")),
    investigate=investigate,
    action="rollback_and_repair",
    remedy="go back to a balanced router; raise the balance loss or add noise to the router",
    explains="the router sends nearly all tokens to one expert",
    kinds=("loss_spike", "loss_divergence", "router_collapse"),
)
