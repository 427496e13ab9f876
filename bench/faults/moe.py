"""A mixture of experts in the place of one projection: a router sends each token to one of four matrices."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPERTS = 4
BALANCE = 0.02  # weight of the balance loss (Fedus et al., arXiv:2101.03961, equation 4)


class ExpertProjection(nn.Module):
    """y = gate * (W_e x) for the expert e of the highest gate; x [..., in], W [experts, out, in].

    After a forward pass `balance` holds the balance loss and `load` the share of tokens of each expert (experts,)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.router = nn.Linear(inputs, EXPERTS)
        self.experts = nn.Parameter(torch.empty(EXPERTS, outputs, inputs))
        self.balance: Tensor = torch.zeros(())
        self.load: Tensor = torch.zeros(EXPERTS)

    def initialise(self, generator: torch.Generator) -> None:
        with torch.no_grad():
            self.experts.normal_(0.0, 0.02, generator=generator)
            self.router.weight.normal_(0.0, 0.02, generator=generator)
            self.router.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        gates = F.softmax(self.router(x), dim=-1)
        best, chosen = gates.max(dim=-1)
        picked = F.one_hot(chosen, EXPERTS).to(x.dtype)
        self.load = picked.flatten(0, -2).mean(0).detach()
        self.balance = EXPERTS * (self.load * gates.flatten(0, -2).mean(0)).sum()
        out = torch.einsum("...i,eoi->...eo", x, self.experts)
        return EXPERTS * best[..., None] * (out * picked[..., None]).sum(-2)


def convert(model: nn.Module, seed: int) -> None:
    """Put experts in the place of the last block's `down`."""
    name = [name for name, _ in model.named_modules() if name.endswith(".down")][-1]
    old = model.get_submodule(name)
    new = ExpertProjection(old.weight.shape[1], old.weight.shape[0])
    new.initialise(torch.Generator().manual_seed(seed))
    model.set_submodule(name, new)
