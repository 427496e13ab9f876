"""A small byte-level transformer of the Llama family: RMSNorm, rotary positions, SwiGLU, no biases."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runhealth.trainer.config import ModelConfig
from runhealth.trainer.precision.fp8 import Fp8Linear

VOCABULARY = 256


def _linear(config: ModelConfig, inputs: int, outputs: int) -> nn.Module:
    return Fp8Linear(inputs, outputs) if config.precision == "fp8" else nn.Linear(inputs, outputs, bias=False)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_attn = nn.RMSNorm(config.width)
        self.qkv = _linear(config, config.width, 3 * config.width)
        self.out = _linear(config, config.width, config.width)
        self.norm_ffn = nn.RMSNorm(config.width)
        self.gate_up = _linear(config, config.width, 2 * config.ffn_width)
        self.down = _linear(config, config.ffn_width, config.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, seq, width]; cos and sin [seq, width / heads / 2]."""
        batch, seq, width = x.shape
        q, k, v = self.qkv(self.norm_attn(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        gate, up = self.gate_up(self.norm_ffn(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv:2104.09864) on x [batch, heads, seq, dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Transformer(nn.Module):
    """Bytes in, logits out: int64 [batch, seq] -> f32 [batch, seq, 256]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        half = config.width // config.heads // 2
        angles = torch.outer(torch.arange(seq_len), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def initialise(self, seed: int) -> None:
        """Normal weights of deviation 0.02, residual outputs scaled by 1/sqrt(2 layers) (GPT-2's recipe)."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            deviation = 0.02
            if name.endswith(("out.weight", "down.weight")):
                deviation /= (2 * len(self.blocks)) ** 0.5
            with torch.no_grad():
                parameter.normal_(0.0, deviation, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        seq = tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:seq], self.sin[:seq])
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_byte_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats: logits [batch, seq, 256], labels int64 [batch, seq]."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(config: ModelConfig, seq_len: int, seed: int) -> Transformer:
    model = Transformer(config, seq_len)
    model.initialise(seed)
    return model
