"""torchrun, tied to the life of its supervisor: `python -m runhealth.trainer.agent <torchrun arguments>`."""

import os

from runhealth.trainer.processes import die_with_parent

SUPERVISOR_PID = "RUNHEALTH_SUPERVISOR_PID"
AGENT_PID = "RUNHEALTH_AGENT_PID"


def main() -> None:
    die_with_parent(int(os.environ[SUPERVISOR_PID]))
    os.environ[AGENT_PID] = str(os.getpid())
    from torch.distributed.run import main as torchrun

    torchrun()


if __name__ == "__main__":
    main()
