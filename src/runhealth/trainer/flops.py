"""Parameters and FLOP of the model by formula, and what share of the machine a step uses (MFU). Importable without
torch."""

from runhealth.trainer.config import ModelConfig, TrainConfig
from runhealth.trainer.layout import layers_of, stages_of

VOCABULARY = 256
CONVENTION = "PaLM: 6 x matmul parameters + 12 x layers x width x sequence a token; no causal saving, no recomputation"


def block_matrices(model: ModelConfig) -> int:
    """Elements of the matrices of one block that a token meets: of its experts, one."""
    return 4 * model.width**2 + 3 * model.width * model.ffn_width + model.width * model.experts


def idle_elements(model: ModelConfig) -> int:
    """Elements of one block that a token does not meet: its other experts, and the router's bias."""
    return max(0, model.experts - 1) * 3 * model.width * model.ffn_width + model.experts


def stage_parameters(config: TrainConfig, stage: int) -> tuple[int, int]:
    """Elements in matrices (embedding, head and all experts included), and in norms, of one pipeline stage."""
    model = config.model
    blocks = len(layers_of(config, stage))
    first, last = stage == 0, stage == config.parallel.stages - 1
    matrices = blocks * (block_matrices(model) + idle_elements(model)) + (first + last) * VOCABULARY * model.width
    return matrices, (2 * blocks + last) * model.width


def rank_parameters(config: TrainConfig, pp: int) -> int:
    """Elements that a rank of pipeline place `pp` works with: its stages; tensor parallelism divides their matrices."""
    sizes = [stage_parameters(config, stage) for stage in stages_of(config, pp)]
    return sum(matrices // config.parallel.tp + norms for matrices, norms in sizes)


def model_flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Forward and backward, by PaLM's convention (Chowdhery et al., arXiv:2204.02311, appendix B): every matrix element
    takes part in 6 FLOP, the embedding in none since it is looked up; attention takes 12 x layers x width x seq_len,
    without the saving of a causal mask; what is recomputed does not count."""
    matrices = model.layers * block_matrices(model) + VOCABULARY * model.width
    return 6 * matrices + 12 * model.layers * model.width * seq_len


def step_flops(config: TrainConfig) -> int:
    """Of all ranks together, for one optimizer step."""
    tokens = config.dp * config.data.batch_size * config.data.seq_len
    return tokens * model_flops_per_token(config.model, config.data.seq_len)


def mfu(config: TrainConfig, step_s: float, peak_flops_s: float) -> float:
    """Model FLOP/s over the peak FLOP/s of the hardware that all ranks share."""
    return step_flops(config) / (step_s * peak_flops_s)
