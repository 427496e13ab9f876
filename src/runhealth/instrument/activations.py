"""Largest absolute output of the modules that were asked for."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from runhealth.instrument.draft import Draft, Probe
from runhealth.instrument.guard import Latch
from runhealth.instrument.layers import clean_name
from runhealth.instrument.scalars import Fetched
from runhealth.instrument.tensors import largest_magnitude
from runhealth.storage.errors import ConfigError


def chosen_modules(model: nn.Module | None, names: Sequence[str]) -> Mapping[str, nn.Module]:
    """The modules of these names (`blocks.0.mlp`; wrapper parts such as `module.` may be left out).

    Raises ConfigError for a name that the model does not have.
    """
    if not names:
        return {}
    if model is None:
        raise ConfigError(f"watch_activations={list(names)} needs model=")
    by_name = {clean_name(name): module for name, module in model.named_modules()}
    unknown = [name for name in names if clean_name(name) not in by_name]
    if unknown:
        some = ", ".join(sorted(name for name in by_name if name)[:8])
        raise ConfigError(f"watch_activations: the model has no module {unknown}; it has {some}, …")
    return {clean_name(name): by_name[clean_name(name)] for name in names}


class ActivationProbe(Probe):
    """Layer samples are written every `layers_every` steps; the largest of all is written each step. Only forward
    passes with gradients count: an evaluation within the step is left out."""

    name = "activations"

    def __init__(self, modules: Mapping[str, nn.Module], layers_every: int, latch: Latch) -> None:
        self._every = layers_every
        self._latch = latch
        self._running = False
        self._largest: dict[str, Tensor] = {}
        self._promised: dict[str, Fetched] = {}
        self._hooks: list[RemovableHandle] = [
            module.register_forward_hook(_OutputHook(self, name)) for name, module in modules.items()
        ]

    def begin(self, draft: Draft) -> None:  # noqa: ARG002  the probe protocol
        self._running = True
        self._largest = {}
        self._promised = {}

    def see(self, name: str, output: object) -> None:
        if not self._running or not torch.is_grad_enabled():
            return
        with self._latch.guard(self.name), torch.no_grad():
            tensor = _first_tensor(output)
            largest = None if tensor is None else largest_magnitude(tensor)
            if largest is not None:
                known = self._largest.get(name)
                self._largest[name] = largest if known is None else torch.maximum(known, largest)

    def collect(self, draft: Draft) -> None:
        self._running = False
        self._promised = {name: draft.scalars.put(largest) for name, largest in self._largest.items()}

    def finish(self, draft: Draft) -> None:
        if not self._promised:
            return
        found = {name: fetched.value for name, fetched in self._promised.items()}
        draft.values["activation_max"] = next((v for v in found.values() if v != v), max(found.values()))
        if self._every and draft.number % self._every == 0:
            for name, value in found.items():
                draft.layer(name)["activation_max"] = value

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class _OutputHook:
    """Lives in the module, so it is copied and pickled with the model: a copy (an EMA, a saved model) is inert."""

    def __init__(self, probe: ActivationProbe | None = None, layer: str = "") -> None:
        self._probe = probe
        self._layer = layer

    def __call__(self, module: nn.Module, args: object, output: object) -> None:  # noqa: ARG002  torch's signature
        if self._probe is not None:
            self._probe.see(self._layer, output)

    def __reduce__(self) -> tuple[type["_OutputHook"], tuple[()]]:
        return (_OutputHook, ())


def _first_tensor(output: object) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((tensor for part in parts if (tensor := _first_tensor(part)) is not None), None)
