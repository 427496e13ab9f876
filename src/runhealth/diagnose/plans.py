"""The arrows from the diagnosis back into training: the rollback plan, and the order of a replay. Data only.

The trainer imports this module and nothing else of `diagnose`. A plan is a JSON file; reading one checks every field,
because a plan may come from another machine.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from runhealth.storage.errors import PlanError
from runhealth.storage.jsontext import parse_json

SCHEMA_VERSION = 1
SAME_INCIDENT_STEPS = 10  # an onset so close to that of an earlier rollback is the same incident again
MOST_NUMBER = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipRange:
    """Samples `first_sample` to `last_sample` (inclusive, numbered within the shard) are not to be trained on."""

    shard: str
    first_sample: int
    last_sample: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A change of configuration that must happen before the restart. `kind` is one of `REPAIRS`; `target` names what
    it applies to (a tensor or layer pattern, a parameter), `value` the new value, where the kind needs them."""

    kind: str
    target: str = ""
    value: float | None = None
    reason: str = ""


REPAIRS = (
    "fresh_amax",  # forget fp8 amax histories and let them fill again
    "higher_precision",  # keep the named tensors out of fp8/fp16
    "lower_clip_threshold",
    "restore_lr_schedule",
    "reset_loss_scale",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedCheckpoint:
    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What going back costs: steps and tokens trained again, samples skipped, seconds where step time is known."""

    steps: int
    tokens: int
    samples_skipped: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackPlan:
    """Go back to `checkpoint_step`, repair, skip, go on.

    `attempt` is the attempt in which the incident happened. `checkpoint_path` is relative to the run's folder or a
    URL. `preconditions` are sentences that `apply` checks and prints.
    """

    run: str
    incident: str
    attempt: int
    cause: str
    probability: float
    onset_step: int
    checkpoint_step: int
    checkpoint_path: str
    skip: tuple[SkipRange, ...] = ()
    repairs: tuple[Repair, ...] = ()
    rejected: tuple[RejectedCheckpoint, ...] = ()
    cost: Cost
    preconditions: tuple[str, ...] = ()

    def is_for(self, onset_step: int) -> bool:
        """Whether an incident with that onset is the one that this plan answers, come again."""
        return abs(self.onset_step - onset_step) <= SAME_INCIDENT_STEPS

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    def dumps(self) -> str:
        return json.dumps(self.to_json(), indent=2)

    @classmethod
    def loads(cls, text: str, where: str = "plan") -> "RollbackPlan":
        """Parse and check a plan.

        Raises:
            PlanError: not JSON, another schema version, a missing or unknown field, a wrong type, an unknown repair.
        """
        try:
            raw = parse_json(text)
        except ValueError as error:
            raise PlanError(f"{where}: expected a rollback plan as JSON, met {error}") from error
        if not isinstance(raw, dict) or raw.get("schema_version") != SCHEMA_VERSION:
            met = raw.get("schema_version") if isinstance(raw, dict) else type(raw).__name__
            raise PlanError(f"{where}: expected schema_version {SCHEMA_VERSION}, met {met}")
        raw = {key: value for key, value in raw.items() if key != "schema_version"}
        try:
            plan = cls(
                **{
                    **_checked(cls, raw, where),
                    "skip": _tuple_of(SkipRange, raw.get("skip", []), f"{where}: skip"),
                    "repairs": _tuple_of(Repair, raw.get("repairs", []), f"{where}: repairs"),
                    "rejected": _tuple_of(RejectedCheckpoint, raw.get("rejected", []), f"{where}: rejected"),
                    "cost": Cost(**_checked(Cost, raw["cost"], f"{where}: cost")),
                    "preconditions": tuple(_strings(raw.get("preconditions", []), f"{where}: preconditions")),
                }
            )
        except (TypeError, KeyError) as error:
            raise PlanError(f"{where}: {error}") from error
        plan._validate(where)
        return plan

    def _validate(self, where: str) -> None:
        if self.checkpoint_step < 0 or self.checkpoint_step > self.onset_step:
            raise PlanError(
                f"{where}: expected 0 <= checkpoint_step <= onset_step {self.onset_step}, met {self.checkpoint_step}"
            )
        for skip in self.skip:
            if not 0 <= skip.first_sample <= skip.last_sample:
                raise PlanError(f"{where}: expected 0 <= first_sample <= last_sample in skip, met {skip}")
        for repair in self.repairs:
            if repair.kind not in REPAIRS:
                raise PlanError(f"{where}: expected a repair out of {', '.join(REPAIRS)}, met {repair.kind!r}")


CHANGES = (
    "as_is",  # nothing: the control
    "mask_shards",  # rows of the named shards give way to rows of other shards
    "swap_lanes",  # each data-parallel rank trains on what its neighbour trained on
    "scheduled_lr",  # schedule(step), whatever changed it
    "fp32",  # no casts, no loss scale
    "restore_optimizer",  # moments of the checkpoint before, settings of the config
    "configured_optimizer",  # settings of the config (betas, weight decay), whatever changed them
    "clip_updates",  # no tensor's update is larger than Adam means it to be
    "cap_logits",  # query, key and output matrices keep the norms that they were loaded with
    "half_clip",  # half the clip threshold
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOrder:
    """Train from `checkpoint` up to `stop_step` (exclusive) once more, with one `change` out of `CHANGES`.

    `attempt` is the one whose launch is repeated, `incident` and `name` say where the telemetry goes
    (`<run>/replays/<incident>/<name>`). `resumes`: the attempt itself began with this checkpoint, so what happened at
    the load happens again. `shards` are those to mask, `before` a checkpoint whose optimizer state is to be taken.
    """

    incident: str
    name: str
    attempt: int
    change: str
    checkpoint: str
    stop_step: int
    resumes: bool = False
    shards: tuple[str, ...] = ()
    before: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: object, where: str = "order") -> "ReplayOrder":
        """Raises PlanError for a missing or unknown field, a wrong type, an unknown change."""
        try:
            fields = _checked(cls, raw, where)
            order = cls(**{**fields, "shards": tuple(_strings(fields.get("shards", []), f"{where}: shards"))})
        except TypeError as error:
            raise PlanError(f"{where}: {error}") from error
        if order.change not in CHANGES:
            raise PlanError(f"{where}: expected a change out of {', '.join(CHANGES)}, met {order.change!r}")
        return order


_TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
}


def _checked(owner: type, raw: object, where: str) -> dict[str, Any]:
    """The fields of `raw`, each of the type that `owner` declares; containers are left to the caller."""
    if not isinstance(raw, dict):
        raise PlanError(f"{where}: expected an object, met {type(raw).__name__}")
    fields: dict[str, Any] = owner.__dataclass_fields__  # type: ignore[attr-defined]
    for key, value in raw.items():
        if key not in fields:
            raise PlanError(f"{where}: unknown field {key!r}; known are {', '.join(fields)}")
        declared = fields[key].type
        name = declared if isinstance(declared, str) else getattr(declared, "__name__", str(declared))
        allowed = _TYPES.get(str(name))
        if allowed and (not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)):
            raise PlanError(f"{where}: expected {key} as {name}, met {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise PlanError(f"{where}: expected {key} as a finite number, met {value}")
        if isinstance(value, int) and not -MOST_NUMBER <= value < MOST_NUMBER:
            raise PlanError(f"{where}: expected {key} as a number of 64 bits, met one of {value.bit_length()}")
        if isinstance(value, str) and not _is_text(value):
            raise PlanError(f"{where}: expected {key} as text, met {value[:60]!r}")
    return dict(raw)


def _is_text(value: str) -> bool:
    """Whether it can be a name on a disk: no NUL, no half of a surrogate pair. Whoever looks for such a file gets an
    error of another kind than for one that is missing."""
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


def _tuple_of(owner: type, raw: object, where: str) -> tuple[Any, ...]:
    if not isinstance(raw, list):
        raise PlanError(f"{where}: expected a list, met {type(raw).__name__}")
    return tuple(owner(**_checked(owner, item, f"{where}[{index}]")) for index, item in enumerate(raw))


def _strings(raw: object, where: str) -> list[str]:
    raw = list(raw) if isinstance(raw, tuple) else raw
    if not isinstance(raw, list) or not all(isinstance(item, str) and _is_text(item) for item in raw):
        raise PlanError(f"{where}: expected a list of strings")
    return raw
