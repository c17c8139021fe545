"""Checks how the class of a method is written, before it can train: names and arguments of its parts, and its fields."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from inspect import Parameter, Signature, get_annotations, signature
from types import FunctionType
from typing import Any, final

from polyfed.core.io.values.keyword_names import check_keyword_names


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


def check_has_all_parts(kind: type) -> None:
    """Raises a `TypeError` that names the missing parts of a method, and the base that has most of them."""
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise TypeError(
            f"{kind.__name__} lacks {', '.join(missing)}: write them, or begin with a base that has them, as in class "
            f"{kind.__name__}(polyfed.algorithms.base.Averaging), whose server takes the mean, and override what differs"
        )


def describe_changed_fields(method: Any) -> list[str]:
    """Returns "field=value" for each field of a dataclass whose value is not its default, without those hidden by `repr`.

    >>> from dataclasses import make_dataclass
    >>> describe_changed_fields(make_dataclass("Mine", [("lr", float, 0.1), ("mu", float, 0.0)])(mu=0.5))
    ['mu=0.5']
    """
    values = (
        {f.name: getattr(method, f.name) for f in fields(method) if f.repr and f.init} if is_dataclass(method) else {}
    )
    required = {
        name: values[name] for name in values if signature(type(method)).parameters[name].default is Parameter.empty
    }
    with suppress(TypeError, ValueError):  # a method of which no default can be made shows all
        default = type(method)(**required)
        values = {n: v for n, v in values.items() if n in required or repr(v) != repr(getattr(default, n))}
    return [f"{name}={value!r}" for name, value in values.items()]


@final
class ConstructorSignature:
    """Gives a class the signature of its `__init__`."""

    def __get__(self, instance: Any, owner: Any) -> Signature:
        return Signature(list(signature(owner.__init__).parameters.values())[1:])


def check_field_names(kind: Any, names: Iterable[str]) -> None:
    """Raises a `TypeError` that suggests a field, if the constructor of a method has no argument of such a name."""
    if getattr(kind, "__dataclass_fields__", {}).keys() >= set(names):
        return
    arguments = signature(kind).parameters
    if not any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values()):
        check_keyword_names(names, arguments, f"{kind.__name__} has no field")


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
    fields = [name for name, annotation in get_annotations(kind).items() if "ClassVar" not in str(annotation)]
    if fields or "__init__" in vars(kind):
        cause = f"its {', '.join(fields)}" if fields else "what its __init__ takes"
        raise TypeError(
            f"{kind.__name__} must be a dataclass: {cause} would be no hyper-parameter, and no run would keep it; write "
            f"@dataclass(frozen=True, kw_only=True) above class {kind.__name__}, and hyper-parameters as fields, as in "
            "mu: float = 0.1"
        )
