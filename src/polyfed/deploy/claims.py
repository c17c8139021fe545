"""What sites say of themselves, once for a run."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from polyfed.algorithms.widths import widest
from polyfed.core.algorithm import Architecture, Client, DataSpec
from polyfed.core.errors import UserError
from polyfed.core.examples import Examples
from polyfed.core.inputs import leaves
from polyfed.core.scratch import scratch
from polyfed.deploy.secure import RefusalError
from polyfed.simulation.trying import output_shape

CLAIMS = ("task", "num_examples", "architecture", "form", "table")
"""Words of the head of an introduction that a site keeps to."""
_MOST_OUTPUTS = 1_000_000
_MOST_NUMBERS = 2**24  # of an example that the server makes to try a network


def changed_claim(first: Mapping[str, Any] | None, head: Mapping[str, Any]) -> str | None:
    """What a site says of itself otherwise than when the run began, if it does.

    >>> changed_claim({"num_examples": 20}, {"num_examples": 10**12})
    'its num_examples is 1000000000000, and was 20 when the run began'
    """
    known = head if first is None else first
    wrong = next((name for name in CLAIMS if head.get(name) != known.get(name)), None)
    return wrong and f"its {wrong} is {head.get(wrong)}, and was {known.get(wrong)} when the run began"


def common_form(told: Mapping[str, Mapping[str, Any]], name: str) -> DataSpec:
    """The form of the data of sites that have one form of inputs; classes are as many as the largest label asks for.

    Raises:
        UserError: they have not, or tell what no form is.

    >>> common_form({"north": {"form": [[4], 2]}, "south": {"form": [[4], 3]}}, "flha_ghn")
    DataSpec(inputs=(4,), outputs=3)
    """
    forms = {i: _form(i, answer.get("form")) for i, answer in sorted(told.items())}
    first = next(iter(forms))
    if other := next((i for i in forms if forms[i].inputs != forms[first].inputs), None):
        raise UserError(
            f"{name} needs inputs of one shape, but those of {other!r} are {forms[other].inputs}, those of {first!r} "
            f"{forms[first].inputs}"
        )
    return DataSpec(forms[first].inputs, max(form.outputs for form in forms.values()))


def check_targets(told: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Raises a `UserError` if sites have other numbers of targets in a row, unless these are numbers of classes.

    >>> check_targets({i: {"task": "regression", "form": [[4], n]} for i, n in (("north", 1), ("south", 2))}, "fedpnas")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: fedpnas needs labels of one form, but 'south' has 2 a row, 'north' 1
    """
    outputs = {i: _form(i, answer.get("form")).outputs for i, answer in sorted(told.items())}
    first = next(iter(outputs))
    odd = next((i for i in outputs if outputs[i] != outputs[first]), None)
    if odd is not None and told[first].get("task") != "classification":
        raise UserError(
            f"{name} needs labels of one form, but {odd!r} has {outputs[odd]} a row, {first!r} {outputs[first]}"
        )


def check_widths(told: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Raises a `UserError` if the last layers of sites' networks take other numbers of inputs, or one tells no such number.

    >>> check_widths({"north": {"width": 3}, "south": {"width": 5}}, "fedproto")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: fedproto needs representations of one width, but the last layer of 'south' takes 5
    numbers, that of 'north' 3; give the networks last layers of one width
    """
    widths = {i: answer.get("width") for i, answer in sorted(told.items())}
    first = next(iter(widths))
    for i, width in widths.items():
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise UserError(f"site {i!r} does not tell how many numbers its network's last layer takes")
        if width != widths[first]:
            raise UserError(
                f"{name} needs representations of one width, but the last layer of {i!r} takes {width} numbers, that of "
                f"{first!r} {widths[first]}; give the networks last layers of one width"
            )


def check_inputs(told: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Raises a `UserError` if sites' inputs, of which each tells `form_of_parts`, have other types, shapes or parts.

    >>> check_inputs({"north": {"inputs": {"x": ["float32", [4]]}}, "south": {"inputs": {"x": ["uint8", [4]]}}}, "heterofl")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: heterofl needs inputs of one form, but those of 'south' are {'x': ['uint8', [4]]}, those
    of 'north' {'x': ['float32', [4]]}
    """
    forms = {i: answer.get("inputs") for i, answer in sorted(told.items())}
    first = next(iter(forms))
    for i, form in forms.items():
        if not form or not isinstance(form, dict):
            raise UserError(f"site {i!r} does not tell the form of its inputs")
        if form != forms[first]:
            raise UserError(
                f"{name} needs inputs of one form, but those of {i!r} are {str(form)[:200]}, those of {first!r} "
                f"{str(forms[first])[:200]}"
            )


def check_family(
    models: Mapping[str, Architecture], kinds: Mapping[str, str], inputs: tuple[int, ...], name: str
) -> None:
    """Raises a `UserError` unless the server's networks are a family that differs in width, all with as many outputs.

    Args:
        models: by the name of the architecture.
        kinds: name of a site -> that of its architecture.
        inputs: shape of an example, as networks get it.
        name: of the method.

    >>> wide, narrow = (lambda: torch.nn.Linear(2, 4)), (lambda: torch.nn.Linear(2, 3))
    >>> check_family({"a": wide, "b": narrow}, {"north": "a"}, (2,), "heterofl")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: heterofl needs networks with the same number of outputs, but that of 'b of
    architectures()' has 3, that of 'north' 4; give all networks one output for each class of the federation
    """
    holders = {kind: site for site, kind in sorted(kinds.items(), reverse=True)}
    networks = {holders.get(kind, f"{kind} of architectures()"): factory for kind, factory in models.items()}
    widest(networks)
    outputs = {who: number for who, factory in sorted(networks.items()) if (number := _outputs_of(factory, inputs))}
    first = next((who for who in outputs if who in kinds), None)
    odd = next((who for who in outputs if first is not None and outputs[who] != outputs[first]), None)
    if first is not None and odd is not None:
        raise UserError(
            f"{name} needs networks with the same number of outputs, but that of {odd!r} has {outputs[odd]}, that of "
            f"{first!r} {outputs[first]}; give all networks one output for each class of the federation"
        )


def _outputs_of(factory: Architecture, inputs: tuple[int, ...]) -> int | None:
    """How many outputs a network has; None if it takes no example of zeros, and only its site can try it."""
    if math.prod(inputs) > _MOST_NUMBERS:
        return None
    for dtype in (
        torch.float32,
        torch.int64,
        torch.float64,
    ):  # a site tells the type that it stores, not what networks get
        zeros = Examples(torch.zeros(1, *inputs, dtype=dtype), torch.zeros(1))
        try:
            return math.prod(output_shape(scratch(factory).module, zeros, "the server"))
        except UserError:
            continue
    return None


def form_of_parts(x: Any) -> dict[str, list[Any]]:
    """Type and shape, without the rows, by the name that a part of inputs has in a message.

    >>> form_of_parts({"age": torch.zeros(5, 1), "image": torch.zeros(5, 1, 8, 8)})
    {'x/age': ['float32', [1]], 'x/image': ['float32', [1, 8, 8]]}
    """
    return {name: [str(part.dtype).removeprefix("torch."), list(part.shape[1:])] for name, part in leaves(x, "x")}


def check_public_form(form: Any, client: Client) -> None:
    """Raises a `RefusalError` unless the server's public examples, of which it tells `form_of_parts`, have the form of a
    client's inputs; it does not show that form."""
    if form != form_of_parts(client.train.x):
        raise RefusalError(
            f"the server's public examples are {str(form)[:200]}, and this site's inputs have other types, shapes or parts; "
            "let public() in the server's file give examples of the form of the sites' inputs"
        )


def _form(site: str, told: Any) -> DataSpec:
    try:
        inputs, outputs = told
        form = DataSpec(tuple(int(size) for size in inputs), int(outputs))
    except (TypeError, ValueError) as error:
        raise UserError(f"site {site!r} does not tell the form of its data, but {told!r}") from error
    if not 1 <= form.outputs <= _MOST_OUTPUTS or not all(size >= 1 for size in form.inputs):
        raise UserError(f"site {site!r} tells that its data have the form {told!r}, which no network can have")
    return form
