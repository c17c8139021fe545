"""Defines the layer catalogue: the layer types whose weights a hypernetwork can generate. The catalogue is public; the
clients' graphs are not.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, final

import yaml

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.atomic_files import expand_user_path, read_file
from polyfed.core.io.values.validation import parse_yaml, validation_error
from polyfed.graphs.architecture import NODE_MARKS, NONE, ArchitectureGraph, LayerType, NodeMark, unique_types

_FORMAT = 2  # version of the file format; in version 1, types had no dilation and no activation


@final
@dataclass(frozen=True)
class LayerCatalogue:
    """Holds the layer types whose weights a hypernetwork can generate, sorted and without duplicates.

    Attributes:
        types: the layer types.
        largest_network: how many numbers are generated for the client's network that has most; 0 if unknown.

    >>> conv, line = LayerType("conv2d", 1, 8, (3, 3), (1, 1)), LayerType("linear", 8, 2)
    >>> catalogue = LayerCatalogue((line, conv, conv))
    >>> [t.kind for t in catalogue.types], len(catalogue.node_types)
    (['conv2d', 'linear'], 5)
    """

    types: tuple[LayerType, ...]
    largest_network: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "types", unique_types(self.types))

    @classmethod
    def from_graphs(cls, graphs: Iterable[ArchitectureGraph]) -> "LayerCatalogue":
        """Builds the catalogue of all layer types that occur in these graphs."""
        graphs = tuple(graphs)
        types = tuple(t for graph in graphs for t in graph.layer_types)
        return cls(types, max((graph.num_generated for graph in graphs), default=0))

    @property
    def node_types(self) -> tuple[NodeMark | LayerType, ...]:
        """Returns the node type of each column of X: "add", "concat", "other", then the layer types."""
        return (*NODE_MARKS, *self.types)

    def write_yaml(self, path: str | Path, graph: str = "layers_and_norms") -> None:
        """Writes the catalogue and the method's field `graph` to YAML for all sites of a deployment."""
        rows = [
            {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in asdict(t).items()
                if (t.norm != NONE or name not in ("norm", "norm_bias")) and (name != "start" or value is not None)
            }
            for t in self.types
        ]
        text = "# Layer types that the federation's hypernetwork generates; public. Layers of other types stay local.\n"
        stated = {} if graph == "layers_and_norms" else {"graph": graph}
        size = {"largest_network": self.largest_network} if self.largest_network else {}
        content = {"format": _FORMAT, **stated, **size, "layer_types": rows}
        text += yaml.safe_dump(content, sort_keys=False, default_flow_style=None)
        expand_user_path(path, "the layer catalogue").write_text(text, encoding="utf-8")

    @classmethod
    def read_yaml(cls, path: str | Path) -> "LayerCatalogue":
        """Reads a catalogue from a YAML file that `write_yaml` or a person wrote.

        Raises:
            UserError: the file cannot be read, has another format, or an entry is not a layer type.
        """
        content = _read_content(path)
        rows = content.get("layer_types") if isinstance(content, Mapping) else None
        if not isinstance(rows, list) or not rows:
            raise UserError(
                f"the layer catalogue {path} must have a list layer_types; `polyfed graph MODEL --catalogue FILE` writes one"
            )
        if (stated := content.get("format", 1)) != _FORMAT:
            raise UserError(
                f"the layer catalogue {path} has format {stated!r}, and this version of polyfed reads format {_FORMAT}, "
                "in which a layer type has a dilation and an activation; delete it and write it again, with `polyfed graph "
                "MODEL --catalogue FILE` for each network"
            )
        if error := validation_error(size := content.get("largest_network", 0), int, "largest_network"):
            raise UserError(f"the layer catalogue {path}: {error}")
        if size < 0:
            raise UserError(f"the layer catalogue {path}: largest_network must be at least 0, got {size}")
        return cls(
            tuple(_parse_layer_type(row, f"{path}, layer type {k}") for k, row in enumerate(rows, start=1)), size
        )


def read_graph_variant_of_catalogue(path: str | Path) -> str:
    """Returns a catalogue's graphs: "layers", or "layers_and_norms" with norm layers as nodes.

    Raises:
        UserError: the file cannot be read, or has another value of `graph`.
    """
    content = _read_content(path)
    graph = content.get("graph", "layers_and_norms") if isinstance(content, Mapping) else "layers_and_norms"
    if graph not in ("layers", "layers_and_norms"):
        raise UserError(f"graph in the layer catalogue {path} must be layers or layers_and_norms, got {graph!r}")
    return str(graph)


def _read_content(path: str | Path) -> Any:
    try:
        return parse_yaml(read_file(expand_user_path(path, "the layer catalogue")))
    except (OSError, ValueError) as error:
        raise UserError(f"the layer catalogue {path} cannot be read: {error}") from error


_FORM = {
    "kind": str, "c_in": int, "c_out": int, "kernel": list[int], "stride": list[int], "dilation": list[int], "groups": int,
    "bias": bool, "activation": str, "norm": str, "norm_bias": bool,
    "start": list[float],
}  # fmt: skip


def _parse_layer_type(row: Any, where: str) -> LayerType:
    field_names = [field.name for field in fields(LayerType)]
    if not isinstance(row, Mapping) or not {"kind", "c_in", "c_out"} <= row.keys():
        raise UserError(f"{where} must give kind, c_in and c_out, got {row!r}")
    if unknown := sorted(map(str, row.keys() - set(field_names))):
        raise UserError(f"{where}: there is no {unknown[0]!r}; {did_you_mean(unknown[0], field_names)}")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    for name in ("bias", "norm_bias"):
        if not isinstance(values.get(name, True), bool):
            raise UserError(f"{where}: {name} must be true or false, got {values[name]!r}")
    for name in ("kernel", "stride", "dilation", "start"):
        if not isinstance(values.get(name, ()), tuple):
            raise UserError(f"{where}: {name} must be a list, got {values[name]!r}")
    if error_text := next(
        filter(None, (validation_error(row[name], kind, name) for name, kind in _FORM.items() if name in row)), ""
    ):
        raise UserError(f"{where}: {error_text}")
    try:
        return LayerType(**values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
