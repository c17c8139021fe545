"""Computes hashes of the user's own code that a run computes with: networks, losses, transforms and methods.

A resumed run compares them with those of its start, and warns if code has changed: its later rounds would be of other code
than its first ones. A hash covers the compiled functions of a class, the functions and classes of the user that these call
by name, and the constants in upper case of their modules and classes; neither comments, docstrings, formatting nor names of
local variables. Code of polyfed, of torch and of other installed packages is not covered. Hashes of another version of
Python cannot be compared. The values that transforms, augmentations and losses hold, such as the means that one subtracts,
are hashed too: the data fingerprint of a run has only their names.
"""

import dis
import functools
import hashlib
import importlib.util
import inspect
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.examples.examples import PartwiseTransform
from polyfed.core.io.text.advice import keep_advice_for_this_process
from polyfed.core.io.text.number_format import join_first_and_count_rest
from polyfed.core.nn.module_cache import cached_module
from polyfed.simulation.checks.requirements import examples_by_split
from polyfed.simulation.checks.value_descriptions import describe_values

_INSTALLED = tuple(Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGES = ("polyfed", "torch", "builtins")
_MAX_PARTS = 500  # functions and classes that one hash follows
_SHOWN = 3
_VALUES_OF = "values of "
_LATER_ROUNDS = "the rounds from here on are computed otherwise than those before"


def code_fingerprint(clients: Iterable[Client], algorithm: Algorithm[Any, Any]) -> dict[str, str]:
    """Hashes the user's classes and functions of a run by name, and their values as "values of NAME".

    The entry "python" says with which hashes they can be compared.

    Args:
        clients: the clients, whose networks, losses and transforms count.
        algorithm: the method.
    """
    clients = list(clients)
    roots: dict[str, dict[Any, Any]] = {}
    for thing in _code_of_run(clients, algorithm):
        if _is_of_user(thing):  # several may have one name, as lambdas in one function do
            roots.setdefault(thing.__qualname__, {}).setdefault(getattr(thing, "__code__", thing), thing)
    hashes = {name: _join_hashes({_hash_code(thing) for thing in things.values()}) for name, things in roots.items()}
    hashes |= {f"{_VALUES_OF}{name}": value for name, value in _hash_values_by_name(clients).items()}
    hashes = dict(sorted(hashes.items()))
    return {"python": f"{importlib.util.MAGIC_NUMBER.hex()}-{sys.flags.optimize}", **hashes} if hashes else {}


def find_changed_code(before: Any, now: Mapping[str, str]) -> list[str]:
    """Returns the names whose hashes differ between two fingerprints; empty if these cannot be compared.

    Args:
        before: `code_fingerprint` at the start of a run; anything else if the run has none.
        now: the present one.
    """
    if not isinstance(before, Mapping) or before.get("python") != now.get("python"):
        return []
    return [name for name in now if name in before and before[name] != now[name]]


def warn_of_changed_code(changed_names: Iterable[str], consequence: str = _LATER_ROUNDS) -> None:
    """Warns of code, and of values that it holds, which have changed since a run was begun.

    Args:
        changed_names: from `find_changed_code`.
        consequence: what follows from it.
    """
    names = list(dict.fromkeys(changed_names))
    changed_code = [name for name in names if not name.startswith(_VALUES_OF)]
    changed_values = [name.removeprefix(_VALUES_OF) for name in names if name.startswith(_VALUES_OF)]
    for changed, sentence, cure in ((changed_code, "the code of {} is not that", "the code"),
                                    (changed_values, "the values that {} holds are not those", "the values")):  # fmt: skip
        if changed:
            warnings.warn(
                keep_advice_for_this_process(
                    f"{sentence.format(join_first_and_count_rest(changed, _SHOWN))} with which the run began: "
                    f"{consequence}; put {cure} back, or start another run with another out=... (--out)"
                ),
                UserWarning,
                stacklevel=4,
            )


def _code_of_run(clients: Iterable[Client], algorithm: Algorithm[Any, Any]) -> Iterator[Any]:
    """Yields the classes and functions at which the code of a run begins."""
    yield type(algorithm)
    factories = dict[int, Any]()
    for client in clients:
        if client.model is not None:
            factories.setdefault(id(client.model), client.model)
        objects: list[Any] = [client.loss, client.task]
        for examples in examples_by_split(client).values():
            transform = examples.transform
            objects += transform.transforms.values() if isinstance(transform, PartwiseTransform) else [transform]
            objects.append(examples.augment)
        yield from map(_class_or_function, objects)
    for factory in factories.values():
        for part in cached_module(factory).module.modules():
            yield type(part)
            yield from (value for value in vars(part).values() if isinstance(value, FunctionType))


def _join_hashes(hashes: set[str]) -> str:
    """Returns one hash of the code of all that has one name."""
    return hashes.pop() if len(hashes) == 1 else hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()[:16]


def _class_or_function(thing: Any) -> Any:
    return inspect.unwrap(thing) if inspect.isroutine(thing) else type(thing)


def _is_of_user(thing: Any) -> bool:
    """Returns whether a class or function is neither of polyfed, nor of torch, nor of another installed package."""
    if not isinstance(thing, type | FunctionType):
        return False
    module = thing.__module__ or ""
    if module.partition(".")[0] in (*_PACKAGES, *sys.builtin_module_names):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return not (file and any(Path(file).resolve().is_relative_to(folder) for folder in _INSTALLED))


def _hash_code(root: Any) -> str:
    """Returns a hash of a class or function, and of all the user's code that it calls by name."""
    texts, queue, visited = list[str](), [root], {id(root)}
    while queue and len(visited) <= _MAX_PARTS:
        thing = queue.pop()
        functions, used = {thing.__qualname__: thing}, list[Any]()
        if isinstance(thing, type):
            functions, used = _functions_of_class(thing), list(thing.__mro__[1:])
            constants = {name: value for name, value in vars(thing).items() if name.isupper()}
            texts.append(f"{thing.__qualname__}: {_plain_values(constants)}")
        for name, function in sorted(functions.items()):
            values = _values_by_name(function)
            texts.append(
                f"{thing.__qualname__}.{name}: {_describe_code(function.__code__, function.__doc__)} {_plain_values(values)}"
            )
            used += [_class_or_function(v) for v in values.values() if isinstance(v, type) or inspect.isroutine(v)]
            used += [value for value in values.values() if isinstance(value, type)]
        for other in used:
            if id(other) not in visited and _is_of_user(other):
                visited.add(id(other))
                queue.append(other)
    return hashlib.sha256("\n".join(sorted(texts)).encode(errors="surrogatepass")).hexdigest()[:16]


def _functions_of_class(kind: type) -> dict[str, FunctionType]:
    functions = {}
    for name, value in vars(kind).items():
        parts = [value.fget, value.fset] if isinstance(value, property) else [getattr(value, "__func__", value)]
        for number, part in enumerate(parts):
            function = inspect.unwrap(part) if callable(part) else part
            if isinstance(function, FunctionType):
                functions[f"{name}{number or ''}"] = function
    return functions


def _values_by_name(function: FunctionType) -> dict[str, Any]:
    """Returns what a function refers to outside its body: globals that it or a function in it names, cells and defaults.

    Of plain values in globals only constants in upper case count, and in cells none: others may change as a run goes on.
    """
    steps = [step for code in _nested_codes(function.__code__) for step in dis.get_instructions(code)]
    names = {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
    values = {name: function.__globals__[name] for name in names if name in function.__globals__}
    values = {name: value for name, value in values.items() if name.isupper() or not _is_plain(value)}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values |= {} if _is_plain(cell.cell_contents) else {f"cell {name}": cell.cell_contents}
        except ValueError:  # it has no value yet
            continue
    defaults = dict(enumerate(function.__defaults__ or ())) | (function.__kwdefaults__ or {})
    return values | {f"default {name}": value for name, value in defaults.items()}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _plain_values(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return sorted((name, repr(value)) for name, value in values.items() if _is_plain(value))


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_codes(constant)


def _describe_code(code: CodeType, docstring: str | None = None) -> str:
    constants = [
        _describe_code(constant) if isinstance(constant, CodeType)
        else repr(sorted(constant, key=repr)) if isinstance(constant, frozenset)
        else "None" if docstring is not None and constant == docstring else repr(constant)
        for constant in code.co_consts
    ]  # fmt: skip
    return f"{code.co_code.hex()} {constants} {code.co_names}"


def _hash_values_by_name(clients: Iterable[Client]) -> dict[str, str]:
    """Returns `{name: hash}` of the values that transforms, augmentations and losses of all clients hold."""
    hashes, descriptions = dict[str, Any](), dict[int, Any]()  # many clients may share an object
    for client in sorted(clients, key=lambda client: client.id):
        for place, thing in _holders_of_values(client):
            is_function = isinstance(thing, FunctionType)
            if not is_function or thing.__closure__ or thing.__defaults__ or thing.__kwdefaults__:
                named = thing.func if isinstance(thing, functools.partial) else thing
                name = getattr(named, "__qualname__", type(named).__qualname__)
                if id(thing) not in descriptions:
                    descriptions[id(thing)] = describe_values(thing)
                text = repr((client.id, place, descriptions[id(thing)]))
                hashes.setdefault(name, hashlib.sha256()).update(text.encode(errors="surrogatepass"))
    return {name: content.hexdigest()[:16] for name, content in sorted(hashes.items())}


def _holders_of_values(client: Client) -> Iterator[tuple[str, Any]]:
    """Yields (place, object) for what may hold values that the data fingerprint does not have."""
    holders: dict[str, Any] = {"loss": client.loss}
    for split, examples in examples_by_split(client).items():
        transform = examples.transform
        parts = transform.transforms if isinstance(transform, PartwiseTransform) else {"": transform}
        holders |= {f"{split} transform {part}": part_transform for part, part_transform in parts.items()}
        yield from [] if examples.augment is None else [(f"{split} augment", examples.augment)]
    for place, thing in holders.items():
        if thing is not None and not type(thing).__module__.startswith("polyfed."):  # which prints its values
            yield place, thing
