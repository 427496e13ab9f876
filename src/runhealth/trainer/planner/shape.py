"""A transformer as numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from runhealth.storage.errors import ConfigError

NEAR = 0.05  # a parameter count this close to a preset's takes the preset's shape
MOST_PARAMS = 1e18
ASPECT = 128  # width over layers of the Llama family, for counts that no preset is near to


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer. `ffn_width` is the inner width; `gated` says whether the feed-forward has a gate
    (SwiGLU: three matrices instead of two); `dropout` whether dropout masks are kept for the backward pass; `tied`
    whether the head shares the embedding's matrix. `given_params` overrides the count, where only that is known."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn_width: int
    vocabulary: int
    gated: bool = True
    dropout: bool = False
    tied: bool = False
    given_params: float | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "ffn_width", "vocabulary"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model {self.name}: expected {name} >= 1, met {getattr(self, name)}")
        if self.width % self.heads or self.heads % self.kv_heads:
            raise ConfigError(
                f"model {self.name}: expected heads to divide the width, and kv_heads the heads; met width "
                f"{self.width}, {self.heads} heads, {self.kv_heads} kv_heads"
            )

    @property
    def kv_width(self) -> int:
        return self.width // self.heads * self.kv_heads

    @property
    def layer_params(self) -> float:
        """Parameters of one layer: q, k, v, o, the feed-forward matrices, two norms."""
        attention = 2 * self.width**2 + 2 * self.width * self.kv_width
        feed_forward = (3 if self.gated else 2) * self.width * self.ffn_width
        return (attention + feed_forward + 2 * self.width) * self._scale

    @property
    def embedding_params(self) -> float:
        """Parameters of the embedding; the head has as many again, unless it is tied."""
        return self.vocabulary * self.width * self._scale

    @property
    def params(self) -> float:
        return self._counted if self.given_params is None else self.given_params

    @property
    def matmul_params(self) -> float:
        """Parameters that every token is multiplied with: all but the embedding, which is looked up. (A tied matrix is
        multiplied with as the head.)"""
        return self.params - (0.0 if self.tied else self.embedding_params)

    @property
    def _counted(self) -> float:
        layer = 2 * self.width**2 + 2 * self.width * self.kv_width
        layer += (3 if self.gated else 2) * self.width * self.ffn_width + 2 * self.width
        return float(layer * self.layers + self.vocabulary * self.width * (1 if self.tied else 2) + self.width)

    @property
    def _scale(self) -> float:
        return 1.0 if self.given_params is None else self.given_params / self._counted

    def flops_a_token(self, seq_len: int) -> float:
        """FLOP of forward and backward for one token: 6 x matmul parameters + 12 x layers x width x seq_len.

        Convention of PaLM (arXiv:2204.02311, appendix B): attention counts without the saving of the causal mask,
        recomputation does not count.
        """
        return 6 * self.matmul_params + 12 * self.layers * self.width * seq_len


def _preset(
    name: str, layers: int, width: int, heads: int, kv_heads: int, ffn_width: int, vocabulary: int
) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        ffn_width=ffn_width,
        vocabulary=vocabulary,
    )


# Shapes from the papers: Llama 2 (arXiv:2307.09288) and Llama 3 (arXiv:2407.21783), table 3.
PRESETS: Mapping[str, ModelShape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            _preset("llama-2-7b", 32, 4096, 32, 32, 11008, 32_000),
            _preset("llama-2-13b", 40, 5120, 40, 40, 13824, 32_000),
            _preset("llama-2-70b", 80, 8192, 64, 8, 28672, 32_000),
            _preset("llama-3-8b", 32, 4096, 32, 8, 14336, 128_256),
            _preset("llama-3-70b", 80, 8192, 64, 8, 28672, 128_256),
            _preset("llama-3-405b", 126, 16384, 128, 8, 53248, 128_256),
        )
    }
)


def preset(name: str) -> ModelShape:
    """Raises ConfigError that lists the presets."""
    found = PRESETS.get(name)
    if found is None:
        raise ConfigError(f"--model: expected one of {', '.join(PRESETS)}, met {name!r}")
    return found


def from_params(params: float) -> ModelShape:
    """The shape of the preset of about this size, or one with the proportions of the Llama family; the count stays as
    given.

    Raises:
        ConfigError: fewer than a million parameters, more than `MOST_PARAMS`, or not a number.
    """
    if not 1e6 <= params <= MOST_PARAMS:
        raise ConfigError(f"--params: expected 1e6 to {MOST_PARAMS:.0e} parameters, such as 7e9, met {params:g}")
    nearest = min(PRESETS.values(), key=lambda shape: abs(math.log(shape.params / params)))
    if abs(nearest.params / params - 1) <= NEAR:
        return replace(nearest, given_params=params)
    width = max(128, round((params * ASPECT / 12) ** (1 / 3) / 128) * 128)
    heads = max(1, width // 128)
    ffn_width = round(8 * width / 3 / 128) * 128  # three gated matrices of 8/3 the width weigh as much as two of 4 x
    layers = max(1, round(params / (4 * width**2 + 3 * width * ffn_width)))
    if layers >= 8:
        layers = round(layers / 4) * 4  # so that 2 or 4 stages get equal shares
    return ModelShape(
        name=f"{params:.3g} parameters",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        ffn_width=ffn_width,
        vocabulary=32_000,
        given_params=params,
    )
