"""Recognises which operations of a traced program are layers that the catalogue can describe, or joins (sums and
concatenations).

It serves both tracers: torch.fx, whose programs call modules and torch's Python functions, and torch.export, whose programs
call ATen operators.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from polyfed.graphs.architecture import PAPER_KINDS, LayerKind, LayerType, ParameterRole

# Transposed convolutions are not derived from these; SyncBatchNorm and whatever a user derives are.
_CLASSES: tuple[tuple[tuple[type[nn.Module], ...], LayerKind], ...] = (
    ((nn.Conv1d,), "conv1d"),
    ((nn.Conv2d,), "conv2d"),
    ((nn.Conv3d,), "conv3d"),
    ((nn.Linear,), "linear"),
    ((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), "batch_norm"),
    ((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), "instance_norm"),
    ((nn.GroupNorm,), "group_norm"),
    ((nn.LayerNorm,), "layer_norm"),
    ((nn.RMSNorm,), "rms_norm"),
)
_JOINS: dict[str, Literal["add", "concat"]] = {
    **dict.fromkeys(("add", "iadd", "sub", "isub", "rsub", "subtract"), "add"),
    **dict.fromkeys(("cat", "concat", "concatenate", "hstack", "vstack", "dstack", "stack"), "concat"),
    **dict.fromkeys(("column_stack", "row_stack"), "concat"),
}
# Operations that use only the shape and type of their operands: of every operand (_NEW), or of all but the first (_AS).
_NEW = {f"{what}_like" for what in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")}
_NEW |= {f"new_{what}" for what in ("empty", "full", "ones", "zeros")}
_AS = {"expand_as", "reshape_as", "type_as", "view_as"}


@final
@dataclass(frozen=True)
class LayerOccurrence:
    """Describes one use of a layer: its type, and the tensors that are its parameters."""

    type: LayerType
    parameters: Mapping[ParameterRole, Tensor]


def layer_kind(module: nn.Module) -> LayerKind | None:
    """Returns a layer's kind ("conv2d", "linear", ...) by class or base; None if not in `PAPER_KINDS`.

    >>> layer_kind(nn.SyncBatchNorm(3)), layer_kind(nn.ConvTranspose2d(1, 1, 1))
    ('batch_norm', None)
    """
    return next((kind for classes, kind in _CLASSES if isinstance(module, classes)), None)


def has_only_weight_and_bias(module: nn.Module) -> bool:
    """Returns whether a module's only parameters are `weight` and `bias`, without parametrisation."""
    return not is_parametrized(module) and {name for name, _ in module.named_parameters()} <= {"weight", "bias"}


def layer_of_module(module: nn.Module) -> LayerOccurrence | None:
    """Returns a module's layer type and parameters; None for an unknown kind or further parameters.

    >>> layer_of_module(nn.Conv1d(4, 6, 3, stride=2, groups=2)).type.key, layer_of_module(nn.PReLU())
    ('conv1d-4-6-k3-s2-g2-b1-d1-none', None)
    """
    kind = layer_kind(module)
    if kind is None or not has_only_weight_and_bias(module):
        return None
    tensors: dict[ParameterRole, Any] = {
        "weight": getattr(module, "weight", None),
        "bias": getattr(module, "bias", None),
    }
    stride, groups, dilation = (getattr(module, name, 1) for name in ("stride", "groups", "dilation"))
    return build_layer_use(kind, tensors, stride, groups, dilation)


def layer_of_call(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LayerOccurrence | None:
    """Returns type and parameters of a function's layer (`F.linear`, say); None if it is none.

    Args:
        node: an operation of the traced program.
        args, kwargs: the values with which the operation is called.
    """
    name = torch_operation_name(node)
    if name not in PAPER_KINDS:
        return None
    kind: LayerKind = name

    def argument(position: int, keyword: str, default: Any = None) -> Any:
        return args[position] if position < len(args) else kwargs.get(keyword, default)

    weight_at = {"layer_norm": 2, "group_norm": 2, "rms_norm": 2}.get(name, 1)
    if node.target in (F.batch_norm, F.instance_norm):
        weight_at = 3  # unlike the operators, the Python functions take the running statistics first
    tensors: dict[ParameterRole, Any] = {"weight": argument(weight_at, "weight")}
    tensors["bias"] = None if name == "rms_norm" else argument(weight_at + 1, "bias")
    return build_layer_use(
        kind, tensors, argument(3, "stride", 1), argument(6, "groups", 1), argument(5, "dilation", 1)
    )


def build_layer_use(
    kind: LayerKind,
    tensors: Mapping[ParameterRole, Any],
    stride: int | Sequence[int],
    groups: int,
    dilation: int | Sequence[int],
) -> LayerOccurrence | None:
    """Returns the use of a layer of this kind with these tensors; None if their shapes do not fit the kind."""
    parameters = {role: value for role, value in tensors.items() if isinstance(value, Tensor)}
    if "weight" not in parameters:
        return None
    shape = tuple(parameters["weight"].shape)
    dimensions = int(kind[-2]) if kind.startswith("conv") else 0
    if len(shape) != (1 if kind.endswith("_norm") else 2 + dimensions) or 0 in shape:
        return None
    groups = groups if dimensions else 1
    c_in = shape[0] if kind.endswith("_norm") else shape[1] * groups
    steps, gaps = _per_dimension(stride, dimensions), _per_dimension(dilation, dimensions)
    c_out = shape[0]
    if kind.startswith("conv_transpose"):
        c_in, c_out = shape[0], shape[1] * groups
    if c_in % groups or c_out % groups:
        return None
    layer = LayerType(kind, c_in, c_out, shape[2:], steps, groups, "bias" in parameters, gaps)
    fits = {role: tuple(value.shape) for role, value in parameters.items()} == layer.parameter_shapes
    return LayerOccurrence(layer, parameters) if fits else None


def _per_dimension(numbers: int | Sequence[int], dimensions: int) -> tuple[int, ...]:
    """Expands an argument of a torch layer (one number, or one per dimension) to one number per dimension."""
    if not dimensions:
        return ()
    values = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    return values * dimensions if len(values) == 1 else values


def join_kind(node: fx.Node) -> Literal["add", "concat"] | None:
    """Returns "add" for a sum or difference, "concat" for a concatenation; None for other operations."""
    return _JOINS.get(torch_operation_name(node))


def operand_nodes(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes of the traced program whose values an operation uses, each once."""
    name = torch_operation_name(node)
    return [] if name in _NEW else node.all_input_nodes[:1] if name in _AS else node.all_input_nodes


def torch_operation_name(node: fx.Node) -> str:
    """Returns torch's name of an operation, the same for function, method, operator and in-place.

    Returns "" for calls of modules and of functions that are not torch's.
    """
    if node.op == "call_method":
        return str(node.target).rstrip("_")
    if node.op != "call_function":
        return ""
    target: Any = node.target
    name = getattr(target, "__name__", "")
    if isinstance(target, torch._ops.OpOverload):
        return name.partition(".")[0].rstrip("_") if target.namespace == "aten" else ""
    return name if any(getattr(home, name, None) is target for home in (operator, torch, F)) else ""
