"""Names of layers: which parameters are reported together."""

from collections.abc import Mapping

from torch import nn

_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def clean_name(name: str) -> str:
    """A module or parameter name without the parts that DDP, FSDP, compile and activation checkpointing add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def layer_name(parameter: str) -> str:
    """The layer that a parameter counts to: `blocks.3.attn.qkv.weight` -> `blocks.3.attn`.

    That is its module, cut after the part that follows a block's number, or after two parts where nothing is numbered.
    A parameter of the root module is its own layer.
    """
    parts = clean_name(parameter).split(".")
    owner = parts[:-1]
    if not owner:
        return parts[-1]
    numbered = next((at for at, part in enumerate(owner) if part.isdecimal()), 0)
    return ".".join(owner[: numbered + 2])


def layers_of(model: nn.Module | None) -> Mapping[int, str]:
    """Layer name by `id` of the parameter; shared parameters count to the layer that names them first."""
    if model is None:
        return {}
    return {id(parameter): layer_name(name) for name, parameter in model.named_parameters()}
