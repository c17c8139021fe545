"""Counts the test examples behind an answer, and those of the rarest class where the metric is computed within classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor


@final
@dataclass(frozen=True)
class AnswerBasis:
    """Holds the number of test examples behind an answer, and a sentence about it.

    Attributes:
        num_examples: number of test examples.
        num_rarest: how many of these are of the rarest class; None where that does not matter.
        sentence: the same for users.
    """

    num_examples: int
    num_rarest: int | None
    sentence: str


def count_rarest_class(labels: Tensor) -> tuple[int, int]:
    """Returns the number of examples of the rarest class among the labels, and that class.

    Classes without examples are ignored, unless there is only one class: then (0, that class). With several labels,
    the rarer value of a label counts as a class, and the label with the fewest is returned; (0, 0) if no label takes
    both values.

    Args:
        labels: (n,) classes, or (n, labels) of 0 and 1.

    >>> import torch
    >>> count_rarest_class(torch.tensor([0, 2, 2, 2])), count_rarest_class(torch.tensor([1, 1]))
    ((1, 0), (0, 1))
    """
    if labels.dim() > 1:
        positive = (labels > 0).reshape(len(labels), -1).sum(0)
        least = positive.minimum(len(labels) - positive)
        two_sided = (least > 0).nonzero()[:, 0]
        if not len(two_sided):
            return 0, 0
        label = int(two_sided[least[two_sided].argmin()])
        return int(least[label]), label
    counts = labels.bincount()
    present = counts.nonzero()[:, 0]
    if len(present) < 2:
        return 0, int(present[0])
    rarest = int(present[counts[present].argmin()])
    return int(counts[rarest]), rarest


def count_examples_behind_answer(content: Mapping[str, Any], clients: Sequence[str], *, by_class: bool) -> AnswerBasis:
    """Counts the test examples of the given clients, for the seed with the fewest, and those of the rarest class.

    Args:
        content: `comparison.json`.
        clients: one client, or all for their mean.
        by_class: whether to count the rarest class.
    """
    sizes_by_seed = list(content["data"].values())
    examples = min(sum(sizes[c]["test"] for c in clients if c in sizes) for sizes in sizes_by_seed)
    words = f"{examples} test example{'' if examples == 1 else 's'}"
    fewest = [
        (sizes[c]["rarest"], c) for sizes in sizes_by_seed for c in clients if c in sizes and sizes[c].get("rarest")
    ]
    if not by_class or not fewest:
        return AnswerBasis(examples, None, words)
    (number, which), client = min(fewest)
    return AnswerBasis(
        examples,
        number,
        f"{words}, {_rarest_class_words(content, number, which)}{f' at {client}' if len(clients) > 1 else ''}",
    )


def _rarest_class_words(content: Mapping[str, Any], number: int, which: int) -> str:
    """Describes in words how many examples the rarest class has."""
    names = content["class_names"]
    if content["task"] == "multilabel":
        return "no label both ways" if not number else f"{number} on the rarer side of a label"
    if not number:
        return "all of one class"
    several = len(names) > 2 if names else any(len(row["classes"] or ()) > 2 for row in _client_rows(content))
    class_suffix = f" ({names[which]})" if names and which < len(names) else ""
    return f"{number} of the {'rarest' if several else 'rarer'} class{class_suffix}"


def _client_rows(content: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Returns the entries of `data` in `comparison.json` for the given clients, one per client and seed."""
    return [row for sizes in content["data"].values() for row in sizes.values()]
