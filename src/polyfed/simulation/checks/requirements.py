"""Checks before the first round that the clients meet the method's requirements, and that the networks fit their
data."""

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import nn

from polyfed.algorithms import REGISTRY, Local, registry_name
from polyfed.algorithms.submodels.widths import widest_shape_by_tensor
from polyfed.alignment.representations import compute_representations
from polyfed.core.algorithm import Algorithm, Architecture, Client, DataSpec
from polyfed.core.errors import UserError, warn_of_data
from polyfed.core.examples.examples import Examples, PartwiseTransform
from polyfed.core.examples.pytree import input_spec_of, named_leaves
from polyfed.core.messages.lora import (
    adapter_averaging_mode,
    architecture_key_without_averaged_lora_ranks,
    network_with_largest_ranks,
)
from polyfed.core.methods.capabilities import BringsNetwork
from polyfed.core.methods.declared_words import MODEL_REQUIREMENTS, ONE_CLASS, check_declared_words_are_known
from polyfed.core.nn.module_cache import (
    CachedModule,
    architecture_hash,
    architectures_differ_only_in_frozen_values,
    build_module,
    cached_module,
    forget_cached_networks,
)
from polyfed.core.tasks.task import Task
from polyfed.simulation.checks.clients.client_init import check_client_init
from polyfed.simulation.checks.clients.client_list import list_clients
from polyfed.simulation.checks.clients.data_leakage import warn_of_test_leakage
from polyfed.simulation.checks.clients.table_schemas import check_public_table, check_table_schemas
from polyfed.simulation.checks.clients.token_range import check_tokens_in_vocabulary
from polyfed.simulation.checks.networks import trial_forward
from polyfed.simulation.checks.networks.network_layers import (
    cached_module_of,
    check_batch_norm_gets_no_single_example,
    check_network_tensors_and_layers,
)
from polyfed.simulation.checks.value_descriptions import describe_values, own_attributes


def check_clients(clients: Sequence[Client]) -> None:
    """Checks that ids differ and there is one task; warns of leaked test examples and unusable targets.

    Raises:
        UserError: no clients, something that is not a client, an id that occurs twice, or several tasks.

    For the warning see `polyfed.simulation.checks.clients.data_leakage`.
    """
    clients = list_clients(clients)
    twice = [i for i, count in Counter(client.id for client in clients).items() if count > 1]
    if twice:
        raise UserError(f"two clients have the id {twice[0]!r}; ids must differ")
    tasks = sorted({str(client.task) for client in clients})
    if len(tasks) > 1:
        raise UserError(f"clients of one federation must have one task, got {' and '.join(tasks)}")
    warn_of_test_leakage(clients)
    for client in clients:
        if (limit := client.task.target_warning(client.train.labels, client.test.labels)) is not None:
            warnings.warn(f"client {client.id!r} has {limit}", UserWarning, stacklevel=2)


def warn_of_single_client(ids: Sequence[str], methods: Iterable[Algorithm[Any, Any]]) -> None:
    """Warns if a federation has one client, unless all methods train each client alone."""
    if len(ids) == 1 and not all(isinstance(method, Local) for method in methods):
        warn_of_data(f"there is one client, {ids[0]!r}, which has nobody to train with: give at least two")


def check_requirements(clients: Sequence[Client], algorithm: Algorithm[Any, Any], public: Examples | None) -> None:
    """Raises a `UserError` if clients or public examples fail a requirement; names methods that would do."""
    if "public_data" in algorithm.requires and public is None:
        raise UserError(
            f"{registry_name(algorithm)} needs public examples that are no client's data; give public=... "
            "(--data.public_fraction)"
        )
    if "public_data" in algorithm.requires and public is not None:
        _check_public(clients, public)
    check_clients_suit_method(clients, algorithm)
    check_client_init(clients, algorithm)
    if public is not None:
        fields = ("digest_batch_size", *(("server_batch_size",) if "architectures" in algorithm.requires else ()))
        check_batch_norm_gets_no_single_example(clients, algorithm, dict.fromkeys(fields, public))


def check_clients_suit_method(clients: Sequence[Client], algorithm: Algorithm[Any, Any]) -> None:
    """Raises a `UserError` if the clients' networks or data (public examples apart) do not suit the method."""
    name = registry_name(algorithm)
    check_declared_words_are_known(algorithm, type(algorithm).__name__)
    check_table_schemas(clients, algorithm)
    _check_data_suit_method(clients, algorithm.requires, name)
    if not algorithm.requires & MODEL_REQUIREMENTS:
        if isinstance(algorithm, BringsNetwork):
            if clients[0].task.has_output_at_each_place:
                raise UserError(f"{name} brings networks with one output vector an example, and has none for the task "
                                f"{clients[0].task}; choose a method that trains the clients' own networks")  # fmt: skip
            method_network = algorithm.network_for(common_data_spec(clients, name))
            check_batch_norm_gets_no_single_example(clients, algorithm, {"batch_size": None}, method_network)
        return
    if ids_without_model := [client.id for client in clients if client.model is None]:
        raise UserError(f"{name} trains each client's own network, but client {ids_without_model[0]!r} has model=None")
    architecture_by_client = {
        client.id: architecture_key_without_averaged_lora_ranks(algorithm, cached_module_of(client))
        for client in clients
    }
    check_network_tensors_and_layers(clients, algorithm)
    check_batch_norm_gets_no_single_example(clients, algorithm, {"batch_size": None})
    models = {client.id: client.model for client in clients if client.model is not None}
    _check_network_outputs_and_widths(clients, models, algorithm.requires, name)
    if "one_architecture" in algorithm.requires:
        _check_one_architecture(architecture_by_client, name)
    if (mode := adapter_averaging_mode(algorithm)) is not None:
        network_with_largest_ranks(models, mode)


def _first_difference(value_by_client: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the first client, and the first of another value than it has; None if all values are equal."""
    first = next(iter(value_by_client))
    return next(((first, i) for i, value in value_by_client.items() if value != value_by_client[first]), None)


def _check_data_suit_method(clients: Sequence[Client], requirements: Collection[str], name: str) -> None:
    if ONE_CLASS in requirements and (unsuited := [c for c in clients if not c.task.one_class_per_example]):
        raise UserError(f"{name} needs one class per example, but the task of {unsuited[0].id!r} is {unsuited[0].task}")
    if "one_input_spec" in requirements:
        forms = {client.id: str(input_spec_of(client.train.x)) for client in clients}
        if difference := _first_difference(forms):
            first, other = difference
            raise UserError(
                f"{name} needs inputs of one form, but those of {other!r} are {forms[other]}, those of {first!r} "
                f"{forms[first]}"
            )
    for client in clients if "images" in requirements else ():
        form = input_spec_of(_first_input(client))
        if len(form.shape) != 3:
            shape_text = form if form.container else f"of shape {form.shape}"
            raise UserError(
                f"{name} needs images, inputs of shape (channels, height, width), but those of {client.id!r} are "
                f"{shape_text}"
            )
    if "one_data_spec" in requirements:
        common_data_spec(clients, name)


def _check_network_outputs_and_widths(
    clients: Sequence[Client], models: Mapping[str, Architecture], requirements: Collection[str], name: str
) -> None:
    if "one_representation" in requirements:
        widths = {client.id: representation_width(client) for client in clients}
        if difference := _first_difference(widths):
            first, other = difference
            raise UserError(
                f"{name} needs representations of one width, but the last layer of {other!r} takes {widths[other]} "
                f"numbers, that of {first!r} {widths[first]}; give the networks last layers of one width"
            )
    if "one_family" in requirements:
        widest_shape_by_tensor(models)
        shapes = {
            c.id: trial_forward.output_shape(cached_module_of(c).module, c.train, f"client {c.id!r}") for c in clients
        }
        if difference := _first_difference(shapes):
            first, other = difference
            raise UserError(
                f"{name} needs networks with the same number of outputs, but that of {other!r} has "
                f"{_describe_outputs(shapes[other])}, that of {first!r} {_describe_outputs(shapes[first])}; give all "
                "networks one output for each class of the federation"
            )


def _check_one_architecture(architecture_by_client: Mapping[str, str], name: str) -> None:
    if (difference := _first_difference(architecture_by_client)) is None:
        return
    first, other = difference
    if architectures_differ_only_in_frozen_values(architecture_by_client[first], architecture_by_client[other]):
        raise UserError(
            f"{name} needs one architecture, and the networks of {other!r} and {first!r} differ in frozen "
            "parameters (requires_grad=False); begin all clients' networks with the same pretrained weights"
        )
    mixed = sorted(
        n for n, m in REGISTRY.items() if m.requires & MODEL_REQUIREMENTS and "one_architecture" not in m.requires
    )
    raise UserError(
        f"{name} needs one architecture, but the {len(architecture_by_client)} clients have "
        f"{len(set(architecture_by_client.values()))}: {other!r} differs from {first!r}. Methods for "
        f"different architectures: {', '.join(mixed)}"
    )


def representation_width(client: Client) -> int:
    """Returns the inputs of a network's last linear layer; raises a `UserError` if there is none."""
    assert client.model is not None
    network = cached_module(client.model).module
    try:
        return compute_representations(network, client.train.head()).shape[1]
    except UserError as error:
        raise UserError(f"client {client.id!r}: {error}") from error


def client_data_spec(client: Client) -> DataSpec:
    """Returns the shape of a client's inputs, and the number of logits that its labels need.

    Raises:
        UserError: the network takes several tensors, which a `DataSpec` cannot describe.
    """
    form = input_spec_of(_first_input(client))
    if form.container:
        raise UserError(f"client {client.id!r}: its inputs have several parts ({form}), where inputs of one tensor are "
                        "needed: use another method, or pack them into one tensor")  # fmt: skip
    return DataSpec(form.shape, num_outputs_needed(client))


def num_outputs_needed(client: Client) -> int:
    """Returns the number of logits that a client's network needs for its labels."""
    return max(client.task.num_outputs(data.labels) for data in examples_by_split(client).values())


def _first_input(client: Client) -> Any:
    """Returns the client's first example as the network would receive it."""
    return client.train.batch(torch.zeros(1, dtype=torch.int64, device=client.train.device))[0]


def common_data_spec(clients: Sequence[Client], name: str = "the method") -> DataSpec:
    """Returns the input shape and number of classes (largest label plus one) that suit all clients.

    Raises:
        UserError: input shapes or numbers of outputs differ.
    """
    forms = {client.id: client_data_spec(client) for client in clients}
    first = clients[0]
    for i, form in forms.items():
        if form.inputs != forms[first.id].inputs:
            raise UserError(f"{name} needs inputs of one shape, but those of {i!r} are {form.inputs}, those of {first.id!r} "
                            f"{forms[first.id].inputs}")  # fmt: skip
        if not first.task.outputs_are_classes and form.outputs != forms[first.id].outputs:
            raise UserError(f"{name} needs labels of one form, but {i!r} has {form.outputs} a row, {first.id!r} "
                            f"{forms[first.id].outputs}")  # fmt: skip
    return DataSpec(forms[first.id].inputs, max(form.outputs for form in forms.values()))


def _check_public(clients: Sequence[Client], public: Examples) -> None:
    """Checks that public examples have the form and preprocessing of each client's own inputs."""
    compared: list[tuple[Any, Any]] = []
    if not len(public):
        raise UserError("public holds no examples; give some (public=..., or --data.public_fraction)")
    for client in clients:
        if input_spec_of(public.x) != input_spec_of(client.train.x):
            raise UserError(
                f"the public examples (public=...) are {input_spec_of(public.x)}, but the inputs of client "
                f"{client.id!r} are {input_spec_of(client.train.x)}; give public examples of the same form"
            )
        check_public_table(client, public)
        public_transform, client_transform = public.transform, client.train.transform
        if (public_transform, client_transform) in compared:
            continue
        few = torch.arange(min(2, len(public)), device=public.device)
        if not _are_equal_inputs(public.batch(few)[0], replace(public, transform=client_transform).batch(few)[0]):
            raise UserError(
                f"the public examples (public=...) are prepared by {stable_repr(public_transform)}, the inputs of client "
                f"{client.id!r} by {stable_repr(client_transform)}, which gives something else; prepare both alike"
            )
        compared.append((public_transform, client_transform))


def _are_equal_inputs(a: Any, b: Any) -> bool:
    parts = zip(named_leaves(a), named_leaves(b), strict=False)
    return input_spec_of(a) == input_spec_of(b) and all(
        torch.equal(part_a, part_b) for (_, part_a), (_, part_b) in parts
    )


def architecture_keys_by_client(clients: Sequence[Client]) -> dict[str, str]:
    """Returns `{client id: short name of the client's architecture}` for all clients that have a network."""
    return {client.id: cached_module_of(client).architecture for client in clients if client.model is not None}


def check_networks_run(
    clients: Sequence[Client], num_outputs: int | None = None, factory: Architecture | None = None
) -> None:
    """Tries each network on two examples, once per architecture and form of inputs.

    Args:
        clients: their networks are tried.
        num_outputs: the number of outputs that each network must have; None if the data do not say how many classes there
            are.
        factory: builds the network of the method, which is tried in place of the clients' own.

    Raises:
        UserError: a network has nothing to train, or other frozen parameters each time it is built, or fails on its data,
            or its output does not suit the labels; or a client has one example to train on and BatchNorm needs two.
    """
    outputs: dict[Any, tuple[int, ...]] = {}
    single: set[Any] = set()
    built: set[int] = set()
    for client in clients:
        if client.model is None and factory is None:
            continue
        cached = cached_module_of(client) if factory is None else cached_module(factory)
        if client.model is not None and factory is None and id(client.model) not in built:
            built.add(id(client.model))
            rebuilt = build_module(client.model, seed=0)
            if _is_stale(cached, rebuilt):
                forget_cached_networks()
                cached = cached_module_of(client)
            if shared_name := _common_tensor(cached.module, rebuilt):
                raise UserError(
                    f"client {client.id!r}: its model factory puts the same {shared_name!r} into each network that it "
                    "builds, so that all clients would train one network; build a new one at each call, model=lambda: "
                    "MyNet(), or a copy, model=lambda: copy.deepcopy(network)"
                )
            if cached.architecture.partition("-")[2] != architecture_hash(rebuilt).partition("-")[2]:
                raise UserError(
                    f"client {client.id!r}: its network has other frozen parameters (requires_grad=False) each time it is "
                    "built; load them from a file, or draw them by torch's own generator"
                )
            trial_forward.check_finite_weights(rebuilt, f"client {client.id!r}")
        if not any(parameter.requires_grad for parameter in cached.module.parameters()):
            raise UserError(f"client {client.id!r}: its network has no parameters that can be trained "
                            "(requires_grad); there is nothing to federate")  # fmt: skip
        for name, data in examples_by_split(client).items():
            key = (cached.architecture, input_spec_of(data.x), repr(data.transform))
            check_tokens_in_vocabulary(cached.module, data, f"client {client.id!r}: {name}")
            if key not in outputs:
                outputs[key] = trial_forward.output_shape(cached.module, data, f"client {client.id!r}")
            if name == "train" and len(data) == 1 and key not in single:
                why, cure = "has one training example", "give the client more examples, leave it out"
                trial_forward.check_trains_on_one_example(cached.module, data, f"client {client.id!r}", why, cure)
                single.add(key)
            in_places = len(outputs[key]) > 1 and not client.task.one_class_per_example  # which the task checks
            if num_outputs is not None and outputs[key] != (num_outputs,) and not in_places:
                raise UserError(
                    f"client {client.id!r}: its network has {_describe_outputs(outputs[key])}, but the data have "
                    f"{num_outputs} classes; the network's output must have one logit per class"
                )
            client.task.check_outputs(outputs[key], data.labels, f"client {client.id!r}: {name}")


def _is_stale(cached: CachedModule, rebuilt: nn.Module) -> bool:
    """Returns whether a factory now builds another network than the cached one, whatever its weights."""
    buffers = {**dict(cached.module.named_buffers()), **cached.buffers}, dict(rebuilt.named_buffers())
    attributes = (
        {name: own_attributes(part) for name, part in module.named_modules()} for module in (cached.module, rebuilt)
    )
    before, now = (describe_values(part) for part in attributes)
    return (
        cached.architecture != architecture_hash(rebuilt)
        or before != now
        or describe_values(buffers[0]) != describe_values(buffers[1])
    )


def _common_tensor(first: nn.Module, second: nn.Module) -> str | None:
    """Returns the name of a trained tensor that two networks share though they must be independent, or None."""
    first_ids = {id(tensor) for tensor in (*first.parameters(), *first.buffers())}
    second_tensors = (*((n, p) for n, p in second.named_parameters() if p.requires_grad), *second.named_buffers())
    return next((name for name, tensor in second_tensors if id(tensor) in first_ids), None)


def _describe_outputs(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} outputs" if len(shape) == 1 else f"outputs of shape {shape}"


def examples_by_split(client: Client) -> dict[str, Examples]:
    """Returns a client's sets by name: "train", "test" and, if it has them, "val" and "global_test"."""
    sets = {"train": client.train, "test": client.test, "val": client.val, "global_test": client.global_test}
    return {name: data for name, data in sets.items() if data is not None}


# Class names in data fingerprints, which manifest.json stores: renaming a class must not change a fingerprint.
_FINGERPRINT_NAMES = {"TablePreprocessor(": "Prepared(", "LazyImageDecoder(": "Decoded("}


def stable_repr(transform: Any) -> str:
    """Describes a transform by a text that is the same in every process, without addresses."""
    if isinstance(transform, PartwiseTransform):
        return str({name: stable_repr(part_transform) for name, part_transform in transform.transforms.items()})
    if not is_dataclass(transform):
        return str(getattr(transform, "__qualname__", type(transform).__name__))
    text = repr(transform)
    if isinstance(task := getattr(transform, "task", None), Task):
        text = text.replace(f"task={task!r}", f"task={task.spec!r}")
    for name, fingerprint_name in _FINGERPRINT_NAMES.items():
        text = text.replace(name, fingerprint_name)
    return text
