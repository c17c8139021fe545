"""Determines the body, head, norm layers, buffers and representation of any network from its structure.

Structure means the types of modules, the order in which they run, and whether the output depends on them; names of layers do
not matter. A layer here is a module with parameters of its own; tensors are named as in `state_dict()`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils.parametrize import is_parametrized

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.examples.pytree import (
    Inputs,
    call_network,
    iterate_tensors,
    logits_or_output,
    split_into_call_arguments,
    tree_map,
)
from polyfed.core.nn.functional_call import call_with_tensors
from polyfed.core.nn.tied_weights import first_name_by_name

# _NormBase is the base of BatchNorm (SyncBatchNorm too) and InstanceNorm, their lazy forms included.
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


def find_head_modules(
    model: nn.Module, example: Inputs, *, num_layers: int = 1, names: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Returns the modules of the head, the last `num_layers` with parameters before the output.

    The function runs the model once on `example` in evaluation mode; neither the model nor the random state changes. A layer
    counts if the output depends on it, at the place of its last use; an auxiliary branch whose result is dropped does not.
    Norm layers do not count, but a norm between or after the counted layers belongs to the head. Parameters that a module
    with layers inside owns itself (a class token, positions) belong to the body.

    Args:
        model: any network.
        example: a small batch of inputs of any structure (see `polyfed.core.examples.pytree`); one row is enough.
        num_layers: number of layers in the head; 0 gives an empty head, a number above the model's gives all layers.
        names: the head's module names, if the user chooses them; then the model does not run.

    Returns:
        Module names (as in `named_modules`) in the order of execution; "" if the model itself is the layer.

    Raises:
        UserError: `num_layers` is negative, a name is not a module with parameters, or the output depends on no layer.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> find_head_modules(net, torch.zeros(1, 4))
    ('2',)
    """
    if names is not None:
        modules = dict(model.named_modules(remove_duplicate=False))
        for name in names:
            if name not in modules:
                raise UserError(
                    f"the head cannot be {name!r}: the model has no such module; {did_you_mean(name, modules)}"
                )
            if not any(True for _ in modules[name].parameters()):
                raise UserError(f"the head cannot be {name!r}: this {type(modules[name]).__name__} has no parameters")
        return tuple(names)
    if num_layers < 0:
        raise UserError(f"num_layers={num_layers} of the head must be 0 or more")
    if num_layers == 0:
        return ()
    layers = _parametric_layers(model)
    order = [name for name in _layers_in_use(model, example, layers) if len(_parametric_layers(layers[name])) <= 1]
    if not order:
        raise UserError(f"{type(model).__name__} has no parametric layer that takes part in its output, so it has no head; "
                        f"name the head's modules yourself")  # fmt: skip
    head: list[str] = []
    counted = 0
    for name in reversed(order):
        is_norm = isinstance(layers[name], _NORMS)
        if counted == num_layers:
            break
        head.append(name)
        counted += not is_norm
    return tuple(reversed(head))


def split_body_and_head(model: nn.Module, head: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of all tensors of `state_dict()` in two groups, (body, head).

    All names of a shared tensor are on the same side: the head's, if one of them is in the head, since a tensor that stays
    with a client must not leave under another name.

    Args:
        model: any network.
        head: module names, as `find_head_modules` returns them; everything inside these modules is head.

    Raises:
        UserError: the model has no module of such a name.

    >>> split_body_and_head(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), ["2"])
    (('0.weight', '0.bias'), ('2.weight', '2.bias'))
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in head:
        if name not in modules:
            raise UserError(f"the head cannot be {name!r}: the model has no such module; {did_you_mean(name, modules)}")
    tensors = _state_tensors(model)
    shared = {id(tensor) for name, tensor in tensors.items() if any(_is_inside(name, module) for module in head)}
    body = tuple(name for name, tensor in tensors.items() if id(tensor) not in shared)
    return body, tuple(name for name, tensor in tensors.items() if id(tensor) in shared)


def tensor_names_by_position(model: nn.Module, modules: Sequence[str], excluded: Collection[str]) -> dict[str, str]:
    """Returns `{"POSITION.NAME": first name}` of modules' tensors, to match architectures.

    A tensor that several of the modules share is listed only under the first of them.

    Args:
        model: any network.
        modules: module names; the first has position 0.
        excluded: first names of tensors to leave out.

    >>> tensor_names_by_position(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), ["2"], ())
    {'0.weight': '2.weight', '0.bias': '2.bias'}
    """
    places: dict[str, str] = {}
    for position, module in enumerate(modules):
        for name, first in first_name_by_name(model).items():
            if _is_inside(name, module) and first not in excluded:
                within = name.removeprefix(f"{module}.") if module else name
                places.setdefault(first, f"{position}.{within}")
    return {place: first for first, place in places.items()}


def norm_layer_tensor_names(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of all norm layers' tensors, which are recognised by class.

    Norm layers are batch, instance, layer, group and RMS norms, and classes derived from them. A tensor that a norm layer
    shares with another layer is listed under all its names.

    Raises:
        UserError: a part of the model is compiled by torch.jit, so that its norm layers cannot be recognised.

    >>> norm_layer_tensor_names(nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)))
    ('1.weight', '1.bias')
    """
    check_not_compiled(model)
    norms = [n for n, module in model.named_modules(remove_duplicate=False) if isinstance(module, _NORMS)]
    first = first_name_by_name(model)
    of_norms = {first[name] for name in _state_tensors(model) if any(_is_inside(name, norm) for norm in norms)}
    return tuple(name for name in first if first[name] in of_norms)


def tensor_names_by_module(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns `{module: names in `state_dict()`}` of modules' own tensors (pFedLA's layers).

    Every tensor name occurs once, in the order of `state_dict()`; a shared tensor belongs, with all its names, to its first
    owner. A parametrised layer (torch.nn.utils.parametrizations) owns the tensors of its parametrisation. The model itself
    has the name "".

    >>> tensor_names_by_module(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))["0"]
    ('0.weight', '0.bias')
    """
    parametrised = [n for n, module in model.named_modules(remove_duplicate=False) if is_parametrized(module)]
    owner_of: dict[int, str] = {}
    owners: dict[str, list[str]] = {}
    for name, tensor in _state_tensors(model).items():
        inside = [p for p in parametrised if _is_inside(name, f"{p}.parametrizations" if p else "parametrizations")]
        owner = owner_of.setdefault(id(tensor), inside[0] if inside else name.rpartition(".")[0])
        owners.setdefault(owner, []).append(name)
    return {owner: tuple(names) for owner, names in owners.items()}


def find_representation_module(model: nn.Module, example: Inputs) -> str:
    """Returns `representation_module`, or the last nn.Linear that the output depends on.

    Raises:
        UserError: the network has neither.

    >>> find_representation_module(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 4))
    '2'
    """
    if isinstance(named := getattr(model, "representation_module", None), str):
        return named
    layers = _parametric_layers(model)
    linear = [name for name in _layers_in_use(model, example, layers) if isinstance(layers[name], nn.Linear)]
    if not linear:
        raise UserError(f"{type(model).__name__} has no nn.Linear that takes part in its output, so its representation is "
                        f"unknown; name the module whose input it is (option module)")  # fmt: skip
    return linear[-1]


def compute_batch_representation(
    model: nn.Module, x: Inputs, *, module: str | None = None, batch_statistics: bool = False
) -> Tensor:
    """Returns a batch's inputs of the last linear layer or `module`, without dropout.

    FedHeNN, Makhija et al. 2022, section 3.

    The model runs in evaluation mode, and afterwards every module is in its former mode; gradients flow to the parameters if
    they are enabled.

    Args:
        model: any network.
        x: a batch of inputs of any structure.
        module: name of the module whose input is the representation. None finds the last nn.Linear by one more run on the
            first row; callers in a loop should call `find_representation_module` once and pass the name.
        batch_statistics: BatchNorm normalises by the mean and variance of `x`, as in training, instead of its running
            statistics, which do not change.

    Returns:
        (batch, width) tensor: the flattened input at the module's last use.

    Raises:
        UserError: the model has no such module, the module does not run, or it has no tensor as input; with `module=None`,
            the output depends on no nn.Linear.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    >>> compute_batch_representation(net, torch.ones(3, 2, 2)).shape
    torch.Size([3, 4])
    """
    name = find_representation_module(model, tree_map(lambda part: part[:1], x)) if module is None else module
    check_not_compiled(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    if name not in modules:
        raise UserError(f"module={name!r} of the representation: the model has none; {did_you_mean(name, modules)}")
    inputs: list[Any] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(next(iter(iterate_tensors([args, kwargs])), None))

    handle = modules[name].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with _evaluation_mode(model, batch_statistics):
            call_network(model, tree_map(Tensor.clone, x))  # it may change its inputs in place
    finally:
        handle.remove()
    if not inputs or inputs[-1] is None:
        raise UserError(
            f"module={name!r} of the representation ({type(modules[name]).__name__}) gets no tensor; "
            f"name a module that gets one"
        )
    last: Tensor = inputs[-1]
    return last.flatten(1)


def _state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of `state_dict()` without copies, so that shared tensors can be recognised by identity."""
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def _is_inside(tensor: str, module: str) -> bool:
    return not module or tensor.startswith(f"{module}.")


def check_not_compiled(model: nn.Module) -> None:
    """Raises a `UserError` if torch.jit compiled a part, whose layers cannot be listed or hooked."""
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise UserError(
                f"{repr(name) if name else 'the network'} is compiled by torch.jit, and its layers cannot be inspected; "
                "give the module that was compiled, or use a method that takes networks as a whole (fedavg, say)"
            )


def _parametric_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that own parameters directly, each under its first name.

    Raises:
        UserError: the network is compiled by torch.jit.
    """
    check_not_compiled(model)
    parametrised = [m for m in model.modules() if is_parametrized(m)]
    hidden = {id(part) for m in parametrised for part in m.get_submodule("parametrizations").modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if id(module) not in hidden
        and (is_parametrized(module) or any(parameter is not None for parameter in module._parameters.values()))
    }


def _layers_in_use(model: nn.Module, example: Inputs, layers: Mapping[str, nn.Module]) -> list[str]:
    """Returns the names of the given layers that run and that the output depends on, in the order of their last use.

    Dependence is read from the autograd graph of a run on detached tensors; if the output is not differentiable, all layers
    that run are returned.
    """
    last_use: dict[str, None] = {}
    handles = []
    for name, layer in layers.items():

        def note(*_: Any, name: str = name) -> None:
            last_use.pop(name, None)
            last_use[name] = None

        handles.append(layer.register_forward_hook(note))
    try:
        # A caller's inference mode or no_grad must not hide the graph; cuDNN's RNNs have no backward in evaluation
        # mode.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.backends.cudnn.flags(enabled=False),
            torch.random.fork_rng(devices=[]),
            _evaluation_mode(model),
        ):
            parameters = {
                name: _detach_tensor(p).requires_grad_(p.is_floating_point()) for name, p in model.named_parameters()
            }
            buffers = {name: _detach_tensor(b) for name, b in model.named_buffers()}
            output = call_with_tensors(
                model, {**parameters, **buffers}, *split_into_call_arguments(tree_map(_detach_tensor, example))
            )
            reached = _reached_parameters(logits_or_output(output), parameters)
    finally:
        for handle in handles:
            handle.remove()
    used = {id(p) for name, p in model.named_parameters() if name in reached}
    return [name for name in last_use if not reached or any(id(p) in used for p in _layer_parameters(layers[name]))]


def _reached_parameters(output: Any, parameters: Mapping[str, Tensor]) -> set[str]:
    """Returns the names of the given parameters that `output` depends on."""
    ends = [tensor.sum() for tensor in iterate_tensors(output) if tensor.requires_grad]
    inputs = {name: p for name, p in parameters.items() if p.requires_grad}
    if not ends or not inputs:
        return set()
    gradients = torch.autograd.grad(ends, list(inputs.values()), allow_unused=True)
    return {name for name, gradient in zip(inputs, gradients, strict=True) if gradient is not None}


def _layer_parameters(layer: nn.Module) -> list[nn.Parameter]:
    parameters = list(layer.parameters(recurse=False))
    return parameters + (list(layer.get_submodule("parametrizations").parameters()) if is_parametrized(layer) else [])


def _detach_tensor(tensor: Tensor) -> Tensor:
    """Returns a tensor outside the autograd graph; copies inference tensors, which autograd cannot save."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


@contextmanager
def _evaluation_mode(model: nn.Module, batch_statistics: bool = False) -> Iterator[None]:
    """Puts all modules in evaluation mode inside the block, and restores each module's own mode afterwards.

    RNNs without dropout compute the same in both modes and are put in training mode, since cuDNN differentiates them only
    there. With `batch_statistics`, BatchNorm normalises by its batch's statistics and does not update the running ones.
    """
    modes = [(module, module.training) for module in model.modules()]
    tracking = [(m, m.track_running_stats) for m in model.modules() if batch_statistics and isinstance(m, _BatchNorm)]
    model.eval()
    for norm, _ in tracking:
        norm.training, norm.track_running_stats = True, False
    for module, _ in modes:
        if isinstance(module, nn.RNNBase) and not module.dropout:
            module.training = True
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for norm, tracks in tracking:
            norm.track_running_stats = tracks
