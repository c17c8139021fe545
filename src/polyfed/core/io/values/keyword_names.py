"""Checks the arguments of calls: suggests the right keyword where a call has a wrong one, and refuses a user's function that
takes other arguments than it is called with.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar

from polyfed.core.errors import UserError, did_you_mean

OTHER_NAMES = {
    "learning_rate": "lr", "epochs": "local_epochs", "num_epochs": "local_epochs", "steps": "local_steps",
    "bs": "batch_size", "batchsize": "batch_size", "weightdecay": "weight_decay", "optim": "optimizer",
    "num_clients": "clients", "num_server_rounds": "rounds", "num_rounds": "rounds",
    "method": "algorithm", "methods": "algorithm", "strategy": "algorithm",
}  # fmt: skip
"""Name that a field has elsewhere -> its name here, for suggestions."""

_OTHER_ARGUMENTS = OTHER_NAMES | {
    "name": "id", "net": "model", "network": "model", "valid": "val", "validation": "val", "inputs": "x", "labels": "y",
    "targets": "y", "output_dir": "out", "save_dir": "out", "random_state": "seed", "verbose": "progress", "cv": "folds",
    "fraction_fit": "clients_per_round", "fraction_train": "clients_per_round",
    "epsilon": "target_epsilon", "clip": "max_grad_norm",
}  # fmt: skip

_OTHER_ATTRIBUTES = {"score": "table", "scores": "table", "metrics": "table", "predict_proba": "predict_table"}

_FIELDS_OF_METHODS = frozenset(
    {"lr", "batch_size", "local_epochs", "local_steps", "optimizer", "momentum", "weight_decay"}
)

_FIELDS_OF_PRIVACY = frozenset({"target_epsilon", "max_grad_norm", "noise_multiplier", "delta"})

_SETTINGS_OF_COMPARISONS = frozenset({"seeds", "folds", "resplit", "tune", "budget", "references"})

_SETTINGS_OF_RUNS = frozenset({"rounds", "seed", "keep", "clients_per_round", "evaluate_every"})

Target = TypeVar("Target", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)


def suggest_keywords(target: Target) -> Target:
    """Makes a function, or a class, raise a `TypeError` that suggests the right keyword if it is called with a wrong one.

    >>> @suggest_keywords
    ... def score(outputs, *, metrics=()): ...
    >>> score([], metric="auc")
    Traceback (most recent call last):
    TypeError: score() has no argument 'metric'; did you mean metrics? Choices: metrics, outputs
    """
    if isinstance(target, type):
        target.__init__ = _check_each_call(target.__init__, target.__name__)  # type: ignore[misc]
        return target
    checked: Target = _check_each_call(target, target.__name__)
    return checked


def suggest_attributes(target: Kind) -> Kind:
    """Makes a class suggest the nearest attribute, or the entry of a mapping in it, for an attribute that it lacks.

    >>> @suggest_attributes
    ... class Scores:
    ...     def __init__(self): self.results = {"best": "fml"}
    >>> Scores().best
    Traceback (most recent call last):
    AttributeError: 'Scores' object has no attribute 'best'; did you mean results['best']?
    """

    def refuse_attribute(self: Any, name: str) -> None:
        near = [f"{key}[{name!r}]" for key, value in vars(self).items() if isinstance(value, Mapping) and name in value]
        if hasattr(target, other_name := _OTHER_ATTRIBUTES.get(name, "")):
            near.append(other_name)
        near += get_close_matches(name, (key for key in dir(self) if not key.startswith("_")), n=1)
        hint = f"; did you mean {near[0]}?" if near and not name.startswith("_") else ""
        raise AttributeError(f"{target.__name__!r} object has no attribute {name!r}{hint}")

    target.__getattr__ = refuse_attribute  # type: ignore[attr-defined]
    return target


def rename_keywords(**new_names: str) -> Callable[[Target], Target]:
    """Returns a decorator that passes on deprecated arguments of a function by their new names, with a warning.

    >>> @rename_keywords(build="model")
    ... def load(path, model=None): return model
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     loaded = load("a", build=list)
    >>> loaded, str(caught[0].message)
    (<class 'list'>, 'load(build=...) is deprecated; write model=...')
    """

    def decorate(function: Any) -> Any:
        @wraps(function)
        def call(*values: Any, **named: Any) -> Any:
            for old in new_names.keys() & named.keys():
                if new_names[old] in named:
                    raise TypeError(
                        f"{function.__name__}() got {old}= and {new_names[old]}=, which are one; leave {old}= out"
                    )
                text = f"{function.__name__}({old}=...) is deprecated; write {new_names[old]}=..."
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                named[new_names[old]] = named.pop(old)
            return function(*values, **named)

        return call

    return decorate


def suggest_keywords_and_fields(class_of_method: Callable[[str], type]) -> Callable[[Target], Target]:
    """Returns `suggest_keywords` for functions whose second argument is a method, or several: a field of one is named.

    Args:
        class_of_method: returns the class of a method by its name; raises a `UserError` for an unknown one.
    """
    return lambda target: _check_each_call(target, target.__name__, class_of_method)


def _check_each_call(function: Any, name: str, class_of_method: Callable[[str], type] | None = None) -> Any:
    arguments = signature(function).parameters
    keywords = [key for key in arguments if key != "self"]
    by_position = [key for key in keywords if arguments[key].kind is not Parameter.KEYWORD_ONLY]
    others = ", ".join(f"{key}=..." for key in keywords[len(by_position) :][:3])

    @wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        if class_of_method is not None and (unknown := [key for key in named if key not in keywords]):
            method = values[1] if len(values) > 1 else named.get(keywords[1])
            _refuse_field_of_method(unknown, method, class_of_method, f"{name}() has no argument")
        check_keyword_names(named, keywords, f"{name}() has no argument", _OTHER_ARGUMENTS, f"help(polyfed.{name})")
        if others and len(values) - ("self" in arguments) > len(by_position):
            first = f"{', '.join(by_position)} by position, and all others" if by_position else "its arguments"
            raise TypeError(f"{name}() takes {first} by name, as {others}")
        return function(*values, **named)

    return call


def _refuse_field_of_method(
    names: Iterable[str], methods: Any, class_of_method: Callable[[str], type], complaint: str
) -> None:
    """Raises a `TypeError` that shows the method with the field, if a name is that of a field of one of the methods."""
    several = methods.values() if isinstance(methods, Mapping) else methods
    for method in several if isinstance(several, Iterable) and not isinstance(several, str) else [several]:
        try:
            kind = class_of_method(method) if isinstance(method, str) else type(method)
        except UserError:  # the function refuses an unknown method itself
            continue
        place = "polyfed.algorithms." if kind.__module__.startswith("polyfed.algorithms.") else ""
        fields = getattr(kind, "__dataclass_fields__", {})
        for name in names:
            if (field := OTHER_NAMES.get(name, name)) in fields:
                raise TypeError(
                    f"{complaint} {name!r}; it is a field of the method: {place}{kind.__name__}({field}=...)"
                )


def check_keyword_names(
    named: Iterable[str],
    choices: Iterable[str],
    complaint: str,
    other_names: dict[str, str] = OTHER_NAMES,
    listing: str = "",
) -> None:
    """Raises a `TypeError` with the nearest of `choices` if a name of a call is none of them.

    Args:
        named: the names in the call.
        choices: the names that there are.
        complaint: the beginning of the error, up to the name.
        other_names: the name that something has elsewhere -> its name here.
        listing: what lists the choices, if they are many.
    """
    choices = set(choices)
    for name in named:
        if name not in choices:
            other = other_names.get(name, name)
            if name in other_names and other not in choices and f"{other}s" in choices:
                other += "s"
            if other in _FIELDS_OF_METHODS and "rounds" in choices:
                hint = f"it is a field of the method: polyfed.algorithms.FedAvg({other}=...)"
            elif other in _FIELDS_OF_PRIVACY and "rounds" in choices:
                hint = (
                    "a patient's privacy is a field of the method: "
                    f"polyfed.algorithms.FedAvg(privacy=polyfed.Privacy({other}=...))"
                )
            elif other in _SETTINGS_OF_COMPARISONS and complaint.startswith("federate()"):
                hint = f"it is an argument of polyfed.compare: compare(clients, algorithms, {other}=...)"
            elif other in _SETTINGS_OF_RUNS and complaint.startswith("resume()"):
                hint = (
                    "a run keeps the settings with which it was started, but for more rounds=...; give it to federate(), "
                    "with another out=..."
                )
            else:
                hint = f"did you mean {other}?" if other in choices else did_you_mean(name, choices, listing)
            raise TypeError(f"{complaint} {name!r}; {hint}")


def check_can_be_called(function: Callable[..., Any], num_arguments: int, rule: str) -> None:
    """Raises a `UserError` if a user's function cannot be called with so many arguments by position.

    Args:
        function: any callable; one whose signature Python does not know passes.
        num_arguments: how many it gets.
        rule: the error's first half, which says how it is called.

    >>> check_can_be_called(lambda: None, 1, "a callback is called with the record of a round")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: a callback is called with the record of a round, and <lambda>() cannot be called so
    """
    try:
        arguments = signature(function)
    except (TypeError, ValueError):  # some of those that are written in C
        return
    try:
        arguments.bind(*[None] * num_arguments)
    except TypeError:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise UserError(f"{rule}, and {name.rpartition('<locals>.')[2]}{arguments} cannot be called so") from None
