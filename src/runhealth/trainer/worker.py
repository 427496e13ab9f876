"""The life of one rank of an attempt: process group, training, and what it leaves behind when it fails."""

import os
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from runhealth.trainer.checkpoints import UnloadableError
from runhealth.trainer.drill import Drill
from runhealth.trainer.failure import write_error
from runhealth.trainer.launch import LaunchSpec
from runhealth.trainer.loop import Trainer
from runhealth.trainer.replay import Replay
from runhealth.trainer.watch import RankWatch

STALL_FACTOR = 1.5  # no step for so many group time-outs: what hangs here is no collective
STALL_SLACK_S = 2.0


def run_rank(launch: str, rank: int, rendezvous: str | Store, requests_fd: int = -1) -> None:
    """Train one rank of the attempt that the launch file describes; `rendezvous` is a store, or an init method of
    torch.distributed. Through `requests_fd` the agent asks what the rank is doing."""
    spec = LaunchSpec.read(launch)
    os.environ["RUNHEALTH_ATTEMPT"] = str(spec.attempt)
    stall_s = spec.config.timeout_s * STALL_FACTOR + STALL_SLACK_S
    watch = RankWatch(launch, rank, stall_s=stall_s, requests_fd=requests_fd)
    watch.start()
    try:
        _train(spec, rank, rendezvous, watch)
    except UnloadableError as error:
        write_error(launch, rank, error, spec.checkpoint)
        raise
    except BaseException as error:
        write_error(launch, rank, error)
        watch.write(error)
        raise


def _train(spec: LaunchSpec, rank: int, rendezvous: str | Store, watch: RankWatch) -> None:
    dist.init_process_group(
        "gloo",
        init_method=rendezvous if isinstance(rendezvous, str) else None,
        store=None if isinstance(rendezvous, str) else rendezvous,
        rank=rank,
        world_size=spec.config.world,
        timeout=timedelta(seconds=spec.config.timeout_s),
    )
    drills = Drill.ordered()

    def on_step(step: int) -> None:
        watch.beat(step)
        for drill in drills:
            drill.strike(step, rank, spec.attempt)

    kind = Replay if spec.replay is not None else Trainer
    kind(spec, on_step=on_step).run()
    dist.barrier()
    dist.destroy_process_group()
