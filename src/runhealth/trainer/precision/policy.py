"""Which tensors are kept in which number format.

Low precision is for the matrix products and the attention of the blocks. All else stays in float32 whatever the
precision, as in Micikevicius et al., "Mixed Precision Training" (arXiv:1710.03740), and in fp8 training
(arXiv:2209.05433, section 3): the weights that the optimizer updates, their gradients and the reduction of these over
the ranks, the optimizer's moments, the embedding, the norms, the residual stream, the output head and the loss.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

FLOAT32_ALWAYS = (
    "master weights",
    "gradients",
    "gradient reduction",
    "optimizer moments",
    "embedding",
    "norms",
    "residual stream",
    "output head",
    "loss",
)

# what the operands of a block's matrix products are rounded to; the products themselves accumulate in float32
MATMUL: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp8": torch.float8_e4m3fn,
        "fp8_torchao": torch.float8_e4m3fn,
    }
)


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The dtype that a block's forward pass is autocast to; None where its modules do the casting."""
    return MATMUL[precision] if precision in ("bf16", "fp16") else None


def needs_loss_scale(precision: str) -> bool:
    """float16 has too little range for gradients; bfloat16 has that of float32, fp8 scales each tensor."""
    return precision == "fp16"
