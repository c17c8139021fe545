"""Scratch modules: one network per architecture and process, filled with a client's weights before each use."""

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
from torch import Tensor, nn

from polyfed.algorithm import Architecture
from polyfed.errors import UserError
from polyfed.seeds import derive, local_rng
from polyfed.tree import Tree

_KEPT = 64  # architectures whose scratch module a process keeps


@final
@dataclass(frozen=True)
class Scratch:
    """A module to fill and use, its buffers as built, and a short name of its architecture.

    Two factories have the same `architecture` if their modules print alike and their state dicts have the same names,
    shapes and types.
    """

    module: nn.Module
    buffers: Mapping[str, Tensor]
    architecture: str


def scratch(factory: Architecture, device: torch.device | None = None) -> Scratch:
    """The scratch module of an architecture on `device` (default: CPU). Whoever takes it fills it first and does not
    keep it. Networks with 2-d convolutions use the channels-last memory format, which trains faster (see benchmarks).

    Raises:
        UserError: the factory fails, or does not give an `nn.Module` whose parameters are initialised.

    >>> scratch(lambda: nn.Linear(2, 3)).architecture == scratch(lambda: nn.Linear(2, 3)).architecture
    True
    """
    device = device or torch.device("cpu")
    return _cached(factory, device) if isinstance(factory, Hashable) else _build(factory, device)


def _build(factory: Architecture, device: torch.device) -> Scratch:
    module = new_module(factory, seed=0).to(device)
    if any(isinstance(m, nn.Conv2d) for m in module.modules()):
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    state = module.state_dict()
    form = repr([(name, tuple(t.shape), str(t.dtype)) for name, t in state.items()])
    digest = hashlib.sha256(f"{type(module).__qualname__}\n{module}\n{form}".encode()).hexdigest()
    kept = state.keys() - {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return Scratch(module, {name: state[name].clone() for name in state if name in kept}, digest[:16])


_cached = lru_cache(maxsize=_KEPT)(_build)


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
