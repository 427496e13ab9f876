"""What a training loop calls: `Monitor` measures, hashes and times each step and writes one rank log a rank."""

from runhealth.instrument.clock import Clock
from runhealth.instrument.monitor import Monitor
from runhealth.instrument.step import Step

__all__ = ["Clock", "Monitor", "Step"]
