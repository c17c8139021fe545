"""Divides the examples of a data set among clients; labels, number of clients and seed determine the result.

Every partition gives each example to at most one client, leaves no client empty, always terminates, and explains in one
sentence when it is impossible. They are polyfed's own because the public ones drop classes or reject draws in loops.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.text.number_format import join_first_and_count_rest
from polyfed.core.io.values.validation import check_field_types
from polyfed.core.seeds import derive_seed, numpy_generator
from polyfed.data.partitioning.allocation import (  # fmt: skip
    Labels,
    Rows,
    assign_classes_evenly,
    check_classes_per_client,
    check_enough_examples,
    check_positive_integer,
    check_positive_number,
    class_sizes_and_indices,
    draw_classes_per_client,
    draw_rows_by_class,
    rows_of_each_client,
    top_up_small_clients_in_place,
    unique_values_as_texts,
)

_CLIENTS = 10  # default number of clients


@dataclass(frozen=True)
class Partition(ABC):
    """Defines how the rows of a data set are divided among clients."""

    @abstractmethod
    def __call__(
        self, labels: Labels, num_clients: int, seed: int, columns: Mapping[str, NDArray[Any]] | None = None
    ) -> list[Rows]:
        """Returns one array of row numbers per client.

        Args:
            labels: classes, shape (num_examples,), integers; or several labels per example, shape (num_examples,
                num_labels), which only `IID`, `QuantitySkew` and `Natural` can divide.
            num_clients: number of clients; at least 1.
            seed: of every random choice.
            columns: further columns of the data (users, hospitals), each of shape (num_examples,).

        Returns:
            `num_clients` disjoint arrays of rows, int64, ascending, none of them empty.

        Raises:
            UserError: the partition is impossible with these labels and this number of clients.
        """

    def client_ids(
        self, num_clients: int | None, seed: int, columns: Mapping[str, NDArray[Any]] | None = None
    ) -> tuple[str, ...]:
        """Returns the clients' ids in order: "client-000" and so on, unless the data contain names of clients.

        Args:
            num_clients: number of clients; None for the number that data or partition define, or else 10.
            seed, columns: as for the partition itself.

        >>> IID().client_ids(2, seed=0)
        ('client-000', 'client-001')
        """
        return tuple(f"client-{i:03d}" for i in range(_CLIENTS if num_clients is None else num_clients))


@final
@dataclass(frozen=True)
class IID(Partition):
    """Shuffles the examples and divides them evenly among the clients.

    Client sizes differ by at most one. Works for any labels.

    >>> [len(rows) for rows in IID()(np.zeros(7, int), 3, seed=0)]
    [3, 2, 2]
    """

    def __call__(
        self, labels: Labels, num_clients: int, seed: int, columns: Mapping[str, NDArray[Any]] | None = None
    ) -> list[Rows]:
        """Returns one array of row numbers per client, of sizes that differ by at most one."""
        check_enough_examples(len(labels), num_clients)
        owner = np.empty(len(labels), np.int64)
        owner[_partition_rng(seed, "iid").permutation(len(labels))] = np.arange(len(labels)) % num_clients
        return rows_of_each_client(owner, num_clients)


@final
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Divides each class among the clients by proportions drawn from Dir(alpha), so that clients differ in their class
    frequencies; uses all examples.

    Clients with fewer than `min_examples` are then topped up, first with the class of which they drew the largest share,
    from the clients that have most of it. So there is no rejection loop, however small `alpha` is.

    Source: Yurochkin et al. 2019, Hsu et al. 2019; as in FLHA-GHN, appendix G (alpha 100, 1, 0.1).

    Args:
        alpha: concentration; 100 is nearly IID, 0.1 leaves most clients one or two classes.
        min_examples: least number of examples per client.

    >>> labels = np.repeat([0, 1], 50)
    >>> sum(len(rows) for rows in Dirichlet(alpha=0.1)(labels, 4, seed=0))
    100
    """

    alpha: float = 0.5
    min_examples: int = 10

    def __post_init__(self) -> None:
        check_positive_number("Dirichlet", "alpha", self.alpha)
        check_positive_integer("Dirichlet", "min_examples", self.min_examples)

    def __call__(
        self, labels: Labels, num_clients: int, seed: int, columns: Mapping[str, NDArray[Any]] | None = None
    ) -> list[Rows]:
        """Returns one array of row numbers per client."""
        check_enough_examples(len(labels), num_clients, self.min_examples)
        sizes, class_of = class_sizes_and_indices(labels, "dirichlet")
        rng = _partition_rng(seed, "dirichlet")
        shares = rng.dirichlet(np.full(num_clients, self.alpha), size=len(sizes)).T
        ends = np.minimum(np.floor(shares.cumsum(axis=0) * sizes), sizes).astype(np.int64)
        ends[-1] = sizes
        counts = np.diff(ends, axis=0, prepend=0)
        top_up_small_clients_in_place(counts, shares, self.min_examples)
        return draw_rows_by_class(class_of, counts, rng)


@final
@dataclass(frozen=True)
class ClassesPerClient(Partition):
    """Gives every client exactly `k` classes; with `balanced`, the number of clients that have a class is the same for
    all classes, or differs by one.

    Source: pFedLA's non-IID.1 (k = 4; 12 for CIFAR-100; at random), FedHeNN's 2, 5 or 20 classes per client.

    Args:
        k: classes per client.
        equal: the same number of examples for each class of each client (as pFedLA; leaves some examples unused). False
            divides each class evenly among the clients that have it, and uses every class that a client has.
        balanced: false draws each client's classes at random, independently of other clients (pFedLA, section 4.1).

    >>> labels = np.repeat(np.arange(4), 10)
    >>> [len(set(labels[rows].tolist())) for rows in ClassesPerClient(k=2)(labels, 2, seed=0)]
    [2, 2]
    """

    k: int = 2
    equal: bool = True
    balanced: bool = True

    def __post_init__(self) -> None:
        check_positive_integer("ClassesPerClient", "k", self.k)

    def __call__(
        self, labels: Labels, num_clients: int, seed: int, columns: Mapping[str, NDArray[Any]] | None = None
    ) -> list[Rows]:
        """Returns one array of row numbers per client."""
        check_enough_examples(len(labels), num_clients)
        sizes, class_of = class_sizes_and_indices(labels, "classes_per_client")
        check_classes_per_client(self.k, len(sizes))
        rng = _partition_rng(seed, "classes_per_client")
        has = (assign_classes_evenly if self.balanced else draw_classes_per_client)(
            num_clients, len(sizes), self.k, rng
        )
        users = has.sum(axis=0)
        scarcest = int(np.argmin(np.where(users > 0, sizes / np.maximum(users, 1), np.inf)))
        if sizes[scarcest] < users[scarcest]:
            raise UserError(
                f"classes_per_client(k={self.k}): a class with {sizes[scarcest]} examples would serve {users[scarcest]} of "
                f"the {num_clients} clients; use fewer clients or a smaller k"
            )
        if self.equal:
            return draw_rows_by_class(class_of, has * (sizes[scarcest] // users[scarcest]), rng)
        position, shared = np.where(has, has.cumsum(axis=0) - 1, 0), np.maximum(users, 1)
        return draw_rows_by_class(class_of, has * (sizes // shared + (position < sizes % shared)), rng)


@final
@dataclass(frozen=True)
class DominantClasses(Partition):
    """Gives every client examples of all classes, of which `k` dominant classes make up the fraction `share`; all
    clients have equal size.

    Every class dominates for equally many clients, within one. Rounding to whole examples is downwards per class, so that
    `share` is met up to one example per class.

    Source: pFedLA's non-IID.2 (k = 2; 6 for CIFAR-100). The paper does not state the share; 0.8 is polyfed's choice. Its
    accuracy of training alone fits about 0.4 (see the recipe `pfedla_table2`).

    Args:
        k: classes that dominate at each client.
        share: part of a client's examples that these classes have together.

    >>> labels = np.repeat(np.arange(4), 100)
    >>> [sorted(np.bincount(labels[rows]).tolist()) for rows in DominantClasses(k=2, share=0.8)(labels, 2, seed=0)]
    [[20, 20, 80, 80], [20, 20, 80, 80]]
    """

    k: int = 2
    share: float = 0.8

    def __post_init__(self) -> None:
        check_positive_integer("DominantClasses", "k", self.k)
        if not 0 < self.share < 1:
            raise UserError(f"DominantClasses: share must be between 0 and 1 (exclusive), got {self.share!r}")

    def __call__(
        self, labels: Labels, num_clients: int, seed: int, columns: Mapping[str, NDArray[Any]] | None = None
    ) -> list[Rows]:
        """Returns one array of row numbers per client."""
        check_enough_examples(len(labels), num_clients)
        sizes, class_of = class_sizes_and_indices(labels, "dominant_classes")
        classes = len(sizes)
        check_classes_per_client(self.k, classes - 1, "one class at least must not dominate")
        if self.share <= self.k / classes:
            raise UserError(
                f"dominant_classes: share={self.share} of {self.k} out of {classes} classes does not make them dominant; "
                f"choose more than {self.k / classes:.3g}"
            )
        rng = _partition_rng(seed, "dominant_classes")
        has = assign_classes_evenly(num_clients, classes, self.k, rng)
        major, minor = self.share / self.k, (1 - self.share) / (classes - self.k)
        users = has.sum(axis=0)
        size = float((sizes / (users * major + (num_clients - users) * minor)).min())
        # The tolerance undoes the division's rounding where the result is a whole number.
        most, few = int(size * major + 1e-9), int(size * minor + 1e-9)
        if few < 1:
            raise UserError(
                f"dominant_classes(k={self.k}, share={self.share}): {num_clients} clients can have {size:.4g} examples "
                f"each, too few for one of every class; use fewer clients or a smaller share"
            )
        return draw_rows_by_class(class_of, np.where(has, most, few), rng)


@final
@dataclass(frozen=True)
class Shards(Partition):
    """Sorts examples by class, cuts the sequence into equal pieces (shards), and gives each client `k` of them, so that
    most clients have about `k` classes.

    Shards differ in size by at most one example, and all examples are used. Source: McMahan et al. 2017.

    Args:
        k: shards per client.

    >>> [len(rows) for rows in Shards(k=2)(np.repeat(np.arange(5), 8), 4, seed=0)]
    [10, 10, 10, 10]
    """

    k: int = 2

    def __post_init__(self) -> None:
        check_positive_integer("Shards", "k", self.k)

    def __call__(
        self, labels: Labels, num_clients: int, seed: int, columns: Mapping[str, NDArray[Any]] | None = None
    ) -> list[Rows]:
        """Returns one array of row numbers per client."""
        num = len(labels)
        check_enough_examples(num, num_clients, self.k, "one example per shard")
        _, class_of = class_sizes_and_indices(labels, "shards")
        rng = _partition_rng(seed, "shards")
        order = rng.permutation(num)
        order = order[np.argsort(class_of[order], kind="stable")]
        shards = num_clients * self.k
        owner = np.empty(num, np.int64)
        owner[order] = rng.permutation(np.repeat(np.arange(num_clients), self.k))[np.arange(num) * shards // num]
        return rows_of_each_client(owner, num_clients)


@final
@dataclass(frozen=True)
class QuantitySkew(Partition):
    """Divides the examples at random into clients of different sizes, by proportions drawn from Dir(alpha); works with
    any labels.

    Source: Li et al. 2022 (NIID-Bench), quantity skew.

    Args:
        alpha: concentration; the smaller, the more unequal.
        min_examples: least number of examples per client; the draw divides the rest.

    >>> sum(len(rows) for rows in QuantitySkew(alpha=0.5, min_examples=2)(np.zeros(100, int), 4, seed=0))
    100
    """

    alpha: float = 0.5
    min_examples: int = 10

    def __post_init__(self) -> None:
        check_positive_number("QuantitySkew", "alpha", self.alpha)
        check_positive_integer("QuantitySkew", "min_examples", self.min_examples)

    def __call__(
        self, labels: Labels, num_clients: int, seed: int, columns: Mapping[str, NDArray[Any]] | None = None
    ) -> list[Rows]:
        """Returns one array of row numbers per client."""
        num = len(labels)
        check_enough_examples(num, num_clients, self.min_examples)
        rng = _partition_rng(seed, "quantity")
        free = num - num_clients * self.min_examples
        ends = np.minimum(np.floor(rng.dirichlet(np.full(num_clients, self.alpha)).cumsum() * free), free)
        ends[-1] = free
        owner = np.empty(num, np.int64)
        sizes = self.min_examples + np.diff(ends.astype(np.int64), prepend=0)
        owner[rng.permutation(num)] = np.repeat(np.arange(num_clients), sizes)
        return rows_of_each_client(owner, num_clients)


@final
@dataclass(frozen=True)
class Natural(Partition):
    """Makes one client of each value in `column` (a Twitter user, a patient, a hospital), with the value as the
    client's id.

    Works for any labels. All values become clients, in ascending order; networks and shifts given as a list are assigned in
    that order. A number of clients that is smaller than that of the values is refused, unless `order` selects the values;
    then the examples of the others are not used.

    Args:
        column: the column of the source.
        order: "all" values; or, in this order, as many as there are to be clients: those with most examples ("largest"),
            those that come first in the data ("first"), or a draw ("random").

    >>> sites = {"site": np.array(["south", "north", "north", "west", "north"])}
    >>> Natural("site").client_ids(None, 0, sites), Natural("site")(np.zeros(5, int), 3, 0, sites)
    (('north', 'south', 'west'), [array([1, 2, 4]), array([0]), array([3])])
    >>> Natural("site", order="first").client_ids(2, 0, sites)
    ('south', 'north')
    """

    column: str = "user"
    order: Literal["all", "largest", "first", "random"] = "all"

    def __post_init__(self) -> None:
        check_field_types(self, "order")

    def __call__(
        self, labels: Labels, num_clients: int, seed: int, columns: Mapping[str, NDArray[Any]] | None = None
    ) -> list[Rows]:
        """Returns one array of row numbers per client."""
        check_enough_examples(len(labels), num_clients)
        texts, which, value_of_client = self._choose_values(num_clients, seed, columns)
        client_of = np.full(len(texts), -1)
        client_of[value_of_client] = np.arange(num_clients)
        return rows_of_each_client(client_of[which], num_clients)

    def client_ids(
        self, num_clients: int | None, seed: int, columns: Mapping[str, NDArray[Any]] | None = None
    ) -> tuple[str, ...]:
        """Returns the clients' ids: those values of `column` that become clients, as text."""
        texts, _, value_of_client = self._choose_values(num_clients, seed, columns)
        return tuple(texts[i] for i in value_of_client)

    def _choose_values(
        self, num_clients: int | None, seed: int, columns: Mapping[str, NDArray[Any]] | None
    ) -> tuple[tuple[str, ...], NDArray[np.int64], NDArray[np.int64]]:
        """Returns the column's unique values, each row's index, and the indices that become clients."""
        if not columns:
            raise UserError(
                f"natural: the data has no columns, and so no column {self.column!r}; use another partition"
            )
        if self.column not in columns:
            raise UserError(f"natural: the data has no column {self.column!r}; {did_you_mean(self.column, columns)}")
        texts, first_rows, value_indices, sizes = unique_values_as_texts(columns[self.column], self.column)
        rank = {"all": np.arange(len(texts)), "largest": -sizes, "first": first_rows}
        sort_key = rank[self.order] if self.order in rank else _partition_rng(seed, "by_column").permutation(len(texts))
        number = len(texts) if num_clients is None else num_clients
        if number > len(texts):
            raise UserError(
                f"natural: column {self.column!r} has {len(texts)} values, fewer than {number} clients; leave the number "
                "of clients out (--data.clients null) for one a value"
            )
        if self.order == "all" and number < len(texts):
            left_out = [repr(texts[i]) for i in np.lexsort((first_rows, -sizes))[number:]]
            raise UserError(
                f"natural: column {self.column!r} has {len(texts)} values, so that {number} clients would leave out "
                f"{join_first_and_count_rest(left_out, 5)}; leave the number of clients out (--data.clients null) to have "
                "all, or choose with --data.partition.order largest, first or random"
            )
        return texts, value_indices, np.lexsort((first_rows, sort_key))[:number]


def _partition_rng(seed: int, purpose: str) -> np.random.Generator:
    return numpy_generator(derive_seed(seed, "partition", purpose))
