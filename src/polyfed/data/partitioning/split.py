"""Divides rows among clients, and splits each client's rows into training, validation and test rows."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import UserError
from polyfed.core.examples.groups import group_id_of_each_row
from polyfed.core.examples.split_sizes import check_split_sizes, check_unseen_among_clients
from polyfed.core.io.values.plain_values import convert_numpy_fields_in_place
from polyfed.core.io.values.validation import check_field_types
from polyfed.core.seeds import derive_seed, numpy_generator
from polyfed.data.partitioning.allocation import Labels, Rows, check_enough_examples, draw_stratified_rows
from polyfed.data.partitioning.group_split import split_by_group_and_record_sets
from polyfed.data.partitioning.partitions import Partition
from polyfed.data.partitioning.time_split import split_by_time, split_groups_by_time, split_within_groups_by_time

SplitOrder = Literal["auto", "random", "time", "time_within_group"]


@final
@dataclass(frozen=True)
class Split:
    """Configures the number of clients and the sizes of their training, validation and test sets.

    Fractions refer to a client's own examples; what is neither validation nor test is training. Validation and test sets are
    stratified: they follow the client's own distribution of classes, each class within one example.

    Args:
        clients: number of clients; null for the number that the partition defines (natural: one per value of the column;
            listed_classes: one per list), else 10.
        examples_per_client: *training* examples of each client, exactly; validation and test examples come on top, in
            proportion. So 20 clients with 1,000 training images and `test_fraction=0.3` take 20 × 1,429 images. None uses
            all that the partition gives.
        val_fraction: share of a client's examples for validation; at least one example if positive and it has 3.
        test_fraction: share of a client's examples for testing; at least one example if positive and it has 2.
        shrink_fraction: share of the clients, drawn at random, that keep only half their training examples (FedHeNN, Fig.
            3); validation and test sets stay unchanged.
        global_test: examples of the source's common test set on which every client is evaluated too (the same for all); 0
            none, −1 all of them.
        public_fraction: share of all examples that is held out before the partition as the public pool, no client's.
        unseen: number of clients, the last ones, that take no part in the federation: they keep their examples and networks
            until `polyfed warmstart` (FLHA-GHN, section 5.4).
        split: "random"; "time" trains on a client's earlier rows and tests on its later ones, by the column `time` of
            the data (with groups: on the groups that began later); "time_within_group" so for the rows of each group;
            "auto" is "time" if the data have a time, else "random".

    Raises:
        UserError: a number outside its range, or no room left for training.

    >>> Split(clients=20, examples_per_client=1000).examples_drawn_per_client
    1429
    """

    clients: int | None = None
    examples_per_client: int | None = None
    val_fraction: float = 0.0
    test_fraction: float = 0.3
    shrink_fraction: float = 0.0
    global_test: int = 0
    public_fraction: float = 0.0
    unseen: int = 0
    split: SplitOrder = "auto"

    def __post_init__(self) -> None:
        convert_numpy_fields_in_place(self)
        check_field_types(self, "split")
        check_split_sizes(vars(self))

    def choose_split_order(self, time: str | None, group: str | None) -> SplitOrder:
        """Returns how rows are split, "random", "time" or "time_within_group".

        Args:
            time: the data's column of times; None for none.
            group: the data's column of groups; None for none.

        Raises:
            UserError: a split by time without times, or within groups without groups.

        >>> Split().choose_split_order("day", None), Split().choose_split_order(None, None)
        ('time', 'random')
        """
        if self.split == "auto":
            return "random" if time is None else "time"
        for role, name in {"time": time, "group": group if self.split == "time_within_group" else ""}.items():
            if name is None and self.split != "random":
                raise UserError(f"split={self.split} needs a column of {role}s; give {role}='COLUMN' "
                                f"(--data.{role} COLUMN), or split='random' (--data.split random)")  # fmt: skip
        return self.split

    @property
    def examples_drawn_per_client(self) -> int | None:
        """Returns how many examples of all sets are drawn for each client; None if all are used."""
        if self.examples_per_client is None:
            return None
        return self.examples_per_client + sum(_val_and_test_on_top(self, self.examples_per_client))


@final
@dataclass(frozen=True, eq=False)
class ClientRows:
    """Holds a client's id and the row numbers of its training, validation and test examples, as ascending int64 arrays
    without a common row.
    """

    train: Rows
    val: Rows
    test: Rows
    id: str = ""


class SplitRows(NamedTuple):
    """Holds the row numbers of every client, split into sets, and the row numbers of the public examples."""

    clients: list[ClientRows]
    public: Rows


def split_rows_by_client(
    labels: Labels,
    config: Split,
    partition: Partition,
    seed: int,
    columns: Mapping[str, NDArray[Any]] | None = None,
    group: str | None = None,
    time: str | None = None,
) -> SplitRows:
    """Divides rows among clients and into sets; returns all clients' row numbers and those of the public examples.

    Args:
        labels: shape (num_examples,) for classes, (num_examples, num_labels) for several labels (then nothing is
            stratified).
        config: sizes and fractions.
        partition: assigns rows to clients.
        seed: of every random choice.
        columns: further columns of the data, for `Natural`.
        group: the column whose equal values stay in one set, at all clients; shares are then of groups. None for none.
        time: the column of times, numbers; None for none.

    Raises:
        UserError: the partition is impossible, an option does not go with groups or times, a client has too few examples for
            `examples_per_client`, or all clients would be unseen clients.

    >>> from polyfed.data.partitioning.partitions import IID
    >>> clients, public = split_rows_by_client(np.repeat([0, 1], 50), Split(clients=2, public_fraction=0.2), IID(), seed=0)
    >>> [(len(c.train), len(c.test)) for c in clients], len(public)
    ([(28, 12), (28, 12)], 20)
    """
    num = len(labels)
    order = config.choose_split_order(time, group)
    if group is not None or order != "random":
        _check_whole_sets(config, "a group" if order == "random" else "a split by time")
    public = draw_stratified_rows(labels, _share_or_one(config.public_fraction, num), derive_seed(seed, "public"))
    private = np.setdiff1d(np.arange(num), public, assume_unique=True)
    private_columns = {name: column[private] for name, column in (columns or {}).items()}
    if config.clients is not None:
        check_enough_examples(len(private), config.clients)
    ids = partition.client_ids(config.clients, seed, private_columns)
    check_unseen_among_clients(config.unseen, len(ids))
    parts = [private[rows] for rows in partition(labels[private], len(ids), seed, private_columns)]
    if (
        config.examples_drawn_per_client is not None
        and (larger := _with_larger_minimum(partition, parts, config.examples_drawn_per_client)) is not None
    ):
        parts = [private[rows] for rows in larger(labels[private], len(ids), seed, private_columns)]
    if config.examples_drawn_per_client is not None:
        _check_enough_examples(parts, ids, config, config.examples_drawn_per_client)
    shrunk = numpy_generator(derive_seed(seed, "shrink")).permutation(len(ids))
    shrunk = shrunk[: round(config.shrink_fraction * len(ids))]
    groups = None if group is None else group_id_of_each_row((columns or {})[group])
    if order != "random":
        times = np.asarray((columns or {})[str(time)], dtype=np.float64)
        client_rows = _split_clients_by_time(parts, ids, times, groups, config, within_groups=order != "time")
        return SplitRows(client_rows, public)
    if groups is not None:
        set_of_group, client_rows = dict[str, str](), []
        shares = {"test": config.test_fraction, "val": config.val_fraction}
        for i, rows in enumerate(parts):
            sets = split_by_group_and_record_sets(
                labels[rows], groups[rows], shares, derive_seed(seed, "split", i), set_of_group
            )
            client_rows.append(ClientRows(rows[sets["train"]], rows[sets["val"]], rows[sets["test"]], ids[i]))
            if not len(sets["train"]):
                raise UserError(f"{ids[i]}: no group of column {group!r} is left for training, since other clients test on "
                                "all of its groups; give it groups of its own")  # fmt: skip
        return SplitRows(client_rows, public)
    client_rows = [
        replace(_split_client(labels, rows, config, derive_seed(seed, "split", i), i in shrunk), id=ids[i])
        for i, rows in enumerate(parts)
    ]
    return SplitRows(client_rows, public)


def partition_fingerprint(rows: Sequence[ClientRows]) -> str:
    """Returns a hash of all clients' row numbers, equal only for equal partitions: 16 hexadecimal digits of SHA-256.

    >>> a = ClientRows(np.array([0, 1]), np.array([], int), np.array([2]))
    >>> partition_fingerprint([a]) == partition_fingerprint([ClientRows(a.train, a.test, a.val)])
    False
    """
    digest = hashlib.sha256()
    for client in rows:
        for part in (client.train, client.val, client.test):
            digest.update(len(part).to_bytes(8, "little") + np.ascontiguousarray(part, dtype="<i8").tobytes())
    return digest.hexdigest()[:16]


def class_counts(
    labels: Labels, rows: Sequence[ClientRows], num_classes: int, part: Literal["train", "val", "test", "all"] = "train"
) -> NDArray[np.int64]:
    """Counts clients' examples by class (or positive ones by label), (num_clients, num_classes).

    >>> rows = [ClientRows(np.array([0, 1]), np.array([], int), np.array([2]))]
    >>> class_counts(np.array([1, 1, 0]), rows, 3).tolist()
    [[0, 2, 0]]
    """
    parts = ("train", "val", "test") if part == "all" else (part,)
    table = np.zeros((len(rows), num_classes), np.int64)
    for i, client in enumerate(rows):
        client_labels = labels[np.concatenate([getattr(client, name) for name in parts])]
        table[i] = (
            (client_labels > 0).sum(axis=0)
            if client_labels.ndim == 2
            else np.bincount(client_labels, minlength=num_classes)
        )
    return table


def _split_client(labels: Labels, rows: Rows, config: Split, seed: int, shrinks_training_set: bool) -> ClientRows:
    if config.examples_drawn_per_client is not None and config.examples_per_client is not None:
        rows = rows[draw_stratified_rows(labels[rows], config.examples_drawn_per_client, derive_seed(seed, "cap"))]
        num_val, num_test = _val_and_test_on_top(config, config.examples_per_client)
    else:
        num_val, num_test = _val_and_test_out_of(config, len(rows))
    rows, test = _hold_out(labels, rows, num_test, derive_seed(seed, "test"))
    rows, val = _hold_out(labels, rows, num_val, derive_seed(seed, "val"))
    if shrinks_training_set:
        rows = rows[draw_stratified_rows(labels[rows], max(1, len(rows) // 2), derive_seed(seed, "shrink"))]
    return ClientRows(rows, val, test)


def _val_and_test_on_top(config: Split, train: int) -> tuple[int, int]:
    """Returns how many validation and test examples to draw in addition to `train` training examples."""
    scale = train / (1 - config.val_fraction - config.test_fraction)
    return (
        max(round(config.val_fraction * scale), int(config.val_fraction > 0)),
        max(round(config.test_fraction * scale), int(config.test_fraction > 0)),
    )


def _val_and_test_out_of(config: Split, count: int) -> tuple[int, int]:
    """Returns how many of a client's `count` examples become validation and test examples.

    At least one example is left for training; a test example has priority over a validation example.
    """
    test = min(max(round(config.test_fraction * count), int(config.test_fraction > 0)), count - 1)
    val = min(max(round(config.val_fraction * count), int(config.val_fraction > 0)), count - 1 - test)
    return val, test


def _hold_out(labels: Labels, rows: Rows, size: int, seed: int) -> tuple[Rows, Rows]:
    out = draw_stratified_rows(labels[rows], size, seed, leave_one_per_class=True)
    return np.delete(rows, out), rows[out]


def _split_clients_by_time(
    parts: Sequence[Rows],
    ids: Sequence[str],
    times: NDArray[np.float64],
    groups: NDArray[Any] | None,
    config: Split,
    *,
    within_groups: bool,
) -> list[ClientRows]:
    shares = {"test": config.test_fraction, "val": config.val_fraction}
    set_of_group: dict[str, str] = {}
    client_rows = []
    for name, rows in zip(ids, parts, strict=True):
        if groups is None:
            sets = split_by_time(times[rows], shares)
        elif within_groups:
            sets = split_within_groups_by_time(times[rows], groups[rows], shares)
        else:
            sets = split_groups_by_time(times[rows], groups[rows], shares, set_of_group)
        if absent := [part for part in ("train", *shares) if shares.get(part, 1) > 0 and not len(sets[part])]:
            raise UserError(
                f"{name}: its {len(rows)} rows have too few different times to train on earlier ones and test on later ones "
                f"(its {absent[0]} set is empty); give split='random' (--data.split random), or "
                "leave it out"
            )
        client_rows.append(ClientRows(rows[sets["train"]], rows[sets["val"]], rows[sets["test"]], name))
    return client_rows


def _check_whole_sets(config: Split, reason: str) -> None:
    options = {name: getattr(config, name) for name in ("examples_per_client", "shrink_fraction", "public_fraction")}
    if conflicting := [f"{name}={value}" for name, value in options.items() if value]:
        raise UserError(
            f"{conflicting[0]} draws single examples, which {reason} does not allow; leave it or the "
            f"{reason.split()[-1]} out"
        )


def _with_larger_minimum(partition: Partition, parts: Sequence[Rows], needed: int) -> Partition | None:
    """Returns the partition with at least `needed` examples per client; None if that changes nothing or is impossible.

    A draw that happens to leave one client short must not refuse the run of that seed.
    """
    has_minimum = any(field.name == "min_examples" for field in dataclasses.fields(partition))
    sizes = [len(part) for part in parts]
    if not has_minimum or min(sizes) >= needed or sum(sizes) < needed * len(sizes):
        return None
    return replace(partition, min_examples=needed)  # type: ignore[call-arg]  # only some partitions have this field


def _check_enough_examples(parts: Sequence[Rows], ids: Sequence[str], config: Split, needed: int) -> None:
    sizes = [len(part) for part in parts]
    poorest = int(np.argmin(sizes))
    if sizes[poorest] < needed:
        possible = int(sizes[poorest] * (1 - config.val_fraction - config.test_fraction))
        raise UserError(
            f"examples_per_client={config.examples_per_client} takes {needed} examples with validation and test, but "
            f"the partition gives {ids[poorest]} only {sizes[poorest]}; choose at most {max(possible, 1)}, fewer "
            "clients, a smaller test_fraction or a partition with equal sizes"
        )


def _share_or_one(fraction: float, num: int) -> int:
    return max(1, round(fraction * num)) if fraction > 0 else 0
