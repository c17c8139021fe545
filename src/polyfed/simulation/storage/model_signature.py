"""Describes a saved network in `models/ID.signature.json`, so that it can be built, used and exported without the run's
data.

The file holds shapes, counts and constants of the preprocessing, and no example.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import safetensors.torch
import torch
from torch import Tensor

from polyfed.core.algorithm import Architecture, Client
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples, Normalise, PartwiseTransform
from polyfed.core.io.atomic_files import read_file, write_file_atomically
from polyfed.core.io.trusted_code import import_trusted_callable, is_code_trusted
from polyfed.core.io.values.number_checks import is_whole_number
from polyfed.core.io.values.plain_values import to_plain_values
from polyfed.core.io.values.validation import parse_json, validation_error
from polyfed.core.state_dict import StateDict
from polyfed.core.tasks.task import TaskSpec
from polyfed.data.formats.lazy_images import LazyImageDecoder
from polyfed.data.tabular.preprocessing import TablePreprocessor
from polyfed.models import ModelSpec
from polyfed.simulation.storage.directory import encode_json
from polyfed.simulation.storage.paths import safe_file_name

SIGNATURE_SUFFIX = ".signature.json"
PREPROCESSING_SUFFIX = ".preprocessing.json"
_DescribedTransform = Normalise | LazyImageDecoder | TablePreprocessor  # transforms whose constants a signature holds


class ModelInput(TypedDict):
    """Describes one input tensor of a network: name, shape, type and preprocessing.

    Attributes:
        name: of the input.
        shape: without the batch.
        dtype: without "torch.".
        normalise: mean and std of each channel for images of uint8, (x / 255 − mean) / std; else None.
        prepared: for a part of the inputs that is rows of a table, `TablePreprocessor.to_json_dict()`.
    """

    name: str
    shape: list[int]
    dtype: str
    normalise: dict[str, list[float]] | None
    prepared: NotRequired[dict[str, Any]]


class BuiltInNetwork(TypedDict):
    """Holds the name and arguments of one of polyfed's built-in networks, from which a `ModelSpec` builds it."""

    name: str
    arguments: dict[str, Any]
    input_shape: list[int]
    num_classes: int


class Signature(TypedDict):
    """Describes the content of `ID.signature.json`: inputs, task and architecture of a saved network.

    Attributes:
        client: id of the client.
        task: of the client.
        inputs: the input tensors.
        tree: how they form the network's input (`polyfed.core.examples.pytree`): a position in `inputs`, or a list or
            mapping of such.
        transform: name of the owner's own function, whose result the inputs describe; "part: function" for a part of
            them.
        network: None for a network that a function in Python builds.
        factory: that function as `module:name`, if it can be imported.
        examples: split -> number of examples.
    """

    client: str
    task: TaskSpec
    inputs: list[ModelInput]
    tree: Any
    transform: str | None
    network: BuiltInNetwork | None
    factory: NotRequired[str]
    examples: dict[str, int]


def build_model_signature(client: Client) -> Signature:
    """Describes a saved network (inputs, task, architecture) from examples and model factory.

    >>> client = Client("north", None, (torch.zeros(3, 4), torch.tensor([0, 1, 1])), (torch.zeros(1, 4), torch.tensor([1])))
    >>> build_model_signature(client)["inputs"], build_model_signature(client)["examples"]
    ([{'name': 'x', 'shape': [4], 'dtype': 'float32', 'normalise': None}], {'train': 3, 'test': 1})
    """
    train, transform_name, name = client.train, None, "x"
    transform: Any = train.transform
    x: Any = train.x
    described_transforms: dict[str, _DescribedTransform] = (
        {"": transform} if isinstance(transform, _DescribedTransform) else {}
    )
    if isinstance(transform, TablePreprocessor):
        x, name, described_transforms = torch.empty((1, len(transform.columns)), dtype=torch.float64), "rows", {}
    elif isinstance(transform, PartwiseTransform):
        described_transforms = {
            part: how for part, how in transform.transforms.items() if isinstance(how, _DescribedTransform)
        }
        if custom_transforms := {
            part: how for part, how in transform.transforms.items() if part not in described_transforms
        }:
            untransformed = replace(train, transform=PartwiseTransform(custom_transforms), augment=None)
            x = untransformed.batch(torch.tensor([0], device=train.labels.device))[0]
            transform_name = ", ".join(f"{part}: {_qualified_name(how)}" for part, how in custom_transforms.items())
    elif transform is not None and not described_transforms:
        x = train.batch(torch.tensor([0], device=train.labels.device))[0]
        transform_name = _qualified_name(transform)
    elif "" in described_transforms:
        name = "images"
    inputs: list[ModelInput] = []
    tree = _describe_inputs(x, "", described_transforms, inputs)
    if "" in (input_names := [entry["name"] for entry in inputs]):
        inputs[input_names.index("")]["name"] = name
    sets = {"train": train, "val": client.val, "test": client.test, "global_test": client.global_test}
    counts = {name: len(part) for name, part in sets.items() if isinstance(part, Examples)}
    signature: Signature = {
        "client": client.id, "task": client.task.spec, "inputs": inputs, "tree": tree, "transform": transform_name,
        "network": _describe_network(client.model), "examples": counts,
    }  # fmt: skip
    if (import_path := _find_import_path(client.model)) is not None:
        signature["factory"] = import_path
    return signature


def _qualified_name(function: Any) -> str:
    """Returns the module and name of a function or an object's class, which tell no content."""
    kind = type(function)
    return f"{kind.__module__}.{getattr(function, '__qualname__', kind.__qualname__)}"


def _describe_inputs(
    x: Any, name: str, described_transforms: "Mapping[str, _DescribedTransform]", inputs: list[ModelInput]
) -> Any:
    """Returns the inputs' structure with each tensor's position, and appends its description to `inputs`."""
    if isinstance(x, Tensor):
        transform = described_transforms.get(name)
        if isinstance(transform, LazyImageDecoder):  # the stored inputs are positions of images
            x, transform = torch.empty((1, *transform.shape), dtype=torch.uint8), transform.normalise
        if isinstance(transform, TablePreprocessor):  # as for inputs that are rows of a table only
            x = x.double()
        normalise = (
            {"mean": list(transform.mean), "std": list(transform.std)} if isinstance(transform, Normalise) else None
        )
        dtype = str(x.dtype).removeprefix("torch.")
        entry: ModelInput = {"name": name, "shape": list(x.shape[1:]), "dtype": dtype, "normalise": normalise}
        inputs.append(
            {**entry, "prepared": transform.to_json_dict()} if isinstance(transform, TablePreprocessor) else entry
        )
        return len(inputs) - 1
    prefix = f"{name}/" if name else ""
    if isinstance(x, Mapping):
        return {
            str(key): _describe_inputs(part, f"{prefix}{key}", described_transforms, inputs) for key, part in x.items()
        }
    return [
        _describe_inputs(part, f"{prefix}{position}", described_transforms, inputs) for position, part in enumerate(x)
    ]


def _describe_network(model: Any) -> BuiltInNetwork | None:
    """Describes the built-in network that a `ModelSpec` builds; returns None for any other model factory."""
    if not isinstance(model, ModelSpec):
        return None
    try:
        arguments = to_plain_values(dict(model.arguments), "model")
    except UserError:  # arguments that cannot be written to a file
        return None
    return {
        "name": model.name, "arguments": arguments, "input_shape": list(model.input_shape),
        "num_classes": model.num_classes,
    }  # fmt: skip


def _find_import_path(model: Any) -> str | None:
    """Returns `module:name` of a function or class that can be imported by it; None for others, as of a notebook."""
    module, name = getattr(model, "__module__", None), getattr(model, "__qualname__", "")
    try:
        is_importable = module != "__main__" and attrgetter(name)(sys.modules[str(module)]) is model
    except (AttributeError, KeyError):
        return None
    return f"{module}:{name}" if is_importable else None


def find_factory_of_signature(signature: Signature) -> Architecture | None:
    """Returns what builds the network of a signature; None for a function in Python, unless this process trusts it.

    Raises:
        UserError: the function is trusted, and cannot be imported.
    """
    if signature["network"] is not None:
        return spec_from_signature(signature["network"])
    import_path = signature.get("factory")
    return import_trusted_callable(import_path) if import_path and is_code_trusted(import_path) else None


def spec_from_signature(network: BuiltInNetwork) -> ModelSpec:
    """Returns the `ModelSpec` that builds the built-in network described in a signature file."""
    return ModelSpec(network["name"], network["arguments"], tuple(network["input_shape"]), network["num_classes"])


def write_model_with_signature(
    path: Path, weights: Mapping[str, Tensor], description: Any, client: Client | None
) -> None:
    """Writes a personal network's weights, and next to them the files needed to use it.

    Args:
        path: of the weights.
        weights: of the network.
        description: of the network, if the method brings its own; else None.
        client: the owner; None if it is elsewhere.
    """
    write_weights_and_description(path, weights, description)
    if client is None:
        return
    write_file_atomically(path.with_name(f"{path.stem}{SIGNATURE_SUFFIX}"), encode_json(build_model_signature(client)))
    if isinstance(client.train.transform, TablePreprocessor):
        described = client.train.transform.to_json_dict()
        write_file_atomically(path.with_name(f"{path.stem}{PREPROCESSING_SUFFIX}"), encode_json(described))


def remove_other_models(folder: Path, clients: Sequence[str]) -> None:
    """Removes from a folder the models of other clients than these, which an earlier end of the run has written there."""
    names = {safe_file_name(client) for client in clients}
    for file in folder.glob("*"):
        if file.name.removesuffix(SIGNATURE_SUFFIX).removesuffix(".safetensors") not in names:
            file.unlink()


def read_signature(path: Path) -> Signature:
    """Reads the signature file of a saved network, which describes its inputs, task and architecture.

    Raises:
        UserError: the file is damaged.
        OSError: it cannot be read.
    """
    try:
        content: Signature = parse_json(read_file(path))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); run again, or put back a copy") from error
    if error_text := validation_error(content, Signature):
        raise UserError(f"{path} is damaged: {error_text}; run again, or put back a copy")
    positions = sorted(_list_positions(content["tree"]))
    if positions != list(range(len(content["inputs"]))):
        raise UserError(f"{path} is damaged: tree does not name each of its inputs once; run again, or put back a copy")
    return content


def _list_positions(tree: Any) -> list[int]:
    if is_whole_number(tree):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else [None]
    return [position for part in parts for position in ([-1] if part is None else _list_positions(part))]


def write_weights_and_description(path: Path, weights: StateDict, description: Mapping[str, Any] | None = None) -> None:
    """Writes a network's weights as a safetensors file, and next to it the network's description, if there is one."""
    files = {path: safetensors.torch.save({n: t.contiguous() for n, t in weights.items()})}
    if description is not None:
        files[path.with_suffix(".json")] = json.dumps(description, indent=1).encode()
    for file, content in files.items():
        write_file_atomically(file, content)
