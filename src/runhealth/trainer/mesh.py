"""The device mesh: one process group a dimension of the layout, each with the time-out of the run."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from runhealth.trainer.config import TrainConfig
from runhealth.trainer.layout import dimensions


def names(config: TrainConfig) -> tuple[str, ...]:
    """Dimensions that get groups, outermost first: those of more than one rank, and `shard` where FSDP needs a mesh."""
    needed = ("shard",) if config.parallel.shards_state else ()
    return tuple(name for name, size in dimensions(config).items() if size > 1 or name in needed)


def build(config: TrainConfig) -> DeviceMesh | None:
    """The mesh of the layout; collective. None where the only dimension is data parallelism of replicas: that uses the
    group of the world, which has the time-out already.

    The time-out of `init_process_group` does not reach groups of fewer ranks: they would wait for 30 minutes.
    """
    dims = names(config)
    if not dims or (dims == ("shard",) and not config.parallel.shards_state):
        return None
    sizes = dimensions(config)
    options = group_options(config.timeout_s)
    mesh = init_device_mesh(
        "cpu",
        tuple(sizes[name] for name in dims),
        mesh_dim_names=dims,
        backend_override=dict.fromkeys(dims, ("gloo", options)),
    )
    for joint in (("replica", "shard"), ("shard", "tp"), ("replica", "shard", "tp")):
        if config.parallel.shards_state and all(name in dims for name in joint):
            # the norm of a parameter that is sharded over several dimensions is summed over all of them at once
            mesh[joint]._flatten("_".join(joint), backend_override=("gloo", options))
    return mesh


def group_options(timeout_s: float) -> Any:
    """Options of a gloo group whose collectives, sends and receives end after `timeout_s`."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    return options
