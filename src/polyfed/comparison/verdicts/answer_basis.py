"""Counts the test examples behind an answer, and those of the rarest class where the metric is computed within classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from polyfed.core.task import get_task


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
    names = content["class_names"] or ()
    num_classes = len(names) or max((len(row["classes"] or ()) for row in _client_rows(content)), default=0)
    class_name = names[which] if which < len(names) else ""
    return get_task(content["task"]).describe_rarest(number, class_name, num_classes)


def _client_rows(content: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Returns the entries of `data` in `comparison.json` for the given clients, one per client and seed."""
    return [row for sizes in content["data"].values() for row in sizes.values()]
