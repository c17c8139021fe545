"""Checks how the class of a method is written, before it can train: names and arguments of its parts, and its fields."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from inspect import Parameter, signature
from types import FunctionType
from typing import Any


def check_overridden_parts(kind: type) -> None:
    """Raises a `TypeError` if a method defines a part with other arguments than its base, or misspells the name of one.

    >>> class Base:
    ...     def aggregate(self, server_state, replies, server): ...
    >>> check_overridden_parts(type("Mine", (Base,), {"aggregate": lambda self, replies: {}}))
    Traceback (most recent call last):
    TypeError: Mine.aggregate takes (replies), but gets (server_state, replies, server): write
    def aggregate(self, server_state, replies, server)
    """
    inherited = {name: part for base in reversed(kind.__mro__[1:]) for name, part in vars(base).items()}
    for name, part in vars(kind).items():
        if not isinstance(part, FunctionType) or name.startswith("__"):
            continue
        if isinstance(inherited.get(name), FunctionType):
            _check_takes_same_arguments(f"{kind.__name__}.{name}", part, inherited[name])
        elif name not in inherited and not name.startswith("_") and (close := _find_close_name(name, inherited)):
            raise TypeError(f"{kind.__name__}.{name} overrides nothing, and would not be called; did you mean {close}?")


def _find_close_name(name: str, inherited: Iterable[str]) -> str:
    return next(iter(get_close_matches(name, (n for n in inherited if not n.startswith("_")), n=1, cutoff=0.9)), "")


def _check_takes_same_arguments(label: str, part: FunctionType, overridden: FunctionType) -> None:
    expected, actual = ([*signature(function).parameters.values()][1:] for function in (overridden, part))
    by_position = [p.name for p in expected if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    places = {p.name: place for place, p in enumerate(actual)}
    try:
        signature(part).bind(None, *by_position, **{p.name: None for p in expected if p.kind is Parameter.KEYWORD_ONLY})
        fits = all(places.get(name, place) == place for place, name in enumerate(by_position))
    except TypeError:
        fits = False
    if not fits:
        names, right_names = (
            ", ".join(str(p.replace(annotation=p.empty)) for p in each) for each in (actual, expected)
        )
        raise TypeError(
            f"{label} takes ({names}), but gets ({right_names}): write def {label.split('.')[1]}(self, {right_names})"
        )


def check_fields_are_named(kind: type, values: Sequence[Any]) -> None:
    """Raises a `TypeError` for values by position, if a method has fields by name alone."""
    fields = getattr(kind, "__dataclass_fields__", {})
    if values and fields and all(field.kw_only for field in fields.values()):
        example = "lr" if "lr" in fields else next(iter(fields))
        raise TypeError(f"{kind.__name__}() takes its fields by name, as {example}=..., got {values[0]!r} by position")


def check_is_dataclass(kind: Any) -> None:
    """Raises a `TypeError` if a method has hyper-parameters that are no fields, which no run would keep."""
    if "__dataclass_params__" in vars(kind):
        return
    fields = [
        name for name, annotation in vars(kind).get("__annotations__", {}).items() if "ClassVar" not in str(annotation)
    ]
    if fields or "__init__" in vars(kind):
        cause = f"its {', '.join(fields)}" if fields else "what its __init__ takes"
        raise TypeError(
            f"{kind.__name__} must be a dataclass: {cause} would be no hyper-parameter, and no run would keep it; write "
            f"@dataclass(frozen=True, kw_only=True) above class {kind.__name__}, and hyper-parameters as fields, as in "
            "mu: float = 0.1"
        )
