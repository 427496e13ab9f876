"""`.metadata` is a pickle of torch's: what may be in it, however a Python release writes it."""

import io
import os
import pickle
from collections.abc import Callable

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from runhealth.storage.errors import CheckpointError
from runhealth.trainer.dcp import _MetadataUnpickler


class Call:
    """Pickles as a call of `function(*arguments)`."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._call


def load(thing: object) -> object:
    return _MetadataUnpickler(io.BytesIO(pickle.dumps(thing))).load()


def test_an_enum_member_is_read_in_either_spelling() -> None:
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert load(Call(getattr, _MEM_FORMAT_ENCODING, member.name)) is member
    assert load(Call(_MEM_FORMAT_ENCODING, member.value)) is member


@pytest.mark.parametrize(
    "hostile",
    [
        Call(os.system, "true"),
        Call(eval, "1"),
        Call(getattr, _MEM_FORMAT_ENCODING, "__class__"),
        Call(getattr, Metadata, "__init__"),
        Call(getattr, Call(getattr, _MEM_FORMAT_ENCODING, "__bases__"), "__class__"),
    ],
)
def test_anything_else_is_refused(hostile: object) -> None:
    with pytest.raises(CheckpointError, match="refused"):
        load(hostile)
