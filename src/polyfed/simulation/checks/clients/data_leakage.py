"""Warns of data leakage: test examples that are also training examples, so that their scores say nothing about new data.

Two examples are equal if their stored inputs and targets are equal byte for byte. Examples that repeat by nature (few
categories, constants) are not leakage: the warning depends on how many more test examples occur among training examples than
training examples repeat among themselves.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, final
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.algorithm import Client
from polyfed.core.errors import warn_of_data
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.groups import group_id_of_each_row, is_alone
from polyfed.core.examples.pytree import named_leaves
from polyfed.core.state_dict import view_as_bytes

_SHARE = 0.05  # of a client's test examples, from which on it warns
_LEAST = 2  # fewest different leaked examples
# Added to `_SHARE`: so many times the share of training inputs that repeat in their set. Test inputs occur by chance that
# often among the client's own training inputs, and more often among those of the many others.
_OWN, _OTHERS = 2, 10
_MOST = 2_000_000  # examples above which clients are not compared with each other
_NAMED = 3  # clients in a sentence
_PRIME = 1_000_003  # factor for combining hashes
_BLOCK = 2**26  # bytes that are copied at once

_SEEN: WeakValueDictionary[tuple[int, int], Client] = WeakValueDictionary()
_TEXTS: dict[int, list[str]] = {}  # the warnings of those that had any
_WARNED: ContextVar[list[str] | None] = ContextVar("_WARNED", default=None)  # warnings within `limit_leak_warnings`

Hashes = NDArray[np.int64]
_GROUPS = {
    "group": "test examples of groups that are also trained on",
    "other group": "test examples of groups that other clients train on",
}
_GROUP_ADVICE = {
    "group": "split by group (Examples with group=..., --data.group, and resplit), or give a time if later "
    "examples are predicted",
    "other group": "keep a group in one set at all clients, as --data.group of a table, resplit and folds do; if an id "
    "means somebody else at each client, begin it with the client's name",
}
_KINDS = {
    "test": "test examples that are also training examples of the same client",
    "val": "validation examples that are also training examples of the same client",
    "other": "test examples equal to training examples of another client",
}


@final
@dataclass(frozen=True)
class _Leak:
    """Describes the leaked examples of a client: `num_leaked` of its `number` examples are also training examples.

    Attributes:
        client: id of the client.
        kind: "test" or "val", examples among the client's own training examples; "other", test examples among those of
            other clients; "group", test examples of groups that the client trains on; "other group", that others do.
        num_leaked: how many are training examples.
        number: how many there are.
    """

    client: str
    kind: str
    num_leaked: int
    number: int

    def __str__(self) -> str:
        return f"{self.num_leaked} of {self.number} of {self.client!r}"


def warn_of_test_leakage(clients: Sequence[Client]) -> None:
    """Warns once if several test or validation examples of a client are training examples of any.

    It warns if at least two different test or validation examples of a client, and 5 % of them, are among its own
    training examples, or as many test examples among those of other clients. Clients are compared with each other if
    they have at most 2 million examples in all. Clients that were checked together before are not checked again, and a
    comparison of them repeats the warning. See also `limit_leak_warnings`.

    >>> import torch, warnings
    >>> x, y = torch.randn(40, 2), torch.arange(40) % 2
    >>> with warnings.catch_warnings(record=True) as issued:
    ...     warnings.simplefilter("always")
    ...     warn_of_test_leakage([Client("north", None, (x, y), (x[:10], y[:10]))])
    >>> str(issued[0].message).partition(";")[0]
    "test examples that are also training examples of the same client: 10 of 10 of 'north'"
    """
    warned = _WARNED.get()
    if warned:
        return
    group_key = hash(tuple(sorted(map(id, clients))))
    if all(_SEEN.get((group_key, id(client))) is client for client in clients):
        if warned is not None:  # the results of a comparison do not depend on what ran before it
            _warn_or_collect(_TEXTS.get(group_key, []), warned)
        return
    _SEEN.update({(group_key, id(client)): client for client in clients})
    groups = list(_split_into_groups(clients))
    all_leaks = [leak for group in groups for leak in _find_leaks(group, between_clients=len(groups) == 1)]
    sentences = {
        kind: f"{description}: {_format_leaks(leaks)}"
        for kind, description in _KINDS.items()
        if (leaks := [leak for leak in all_leaks if leak.kind == kind])
    }
    texts = []
    if sentences:
        advice = "scores of examples that were trained on say nothing about new data: give others"
        may_look_alike = "if they are the same examples, " * (sentences.keys() == {"other"})
        texts.append(f"{'; '.join(sentences.values())}; {may_look_alike}{advice}")
    group_leaks = list(_find_shared_groups(clients))
    for kind, description in _GROUPS.items():
        if leaks := [leak for leak in group_leaks if leak.kind == kind]:
            texts.append(
                f"{description}: {_format_leaks(leaks)}; scores of them say little about new groups: {_GROUP_ADVICE[kind]}"
            )
    if texts:
        _TEXTS[group_key] = texts
    _warn_or_collect(texts, warned)


def _warn_or_collect(texts: Sequence[str], warned: list[str] | None) -> None:
    for text in texts:
        if warned is not None:
            warned.append(text)
        warn_of_data(text)


@contextmanager
def limit_leak_warnings() -> Iterator[None]:
    """Limits warnings of leakage to one inside a `with` block, for a comparison's many splits of one data set.

    >>> import torch, warnings
    >>> x, y = torch.randn(40, 2), torch.arange(40) % 2
    >>> with warnings.catch_warnings(record=True) as issued, limit_leak_warnings():
    ...     warnings.simplefilter("always")
    ...     for _ in range(3):
    ...         warn_of_test_leakage([Client("north", None, (x, y), (x[:10], y[:10]))])
    >>> len(issued)
    1
    """
    before = _WARNED.set([])
    try:
        yield
    finally:
        _WARNED.reset(before)


def _split_into_groups(clients: Sequence[Client]) -> Iterator[list[Client]]:
    """Splits the clients into groups of few enough examples to compare each client with each."""
    group: list[Client] = []
    num_examples = 0
    for client in clients:
        size = len(client.train) + len(client.test)
        if group and num_examples + size > _MOST:
            yield group
            group, num_examples = [], 0
        group.append(client)
        num_examples += size
    yield group


def _find_leaks(clients: Sequence[Client], between_clients: bool) -> Iterator[_Leak]:
    """Finds the leaked examples within each client and, if `between_clients`, also those that clients share."""
    number = len(clients)
    train, owner = _concat_hashes(dict(enumerate(client.train for client in clients)))
    train_keys = _keys_by_client(train, owner)
    order = np.argsort(train_keys)
    repeated = np.bincount(owner[_count_occurrences(train_keys[order], train_keys) > 1], minlength=number)
    pooled = float(repeated.sum() / len(train))
    natural = np.maximum(repeated / np.bincount(owner, minlength=number), pooled)
    for kind in ("test", "val"):
        sets = {k: data for k, client in enumerate(clients) if (data := getattr(client, kind)) is not None}
        if not sets:
            continue
        hashes, whose = _concat_hashes(sets)
        keys = _keys_by_client(hashes, whose)
        own_matches = _count_occurrences(train_keys[order], keys)
        own_counts = _suspicious_counts(own_matches > 0, keys, whose, _SHARE + _OWN * natural)
        for k in sets.keys() - own_counts.keys():
            same = _same_rows(sets[k], clients[k].train)
            if same.any() and _suspicious_counts(
                same, hashes[whose == k], np.zeros(len(same), np.int64), np.array([_SHARE])
            ):
                own_counts[k] = int(same.sum())
        yield from (_Leak(clients[k].id, kind, count, len(sets[k])) for k, count in own_counts.items())
        if kind == "test" and between_clients and number > 1:
            alike = _count_occurrences(np.sort(train), hashes) > own_matches
            other_counts = _suspicious_counts(alike, keys, whose, np.full(number, _SHARE + _OTHERS * pooled))
            for k in (k for k in other_counts if k not in own_counts):
                yield _Leak(clients[k].id, "other", other_counts[k], len(sets[k]))


def _find_shared_groups(clients: Sequence[Client]) -> Iterator[_Leak]:
    """Finds the test examples of groups that the same client, or else another one, trains on; such as patients.

    Examples with a time are left out: they may be split within groups, into earlier and later ones.
    """
    trained_groups = [_group_ids(client.train) for client in clients]
    num_training_clients = Counter(name for names in trained_groups for name in set(names))
    for client, names in zip(clients, trained_groups, strict=True):
        tested = _group_ids(client.test)
        own_groups = set(names)
        num_own = sum(name in own_groups for name in tested)
        num_other = sum(num_training_clients[name] > (name in own_groups) for name in tested)
        if num_own or num_other:
            yield _Leak(client.id, "group" if num_own else "other group", num_own or num_other, len(client.test))


def _group_ids(examples: Examples) -> list[str]:
    """Returns the group of each example that has one; none of examples with a time."""
    if examples.group is None or examples.time is not None:
        return []
    return [name for name in group_id_of_each_row(examples.column(examples.group)).tolist() if not is_alone(name)]


def _suspicious_counts(
    alike: NDArray[np.bool_], keys: Hashes, whose: NDArray[np.int64], least: NDArray[np.float64]
) -> dict[int, int]:
    """Returns client position -> number of leaked examples, for the clients with enough leaked examples for a warning.

    Args:
        alike: for each example, whether it is a training example.
        keys: equal for equal examples of one client.
        whose: position of each example's client.
        least: the share from which on a client counts, by client.
    """
    number = len(least)
    leaked = np.bincount(whose[alike], minlength=number)
    _, first = np.unique(keys[alike], return_index=True)
    distinct = np.bincount(whose[alike][first], minlength=number)
    enough = leaked >= least * np.bincount(whose, minlength=number)
    return {int(k): int(leaked[k]) for k in np.flatnonzero((distinct >= _LEAST) & enough)}


def _concat_hashes(sets: Mapping[int, Examples]) -> tuple[Hashes, NDArray[np.int64]]:
    """Concatenates the hashes of several clients' examples; also returns each example's client position."""
    whose = np.repeat(np.fromiter(sets, np.int64), [len(data) for data in sets.values()])
    return np.concatenate([_hash_examples(data) for data in sets.values()]), whose


def _keys_by_client(hashes: Hashes, whose: NDArray[np.int64]) -> Hashes:
    """Combines hash and client position into one number, equal only for equal examples of one client."""
    return hashes * 0x9E3779B97F4A7C1 + whose * 0x2545F4914F6CDD1D


def _count_occurrences(ranked: Hashes, values: Hashes) -> NDArray[np.int64]:
    """Counts how often each of `values` occurs in the sorted array `ranked`."""
    counts: NDArray[np.int64] = np.searchsorted(ranked, values, side="right") - np.searchsorted(ranked, values)
    return counts


def _same_rows(data: Examples, train: Examples) -> NDArray[np.bool_]:
    """Returns for each example whether it is the same stored row as a training example, not just equal."""
    if _storage_keys(data.x) != _storage_keys(train.x):
        return np.zeros(len(data), bool)
    rows, used = (np.arange(len(d)) if d.index is None else d.index.cpu().numpy() for d in (data, train))
    return np.isin(rows, used)


def _storage_keys(x: Any) -> list[Any]:
    return [(name, part.data_ptr(), part.shape, part.stride(), part.dtype) for name, part in named_leaves(x)]


def _hash_examples(examples: Examples) -> Hashes:
    """Hashes each example's stored input and target by content, type and shape."""
    hashes = _hash_part(examples, examples.y)
    for _, part in named_leaves(examples.x):  # the order of the parts matters
        hashes = hashes * _PRIME + _hash_part(examples, part)
    return hashes


def _hash_part(examples: Examples, part: Tensor) -> Hashes:
    x, index = part.detach(), examples.index
    if not x.numel():
        return np.zeros(len(examples), np.int64)
    size = x[:1].numel() * x.element_size()
    kind = hash((str(x.dtype), tuple(x.shape[1:])))
    if x.device.type == "cpu" and x.is_contiguous():  # read in place, without a copy of the rows
        rows: Sequence[int] = range(len(x)) if index is None else index.tolist()
        return _hash_rows(x, rows, size, kind)
    step = max(1, _BLOCK // size)
    blocks = [slice(start, start + step) for start in range(0, len(examples), step)]
    parts = ((x[block] if index is None else x[index[block]]).cpu().contiguous() for block in blocks)
    return np.concatenate([_hash_rows(part, range(len(part)), size, kind) for part in parts])


def _hash_rows(x: Tensor, rows: Sequence[int], size: int, kind: int) -> Hashes:
    content: Any = view_as_bytes(x).numpy()
    content = memoryview(content)
    return np.array([hash(content[i * size : (i + 1) * size].tobytes()) ^ kind for i in rows], np.int64)


def _format_leaks(leaks: Sequence[_Leak]) -> str:
    worst_leaks = sorted(leaks, key=lambda leak: (-leak.num_leaked / leak.number, leak.client))[:_NAMED]
    more = f" and of {len(leaks) - _NAMED} more" if len(leaks) > _NAMED else ""
    return f"{', '.join(map(str, worst_leaks))}{more}"
