"""Derives a client's network from a supernet (a network with all candidate operations), and writes and reads its
description.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples, split_into_batches
from polyfed.core.io.array_files import read_safetensors
from polyfed.core.io.atomic_files import expand_user_path, read_file
from polyfed.core.io.values.validation import build_dataclass, parse_json, validation_error
from polyfed.core.nn.memory_format import to_preferred_memory_format
from polyfed.core.nn.module_cache import build_module
from polyfed.nas.cells import CellPlan
from polyfed.nas.supernet import Network, SampledNetwork, SupernetPlan

FORMAT = "polyfed.search 1"
_MOST = 10**9  # most entries of one cell's noise that a description may claim
_Edge = TypedDict(
    "_Edge",
    {
        "from": int, "to": int, "operations": list[str],
        "candidates": NotRequired[list[str]], "probabilities": NotRequired[list[float]],
    },
)  # fmt: skip


class _CellDescription(TypedDict):
    stack: str
    inputs: int
    edges: list[_Edge]


class _CellDescriptions(TypedDict):
    """Specifies the part of `describe_network`'s result that is for people."""

    cells: list[_CellDescription]


class _Description(_CellDescriptions):
    """Specifies the whole result of `describe_network`."""

    plan: dict[str, Any]
    sampled: NotRequired[dict[str, list[int]]]
    mean: NotRequired[Literal["probabilities", "outputs"]]


class _PlanFields(TypedDict):
    base: list[dict[str, Any]]
    personal: list[dict[str, Any]]


def check_cell_descriptions(description: Any) -> None:
    """Raises a `ValueError` unless the cells in a description have the structure that `describe_network` returns.

    Raises:
        ValueError: the message says in half a sentence what is wrong.
    """
    if error_text := validation_error(description, _CellDescriptions):
        raise ValueError(error_text)
    if any(not edge["operations"] for cell in description["cells"] for edge in cell["edges"]):
        raise ValueError("an edge without operations")


def build_network_with_operations(network: Network, choices: Sequence[Tensor | None]) -> Network:
    """Builds a network of chosen operations only, with copies of the supernet's weights.

    It computes the same as the supernet with these choices, and holds no other weights.

    Args:
        network: a supernet.
        choices: for each cell, base first, the chosen operations, int64 (edges,); None for a cell without a choice.

    >>> from polyfed.nas.supernet import plan_cell_stacks
    >>> base, personal = plan_cell_stacks(base_cells=1)
    >>> supernet = SupernetPlan(1, 10, 4, base, personal)().eval()
    >>> plain = build_network_with_operations(supernet, [torch.tensor([8, 2, 0, 1, 3]), torch.tensor([4, 2, 0])])
    >>> [names for names in plain.plan.personal[0].candidates]
    [('skip',), ('sep_conv_3',), ('avg_pool_3',)]
    """
    plans = [
        _fix_cell(cell.plan, choice) for (cell, _), choice in zip(network.cells_with_samplers(), choices, strict=True)
    ]
    depth = len(network.plan.base)
    plan = replace(network.plan, base=tuple(plans[:depth]), personal=tuple(plans[depth:]))
    fixed_network = build_module(plan, seed=0)
    assert isinstance(fixed_network, Network)
    tensor_names = fixed_network.state_dict().keys()
    fixed_network.to(next(network.parameters()).device).load_state_dict(
        {name: tensor for name, tensor in network.state_dict().items() if name in tensor_names}
    )
    return fixed_network.train(network.training)


def _fix_cell(plan: CellPlan, choice: Tensor | None) -> CellPlan:
    if choice is None:
        return plan
    names = tuple((names[k],) for names, k in zip(plan.candidates, choice.tolist(), strict=True))
    return replace(plan, candidates=names)


def most_probable_network(network: Network) -> Network:
    """Builds a network in which every edge of a supernet has its most probable operation.

    See `build_network_with_operations`.

    Raises:
        UserError: the samplers are context-aware and choose for each example.
    """
    if network.plan.context != "free":
        raise UserError("a context-aware supernet has one architecture per example; choose operations yourself and call "
                        "build_network_with_operations(network, choices)")  # fmt: skip
    choices = []
    for _, sampler in network.cells_with_samplers():
        logits = None if sampler is None else sampler.logits
        choices.append(None if logits is None else logits.detach().argmax(-1))  # type: ignore[operator]
    derived = build_network_with_operations(network, choices)
    derived.supernet, derived.known = network.plan, operation_probabilities(network)
    return derived


def operation_probabilities(network: Network, examples: Examples | None = None) -> list[Tensor | None]:
    """Returns each cell's probabilities, (edges, operations), on the CPU; None without a choice.

    They are softmax(logits) of the cell's sampler.

    Args:
        network: a supernet.
        examples: examples over which probabilities of context-aware samplers are averaged; context-free ones need none.
    """
    samplers = [sampler for _, sampler in network.cells_with_samplers()]
    batch_sums: dict[int, list[Tensor]] = {k: [] for k, sampler in enumerate(samplers) if sampler is not None}
    if network.plan.context == "free":
        return [None if s is None else F.softmax(s.logits.detach(), -1).cpu() for s in samplers]  # type: ignore[operator]
    if examples is None:
        raise UserError("the probabilities of a context-aware supernet depend on examples; give examples=...")
    # Finds the network's memory format by running it.
    to_preferred_memory_format(network, examples.batch(torch.arange(min(2, len(examples)), device=examples.device))[0])
    hooks = [
        sampler.register_forward_hook(
            lambda _, __, logits, k=k: batch_sums[k].append(F.softmax(logits, -1).sum(0).cpu())
        )
        for k, sampler in enumerate(samplers)
        if sampler is not None
    ]
    network.eval()
    try:
        with torch.no_grad():
            for rows in split_into_batches(torch.arange(len(examples), device=examples.device), 128):
                network(to_preferred_memory_format(network, examples.batch(rows)[0]))
    finally:
        for hook in hooks:
            hook.remove()
    return [
        torch.stack(batch_sums[k]).sum(0) / len(examples) if k in batch_sums else None for k in range(len(samplers))
    ]


def describe_network(module: nn.Module, probabilities: Sequence[Tensor | None]) -> dict[str, Any]:
    """Describes a derived network for JSON: what rebuilds it, and its cells in readable form.

    Args:
        module: a `Network`, or a `SampledNetwork` of one.
        probabilities: the probabilities of the supernet's operations, as `operation_probabilities` returns them.

    Returns:
        A dict of `format`; `plan`, the fields of `SupernetPlan`; and `cells`, base first, each with its `stack`, number of
        `inputs` and `edges`. An edge has `from`, `to`, the network's `operations` and, where there was a choice, the
        supernet's `candidates` and their `probabilities`. A `SampledNetwork` also has `sampled`, the shapes of its noise,
        and `mean`.
    """
    network = module.network if isinstance(module, SampledNetwork) else module
    assert isinstance(network, Network)
    supernet = network.supernet or network.plan
    supernet_cells = supernet.base + supernet.personal
    cells = []
    for k, ((cell, _), supernet_cell) in enumerate(zip(network.cells_with_samplers(), supernet_cells, strict=True)):
        edges: list[dict[str, Any]] = [
            {"from": i, "to": j, "operations": list(names)}
            for (i, j), names in zip(cell.plan.edges, cell.plan.candidates, strict=True)
        ]
        shares = probabilities[k]
        if shares is not None:
            for edge, names, row in zip(edges, supernet_cell.candidates, shares.tolist(), strict=True):
                edge |= {"candidates": list(names), "probabilities": row}
        stack = "base" if k < len(supernet.base) else "personal"
        cells.append({"stack": stack, "inputs": cell.plan.inputs, "edges": edges})
    description = {"format": FORMAT, "plan": asdict(network.plan), "cells": cells}
    if isinstance(module, SampledNetwork):
        description |= {
            "sampled": {str(k): list(module.get_buffer(name).shape) for k, name in module.names.items()},
            "mean": "probabilities" if module.probabilities else "outputs",
        }
    return description


def rebuild_network(description: Mapping[str, Any]) -> nn.Module:
    """Builds a network from a description that `describe_network` returned, without loading weights.

    Raises:
        UserError: `description` is not one of `describe_network`.
    """
    format_name = description.get("format") if isinstance(description, Mapping) else type(description).__name__
    if format_name != FORMAT:
        raise UserError(
            f"this is not a description of a network by polyfed.nas: its format is {format_name!r}, expected {FORMAT!r}"
        )
    try:
        check_cell_descriptions(description)
        if error_text := validation_error(description, _Description) or validation_error(
            description["plan"], _PlanFields, "plan"
        ):
            raise ValueError(error_text)
        fields: dict[str, Any] = dict(description["plan"])
        for stack in ("base", "personal"):
            fields[stack] = tuple(_cell_plan(cell) for cell in fields[stack])
        network = build_module(build_dataclass(SupernetPlan, fields, "plan"), seed=0)
        assert isinstance(network, Network)
        network.known = [_edge_probabilities(cell["edges"]) for cell in description["cells"]]
        network.supernet = _supernet_plan(network.plan, description["cells"])
        if "sampled" not in description:
            return network.eval()
        return SampledNetwork(
            network, _noise_buffers(description["sampled"]), description.get("mean") == "probabilities"
        ).eval()
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"the description of the network is incomplete or damaged: {error}") from error


def _noise_buffers(shapes: Mapping[str, Sequence[int]]) -> dict[int, Tensor]:
    """Returns a zero tensor, of the given shape, for the noise of each sampled cell: cell's number -> tensor."""
    if wrong_shape := next(
        (s for s in shapes.values() if len(s) > 8 or not 0 < math.prod(s) <= _MOST or min(s) < 1), None
    ):
        raise ValueError(f"noise of the shape {wrong_shape}")
    return {int(k): torch.zeros(tuple(shape)) for k, shape in shapes.items()}


class _CellFields(TypedDict):
    candidates: list[list[str]]


def _edge_probabilities(edges: Sequence[_Edge]) -> Tensor | None:
    """Returns probabilities (edges, operations) of a cell; None if it had no choice."""
    if not edges or "probabilities" not in edges[0]:
        return None
    return torch.tensor([edge.get("probabilities", []) for edge in edges])  # of one length, or a ValueError


def _supernet_plan(plan: SupernetPlan, cells: Sequence[_CellDescription]) -> SupernetPlan:
    """Returns the plan of the supernet from which a network was derived."""
    supernet_cells = [
        replace(cell, candidates=tuple(tuple(e.get("candidates", e["operations"])) for e in description["edges"]))
        for cell, description in zip(plan.base + plan.personal, cells, strict=True)
    ]
    return replace(plan, base=tuple(supernet_cells[: len(plan.base)]), personal=tuple(supernet_cells[len(plan.base) :]))


def _cell_plan(fields: Mapping[str, Any]) -> CellPlan:
    if error_text := validation_error(fields, _CellFields, "a cell of plan"):
        raise ValueError(error_text)
    return build_dataclass(
        CellPlan, {**fields, "candidates": tuple(tuple(names) for names in fields["candidates"])}, "a cell of plan"
    )


def load_network(path: str | Path) -> nn.Module:
    """Returns the network that a run derived for a client, with its weights loaded.

    Args:
        path: `models/ID.json` of a run directory; the weights are next to it in `ID.safetensors`.

    Raises:
        UserError: one of the files is missing, or the two do not belong together.
    """
    path = expand_user_path(path)
    try:
        description = parse_json(read_file(path))
        weights = read_safetensors(path.with_suffix(".safetensors"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read the network of {path}: {error}; give models/ID.json of a run directory"
        ) from error
    module = rebuild_network(description)
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{path} and its weights do not belong together: {error}") from error
    return module
