"""Scratch modules: one network per architecture and process, filled with a client's weights before each use."""

import hashlib
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from polyfed.core.algorithm import Architecture
from polyfed.core.errors import UserError
from polyfed.core.gradients import gradients
from polyfed.core.seeds import derive, local_rng
from polyfed.core.tree import Tree

_KEPT = 64  # factories whose scratch module a process keeps
_Plain = int | float | str | bool | None


@final
@dataclass(frozen=True)
class _AsBuilt:
    """What a client may leave in a module besides weights and persistent buffers, as it was when the module was built:
    non-persistent buffers, which parameters are trained, and plain attributes (numbers, strings) such as counters."""

    hidden: Mapping[str, Tensor]
    trainable: Mapping[str, bool]
    attributes: Mapping[str, Mapping[str, _Plain]]

    def restore(self, module: nn.Module) -> None:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in self.hidden:
                    buffer.copy_(self.hidden[name])
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(self.trainable[name])
        for name, part in module.named_modules():
            part.__dict__.update(self.attributes[name])


_BUILT: WeakKeyDictionary[nn.Module, _AsBuilt] = WeakKeyDictionary()  # of every scratch module there is


@final
@dataclass(frozen=True)
class Scratch:
    """A module to fill and use, its persistent buffers as built, and a short name of its architecture.

    Two factories have the same `architecture` if their modules have the same class, print alike, have the same plain
    attributes, and state dicts with the same names, shapes and types.
    """

    module: nn.Module
    buffers: Mapping[str, Tensor]
    architecture: str

    def restore(self) -> None:
        """Undoes what the last client may have left in the module besides weights and persistent buffers."""
        _BUILT[self.module].restore(self.module)


@gradients()  # it is kept: one that was built in a caller's inference mode could never be trained
def scratch(factory: Architecture, device: torch.device | None = None) -> Scratch:
    """The scratch module of an architecture on `device` (default: CPU), as built but for weights and persistent buffers:
    whoever takes it fills it first and does not keep it. (Tensors that a network caches in plain attributes stay.)

    Raises:
        UserError: the factory fails, or does not give an `nn.Module` whose parameters are initialised.

    >>> scratch(lambda: nn.Linear(2, 3)).architecture == scratch(lambda: nn.Linear(2, 3)).architecture
    True
    """
    device = device or torch.device("cpu")
    found = _cached(factory, device) if isinstance(factory, Hashable) else _build(factory, device)
    found.restore()
    return found


def _build(factory: Architecture, device: torch.device) -> Scratch:
    module = new_module(factory, seed=0).to(device)
    state = module.state_dict()
    kept = state.keys() - {name for name, _ in module.named_parameters(remove_duplicate=False)}
    _BUILT[module] = _AsBuilt(
        {name: buffer.clone() for name, buffer in module.named_buffers() if name not in state},
        {name: parameter.requires_grad for name, parameter in module.named_parameters()},
        {name: _plain_attributes(part) for name, part in module.named_modules()},
    )
    return Scratch(module, {name: state[name].clone() for name in state if name in kept}, _architecture(module))


def _architecture(module: nn.Module) -> str:
    form = [(name, tuple(t.shape), str(t.dtype)) for name, t in module.state_dict().items()]
    parts = [
        (name, type(part).__module__, type(part).__qualname__, sorted(_plain_attributes(part).items(), key=repr))
        for name, part in module.named_modules()
    ]
    functions = [
        (name, key, getattr(value, "__qualname__", ""))
        for name, part in module.named_modules()
        for key, value in sorted(part.__dict__.items())
        if callable(value) and not isinstance(value, nn.Module)
    ]
    # A printed address differs from process to process, and a run is resumed in another one.
    printed = re.sub(r"0x[0-9a-f]+", "", f"{module}\n{form}\n{parts}\n{functions}")
    return hashlib.sha256(printed.encode()).hexdigest()[:16]


def _plain_attributes(part: nn.Module) -> dict[str, _Plain]:
    return {k: v for k, v in part.__dict__.items() if v is None or isinstance(v, int | float | str | bool)}


_cached = lru_cache(maxsize=_KEPT)(_build)


def settled(module: nn.Module) -> nn.Module:
    """The module in evaluation mode and in the form in which its state dict alone builds it again, in place: what training
    may have left in a scratch module besides weights and persistent buffers is undone. So the network that is evaluated, or
    whose representations are compared, is bit for bit the one that is saved."""
    if module in _BUILT:
        _BUILT[module].restore(module)
    return module.eval()


@gradients()
def new_module(factory: Architecture, seed: int) -> nn.Module:
    """A fresh module whose random initialisation depends on `seed` alone.

    Raises:
        UserError: as for `scratch`.
    """
    name = getattr(factory, "__qualname__", None) or getattr(factory, "name", None) or type(factory).__name__
    with local_rng(seed):
        try:
            module = factory()
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"the model factory {name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"the model factory {name} must return a torch.nn.Module, got {type(module).__name__}")
    lazy = [n for n, p in module.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise UserError(f"the model factory {name} leaves {lazy[0]!r} uninitialised; run one batch through it first")
    return module


def initial_state(factory: Architecture, seed: int) -> dict[str, Tensor]:
    """The weights and buffers from which every client of this architecture starts in the run with `seed`: one draw per
    architecture, so that a client that trains alone and one that federates begin at the same point.

    >>> a, b = (initial_state(lambda: nn.Linear(2, 3), seed=5) for _ in range(2))
    >>> torch.equal(a["weight"], b["weight"])
    True
    """
    module = new_module(factory, derive(seed, "initial weights", scratch(factory).architecture))
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def fill(module: nn.Module, *trees: Tree) -> nn.Module:
    """Copies tensors into a module's parameters and buffers; together the trees must name each of them.

    Raises:
        ValueError: a name is missing, unknown or of another shape.
    """
    own = module.state_dict()
    given = {name: tensor for tree in trees for name, tensor in tree.items()}
    if own.keys() != given.keys():
        raise ValueError(
            f"weights do not fit the model: missing {sorted(own.keys() - given.keys())[:3]}, "
            f"unknown {sorted(given.keys() - own.keys())[:3]}"
        )
    with torch.no_grad():
        for name, target in own.items():
            if target.shape != given[name].shape:
                raise ValueError(f"weights do not fit the model: {name!r} is {tuple(given[name].shape)}, "
                                 f"the model has {tuple(target.shape)}")  # fmt: skip
            target.copy_(given[name])
    return module
