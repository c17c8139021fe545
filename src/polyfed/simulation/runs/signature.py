"""What a kept network takes: `models/ID.signature.json`, with which it can be built, used and exported without the data of
the run. It holds forms, counts and constants of the preprocessing, and no example."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from polyfed.core.algorithm import Client, Task
from polyfed.core.errors import UserError
from polyfed.core.examples import ByPart, Examples, Normalise
from polyfed.core.files import read_file
from polyfed.core.typed import conforms, from_json
from polyfed.data.features import Prepared
from polyfed.data.lazy import Decoded
from polyfed.models import ModelSpec
from polyfed.simulation.runs.directory import as_json, plain, replace_file, write_weights

ENDING = ".signature.json"
PREPROCESSING = ".preprocessing.json"
_Known = Normalise | Decoded | Prepared  # transforms whose constants a signature holds


class Input(TypedDict):
    """One tensor that goes in: its name, its shape without the batch, its type without "torch."; and what follows: for
    images of uint8, (x / 255 − mean) / std per channel; for a part of several that holds rows of a table, `prepared`, which
    is `Prepared.described`."""

    name: str
    shape: list[int]
    dtype: str
    normalise: dict[str, list[float]] | None
    prepared: NotRequired[dict[str, Any]]


class Network(TypedDict):
    """A network that a `ModelSpec` builds."""

    name: str
    arguments: dict[str, Any]
    input_shape: list[int]
    num_classes: int


class Signature(TypedDict):
    """What `ID.signature.json` holds.

    `inputs` are the tensors, and `tree` says how they make up what the network is called with (`polyfed.core.inputs`): a
    position among them, or a list or mapping of such. `transform` names a function of the owner's, after which the inputs
    are as described; where it is of a part, "part: function". `examples` counts by split. `network` is None
    for a network that was made in Python by a function.
    """

    client: str
    task: Task
    inputs: list[Input]
    tree: Any
    transform: str | None
    network: Network | None
    examples: dict[str, int]


def signature_of(client: Client) -> Signature:
    """Of a client's network, from its examples and its factory.

    >>> client = Client("north", None, (torch.zeros(3, 4), torch.tensor([0, 1, 1])), (torch.zeros(1, 4), torch.tensor([1])))
    >>> signature_of(client)["inputs"], signature_of(client)["examples"]
    ([{'name': 'x', 'shape': [4], 'dtype': 'float32', 'normalise': None}], {'train': 3, 'test': 1})
    """
    train, other, name = client.train, None, "x"
    transform: Any = train.transform
    x: Any = train.x
    scaled: dict[str, _Known] = {"": transform} if isinstance(transform, _Known) else {}
    if isinstance(transform, Prepared):
        x, name, scaled = torch.empty((1, len(transform.columns)), dtype=torch.float64), "rows", {}
    elif isinstance(transform, ByPart):
        scaled = {part: how for part, how in transform.of.items() if isinstance(how, _Known)}
        if own := {part: how for part, how in transform.of.items() if part not in scaled}:
            one = replace(train, transform=ByPart(own), augment=None)
            x = one.batch(torch.tensor([0], device=train.labels.device))[0]
            other = ", ".join(f"{part}: {_called(how)}" for part, how in own.items())
    elif transform is not None and not scaled:
        x = train.batch(torch.tensor([0], device=train.labels.device))[0]
        other = _called(transform)
    elif "" in scaled:
        name = "images"
    inputs: list[Input] = []
    tree = _walked(x, "", scaled, inputs)
    if "" in (lone := [one["name"] for one in inputs]):
        inputs[lone.index("")]["name"] = name
    sets = {"train": train, "val": client.val, "test": client.test, "global_test": client.global_test}
    counts = {name: len(part) for name, part in sets.items() if isinstance(part, Examples)}
    return {
        "client": client.id, "task": client.task, "inputs": inputs, "tree": tree, "transform": other,
        "network": _network(client.model), "examples": counts,
    }  # fmt: skip


def _called(function: Any) -> str:
    """Where a function is from. The class of an object says nothing of what the object holds."""
    kind = type(function)
    return f"{kind.__module__}.{getattr(function, '__qualname__', kind.__qualname__)}"


def _walked(x: Any, name: str, scaled: "Mapping[str, _Known]", found: list[Input]) -> Any:
    """The tree of positions of the tensors in a batch, which are added to `found`."""
    if isinstance(x, Tensor):
        how = scaled.get(name)
        if isinstance(how, Decoded):  # what is stored are numbers of images
            x, how = torch.empty((1, *how.shape), dtype=torch.uint8), how.normalise
        if isinstance(how, Prepared):  # as rows of a table alone are
            x = x.double()
        normalise = {"mean": list(how.mean), "std": list(how.std)} if isinstance(how, Normalise) else None
        dtype = str(x.dtype).removeprefix("torch.")
        one: Input = {"name": name, "shape": list(x.shape[1:]), "dtype": dtype, "normalise": normalise}
        found.append({**one, "prepared": how.described()} if isinstance(how, Prepared) else one)
        return len(found) - 1
    below = f"{name}/" if name else ""
    if isinstance(x, Mapping):
        return {str(key): _walked(part, f"{below}{key}", scaled, found) for key, part in x.items()}
    return [_walked(part, f"{below}{position}", scaled, found) for position, part in enumerate(x)]


def _network(model: Any) -> Network | None:
    if not isinstance(model, ModelSpec):
        return None
    try:
        arguments = plain(dict(model.arguments), "model")
    except UserError:  # of objects that no file holds
        return None
    return {
        "name": model.name, "arguments": arguments, "input_shape": list(model.input_shape),
        "num_classes": model.num_classes,
    }  # fmt: skip


def spec_of(network: Network) -> ModelSpec:
    """What builds the network."""
    return ModelSpec(network["name"], network["arguments"], tuple(network["input_shape"]), network["num_classes"])


def write_model(path: Path, weights: Mapping[str, Tensor], description: Any, client: Client | None) -> None:
    """A personal network at `path` (`ID.safetensors`), with what is needed to use it beside it.

    Args:
        path: of the weights.
        weights: of the network.
        description: with which a method builds it that brings its own network; or None.
        client: whose it is; None where its owner is elsewhere.
    """
    write_weights(path, weights, description)
    if client is None:
        return
    replace_file(path.with_name(f"{path.stem}{ENDING}"), as_json(signature_of(client)))
    if isinstance(client.train.transform, Prepared):
        described = client.train.transform.described()
        replace_file(path.with_name(f"{path.stem}{PREPROCESSING}"), as_json(described))


def read_signature(path: Path) -> Signature:
    """The signature in a file.

    Raises:
        UserError: it is damaged.
        OSError: it cannot be read.
    """
    try:
        content: Signature = from_json(read_file(path))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); run again, or put back a copy") from error
    if wrong := conforms(content, Signature):
        raise UserError(f"{path} is damaged: {wrong}; run again, or put back a copy")
    positions = sorted(_positions(content["tree"]))
    if positions != list(range(len(content["inputs"]))):
        raise UserError(f"{path} is damaged: tree does not name each of its inputs once; run again, or put back a copy")
    return content


def _positions(tree: Any) -> list[int]:
    if isinstance(tree, int) and not isinstance(tree, bool):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else [None]
    return [position for part in parts for position in ([-1] if part is None else _positions(part))]
