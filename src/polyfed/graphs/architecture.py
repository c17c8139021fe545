"""Defines the graph of a network's layers, 𝒜 = (V, E, X) (FLHA-GHN, section 4.2): nodes, their types and their
parameters.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Literal, cast, final, get_args

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.values.number_checks import is_whole_number

PaperKind = Literal[
    "conv1d", "conv2d", "conv3d", "linear", "batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"
]
RecurrentKind = Literal[
    "lstm_input", "lstm_hidden", "lstm_projection", "gru_input", "gru_hidden", "rnn_input", "rnn_hidden"
]
TableKind = Literal["scalar", "vector", "scale", "prelu", "table", "scale_table"]
LayerKind = (
    PaperKind
    | Literal["conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "embedding", "positions"]
    | RecurrentKind
    | TableKind
)
PAPER_KINDS: tuple[PaperKind, ...] = get_args(PaperKind)
"""The kinds that the paper has, convolutions and linear layers, and norm layers."""
TABLE_KINDS: tuple[TableKind, ...] = get_args(TableKind)
"""Kinds of parameters that belong to no layer and are described by their shape: "scale" is a vector that outputs are
multiplied by, "scale_table" such a table, "prelu" the slopes of `nn.PReLU`."""
RECURRENT_KINDS: tuple[RecurrentKind, ...] = get_args(RecurrentKind)
"""Kinds of the matrices of recurrent layers, by the input and by the hidden state; rows are gates times units."""
LAYER_KINDS: tuple[LayerKind, ...] = (
    *PAPER_KINDS, "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "embedding", "positions", *RECURRENT_KINDS,
    *TABLE_KINDS,
)  # fmt: skip
"""All kinds of layers. "embedding" is a table whose rows the input chooses (words), "positions" one whose rows depend on the
place alone."""
ParameterRole = Literal["weight", "bias", "scale", "shift"]
NodeMark = Literal["add", "concat", "other"]
NONE = "none"
"""The activation of a layer whose output reaches the next layers, or the end, without one."""
ACTIVATIONS = (
    "celu", "elu", "erf", "gelu", "glu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid",
    "mish", "prelu", "relu", "relu6", "rrelu", "selu", "sigmoid", "silu", "sin", "softplus", "softshrink", "softsign",
    "tanh", "tanhshrink", "threshold",
)  # fmt: skip
"""Names of the activations that layer types distinguish. Their constants (a slope, say) are not part of a type."""
NODE_MARKS: tuple[NodeMark, ...] = ("add", "concat", "other")
"""Types of nodes without generated weights: the two joins, and "other", a layer outside the catalogue. Messages of the graph
neural network pass through all of them."""

TRANSPOSED = "weight_transposed"
"""Role of a linear layer's weight in a network that keeps it with shape (c_in, c_out), as transformers' Conv1D does."""

_KEY = re.compile(
    r"([a-z0-9_]+)-(\d+)-(\d+)-k([\dx]*)-s([\dx]*)-g(\d+)-b([01])-d([\dx]*)-([a-z0-9_+]+)(?:-([a-z]+_norm)-b([01]))?"
)


@final
@dataclass(frozen=True, order=True)
class LayerType:
    """Describes a layer's kind and sizes; a hypernetwork has one head for each type.

    Args:
        kind: one of `LAYER_KINDS`.
        c_in, c_out: input and output channels or features; for a norm layer or a vector, both are the number of its
            entries, and for an embedding the numbers of rows and of columns.
        kernel, stride: one entry per dimension of the convolution; empty for the other kinds, but for a table, whose
            shape is (c_out, c_in, *kernel).
        groups: groups of the convolution; 1 for the other kinds.
        bias: whether the layer has a bias (a norm layer: a shift).
        dilation: one entry per dimension of the convolution; () means 1 in each dimension.
        activation: the first activation that the output reaches before another layer, through norms, joins, pooling and
            reshapes alone; "none", or several joined by "+", sorted (section 4.2: a type specifies the activation).
        norm: kind of the norm layer that is folded into this layer (`contraction.fold_norms_into_previous_layers`),
            or "none".
        norm_bias: whether that norm has a shift.
        start: mean and standard deviation of the weight when the network is built, or None if unknown; not compared, since
            it only says how large a generated weight is at first.

    Raises:
        UserError: an unknown kind or activation, or numbers that do not describe a layer.

    >>> conv = LayerType("conv2d", 64, 128, (3, 3), (2, 2), 1, False, activation="relu")
    >>> conv.key, conv.parameter_shapes, conv.fan_in
    ('conv2d-64-128-k3x3-s2x2-g1-b0-d1x1-relu', {'weight': (128, 64, 3, 3)}, 576)
    """

    kind: LayerKind
    c_in: int
    c_out: int
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    groups: int = 1
    bias: bool = True
    dilation: tuple[int, ...] = ()
    activation: str = NONE
    norm: str = NONE
    norm_bias: bool = False
    start: tuple[float, float] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in LAYER_KINDS:
            raise UserError(f"unknown kind of layer {self.kind!r}; {did_you_mean(str(self.kind), LAYER_KINDS)}")
        if not self.dilation and not self.has_free_shape:
            object.__setattr__(self, "dilation", (1,) * len(self.kernel))
        numbers = (self.c_in, self.c_out, self.groups, *self.kernel, *self.stride, *self.dilation)
        if not all(is_whole_number(n, 1) for n in numbers):
            raise UserError(f"a {self.kind} layer needs whole numbers of at least 1, got {self}")
        dimensions = int(self.kind[-2]) if self.is_conv else 0
        lengths = {len(self.kernel), len(self.stride), len(self.dilation)}
        if lengths != {dimensions} and (not self.has_free_shape or self.stride or self.dilation):
            raise UserError(f"a {self.kind} layer has {dimensions} entries in kernel, stride and dilation, got {self}")
        if not self.is_conv and self.groups != 1:
            raise UserError(f"a {self.kind} layer has groups=1, got {self.groups}")
        if self.c_in % self.groups or self.c_out % self.groups:
            raise UserError(f"groups={self.groups} does not divide {self.c_in} and {self.c_out} channels, of {self}")
        if (self.is_norm or (self.is_table and not self.has_free_shape)) and self.c_in != self.c_out:
            raise UserError(f"a {self.kind} layer has as many channels after it as before, got {self}")
        if self.bias and (self.is_table or self.is_lookup or self.kind == "lstm_projection"):
            raise UserError(f"a {self.kind} has no bias (bias=False), got {self}")
        if self.start is not None and not (
            len(self.start) == 2 and all(map(math.isfinite, self.start)) and self.start[1] >= 0
        ):
            raise UserError(f"start is a mean and a standard deviation, got {self.start}")
        if self.norm != NONE and (self.is_norm or not (self.norm in LAYER_KINDS and self.norm.endswith("_norm"))):
            norms = [kind for kind in LAYER_KINDS if kind.endswith("_norm")]
            raise UserError(f"the norm of a layer is 'none' or one of {', '.join(norms)}, of a norm none; got {self}")
        if self.norm_bias and self.norm == NONE:
            raise UserError(f"norm_bias is for a layer with a norm, got {self}")
        names = self.activation.split("+") if isinstance(self.activation, str) else []
        if self.activation != NONE and not (names and sorted(set(names)) == names and set(names) <= set(ACTIVATIONS)):
            raise UserError(
                f"unknown activation {self.activation!r}: give 'none', or names of {', '.join(ACTIVATIONS)}; join several "
                "with + in this order"
            )

    @property
    def is_conv(self) -> bool:
        """Returns whether the layer is a convolution, or a transposed one."""
        return self.kind.startswith("conv")

    @property
    def is_table(self) -> bool:
        """Returns whether this is a parameter that belongs to no layer, described by its shape."""
        return self.kind in TABLE_KINDS

    @property
    def has_free_shape(self) -> bool:
        """Returns whether the layer is a bare parameter (a table) with two or more dimensions."""
        return self.kind in ("table", "scale_table")

    @property
    def is_lookup(self) -> bool:
        """Returns whether the layer is a table whose rows the input chooses, such as an embedding."""
        return self.kind in ("embedding", "positions")

    @property
    def is_matrix(self) -> bool:
        """Returns whether the layer is linear or a convolution: it has an activation, perhaps a norm."""
        return self.is_conv or self.kind == "linear"

    @property
    def is_norm(self) -> bool:
        """Returns whether the layer is a norm layer, whose weight is a scale near 1."""
        return self.kind.endswith("_norm")

    @property
    def parameter_shapes(self) -> dict[ParameterRole, tuple[int, ...]]:
        """Returns `{role: shape}` for the layer's parameters, with roles such as "weight" and "bias"."""
        weight: tuple[int, ...] = (self.c_out, self.c_in // self.groups, *self.kernel)
        if self.is_norm or (self.is_table and not self.has_free_shape):
            weight = () if self.kind == "scalar" else (self.c_out,)
        elif self.is_lookup or self.kind.startswith("conv_transpose"):
            weight = (self.c_in, self.c_out // self.groups, *self.kernel)
        shapes: dict[ParameterRole, tuple[int, ...]] = {"weight": weight}
        vectors: dict[ParameterRole, bool] = {"bias": self.bias, "scale": self.norm != NONE, "shift": self.norm_bias}
        return shapes | {role: (self.c_out,) for role, present in vectors.items() if present}

    @property
    def fan_in(self) -> int:
        """Returns the number of inputs from which the layer computes one output, for Kaiming's variance 2/fan_in."""
        if self.kind.startswith("conv_transpose"):
            return max(1, self.c_in // self.groups * math.prod(self.kernel) // math.prod(self.stride))
        return 1 if self.is_norm else self.c_in // self.groups * math.prod(self.kernel)

    @property
    def start_or_default(self) -> tuple[float, float]:
        """Returns mean and standard deviation of the weight at the start: `start`, or torch's usual ones if unknown."""
        if self.start is not None:
            return self.start
        if self.kind in ("scale", "scale_table", "prelu"):
            return (0.25 if self.kind == "prelu" else 1.0), 0.0
        if self.kind == "embedding":
            return 0.0, 1.0
        if self.is_table or self.kind == "positions":
            return 0.0, 0.02
        inputs = self.fan_in
        if self.kind in RECURRENT_KINDS:  # torch's bound is 1/√units for all their matrices
            inputs = (
                self.c_in if self.kind == "lstm_projection" else self.c_out // {"l": 4, "g": 3, "r": 1}[self.kind[0]]
            )
        return 0.0, (3 * inputs) ** -0.5

    @property
    def key(self) -> str:
        """Returns the layer type as text without dots, for use in names of tensors."""
        k, s, d = ("x".join(map(str, numbers)) for numbers in (self.kernel, self.stride, self.dilation))
        start = f"{self.kind}-{self.c_in}-{self.c_out}-k{k}-s{s}-g{self.groups}-b{int(self.bias)}"
        norm = "" if self.norm == NONE else f"-{self.norm}-b{int(self.norm_bias)}"
        return f"{start}-d{d}-{self.activation}{norm}"

    @classmethod
    def from_key(cls, key: str, start: tuple[float, float] | None = None) -> "LayerType":
        """Returns the layer type that has this `key`.

        Raises:
            UserError: the key is malformed.

        >>> LayerType.from_key("linear-64-10-k-s-g1-b1-d-tanh").activation
        'tanh'
        """
        match = _KEY.fullmatch(key)
        if match is None:
            raise UserError(f"{key!r} is not a layer type; an example is 'conv2d-64-128-k3x3-s2x2-g1-b0-d1x1-relu'")
        kind, c_in, c_out, kernel, stride, groups, bias, dilation, activation, norm, shift = match.groups()
        texts = (kernel, stride, dilation)
        k, s, d = (tuple(int(n) for n in numbers.split("x")) if numbers else () for numbers in texts)
        numbers = (int(c_in), int(c_out), k, s, int(groups))
        return cls(cast(LayerKind, kind), *numbers, bias == "1", d, activation, norm or NONE, shift == "1", start)


def unique_types(types: Iterable[LayerType]) -> tuple[LayerType, ...]:
    """Returns layer types sorted, each once; equal types get the mean of their means and variances as their `start`."""
    starts: dict[LayerType, list[tuple[float, float]]] = {}
    for kind in types:
        starts.setdefault(kind, []).extend(() if kind.start is None else (kind.start,))
    return tuple(
        kind
        if len(set(type_starts)) <= 1 and type_starts == ([] if kind.start is None else [kind.start])
        else replace(kind, start=(fmean(m for m, _ in type_starts), math.sqrt(fmean(s * s for _, s in type_starts))))
        for kind, type_starts in sorted(starts.items())
    )


@final
@dataclass(frozen=True)
class Node:
    """Describes a node of the graph: one use of a layer, or a "join" (a sum or concatenation).

    Attributes:
        name: path of the node in the model, for people.
        type: a layer type or a mark.
        parameters: the node's parameters. For a layer type role -> name in `named_parameters()`, for "other" name -> name,
            for joins nothing. A weight whose parameter has columns and rows exchanged has the role `TRANSPOSED`.
    """

    name: str
    type: LayerType | NodeMark
    parameters: Mapping[str, str]


@final
@dataclass(frozen=True)
class GeneratedWeights:
    """Describes one layer's generated weights: type, nodes that use it, and `{role: parameter}`."""

    type: LayerType
    nodes: tuple[int, ...]
    parameters: Mapping[str, str]


@final
@dataclass(frozen=True)
class ArchitectureGraph:
    """Describes a network as a graph of its layers, with edges along the data flow.

    Attributes:
        nodes: the nodes in the order in which they run.
        edges: (from, to) as positions in `nodes`: the output of the first node reaches the second through operations
            without a node only (activations, pooling, reshapes). Each pair once, sorted.
        parameter_sizes: number of entries of every parameter, by its name in `named_parameters()`.
        local_reasons: name -> reason, for each parameter that cannot be generated and stays with the client.
        tracer: the tracer that could follow the network, "torch.fx", "torch.export" or "torch.fx on an example".
        stored_head: `head_parameter_names` of the original graph, if contraction removed nodes or edges that determine them.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    parameter_sizes: Mapping[str, int]
    local_reasons: Mapping[str, str]
    tracer: str = "torch.fx"
    stored_head: frozenset[str] | None = None

    @cached_property
    def generated_weights(self) -> tuple[GeneratedWeights, ...]:
        """Returns the sets of weights to generate; nodes that share parameters share one set."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for position, node in enumerate(self.nodes):
            if isinstance(node.type, LayerType):
                groups.setdefault(tuple(sorted(node.parameters.values())), []).append(position)
        return tuple(
            GeneratedWeights(self.nodes[members[0]].type, tuple(members), self.nodes[members[0]].parameters)  # type: ignore[arg-type]
            for members in groups.values()
        )

    @cached_property
    def head_parameter_names(self) -> frozenset[str]:
        """Returns the parameter names of the network's last layers, those that no other layer follows.

        A norm, a vector or factors at the end belong to the head together with the layers before them. Where branches join
        last, the last layer of each branch is in the head.
        """
        if self.stored_head is not None:
            return self.stored_head
        before: dict[int, list[int]] = {position: [] for position in range(len(self.nodes))}
        for start, end in self.edges:
            before[end].append(start)
        waiting = sorted(before.keys() - {start for start, _ in self.edges})
        visited, names = set(waiting), set[str]()
        while waiting:
            position = waiting.pop()
            node = self.nodes[position]
            names |= set(node.parameters.values())
            kind = node.type
            passes = isinstance(kind, LayerType) and (kind.is_norm or (kind.is_table and kind.kind != "table"))
            if passes or node.type in ("add", "concat"):
                waiting += [earlier for earlier in before[position] if earlier not in visited]
                visited |= set(waiting)
        return frozenset(names)

    @property
    def layer_types(self) -> tuple[LayerType, ...]:
        """Returns the types of the layers in the graph, sorted, each once."""
        return unique_types(node.type for node in self.nodes if isinstance(node.type, LayerType))

    @property
    def num_parameters_in_layers(self) -> int:
        """Returns how many numbers of the network belong to layers that can be generated, without tables."""
        typed = [s for s in self.generated_weights if not s.type.is_table]
        return sum(self.parameter_sizes[name] for weight_set in typed for name in weight_set.parameters.values())

    @property
    def coverage(self) -> float:
        """Returns the share, from 0 to 1, of the network's parameters that a hypernetwork can generate."""
        total = sum(self.parameter_sizes.values())
        return self.num_generated / total if total else 0.0

    @property
    def num_generated(self) -> int:
        """Returns how many of the network's numbers a hypernetwork can generate."""
        return sum(size for name, size in self.parameter_sizes.items() if name not in self.local_reasons)

    def restrict_to_types(self, types: Collection[LayerType]) -> "ArchitectureGraph":
        """Returns a graph that generates layers of these types only; others become "other"."""
        allowed = set(types)
        if allowed.issuperset(self.layer_types):
            return self
        nodes, local = list(self.nodes), dict(self.local_reasons)
        for position, node in enumerate(self.nodes):
            if isinstance(node.type, LayerType) and node.type not in allowed:
                parameters = {name: name for name in node.parameters.values()}
                nodes[position] = replace(node, type="other", parameters=parameters)
                reason = (
                    f"the layer catalogue lacks its type {node.type.key}; take a layer of one of its types, or train with a "
                    "catalogue that has it"
                )
                local |= dict.fromkeys(parameters, reason)
        return replace(self, nodes=tuple(nodes), local_reasons=local)
