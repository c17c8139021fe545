"""Selects the methods of a comparison, adds the default methods, and gives all of them the same local training."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from polyfed.algorithms import REGISTRY, FedAvg, FedAvgFT, Local, registry_name
from polyfed.comparison.plan import Method
from polyfed.comparison.tuning.grid import EQUAL_FIELDS
from polyfed.core.algorithm import Algorithm
from polyfed.core.errors import UserError
from polyfed.core.training.config import TRANSFERABLE_FIELDS, LocalTraining
from polyfed.simulation.rounds.start.preparation import how_to_give_method
from polyfed.simulation.storage.configuration import find_method_class

DEFAULT_METHODS = {"local": Local, "fedavg": FedAvg, "fedavg_ft": FedAvgFT}
"""Methods that every comparison includes, wherever the clients allow them."""


def select_methods(
    methods: Method | str | Sequence[Method | str] | Iterator[Method | str] | Mapping[str, Method | str],
    like: Method | None = None,
) -> dict[str, Method]:
    """Returns `{label: method}`: first the default methods missing from `methods`, then `methods`.

    Args:
        methods: a name or method, or several as a list or a mapping from labels.
        like: a method whose local training the methods given by name take over; None takes that of a method in `methods`.

    Raises:
        UserError: an unknown name, something that is not a method, or two methods with one label.

    >>> list(select_methods(["pfedla", "local"]))
    ['fedavg', 'fedavg_ft', 'pfedla', 'local']
    """
    if isinstance(methods, str | Algorithm | type):
        methods = [methods]
    if isinstance(methods, Iterator):
        methods = list(methods)
    if not isinstance(methods, Sequence | Mapping):
        raise UserError(
            f"algorithms must be a list of names or methods, or a mapping from labels to them, got {methods!r}"
        )
    pairs: list[tuple[str | None, Any]] = (
        list(methods.items()) if isinstance(methods, Mapping) else [(None, method) for method in methods]
    )
    trained_methods = [method for _, method in pairs if isinstance(method, LocalTraining)]
    by_label: dict[str, Method] = {}
    for label, method in pairs:
        built: Any = (
            build_method_with_training_of(method, like or _training_template(method, trained_methods))
            if isinstance(method, str)
            else method
        )
        if not isinstance(built, Algorithm):
            raise UserError(f"algorithms must be names or methods, got {method!r}; {how_to_give_method(method)}")
        name = registry_name(built) if label is None else label
        if name in REGISTRY and name != registry_name(built):
            raise UserError(
                f"{name!r} is the name of another method than {registry_name(built)}; give that a label of its own"
            )
        if name in by_label:
            raise UserError(f"methods has {name!r} twice; give each a label of its own: {{'a': ..., 'b': ...}}")
        by_label[name] = built
    kinds = {type(method) for method in by_label.values()}
    missing_defaults = [name for name, kind in DEFAULT_METHODS.items() if kind not in kinds and name not in by_label]
    return {
        name: build_method_with_training_of(name, like or _training_template(name, trained_methods))
        for name in missing_defaults
    } | by_label


def labels_added_by_default(
    selected: Mapping[str, Method], methods: Method | str | Sequence[Method | str] | Mapping[str, Method | str]
) -> frozenset[str]:
    """Returns the labels of the default methods that `select_methods` added to those that somebody asked for.

    >>> sorted(labels_added_by_default(select_methods(["pfedla", "local"]), ["pfedla", "local"]))
    ['fedavg', 'fedavg_ft']
    """
    entries = [methods] if isinstance(methods, str | Algorithm) else methods
    requested = {entry if isinstance(entry, str) else registry_name(entry) for entry in entries}
    return frozenset(selected.keys() & DEFAULT_METHODS.keys()) - requested


def _training_template(name: str, candidates: Sequence[Any]) -> Any:
    """Returns the first candidate that trains as `name` does by default; None without candidates.

    If there is no such candidate, a `Local` with the epochs and the batch size of the first.
    """
    alike = (
        m
        for m in candidates
        if not _trains_differently(find_method_class(name), type(m))
        and not _trains_differently(type(m), find_method_class(name))
    )
    return next(
        alike, Local(**{field: getattr(candidates[0], field) for field in EQUAL_FIELDS}) if candidates else None
    )


def build_method_with_training_of(name: str, template: Any = None, fields: Mapping[str, Any] | None = None) -> Method:
    """Builds the method `name` with the local training of `template`.

    The method keeps its own defaults for all other fields. `fields` override both.

    A method that sets a learning rate or an optimiser of its own, where `template` has not the same default, keeps its
    optimiser with all that belongs to it: the hypernetwork of FLHA-GHN and a supernet are not trained as a client's network.

    >>> from polyfed.algorithms import get
    >>> model = get("fedprox")(lr=0.5, local_epochs=3)
    >>> (build_method_with_training_of("local", model).lr, build_method_with_training_of("flha_ghn", model).lr,
    ...  build_method_with_training_of("flha_ghn", model).local_epochs)
    (0.5, 0.009, 3)

    Raises:
        UserError: the method refuses a value; where it was taken over, the error says from whom.
    """
    kind: Any = find_method_class(name)
    shared = {f.name: f.default for f in dataclasses.fields(LocalTraining) if f.name in EQUAL_FIELDS}
    if isinstance(template, LocalTraining):
        shared_names = set(EQUAL_FIELDS) if _trains_differently(kind, type(template)) else TRANSFERABLE_FIELDS
        shared = {field: getattr(template, field) for field in shared_names}
    shared = {
        field: value
        for field, value in shared.items()
        if issubclass(kind, LocalTraining) and field not in (fields or {})
    }
    try:
        return cast(Method, kind(**shared, **(fields or {})))
    except UserError as error:
        if (culprit := _refused_field(kind, shared, fields or {})) is None:
            raise
        source = "the defaults" if template is None else registry_name(template)
        raise UserError(
            f"{error}; {culprit}={shared[culprit]!r} is taken over from {source}, so that all methods train alike: give "
            f"{name} a {culprit} of its own (the method instead of its name; --method-config FILE on the command line), or "
            f"leave {name} out"
        ) from error


def _refused_field(kind: Any, shared: Mapping[str, Any], fields: Mapping[str, Any]) -> str | None:
    """Returns the shared field without which the method can be built; None if there is none."""
    for field in shared:
        try:
            kind(**{name: value for name, value in shared.items() if name != field}, **fields)
        except UserError:
            continue
        return field
    return None


def _trains_differently(kind: Any, template: Any) -> bool:
    """Returns whether the two methods have different default learning rates or optimisers, set by one of them itself."""
    method_defaults, template_defaults, base_defaults = (
        {f.name: f.default for f in dataclasses.fields(k)} for k in (kind, template, LocalTraining)
    )
    return any(
        method_defaults.get(f, base_defaults[f]) not in (base_defaults[f], template_defaults.get(f, base_defaults[f]))
        for f in ("lr", "optimizer")
    )


def check_equal_training(methods: Mapping[str, Method]) -> None:
    """Raises a `UserError` unless all methods have the same epochs or steps and batch size.

    A method that trains more would win by its amount of training, whatever the budget.
    """
    trained = {
        label: (None if method.local_steps else method.local_epochs, method.local_steps, method.batch_size)
        for label, method in methods.items()
        if isinstance(method, LocalTraining)
    }
    for label, amount in trained.items():
        first = next(iter(trained))
        if amount != trained[first]:
            descriptions = [
                f"{name} has " + ", ".join(f"{f}={getattr(methods[name], f)}" for f in EQUAL_FIELDS)
                for name in (first, label)
            ]
            raise UserError(
                f"methods must train equally in each round, but {' and '.join(descriptions)}; give both the same"
            )
