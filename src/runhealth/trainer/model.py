"""A small byte-level transformer of the Llama family: RMSNorm, rotary positions, SwiGLU, no biases.

The names of its parameters are the same in every layout: a pipeline stage is the whole model with parts left out.
"""

import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runhealth.trainer.config import ModelConfig
from runhealth.trainer.experts import Experts
from runhealth.trainer.precision.fp8 import Fp8Linear
from runhealth.trainer.precision.policy import autocast_dtype

VOCABULARY = 256
Recomputer = Callable[[Callable[..., Tensor], Tensor, Tensor, Tensor], Tensor]
AttentionWatch = Callable[[Tensor, Tensor], None]


def _linear(config: ModelConfig, inputs: int, outputs: int) -> nn.Module:
    return Fp8Linear(inputs, outputs) if config.precision == "fp8" else nn.Linear(inputs, outputs, bias=False)


class Block(nn.Module):
    """`recomputer`, where it is set, calls the forward pass in the place of the block, keeping fewer activations.
    `attention_watch` is called with the queries and keys, each [batch, heads, seq, dim], in each forward pass."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.fused = config.fused
        self.autocast_dtype = autocast_dtype(config.precision)
        self.recomputer: Recomputer | None = None
        self.attention_watch: AttentionWatch | None = None
        self.norm_attn = nn.RMSNorm(config.width)
        if config.fused:
            self.qkv = _linear(config, config.width, 3 * config.width)
        else:
            self.q, self.k, self.v = (_linear(config, config.width, config.width) for _ in range(3))
        self.out = _linear(config, config.width, config.width)
        self.norm_ffn = nn.RMSNorm(config.width)
        self.mixture = Experts(config.width, config.ffn_width, config.experts) if config.experts else None
        if self.mixture is not None:
            return
        if config.fused:
            self.gate_up = _linear(config, config.width, 2 * config.ffn_width)
        else:
            self.gate, self.up = (_linear(config, config.width, config.ffn_width) for _ in range(2))
        self.down = _linear(config, config.ffn_width, config.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, seq, width]; cos and sin [at least seq, width / heads / 2]. With sequence parallelism x holds this
        rank's part of the sequence, between the matrices all of it and this rank's heads."""
        if self.recomputer is not None and torch.is_grad_enabled():
            return self.recomputer(self._forward, x, cos, sin)
        return self._forward(x, cos, sin)

    def _forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        with _autocast(x, self.autocast_dtype):
            x = x + self.out(self._attention(self.norm_attn(x), cos, sin))
            out: Tensor = x + self._feed_forward(self.norm_ffn(x))
            return out

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.fused:
            qkv = self.qkv(x)
            q, k, v = qkv.view(*qkv.shape[:2], 3, -1, self.head_width).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (
                part.view(*part.shape[:2], -1, self.head_width).transpose(1, 2)
                for part in (self.q(x), self.k(x), self.v(x))
            )
        batch, _, seq, _ = q.shape
        cos, sin = cos[:seq], sin[:seq]
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        if self.attention_watch is not None:
            self.attention_watch(q, k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, seq, -1)

    def _feed_forward(self, x: Tensor) -> Tensor:
        if self.mixture is not None:
            mixed: Tensor = self.mixture(x)
            return mixed
        gate, up = self._gate_up(x)
        out: Tensor = self.down(F.silu(gate) * up)
        return out

    def _gate_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.fused:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            return gate, up
        return self.gate(x), self.up(x)


def _autocast(x: Tensor, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if dtype is None else torch.autocast(x.device.type, dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv:2104.09864) on x [batch, heads, seq, dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Transformer(nn.Module):
    """Bytes in, logits out: int64 [batch, seq] -> f32 [batch, seq, 256]. Without the embedding (`keep`) it takes the
    residual stream [batch, seq, width] instead, without the head it returns it."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.layers = config.layers
        self.embed: nn.Embedding | None = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleDict({str(number): Block(config) for number in range(config.layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(config.width)
        self.head: nn.Linear | None = nn.Linear(config.width, VOCABULARY, bias=False)
        half = config.width // config.heads // 2
        angles = torch.outer(torch.arange(seq_len), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def initialise(self, seed: int) -> None:
        """Normal weights of deviation 0.02, residual outputs scaled by 1/sqrt(2 layers) (GPT-2's recipe)."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                if name.endswith("router.bias"):
                    nn.init.zeros_(parameter)
                continue
            deviation = 0.02
            if name.endswith(("out.weight", "down.weight", "mixture.down")):
                deviation /= (2 * self.layers) ** 0.5
            with torch.no_grad():
                parameter.normal_(0.0, deviation, generator=generator)

    def keep(self, blocks: range, *, first: bool, last: bool) -> None:
        """Become one stage of a pipeline: these blocks, the embedding if `first`, the final norm and head if `last`."""
        for number in range(self.layers):
            if number not in blocks:
                del self.blocks[str(number)]
        if not first:
            self.embed = None
        if not last:
            self.norm = self.head = None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x, self.cos, self.sin)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def next_byte_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats: logits [batch, seq, 256], labels int64 [batch, seq]."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(config: ModelConfig, seq_len: int, seed: int) -> Transformer:
    """The whole model, initialised alike on every rank.

    Raises:
        MissingExtraError: precision fp8_torchao without torchao.
    """
    model = Transformer(config, seq_len)
    model.initialise(seed)
    if config.precision == "fp8_torchao":
        from runhealth.trainer.precision.torchao import convert

        convert(model)
    return model
