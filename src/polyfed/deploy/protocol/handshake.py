"""Checks what the sites report about their data and networks in the handshake that begins a run."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from polyfed.algorithms.submodels.widths import widest_shape_by_tensor
from polyfed.core.algorithm import Architecture, Client, DataSpec
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import named_leaves
from polyfed.core.io.values.number_checks import is_whole_number
from polyfed.core.nn.module_cache import cached_module
from polyfed.core.tasks.task_lookup import get_task
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.simulation.checks.networks.trial_forward import output_shape

CLAIM_KEYS = ("task", "num_examples", "architecture", "form", "table")
"""Header keys of a site's introduction that may not change during a run."""
_MAX_OUTPUTS = 1_000_000
_MAX_NUMBERS = 2**24  # numbers in an example of zeros with which the server tries a network


def describe_changed_introduction(first_head: Mapping[str, Any] | None, head: Mapping[str, Any]) -> str | None:
    """Returns a sentence on what a site first reports otherwise than at the start; None for nothing.

    Args:
        first_head: header of the introduction when the run began; None if there was none.
        head: header of the present introduction.

    >>> describe_changed_introduction({"num_examples": 20}, {"num_examples": 10**12})
    'its num_examples is 1000000000000, and was 20 when the run began'
    """
    expected_head = head if first_head is None else first_head
    changed_key = next((name for name in CLAIM_KEYS if head.get(name) != expected_head.get(name)), None)
    return (
        changed_key
        and f"its {changed_key} is {head.get(changed_key)}, and was {expected_head.get(changed_key)} when the run began"
    )


def merge_data_specs(introductions: Mapping[str, Mapping[str, Any]], name: str) -> DataSpec:
    """Merges the sites' specs: their common input shape, and the largest number of outputs.

    Args:
        introductions: header of each site's introduction.
        name: name of the method.

    Raises:
        UserError: the input shapes differ, or a site reports no valid spec.

    >>> merge_data_specs({"north": {"form": [[4], 2]}, "south": {"form": [[4], 3]}}, "flha_ghn")
    DataSpec(inputs=(4,), outputs=3)
    """
    specs = {i: _parse_data_spec(i, answer.get("form")) for i, answer in sorted(introductions.items())}
    first = next(iter(specs))
    if odd_site := next((i for i in specs if specs[i].inputs != specs[first].inputs), None):
        raise UserError(
            f"{name} needs inputs of one shape, but those of {odd_site!r} are {specs[odd_site].inputs}, those of {first!r} "
            f"{specs[first].inputs}"
        )
    return DataSpec(specs[first].inputs, max(form.outputs for form in specs.values()))


def check_same_target_count(introductions: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Raises a `UserError` if sites differ in targets per example, classification apart.

    >>> check_same_target_count(
    ...     {i: {"task": "regression", "form": [[4], n]} for i, n in (("north", 1), ("south", 2))}, "fedpnas")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: fedpnas needs labels of one form, but 'south' has 2 a row, 'north' 1
    """
    outputs = {i: _parse_data_spec(i, answer.get("form")).outputs for i, answer in sorted(introductions.items())}
    first = next(iter(outputs))
    odd_site = next((i for i in outputs if outputs[i] != outputs[first]), None)
    if odd_site is not None and not get_task(introductions[first]["task"]).outputs_are_classes:
        raise UserError(
            f"{name} needs labels of one form, but {odd_site!r} has {outputs[odd_site]} a row, {first!r} {outputs[first]}"
        )


def check_same_representation_width(introductions: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Raises a `UserError` if last layers' inputs differ in size, or a site does not report it.

    >>> check_same_representation_width({"north": {"width": 3}, "south": {"width": 5}}, "fedproto")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: fedproto needs representations of one width, but the last layer of 'south' takes 5
    numbers, that of 'north' 3; give the networks last layers of one width
    """
    widths = {i: answer.get("width") for i, answer in sorted(introductions.items())}
    first = next(iter(widths))
    for i, width in widths.items():
        if not is_whole_number(width, 1):
            raise UserError(f"site {i!r} does not report how many numbers its network's last layer takes")
        if width != widths[first]:
            raise UserError(
                f"{name} needs representations of one width, but the last layer of {i!r} takes {width} numbers, that of "
                f"{first!r} {widths[first]}; give the networks last layers of one width"
            )


def check_same_input_specs(introductions: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Raises a `UserError` if the inputs of two sites differ in data type, in shape, or in the names of their parts.

    >>> check_same_input_specs(
    ...     {"north": {"inputs": {"x": ["float32", [4]]}}, "south": {"inputs": {"x": ["uint8", [4]]}}}, "heterofl")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: heterofl needs inputs of one form, but those of 'south' are {'x': ['uint8', [4]]}, those
    of 'north' {'x': ['float32', [4]]}
    """
    specs = {i: answer.get("inputs") for i, answer in sorted(introductions.items())}
    first = next(iter(specs))
    for i, spec in specs.items():
        if not spec or not isinstance(spec, dict):
            raise UserError(f"site {i!r} does not report the types and shapes of its inputs")
        if spec != specs[first]:
            raise UserError(
                f"{name} needs inputs of one form, but those of {i!r} are {str(spec)[:200]}, those of {first!r} "
                f"{str(specs[first])[:200]}"
            )


def check_width_family(
    models: Mapping[str, Architecture], architecture_by_site: Mapping[str, str], input_shape: tuple[int, ...], name: str
) -> None:
    """Raises a `UserError` unless the server's architectures differ in layers' widths alone.

    Args:
        models: network factories by name of the architecture.
        architecture_by_site: name of each site's architecture.
        input_shape: shape of an example, as networks get it.
        name: name of the method.

    >>> wide, narrow = (lambda: torch.nn.Linear(2, 4)), (lambda: torch.nn.Linear(2, 3))
    >>> check_width_family({"a": wide, "b": narrow}, {"north": "a"}, (2,), "heterofl")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: heterofl needs networks with the same number of outputs, but that of 'b of
    architectures()' has 3, that of 'north' 4; give all networks one output for each class of the federation
    """
    site_by_architecture = {kind: site for site, kind in sorted(architecture_by_site.items(), reverse=True)}
    networks = {
        site_by_architecture.get(kind, f"{kind} of architectures()"): factory for kind, factory in models.items()
    }
    widest_shape_by_tensor(networks)
    outputs = {
        label: number for label, factory in sorted(networks.items()) if (number := _count_outputs(factory, input_shape))
    }
    first = next((label for label in outputs if label in architecture_by_site), None)
    odd_label = next((label for label in outputs if first is not None and outputs[label] != outputs[first]), None)
    if first is not None and odd_label is not None:
        raise UserError(
            f"{name} needs networks with the same number of outputs, but that of {odd_label!r} has "
            f"{outputs[odd_label]}, that of {first!r} {outputs[first]}; give all networks one output for each class of "
            "the federation"
        )


def _count_outputs(factory: Architecture, inputs: tuple[int, ...]) -> int | None:
    """Returns a network's number of outputs for an example of zeros; None if it cannot run on one."""
    if math.prod(inputs) > _MAX_NUMBERS:
        return None
    # A site reports the type that it stores, which may differ from the type that networks get.
    for dtype in (torch.float32, torch.int64, torch.float64):
        zeros = Examples(torch.zeros(1, *inputs, dtype=dtype), torch.zeros(1))
        try:
            return math.prod(output_shape(cached_module(factory).module, zeros, "the server"))
        except UserError:
            continue
    return None


def input_spec_by_part(inputs: Any) -> dict[str, list[Any]]:
    """Returns {part's name: data type and shape without the example dimension} for all parts of the inputs.

    >>> input_spec_by_part({"age": torch.zeros(5, 1), "image": torch.zeros(5, 1, 8, 8)})
    {'x/age': ['float32', [1]], 'x/image': ['float32', [1, 8, 8]]}
    """
    return {
        name: [str(part.dtype).removeprefix("torch."), list(part.shape[1:])] for name, part in named_leaves(inputs, "x")
    }


def check_public_inputs(public_input_spec: Any, client: Client) -> None:
    """Raises a `RefusalError` unless public examples have types and shapes of the client's inputs.

    The error does not reveal the client's types and shapes.

    Args:
        public_input_spec: `input_spec_by_part` of the public examples.
        client: the site's client.
    """
    if public_input_spec != input_spec_by_part(client.train.x):
        raise RefusalError(
            f"the server's public examples are {str(public_input_spec)[:200]}, and this site's inputs have other types, "
            "shapes or parts; public() in the server's file must return examples like the sites' inputs"
        )


def _parse_data_spec(site: str, value: Any) -> DataSpec:
    try:
        inputs, outputs = value
        spec = DataSpec(tuple(int(size) for size in inputs), int(outputs))
    except (TypeError, ValueError) as error:
        raise UserError(f"site {site!r} reports {value!r}, which is not a data spec") from error
    if not 1 <= spec.outputs <= _MAX_OUTPUTS or not all(size >= 1 for size in spec.inputs):
        raise UserError(f"site {site!r} reports the data spec {value!r}, which no network can have")
    return spec
