"""Handles tied weights, tensors that have several names in one network: refers to each tensor by the first of its
names.

The name is the first in `state_dict()`, which for a parameter is that of `named_parameters()`. Under it the tensor is sent,
kept, averaged, clipped, weighted and counted, once. Exported files of networks have all names, as torch's `load_state_dict`
wants them, and weights can be loaded under any of them (`rename_to_first_names`).
"""

from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from polyfed.core.errors import UserError
from polyfed.core.state_dict import StateDict


def first_name_by_name(module: nn.Module) -> dict[str, str]:
    """Returns `{name: first name of the same tensor}` of `state_dict()`; they differ for tied tensors.

    >>> tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    >>> tied[1].weight = tied[0].weight
    >>> first_name_by_name(tied)
    {'0.weight': '0.weight', '1.weight': '0.weight', '1.bias': '1.bias'}
    """
    first: dict[int, str] = {}
    state = module.state_dict(keep_vars=True)  # the live tensors themselves, whose ids differ
    return {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}


def unique_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns `{first name: tensor}` with each tensor of `state_dict()` once; does not copy the tensors."""
    first, state = dict[int, str](), module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if first.setdefault(id(tensor), name) == name}


def first_name_by_alias(module: nn.Module) -> dict[str, str]:
    """Returns `{further name: first name}` for the tied tensors of a network; empty if there are none."""
    return {name: first for name, first in first_name_by_name(module).items() if first != name}


def all_names_by_first_name(module: nn.Module) -> dict[str, list[str]]:
    """Returns `{first name: all names}` for each tensor in `state_dict()`; the list includes the first name.

    A module that holds a client's network beside what a method trains with it has an attribute `client_network`, the prefix
    of that network; then the names that the tensors have in that network count too.
    """
    names_by_tensor: dict[str, list[str]] = {}
    for name, first in first_name_by_name(module).items():
        names_by_tensor.setdefault(first, []).append(name)
    if prefix := getattr(module, "client_network", ""):
        for first, names in names_by_tensor.items():
            names_by_tensor[first] = [
                *names,
                *(n.removeprefix(f"{prefix}.") for n in names if n.startswith(f"{prefix}.")),
            ]
    return names_by_tensor


def rename_to_first_names(module: nn.Module, tensors: StateDict) -> dict[str, Tensor]:
    """Returns `tensors` under the first names that they have in the network, and leaves unknown names.

    Raises:
        ValueError: two names of one tensor have different values.
    """
    first, renamed, source = first_name_by_name(module), dict[str, Tensor](), dict[str, str]()
    for name, tensor in tensors.items():
        key = first.get(name, name)
        if key in renamed and not _are_equal(renamed[key], tensor):
            raise ValueError(
                f"weights do not fit the model: {source[key]!r} and {name!r} are one tensor in it, and have two values"
            )
        renamed.setdefault(key, tensor)
        source.setdefault(key, name)
    return renamed


def _are_equal(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def retie_buffers(module: nn.Module, aliases: Mapping[str, str]) -> None:
    """Makes buffers with several names one tensor again, after moving a module to another device has separated them.

    Args:
        module: the moved network.
        aliases: what `first_name_by_alias` returned before the move.
    """
    for name, first in aliases.items():
        (owner, key), (source, first_key) = _owner_and_attribute(module, name), _owner_and_attribute(module, first)
        if key in owner._buffers and first_key in source._buffers:
            owner._buffers[key] = source._buffers[first_key]


def _owner_and_attribute(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return module.get_submodule(path), key


def check_parameters_share_no_memory(module: nn.Module) -> None:
    """Raises a `UserError` if different tensors share memory; names of one tied tensor may.

    Each would be trained, averaged and counted by itself, while writing to one changes the other.

    Raises:
        UserError: a parameter shares memory with another parameter, of which one is trained, or with a buffer; or several
            entries of a tensor share memory, as in the result of `expand`.
    """
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    owned = {id(parameter): name for name, parameter in parameters.items()}
    for name, buffer in buffers.items():
        if id(buffer) in owned:
            raise UserError(
                f"the network's buffer {name!r} is its parameter {owned[id(buffer)]!r}; register the parameter under both "
                "names (register_parameter), or a copy of it as the buffer (.detach().clone())"
            )
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in chain(parameters.items(), buffers.items()):
        if tensor.layout == torch.strided and tensor.device.type != "meta" and tensor.numel():
            if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
                raise UserError(
                    f"the network's tensor {name!r} has several entries in one place of memory, as `expand` leaves them; "
                    "make it .contiguous() or .clone()"
                )
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for members in by_storage.values():
        for (name_a, a), (name_b, b) in _pairs_with_common_range(members):
            if not any(t.requires_grad for t in (a, b)) and (name_a in parameters) == (name_b in parameters):
                continue
            if _have_common_entry(a, b):
                kinds = ["parameter" if name in parameters else "buffer" for name in (name_a, name_b)]
                raise UserError(
                    f"the network's {kinds[0]} {name_a!r} and its {kinds[1]} {name_b!r} share memory and are not one "
                    "parameter. To tie weights, give both places the same nn.Parameter (b.weight = a.weight), or compute "
                    "with the one weight where it is used (F.linear(x, a.weight.t())); else make one of them a .clone()"
                )


def _pairs_with_common_range(
    members: list[tuple[str, Tensor]],
) -> Iterator[tuple[tuple[str, Tensor], tuple[str, Tensor]]]:
    """Yields the pairs of tensors in one storage whose memory ranges overlap."""
    ordered = sorted(members, key=lambda member: member[1].data_ptr())
    for position, lower in enumerate(ordered):
        reach = sum((size - 1) * stride for size, stride in zip(lower[1].shape, lower[1].stride(), strict=True)) + 1
        for upper in ordered[position + 1 :]:
            if upper[1].data_ptr() >= lower[1].data_ptr() + reach * lower[1].element_size():
                break
            yield lower, upper


def _have_common_entry(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors in one storage share at least one element."""
    if a.dtype != b.dtype:
        return True
    places = torch.arange(a.untyped_storage().nbytes() // a.element_size())
    of_a, of_b = (places.as_strided(t.shape, t.stride(), t.storage_offset()).flatten() for t in (a, b))
    return bool(torch.isin(of_a, of_b).any())
