"""Parses JSON and YAML, and checks values against declared types; an error message is one sentence about the first
mismatch.

A type is a Python annotation: `int`, `float` (a finite number), `str`, `bool`, `None`, `Literal`, unions, `list`, `tuple`,
`dict`, `Mapping`, a `TypedDict`, `Callable` (anything that can be called), or `Any`. Any value passes for other annotations.
"""

import dataclasses
import json
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from polyfed.core.errors import UserError, did_you_mean

T = TypeVar("T")
MAX_DEPTH, MAX_VALUES = 60, 2_000_000  # levels of nested lists and mappings; values in all
_LARGEST = 2**63
# Exceptions that NumPy, Arrow, torch and yaml raise for damaged bytes. Catch them around one call of such a library only:
# around polyfed's own code they would report a programming error as a damaged file.
DAMAGED_FILE_ERRORS = (
    TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError, RecursionError
)  # fmt: skip
_YAML_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_SURPRISING_NUMBER = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def parse_json(text: str | bytes) -> Any:
    """Returns the value that a JSON text represents.

    Raises:
        ValueError: it is not JSON, is nested too deeply, has a key twice in one object, or has NaN, Infinity or a number
            that a float cannot hold.

    >>> parse_json('{"loss": 0.5}'), parse_json("[]")
    ({'loss': 0.5}, [])
    """
    try:
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_parse_finite, object_pairs_hook=_build_object
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if error_text := explain_exceeded_size_limit(value):
        raise ValueError(error_text)
    return value


def parse_yaml(text: str | bytes) -> Any:
    """Returns the value that a YAML text represents.

    Raises:
        ValueError: it is not YAML, is nested too deeply or too large, or has a key twice in one mapping; with line and
            column where they are known.

    Numbers that begin with 0, and those with colons, are texts, as people mean them: YAML 1.1 would take 010 for 8, and 1:30
    for 90.

    >>> parse_yaml("lr: 0.5"), parse_yaml("[10, 010, 1:30]")
    ({'lr': 0.5}, [10, '010', '1:30'])
    """
    import yaml

    # libyaml's loader is ten times faster, but crashes on deeply nested values: sizes are checked by its parser first.
    quick = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        source = text.decode() if isinstance(text, bytes) else text
        if error_text := _yaml_size_error(yaml.parse(source, Loader=quick)):
            raise ValueError(error_text)
        loader = quick(source)
        node = loader.get_single_node()
        _mend_numbers_and_check_keys(node, loader)
        value = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, *DAMAGED_FILE_ERRORS) as error:  # ValueError: an invalid date, for example
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{where}{problem or first}") from error
    if error_text := explain_exceeded_size_limit(value):
        raise ValueError(error_text)
    return value


def _mend_numbers_and_check_keys(node: Any, loader: Any) -> None:
    """Makes text of numbers that YAML misreads; raises `yaml.constructor.ConstructorError` for equal keys (1 and 1.0)."""
    from yaml.constructor import ConstructorError

    kind, text_by_key = getattr(node, "id", ""), dict[Any, str]()
    if kind == "scalar" and node.tag in _YAML_NUMBERS and _SURPRISING_NUMBER.fullmatch(node.value):
        node.tag = "tag:yaml.org,2002:str"
    for child in node.value if kind in ("mapping", "sequence") else ():
        key, value = child if kind == "mapping" else (None, child)
        if key is not None and key.id == "scalar" and key.value != "<<":
            _mend_numbers_and_check_keys(key, loader)
            text, key_value = key.value[:60], loader.construct_object(key)
            if (first := text_by_key.get(key_value)) is not None:
                again = "stands twice" if first == text else f"is equal to the key {first!r} above"
                raise ConstructorError(None, None, f"the key {text!r} {again}; leave one out", key.start_mark)
            text_by_key[key_value] = text
        _mend_numbers_and_check_keys(value, loader)


def _yaml_size_error(events: Iterable[Any]) -> str | None:
    """Returns why a YAML text is too large once its aliases are expanded, or None if it is not.

    The check goes by the parser's events, before any value is built: a few lines of merged aliases take hours to load.
    """
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]  # anchor, and number of values so far
    for event in events:
        kind, anchor = type(event).__name__, getattr(event, "anchor", None)
        size = 0
        if kind in ("SequenceStartEvent", "MappingStartEvent"):
            open_nodes.append((anchor, 0))
            if len(open_nodes) > MAX_DEPTH + 1:
                return f"it is nested more than {MAX_DEPTH} levels deep"
            continue
        if kind in ("SequenceEndEvent", "MappingEndEvent"):
            anchor, inner = open_nodes.pop()
            size = inner + 1
        elif kind == "AliasEvent":
            if anchor in (open_anchor for open_anchor, _ in open_nodes):
                return f"it has a value, &{anchor}, that holds itself"
            size, anchor = sizes.get(anchor or "", 1), None
        elif kind == "ScalarEvent":
            size = 1
        if anchor is not None:
            sizes[anchor] = size
        owner, num_values = open_nodes[-1]
        open_nodes[-1] = owner, num_values + size
        if num_values + size > MAX_VALUES:
            return f"it holds more than {MAX_VALUES} values"
    return None


def _refuse_constant(text: str) -> float:
    raise ValueError(f"it has {text}, which is not a number")


def _parse_finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"it has {text[:30]}, which a float cannot hold")
    return number


def _build_object(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(entries)
    if len(value) < len(entries):
        twice = max(value, key=[key for key, _ in entries].count)
        raise ValueError(f"the key {twice[:60]!r} stands twice; leave one out")
    return value


def explain_exceeded_size_limit(value: Any) -> str | None:
    """Returns half a sentence if a file's value is nested too deeply or too large; else None.

    A YAML file of few bytes may stand for a mapping that contains itself, or for billions of values.

    >>> explain_exceeded_size_limit([1, [2]]), explain_exceeded_size_limit([[]] * 3_000_000)
    (None, 'it holds more than 2000000 values')
    """
    level, count = [value], 0
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple | set) else ()
            if len(inner) > MAX_VALUES:
                return f"it holds more than {MAX_VALUES} values"
        count += len(inner)
        if count > MAX_VALUES:
            return f"it holds more than {MAX_VALUES} values"
        if not inner:
            return None
        level = inner
    return f"it is nested more than {MAX_DEPTH} levels deep"


def validation_error(value: Any, annotation: Any, path: str = "") -> str | None:
    """Returns half a sentence on the first mismatch between a value and a type; None if the value has the type.

    Args:
        value: read from a file, or given by a user.
        annotation: the type.
        path: the value's name in the message.

    >>> validation_error({"lr": "fast"}, dict[str, float])
    "lr must be a number, got 'fast'"
    >>> validation_error([1, 2], list[int]), validation_error(float("nan"), float, "lr"), validation_error(None, int | None)
    (None, 'lr must be a number, got nan', None)
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        matches = any(value == choice and type(value) is type(choice) for choice in inner)
        return None if matches else _describe_wrong_type(path, describe_annotation(annotation), value)
    if origin in (Union, types.UnionType):
        errors = [validation_error(value, choice, path) for choice in inner]
        messages = [error for error in errors if error is not None]
        if len(messages) < len(errors):
            return None
        if len(errors) > 2:
            return _describe_wrong_type(path, describe_annotation(annotation), value)
        # The error about the most deeply nested value says most.
        return max(messages, key=lambda sentence: sentence.partition(" must be ")[0].count("."))
    if is_typeddict(annotation):
        return _fields_error(value, get_type_hints(annotation), annotation.__required_keys__, path)
    if annotation in _WORDS:
        return None if _is_of_type(value, annotation) else _describe_wrong_type(path, _WORDS[annotation], value)
    base = origin or annotation
    if base is Callable:
        return None if callable(value) else _describe_wrong_type(path, "callable", value)
    if base in (dict, Mapping):
        return _mapping_error(value, inner, path)
    if base in (list, tuple, Sequence):
        return _sequence_error(value, base, inner, path)
    return None


def describe_annotation(annotation: Any) -> str:
    """Returns a description in words of a type annotation, for error messages.

    >>> describe_annotation(int | None), describe_annotation(list[int])
    ('a whole number or null', 'a list')
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(describe_annotation, inner)))
    if origin is Literal:
        words = [word if any(map(str.isalnum, word)) else repr(word) for word in map(str, inner)]
        return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    if (origin or annotation) in (list, tuple, Sequence):
        return "a list"
    return _WORDS.get(
        annotation,
        "a mapping"
        if (origin or annotation) in (dict, Mapping) or is_typeddict(annotation)
        else "a value of another type",
    )


def _is_of_type(value: Any, kind: Any) -> bool:
    if kind in (int, float) and isinstance(value, bool):
        return False
    if kind is int:
        return isinstance(value, int) and abs(value) < _LARGEST
    if kind is float:
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max and not math.isnan(value)
    return isinstance(value, kind)


def _mapping_error(value: Any, inner: tuple[Any, ...], place: str) -> str | None:
    if not isinstance(value, Mapping):
        return _describe_wrong_type(place, "a mapping", value)
    keys, values = inner or (Any, Any)
    for key, item in value.items():
        if error_text := validation_error(key, keys, f"a key of {place or 'it'}") or validation_error(
            item, values, _path_of(place, key)
        ):
            return error_text
    return None


def _sequence_error(value: Any, base: Any, inner: tuple[Any, ...], place: str) -> str | None:
    if not isinstance(value, list | tuple):
        return _describe_wrong_type(place, "a list", value)
    fixed = base is tuple and inner and inner[-1] is not Ellipsis
    if fixed and len(value) != len(inner):
        return _describe_wrong_type(place, f"a list of {len(inner)}", value)
    item_types = inner if fixed else (inner[0] if inner else Any,) * len(value)
    errors = (
        validation_error(item, item_type, f"{place}[{k}]")
        for k, (item, item_type) in enumerate(zip(value, item_types, strict=True))
    )
    return next(filter(None, errors), None)


def _fields_error(value: Any, hints: Mapping[str, Any], required: frozenset[str], place: str) -> str | None:
    if not isinstance(value, Mapping):
        return _describe_wrong_type(place, "a mapping", value)
    if missing := sorted(required - value.keys()):
        return f"{place or 'it'} has no {missing[0]}"
    errors = (
        validation_error(value[name], kind, _path_of(place, name)) for name, kind in hints.items() if name in value
    )
    return next(filter(None, errors), None)


def _path_of(place: str, key: Any) -> str:
    return f"{place}.{key}" if place else str(key)


def _describe_wrong_type(place: str, expected: str, value: Any) -> str:
    expected += " below 2^63" if isinstance(value, int) and abs(value) >= _LARGEST else ""
    text = repr(value) if not isinstance(value, list | dict) or len(value) < 9 else type(value).__name__
    return f"{place or 'it'} must be {expected}, got {text if len(text) <= 60 else text[:60] + '…'}"


def build_dataclass(cls: Callable[..., T], values: Any, label: str) -> T:
    """Builds a dataclass from a file's `{field: value}`.

    Args:
        cls: the dataclass.
        values: field -> value.
        label: the name of the object in errors.

    Raises:
        UserError: a field is unknown, missing, of another type, or refused by the dataclass.

    >>> from polyfed.data import Split
    >>> build_dataclass(Split, {"clients": 3}, "data").clients
    3
    >>> build_dataclass(Split, {"clients": "three"}, "data")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: data.clients must be a whole number, got 'three'
    """
    if not isinstance(values, Mapping):
        raise UserError(_describe_wrong_type(label, "a mapping of fields", values))
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    if unknown := [name for name in values if name not in fields]:
        raise UserError(f"{label} has no field {str(unknown[0])!r}; {did_you_mean(str(unknown[0]), fields)}")
    absent = dataclasses.MISSING
    if missing := [
        n for n, f in fields.items() if n not in values and f.default is absent and f.default_factory is absent
    ]:
        raise UserError(f"{label} lacks {missing[0]}")
    types = field_types(cls)
    if error_text := next(
        filter(None, (validation_error(value, types[n], f"{label}.{n}") for n, value in values.items())), None
    ):
        raise UserError(error_text)
    return call_turning_value_errors_into_user_errors(lambda: cls(**values), label)


@lru_cache
def field_types(cls: Any) -> Mapping[str, Any]:
    """Returns `{field's name: declared type}` for the fields of a dataclass."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def check_field_types(instance: Any, *fields: str) -> None:
    """Raises a `UserError` unless the fields of a dataclass have their declared types; called by `__post_init__`.

    A field of a type that `validation_error` does not know takes any value.

    Args:
        instance: of a dataclass.
        fields: names of the fields to check; none for all.

    Raises:
        UserError: a field has another type, or is none of the words of a `Literal`.

    >>> from polyfed.data import Split
    >>> check_field_types(Split(clients=3))
    """
    cls: Any = type(instance)
    types = field_types(cls)
    for name in fields or types:
        annotation, value = types[name], getattr(instance, name)
        choices = get_args(annotation)
        if error_text := validation_error(value, annotation, name):
            if get_origin(annotation) is Literal and all(
                isinstance(word, str) and word.isidentifier() for word in choices
            ):
                error_text = f"unknown {name} {value!r}; {did_you_mean(str(value), choices)}"
            raise UserError(f"{type(instance).__name__}: {error_text}")


def call_turning_value_errors_into_user_errors(action: Callable[[], T], label: str) -> T:
    """Returns the result of `action()`, a function that handles values from a file.

    The values' types have been checked before. Other exceptions are programming errors, and pass.

    Raises:
        UserError: the action raised a `TypeError`, `ValueError` or `ArithmeticError`.
    """
    try:
        return action()
    except UserError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{label} has an invalid value ({type(error).__name__}: {reason})") from error
