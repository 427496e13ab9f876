"""GPUs, their memory, and the links between them."""

import math
import re
from dataclasses import dataclass

from runhealth.storage.errors import ConfigError

_UNITS = {
    "": 1.0,
    "b": 1.0,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "kib": 2.0**10,
    "mib": 2.0**20,
    "gib": 2.0**30,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`peak_flops` is the dense bf16 peak of one GPU. `intra_bytes_s` and `inter_bytes_s` are what one GPU can send in
    one direction to another in its node, and to another node. The defaults are those of an H100 SXM node (data sheet):
    989 TFLOP/s, NVLink 450 GB/s a direction, one 400 Gb/s port a GPU.

    `gpu_mtbf_hours`: Llama 3 reports 419 unplanned interruptions in 54 days on 16,384 GPUs (arXiv:2407.21783, section
    3.3.4), one in 50,700 GPU hours. `storage_bytes_s` is what one node writes to checkpoint storage.
    """

    nodes: int = 1
    gpus_per_node: int = 8
    gpu_memory_bytes: float = 80e9
    peak_flops: float = 989e12
    intra_bytes_s: float = 450e9
    inter_bytes_s: float = 50e9
    gpu_mtbf_hours: float = 54 * 24 * 16_384 / 419
    storage_bytes_s: float = 2e9

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"cluster: expected {name} > 0 and finite, met {getattr(self, name)}")

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the job: any GPU stops it."""
        return self.gpu_mtbf_hours * 3600 / self.gpus

    def link(self, span: int) -> str:
        """`nvlink` where a group of `span` neighbouring GPUs lies in one node, else `network`."""
        return "nvlink" if span <= self.gpus_per_node else "network"

    def bytes_s(self, link: str) -> float:
        return self.intra_bytes_s if link == "nvlink" else self.inter_bytes_s


def parse_bytes(text: str) -> float:
    """`80GB` = 80e9, `80GiB` = 80 x 2^30, a bare number is bytes.

    Raises:
        ConfigError: anything else.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        if match is None:
            raise ValueError
        size = float(match[1]) * _UNITS[match[2]]
    except (ValueError, KeyError):
        raise ConfigError(f"expected a size such as 80GB or 80GiB, met {text!r}") from None
    if not 0 < size < math.inf:
        raise ConfigError(f"expected a size above 0 and finite, met {text!r}")
    return size
