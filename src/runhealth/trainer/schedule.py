"""The learning rate as a pure function of the step."""

import math

from runhealth.trainer.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Linear warm-up, then cosine decay (Loshchilov & Hutter, arXiv:1608.03983) over `horizon` or else `steps`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    horizon = config.horizon or steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, horizon - config.warmup_steps))
    floor = config.lr * config.min_lr_ratio
    return floor + (config.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
