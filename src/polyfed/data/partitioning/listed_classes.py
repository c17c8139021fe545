"""Defines a partition for which the user lists the classes of each client."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import UserError
from polyfed.core.io.values.number_checks import is_whole_number
from polyfed.core.seeds import derive_seed, numpy_generator
from polyfed.data.partitioning.allocation import (
    Labels,
    Rows,
    check_enough_examples,
    class_sizes_and_indices,
    draw_rows_by_class,
)
from polyfed.data.partitioning.partitions import Partition


@final
@dataclass(frozen=True)
class ListedClasses(Partition):
    """Gives each client the classes that the user lists for it, with the same number of examples of each class.

    For experiments in which it matters who resembles whom. All clients have equally many examples of each of their classes:
    as many as the class that is scarcest, relative to its number of clients, can give. Which examples these are is drawn at
    random. Source: pFedLA's Figs. 5 and 6, where clients share all or three of their four classes.

    Args:
        classes: numbers of the classes of each client, one list per client.

    Raises:
        UserError: a list that is empty, or names a class twice or by something else than a number from 0.

    >>> labels = np.repeat(np.arange(3), 10)
    >>> [sorted(set(labels[r].tolist())) for r in ListedClasses(((0, 1), (1, 2), (1,)))(labels, 3, seed=0)]
    [[0, 1], [1, 2], [1]]
    """

    classes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.classes, list | tuple):
            raise UserError(f"ListedClasses: classes must be one list of classes a client, got {self.classes!r}")
        for client, client_classes in enumerate(self.classes):
            if (
                not isinstance(client_classes, list | tuple)
                or not client_classes
                or not all(is_whole_number(c, 0) for c in client_classes)
            ):
                raise UserError(
                    f"ListedClasses: classes of client {client} must be a list of at least one whole number from 0, got "
                    f"{client_classes!r}"
                )
            if len(set(client_classes)) < len(client_classes):
                raise UserError(
                    f"ListedClasses: classes of client {client} names one twice, {list(client_classes)}; name it once"
                )
        # A file gives lists, which cannot be hashed.
        object.__setattr__(self, "classes", tuple(tuple(client_classes) for client_classes in self.classes))

    def client_ids(
        self, num_clients: int | None, seed: int, columns: Mapping[str, NDArray[Any]] | None = None
    ) -> tuple[str, ...]:
        """Returns the clients' ids, "client-000" and so on: one per list of classes, unless `num_clients` is given."""
        return super().client_ids(len(self.classes) if num_clients is None else num_clients, seed, columns)

    def __call__(
        self, labels: Labels, num_clients: int, seed: int, columns: Mapping[str, NDArray[Any]] | None = None
    ) -> list[Rows]:
        """Returns one array of row numbers per client, with the classes that the user listed for that client."""
        check_enough_examples(len(labels), num_clients)
        sizes, class_of = class_sizes_and_indices(labels, "listed_classes")
        if len(self.classes) != num_clients:
            raise UserError(
                f"listed_classes lists classes for {len(self.classes)} clients, but there are {num_clients}; give "
                f"--data.partition.classes one list a client, e.g. [[0, 1], [2, 3]], and --data.clients their number"
            )
        position = {int(label): i for i, label in enumerate(np.unique(labels))}
        has = np.zeros((num_clients, len(sizes)), np.int64)
        for client, client_classes in enumerate(self.classes):
            if missing := [label for label in client_classes if label not in position]:
                raise UserError(
                    f"listed_classes gives client {client} class {missing[0]}, of which there are no examples; the classes "
                    f"run from {min(position)} to {max(position)}"
                )
            has[client, [position[label] for label in client_classes]] = 1
        users = has.sum(axis=0)
        scarcest = int(np.argmin(np.where(users > 0, sizes / np.maximum(users, 1), np.inf)))
        if sizes[scarcest] < users[scarcest]:
            raise UserError(
                f"listed_classes gives class {list(position)[scarcest]} with {sizes[scarcest]} examples to "
                f"{users[scarcest]} clients; list it for fewer of them"
            )
        return draw_rows_by_class(
            class_of,
            has * (sizes[scarcest] // users[scarcest]),
            numpy_generator(derive_seed(seed, "partition", "listed")),
        )
