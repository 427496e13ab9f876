"""Saving and loading with torch.distributed.checkpoint: each rank writes its own file, nothing but tensors is kept.

Only plain tensors enter a checkpoint, and they are read back with `weights_only`. `.metadata` is a pickle; it is read
by an unpickler that knows the checkpoint's own data classes and refuses everything else. Together with the manifest's
hashes (`checkpoints.verify`, always first) a damaged checkpoint is refused. Not covered: someone who replaces files,
`.metadata` and manifest alike can choose the values of the weights (nothing is signed).
"""

import io
import pickle
import shutil
import time
import warnings
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from runhealth.storage.errors import CheckpointError
from runhealth.trainer import checkpoints
from runhealth.trainer.checkpoints import UnloadableError

_ALLOWED = frozenset(
    {
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOutcome:
    """What became of one save on this rank. `error` is empty if it went well; rank 0 alone has a manifest."""

    path: str  # relative to the run's folder
    seconds: float
    size_bytes: int = 0
    verified: bool = False
    error: str = ""


def _enum_member(owner: object, name: str) -> Enum:
    if not (isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__):
        raise CheckpointError(f".metadata: refers to attribute {name!r} of {owner!r}, which is no enum member; refused")
    return owner.__members__[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return PurePosixPath  # where the checkpoint was saved; nothing is opened by it
        if (module, name) == ("builtins", "getattr"):
            return _enum_member  # some Python releases pickle the member of an enum as getattr(class, name)
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _ALLOWED and not dtype:
            raise CheckpointError(f".metadata: refers to {module}.{name}, which no checkpoint needs; refused")
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """Reads `.metadata` with an unpickler that creates the checkpoint's own data classes and nothing else."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        blob = (Path(self.path) / ".metadata").read_bytes()
        metadata = _MetadataUnpickler(io.BytesIO(blob)).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{self.path}/.metadata: expected checkpoint metadata, met {type(metadata).__name__}")
        for info in (metadata.storage_data or {}).values():
            if Path(info.relative_path).name != info.relative_path:
                raise CheckpointError(f"{self.path}/.metadata: expected plain file names, met {info.relative_path!r}")
        return metadata


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> dict[str, Tensor]:
    """Everything that the next step depends on, as a flat dictionary of tensors.

    Parameters and optimizer moments are replicated, so torch.distributed.checkpoint divides them among the ranks.
    Buffers (fp8 amax histories) differ between ranks and are kept a rank. There is no random state: the data is a pure
    function of the step and the model has no dropout.
    """
    _materialise(optimizer)
    state: dict[str, Tensor] = {"trainer.step": torch.tensor(step)}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            state[f"optim.{name}.{key}"] = value
    for name, buffer in _persistent_buffers(model):
        state[f"local.r{rank:05d}.{name}"] = buffer
    return state


def save(run_path: str, state: dict[str, Tensor], *, step: int, attempt: int, rank: int, world: int) -> SaveOutcome:
    """Write one checkpoint; collective. A failure is reported, never raised: training goes on without this one."""
    started = time.perf_counter()
    relative = checkpoints.relative_path(step, attempt)
    folder = Path(run_path) / relative
    error = ""
    if rank == 0:
        try:
            folder.mkdir(parents=True)
        except OSError as problem:
            error = f"{folder}: cannot be created: {problem.strerror}"
    if _any_true(bool(error)):
        return SaveOutcome(path=relative, seconds=time.perf_counter() - started, error=error or "failed on rank 0")
    try:
        save_sharded(
            state,
            storage_writer=FileSystemWriter(str(folder), single_file_per_rank=True),
        )
    except (CheckpointException, OSError, RuntimeError) as problem:  # CheckpointException is a BaseException
        error = f"{folder}: {_first_line(problem)}"
    finite = not _any_true(not all(bool(torch.isfinite(value).all()) for value in state.values()))
    if _any_true(bool(error)):
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # half a checkpoint is none, and a full disk needs its room
        return SaveOutcome(path=relative, seconds=time.perf_counter() - started, error=error or "failed on a peer")
    size, verified = 0, False
    if rank == 0:
        try:
            manifest = checkpoints.commit(str(folder), step=step, attempt=attempt, world=world, finite=finite)
            size = manifest.size_bytes
            checkpoints.verify(str(folder))
            _compare(str(folder), state)
            verified = True
        except (CheckpointError, OSError) as problem:
            error = str(problem)
            if not (folder / checkpoints.MANIFEST).exists():
                shutil.rmtree(folder, ignore_errors=True)
    return SaveOutcome(
        path=relative, seconds=time.perf_counter() - started, size_bytes=size, verified=verified, error=error
    )


def load(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, *, rank: int) -> int:
    """Verify, then load into model and optimizer in place; returns the step to go on with. Collective.

    Raises:
        UnloadableError: the checkpoint is damaged, incomplete, or of another model.
    """
    try:
        manifest = checkpoints.verify(folder)
        state = state_of(model, optimizer, 0, rank % manifest.world)
        load_sharded(state, storage_reader=SafeReader(folder))
    except CheckpointError as error:
        raise UnloadableError(str(error)) from error
    except (CheckpointException, Exception) as error:  # what a damaged file raises depends on where it is damaged
        raise UnloadableError(f"{folder}: {_first_line(error)}") from error
    step = int(state["trainer.step"])
    if step != manifest.step:
        raise UnloadableError(f"{folder}: expected step {manifest.step} as the manifest says, met {step}")
    return step


def _compare(folder: str, state: dict[str, Tensor]) -> None:
    """Read the whole checkpoint back: this rank's tensors must be bit-equal, everybody's finite."""
    reader = SafeReader(folder)
    copy = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*single process.*")
            load_sharded(copy, storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: cannot be read back: {_first_line(error)}") from error
    for name, value in copy.items():
        if not bool(torch.isfinite(value).all()):
            raise CheckpointError(f"{folder}: {name} holds NaN or Inf")
        if name in state and not torch.equal(value, state[name]):
            raise CheckpointError(f"{folder}: {name} read back differs from what was saved")


def _materialise(optimizer: torch.optim.Optimizer) -> None:
    """AdamW creates its moments at the first step; a checkpoint needs them before."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    persistent = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in persistent]


def _any_true(flag: bool) -> bool:
    """Whether the flag is set on any rank; every rank gets the same answer."""
    value = torch.tensor(int(flag))
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value)


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank, failure = next(iter(error.failures.items()))
        return f"rank {rank}: {failure[0]}".splitlines()[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]
