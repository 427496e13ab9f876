"""torchao's fp8 training as an alternative to `fp8.py`: dynamic scaling by tensor, fp8 products where there are any.

torchao is no dependency: it is loaded when a run asks for `fp8_torchao`.
"""

import importlib

from torch import nn

from runhealth.storage.errors import MissingExtraError


def convert(model: nn.Module) -> None:
    """Turn the linear layers of the blocks into torchao's fp8 ones, in place; the head stays as it is. Parameters keep
    their names and stay float32.

    Raises:
        MissingExtraError: torchao is not installed.
    """
    try:
        float8 = importlib.import_module("torchao.float8")
    except ImportError as error:
        raise MissingExtraError(
            "precision fp8_torchao needs torchao, which is not installed: pip install --no-deps torchao"
        ) from error
    float8.convert_to_float8_training(
        model,
        config=float8.Float8LinearConfig(emulate=next(model.parameters()).device.type == "cpu"),
        module_filter_fn=lambda _, name: name.startswith("blocks."),
    )
