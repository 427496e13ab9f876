"""What the comparison of the simulated ranks with the real trainer says of signals that only one of them has."""

from collections.abc import Mapping
from typing import Any

from bench.faults.real import LAYER_SIGNALS, SIGNALS, presence

from runhealth.storage.records import LayerSample, Record, Scalar, StepRecord
from runhealth.storage.signals import LAYER_SIGNALS as KNOWN_LAYER_SIGNALS
from runhealth.storage.signals import STEP_SIGNALS


def step(number: int, values: Mapping[str, Scalar]) -> Record:
    return StepRecord(attempt=0, step=number, rank=0, ts_ns=0, values=values)


def layer(number: int, values: Mapping[str, Scalar]) -> Record:
    return LayerSample(attempt=0, step=number, rank=0, layer="blocks.0", ts_ns=0, values=values)


def test_each_signal_of_one_side_is_named_and_each_other_cadence() -> None:
    real = [step(0, {"loss": 1.0, "mfu": 0.3}), step(1, {"loss": 1.0}), layer(0, {"amax": 1.0})]
    simulated = [step(0, {"loss": 1.0}), layer(0, {"loss": 2.0, "amax": 1.0})]
    assert presence(real, simulated) == {
        "in_both": ["layer.amax", "loss"],
        "only_real": ["mfu"],
        "only_simulated": ["layer.loss"],  # a layer's signal is none of the step's
        "other_number": {"loss": [2, 1]},
    }


def test_what_is_compared_is_in_the_catalogue() -> None:
    known: Any = STEP_SIGNALS.keys()
    assert set(SIGNALS) <= known
    assert set(LAYER_SIGNALS) <= KNOWN_LAYER_SIGNALS.keys()
