"""What an answer rests on: test examples, and of scores that are made within classes the examples of the rarest class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor


@final
@dataclass(frozen=True)
class Basis:
    """`examples` for the test; `rarest`, how many of them are of the rarest class, None where that does not matter;
    `words` for people."""

    examples: int
    rarest: int | None
    words: str


def rarest_of(labels: Tensor) -> tuple[int, int]:
    """How many examples the rarest class has, and which it is; of several labels, the side of a label with the fewest.
    Classes and sides without an example do not count where another has some; one class alone has 0 beside it.

    Args:
        labels: (n,) classes, or (n, labels) of 0 and 1.

    >>> import torch
    >>> rarest_of(torch.tensor([0, 2, 2, 2])), rarest_of(torch.tensor([1, 1]))
    ((1, 0), (0, 1))
    """
    if labels.dim() > 1:
        positive = (labels > 0).reshape(len(labels), -1).sum(0)
        least = positive.minimum(len(labels) - positive)
        both = (least > 0).nonzero()[:, 0]
        if not len(both):
            return 0, 0
        label = int(both[least[both].argmin()])
        return int(least[label]), label
    counts = labels.bincount()
    there = counts.nonzero()[:, 0]
    if len(there) < 2:
        return 0, int(there[0])
    rarest = int(there[counts[there].argmin()])
    return int(counts[rarest]), rarest


def basis_of(content: Mapping[str, Any], clients: Sequence[str], *, by_class: bool) -> Basis:
    """Of these clients, in the seed that gives them the fewest.

    Args:
        content: of `comparison.json`.
        clients: one, or all for their mean.
        by_class: whether the rarest class is told.
    """
    dealt = list(content["data"].values())
    examples = min(sum(sizes[c]["test"] for c in clients if c in sizes) for sizes in dealt)
    words = f"{examples} test example{'' if examples == 1 else 's'}"
    fewest = [(sizes[c]["rarest"], c) for sizes in dealt for c in clients if c in sizes and sizes[c].get("rarest")]
    if not by_class or not fewest:
        return Basis(examples, None, words)
    (number, which), client = min(fewest)
    return Basis(
        examples, number, f"{words}, {_of_class(content, number, which)}{f' at {client}' if len(clients) > 1 else ''}"
    )


def _of_class(content: Mapping[str, Any], number: int, which: int) -> str:
    names = content["class_names"]
    if content["task"] == "multilabel":
        return "no label both ways" if not number else f"{number} on the rarer side of a label"
    if not number:
        return "all of one class"
    several = len(names) > 2 if names else any(len(row["classes"] or ()) > 2 for row in _rows(content))
    named = f" ({names[which]})" if names and which < len(names) else ""
    return f"{number} of the {'rarest' if several else 'rarer'} class{named}"


def _rows(content: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [row for sizes in content["data"].values() for row in sizes.values()]
