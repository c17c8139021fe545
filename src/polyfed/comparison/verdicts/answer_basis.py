"""Counts the test examples on which an answer rests, and, if the metric is computed within classes, those of the rarest
class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from polyfed.core.algorithm import Client
from polyfed.core.io.text.site_words import name_sites
from polyfed.core.tasks.task_lookup import get_task
from polyfed.data.partitioning.group_split import group_numbers

FEW_OF_CLASS = 5
"""Validation examples of a class below which a client's score within classes (an AUC, say) does not choose among
methods: with one negative example it would be decided by this example, and outvote all other clients in a mean."""


@final
@dataclass(frozen=True)
class AnswerBasis:
    """Holds the number of test examples on which an answer rests, and a sentence about it.

    Attributes:
        num_examples: number of test examples.
        num_rarest: how many of these are of the rarest class; None where that does not matter.
        sentence: the same for users.
    """

    num_examples: int
    num_rarest: int | None
    sentence: str


def count_client_examples(clients: Sequence[Client], class_names: Sequence[str] | None) -> dict[str, Any]:
    """Counts clients' training, validation and test examples for the entry `data`.

    Args:
        clients: of one task.
        class_names: one per class, so that a class without examples is counted too; None if they have no names.

    >>> from polyfed.testing import small_clients
    >>> count_client_examples(small_clients(1), None)["client-0"]
    {'train': 20, 'val': 3, 'test': 6, 'classes': [7, 7, 6], 'rarest': [2, 0], 'val_rarest': 1}
    """
    task = clients[0].task
    most = max(int(c.train.labels.max()) for c in clients) + 1 if task.one_class_per_example else 0
    size = max(most, len(class_names or ()))
    return {
        c.id: {
            "train": len(c.train),
            "val": 0 if c.val is None else len(c.val),
            "test": len(c.test),
            "classes": list(c.task.class_counts(c.train.labels, size) or ()) if task.counts_each_example_once else None,
            "rarest": None if (rarest := c.task.rarest_class(c.test.labels.cpu())) is None else list(rarest),
            **_count_groups(c),
            **_few_validation_examples(c),
        }
        for c in sorted(clients, key=lambda c: c.id)
    }


def _few_validation_examples(client: Client) -> dict[str, int]:
    """Returns the number of validation examples of the rarest class as the entry `val_rarest`, if they are few."""
    rarest = None if client.val is None else client.task.rarest_class(client.val.labels.cpu())
    return {} if rarest is None or rarest[0] >= FEW_OF_CLASS else {"val_rarest": rarest[0]}


def _count_groups(client: Client) -> dict[str, list[int]]:
    """Returns the numbers of groups of training and test examples, as the entry `groups`; empty without groups."""
    numbers = [numbers for part in (client.train, client.test) if (numbers := group_numbers(part)) is not None]
    return {"groups": [int(n.max()) + 1 for n in numbers]} if len(numbers) == 2 else {}


def count_test_examples_by_seed(content: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Returns `{client: test examples}` for each seed, or one for all folds together."""
    return [content["tested"]] if content.get("tested") else list(content["data"].values())


def count_examples_behind_answer(content: Mapping[str, Any], clients: Sequence[str], *, by_class: bool) -> AnswerBasis:
    """Counts test examples in the seed that has fewest, and of the rarest class if `by_class`.

    Args:
        content: `comparison.json`.
        clients: one client, or all for their mean.
        by_class: whether to count the rarest class.
    """
    sizes_by_seed = count_test_examples_by_seed(content)
    examples = min(sum(sizes[c]["test"] for c in clients if c in sizes) for sizes in sizes_by_seed)
    words = f"{examples} test example{'' if examples == 1 else 's'}"
    by_group = [[sizes[c].get("groups") for c in clients if c in sizes] for sizes in sizes_by_seed]
    if all(all(row) for row in by_group):
        groups = min(sum(row[1] for row in rows if row) for rows in by_group)
        words += f" of {groups} group{'' if groups == 1 else 's'}"
    fewest = [
        (sizes[c]["rarest"], c) for sizes in sizes_by_seed for c in clients if c in sizes and sizes[c].get("rarest")
    ]
    if not by_class or not fewest:
        return AnswerBasis(examples, None, words)
    (number, which), client = min(fewest)
    return AnswerBasis(
        examples,
        number,
        f"{words}, {_rarest_class_words(content, number, which)}{f' at {name_sites([client])}' if len(clients) > 1 else ''}",
    )


def _rarest_class_words(content: Mapping[str, Any], number: int, which: int) -> str:
    """Describes in words how many examples the rarest class has."""
    names = content["class_names"] or ()
    class_name = names[which] if which < len(names) else ""
    return get_task(content["task"]).describe_rarest(number, class_name, count_classes(content))


def count_classes(content: Mapping[str, Any]) -> int:
    """Returns the number of classes in `comparison.json`, by their names or else by clients' counts; 0 if not known."""
    rows = [row for sizes in content["data"].values() for row in sizes.values()]
    return len(content["class_names"] or ()) or max((len(row["classes"] or ()) for row in rows), default=0)
