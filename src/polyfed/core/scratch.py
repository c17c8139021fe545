"""Scratch modules: one network per architecture and process, filled with a client's weights before each use.

Parameters that a network does not train (`requires_grad=False` when it is built) are part of its architecture, as its layers
are: every client builds them itself, with seed 0, whatever the run's. So they are neither sent nor kept by clients, and a
fingerprint of them, the second half of `Scratch.architecture`, tells whether two clients have the same.

A tensor that has several names is sent and kept under the first alone (`polyfed.core.tied`).
"""

import hashlib
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from polyfed.core.algorithm import Architecture
from polyfed.core.class_paths import stable_path
from polyfed.core.errors import UserError
from polyfed.core.gradients import gradients
from polyfed.core.seeds import derive, local_rng
from polyfed.core.tied import check_memory, further_names, tensors_once, tie_buffers, under_first_names
from polyfed.core.tree import Tree
from polyfed.core.unwrapped import unwrapped

_KEPT = 64  # factories whose scratch module a process keeps
_Plain = int | float | str | bool | None
_OF_TORCH = frozenset(nn.Module().__dict__)


@final
@dataclass(frozen=True)
class _Part:
    """One module of a network as it was when the network was built; nothing in it refers to a module."""

    parameters: Mapping[str, nn.Parameter | None]
    buffers: Mapping[str, Tensor | None]
    attributes: Mapping[str, _Plain | Tensor]
    names: frozenset[str]
    hooks: Mapping[str, frozenset[Any]]
    empty: tuple[str, ...]

    @classmethod
    def of(cls, module: nn.Module) -> "_Part":
        """The present state of a module."""
        attributes = module.__dict__
        tensors = {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
        hooks = {name: frozenset(attributes[name]) for name in attributes if name.startswith("_") and "_hooks" in name}
        empty = tuple(
            n for n, v in attributes.items() if n not in _OF_TORCH and isinstance(v, dict | list | set) and not v
        )
        return cls(
            dict(module._parameters), dict(module._buffers), {**_plain_attributes(module), **tensors}, frozenset(attributes),
            hooks, empty,
        )  # fmt: skip

    def restore(self, module: nn.Module) -> None:
        """Puts the same tensor objects and plain attributes back; removes attributes and hooks that were added, and what was
        put into lists and mappings that were empty."""
        for own, built in ((module._parameters, self.parameters), (module._buffers, self.buffers)):
            if not isinstance(module, torch.jit.ScriptModule):  # which has no dictionaries of its own
                own.clear()
                own.update(built)  # type: ignore[arg-type]  # parameters into parameters
        attributes = module.__dict__
        for name in attributes.keys() - self.names:
            del attributes[name]
        attributes.update(self.attributes)
        for name in self.empty:
            attributes[name].clear()
        for name, known in self.hooks.items():
            for added in attributes[name].keys() - known:
                del attributes[name][added]


@final
@dataclass(frozen=True)
class _AsBuilt:
    """What a client or a method may leave in a module besides weights and persistent buffers, as it was when the module was
    built: which tensors its modules hold, the values of non-persistent buffers, which parameters are trained, plain
    attributes (numbers, strings) such as counters, and hooks."""

    hidden: Mapping[str, Tensor]
    trainable: Mapping[str, bool]
    parts: Mapping[str, _Part]
    frozen: Mapping[str, nn.Parameter]
    versions: tuple[int, ...]  # of the frozen ones, which torch counts up at each change

    def restore(self, module: nn.Module) -> None:
        for (name, parameter), version in zip(self.frozen.items(), self.versions, strict=True):
            if parameter._version != version:
                raise UserError(
                    f"the network changed its parameter {name!r} itself, which is not trained (requires_grad=False) and so "
                    "neither sent nor kept; put what a network changes in its forward pass into a buffer (register_buffer)"
                )
        modules = dict(module.named_modules())
        if different := modules.keys() ^ self.parts.keys():
            raise UserError(
                f"the network adds or removes the layer {min(different)!r} itself; build all layers in __init__, and let "
                "forward choose among them"
            )
        for name, part in modules.items():
            self.parts[name].restore(part)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in self.hidden:
                    buffer.copy_(self.hidden[name])
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(self.trainable[name])


_BUILT: WeakKeyDictionary[nn.Module, _AsBuilt] = WeakKeyDictionary()  # of every scratch module there is


@final
@dataclass(frozen=True)
class Scratch:
    """A module to fill and use, its persistent buffers as built, and a short name of its architecture.

    Two factories have the same `architecture` if their modules have the same class, print alike, have the same plain
    attributes, state dicts with the same names, shapes and types, of which the same are names of one tensor, and the same
    frozen parameters with the same values.
    `frozen`: all names of these, in the order of the state dict. `counters`: the buffers of whole numbers as they came
    to the client that the module is filled for (`polyfed.core.buffers.filled`), if they came.
    """

    module: nn.Module
    buffers: Mapping[str, Tensor]
    architecture: str
    frozen: tuple[str, ...] = ()
    counters: Mapping[str, Tensor] = field(default_factory=dict)

    def restore(self) -> None:
        """Undoes what the last client may have left in the module besides weights and persistent buffers."""
        _BUILT[self.module].restore(self.module)


@gradients()  # it is kept: one that was built in a caller's inference mode could never be trained
def scratch(factory: Architecture, device: torch.device | None = None) -> Scratch:
    """The scratch module of an architecture on `device` (default: CPU), as built but for weights and persistent buffers:
    whoever takes it fills it first and does not keep it. Attributes that a network sets only as it runs are removed.

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
    module = new_module(factory, seed=0)
    check_memory(module)
    further = further_names(module)
    tie_buffers(module.to(device), further)
    state = module.state_dict(keep_vars=True)
    kept = state.keys() - further.keys() - {name for name, _ in module.named_parameters(remove_duplicate=False)}
    frozen, sent = _untrained(module), {id(tensor) for tensor in state.values()}
    _BUILT[module] = _AsBuilt(
        {name: buffer.clone() for name, buffer in module.named_buffers() if id(buffer) not in sent},
        {name: parameter.requires_grad for name, parameter in module.named_parameters()},
        {name: _Part.of(part) for name, part in module.named_modules()},
        frozen,
        tuple(parameter._version for parameter in frozen.values()),
    )
    buffers = {name: state[name].clone() for name in state if name in kept}
    return Scratch(module, buffers, _architecture(module), tuple(frozen))


def _untrained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not trained, under all their names in the state dict."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if not parameter.requires_grad}


def frozen_parameters(module: nn.Module) -> Mapping[str, nn.Parameter]:
    """The parameters that were not to be trained when the module was built, under all their names.

    >>> list(frozen_parameters(nn.Linear(2, 3).requires_grad_(False)))
    ['weight', 'bias']
    """
    return _BUILT[module].frozen if module in _BUILT else _untrained(module)


def hash_of(tensors: Mapping[str, Tensor]) -> str:
    """A short hash of names, types, shapes and values; empty for no tensors.

    >>> hash_of({}), hash_of({"w": torch.zeros(2)}) == hash_of({"w": torch.zeros(2)})
    ('', True)
    """
    content = hashlib.blake2b(digest_size=8)
    for name, tensor in tensors.items():
        content.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return content.hexdigest() if tensors else ""


def same_but_for_frozen(one: str, other: str) -> bool:
    """Whether two architectures, as `Scratch.architecture` names them, have one form and differ in frozen parameters.

    >>> same_but_for_frozen("4e0c-11", "4e0c-22"), same_but_for_frozen("4e0c-11", "77aa-11")
    (True, False)
    """
    return one != other and one.partition("-")[0] == other.partition("-")[0]


def _architecture(module: nn.Module, *, ties: bool = True) -> str:
    form = [(name, tuple(t.shape), str(t.dtype)) for name, t in module.state_dict().items()]
    parts = [
        (name, stable_path(type(part)), type(part).__qualname__, sorted(_plain_attributes(part).items(), key=repr))
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
    if ties and (further := further_names(module)):
        printed += f"\n{further}"
    frozen = hash_of(_untrained(module))
    return hashlib.sha256(printed.encode()).hexdigest()[:16] + (f"-{frozen}" if frozen else "")


_NAMED: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def architecture(module: nn.Module) -> str:
    """A short name of a module's architecture, as `Scratch.architecture`; made once for each module.

    >>> architecture(nn.Linear(2, 3)) == scratch(lambda: nn.Linear(2, 3)).architecture
    True
    """
    if module not in _NAMED:
        _NAMED[module] = _architecture(module)
    return _NAMED[module]


def architecture_without_ties(module: nn.Module) -> str:
    """The name that former versions gave: it did not tell whether two names are of one tensor."""
    return _architecture(module, ties=False)


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
    module = unwrapped(module)
    lazy = [n for n, p in module.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise UserError(f"the model factory {name} leaves {lazy[0]!r} uninitialised; run one batch through it first")
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if meta := [n for n, tensor in tensors.items() if tensor.is_meta]:
        raise UserError(f"the model factory {name} leaves {meta[0]!r} on the meta device, without values; build the network "
                        "outside of torch.device('meta'), or load its weights first")  # fmt: skip
    return module


def initial_state(factory: Architecture, seed: int) -> dict[str, Tensor]:
    """The trained weights and the buffers from which every client of this architecture starts in the run with `seed`: one
    draw per architecture, so that a client that trains alone and one that federates begin at the same point.

    >>> a, b = (initial_state(lambda: nn.Linear(2, 3), seed=5) for _ in range(2))
    >>> torch.equal(a["weight"], b["weight"])
    True
    """
    module = new_module(factory, derive(seed, "initial weights", scratch(factory).architecture))
    frozen = frozen_parameters(module)
    return {n: tensor.detach().clone() for n, tensor in tensors_once(module).items() if n not in frozen}


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all trained weights and buffers of a network, on the CPU: what a client keeps, or sends."""
    frozen = frozen_parameters(module)
    return {n: tensor.detach().to("cpu", copy=True) for n, tensor in tensors_once(module).items() if n not in frozen}


def fill(module: nn.Module, *trees: Tree) -> nn.Module:
    """Copies tensors into a module's parameters and buffers; together the trees must name each that is not frozen, by one of
    its names or several. A module that is no scratch module takes frozen ones too, if all of them are named: those of a file
    with a whole network.

    Raises:
        ValueError: a name is missing, unknown or of another shape, or names of one tensor have different values.
    """
    own, frozen = tensors_once(module), frozen_parameters(module)
    given = {name: tensor for tree in trees for name, tensor in tree.items()}
    if not given.keys() <= own.keys():
        given = under_first_names(module, given)
    wanted = {name: tensor for name, tensor in own.items() if name not in frozen}
    if module not in _BUILT and given.keys() & frozen.keys():
        wanted = own
    if wanted.keys() != given.keys():
        raise ValueError(
            f"weights do not fit the model: missing {sorted(wanted.keys() - given.keys())[:3]}, "
            f"unknown {sorted(given.keys() - wanted.keys())[:3]}"
        )
    with torch.no_grad():
        for name, target in wanted.items():
            if target.shape != given[name].shape:
                raise ValueError(f"weights do not fit the model: {name!r} is {tuple(given[name].shape)}, "
                                 f"the model has {tuple(target.shape)}")  # fmt: skip
            target.copy_(given[name])
    return module
