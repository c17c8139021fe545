"""Converts a site's examples (tables, vectors, images or token ids) to columns of numbers and categories.

An image becomes its size and its intensity, a text its length; a target becomes a column, too. Only sums and counts of these
columns are shown or sent (`polyfed.data.look.counts`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from polyfed.core.examples.examples import Examples, PartwiseTransform
from polyfed.core.examples.pytree import named_leaves
from polyfed.data.tabular.preprocessing import TablePreprocessor

MAX_VECTOR = 200  # numbers of a vector that are columns by themselves
_MAX_IMAGES = 2000  # images of a site that are looked at, evenly over all
_BATCH = 256
_ANSWERS = ("0", "1")


IMAGE_SIZE = "size (channels × height × width)"
"""Name of a column that only sites with images have."""


@final
@dataclass(frozen=True)
class LookColumn:
    """Describes one column of the sites' data: its name, its categories (None if it holds numbers), and whether it is a
    target.
    """

    name: str
    values: tuple[str, ...] | None = None
    is_target: bool = False


@final
@dataclass(frozen=True, eq=False)
class SiteColumns:
    """Holds the examples of one site as columns of numbers and categories.

    Args:
        columns: in the order of `cells`.
        cells: float64, shape (n, columns): a number, or the index of a category; NaN where there is no value.
        parts: number of examples by set: "train", "val" and "test".
        different_tokens: number of different token ids in the inputs; None for inputs of another kind.
    """

    columns: tuple[LookColumn, ...]
    cells: Tensor = field(repr=False)
    parts: Mapping[str, int]
    different_tokens: int | None = None

    def align_to_columns(self, columns: Sequence[LookColumn]) -> "SiteColumns":
        """Returns the examples in all sites' `columns`; one that this site lacks gets no values."""
        cells = torch.full((len(self.cells), len(columns)), math.nan, dtype=torch.float64)
        position_by_name = {column.name: position for position, column in enumerate(self.columns)}
        for position, column in enumerate(columns):
            if (old_position := position_by_name.get(column.name)) is None:
                continue
            old_values, old_cells = self.columns[old_position].values, self.cells[:, old_position]
            if old_values is not None and column.values is not None and old_values != column.values:
                codes = torch.tensor([*(float(column.values.index(value)) for value in old_values), math.nan])
                old_cells = codes.double()[torch.where(old_cells.isnan(), len(old_values), old_cells).long()]
            cells[:, position] = old_cells
        return SiteColumns(tuple(columns), cells, self.parts, self.different_tokens)


def merge_columns(sites: Sequence[Sequence[LookColumn]]) -> tuple[LookColumn, ...]:
    """Merges sites' columns by name, with the categories that occur at any site.

    A column that holds numbers at one site and the answers 0 and 1 at another holds numbers.

    >>> merge_columns([[LookColumn("sex", ("f",))], [LookColumn("sex", ("m",)), LookColumn("age")]])
    (LookColumn(name='sex', values=('f', 'm'), is_target=False), LookColumn(name='age', values=None, is_target=False))
    """
    merged: dict[str, LookColumn] = {}
    for column in (column for columns in sites for column in columns):
        if (earlier := merged.get(column.name)) is None:
            merged[column.name] = column
        elif earlier.values != column.values:
            lists = (earlier.values, column.values)
            values = None if None in lists else tuple(dict.fromkeys((*(lists[0] or ()), *(lists[1] or ()))))
            merged[column.name] = LookColumn(column.name, values, column.is_target)
    ordered = sorted(merged.values(), key=lambda column: column.is_target)
    return tuple(LookColumn(c.name, _sort_numbers(c.values), c.is_target) for c in ordered)


def _sort_numbers(values: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if values is None or not all(value.isdecimal() for value in values):
        return values
    return tuple(sorted(values, key=int))


def read_columns_of_client(client: Any, class_names: Sequence[str] = ()) -> SiteColumns:
    """Converts the training, validation and test examples of a `Client` or `ClientData` to columns."""
    sets = {"train": client.train, "val": client.val, "test": client.test}
    return read_site_columns(
        {name: examples for name, examples in sets.items() if isinstance(examples, Examples) and len(examples)},
        class_names,
    )


def read_site_columns(sets: Mapping[str, Examples], class_names: Sequence[str] = ()) -> SiteColumns:
    """Converts the examples of one site (`{set's name: examples}`) to columns of numbers and categories.

    Args:
        sets: the site's sets of examples, by name ("train", "val", "test").
        class_names: names of the classes, labels or targets; empty for those of the table, or numbers.

    >>> sets = {"train": Examples(torch.tensor([[1.0, 5.0], [2.0, 6.0]]), torch.tensor([0, 1]))}
    >>> read_site_columns(sets, ["no", "yes"]).columns[-1]
    LookColumn(name='class', values=('no', 'yes'), is_target=True)
    """
    first = next(iter(sets.values()))
    preprocessor = first.transform if isinstance(first.transform, TablePreprocessor) else None
    names = tuple(class_names) or (() if preprocessor is None else preprocessor.classes)
    tokens: set[int] = set()
    by_set = []
    for examples in sets.values():
        sample = _thin_out_examples(examples)
        pairs = _input_columns(sample, tokens)
        features = {column.name for column, _ in pairs}
        for column, target_cells in _target_columns(sample, names, preprocessor):
            name = f"{column.name} (target)" if column.name in features else column.name
            pairs.append((LookColumn(name, column.values, True), target_cells))
        cells = torch.stack([cells for _, cells in pairs], dim=1)
        by_set.append(SiteColumns(tuple(column for column, _ in pairs), cells, {}))
    columns = merge_columns([part.columns for part in by_set])
    return SiteColumns(
        columns,
        torch.cat([part.align_to_columns(columns).cells for part in by_set]),
        {name: len(examples) for name, examples in sets.items()},
        len(tokens) or None,
    )


def _thin_out_examples(examples: Examples) -> Examples:
    """Returns the examples, or some of them spread evenly where each must be decoded or is large."""
    shape = getattr(examples.transform, "shape", None)
    is_image = shape is not None or (isinstance(examples.x, Tensor) and examples.x.dim() >= 4)
    if not is_image or len(examples) <= _MAX_IMAGES:
        return examples
    return examples.select(torch.linspace(0, len(examples) - 1, _MAX_IMAGES).long())


def _input_columns(examples: Examples, tokens: set[int]) -> list[tuple[LookColumn, Tensor]]:
    """Returns the columns of the inputs; adds the token ids that occur to `tokens`."""
    inputs: Any = examples.raw_inputs
    decode: Callable[[Tensor], Tensor] | None = getattr(examples.transform, "decode_pixels", None)
    if decode is not None:
        inputs = torch.cat([decode(rows) for rows in torch.split(inputs, _BATCH)])
    transform = examples.transform
    parts = dict(named_leaves(inputs))
    transforms = transform.transforms if isinstance(transform, PartwiseTransform) else {}
    columns = []
    for name, part in parts.items():
        prefix, features = f"{name}: " if name else "", examples.features_of_part(name)
        part_transform = transforms.get(name) if name else transform
        if isinstance(part_transform, TablePreprocessor):
            part_columns = _table_columns(part, part_transform)
        elif part.dim() >= 4:
            part_columns = _image_columns(part)
        elif part.dim() == 2 and not part.is_floating_point() and part.dtype != torch.uint8 and not features:
            tokens.update(torch.unique(part).tolist())
            part_columns = _token_columns(part)
        elif part.dim() <= 2 and part[:1].numel() <= MAX_VECTOR:
            flat = part.reshape(len(part), -1).double()
            names = features if len(features) == flat.shape[1] else [f"x{k}" for k in range(flat.shape[1])]
            part_columns = [(LookColumn(column_name), flat[:, k]) for k, column_name in enumerate(names)]
        else:
            part_columns = _image_columns(part.unsqueeze(1))
        columns += [(LookColumn(prefix + column.name, column.values), cells) for column, cells in part_columns]
    return columns


def _table_columns(x: Tensor, preprocessor: TablePreprocessor) -> list[tuple[LookColumn, Tensor]]:
    columns = []
    for position, column in enumerate(preprocessor.columns):
        cells = x[:, position].double()
        if column.categories is not None:
            is_category = (cells >= 0) & (cells < len(column.categories))
            cells = torch.where(is_category, cells, math.nan)
        columns.append((LookColumn(column.name, column.categories), cells))
    return columns


def _image_columns(x: Tensor) -> list[tuple[LookColumn, Tensor]]:
    """Returns the size, intensity and contrast of images or other arrays, shape (n, channels, ...)."""
    size = " × ".join(map(str, x.shape[1:]))
    means, spreads = [], []
    for batch in torch.split(x, _BATCH):
        flat = batch.double().flatten(2) if batch.dim() > 2 else batch.double().unsqueeze(1)
        means.append(flat.mean(2))
        spreads.append(flat.flatten(1).std(1, correction=0))
    by_channel = torch.cat(means)
    columns = [
        (LookColumn(IMAGE_SIZE, (size,)), torch.zeros(len(x), dtype=torch.float64)),
        (LookColumn("intensity"), by_channel.mean(1)),
        (LookColumn("contrast (sd of intensity)"), torch.cat(spreads)),
    ]
    if 1 < by_channel.shape[1] <= 4:
        columns += [(LookColumn(f"intensity of channel {k}"), by_channel[:, k]) for k in range(by_channel.shape[1])]
    return columns


def _token_columns(x: Tensor) -> list[tuple[LookColumn, Tensor]]:
    """Returns the length of each text up to its padding (0), and how many different tokens it has."""
    positions = torch.arange(1, x.shape[1] + 1)
    length = ((x != 0) * positions).amax(1) if x.shape[1] else torch.zeros(len(x))
    ordered = x.sort(1).values
    different = ((ordered[:, 1:] != ordered[:, :-1]) & (ordered[:, 1:] != 0)).sum(1) + (ordered[:, 0] != 0)
    return [(LookColumn("length"), length.double()), (LookColumn("different tokens"), different.double())]


def _target_columns(
    examples: Examples, names: Sequence[str], preprocessor: TablePreprocessor | None
) -> list[tuple[LookColumn, Tensor]]:
    y = examples.labels
    if y.dim() == 1 and not y.is_floating_point():
        count = max(len(names), int(examples.y.max()) + 1)
        values = tuple(names) if len(names) == count else tuple(map(str, range(count)))
        return [(LookColumn("class", values, True), y.double())]
    if y.dim() > 2 or (y.dim() == 2 and not y.is_floating_point()):
        labelled = y[y >= 0]
        count = int(labelled.max()) + 1 if len(labelled) else 0
        flat = y.flatten(1) if y.is_floating_point() or count > 1 else y.flatten(1).double()
        shares = [(flat == k).double().mean(1) for k in range(1, min(count, 20))]
        return [(LookColumn(f"share of class {k}", None, True), share) for k, share in enumerate(shares, 1)]
    if preprocessor is not None and preprocessor.target:
        y = preprocessor.unscale_outputs(y)
    flat = y.reshape(len(y), -1).double()
    columns = []
    store = examples.y.reshape(len(examples.y), -1)
    for k in range(flat.shape[1]):
        label = names[k] if len(names) == flat.shape[1] else f"target {k}" if flat.shape[1] > 1 else "target"
        is_answer = bool(((store[:, k] == 0) | (store[:, k] == 1)).all())
        columns.append((LookColumn(label, _ANSWERS if is_answer else None, True), flat[:, k]))
    return columns
