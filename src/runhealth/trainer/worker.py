"""One rank, as torchrun starts it: `python -m runhealth.trainer.worker`."""

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from runhealth.trainer.agent import AGENT_PID
from runhealth.trainer.checkpoints import UnloadableError
from runhealth.trainer.failure import write_error
from runhealth.trainer.launch import ENVIRONMENT, LaunchSpec
from runhealth.trainer.loop import Trainer
from runhealth.trainer.processes import die_with_parent


@record
def main() -> None:
    die_with_parent(int(os.environ[AGENT_PID]))
    run_rank(os.environ[ENVIRONMENT], int(os.environ["RANK"]), "env://")


def run_rank(launch: str, rank: int, rendezvous: str) -> None:
    """Train one rank of the attempt that the launch file describes; `rendezvous` is an init method of
    torch.distributed."""
    spec = LaunchSpec.read(launch)
    os.environ["RUNHEALTH_ATTEMPT"] = str(spec.attempt)
    try:
        _train(spec, rank, rendezvous)
    except UnloadableError as error:
        write_error(launch, rank, error, spec.checkpoint)
        raise
    except BaseException as error:
        write_error(launch, rank, error)
        raise


def _train(spec: LaunchSpec, rank: int, rendezvous: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=spec.config.world,
        timeout=timedelta(seconds=spec.config.timeout_s),
    )
    Trainer(spec).run()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
