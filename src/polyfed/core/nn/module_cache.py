"""Caches one module per architecture in each process; every use fills it with a client's weights.

Parameters that a network does not train (`requires_grad=False` when it is built) are part of its architecture, as its layers
are: every client builds them itself, with seed 0, whatever the run's seed. So clients neither send nor keep them, and a
fingerprint of them, the second half of `CachedModule.architecture`, shows whether two clients have the same.

A tensor that has several names is sent and kept under the first name alone (`polyfed.core.nn.tied_weights`).
"""

import hashlib
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from polyfed.core.algorithm import Architecture
from polyfed.core.errors import UserError
from polyfed.core.nn.class_paths import class_name_in_fingerprint, module_path_in_fingerprint, print_for_fingerprint
from polyfed.core.nn.grad_mode import grad_enabled
from polyfed.core.nn.model_factory import call_model_factory
from polyfed.core.nn.tied_weights import (
    check_parameters_share_no_memory,
    first_name_by_alias,
    rename_to_first_names,
    retie_buffers,
    unique_tensors,
)
from polyfed.core.seeds import derive_seed
from polyfed.core.state_dict import StateDict, view_as_bytes

_CACHE_SIZE = 64  # factories whose module a process keeps
_PlainValue = int | float | str | bool | None
_OF_TORCH = frozenset(nn.Module().__dict__)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


_CACHES: list[Any] = []  # of all that is computed from factories


def forget_cached_networks() -> None:
    """Empties all caches of what factories have built, since a factory builds another network than before."""
    for cache in _CACHES:
        cache.cache_clear()


@final
class FactoryCache(Generic[Arguments, Result]):
    """Caches a function of a network's factory, unless the factory cannot be hashed.

    Args:
        function: its first argument is the factory; the others can be hashed.
        maxsize: how many results are kept.

    >>> calls = FactoryCache(lambda factory: factory(), maxsize=2)
    >>> calls(list) is calls(list)
    True
    """

    def __init__(self, function: Callable[Concatenate[Architecture, Arguments], Result], maxsize: int) -> None:
        self._function, self._cached = function, lru_cache(maxsize=maxsize)(function)
        _CACHES.append(self._cached)

    def __call__(self, factory: Architecture, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Returns the function's result for this factory and these arguments, from the cache if it is there."""
        function: Callable[..., Result] = self._cached if isinstance(factory, Hashable) else self._function
        return function(factory, *args, **kwargs)


@final
@dataclass(frozen=True)
class _PartSnapshot:
    """Records the state that one submodule had when the network was built; holds no reference to a module."""

    parameters: Mapping[str, nn.Parameter | None]
    buffers: Mapping[str, Tensor | None]
    attributes: Mapping[str, _PlainValue | Tensor]
    names: frozenset[str]
    hooks: Mapping[str, frozenset[Any]]
    empty: tuple[str, ...]

    @classmethod
    def take(cls, module: nn.Module) -> "_PartSnapshot":
        """Returns a snapshot of a submodule's present state."""
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
        """Puts the recorded tensors (the same objects) and attributes back into a submodule.

        Removes attributes and hooks that were added since, and the contents of lists and mappings that were empty.
        """
        for current, built in ((module._parameters, self.parameters), (module._buffers, self.buffers)):
            if not isinstance(module, torch.jit.ScriptModule):  # whose tensors are held in C++
                current.clear()
                current.update(built)  # type: ignore[arg-type]  # parameters into parameters
        attributes = module.__dict__
        for name in attributes.keys() - self.names:
            del attributes[name]
        attributes.update(self.attributes)
        for name in self.empty:
            attributes[name].clear()
        for name, hook_ids in self.hooks.items():
            if attributes[name]:  # most have none, and this runs for each layer and client
                for added in attributes[name].keys() - hook_ids:
                    del attributes[name][added]


@final
@dataclass(frozen=True)
class _PristineState:
    """Holds the state of a newly built network, except weights and persistent buffers, to undo a client's changes.

    These are the tensor objects of its submodules, the values of non-persistent buffers, which parameters are trained, plain
    attributes (numbers, strings) such as counters, and hooks.
    """

    hidden: Mapping[str, Tensor]
    trainable: Mapping[str, bool]
    parts: Mapping[str, _PartSnapshot]
    frozen: Mapping[str, nn.Parameter]
    versions: tuple[int, ...]  # of the frozen parameters; torch increments them at each change

    def restore(self, module: nn.Module) -> None:
        """Resets a module to the state in which it was built.

        Raises:
            UserError: the network changed a frozen parameter, or added or removed a layer, itself.
        """
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


_PRISTINE_STATES: WeakKeyDictionary[nn.Module, _PristineState] = WeakKeyDictionary()  # of every cached module


@final
@dataclass(frozen=True)
class CachedModule:
    """Holds a module to load clients' weights into, its buffers as built, and its architecture's hash.

    Two factories have the same `architecture` if their modules have the same class, print alike, have the same plain
    attributes, state dicts with the same names, shapes and types, the same tied names, and the same frozen parameters with
    the same values.

    Attributes: `frozen`: all names of the frozen parameters, in the order of the state dict. `counters`: the buffers of
    whole numbers as the server sent them to the client that the module is filled for
    (`polyfed.core.nn.buffers.fill_client_model`).
    """

    module: nn.Module
    buffers: Mapping[str, Tensor]
    architecture: str
    frozen: tuple[str, ...] = ()
    counters: Mapping[str, Tensor] = field(default_factory=dict)

    def restore_all_but_weights(self) -> None:
        """Undoes all changes in the module since it was built, except to weights and persistent buffers."""
        _PRISTINE_STATES[self.module].restore(self.module)


@grad_enabled()  # a module that was built and cached in the caller's inference mode could never be trained
def cached_module(factory: Architecture, device: torch.device | None = None) -> CachedModule:
    """Returns the cached module of the architecture that `factory` builds, reset to the state in which it was built.

    Its weights and persistent buffers are arbitrary: the caller fills it first, and does not keep it. Attributes that a
    network sets only when it runs are removed.

    Raises:
        UserError: the factory fails, or does not return an `nn.Module` whose parameters are initialised.

    >>> cached_module(lambda: nn.Linear(2, 3)).architecture == cached_module(lambda: nn.Linear(2, 3)).architecture
    True
    """
    device = device or torch.device("cpu")
    cached = _cached(factory, device)
    cached.restore_all_but_weights()
    return cached


def _build_cached_module(factory: Architecture, device: torch.device) -> CachedModule:
    module = build_module(factory, seed=0)
    check_parameters_share_no_memory(module)
    aliases = first_name_by_alias(module)
    retie_buffers(module.to(device), aliases)
    state = module.state_dict(keep_vars=True)
    buffer_names = state.keys() - aliases.keys() - {name for name, _ in module.named_parameters(remove_duplicate=False)}
    frozen, sent = _frozen_by_name(module), {id(tensor) for tensor in state.values()}
    _PRISTINE_STATES[module] = _PristineState(
        {name: buffer.clone() for name, buffer in module.named_buffers() if id(buffer) not in sent},
        {name: parameter.requires_grad for name, parameter in module.named_parameters()},
        {name: _PartSnapshot.take(part) for name, part in module.named_modules()},
        frozen,
        tuple(parameter._version for parameter in frozen.values()),
    )
    as_built = {name: state[name].clone() for name in state if name in buffer_names}
    return CachedModule(module, as_built, _compute_architecture_hash(module), tuple(frozen))


def _frozen_by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters with `requires_grad=False`, under all their names in the state dict."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if not parameter.requires_grad}


def frozen_parameters(module: nn.Module) -> Mapping[str, nn.Parameter]:
    """Returns, under all their names, the parameters that were built with `requires_grad=False`.

    >>> list(frozen_parameters(nn.Linear(2, 3).requires_grad_(False)))
    ['weight', 'bias']
    """
    return _PRISTINE_STATES[module].frozen if module in _PRISTINE_STATES else _frozen_by_name(module)


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Returns a short hash of the names, types, shapes and values of tensors; "" for no tensors.

    >>> hash_tensors({}), hash_tensors({"w": torch.zeros(2)}) == hash_tensors({"w": torch.zeros(2)})
    ('', True)
    """
    content = hashlib.blake2b(digest_size=8)
    for name, tensor in tensors.items():
        content.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        content.update(view_as_bytes(tensor).numpy().data)
    return content.hexdigest() if tensors else ""


def architectures_differ_only_in_frozen_values(first_hash: str, second_hash: str) -> bool:
    """Returns whether two architectures, given by their hashes, are equal except for the values of frozen parameters.

    >>> [architectures_differ_only_in_frozen_values("4e0c-11", other) for other in ("4e0c-22", "77aa-11")]
    [True, False]
    """
    return first_hash != second_hash and first_hash.partition("-")[0] == second_hash.partition("-")[0]


def _compute_architecture_hash(module: nn.Module) -> str:
    form = [(name, tuple(t.shape), str(t.dtype)) for name, t in module.state_dict().items()]
    parts = [
        (
            name,
            module_path_in_fingerprint(type(part)),
            class_name_in_fingerprint(type(part)),
            sorted(_plain_attributes(part).items(), key=repr),
        )
        for name, part in module.named_modules()
    ]
    functions = [
        (name, key, getattr(value, "__qualname__", ""))
        for name, part in module.named_modules()
        for key, value in sorted(part.__dict__.items())
        if callable(value) and not isinstance(value, nn.Module)
    ]
    # A printed address differs from process to process, and a run is resumed in another one.
    printed = re.sub(r"0x[0-9a-f]+", "", f"{print_for_fingerprint(module)}\n{form}\n{parts}\n{functions}")
    if further := first_name_by_alias(module):
        printed += f"\n{further}"
    frozen = hash_tensors(_frozen_by_name(module))
    return hashlib.sha256(printed.encode()).hexdigest()[:16] + (f"-{frozen}" if frozen else "")


_ARCHITECTURE_HASHES: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def architecture_hash(module: nn.Module) -> str:
    """Returns a hash of a network's layers, shapes and frozen weights; computes it once per module.

    >>> architecture_hash(nn.Linear(2, 3)) == cached_module(lambda: nn.Linear(2, 3)).architecture
    True
    """
    if module not in _ARCHITECTURE_HASHES:
        _ARCHITECTURE_HASHES[module] = _compute_architecture_hash(module)
    return _ARCHITECTURE_HASHES[module]


def _plain_attributes(part: nn.Module) -> dict[str, _PlainValue]:
    return {k: v for k, v in part.__dict__.items() if v is None or isinstance(v, int | float | str | bool)}


_cached = FactoryCache(_build_cached_module, _CACHE_SIZE)


def restore_all_but_weights_and_set_eval(module: nn.Module) -> nn.Module:
    """Undoes all changes since the network was built but those of its state dict, and sets evaluation mode.

    So what is evaluated is bit for bit the network that its state dict rebuilds.
    """
    if module in _PRISTINE_STATES:
        _PRISTINE_STATES[module].restore(module)
    return module.eval()


@grad_enabled()
def build_module(factory: Architecture, seed: int) -> nn.Module:
    """Builds a new network with random initial weights that depend on `seed` only.

    Raises:
        UserError: as for `cached_module`.
    """
    name = getattr(factory, "__qualname__", None) or getattr(factory, "name", None) or type(factory).__name__
    module = call_model_factory(factory, name, seed)
    if lazy := [n for n, p in module.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]:
        raise UserError(f"the model factory {name} leaves {lazy[0]!r} uninitialised; run one batch through it first")
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if meta := [n for n, tensor in tensors.items() if tensor.is_meta]:
        raise UserError(f"the model factory {name} leaves {meta[0]!r} on the meta device, without values; build the network "
                        "outside of torch.device('meta'), or load its weights first")  # fmt: skip
    return module


def initial_state(factory: Architecture, seed: int) -> dict[str, Tensor]:
    """Returns the weights and buffers with which an architecture begins, without frozen parameters.

    They are drawn once per architecture, so that a client that trains alone and one that federates begin at the same point.

    >>> a, b = (initial_state(lambda: nn.Linear(2, 3), seed=5) for _ in range(2))
    >>> torch.equal(a["weight"], b["weight"])
    True
    """
    module = build_module(factory, derive_seed(seed, "initial weights", cached_module(factory).architecture))
    frozen = frozen_parameters(module)
    return {n: tensor.detach().clone() for n, tensor in unique_tensors(module).items() if n not in frozen}


def copy_trained_weights_and_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Copies a network's buffers and trained parameters to the CPU, as `{name: tensor}`."""
    frozen = frozen_parameters(module)
    return {n: tensor.detach().to("cpu", copy=True) for n, tensor in unique_tensors(module).items() if n not in frozen}


def fill_module(module: nn.Module, *state_dicts: StateDict) -> nn.Module:
    """Copies the tensors of state dicts into a network in place, and returns it.

    Together the state dicts must name every tensor that is not frozen, by one of its names or several. A module that is not
    from the cache takes frozen ones too, if all of them are named: those of a file with a whole network.

    Raises:
        ValueError: a name is missing, unknown or of another shape, or names of one tensor have different values.
    """
    module_tensors, frozen = unique_tensors(module), frozen_parameters(module)
    values = {name: tensor for tensors in state_dicts for name, tensor in tensors.items()}
    if not values.keys() <= module_tensors.keys():
        values = rename_to_first_names(module, values)
    expected = {name: tensor for name, tensor in module_tensors.items() if name not in frozen}
    if module not in _PRISTINE_STATES and values.keys() & frozen.keys():
        expected = module_tensors
    if expected.keys() != values.keys():
        raise ValueError(
            f"weights do not fit the model: missing {sorted(expected.keys() - values.keys())[:3]}, "
            f"unknown {sorted(values.keys() - expected.keys())[:3]}"
        )
    with torch.no_grad():
        for name, target in expected.items():
            if target.shape != values[name].shape:
                raise ValueError(f"weights do not fit the model: {name!r} is {tuple(values[name].shape)}, "
                                 f"the model has {tuple(target.shape)}")  # fmt: skip
            target.copy_(values[name])
    return module
