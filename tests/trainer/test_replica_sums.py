"""A DDP run of the trainer records checksums of its replicas, and a replica that leaves the other is found."""

import dataclasses
from collections.abc import Callable

from runhealth.diagnose.service import diagnose
from runhealth.storage.reader import RunReader
from runhealth.storage.records import LayerSample, StepRecord
from runhealth.storage.store import RunInfo, Store
from runhealth.trainer.config import FaultSpec, TrainConfig

AT = 8


def test_a_replica_that_does_not_step(store: Store, train: Callable[..., RunInfo], tiny: TrainConfig) -> None:
    fault = FaultSpec(name="replica_desync", params={"step": AT, "rank": 1, "mode": "frozen", "severity": 1.0})
    train("frozen", dataclasses.replace(tiny, steps=14, layers_every=2, faults=(fault,)))
    reader = RunReader.open("frozen", store.root)
    sums: dict[int, set[float]] = {}
    layers: dict[int, set[int]] = {}
    for record in reader.records():
        if "param_checksum" not in getattr(record, "values", {}):
            continue
        if isinstance(record, StepRecord):
            sums.setdefault(record.step, set()).add(record.values["param_checksum"])
        elif isinstance(record, LayerSample):
            layers.setdefault(record.step, set()).add(record.rank)
    assert {step: len(versions) for step, versions in sums.items()} == {s: 1 + (s >= AT) for s in range(14)}
    assert layers == {step: {0, 1} for step in range(0, 14, 2)}
    (found,) = (f for f in diagnose(reader).findings if f.kind == "replica_desync")
    assert (found.verdict, found.onset_step) == ("replica_desync", AT)
    # of two ranks neither is named: undoing an update leaves last bits that differ, so rank 1 does not stand still
    assert found.ranks is None
