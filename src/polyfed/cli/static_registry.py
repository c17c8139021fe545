"""Reads the names, fields and docstrings of methods, data sets and networks from their source files; this is faster
than importing them.

A list of methods, a help text or a misspelt option should be answered at once, but importing a method imports torch, which
takes seconds. An outline has the docstring, bases, fields, defaults and signature of a class or function, and no code.
"""

import ast
import dataclasses
import gc
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, final

from polyfed.core.io.values.frozen_mapping import FrozenMapping

_PACKAGE = Path(__file__).parents[1]
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.BitOr: operator.or_, ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.Pow: operator.pow,
}  # fmt: skip
_CALLS_IN_CHECKS: dict[tuple[str, str], list[tuple[str, list[Any]]]] = {}  # of each class whose module was read
_FOREIGN: Any = Any  # stands for whatever another package defines: no field of a choice depends on it


@final
class StaticRegistry(Mapping[str, Any]):
    """Maps names in a registry, a literal dict of classes, to outlines read from the source at look-up.

    >>> methods = StaticRegistry("polyfed.algorithms", "REGISTRY")
    >>> list(methods)[:2], methods["fedprox"](mu=1).mu
    (['fedsa_lora', 'ffa_lora'], 1)
    """

    def __init__(self, module: str, name: str) -> None:
        node = _top_level_definitions(module)[name]
        if not isinstance(node, ast.Dict):
            raise TypeError(f"{module}.{name} must be a literal dict, found {ast.unparse(node)}")
        self._module = module
        self._entries = {ast.literal_eval(k): v for k, v in zip(node.keys, node.values, strict=True) if k is not None}

    def __getitem__(self, name: str) -> Any:
        return _evaluate_node(self._entries[name], self._module)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@cache
def read_value_or_outline_without_import(module: str, name: str) -> Any:
    """Reads a constant, or a class's or function's outline (fields, docstring), from a module's source.

    >>> read_value_or_outline_without_import("polyfed.core.training.precision", "Precision")
    typing.Literal['fp32', 'bf16']
    """
    node = _top_level_definitions(module).get(name)
    if isinstance(node, ast.ClassDef):
        return _build_class_outline(node, module)
    if isinstance(node, ast.FunctionDef):
        return _build_function_outline(node, module)
    if isinstance(node, ast.ImportFrom):
        source_module = str(node.module)
        original_name = next(alias.name for alias in node.names if name in (alias.name, alias.asname))
        return (
            read_value_or_outline_without_import(source_module, original_name)
            if _is_polyfed_module(source_module)
            else getattr(_import_if_standard(source_module), original_name, _FOREIGN)
        )
    if isinstance(node, ast.Import):
        return _import_if_standard(next(alias.name for alias in node.names if name in (alias.name, alias.asname)))
    return _evaluate_node(node, module) if isinstance(node, ast.expr) else getattr(import_module("builtins"), name)


def _is_polyfed_module(module: str) -> bool:
    return module.partition(".")[0] == "polyfed"


def _import_if_standard(module: str) -> Any:
    """Imports a module of Python's standard library; returns a stand-in for any other module."""
    return import_module(module) if module.partition(".")[0] in sys.stdlib_module_names else _FOREIGN


@cache
def _top_level_definitions(module: str) -> Mapping[str, ast.AST]:
    """Returns the statement or expression that defines each top-level name of a module."""
    path = _PACKAGE.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    gc_was_enabled = gc.isenabled()
    gc.disable()  # collections would find nothing in a syntax tree, and take longer than the parser
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    finally:
        if gc_was_enabled:
            gc.enable()
    definitions: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            if isinstance(node, ast.ClassDef):
                _CALLS_IN_CHECKS[module, node.name] = list(_calls_in_checks(node))
            node.body = [part for part in node.body if isinstance(part, ast.AnnAssign | ast.Expr)]  # no code
            definitions[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            definitions |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            definitions[node.target.id] = node.value
        elif isinstance(node, ast.Assign):
            definitions |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
    return definitions


def _calls_in_checks(node: ast.ClassDef) -> Iterator[tuple[str, list[Any]]]:
    """Yields names and arguments of calls such as `self._at_least(0, "mu")` that `__post_init__` makes in any case."""
    checks = (part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__post_init__")
    for statement in (statement for check in checks for statement in check.body):
        match statement:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name("self"), name), arguments, [])):
                if all(isinstance(argument, ast.Constant) for argument in arguments):
                    yield name, [ast.literal_eval(argument) for argument in arguments]


def list_least_values(outline: type) -> Iterator[tuple[str, float | None]]:
    """Yields the fields of a method that its checks let be no less than a number; with None those that are positive.

    >>> list(list_least_values(ALGORITHMS["fedprox"]))
    [('mu', 0)]
    """
    for base in outline.__mro__:
        for name, arguments in _CALLS_IN_CHECKS.get((base.__module__, base.__name__), ()):
            if name in ("_at_least", "_positive"):
                least, *fields = arguments if name == "_at_least" else (None, *arguments)
                yield from ((field, least) for field in fields)


def _build_class_outline(node: ast.ClassDef, module: str) -> type:
    bases = [_evaluate_node(base.value if isinstance(base, ast.Subscript) else base, module) for base in node.bases]
    content: dict[str, Any] = {
        "__module__": module,
        "__doc__": ast.get_docstring(node, clean=False),
        "__annotations__": {},
    }
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            content["__annotations__"][field.target.id] = _evaluate_annotation(field.annotation, module)
            if field.value is not None:
                content[field.target.id] = _evaluate_node(field.value, module)
    outline_class = type(
        node.name, tuple(base for base in bases if _is_polyfed_module(getattr(base, "__module__", ""))), content
    )
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else ast.Call(decorator, [], [])
        if _evaluate_node(call.func, module) is dataclasses.dataclass:
            kw_only = any(word.arg == "kw_only" and _evaluate_node(word.value, module) for word in call.keywords)
            outline_class = dataclasses.dataclass(kw_only=kw_only, eq=False, repr=False, match_args=False)(
                outline_class
            )
    return outline_class


def _build_function_outline(node: ast.FunctionDef, module: str) -> Callable[..., Any]:
    def function(*_: Any, **__: Any) -> Any:
        raise TypeError(f"{module}.{node.name} is an outline, which cannot be called")

    kinds = inspect.Parameter
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = [*[None] * (len(positional) - len(node.args.defaults)), *node.args.defaults, *node.args.kw_defaults]
    rows: list[tuple[ast.arg, Any]] = [(arg, kinds.POSITIONAL_OR_KEYWORD) for arg in positional]
    rows += [(arg, kinds.KEYWORD_ONLY) for arg in node.args.kwonlyargs]
    parameters = [
        inspect.Parameter(
            arg.arg,
            kind,
            default=kinds.empty if default is None else _evaluate_node(default, module),
            annotation=kinds.empty if arg.annotation is None else _evaluate_annotation(arg.annotation, module),
        )
        for (arg, kind), default in zip(rows, defaults, strict=True)
    ]
    function.__name__, function.__module__, function.__doc__ = node.name, module, ast.get_docstring(node, clean=False)
    function.__annotations__ = {p.name: p.annotation for p in parameters if p.annotation is not p.empty}
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what `signature` reads first
    return function


def _evaluate_annotation(node: ast.expr, module: str) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _evaluate_node(ast.parse(node.value, mode="eval").body, module)
    return _evaluate_node(node, module)


def _evaluate_node(node: ast.expr, module: str) -> Any:
    """Evaluates an expression of names, literals, types and calls to Python's own functions."""

    def evaluate(part: ast.expr) -> Any:
        return _evaluate_node(part, module)

    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return read_value_or_outline_without_import(module, name)
        case ast.Attribute(owner, name):
            target = evaluate(owner)
            return _FOREIGN if target is _FOREIGN else getattr(target, name)
        case ast.Subscript(owner, key):
            target = evaluate(owner)
            return _FOREIGN if target is _FOREIGN else target[evaluate(key)]
        case ast.Tuple(parts):
            return tuple(map(evaluate, parts))
        case ast.List(parts):
            return list(map(evaluate, parts))
        case ast.Set(parts):
            return set(map(evaluate, parts))
        case ast.Dict(keys, values):
            return {evaluate(k): evaluate(v) for k, v in zip(keys, values, strict=True) if k is not None}
        case ast.UnaryOp(ast.USub(), part):
            return -evaluate(part)
        case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](evaluate(left), evaluate(right))
        case ast.Call(ast.Name("FrozenMapping"), [part]):
            return FrozenMapping(evaluate(part))
        case ast.Call(function, parts, words):
            target = evaluate(function)
            return (
                _FOREIGN
                if target is _FOREIGN
                else target(*map(evaluate, parts), **{str(w.arg): evaluate(w.value) for w in words})
            )
    raise TypeError(f"{module}, line {node.lineno}: {ast.unparse(node)} cannot be read without importing the module")


ALGORITHMS = StaticRegistry("polyfed.algorithms", "REGISTRY")
SOURCES = StaticRegistry("polyfed.data.sources.registry", "SOURCES")
PARTITIONS = StaticRegistry("polyfed.data", "PARTITIONS")
MODELS = StaticRegistry("polyfed.models", "MODELS")
