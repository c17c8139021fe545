"""Relates networks with the same layers in different widths: each tensor of a narrow network is a leading slice of the
wide network's tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from polyfed.core.algorithm import Architecture, Client
from polyfed.core.errors import UserError
from polyfed.core.nn.module_cache import cached_module
from polyfed.core.state_dict import StateDict
from polyfed.models.structure import find_head_modules

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def leading_slice(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns a view of the first entries of a tensor in each dimension, as many as `shape` says.

    >>> import torch
    >>> leading_slice(torch.arange(6).view(2, 3), (1, 2))
    tensor([[0, 1]])
    """
    return tensor[tuple(slice(size) for size in shape)]


def window(tensor: Tensor, shape: tuple[int, ...], starts: Sequence[int]) -> Tensor:
    """Returns the entries of a tensor from `starts` on in each dimension, as many as `shape` says; they wrap around.

    >>> import torch
    >>> window(torch.arange(6).view(2, 3), (1, 2), (1, 2))
    tensor([[5, 3]])
    """
    return leading_slice(_roll_tensor(tensor, [-start for start in starts]), shape)


def add_to_window(tensor: Tensor, part: Tensor, starts: Sequence[int], alpha: float) -> Tensor:
    """Returns a tensor with alpha·part added to its `window` of the part's shape; the tensor itself may change.

    >>> import torch
    >>> add_to_window(torch.zeros(4), torch.ones(2), (3,), alpha=2.0)
    tensor([2., 0., 0., 2.])
    """
    rolled = _roll_tensor(tensor, [-start for start in starts])
    leading_slice(rolled, tuple(part.shape)).add_(part, alpha=alpha)
    return _roll_tensor(rolled, starts)


def _roll_tensor(tensor: Tensor, shifts: Sequence[int]) -> Tensor:
    return tensor.roll(list(shifts), list(range(tensor.dim()))) if any(shifts) else tensor


def widest_shape_by_tensor(networks: Mapping[str, Architecture]) -> dict[str, tuple[int, ...]]:
    """Returns `{tensor name: shape}` with the largest size in each dimension over the given networks.

    Args:
        networks: architectures by the names that errors use, such as a client's id.

    Raises:
        UserError: the networks are not a family: layers differ in more than width, or the tensors of a narrow one are not
            leading slices of a wide one's, as in layers that put several matrices into one tensor.

    >>> family = {"a": lambda: nn.Linear(2, 4), "b": lambda: nn.Linear(3, 3)}
    >>> widest_shape_by_tensor(family)["weight"]
    (4, 3)
    """
    modules = {name: cached_module(factory).module for name, factory in networks.items()}
    first, *rest = modules
    shapes = {name: tuple(tensor.shape) for name, tensor in modules[first].state_dict().items()}
    for second in rest:
        second_shapes = {name: tuple(tensor.shape) for name, tensor in modules[second].state_dict().items()}
        if unmatched := sorted(shapes.keys() ^ second_shapes.keys()):
            raise _no_family_error(first, second, f"{unmatched[0]!r} is in one of them alone")
        for name, size in second_shapes.items():
            if size != shapes[name] and (nesting_error := _nesting_error(modules[first], modules[second], name)):
                raise _no_family_error(first, second, nesting_error)
        shapes = {n: tuple(max(sizes) for sizes in zip(shapes[n], second_shapes[n], strict=True)) for n in shapes}
    return shapes


def _nesting_error(first: nn.Module, second: nn.Module, name: str) -> str:
    """Returns why a tensor is no leading slice of the other network's tensor of this name; "" if it is."""
    a, b = first.state_dict(keep_vars=True)[name], second.state_dict(keep_vars=True)[name]
    shapes_text = f"{name!r} is {tuple(a.shape)} and {tuple(b.shape)}"
    if a.dim() != b.dim() or a.shape[2:] != b.shape[2:]:
        return shapes_text
    owners = [net.get_submodule(name.rpartition(".")[0]) for net in (first, second)]
    if any(
        sum(tensor is t for t in net.state_dict(keep_vars=True).values()) > 1
        for net, tensor in ((first, a), (second, b))
    ):
        return f"{shapes_text}, and it has several names (shared weights)"
    for owner in owners:
        if isinstance(owner, CONVOLUTIONS) and owner.groups not in (1, owner.in_channels):
            return f"{shapes_text}, in a convolution of {owner.groups} groups"
        if type(owner) is not type(owners[0]) or not isinstance(
            owner, (nn.Linear, nn.Embedding, *CONVOLUTIONS, *_NORMS)
        ):
            return f"{shapes_text}, in a {type(owner).__name__}, whose tensors may not nest"
    return ""


def _no_family_error(first: str, second: str, reason: str) -> UserError:
    return UserError(
        f"the networks of {first!r} and {second!r} do not differ in width alone: {reason}; give clients one "
        "network with other widths of its hidden layers (mlp with hidden, cnn_small with channels, resnet18 with width)"
    )


def width_ratio_by_layer(factory: Architecture, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, float]:
    """Returns `{layer: share of the widest network's units}` for each layer that is narrower.

    >>> width_ratio_by_layer(lambda: nn.Linear(2, 3), {"weight": (4, 2), "bias": (4,)})
    {'': 0.75}
    """
    ratios = {}
    for name, layer in cached_module(factory).module.named_modules():
        if isinstance(layer, (nn.Linear, nn.Embedding, *CONVOLUTIONS)):
            units = 1 if isinstance(layer, nn.Embedding) else 0
            weight = f"{name}.weight" if name else "weight"  # a parametrised layer's weight is not in the state
            widest = shapes[weight][units] if weight in shapes else 0  # a layer may have no units at all
            r = layer.weight.shape[units] / widest if widest else 1
            if r != 1:
                ratios[name] = r
    return ratios


def validate_head_width(network: nn.Module, ratios: Mapping[str, float], client: Client, method: str) -> None:
    """Raises a `UserError` if the last layer, whose units are the classes, is narrower than the widest's."""
    if ratios and ratios.keys() & set(find_head_modules(network, client.train.first_input)):
        raise UserError(
            f"{method}: the network of client {client.id!r} has fewer outputs than another's; give all networks the "
            "same number of outputs, one for each class of the federation"
        )


@contextmanager
def divide_layer_outputs_by_ratio(network: nn.Module, ratios: Mapping[str, float]) -> Iterator[None]:
    """Divides outputs of named layers by their share of the widest's units inside a `with` block.

    >>> import torch
    >>> net = nn.Linear(1, 1, bias=False)
    >>> with divide_layer_outputs_by_ratio(net, {"": 0.5}): twice = net(torch.ones(1, 1))
    >>> torch.equal(twice, 2 * net(torch.ones(1, 1)))
    True
    """

    def divide_outputs_by(r: float) -> Any:
        return lambda layer, inputs, outputs: outputs / r

    hooks = [network.get_submodule(name).register_forward_hook(divide_outputs_by(r)) for name, r in ratios.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def fold_scaling_into_weights(weights: StateDict, ratios: Mapping[str, float]) -> dict[str, Tensor]:
    """Returns weights that give the outputs of `weights` inside `divide_layer_outputs_by_ratio`.

    >>> import torch
    >>> fold_scaling_into_weights({"weight": torch.tensor([[1.0]]), "other.bias": torch.tensor([1.0])}, {"": 0.5})
    {'weight': tensor([[2.]]), 'other.bias': tensor([1.])}
    """
    return {n: t / ratios[layer] if (layer := n.rpartition(".")[0]) in ratios else t for n, t in weights.items()}
