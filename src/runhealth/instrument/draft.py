"""What is known of the step under way."""

from dataclasses import dataclass, field

from runhealth.instrument.scalars import Fetched, Scalars
from runhealth.storage.records import Scalar


@dataclass(slots=True, kw_only=True)
class BatchDraft:
    """A BatchRecord under way."""

    shard: str
    first_sample: int
    last_sample: int
    samples: int
    content_hash: int | None
    shard_hash: int | None
    manifest_hash: int | None
    ts_ns: int
    values: dict[str, Scalar]


@dataclass(slots=True, kw_only=True)
class Draft:
    """`values` and `layers` become the records; `scalars` holds what is still on a device. `promised` are recorded
    numbers by name that `scalars` will fetch; `failed` says that the step ended in an exception."""

    number: int
    start_s: float
    failed: bool = False
    values: dict[str, Scalar] = field(default_factory=dict)
    layers: dict[str, dict[str, Scalar]] = field(default_factory=dict)
    batches: list[BatchDraft] = field(default_factory=list)
    scalars: Scalars = field(default_factory=Scalars)
    promised: dict[str, Fetched] = field(default_factory=dict)
    losses: list[Fetched | float] = field(default_factory=list)
    logits: list[Fetched] = field(default_factory=list)  # largest of each micro-batch
    phases_s: dict[str, float] = field(default_factory=dict)

    def layer(self, name: str) -> dict[str, Scalar]:
        return self.layers.setdefault(name, {})


class Probe:
    """One thing that is measured. Each call is guarded: what a probe raises costs its own numbers only.

    The order is begin, collect, finish; hooks come in between."""

    name: str

    def begin(self, draft: Draft) -> None:
        """A step begins."""

    def collect(self, draft: Draft) -> None:
        """The step ends: hand the last device scalars to `draft.scalars`."""

    def finish(self, draft: Draft) -> None:
        """The scalars are on the host: fill `draft.values` and `draft.layers`."""

    def close(self) -> None:
        """Remove every hook."""
