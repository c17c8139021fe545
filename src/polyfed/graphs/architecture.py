"""The graph 𝒜 = (V, E, X) of a network's layers (FLHA-GHN, section 4.2): nodes, their types, and what they own."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, cast, final, get_args

from polyfed.core.errors import UserError, did_you_mean

LayerKind = Literal[
    "conv1d", "conv2d", "conv3d", "linear", "batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"
]
LAYER_KINDS: tuple[LayerKind, ...] = get_args(LayerKind)
ParameterRole = Literal["weight", "bias", "scale", "shift"]
NodeMark = Literal["add", "concat", "other"]
NONE = "none"
"""The activation of a layer whose output reaches the next layers, or the end, without one."""
ACTIVATIONS = (
    "celu", "elu", "erf", "gelu", "glu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid",
    "mish", "prelu", "relu", "relu6", "rrelu", "selu", "sigmoid", "silu", "sin", "softplus", "softshrink", "softsign",
    "tanh", "tanhshrink", "threshold",
)  # fmt: skip
"""Activations that are told apart. Their own numbers (a slope, say) are not."""
NODE_MARKS: tuple[NodeMark, ...] = ("add", "concat", "other")
"""Nodes without generated weights: the two joins, and "other", a layer outside the catalogue, which passes messages on."""

_FORMER_KEY = re.compile(r"([a-z0-9_]+)-(\d+)-(\d+)-k([\dx]*)-s([\dx]*)-g(\d+)-b([01])")
_KEY = re.compile(_FORMER_KEY.pattern + r"-d([\dx]*)-([a-z0-9_+]+)(?:-([a-z]+_norm)-b([01]))?")


@final
@dataclass(frozen=True, order=True)
class LayerType:
    """What two layers must have in common so that one hypernetwork head H_l can generate both.

    Args:
        kind: one of `LAYER_KINDS`.
        c_in, c_out: channels or features; of a norm, the number of its scales, twice.
        kernel, stride: one entry a dimension of the convolution; empty for the other kinds.
        groups: of the convolution; 1 for the other kinds.
        bias: whether there is a bias (of a norm: a shift).
        dilation: as `stride`; () is 1 in each dimension.
        activation: the first one that the output reaches before another layer, through norms, joins, pooling and reshapes
            alone; "none", or several with "+" between them, sorted (section 4.2: a type specifies the activation).
        norm: the kind of the norm layer that is part of the layer (`contraction.fold_norms`), or "none".
        norm_bias: whether that norm has a shift.

    Raises:
        UserError: an unknown kind or activation, or numbers that make no layer.

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

    def __post_init__(self) -> None:
        if self.kind not in LAYER_KINDS:
            raise UserError(f"unknown kind of layer {self.kind!r}; {did_you_mean(str(self.kind), LAYER_KINDS)}")
        if not self.dilation:
            object.__setattr__(self, "dilation", (1,) * len(self.kernel))
        numbers = (self.c_in, self.c_out, self.groups, *self.kernel, *self.stride, *self.dilation)
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in numbers):
            raise UserError(f"a {self.kind} layer needs whole numbers of at least 1, got {self}")
        dimensions = int(self.kind[4]) if self.kind.startswith("conv") else 0
        if {len(self.kernel), len(self.stride), len(self.dilation)} != {dimensions}:
            raise UserError(f"a {self.kind} layer has {dimensions} entries in kernel, stride and dilation, got {self}")
        if not self.is_conv and self.groups != 1:
            raise UserError(f"a {self.kind} layer has groups=1, got {self.groups}")
        if self.c_in % self.groups or self.c_out % self.groups:
            raise UserError(f"groups={self.groups} does not divide {self.c_in} and {self.c_out} channels, of {self}")
        if self.is_norm and self.c_in != self.c_out:
            raise UserError(f"a {self.kind} layer has as many channels after it as before, got {self}")
        if self.norm != NONE and (self.is_norm or not (self.norm in LAYER_KINDS and self.norm.endswith("_norm"))):
            norms = [kind for kind in LAYER_KINDS if kind.endswith("_norm")]
            raise UserError(f"the norm of a layer is 'none' or one of {', '.join(norms)}, of a norm none; got {self}")
        if self.norm_bias and self.norm == NONE:
            raise UserError(f"norm_bias is for a layer with a norm, got {self}")
        names = self.activation.split("+") if isinstance(self.activation, str) else []
        if self.activation != NONE and not (names and sorted(set(names)) == names and set(names) <= set(ACTIVATIONS)):
            raise UserError(
                f"unknown activation {self.activation!r}: it is 'none', or of {', '.join(ACTIVATIONS)}; several have a + "
                "between them, in this order"
            )

    @property
    def is_conv(self) -> bool:
        """Whether it is a convolution."""
        return self.kind.startswith("conv")

    @property
    def is_norm(self) -> bool:
        """Whether it is a norm layer, whose weight is a scale near 1."""
        return self.kind.endswith("_norm")

    @property
    def parameter_shapes(self) -> dict[ParameterRole, tuple[int, ...]]:
        """The shapes of its parameters."""
        weight = (self.c_out,) if self.is_norm else (self.c_out, self.c_in // self.groups, *self.kernel)
        shapes: dict[ParameterRole, tuple[int, ...]] = {"weight": weight}
        vectors: dict[ParameterRole, bool] = {"bias": self.bias, "scale": self.norm != NONE, "shift": self.norm_bias}
        return shapes | {role: (self.c_out,) for role, present in vectors.items() if present}

    @property
    def fan_in(self) -> int:
        """Inputs of one output: of what Kaiming's variance 2/fan_in is made."""
        return 1 if self.is_norm else self.c_in // self.groups * math.prod(self.kernel)

    @property
    def key(self) -> str:
        """The type as text without dots, as part of tensors' names."""
        k, s, d = ("x".join(map(str, numbers)) for numbers in (self.kernel, self.stride, self.dilation))
        start = f"{self.kind}-{self.c_in}-{self.c_out}-k{k}-s{s}-g{self.groups}-b{int(self.bias)}"
        norm = "" if self.norm == NONE else f"-{self.norm}-b{int(self.norm_bias)}"
        return f"{start}-d{d}-{self.activation}{norm}"

    @classmethod
    def from_key(cls, key: str) -> "LayerType":
        """The type that has this key.

        Raises:
            UserError: no type has it, or only in a version in which types had no dilation and activation.

        >>> LayerType.from_key("linear-64-10-k-s-g1-b1-d-tanh").activation
        'tanh'
        """
        if _FORMER_KEY.fullmatch(key):
            raise UserError(
                f"{key!r} is a layer type without dilation and activation, of an earlier version of polyfed; train the "
                "hypernetwork anew"
            )
        match = _KEY.fullmatch(key)
        if match is None:
            raise UserError(f"{key!r} is no layer type; an example is 'conv2d-64-128-k3x3-s2x2-g1-b0-d1x1-relu'")
        kind, c_in, c_out, kernel, stride, groups, bias, dilation, activation, norm, shift = match.groups()
        texts = (kernel, stride, dilation)
        k, s, d = (tuple(int(n) for n in numbers.split("x")) if numbers else () for numbers in texts)
        numbers = (int(c_in), int(c_out), k, s, int(groups))
        return cls(cast(LayerKind, kind), *numbers, bias == "1", d, activation, norm or NONE, shift == "1")


@final
@dataclass(frozen=True)
class Node:
    """A vertex: one use of a layer, or a join.

    Attributes: `name`, where it is in the model, for people; `type`, a layer type or a mark; `parameters`, what it owns:
    for a layer type role -> name in `named_parameters()`, for "other" name -> name, for joins nothing.
    """

    name: str
    type: LayerType | NodeMark
    parameters: Mapping[str, str]


@final
@dataclass(frozen=True)
class GeneratedWeights:
    """One set of weights to generate: the layer type, the nodes that use it, and role -> name in `named_parameters()`."""

    type: LayerType
    nodes: tuple[int, ...]
    parameters: Mapping[str, str]


@final
@dataclass(frozen=True)
class ArchitectureGraph:
    """A network as a graph.

    Attributes:
        nodes: in the order in which they run.
        edges: (from, to), positions among `nodes`: the output of the first reaches the second through nothing but
            operations without a node (activations, pooling, reshapes). Each pair once, sorted.
        parameter_sizes: number of entries of every parameter, by its name in `named_parameters()`.
        local_reasons: name -> reason, for each parameter that cannot be generated and stays with the client.
        tracer: "torch.fx" or "torch.export": which of them could follow the network.
        stored_head: `head_parameters`, where the edges no longer say what it is.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    parameter_sizes: Mapping[str, int]
    local_reasons: Mapping[str, str]
    tracer: str = "torch.fx"
    stored_head: frozenset[str] | None = None

    @cached_property
    def generated_weights(self) -> tuple[GeneratedWeights, ...]:
        """The sets of weights to generate. Nodes that use the same parameters (shared weights) share one."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for position, node in enumerate(self.nodes):
            if isinstance(node.type, LayerType):
                groups.setdefault(tuple(sorted(node.parameters.values())), []).append(position)
        return tuple(
            GeneratedWeights(self.nodes[members[0]].type, tuple(members), self.nodes[members[0]].parameters)  # type: ignore[arg-type]
            for members in groups.values()
        )

    @cached_property
    def head_parameters(self) -> frozenset[str]:
        """Names of the parameters of the last layers, after which no other comes. A norm there goes along with the layers
        before it, and where branches join last, the last layer of each is in the head."""
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
            if node.type in ("add", "concat") or (isinstance(node.type, LayerType) and node.type.is_norm):
                waiting += [earlier for earlier in before[position] if earlier not in visited]
                visited |= set(waiting)
        return frozenset(names)

    @property
    def layer_types(self) -> tuple[LayerType, ...]:
        """The layer types that occur, sorted."""
        return tuple(sorted({node.type for node in self.nodes if isinstance(node.type, LayerType)}))

    @property
    def coverage(self) -> float:
        """Share of the parameters that is generated, from 0 to 1."""
        total = sum(self.parameter_sizes.values())
        return 1 - sum(self.parameter_sizes[name] for name in self.local_reasons) / total if total else 0.0

    def restrict_to(self, types: Collection[LayerType]) -> "ArchitectureGraph":
        """The same graph where only layers of these types are generated; the others become "other" and stay local."""
        allowed = set(types)
        if allowed.issuperset(self.layer_types):
            return self
        nodes, local = list(self.nodes), dict(self.local_reasons)
        for position, node in enumerate(self.nodes):
            if isinstance(node.type, LayerType) and node.type not in allowed:
                parameters = {name: name for name in node.parameters.values()}
                nodes[position] = replace(node, type="other", parameters=parameters)
                local |= dict.fromkeys(parameters, f"the layer catalogue lacks its type {node.type.key}")
        return replace(self, nodes=tuple(nodes), local_reasons=local)
