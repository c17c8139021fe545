"""Keeps graphs of networks on disk if extracting them took long, so that a machine extracts each of them once.

A file's name is a hash of all that the graph depends on: the network's architecture, the source files of its classes, the
form of its inputs, and the versions of torch and of this package of polyfed. A file that is damaged, or does not fit the
network, is ignored and written again.
"""

import hashlib
import inspect
import json
import os
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import CellType
from typing import Any

import torch
from torch import nn

from polyfed.core.errors import UserError
from polyfed.core.examples.pytree import Inputs, input_spec_of
from polyfed.core.io.atomic_files import create_private_folder_if_missing, read_file, write_file_atomically
from polyfed.core.nn.module_cache import architecture_hash
from polyfed.graphs.architecture import NODE_MARKS, ArchitectureGraph, LayerType, Node
from polyfed.graphs.extract import extract
from polyfed.graphs.tracing.layer_flow import Kinds

_SLOW_SECONDS = 1.0  # graphs that are extracted faster are not kept
_FORMAT = 1


def extract_with_disk_cache(model: nn.Module, example_input: Inputs, kinds: Kinds = "all") -> ArchitectureGraph:
    """Returns the graph of a network's layers as `extract` does, from the disk if it is there.

    Graphs are kept in the folder `graphs` of `cache_folder()`. A network with a function or class that has no source
    file (from a notebook, or a closure) is extracted each time.
    """
    key = _cache_key(model, example_input, kinds)
    path = None if key is None else cache_folder() / "graphs" / f"{key}.json"
    if path is not None and (cached_graph := _read_graph(path, model)) is not None:
        return cached_graph
    begin = time.monotonic()
    graph = extract(model, example_input, kinds)
    if path is not None and time.monotonic() - begin > _SLOW_SECONDS:
        _write_graph(path, graph)
    return graph


def cache_folder() -> Path:
    """Returns the folder for files that can be made again: `POLYFED_CACHE`, or polyfed in the user's cache folder."""
    if folder := os.environ.get("POLYFED_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "polyfed"


def _cache_key(model: nn.Module, example_input: Inputs, kinds: Kinds) -> str | None:
    """Returns a hash of all on which the graph of a network depends; None if part of it is unknown."""
    files = set(Path(__file__).parent.rglob("*.py"))
    for part in model.modules():
        functions = [value for value in vars(part).values() if inspect.isroutine(value)]
        hooks = any(hook for name, hook in vars(part).items() if name.endswith(("_hooks", "_pre_hooks")) and hook)
        if functions or hooks:
            return None
        try:
            files |= {Path(inspect.getfile(ancestor)) for ancestor in type(part).__mro__[:-1]}
        except (
            TypeError,
            OSError,
        ):  # of a class without a file, as in a notebook; parametrised layers are made by torch
            return None
    content = [_FORMAT, torch.__version__, architecture_hash(model), str(input_spec_of(example_input)), kinds]
    content += sorted({text for part in model.modules() for text in _describe_methods(type(part))})
    try:
        content += [f"{file}: {_file_hash(file, file.stat().st_mtime_ns)}" for file in sorted(files)]
    except OSError:
        return None
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def _describe_methods(kind: type) -> list[str]:
    """Returns a text for each method of a class: its place in the file, and values from around the class.

    One file may have several classes of one name.
    """
    texts = []
    for function in (value for ancestor in kind.__mro__ for value in vars(ancestor).values()):
        if inspect.isfunction(function):
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            plain = {name: c.cell_contents for name, c in cells if name != "__class__" and _is_plain(c)}
            texts.append(f"{function.__qualname__} {function.__code__.co_firstlineno} {plain}")
    return texts


def _is_plain(cell: CellType) -> bool:
    try:
        return cell.cell_contents is None or isinstance(cell.cell_contents, bool | int | float | str)
    except ValueError:  # it has no value yet
        return False


@lru_cache(maxsize=1024)
def _file_hash(file: Path, changed: int) -> str:
    return hashlib.sha256(read_file(file)).hexdigest()


def _read_graph(path: Path, model: nn.Module) -> ArchitectureGraph | None:
    try:
        text, _, checksum = read_file(path).decode().rpartition("\n")
        if hashlib.sha256(text.encode()).hexdigest() != checksum:
            return None
        graph = _graph_from_plain_values(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    names_fit = all(name in shapes for node in graph.nodes for name in node.parameters.values())
    return graph if names_fit and graph.parameter_sizes == sizes else None


def _write_graph(path: Path, graph: ArchitectureGraph) -> None:
    text = json.dumps(_graph_to_plain_values(graph))
    try:
        create_private_folder_if_missing(path.parent, parents=True)
        write_file_atomically(path, f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}".encode())
    except (OSError, UserError):  # a full or read-only disk: the graph is extracted again the next time
        return


def _graph_to_plain_values(graph: ArchitectureGraph) -> dict[str, Any]:
    def describe_type(kind: Any) -> Any:
        return {"key": kind.key, "start": kind.start} if isinstance(kind, LayerType) else kind

    return {
        "nodes": [[node.name, describe_type(node.type), dict(node.parameters)] for node in graph.nodes],
        "edges": graph.edges,
        "sizes": dict(graph.parameter_sizes),
        "local": dict(graph.local_reasons),
        "tracer": graph.tracer,
    }


def _graph_from_plain_values(values: Mapping[str, Any]) -> ArchitectureGraph:
    nodes = []
    for name, kind, parameters in values["nodes"]:
        if isinstance(kind, Mapping):
            start = kind["start"]
            kind = LayerType.from_key(kind["key"], None if start is None else (start[0], start[1]))
        elif kind not in NODE_MARKS:
            raise ValueError(kind)
        nodes.append(Node(name, kind, parameters))
    edges = tuple((int(start), int(end)) for start, end in values["edges"])
    if not all(0 <= start < end < len(nodes) for start, end in edges):
        raise ValueError("edges")
    return ArchitectureGraph(tuple(nodes), edges, values["sizes"], values["local"], str(values["tracer"]))
