"""Runs a traced program, and records between which layers values flow.

A tracer returns a program: a torch.fx graph with the module that holds its tensors. The program runs once on the example,
and for each value the recorder notes the nodes from which it comes. Real values, unlike names, distinguish a tensor from a
size and a parameter from a constant; autograd's version counters show which tensors an operation changed in place.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, final

from torch import Tensor, fx, nn

from polyfed.core.examples.pytree import Inputs, call_network, iterate_tensors, logits_or_output, named_leaves
from polyfed.core.nn.tied_weights import first_name_by_name
from polyfed.graphs.architecture import NONE, LayerType, Node, NodeMark
from polyfed.graphs.recognition.activations import activation_name
from polyfed.graphs.recognition.layer_plans import NodePlan, plan_operation, type_by_shape, types_by_shape
from polyfed.graphs.recognition.layer_recognition import (
    join_kind,
    layer_kind,
    layer_of_call,
    layer_of_module,
    operand_nodes,
    torch_operation_name,
)
from polyfed.graphs.tracing.traced_modules import (
    has_layers_inside,
    inherits_torch_forward,
    no_layer_reason,
    operation_path,
    owner_name,
    storage_id,
    strip_root,
)

Kinds = Literal["all", "paper"]
_INPUT = -1  # position that stands for the model's input, which is not a node


@final
class Root(nn.Module):
    """Wraps a model for tracing, with its inputs as arguments and its parts named below "model.".

    So optional arguments of the model's forward have their defaults, and a model that is itself a layer appears as a call.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        """Returns the model's output, or only the logits if the output has a part of that name."""
        return logits_or_output(call_network(self.model, x))


@final
@dataclass(frozen=True)
class TracedProgram:
    """Holds the graph of operations, and the module of their parameters, with names below "model."."""

    graph: fx.Graph
    module: nn.Module


@final
@dataclass(frozen=True)
class LayerFlow:
    """Holds the nodes on which a network's output depends, in running order, their edges, and the output.

    Attributes:
        nodes, edges: as in `ArchitectureGraph`.
        reasons: parameter of a node of type "other" -> why the node is not a layer of the catalogue.
        opaque: names of nodes with layers inside that the tracer does not see.
        output: the program's output.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    reasons: Mapping[str, str]
    opaque: tuple[str, ...]
    output: Any


def record_layer_flow(program: TracedProgram, model: nn.Module, x: Inputs, kinds: Kinds = "all") -> LayerFlow:
    """Runs a traced program on `x`; returns the layers that ran, and which led to which.

    Args:
        program: program that was traced from a copy of the model in `Root`.
        model: the model, for the names and classes in the flow.
        x: a batch of inputs, whose parts the program takes one by one; in-place operations may change them.
        kinds: as in `extract`.
    """
    recorder = _FlowRecorder(program, model, kinds)
    output = recorder.run(*(part for _, part in named_leaves(x)))
    reachable: set[int] = set()
    ahead = set(recorder.ends)
    while ahead:
        reachable |= ahead
        ahead = {start for start, end in recorder.edges if end in ahead} - reachable
    position = {old: new for new, old in enumerate(sorted(reachable - {_INPUT}))}
    return LayerFlow(
        _with_activations([(recorder.nodes[old], recorder.activations[old]) for old in position]),
        tuple(sorted((position[a], position[b]) for a, b in recorder.edges if a in position and b in position)),
        {name: reason for old in position for name, reason in recorder.reasons[old].items()},
        tuple(recorder.nodes[old].name for old in position if old in recorder.opaque),
        output,
    )


def _with_activations(nodes_with_activations: Sequence[tuple[Node, Collection[str]]]) -> tuple[Node, ...]:
    """Returns the nodes with the names of their activations added to their layer types.

    All uses of shared weights get the activations of all these uses, since they have one set of weights and so one
    type.
    """
    shared: dict[tuple[str, ...], set[str]] = {}
    for node, activations in nodes_with_activations:
        shared.setdefault(tuple(sorted(node.parameters.values())), set()).update(activations)
    nodes = []
    for node, _ in nodes_with_activations:
        if isinstance(node.type, LayerType):
            names = "+".join(sorted(shared[tuple(sorted(node.parameters.values()))]))
            node = replace(node, type=replace(node.type, activation=names or NONE))
        nodes.append(node)
    return tuple(nodes)


@final
class _FlowRecorder(fx.Interpreter):
    """Runs a traced program and records its nodes and edges, also those that do not reach the output.

    Attributes:
        nodes, edges: the nodes, and pairs of their positions.
        reasons: for each node, its parameters that stay local and why.
        activations: for each node, the names of the activations that its output reaches first.
        opaque: positions of nodes with layers inside that the tracer does not see.
        ends: positions of the nodes from which the output comes.
    """

    def __init__(self, program: TracedProgram, model: nn.Module, kinds: Kinds) -> None:
        super().__init__(program.module, graph=program.graph)
        self._all_kinds = kinds == "all"
        self.extra_traceback = False
        self.nodes: list[Node] = []
        self.edges: set[tuple[int, int]] = set()
        self.reasons: list[Mapping[str, str]] = []
        self.activations: list[set[str]] = []
        self.opaque: set[int] = set()
        self.ends: frozenset[int] = frozenset()
        self._model = model
        canonical = first_name_by_name(model)
        self._names = {
            id(parameter): canonical[strip_root(name)]
            for name, parameter in program.module.named_parameters(remove_duplicate=False)
            if strip_root(name) in canonical
        }
        self._sources: dict[fx.Node, frozenset[int]] = {}
        self._raw: dict[str, frozenset[int]] = {}  # parameters that are nodes by themselves
        # Value -> the layers whose output it is up to norms, joins and operations without a node; they await an activation.
        self._linear: dict[fx.Node, frozenset[int]] = {}
        # Storage -> (tensor, sources, layers) after an in-place operation; keeping the tensor keeps its storage from reuse.
        self._written: dict[int, tuple[Tensor, frozenset[int], frozenset[int]]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Computes the value of an operation and records from which nodes the value comes."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        versions = [(operand, operand._version) for operand in iterate_tensors((args, kwargs))]
        value = getattr(self, n.op)(n.target, args, kwargs)
        before = len(self.nodes)
        self._sources[n] = self._record_node(n, args, kwargs)
        self._linear[n] = self._record_activation(n, args, kwargs, before)
        for operand, version in versions:
            if operand._version != version:
                self._written[storage_id(operand)] = (operand, self._sources[n], self._linear[n])
        return value

    def _record_activation(
        self, n: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], before: int
    ) -> frozenset[int]:
        """Adds an operation's activation to the layers before it; returns those still without one.

        Nodes from `before` on were added by the operation.
        """
        waiting = frozenset[int]().union(*(self._layers_awaiting_activation(operand) for operand in operand_nodes(n)))
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if (name := activation_name(n, module, args, kwargs)) is not None:
            for position in waiting:
                self.activations[position].add(name)
            return frozenset()
        if self._all_kinds and min(self._sources[n], default=_INPUT) >= before and len(self._sources[n]) > 1:
            return frozenset()  # several nodes of one layer, a bidirectional one
        (position, *more_sources) = self._sources[n] or (_INPUT,)
        if more_sources or position < before:
            return waiting
        kind = self.nodes[position].type
        if isinstance(kind, LayerType) and (kind.is_norm or kind.is_matrix):
            return waiting | {position} if kind.is_norm else frozenset({position})
        return frozenset() if kind == "other" or isinstance(kind, LayerType) else waiting

    def _layers_awaiting_activation(self, operand: fx.Node) -> frozenset[int]:
        records = [self._written.get(storage_id(tensor)) for tensor in iterate_tensors(self.env[operand])]
        return frozenset[int]().union(*(self._linear[operand] if record is None else record[2] for record in records))

    def _record_node(self, n: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> frozenset[int]:
        """Adds a node for the operation, if it is a layer or a join; returns the nodes from which its result comes."""
        if n.op == "placeholder":
            return frozenset({_INPUT})
        if n.op == "get_attr":
            return frozenset()
        if n.op == "output":
            self.ends = self._sources_of(n)
            return self.ends
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        layer = layer_of_call(n, args, kwargs) if module is None else layer_of_module(module)
        if layer is not None:
            parameters = {
                str(role): name for role, tensor in layer.parameters.items() if (name := self._parameter_name(tensor))
            }
            # Not if a weight is computed, or is also the bias.
            if len(set(parameters.values())) == len(layer.parameters):
                where = owner_name(parameters["weight"]) if module is None else strip_root(str(n.target))
                where = where or type(self._model).__name__
                return self._add_node(where, layer.type, parameters, self._sources_of(n, parameters.values()))
        if self._all_kinds and (positions := self._add_planned_nodes(n, module, args, kwargs)) is not None:
            return positions
        join = join_kind(n)
        if module is not None:
            used_tensors: Iterable[Tensor] = module.parameters()
        else:  # a function may take parameters directly; those of a join are nodes of their own
            used_tensors = () if join else iterate_tensors((args, kwargs))
        if used_parameters := [name for tensor in used_tensors if (name := self._parameter_name(tensor))]:
            return self._add_local_node(n, module, used_parameters)
        origins = {self._sources_of_value(operand) for operand in operand_nodes(n)} - {frozenset()}
        sources = frozenset[int]().union(*origins)
        if join is None or len(origins) < 2:  # values of the same layers (x + relu(x)) need no join
            return sources
        return self._add_node(operation_path(n, join), join, {}, sources)

    def _parameter_name(self, tensor: Tensor) -> str | None:
        return self._names.get(id(tensor))

    def _sources_of(self, n: fx.Node, owned: Collection[str] = ()) -> frozenset[int]:
        """Returns the nodes from which the operands of an operation come."""
        return frozenset[int]().union(*(self._sources_of_value(operand, owned) for operand in operand_nodes(n)))

    def _sources_of_value(self, operand: fx.Node, owned: Collection[str] = ()) -> frozenset[int]:
        """Returns the nodes from which a value comes. A parameter is a node itself, unless its name is in `owned`."""
        positions: set[int] = set()
        for tensor in iterate_tensors(self.env[operand]):
            name = self._parameter_name(tensor)
            if name is None:
                written = self._written.get(storage_id(tensor))
                positions |= self._sources[operand] if written is None else written[1]
            elif name not in owned:
                if name not in self._raw:
                    kind = type_by_shape(tensor) if self._all_kinds else None
                    self._raw[name] = (
                        self._add_node(name, "other", {name: name}, frozenset(), self._local_reasons([name]))
                        if kind is None
                        else self._add_node(name, kind, {"weight": name}, frozenset())
                    )
                positions |= self._raw[name]
        return frozenset(positions)

    def _add_planned_nodes(
        self, n: fx.Node, module: nn.Module | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> frozenset[int] | None:
        """Adds nodes of a layer beyond the paper's kinds; returns its result's nodes, or None for no layer.

        Parameters that belong to no layer are nodes by their shape, one after the other, before the layer's own nodes.
        """
        plan = plan_operation(n, module, args, kwargs)
        tensors = [tensor for node in plan.nodes for tensor in node.tensors.values()] if plan else []
        if plan and len({self._parameter_name(tensor) for tensor in tensors} - {None}) < len(tensors):
            plan, tensors = None, []  # a weight is computed, or is also the bias
        if plan is None and module is None and join_kind(n):
            return None
        used = module.parameters() if module is not None else iterate_tensors((args, kwargs))
        by_name = {name: tensor for tensor in used if (name := self._parameter_name(tensor)) is not None}
        operation = torch_operation_name(n)
        types = types_by_shape(by_name, module, operation)
        if not by_name or None in types.values():
            return None
        opaque = module is not None and has_layers_inside(module)
        planned = {self._parameter_name(tensor) for tensor in tensors}
        sources = self._sources_of(n, by_name)
        if opaque or (module is None and plan is None and operation in ("", "multi_head_attention_forward")):
            self.opaque.add(len(self.nodes))
        # Rows that do not depend on data.
        if plan is not None and plan.nodes[0].type.kind == "embedding" and not sources:
            only = plan.nodes[0]
            plan = NodePlan((replace(only, type=replace(only.type, kind="positions")),), (0,))
        for name, kind in types.items():
            if name not in planned and kind is not None:
                sources = self._add_node(name, kind, {"weight": name}, sources)
        if plan is None:
            return sources
        where = strip_root(str(n.target)) if module is not None else owner_name(self._parameter_name(tensors[0]) or "")
        added: list[frozenset[int]] = []
        for node in plan.nodes:
            roles = {role: str(self._parameter_name(tensor)) for role, tensor in node.tensors.items()}
            before = sources if node.after is None else frozenset[int]().union(*(added[k] for k in node.after))
            name = (
                roles["weight"] if node.type.is_table else f"{where} {node.part}".strip() or type(self._model).__name__
            )
            added.append(self._add_node(name, node.type, roles, before))
        return frozenset[int]().union(*(added[k] for k in plan.ends))

    def _add_local_node(self, n: fx.Node, module: nn.Module | None, held: Sequence[str]) -> frozenset[int]:
        """Adds a node for a module or function outside the catalogue, with the parameters that it owns or takes."""
        parameters = {name: name for name in held}
        sources = self._sources_of(n, parameters)
        if module is not None:
            where = strip_root(str(n.target)) or type(module).__name__
            if has_layers_inside(module):
                self.opaque.add(len(self.nodes))
            return self._add_node(
                where, "other", parameters, sources, dict.fromkeys(parameters, no_layer_reason(module))
            )
        if torch_operation_name(n) in ("", "multi_head_attention_forward"):  # functions that may call layers
            self.opaque.add(len(self.nodes))
        owner = owner_name(held[0])
        owner_parameters = [
            f"{owner}.{name}" for name, _ in self._model.get_submodule(owner).named_parameters(recurse=False)
        ]
        where = (
            owner
            if set(owner_parameters) == parameters.keys()
            else held[0]
            if len(parameters) == 1
            else operation_path(n, torch_operation_name(n) or "call")
        )
        return self._add_node(where, "other", parameters, sources, self._local_reasons(parameters))

    def _add_node(
        self,
        name: str,
        kind: LayerType | NodeMark,
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

    def _local_reasons(self, names: Collection[str]) -> dict[str, str]:
        """Returns, for each parameter that a function takes directly, why it belongs to no layer of the catalogue."""
        reasons = {}
        for name in names:
            where = owner_name(name)
            while isinstance(owner := self._model.get_submodule(where), nn.ParameterList | nn.ParameterDict):
                where = owner_name(where)
            outside = f"{type(owner).__name__} uses it outside the layers of the catalogue; set kinds=all"
            reasons[name] = (
                no_layer_reason(owner) if inherits_torch_forward(owner) and layer_kind(owner) is None else outside
            )
        return reasons
