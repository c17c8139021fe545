"""Numbers labels that are texts, so that a number means the same class in every set and at every client."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import UserError, warn_of_data
from polyfed.core.examples.examples import Examples
from polyfed.core.io.text.number_format import format_row_numbers, join_with_and
from polyfed.core.io.text.terminal_text import fold_spelling


class NumberedLabels(NamedTuple):
    """Holds labels as a tensor of numbers, and the names of the classes if the labels were texts; else None."""

    numbers: Tensor
    classes: tuple[str, ...] | None


def is_array_like(value: Any) -> bool:
    """Returns whether NumPy can make an array of a value that is no tensor, such as a frame or an Arrow array."""
    return hasattr(value, "__array__") and not isinstance(value, Tensor)


def holds_texts(value: Any) -> bool:
    """Returns whether an array, a frame, another `is_array_like` or a nested list holds strings.

    >>> holds_texts(["no", "yes"]), holds_texts([0, 1])
    (True, False)
    """
    if isinstance(value, str | bytes):
        return True
    if is_array_like(value):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "USO" and any(isinstance(item, str | bytes) for item in value.flat)
    return isinstance(value, tuple | list) and any(map(holds_texts, value))


def number_text_labels(labels: Any, name: str) -> NumberedLabels:
    """Numbers labels that are texts by their alphabetical order, and returns the numbers and the names.

    Args:
        labels: an array, list or pandas series of texts, shape (n,).
        name: whose labels they are, for errors.

    Raises:
        UserError: a label is missing or no text, or the labels have several columns.

    >>> number_text_labels(["well", "ill", "well"], "train")
    NumberedLabels(numbers=tensor([1, 0, 1]), classes=('ill', 'well'))
    """
    texts = np.asarray(labels, dtype=object)
    if texts.ndim == 0:
        raise UserError(f"{name} labels are one text, {str(labels)[:40]!r}; give a label for each example: of a frame "
                        "(frame[inputs], frame[target])")  # fmt: skip
    if texts.ndim != 1:
        raise UserError(f"{name} labels are texts of shape {texts.shape}; give one label for each example, or numbers")
    odd = [row for row, text in enumerate(texts) if not isinstance(text, str)]
    if odd:
        raise UserError(
            f"{name} labels are texts, but not in {format_row_numbers(odd)} (missing, or of another type); give each "
            "example a label, or leave it out"
        )
    classes, numbers = np.unique(texts.astype(str), return_inverse=True)
    return NumberedLabels(torch.from_numpy(numbers.astype(np.int64)), tuple(map(str, classes)))


def share_classes(sets: Mapping[str, Examples]) -> dict[str, Examples]:
    """Numbers the labels of several sets by their common classes, in alphabetical order, where needed.

    Args:
        sets: by the name that an error shows, such as "client 'north': train".

    Raises:
        UserError: some sets have texts as labels and others numbers.

    >>> x = torch.zeros(2, 1)
    >>> sets = {name: Examples(x, torch.tensor([0, 1]), classes=names)
    ...         for name, names in {"a": ("ill", "well"), "b": ("dead", "well")}.items()}
    >>> [(part.classes, part.labels.tolist()) for part in share_classes(sets).values()]
    [(('dead', 'ill', 'well'), [1, 2]), (('dead', 'ill', 'well'), [0, 2])]
    """
    named = {name: part for name, part in sets.items() if part.classes is not None}
    if not named:
        return dict(sets)
    if len(named) < len(sets):
        other = next(name for name in sets if name not in named)
        raise UserError(
            f"the labels of {next(iter(named))} are texts, those of {other} numbers; give texts everywhere, or numbers"
        )
    classes = tuple(sorted({text for part in sets.values() for text in part.classes or ()}))
    warn_of_names_that_look_alike({"the labels have": classes})
    return {name: _renumber_labels(part, classes) for name, part in sets.items()}


def warn_of_names_that_look_alike(names_by_owner: Mapping[str, Sequence[str]]) -> None:
    """Warns of names (sites, classes, categories) that differ in capitals, spaces or accents' encoding alone.

    Args:
        names_by_owner: the names, by what has them, such as "column 'ward' has".
    """
    for owner, names in names_by_owner.items():
        spellings: dict[str, list[str]] = {}
        for name in names:
            spellings.setdefault(fold_spelling(name), []).append(name)
        if alike := next((several for several in spellings.values() if several[1:]), None):
            show = repr if len({*map(str.casefold, alike)}) == 1 else ascii  # which tells accents apart
            warn_of_data(
                f"{owner} {join_with_and([*map(show, alike)])}, which are {'two' if len(alike) == 2 else len(alike)} "
                "different values here; if they mean the same, spell them alike"
            )


def _renumber_labels(examples: Examples, classes: Sequence[str]) -> Examples:
    if examples.classes == classes:
        return examples
    numbers = torch.tensor([classes.index(text) for text in examples.classes or ()], device=examples.y.device)
    return replace(examples, y=numbers[examples.y], classes=tuple(classes))
