"""What is checked before the first round: that the federation suits the method, and models suit their data."""

import fnmatch
from collections import Counter
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.algorithms import REGISTRY, name_of
from polyfed.algorithms.widths import widest
from polyfed.alignment.representations import representations
from polyfed.core.adapters import check_ranks, form_of, mode_of
from polyfed.core.algorithm import MODEL_WORDS, Algorithm, Architecture, BringsNetwork, Client, DataSpec, check_words
from polyfed.core.errors import UserError, nearest
from polyfed.core.examples import ByPart, Examples
from polyfed.core.inputs import form_of as form_of_inputs
from polyfed.core.inputs import leaves
from polyfed.core.objectives import sampling_weights
from polyfed.core.scratch import (
    frozen_parameters,
    hash_of,
    new_module,
    same_but_for_frozen,
    scratch,
)
from polyfed.core.training import LocalTraining
from polyfed.simulation.beginnings import check_beginnings
from polyfed.simulation.leaks import warn_of_leaks
from polyfed.simulation.networks import check_batches, check_inside, scratch_of
from polyfed.simulation.participants import list_clients
from polyfed.simulation.tables import check_public_table, check_tables
from polyfed.simulation.trying import output_shape, refuse_batch_of_one


def check_clients(clients: Sequence[Client]) -> None:
    """Raises a `UserError` for an empty federation, something that is no client, or an id that occurs twice; warns of test
    examples that are trained on (see `polyfed.simulation.leaks`)."""
    clients = list_clients(clients)
    twice = [i for i, count in Counter(client.id for client in clients).items() if count > 1]
    if twice:
        raise UserError(f"two clients have the id {twice[0]!r}; ids must differ")
    tasks = sorted({client.task for client in clients})
    if len(tasks) > 1:
        raise UserError(f"clients of one federation must have one task, got {' and '.join(tasks)}")
    warn_of_leaks(clients)


def check_requirements(clients: Sequence[Client], algorithm: Algorithm[Any, Any], public: Examples | None) -> None:
    """Raises a `UserError` if the federation lacks what `algorithm.requires`; it names clients and other methods."""
    if "public_data" in algorithm.requires and public is None:
        raise UserError(f"{name_of(algorithm)} needs public examples that are no client's data; give public=... (federate) "
                        "or --data.public_fraction")  # fmt: skip
    if "public_data" in algorithm.requires and public is not None:
        _check_public(clients, public)
    check_suited(clients, algorithm)
    check_beginnings(clients, algorithm)
    if public is not None:
        fields = ("digest_batch_size", *(("server_batch_size",) if "architectures" in algorithm.requires else ()))
        check_batches(clients, algorithm, dict.fromkeys(fields, public))


def check_suited(clients: Sequence[Client], algorithm: Algorithm[Any, Any]) -> None:
    """The part of `check_requirements` that is about the clients alone, their networks and the form of their data."""
    needs, name = algorithm.requires, name_of(algorithm)
    check_words(algorithm, type(algorithm).__name__)
    check_tables(clients, algorithm)
    if "classification" in needs and (odd := [c for c in clients if c.task != "classification"]):
        raise UserError(f"{name} needs classes, one an example, but the task of {odd[0].id!r} is {odd[0].task}")
    if "one_input_spec" in needs:
        forms = {client.id: _form(client.train) for client in clients}
        if other := next((i for i in forms if forms[i] != forms[clients[0].id]), None):
            raise UserError(
                f"{name} needs inputs of one form, but those of {other!r} are {forms[other]}, those of {clients[0].id!r} "
                f"{forms[clients[0].id]}"
            )
    if "images" in needs:
        for client in clients:
            form = form_of_inputs(_one_batch(client))
            if len(form.shape) != 3:
                told = form if form.spread else f"of shape {form.shape}"
                raise UserError(f"{name} needs images, inputs of shape (channels, height, width), but those of "
                                f"{client.id!r} are {told}")  # fmt: skip
    if "one_data_spec" in needs:
        common_data_spec(clients, name)
    if not needs & MODEL_WORDS:
        if isinstance(algorithm, BringsNetwork):
            brought = algorithm.network_for(common_data_spec(clients, name))
            check_batches(clients, algorithm, {"batch_size": None}, brought)
        return
    without = [client.id for client in clients if client.model is None]
    if without:
        raise UserError(f"{name} trains each client's own network, but client {without[0]!r} has model=None")
    kinds = {client.id: form_of(algorithm, scratch_of(client)) for client in clients}
    check_inside(clients, algorithm)
    check_batches(clients, algorithm, {"batch_size": None})
    if "one_representation" in needs:
        widths = {client.id: representation_width(client) for client in clients}
        if other_id := next((i for i in widths if widths[i] != widths[clients[0].id]), None):
            raise UserError(
                f"{name} needs representations of one width, but the last layer of {other_id!r} takes {widths[other_id]} "
                f"numbers, that of {clients[0].id!r} {widths[clients[0].id]}; give the networks last layers of one width"
            )
    if "one_family" in needs:
        widest({client.id: client.model for client in clients if client.model is not None})
        shapes = {c.id: output_shape(scratch_of(c).module, c.train, f"client {c.id!r}") for c in clients}
        if other_id := next((i for i in shapes if shapes[i] != shapes[clients[0].id]), None):
            raise UserError(
                f"{name} needs networks with the same number of outputs, but that of {other_id!r} has "
                f"{_outputs(shapes[other_id])}, that of {clients[0].id!r} {_outputs(shapes[clients[0].id])}; give all "
                "networks one output for each class of the federation"
            )
    if "one_architecture" in needs and len(set(kinds.values())) > 1:
        first, other = clients[0].id, next(i for i in kinds if kinds[i] != kinds[clients[0].id])
        if same_but_for_frozen(kinds[first], kinds[other]):
            raise UserError(
                f"{name} needs one architecture, and the networks of {other!r} and {first!r} differ in frozen parameters "
                "(requires_grad=False); begin all clients' networks with the same pretrained weights"
            )
        mixed = sorted(
            n for n, m in REGISTRY.items() if m.requires & MODEL_WORDS and "one_architecture" not in m.requires
        )
        raise UserError(
            f"{name} needs one architecture, but the {len(clients)} clients have {len(set(kinds.values()))}: "
            f"{other!r} differs from {first!r}. Methods for different architectures: {', '.join(mixed)}"
        )
    if (mode := mode_of(algorithm)) is not None:
        check_ranks({client.id: client.model for client in clients if client.model is not None}, mode)


def representation_width(client: Client) -> int:
    """How many numbers the last linear layer of a client's network takes."""
    assert client.model is not None
    network = scratch(client.model).module
    try:
        return representations(network, client.train.head()).shape[1]
    except UserError as error:
        raise UserError(f"client {client.id!r}: {error}") from error


def data_spec_of(client: Client) -> DataSpec:
    """What goes into this client's network, and the logits that its labels ask for.

    Raises:
        UserError: several tensors go into it, which such a description does not hold.
    """
    form = form_of_inputs(_one_batch(client))
    if form.spread:
        raise UserError(f"client {client.id!r}: its inputs have several parts ({form}), where inputs of one tensor are "
                        "needed: use another method, or pack them into one tensor")  # fmt: skip
    return DataSpec(form.shape, outputs_needed(client))


def outputs_needed(client: Client) -> int:
    """The number of logits that this client's labels ask for."""
    if client.task == "classification":
        return 1 + max(int(data.labels.max()) for data in sets_of(client).values())
    return client.train.labels.shape[1]


def _one_batch(client: Client) -> Any:
    """The inputs of one example, as the network gets them."""
    return client.train.batch(torch.zeros(1, dtype=torch.int64, device=client.train.device))[0]


def common_data_spec(clients: Sequence[Client], name: str = "the method") -> DataSpec:
    """The form of all clients; classes are as many as the largest label asks for.

    Raises:
        UserError: inputs or numbers of outputs differ.
    """
    forms = {client.id: data_spec_of(client) for client in clients}
    first = clients[0]
    for i, form in forms.items():
        if form.inputs != forms[first.id].inputs:
            raise UserError(f"{name} needs inputs of one shape, but those of {i!r} are {form.inputs}, those of {first.id!r} "
                            f"{forms[first.id].inputs}")  # fmt: skip
        if first.task != "classification" and form.outputs != forms[first.id].outputs:
            raise UserError(f"{name} needs labels of one form, but {i!r} has {form.outputs} a row, {first.id!r} "
                            f"{forms[first.id].outputs}")  # fmt: skip
    return DataSpec(forms[first.id].inputs, max(form.outputs for form in forms.values()))


def _form(examples: Examples) -> str:
    return str(form_of_inputs(examples.x))


def _check_public(clients: Sequence[Client], public: Examples) -> None:
    """Public examples reach networks as the client's own inputs do."""
    alike: list[tuple[Any, Any]] = []
    if not len(public):
        raise UserError("public holds no examples; give some (public=..., or --data.public_fraction)")
    for client in clients:
        if _form(public) != _form(client.train):
            raise UserError(
                f"the public examples (public=...) are {_form(public)}, but the inputs of client {client.id!r} are "
                f"{_form(client.train)}; give public examples of the same form"
            )
        check_public_table(client, public)
        one, other = public.transform, client.train.transform
        if (one, other) in alike:
            continue
        few = torch.arange(min(2, len(public)), device=public.device)
        if not _same(public.batch(few)[0], replace(public, transform=other).batch(few)[0]):
            raise UserError(
                f"the public examples (public=...) are prepared by {stable_repr(one)}, the inputs of client "
                f"{client.id!r} by {stable_repr(other)}, which gives something else; prepare both alike"
            )
        alike.append((one, other))


def _same(a: Any, b: Any) -> bool:
    parts = zip(leaves(a), leaves(b), strict=False)
    return form_of_inputs(a) == form_of_inputs(b) and all(torch.equal(one, other) for (_, one), (_, other) in parts)


def architectures(clients: Sequence[Client]) -> dict[str, str]:
    """Client id -> short name of its architecture, for clients that have one."""
    return {client.id: scratch_of(client).architecture for client in clients if client.model is not None}


def check_models(
    clients: Sequence[Client], num_outputs: int | None = None, factory: Architecture | None = None
) -> None:
    """Runs two examples through a copy of the network, for each distinct pair of network and input form.

    Args:
        clients: whose networks are tried.
        num_outputs: the outputs that each network must have, where the data say how many classes there are.
        factory: the network that the method brings, which is tried in place of the clients' own.

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
        own = scratch_of(client) if factory is None else scratch(factory)
        if client.model is not None and factory is None and id(client.model) not in built:
            built.add(id(client.model))
            again = new_module(client.model, seed=0)
            if common := _common_tensor(own.module, again):
                raise UserError(
                    f"client {client.id!r}: its model factory puts the same {common!r} into each network that it builds, so "
                    "that all clients would train one network; build a new one at each call, model=lambda: MyNet(), or a "
                    "copy, model=lambda: copy.deepcopy(network)"
                )
            if own.architecture.partition("-")[2] != hash_of(frozen_parameters(again)):
                raise UserError(
                    f"client {client.id!r}: its network has other frozen parameters (requires_grad=False) each time it is "
                    "built; load them from a file, or draw them by torch's own generator"
                )
        if not any(parameter.requires_grad for parameter in own.module.parameters()):
            raise UserError(f"client {client.id!r}: its network has no parameters that can be trained "
                            "(requires_grad); there is nothing to federate")  # fmt: skip
        for name, data in sets_of(client).items():
            key = (own.architecture, form_of_inputs(data.x), repr(data.transform))
            if key not in outputs:
                outputs[key] = output_shape(own.module, data, f"client {client.id!r}")
            if name == "train" and len(data) == 1 and key not in single:
                why, cure = "has one training example", "give the client more examples, leave it out"
                refuse_batch_of_one(own.module, data, f"client {client.id!r}", why, cure)
                single.add(key)
            if num_outputs is not None and outputs[key] != (num_outputs,):
                raise UserError(f"client {client.id!r}: its network has {_outputs(outputs[key])}, but the data have "
                                f"{num_outputs} classes; the network's output must have one logit per class")  # fmt: skip
            _check_output(outputs[key], data.labels, f"client {client.id!r}: {name}", client.task)


def _common_tensor(one: nn.Module, other: nn.Module) -> str | None:
    """The name of a tensor that two networks hold in common; frozen parameters, which nothing changes, may be."""
    mine = {id(tensor) for tensor in (*one.parameters(), *one.buffers())}
    theirs = (*((n, p) for n, p in other.named_parameters() if p.requires_grad), *other.named_buffers())
    return next((name for name, tensor in theirs if id(tensor) in mine), None)


def check_training(clients: Sequence[Client], options: LocalTraining) -> None:
    """Raises a `UserError` if local training asks of a client what it does not have: validation examples to stop by, classes
    to weigh, a column of weights; or if no network has a parameter of a name for which a rate is given."""
    for client in clients:
        if options.patience is not None and client.val is None:
            raise UserError(
                f"patience={options.patience} needs validation examples, and client {client.id!r} has none: give clients "
                "val=..., or --data.val-fraction"
            )
        try:
            options.criterion(client)
            sampling_weights(client.train, client.task, options.sampler)
        except UserError as error:
            raise UserError(f"client {client.id!r}: {error}") from error
    if not options.lr_by_name or not getattr(options, "requires", MODEL_WORDS) & MODEL_WORDS:
        return
    nets = {id(client.model): scratch_of(client) for client in clients if client.model is not None}
    named = (pair for net in nets.values() for pair in net.module.named_parameters(remove_duplicate=False))
    names = sorted({name for name, parameter in named if parameter.requires_grad})
    for pattern in options.lr_by_name:
        if not fnmatch.filter(names, pattern):
            raise UserError(
                f"lr_by_name: no trained parameter of any client's network is named like {pattern!r}; "
                f"{nearest(pattern, names)}"
            )


def _outputs(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} outputs" if len(shape) == 1 else f"outputs of shape {shape}"


def sets_of(client: Client) -> dict[str, Examples]:
    """The sets of examples that the client has, by name."""
    sets = {"train": client.train, "test": client.test, "val": client.val, "global_test": client.global_test}
    return {name: data for name, data in sets.items() if data is not None}


def _check_output(output: tuple[int, ...], labels: Tensor, name: str, task: str) -> None:
    if task == "classification":
        if len(output) != 1:
            raise UserError(f"{name}: the network must give logits of shape (batch, classes), got {('batch', *output)}")
        if int(labels.max()) >= output[0]:
            raise UserError(
                f"{name} has label {int(labels.max())}, but the network has {output[0]} outputs (classes 0 to "
                f"{output[0] - 1}); change the network's output size or the labels"
            )
    elif output != tuple(labels.shape[1:]):
        raise UserError(f"{name}: the network's output is {('batch', *output)}, the labels are "
                        f"{tuple(labels.shape)}; they must have the same form")  # fmt: skip


def stable_repr(transform: Any) -> str:
    """A description of a transform that is the same in another process: a plain function's `repr` has its address."""
    if isinstance(transform, ByPart):
        return str({name: stable_repr(one) for name, one in transform.of.items()})
    return repr(transform) if is_dataclass(transform) else getattr(transform, "__qualname__", type(transform).__name__)
