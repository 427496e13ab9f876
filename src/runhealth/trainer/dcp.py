"""What a checkpoint holds, and loading it, in the layout that saved it or in another one.

Only plain tensors and DTensors enter a checkpoint, under the names that they have in the whole model; so
torch.distributed.checkpoint cuts them anew when another layout loads them. (torch's own `get_state_dict` would add the
optimizer's param groups, which are numbers and therefore pickled; they are rebuilt from the config instead.) Tensors
are read back with `weights_only`. `.metadata` is a pickle; it is read by an unpickler that knows the checkpoint's own
data classes and refuses everything else. Together with the manifest's hashes (`checkpoints.verify`, always first) a
damaged checkpoint is refused. Not covered: someone who replaces files, `.metadata` and manifest alike can choose the
values of the weights (nothing is signed).
"""

import io
import pickle
from collections.abc import Mapping
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFileSystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded

from runhealth.storage.errors import CheckpointError
from runhealth.trainer import checkpoints
from runhealth.trainer.checkpoints import UnloadableError
from runhealth.trainer.folders import is_url, open_folder
from runhealth.trainer.parallel.zero1 import local

_LOCAL = "local.r"

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
    """Reads `.metadata` with an unpickler that creates the checkpoint's own data classes and nothing else. `folder` is
    a path or an fsspec URL."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._folder = open_folder(folder)
        if is_url(folder):
            self.fs = FsspecFileSystem()  # type: ignore[assignment]
            self.path = self.fs.init_path(folder)

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        where = self._folder.url
        metadata = _MetadataUnpickler(io.BytesIO(self._folder.read(".metadata"))).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{where}/.metadata: expected checkpoint metadata, met {type(metadata).__name__}")
        for info in (metadata.storage_data or {}).values():
            if Path(info.relative_path).name != info.relative_path:
                raise CheckpointError(f"{where}/.metadata: expected plain file names, met {info.relative_path!r}")
        return metadata


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> dict[str, Tensor]:
    """Everything that the next step depends on, as a flat dictionary of this rank's tensors.

    What is replicated, torch.distributed.checkpoint divides among the ranks; of a DTensor each rank has its shard; the
    moments of ZeRO-1 are on one rank each. Buffers (fp8 amax histories, the loss scale) may differ between ranks and
    are kept a rank. There is no random state: the data is a pure function of the step and the model has no dropout.
    """
    optimizer = local(optimizer)
    _materialise(optimizer)
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    state: dict[str, Tensor] = {"trainer.step": torch.tensor(step)}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items() if id(parameter) in mine else ():
            state[f"optim.{name}.{key}"] = value
    for name, buffer in _persistent_buffers(model):
        state[f"{_local_prefix(rank)}{name}"] = buffer
    return state


def load(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, *, rank: int) -> int:
    """Verify, then load into model and optimizer in place; returns the step to go on with. Collective: the ranks share
    the hashing and refuse together. Another layout or number of ranks than the one that saved it is welcome.

    Raises:
        UnloadableError: the checkpoint is damaged, incomplete, or of another model.
    """
    found, error = _verify_together(folder, rank)
    if found is None:
        raise UnloadableError(error)
    try:
        reader = SafeReader(folder)
        saved = reader.read_metadata().state_dict_metadata
        wanted = _wanted(state_of(model, optimizer, 0, rank), saved, rank, found.world)
        for name, value in wanted.items():
            _check_entry(folder, name, value, saved.get(name))
        load_sharded(dict(wanted), storage_reader=reader)
    except CheckpointError as problem:
        raise UnloadableError(str(problem)) from problem
    except (CheckpointException, Exception) as problem:  # what a damaged file raises depends on where it is damaged
        raise UnloadableError(f"{folder}: {first_line(problem)}") from problem
    step = int(wanted["trainer.step"])
    if step != found.step:
        raise UnloadableError(f"{folder}: expected step {found.step} as the manifest says, met {step}")
    return step


def _verify_together(folder: str, rank: int) -> tuple[checkpoints.CheckpointManifest | None, str]:
    """Each rank hashes its share of the files; all of them get the first complaint of any."""
    world = dist.get_world_size()
    manifest, error = None, ""
    try:
        manifest = checkpoints.verify(folder, rank, world)
    except CheckpointError as problem:
        error = str(problem)
    said: list[str] = [""] * world
    dist.all_gather_object(said, error)
    error = next(filter(None, said), "")
    return (None, error) if error else (manifest, "")


def _wanted(state: Mapping[str, Tensor], saved: Mapping[str, Any], rank: int, world: int) -> dict[str, Tensor]:
    """What to load, by the names under which it was saved. A rank's buffers come from the rank of the same number, or,
    where the checkpoint is of fewer ranks or another layout, from one that has them; if none has, they stay as they
    are: amax histories fill anew, the loss scale begins anew."""
    prefix, wanted = _local_prefix(rank), {}
    for name, value in state.items():
        if not name.startswith(prefix):
            wanted[name] = value
            continue
        buffer = name.removeprefix(prefix)
        sources = [rank, rank % world, *range(world)]
        for source in (f"{_local_prefix(number)}{buffer}" for number in sources):
            entry = saved.get(source)
            if isinstance(entry, TensorStorageMetadata) and entry.size == value.size():
                wanted[source] = value
                break
    return wanted


def _check_entry(folder: str, name: str, value: Tensor, entry: object) -> None:
    """A dtype that differs loads silently, and what a missing name raises does not say what was expected."""
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointError(f"{folder}: expected a tensor {name}, met none; a checkpoint of another model")
    if entry.size != value.size():
        raise CheckpointError(f"{folder}: expected {name} of {list(value.size())}, met {list(entry.size)}")
    if entry.properties.dtype != value.dtype:
        raise CheckpointError(f"{folder}: expected {name} as {value.dtype}, met {entry.properties.dtype}")


def _local_prefix(rank: int) -> str:
    return f"{_LOCAL}{rank:05d}."


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


def first_line(error: BaseException) -> str:
    """The gist of an error; of a CheckpointException the first rank's."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, failure = next(iter(error.failures.items()))
        return f"rank {rank}: {failure[0]}".splitlines()[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]
