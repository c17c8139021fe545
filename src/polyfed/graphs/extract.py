"""Extracts the graph of layers from any network (FLHA-GHN, Litany et al. 2022, section 4.2), with torch.fx or, if that
fails, torch.export.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from polyfed.core.errors import UserError
from polyfed.core.examples.pytree import (
    Inputs,
    check_and_convert_inputs,
    first_leaf,
    input_spec_of,
    iterate_tensors,
    named_leaves,
    split_into_call_arguments,
    tree_map,
)
from polyfed.core.nn.deep_copy import deep_copy
from polyfed.core.nn.functional_call import call_with_tensors
from polyfed.core.seeds import temporary_rng_seed, torch_generator
from polyfed.graphs.architecture import ArchitectureGraph, LayerType, Node
from polyfed.graphs.tables import set_starts_of_layer_types, split_into_tables
from polyfed.graphs.tracing import export_tracer, fx_tracer
from polyfed.graphs.tracing.layer_flow import Kinds, LayerFlow, Root, TracedProgram, record_layer_flow
from polyfed.graphs.tracing.traced_modules import strip_root

_ON_EXAMPLE = "torch.fx on an example"
_TRACERS: dict[str, Callable[[Root, Inputs], TracedProgram]] = {
    "torch.fx": fx_tracer.trace_with_fx,
    "torch.export": export_tracer.trace_with_export,
    _ON_EXAMPLE: export_tracer.trace_on_example,  # where the others fail
}
_GENERATED = (torch.float32, torch.float64)  # dtypes of parameters that a hypernetwork can generate


def extract(model: nn.Module, example_input: Inputs, kinds: Kinds = "all") -> ArchitectureGraph:
    """Returns a network's graph: nodes for layers, sums and concatenations, edges for the data flow.

    A copy of the model is traced in evaluation mode, by torch.fx, or where Python branches on shapes, by torch.export;
    neither the model nor the random state changes. A graph is accepted only if the traced program computes the model's
    output on the example and uses every parameter on which the output depends. Where Python branches on values (packed
    sequences, early exits), the graph is that of what runs on the example, with fixed weights, so that it does not depend on
    the model's; parameters that do not take part are local.

    Convolutions, linear and norm layers, classes derived from them and calls of their functions are nodes with a
    `LayerType`, which includes the activation that follows. So are transposed convolutions, embeddings, recurrent layers
    (two nodes for each layer and direction) and torch's attention. A parameter that belongs to no layer (positions, class
    tokens, factors) is a node by its shape, where it is used. Sums and concatenations of outputs of different layers are
    joins. What cannot be generated is "other" and stays local, with a reason. Operations without parameters have no node.

    Args:
        model: any network with initialised parameters whose `forward` takes these inputs alone.
        example_input: a batch for the model, of shape (batch, ...), or a tuple or dict of such (see
            `polyfed.core.examples.pytree`), on the model's device; two rows are enough.
        kinds: "all", or "paper" for convolutions, linear and norm layers alone; all other parameters are then local.

    Raises:
        UserError: the model is not an nn.Module, cannot be copied, needs other arguments, fails on the example, or neither
            tracer can follow it; then the message names the module where each tracer stopped.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    >>> graph = extract(net, torch.zeros(2, 1, 8, 8))
    >>> [node.type.key for node in graph.nodes], graph.edges, graph.coverage
    (['conv2d-1-4-k3x3-s1x1-g1-b0-d1x1-relu', 'linear-144-2-k-s-g1-b1-d-none'], ((0, 1),), 1.0)
    """
    _check_arguments(model, example_input)
    x: Inputs = tree_map(Tensor.detach, check_and_convert_inputs(example_input))
    device = first_leaf(x).device
    # A caller's inference mode or no_grad would hide on which parameters the output depends.
    with torch.inference_mode(False), torch.enable_grad():
        reference = _run_reference(model, x)
        failures: list[str] = []
        graphs: list[tuple[ArchitectureGraph, bool]] = []
        for tracer, trace in _TRACERS.items():
            if graphs and tracer == _ON_EXAMPLE:
                break
            root = _copy_model(model)
            try:
                if tracer == _ON_EXAMPLE:
                    _set_fixed_weights(root)
                    reference = _run_reference(root.model, x, replaces_parameters=True)
                with temporary_rng_seed(0, device):
                    program = trace(root, tree_map(Tensor.clone, x))
                with temporary_rng_seed(0, device):
                    flow = record_layer_flow(program, model, tree_map(Tensor.clone, x), kinds)
                _verify_traced_flow(flow, reference)
            except Exception as error:
                failures.append(f"{tracer} stopped in {_failing_module(error, root)}: {_error_summary(error)}")
                continue
            graphs.append((_build_graph(flow, model, reference, tracer, kinds), bool(flow.opaque)))
            if not flow.opaque:
                break
    if not graphs:
        raise UserError(
            f"the layers of {type(model).__name__} cannot be followed. {'. '.join(failures)}. Keep its "
            f"forward to torch's operations, whatever the values are (torch.where in place of if), or use a method "
            f"that needs no graph"
        )
    # Only torch.export sees inside torch's composite modules (a transformer's layer). Layers count first, then all that is
    # generated; in a tie, torch.fx's graph is taken, unless layers are hidden in it.
    if kinds == "paper":
        return max(graphs, key=lambda graph: graph[0].coverage)[0]
    return max(graphs, key=lambda graph: (graph[0].num_parameters_in_layers, graph[0].coverage, not graph[1]))[0]


def _check_arguments(model: Any, x: Any) -> None:
    try:
        inputs: Inputs | None = check_and_convert_inputs(x)
    except UserError:
        inputs = None
    if not isinstance(model, nn.Module) or inputs is None:
        raise UserError(
            f"a graph is extracted from a torch.nn.Module and a tensor, got {type(model).__name__} and {type(x).__name__}; "
            "give a network, and a tensor or a tuple or dict of tensors"
        )
    lazy = [n for n, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise UserError(
            f"{type(model).__name__} leaves {lazy[0]!r} uninitialised; run one batch through the model first"
        )
    if compiled := [
        name or "the model" for name, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)
    ]:
        raise UserError(
            f"{compiled[0]} is compiled by torch.jit and cannot be traced; give the module that it was compiled from"
        )
    args, named = split_into_call_arguments(inputs)
    try:
        inspect.signature(model.forward).bind(*args, **named)
    except (TypeError, ValueError) as error:
        parts = (
            "one tensor"
            if isinstance(inputs, Tensor)
            else f"the inputs {', '.join(name for name, _ in named_leaves(inputs))}"
        )
        raise UserError(
            f"{type(model).__name__}.forward cannot be called with {parts} ({error}); "
            f"wrap the model in a module whose forward takes the inputs alone"
        ) from error


def _copy_model(model: nn.Module) -> Root:
    try:
        return Root(deep_copy(model)).eval()
    except Exception as error:
        raise UserError(
            f"{type(model).__name__} cannot be copied, which tracing needs: {_error_summary(error)}; "
            f"keep objects that copy.deepcopy refuses outside the module"
        ) from error


@final
@dataclass(frozen=True)
class _Reference:
    """Holds the model's own output on the example, and the parameters that it depends on.

    Attributes:
        output: the model's output.
        reached: the parameters that a gradient of the output reaches.
        all_reached: whether `reached` is certain to be complete. It is not if the output is not differentiable, or if an
            autograd function written in Python (checkpointing) may call layers that autograd's graph does not show.
        changed: the parameters that `forward` changes in place.
    """

    output: Any
    reached: frozenset[str]
    all_reached: bool
    changed: frozenset[str]


@torch.no_grad()
def _set_fixed_weights(root: Root) -> None:
    """Replaces weights and running statistics by values that are always the same."""
    generator = torch_generator(0)
    for parameter in root.parameters():
        if parameter.is_floating_point():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    for part in root.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase):
            part.reset_running_stats()


def _run_reference(model: nn.Module, x: Inputs, replaces_parameters: bool = False) -> _Reference:
    """Runs a copy of the model on the example, and finds out on which parameters the output depends.

    With `replaces_parameters`, other tensors take the place of the parameters, as generated weights will; a parameter
    that the model also holds elsewhere (in a list) then does not count.
    """
    root = _copy_model(model)
    parameters: dict[str, Tensor] = dict(root.named_parameters())
    if replaces_parameters:
        parameters = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in parameters.items()}
    versions = {name: tensor._version for name, tensor in parameters.items()}
    try:
        with temporary_rng_seed(0, first_leaf(x).device):
            inputs = tree_map(Tensor.clone, x)
            output = call_with_tensors(root, parameters, (inputs,), {}) if replaces_parameters else root(inputs)
    except Exception as error:
        raise UserError(
            f"{type(model).__name__} fails on an example of {_describe_inputs(x)}, in "
            f"{_failing_module(error, root)}: {_error_summary(error)}; give an example that the model accepts"
        ) from error
    leaves = {id(tensor) for tensor in iterate_tensors(output) if tensor.is_leaf}
    functions = autograd_functions(output)
    leaves |= {id(function.variable) for function in functions if hasattr(function, "variable")}
    reached = frozenset(strip_root(name) for name, tensor in parameters.items() if id(tensor) in leaves)
    is_complete = bool(reached) and not any(isinstance(f, BackwardCFunction) for f in functions)
    changed = frozenset(strip_root(n) for n, tensor in parameters.items() if tensor._version != versions[n])
    return _Reference(output, reached, is_complete, changed)


def _describe_inputs(x: Inputs) -> str:
    return f"shape {tuple(x.shape)} and type {x.dtype}" if isinstance(x, Tensor) else str(input_spec_of(x))


def autograd_functions(output: Any) -> set[Any]:
    """Returns all functions of the autograd graph that led to `output`, without differentiating."""
    ahead = [tensor.grad_fn for tensor in iterate_tensors(output)]
    functions: set[Any] = set()
    while ahead:
        function = ahead.pop()
        if function is not None and function not in functions:
            functions.add(function)
            ahead.extend(before for before, _ in function.next_functions)
    return functions


def _verify_traced_flow(flow: LayerFlow, reference: _Reference) -> None:
    """Raises a `UserError` if a traced program computes another output, or misses a used parameter."""
    expected, traced = list(iterate_tensors(reference.output)), list(iterate_tensors(flow.output))
    if len(expected) != len(traced) or not all(map(_are_close, expected, traced)):
        raise UserError("the traced program computes another output than the model on the example")
    if missed := sorted(reference.reached - _parameter_names(flow.nodes)):
        raise UserError(f"the traced program does not use {missed[0]}, on which the output depends")


def _are_close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    largest = a.nan_to_num(0, 0, 0).abs().max().item()
    return torch.allclose(a, b, rtol=0, atol=1e-3 * largest, equal_nan=True)


def _build_graph(
    flow: LayerFlow, model: nn.Module, reference: _Reference, tracer: str, kinds: Kinds
) -> ArchitectureGraph:
    """Builds the graph from the recorded flow, with a reason for each parameter that stays private."""
    parameters = dict(model.named_parameters())
    refused = {name: reason for name, p in parameters.items() if (reason := _refusal_reason(p))}
    owned = _parameter_names(flow.nodes)
    lookups = [part for part in model.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    sparse = {id(part.weight) for part in lookups if part.sparse}
    refused |= dict.fromkeys(
        (name for name, p in parameters.items() if id(p) in sparse and name not in refused),
        "its gradients are sparse, which generated weights cannot have; give the embedding sparse=False",
    )
    refused |= dict.fromkeys(
        reference.changed - refused.keys(),
        "forward changes it in place, as the max_norm of an embedding does, and generated weights cannot keep that; take "
        "it away",
    )
    if reference.all_reached:  # the others are behind no_grad or detach: if generated, they would never be trained
        refused |= dict.fromkeys(
            owned - reference.reached - refused.keys(),
            "no gradient of the output reaches it; take away the detach(), the no_grad(), the operation without a gradient "
            "(such as argmax) or the plain list of tensors that it is behind",
        )
    nodes, reasons = list(flow.nodes), dict(flow.reasons)
    for position, node in enumerate(nodes):
        stays = next((name for name in node.parameters.values() if name in refused), None)
        if stays is not None and isinstance(node.type, LayerType):
            nodes[position] = _as_local_node(node)
            reasons |= dict.fromkeys(node.parameters.values(), f"{stays} of the same layer stays: {refused[stays]}")
    edges = flow.edges
    while clash := _conflicting_parameters(nodes):
        local_names = {name for node in nodes if node.type == "other" for name in node.parameters.values()}
        if kinds == "all" and not clash & local_names:
            nodes, edges = split_into_tables(nodes, edges, clash, parameters)
            continue
        for position, node in enumerate(nodes):
            shared = next((name for name in node.parameters.values() if name in clash), None)
            if shared is not None:
                nodes[position] = _as_local_node(node)
                reasons |= dict.fromkeys(
                    node.parameters.values(),
                    f"{shared} is shared between different layers; give each layer its own, or set kinds=all",
                )
    generated = _parameter_names(node for node in nodes if isinstance(node.type, LayerType))
    unused = "the output does not depend on it; delete it, or leave it, since it has no effect"
    if tracer == _ON_EXAMPLE:
        unused = (
            "what runs depends on values, and on the example it does not run; compute both branches (torch.where in place "
            "of if) to have it generated"
        )
    local = {
        name: refused.get(name) or (reasons[name] if name in owned else unused)
        for name in parameters
        if name not in generated
    }
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    return ArchitectureGraph(set_starts_of_layer_types(nodes, parameters), edges, sizes, local, tracer)


def _parameter_names(nodes: Iterable[Node]) -> set[str]:
    return {name for node in nodes for name in node.parameters.values()}


def _refusal_reason(parameter: nn.Parameter) -> str:
    if not parameter.numel():
        return "it has no entries, so that there is nothing to generate"
    if not parameter.requires_grad:
        return "it is not trained (requires_grad is False); with requires_grad=True it is generated"
    if parameter.dtype not in _GENERATED:
        numbers = str(parameter.dtype).removeprefix("torch.")
        return f"its numbers are {numbers}, not float32 or float64; give it one of these types"
    return ""


def _as_local_node(node: Node) -> Node:
    return replace(node, type="other", parameters={name: name for name in node.parameters.values()})


def _conflicting_parameters(nodes: Sequence[Node]) -> set[str]:
    """Returns the parameters that several nodes, one of them a layer, use in different ways.

    The ways differ in the type or in another parameter of the node. No single set of generated weights suits such
    nodes.
    """
    uses: dict[str, set[tuple[object, frozenset[tuple[str, str]]]]] = {}
    for node in nodes:
        for name in node.parameters.values():
            uses.setdefault(name, set()).add((node.type, frozenset(node.parameters.items())))
    return {
        name for name, kinds in uses.items() if len(kinds) > 1 and any(isinstance(kind, LayerType) for kind, _ in kinds)
    }


def _failing_module(error: BaseException, root: Root) -> str:
    """Returns the name and class of the innermost module in whose forward the error was raised, for a message."""
    names = {id(module): name for name, module in root.named_modules()}
    module_name, trace = "model", error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "forward" and frame.f_code.co_varnames:
            module_name = names.get(id(frame.f_locals.get(frame.f_code.co_varnames[0]))) or module_name
        trace = trace.tb_next
    kind = type(root.get_submodule(module_name)).__name__
    return kind if module_name == "model" else f"{module_name.removeprefix('model.')} ({kind})"


def _error_summary(error: BaseException) -> str:
    """Returns an error's class (unless `UserError`) and first line, without the full stop."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    first = first if len(first) <= 240 else f"{first[:240]}…"
    kind = "" if isinstance(error, UserError) else type(error).__name__
    return ": ".join(part for part in (kind, first.rstrip(".")) if part)
