"""Who this process is among the ranks, and which launch it belongs to."""

import os
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from runhealth.instrument.guard import say
from runhealth.storage.errors import ConfigError

_forks = 0
_monitors_of_run: Counter[tuple[str, str]] = Counter()


def forks() -> int:
    """How many forks lie between the first process and this one: a DataLoader worker is told from its parent by it.
    (A system call for the process id costs more than all else that the monitor asks at this point.)"""
    return _forks


def _forked() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    rank: int
    world_size: int


def group_is_ready() -> bool:
    return dist.is_available() and dist.is_initialized()


def detect(environ: Mapping[str, str] | None = None) -> World:
    """Rank and world size from an initialised process group, else from RANK and WORLD_SIZE, else 0 of 1.

    Raises ConfigError if the variables are not numbers or do not fit each other.
    """
    if group_is_ready():
        return World(rank=dist.get_rank(), world_size=dist.get_world_size())
    env = os.environ if environ is None else environ
    text = {name: env.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))}
    try:
        world = World(rank=int(text["RANK"]), world_size=int(text["WORLD_SIZE"]))
    except ValueError:
        raise ConfigError(f"RANK and WORLD_SIZE must be whole numbers, met {text}") from None
    if not 0 <= world.rank < world.world_size:
        raise ConfigError(f"RANK must be at least 0 and below WORLD_SIZE, met {text}")
    return world


def preset_attempt(environ: Mapping[str, str] | None = None) -> int | None:
    """The attempt that a supervisor chose (RUNHEALTH_ATTEMPT), or None."""
    env = os.environ if environ is None else environ
    text = env.get("RUNHEALTH_ATTEMPT", "")
    if not text:
        return None
    if not text.isdecimal():
        raise ConfigError(f"RUNHEALTH_ATTEMPT must be a whole number of at least 0, met {text!r}")
    return int(text)


def launch_key(run: str, store: str, environ: Mapping[str, str] | None = None) -> str:
    """A name that all ranks of one launch share and no other launch has; ranks with the same key join one attempt.

    Without a process group it comes from the launcher's variables, which every rank sees alike, and for a lone process
    from the process itself. In a group, rank 0's key is for all: see `share`. A second monitor of the same run in the
    same process is a launch of its own.
    """
    env = os.environ if environ is None else environ
    nth = _monitors_of_run[run, store]
    _monitors_of_run[run, store] += 1
    launcher = _launcher_key(env)
    if in_group():
        # The process is part of the key: torchrun's restart count does not grow when a member leaves or joins.
        return f"{launcher}:{_process_key()}:{nth}"
    if not launcher and detect(env).world_size > 1:
        say("build the monitor after init_process_group: without one, each rank is an attempt of its own")
    return f"{launcher or _process_key()}:{nth}"


def in_group() -> bool:
    """Several ranks in an initialised process group."""
    return group_is_ready() and dist.get_world_size() > 1


def share(key: str, environ: Mapping[str, str] | None = None) -> str:
    """Rank 0's `key`, on every rank: a collective."""
    env = os.environ if environ is None else environ
    box = [key]
    dist.broadcast_object_list(box, src=0, device=_own_cuda_device(env) if dist.get_backend() == "nccl" else None)
    return box[0]


def _own_cuda_device(env: Mapping[str, str]) -> torch.device:
    """NCCL hangs or fails if two ranks send from one device, which they do where the loop never calls set_device."""
    local_rank = env.get("LOCAL_RANK", "")
    if torch.cuda.current_device() == 0 and local_rank.isdecimal() and int(local_rank) < torch.cuda.device_count():
        return torch.device("cuda", int(local_rank))
    return torch.device("cuda", torch.cuda.current_device())


def _launcher_key(env: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" in env:
        names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    elif "SLURM_JOB_ID" in env:
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    else:
        return ""
    return ":".join(env.get(name, "0") for name in names)


def _process_key() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{_start_time()}"


def _start_time() -> str:
    """When this process began, in clock ticks since boot: a process id alone comes again."""
    try:
        # proc(5): field 22; the second field, the name in brackets, may itself hold blanks and brackets
        return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "0"
