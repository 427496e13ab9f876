"""A mixture of experts in the place of a block's feed-forward part: a router sends every token to one of them, as in
the Switch Transformer (Fedus et al., arXiv:2101.03961).

All experts are on every rank: there is no expert parallelism. An expert that gets no token has a gradient of zeros, so
all ranks reduce the same tensors whatever their routers choose.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BALANCE = 0.01  # weight of the balance loss, as in the paper


class Experts(nn.Module):
    """y = g_e (x) f_e(x) for the expert e of the highest gate g_e, f_e a SwiGLU; x [..., width].

    A forward pass that has a backward pass adds to what `take_balance` and `take_load` give.
    """

    def __init__(self, width: int, ffn_width: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(width, experts)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * ffn_width, width))
        self.down = nn.Parameter(torch.empty(experts, width, ffn_width))
        self._balance: list[Tensor] = []
        self._load = torch.zeros(experts)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):  # a gate rounded to 8 bits would choose at random
            gates = F.softmax(self.router(tokens.float()), dim=-1)
        best, chosen = gates.max(dim=-1)
        out = torch.zeros_like(tokens)
        for expert in range(self.experts):
            mine = (chosen == expert).nonzero().squeeze(-1)
            gate, up = F.linear(tokens[mine], self.gate_up[expert]).chunk(2, dim=-1)
            done = F.linear(F.silu(gate) * up, self.down[expert])
            out = out.index_add(0, mine, done.to(out.dtype) * best[mine, None].to(out.dtype))
        if torch.is_grad_enabled():
            share = F.one_hot(chosen, self.experts).to(gates.dtype).mean(0)
            self._balance.append(self.experts * (share * gates.mean(0)).sum())
            self._load += share.detach()
        return out.view_as(x)

    def take_balance(self) -> Tensor:
        """The balance loss of the passes since the last call (equation 4 of the paper; 1 for an even load)."""
        balance, self._balance = self._balance, []
        return torch.stack(balance).mean()

    def take_load(self) -> Tensor:
        """The share of tokens that each expert got since the last call, f32 [experts]; NaN if there was no pass."""
        load, self._load = self._load, torch.zeros(self.experts)
        return load / load.sum()


def of(model: nn.Module) -> list[tuple[str, Experts]]:
    """All mixtures of a model with their names."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Experts)]
