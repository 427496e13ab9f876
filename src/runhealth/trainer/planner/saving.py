"""Checkpoint size, how often to save, and what share of the time then trains."""

from dataclasses import dataclass

from runhealth.trainer.cadence import Cadence, cadence
from runhealth.trainer.planner.cluster import Cluster
from runhealth.trainer.planner.memory import MASTER, MOMENT, WEIGHT
from runhealth.trainer.planner.shape import ModelShape

RESTART_S = 300.0  # to notice, to start again and to load; an assumption that is printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """`size_bytes` holds weights, master weights and both moments: 14 bytes a parameter. Gradients are not kept."""

    size_bytes: float
    save_s: float
    cadence: Cadence


def saving(shape: ModelShape, cluster: Cluster) -> Saving:
    """Each node writes its share at once. The save stops training; an asynchronous one stops it for less."""
    size = (WEIGHT + MASTER + 2 * MOMENT) * shape.params
    seconds = size / (cluster.storage_bytes_s * cluster.nodes)
    return Saving(
        size_bytes=size,
        save_s=seconds,
        cadence=cadence(save_s=seconds, mtbf_s=cluster.mtbf_s, restart_s=RESTART_S),
    )
