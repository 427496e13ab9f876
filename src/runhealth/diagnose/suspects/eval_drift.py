"""The evaluation changed, not the model.

The held-out loss leaves its trend while training goes on as before: another evaluation set, another tokenizer, another
prompt. A frozen checkpoint that is scored again tells.
"""

import math
from collections.abc import Iterator

from runhealth.diagnose import observe, queries
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence
from runhealth.diagnose.robust import median
from runhealth.diagnose.suspect import Needs, Suspect

ALIKE = math.log(1.08)


def investigate(case: Case) -> Iterator[Evidence]:
    told = [a for a in case.incident.alarms if a.kind == "eval_drift"]
    for alarm in told[:1]:
        yield Evidence(
            claim=alarm.message,
            weight_nats=3.5,
            steps=(alarm.onset_step, alarm.step),
            value=alarm.value if alarm.value == alarm.value else None,
            baseline=alarm.baseline if alarm.baseline == alarm.baseline else None,
        )
    step = case.onset_step
    before = [v for _, v in observe.values(case.before[-32:], lambda frame: frame.loss) if v > 0]
    after = [v for _, v in observe.values(case.between(step, case.horizon_step), lambda frame: frame.loss) if v > 0]
    if len(before) >= 8 and after:
        off = math.log(median(after) / median(before))
        level = off < ALIKE
        yield Evidence(
            claim=f"the training loss {'goes on as before' if level else 'rose too'}: {median(after):.4g} against "
            f"{median(before):.4g}",
            weight_nats=1.5 if level else -3.0,
            steps=(step, case.horizon_step),
            value=median(after),
            baseline=median(before),
            query=queries.steps("median", "loss", case.incident.attempt, step, case.horizon_step),
        )


SUSPECT = Suspect(
    name="eval_drift",
    title="evaluation drift",
    needs=Needs(all=("eval_loss",), optional=("loss",)),
    investigate=investigate,
    action="repair",
    remedy="score a frozen checkpoint again; pin the evaluation set, its tokenizer and its settings",
    explains="the evaluation itself changed while training went on",
    kinds=("eval_drift",),
)
