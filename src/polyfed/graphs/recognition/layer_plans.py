"""Recognises layers beyond the paper's convolutions, linear and norm layers in a traced program: recurrent layers,
attention, embeddings, transposed convolutions, computed weights and single parameters.

Such an operation may be several nodes of the graph. A plan lists them, with the tensors that are their parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, final

from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from polyfed.graphs.architecture import TRANSPOSED, LayerKind, LayerType, RecurrentKind
from polyfed.graphs.recognition.layer_recognition import (
    LayerOccurrence,
    build_layer_use,
    layer_kind,
    torch_operation_name,
)

_TRANSPOSED_CONVOLUTIONS: tuple[tuple[type[nn.Module], LayerKind], ...] = (
    (nn.ConvTranspose1d, "conv_transpose1d"),
    (nn.ConvTranspose2d, "conv_transpose2d"),
    (nn.ConvTranspose3d, "conv_transpose3d"),
)
_Cell = Literal["lstm", "gru", "rnn"]
_GATES: dict[_Cell, int] = {"lstm": 4, "gru": 3, "rnn": 1}


@final
@dataclass(frozen=True)
class PlannedNode:
    """Describes a node that an operation of a traced program becomes.

    Attributes:
        type: the layer's type.
        tensors: role -> the tensor that is the parameter.
        part: text to add to the operation's name; "" for none.
        after: positions in the plan of the nodes from which its input comes; None where it comes from the operation's
            operands.
    """

    type: LayerType
    tensors: Mapping[str, Tensor]
    part: str = ""
    after: tuple[int, ...] | None = None


@final
@dataclass(frozen=True)
class NodePlan:
    """Lists the nodes that an operation becomes, and the positions of those from which its output comes."""

    nodes: tuple[PlannedNode, ...]
    ends: tuple[int, ...]


def plan_operation(
    n: fx.Node, module: nn.Module | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> NodePlan | None:
    """Returns the nodes that an operation becomes; None if it is not a layer that this file knows.

    Args:
        n: an operation of the traced program.
        module: the module that it calls; None if it calls a function.
        args, kwargs: the values with which it is called.

    >>> graph = fx.symbolic_trace(nn.Sequential(nn.GRU(2, 3))).graph
    >>> plan = plan_operation(list(graph.nodes)[1], nn.GRU(2, 3), (), {})
    >>> [node.type.key for node in plan.nodes], plan.ends
    (['gru_input-2-9-k-s-g1-b1-d-none', 'gru_hidden-3-9-k-s-g1-b1-d-none'], (1,))
    """
    return _plan_call(n, args, kwargs) if module is None else _plan_module(module)


def types_by_shape(
    tensors: Mapping[str, Tensor], module: nn.Module | None = None, operation_name: str = ""
) -> dict[str, LayerType | None]:
    """Returns `{name: type}` for the parameters of an operation that belong to no layer; None for one without entries.

    Factors of a product, the scales of a norm and the slopes of a PReLU have kinds of their own, since they start near other
    values.

    Args:
        tensors: name -> parameter, in the order in which the operation takes them.
        module: the module that the operation calls, or None.
        operation_name: torch's name of the function that the operation calls, or "".
    """
    norm = operation_name.endswith("_norm") or (module is not None and (layer_kind(module) or "").endswith("_norm"))
    use: Literal["", "scale", "prelu"] = "scale" if operation_name in ("mul", "imul") else ""
    if operation_name in ("prelu", "_prelu_kernel"):
        use = "prelu"
    return {name: type_by_shape(t, "scale" if norm and not k else use) for k, (name, t) in enumerate(tensors.items())}


def type_by_shape(tensor: Tensor, use: Literal["", "scale", "prelu"] = "") -> LayerType | None:
    """Returns the type of a parameter that belongs to no layer; None if it has no entries.

    Args:
        tensor: the parameter.
        use: "scale" for factors, "prelu" for slopes, "" for all others.

    >>> import torch
    >>> [type_by_shape(torch.zeros(shape)).key for shape in [(), (3,), (2, 3, 4)]]
    ['scalar-1-1-k-s-g1-b0-d-none', 'vector-3-3-k-s-g1-b0-d-none', 'table-3-2-k4-s-g1-b0-d-none']
    """
    shape = tuple(tensor.shape)
    if 0 in shape:
        return None
    if not shape:
        return LayerType("scalar", 1, 1, bias=False)
    if len(shape) == 1:
        return LayerType(use or "vector", *shape, *shape, bias=False)
    return LayerType("scale_table" if use == "scale" else "table", shape[1], shape[0], shape[2:], bias=False)


def _plan_module(module: nn.Module) -> NodePlan | None:
    if isinstance(module, nn.RNNBase) and not is_parametrized(module):
        cell = cast(_Cell, module.mode.partition("_")[0].lower())
        tensors = [getattr(module, name) for names in module._all_weights for name in names]
        sizes = (module.num_layers, 2 if module.bidirectional else 1)
        return plan_recurrent_layers(cell, tensors, module.bias, *sizes)
    if isinstance(module, nn.RNNCellBase) and not is_parametrized(module):
        tensors = [getattr(module, name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        cell = cast(_Cell, type(module).__name__.removesuffix("Cell").lower())
        if cell not in _GATES:  # a class that was derived from one of torch's
            return None
        return plan_recurrent_layers(cell, [t for t in tensors if t is not None], module.bias, 1, 1)
    if isinstance(module, nn.MultiheadAttention) and not is_parametrized(module):
        return _plan_attention(module)
    if isinstance(module, nn.PReLU):
        return _plan_node(type_by_shape(module.weight, "prelu"), {"weight": module.weight})
    kind = layer_kind(module) or next(
        (kind for part, kind in _TRANSPOSED_CONVOLUTIONS if isinstance(module, part)), None
    )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        weight = _trained_weight(module)
        return None if weight is None else _plan_lookup(weight)
    if kind is None:
        return None
    weight, bias = _trained_weight(module), getattr(module, "bias", None)
    tensors_by_role = {"weight": weight, "bias": bias if isinstance(bias, nn.Parameter) else None}
    if isinstance(bias, Tensor) and tensors_by_role["bias"] is None:
        return None
    numbers = [getattr(module, name, 1) for name in ("stride", "groups", "dilation")]
    layer = build_layer_use(kind, tensors_by_role, *numbers)  # type: ignore[arg-type]
    return None if layer is None else _plan_node(layer.type, _tensor_by_role(layer))


def _trained_weight(module: nn.Module) -> Tensor | None:
    """Returns the parameter of a layer's weight: the weight, or the last of its shape if it is computed."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, nn.Parameter) or not isinstance(weight, Tensor):
        return weight
    of_shape = [p for name, p in module.named_parameters() if p.shape == weight.shape and name != "bias"]
    return of_shape[-1] if of_shape else None


def _plan_call(n: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NodePlan | None:
    name = torch_operation_name(n)

    def argument(position: int, keyword: str, default: Any = None) -> Any:
        return args[position] if position < len(args) else kwargs.get(keyword, default)

    if name.strip("_") in ("embedding", "embedding_bag"):
        # The Python functions take the weight second, the operators first.
        weight = argument(1 if n.target in (F.embedding, F.embedding_bag) else 0, "weight")
        return _plan_lookup(weight) if isinstance(weight, nn.Parameter) and weight.dim() == 2 else None
    if name in ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"):
        tensors: dict[Any, Any] = {"weight": argument(1, "weight"), "bias": argument(2, "bias")}
        numbers = (argument(3, "stride", 1), argument(6, "groups", 1), argument(7, "dilation", 1))
        layer = build_layer_use(cast(LayerKind, name), tensors, *numbers)
        return None if layer is None else _plan_node(layer.type, _tensor_by_role(layer))
    if name == "addmm" and not kwargs.keys() & {"alpha", "beta"}:  # transformers' Conv1D
        bias, x, weight = argument(0, "input"), argument(1, "mat1"), argument(2, "mat2")
        if isinstance(weight, nn.Parameter) and weight.shape[1:] == bias.shape and not isinstance(x, nn.Parameter):
            kind = LayerType("linear", *weight.shape)
            return _plan_node(kind, {TRANSPOSED: weight, "bias": bias})
        return None
    cell = cast(_Cell, name.partition("_")[0])
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and len(args) == 9:
        # Padded sequences: input, state, weights; packed ones: data, lengths, state, weights. Both end with "bidirectional",
        # padded ones with "batch first" after it.
        tensors_of_layers, biased, layers, *more = args[2 if isinstance(args[3], bool) else 3 :]
        return plan_recurrent_layers(cell, list(tensors_of_layers), biased, layers, 2 if more[2] else 1)
    if name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"):
        weights = [tensor for tensor in args[2:] if isinstance(tensor, Tensor)]
        return plan_recurrent_layers(cell, weights, len(weights) == 4, 1, 1)
    return None


def _tensor_by_role(layer: LayerOccurrence) -> dict[str, Tensor]:
    return {str(role): tensor for role, tensor in layer.parameters.items()}


def _plan_node(kind: LayerType | None, tensors: Mapping[str, Tensor]) -> NodePlan | None:
    return None if kind is None else NodePlan((PlannedNode(kind, tensors),), (0,))


def _plan_lookup(weight: Tensor) -> NodePlan | None:
    rows, columns = weight.shape
    return (
        _plan_node(LayerType("embedding", rows, columns, bias=False), {"weight": weight}) if rows and columns else None
    )


def plan_recurrent_layers(
    cell: _Cell, tensors: Sequence[Tensor], has_bias: bool, layers: int, directions: int
) -> NodePlan | None:
    """Returns nodes of an LSTM, GRU or RNN, several for each layer and direction.

    One is for the input's matrix, one for the hidden state's, and one for an LSTM's projection, if there is one.

    Args:
        cell: kind of the cell.
        tensors: parameters in torch's order.
        has_bias: whether there are biases.
        layers: how many layers.
        directions: 2 for a bidirectional layer, else 1.

    Returns:
        The plan, or None if the number of tensors is another one.
    """
    each = len(tensors) // (layers * directions)
    if each * layers * directions != len(tensors) or each not in ((4, 5) if has_bias else (2, 3)):
        return None
    planned: list[PlannedNode] = []
    before: tuple[int, ...] | None = None
    for layer in range(layers):
        ends: list[int] = []
        for direction in range(directions):
            first = (layer * directions + direction) * each
            matrices, biases = tensors[first : first + 2], tensors[first + 2 : first + 4] if has_bias else ()
            after = before
            place = f"layer {layer}" * (layers > 1) + " reverse" * direction
            for number, (matrix, name) in enumerate(zip(matrices, ("input", "hidden"), strict=True)):
                roles = {"weight": matrix, **({"bias": biases[number]} if has_bias else {})}
                kind = cast(RecurrentKind, f"{cell}_{name}")
                width = LayerType(kind, matrix.shape[1], matrix.shape[0], bias=has_bias)
                planned.append(PlannedNode(width, roles, f"{place} {name}".strip(), after))
                after = (len(planned) - 1,)
            if each in (3, 5):
                projection = tensors[first + each - 1]
                width = LayerType("lstm_projection", projection.shape[1], projection.shape[0], bias=False)
                planned.append(PlannedNode(width, {"weight": projection}, f"{place} projection".strip(), after))
            ends.append(len(planned) - 1)
        before = tuple(ends)
    return NodePlan(tuple(planned), before or ())


def _plan_attention(module: nn.MultiheadAttention) -> NodePlan | None:
    """Returns the nodes of torch's attention: linear layers for queries, keys and values, and one for the output."""
    bias, joint = module.in_proj_bias, cast(Tensor | None, module.in_proj_weight)
    planned: list[PlannedNode] = []
    if joint is not None:
        roles = {"weight": joint, **({} if bias is None else {"bias": bias})}
        width = LayerType("linear", module.embed_dim, 3 * module.embed_dim, bias=bias is not None)
        planned.append(PlannedNode(width, roles, "in_proj"))
    else:
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            weight: Tensor = getattr(module, name)
            planned.append(
                PlannedNode(LayerType("linear", weight.shape[1], weight.shape[0], bias=False), {"weight": weight}, name)
            )
    out = dict(module.out_proj.named_parameters())
    width = LayerType("linear", module.embed_dim, module.embed_dim, bias="bias" in out)
    planned.append(PlannedNode(width, out, "out_proj", tuple(range(len(planned)))))
    return NodePlan(tuple(planned), (len(planned) - 1,))
