"""What a micro-batch holds: its content hash and the statistics that give a corrupted or shifted shard away."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from runhealth.instrument.tensors import count_nonfinite
from runhealth.storage.records import Scalar

HISTOGRAM_LIMIT = 1 << 22  # token ids from here on are counted by sorting, since a histogram would be mostly empty


def content_hash(tensor: Tensor) -> int:
    """xxh3_64 of the tensor's bytes in row-major order, in the dtype that it has."""
    flat = tensor.detach().contiguous().reshape(-1)
    return xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


def on_host(tensor: Tensor) -> Tensor:
    """A strided host copy, or the tensor itself where it is one. Waits for the device; a batch is small."""
    tensor = tensor.detach()
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).cpu()


def split_batch(x: object, y: object) -> tuple[Tensor | None, Tensor | None, bool]:
    """Inputs, labels, and whether labels are the inputs themselves rather than the next tokens.

    In a mapping with `input_ids` and `labels` the labels are aligned with the inputs: the model shifts them (the
    convention of Hugging Face causal models). Given as two tensors, `y` holds the next token of each position.
    """
    if isinstance(x, Mapping):
        inputs = x.get("input_ids", next((v for v in x.values() if isinstance(v, Tensor)), None))
        labels = x.get("labels") if y is None else y
        return _tensor(inputs), _tensor(labels), y is None
    if isinstance(x, tuple | list):
        tensors = [part for part in x if isinstance(part, Tensor)]
        if y is None and len(tensors) > 1:
            return tensors[0], tensors[1], False
        return (tensors[0] if tensors else None), _tensor(y), False
    return _tensor(x), _tensor(y), False


def squared_lengths(x: object, lengths: Tensor | Sequence[int] | None) -> int | None:
    """Sum of the squares of the sequences' lengths; None where neither they nor a mask of the batch are known.

    A mask that is no matrix of zeros and ones (scores to be added, numbers of packed documents) tells no length."""
    if lengths is not None:
        known = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        return sum(int(length) ** 2 for length in known)
    mask = x.get("attention_mask") if isinstance(x, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_complex() or not mask.numel():
        return None
    mask = on_host(mask)
    if not bool(((mask == 0) | (mask == 1)).all()):
        return None
    return int(mask.sum(1, dtype=torch.int64).square().sum())


def _tensor(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def is_tokens(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool) and tensor.dim() > 0


def floating_inputs(x: object) -> list[Tensor]:
    """The floating-point (and complex) tensors among the inputs of a micro-batch: `x` itself, or what a mapping or a
    sequence holds directly."""
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple | list) else (x,)
    return [part for part in parts if isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex())]


def nonfinite_share(inputs: Sequence[Tensor]) -> float | None:
    """Share of NaN and Inf among the elements of host tensors; None where there are no elements."""
    elements = sum(tensor.numel() for tensor in inputs)
    return int(count_nonfinite(inputs)) / elements if elements else None


def token_statistics(
    tokens: Tensor, labels: Tensor | None, *, vocab_size: int | None, aligned: bool
) -> dict[str, Scalar]:
    """Statistics of integer `tokens` (…, T) and `labels` (…, T); shares are of the positions that can be judged.

    Negative labels are padding and are left out. Nothing is reported that cannot be judged: an empty batch has no
    entropy, and a sequence of one token no repeats.
    """
    values: dict[str, Scalar] = {}
    ids = tokens.numpy()
    if ids.size == 0:
        return values
    counts = _counts(ids)
    shares = counts / ids.size
    values["token_entropy"] = float(-(shares * np.log2(shares)).sum()) + 0.0  # no negative zero
    if vocab_size:
        values["token_unique_share"] = len(counts) / vocab_size
    if ids.shape[-1] < 2:
        return values
    values["token_repeat_share"] = float(np.mean(ids[..., 1:] == ids[..., :-1]))
    if labels is not None and labels.shape == tokens.shape and is_tokens(labels):
        wanted = labels.numpy()
        expected, given = (ids, wanted) if aligned else (ids[..., 1:], wanted[..., :-1])
        judged = given >= 0
        if judged.any():
            values["label_mismatch_share"] = float(np.mean((expected != given)[judged]))
    return values


def _counts(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if ids.min() < 0 or ids.max() >= HISTOGRAM_LIMIT:
        return np.unique(ids, return_counts=True)[1]
    counts = np.bincount(ids.reshape(-1))
    return counts[counts > 0]


def vocabulary_of(model: nn.Module | None) -> int | None:
    """`model.config.vocab_size` if there is one, else the size of the first embedding, else None."""
    if model is None:
        return None
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(size, int) and size > 0:
        return size
    return next((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), None)
