"""Which layer's output reaches which layer: what both tracers' programs become.

A tracer gives a program, a torch.fx graph with the module that holds its tensors. The program runs once on the example,
and next to each value the nodes are kept from which it comes. Real values rather than names tell a tensor from a size,
a parameter from a constant, and, by autograd's version counters, what an operation changed in place.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from polyfed.core.inputs import Inputs, answer, call, leaves
from polyfed.core.tied import first_names
from polyfed.graphs.activations import activation_of
from polyfed.graphs.architecture import NONE, LayerType, Mark, Node
from polyfed.graphs.layers import call_layer, join_of, kind_of, module_layer, operands, operation

_INPUT = -1  # stands for the model's input, which is no node, among the positions of nodes


@final
class Root(nn.Module):
    """Calls a model with its inputs and nothing else; the model's names begin with "model." in it.

    So optional arguments of the model's forward have their defaults, and a model that is itself a layer is called.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        """The model's output: its logits, where it names them."""
        return answer(call(self.model, x))


@final
@dataclass(frozen=True)
class Program:
    """What a tracer gives: operations, and the module in which they find parameters and submodules, named as in `Root`."""

    graph: fx.Graph
    module: nn.Module


@final
@dataclass(frozen=True)
class Flow:
    """The nodes from which the output is reached, in the order in which they run, and what else a run says.

    Attributes:
        nodes, edges: as in `ArchitectureGraph`.
        reasons: parameter of a node of type "other" -> why that is no layer of the catalogue.
        opaque: names of nodes in which there are layers that the tracer does not see.
        output: what the program computed.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    reasons: Mapping[str, str]
    opaque: tuple[str, ...]
    output: Any


def follow(program: Program, model: nn.Module, x: Inputs) -> Flow:
    """Runs a program on x and returns the flow between its layers.

    Args:
        program: traced from a copy of the model in `Root`.
        model: whose names and classes the flow speaks of.
        x: a batch of inputs, whose parts the program takes one by one; in-place operations may change them.
    """
    follower = _Follower(program, model)
    output = follower.run(*(part for _, part in leaves(x)))
    alive: set[int] = set()
    ahead = set(follower.ends)
    while ahead:
        alive |= ahead
        ahead = {start for start, end in follower.edges if end in ahead} - alive
    position = {old: new for new, old in enumerate(sorted(alive - {_INPUT}))}
    return Flow(
        _typed([(follower.nodes[old], follower.activations[old]) for old in position]),
        tuple(sorted((position[a], position[b]) for a, b in follower.edges if a in position and b in position)),
        {name: reason for old in position for name, reason in follower.reasons[old].items()},
        tuple(follower.nodes[old].name for old in position if old in follower.opaque),
        output,
    )


def _typed(found: Sequence[tuple[Node, Collection[str]]]) -> tuple[Node, ...]:
    """The nodes with the activations found of them in their types. Uses of shared weights have those of all uses: they get
    one set of weights, and so have one type."""
    shared: dict[tuple[str, ...], set[str]] = {}
    for node, activations in found:
        shared.setdefault(tuple(sorted(node.parameters.values())), set()).update(activations)
    nodes = []
    for node, _ in found:
        if isinstance(node.type, LayerType):
            names = "+".join(sorted(shared[tuple(sorted(node.parameters.values()))]))
            node = replace(node, type=replace(node.type, activation=names or NONE))
        nodes.append(node)
    return tuple(nodes)


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and mappings.

    >>> [t.item() for t in tensors({"a": [torch.tensor(1), None], "b": torch.tensor(2)})]
    [1, 2]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


@final
class _Follower(fx.Interpreter):
    """Runs a program; its attributes are what was found so far, dead ends included.

    Attributes: `nodes` and their `edges`; `reasons` of each node, and the `activations` that its output reaches first; the
    `opaque` nodes; `ends`, where the output comes from.
    """

    def __init__(self, program: Program, model: nn.Module) -> None:
        super().__init__(program.module, graph=program.graph)
        self.extra_traceback = False
        self.nodes: list[Node] = []
        self.edges: set[tuple[int, int]] = set()
        self.reasons: list[Mapping[str, str]] = []
        self.activations: list[set[str]] = []
        self.opaque: set[int] = set()
        self.ends: frozenset[int] = frozenset()
        self._model = model
        canonical = first_names(model)
        self._names = {
            id(parameter): canonical[_without_root(name)]
            for name, parameter in program.module.named_parameters(remove_duplicate=False)
            if _without_root(name) in canonical
        }
        self._sources: dict[fx.Node, frozenset[int]] = {}
        self._raw: dict[str, frozenset[int]] = {}  # parameters that are nodes by themselves
        # Value -> the layers whose output it is up to norms, joins and what has no node: the next activation is theirs.
        self._linear: dict[fx.Node, frozenset[int]] = {}
        # Storage -> what an in-place operation left there: both of these, and the tensor, so that no other gets its storage.
        self._written: dict[int, tuple[Tensor, frozenset[int], frozenset[int]]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Computes the value and notes from which nodes it comes."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        versions = [(operand, operand._version) for operand in tensors((args, kwargs))]
        value = getattr(self, n.op)(n.target, args, kwargs)
        before = len(self.nodes)
        self._sources[n] = self._placed(n, args, kwargs)
        self._linear[n] = self._activated(n, args, kwargs, before)
        for operand, version in versions:
            if operand._version != version:
                self._written[_storage(operand)] = (operand, self._sources[n], self._linear[n])
        return value

    def _activated(self, n: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], before: int) -> frozenset[int]:
        """Gives layers the activation that the operation is, if it is one; returns the layers that await theirs after it.
        Nodes from `before` on were added by the operation."""
        waiting = frozenset[int]().union(*(self._awaiting(operand) for operand in operands(n)))
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if (name := activation_of(n, module, args, kwargs)) is not None:
            for position in waiting:
                self.activations[position].add(name)
            return frozenset()
        (position, *others) = self._sources[n] or (_INPUT,)
        if others or position < before:
            return waiting
        kind = self.nodes[position].type
        if isinstance(kind, LayerType):
            return waiting | {position} if kind.is_norm else frozenset({position})
        return frozenset() if kind == "other" else waiting

    def _awaiting(self, operand: fx.Node) -> frozenset[int]:
        found = [self._written.get(_storage(tensor)) for tensor in tensors(self.env[operand])]
        return frozenset[int]().union(*(self._linear[operand] if one is None else one[2] for one in found))

    def _placed(self, n: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> frozenset[int]:
        """Adds the node that the operation is, if it is one; returns the nodes that its result comes from."""
        if n.op == "placeholder":
            return frozenset({_INPUT})
        if n.op == "get_attr":
            return frozenset()
        if n.op == "output":
            self.ends = self._sources_of(n)
            return self.ends
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        layer = call_layer(n, args, kwargs) if module is None else module_layer(module)
        if layer is not None:
            own = {str(role): name for role, tensor in layer.parameters.items() if (name := self._name(tensor))}
            if len(set(own.values())) == len(layer.parameters):  # no weight that is computed, or that is the bias too
                where = _owner(own["weight"]) if module is None else _without_root(str(n.target))
                where = where or type(self._model).__name__
                return self._added(where, layer.type, own, self._sources_of(n, own.values()))
        join = join_of(n)
        if module is not None:
            given: Iterable[Tensor] = module.parameters()
        else:  # a function may be given parameters as they are; those of a join are nodes by themselves
            given = () if join else tensors((args, kwargs))
        if held := [name for tensor in given if (name := self._name(tensor))]:
            return self._other(n, module, held)
        origins = {self._origin(operand) for operand in operands(n)} - {frozenset()}
        sources = frozenset[int]().union(*origins)
        if join is None or len(origins) < 2:  # what comes from the same layers (x + relu(x)) is joined already
            return sources
        return self._added(_within(n, join), join, {}, sources)

    def _name(self, tensor: Tensor) -> str | None:
        return self._names.get(id(tensor))

    def _sources_of(self, n: fx.Node, owned: Collection[str] = ()) -> frozenset[int]:
        """The nodes from which the operands of an operation come."""
        return frozenset[int]().union(*(self._origin(operand, owned) for operand in operands(n)))

    def _origin(self, operand: fx.Node, owned: Collection[str] = ()) -> frozenset[int]:
        """The nodes from which a value comes. A parameter is a node, but for those that the asking node owns."""
        found: set[int] = set()
        for tensor in tensors(self.env[operand]):
            name = self._name(tensor)
            if name is None:
                written = self._written.get(_storage(tensor))
                found |= self._sources[operand] if written is None else written[1]
            elif name not in owned:
                if name not in self._raw:
                    self._raw[name] = self._added(name, "other", {name: name}, frozenset(), self._reasons([name]))
                found |= self._raw[name]
        return frozenset(found)

    def _other(self, n: fx.Node, module: nn.Module | None, held: Sequence[str]) -> frozenset[int]:
        """Adds a module or function outside the catalogue, with the parameters that it holds or is given."""
        own = {name: name for name in held}
        sources = self._sources_of(n, own)
        if module is not None:
            where = _without_root(str(n.target)) or type(module).__name__
            has_layers = any(True for part in module.children() for _ in part.parameters())
            if has_layers and not is_parametrized(module):
                self.opaque.add(len(self.nodes))
            return self._added(where, "other", own, sources, dict.fromkeys(own, _no_layer(module)))
        if operation(n) in ("", "multi_head_attention_forward"):  # functions that may call layers
            self.opaque.add(len(self.nodes))
        owner = _owner(held[0])
        whole = [f"{owner}.{name}" for name, _ in self._model.get_submodule(owner).named_parameters(recurse=False)]
        where = owner if set(whole) == own.keys() else held[0] if len(own) == 1 else _within(n, operation(n) or "call")
        return self._added(where, "other", own, sources, self._reasons(own))

    def _added(
        self,
        name: str,
        kind: LayerType | Mark,
        parameters: Mapping[str, str],
        sources: frozenset[int],
        reasons: Mapping[str, str] = MappingProxyType({}),
    ) -> frozenset[int]:
        position = len(self.nodes)
        self.nodes.append(Node(name, kind, parameters))
        self.edges |= {(source, position) for source in sources}
        self.reasons.append(reasons)
        self.activations.append(set())
        return frozenset({position})

    def _reasons(self, names: Collection[str]) -> dict[str, str]:
        """Why parameters that a function is given as they are belong to no layer of the catalogue."""
        found = {}
        for name in names:
            where = _owner(name)
            while isinstance(owner := self._model.get_submodule(where), nn.ParameterList | nn.ParameterDict):
                where = _owner(where)
            outside = f"{type(owner).__name__} uses it outside the layers of the catalogue"
            found[name] = _no_layer(owner) if is_torchs_own(owner) and kind_of(owner) is None else outside
        return found


def is_torchs_own(module: nn.Module) -> bool:
    """Whether the module computes what a class of torch.nn does, be it of that class or derived from it; nn.Sequential
    does not count, which only calls what is in it.

    >>> is_torchs_own(nn.LSTM(1, 1)), is_torchs_own(nn.Sequential())
    (True, False)
    """
    forward: Any = type(module).forward
    return forward is not nn.Sequential.forward and getattr(forward, "__module__", "").startswith("torch.nn.modules.")


def _no_layer(module: nn.Module) -> str:
    kind = type(module).__name__
    if kind_of(module) is not None and not is_parametrized(module):  # then it is the shapes that fit no layer type
        shapes = ", ".join(f"{name} {tuple(parameter.shape)}" for name, parameter in module.named_parameters())
        kind = f"{kind} with {shapes}"
    return f"{kind} is no layer of the catalogue"


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _within(n: fx.Node, what: str) -> str:
    """A name for an operation, which begins with that of the module in whose forward it is."""
    stack = list(n.meta.get("nn_module_stack", {}).values())
    where = _without_root(stack[-1][0]) if stack else ""
    return f"{where}.{what}" if where else what


def _without_root(name: str) -> str:
    return "" if name == "model" else name.removeprefix("model.")


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]
