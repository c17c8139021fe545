"""Every partition: disjoint, complete where it promises so, never an empty client, always an end."""

import time
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from polyfed.core.errors import UserError
from polyfed.data import PARTITIONS
from polyfed.data.partitioning.partitions import (
    IID,
    ClassesPerClient,
    Dirichlet,
    DominantClasses,
    Natural,
    Partition,
    QuantitySkew,
    Shards,
)

quick = settings(deadline=None, max_examples=60)


@st.composite
def labels_and_clients(draw):
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=8))
    labels = np.repeat(np.arange(len(sizes)) * draw(st.integers(1, 3)), sizes)
    labels = np.random.default_rng(draw(st.integers(0, 99))).permutation(labels)
    return labels, draw(st.integers(1, 12)), draw(st.integers(0, 10**9))


partitions = st.one_of(
    st.just(IID()),
    st.builds(Dirichlet, alpha=st.floats(1e-3, 1e3), min_examples=st.integers(1, 5)),
    st.builds(ClassesPerClient, k=st.integers(1, 5), equal=st.booleans(), balanced=st.booleans()),
    st.builds(DominantClasses, k=st.integers(1, 4), share=st.floats(0.3, 0.95)),
    st.builds(Shards, k=st.integers(1, 5)),
    st.builds(QuantitySkew, alpha=st.floats(1e-3, 1e3), min_examples=st.integers(1, 5)),
    st.builds(Natural, column=st.just("user"), order=st.sampled_from(["all", "largest", "first", "random"])),
)


@quick
@given(labels_and_clients(), partitions)
def test_rows_are_disjoint_no_client_is_empty_and_impossible_is_said(case, partition: Partition):
    labels, num_clients, seed = case
    columns = {"user": np.arange(len(labels)) % 7}
    before = labels.copy()
    try:
        parts = partition(labels, num_clients, seed, columns)
    except UserError:  # impossible; the messages have tests of their own
        event("impossible")
        return
    assert len(parts) == num_clients
    assert all(len(part) > 0 and part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    everything = np.concatenate(parts)
    assert len(np.unique(everything)) == len(everything)
    assert everything.min() >= 0
    assert everything.max() < len(labels)
    assert (labels == before).all()
    again = partition(labels, num_clients, seed, columns)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@quick
@given(labels_and_clients())
def test_iid_uses_all_examples_in_equal_sizes(case):
    labels, num_clients, seed = case
    num_clients = min(num_clients, len(labels))
    sizes = [len(part) for part in IID()(labels, num_clients, seed)]
    assert sum(sizes) == len(labels)
    assert max(sizes) - min(sizes) <= 1


@quick
@given(labels_and_clients(), st.floats(1e-3, 1e4), st.integers(1, 5))
def test_dirichlet_and_quantity_use_all_examples_and_keep_the_minimum(case, alpha, least):
    labels, num_clients, seed = case
    num_clients = max(1, min(num_clients, len(labels) // least))
    for partition in (Dirichlet(alpha, least), QuantitySkew(alpha, least)):
        if len(labels) < num_clients * least:
            with pytest.raises(UserError, match="need"):
                partition(labels, num_clients, seed)
            continue
        sizes = [len(part) for part in partition(labels, num_clients, seed)]
        assert sum(sizes) == len(labels)
        assert min(sizes) >= least


@quick
@given(st.integers(1, 10), st.integers(2, 10), st.integers(1, 40), st.data())
def test_classes_per_client_are_exactly_k_evenly_used_with_equal_counts(num_clients, num_classes, per_class, data):
    k = data.draw(st.integers(1, num_classes))
    labels = np.repeat(np.arange(num_classes), per_class * num_clients)
    for equal in (True, False):
        parts = ClassesPerClient(k, equal)(labels, num_clients, data.draw(st.integers(0, 1000)))
        table = np.stack([np.bincount(labels[part], minlength=num_classes) for part in parts])
        assert ((table > 0).sum(axis=1) == k).all()
        users = (table > 0).sum(axis=0)
        assert users.max() - users.min() <= 1
        if equal:
            assert len(np.unique(table[table > 0])) == 1
        else:
            assert table.sum() == per_class * num_clients * (users > 0).sum()
            for c in np.flatnonzero(users):
                shares = table[table[:, c] > 0, c]
                assert shares.max() - shares.min() <= 1


def test_classes_at_random_are_a_uniform_draw_for_each_client():
    """Without `balanced`: k classes each, every pair of classes as likely as any other, and not evenly used."""
    labels = np.repeat(np.arange(5), 400)
    tables = []
    for seed in range(60):
        for equal in (True, False):
            parts = ClassesPerClient(2, equal, balanced=False)(labels, 20, seed)
            table = np.stack([np.bincount(labels[part], minlength=5) for part in parts])
            assert ((table > 0).sum(axis=1) == 2).all()
            if equal:
                assert len(np.unique(table[table > 0])) == 1
        tables.append(table > 0)
    pairs = np.stack(tables).reshape(-1, 5)
    together = pairs.T.astype(int) @ pairs
    shares = together[np.triu_indices(5, 1)] / len(pairs)  # each of the 10 pairs: 1/10, standard deviation 0.009
    assert abs(shares - 0.1).max() < 4.5 * 0.009
    users = np.stack(tables).sum(axis=1)
    assert (users.max(axis=1) - users.min(axis=1) > 1).mean() > 0.9
    assert users.std() == pytest.approx((20 * 0.4 * 0.6) ** 0.5, rel=0.15)  # binomial


@quick
@given(st.integers(1, 12), st.integers(3, 10), st.data())
def test_dominant_classes_have_the_share_and_all_classes_occur(num_clients, num_classes, data):
    k = data.draw(st.integers(1, num_classes - 1))
    share = data.draw(st.floats(k / num_classes + 0.02, 0.97))
    labels = np.repeat(np.arange(num_classes), 400 * num_clients)
    parts = DominantClasses(k, share)(labels, num_clients, data.draw(st.integers(0, 1000)))
    table = np.stack([np.bincount(labels[part], minlength=num_classes) for part in parts])
    assert (table > 0).all()
    assert len(set(table.sum(axis=1))) == 1
    top = np.sort(table, axis=1)[:, ::-1]
    size = table.sum(axis=1)
    # Each class was rounded down by less than one example.
    assert (abs(top[:, :k].sum(axis=1) - share * size) <= num_classes).all()
    dominates = (table == top[:, :1]).sum(axis=0)
    assert dominates.max() - dominates.min() <= 1


@quick
@given(labels_and_clients(), st.integers(1, 4))
def test_shards_use_all_examples_and_few_classes(case, k):
    labels, num_clients, seed = case
    num_clients = max(1, min(num_clients, len(labels) // k))
    if len(labels) < num_clients * k:
        with pytest.raises(UserError, match="one example per shard"):
            Shards(k)(labels, num_clients, seed)
        return
    parts = Shards(k)(labels, num_clients, seed)
    sizes = [len(part) for part in parts]
    assert sum(sizes) == len(labels)
    assert max(sizes) - min(sizes) <= k


def test_shards_aligned_with_classes_give_at_most_k_classes():
    labels = np.repeat(np.arange(10), 100)
    parts = Shards(2)(labels, 10, seed=3)
    assert all(len(part) == 100 and len(np.unique(labels[part])) <= 2 for part in parts)


def test_dirichlet_is_nearly_iid_for_large_alpha_and_skewed_for_small():
    labels = np.repeat(np.arange(10), 1000)

    def largest_share(alpha: float) -> float:
        parts = Dirichlet(alpha)(labels, 10, seed=0)
        return float(np.mean([np.bincount(labels[part], minlength=10).max() / len(part) for part in parts]))

    shares = [largest_share(alpha) for alpha in (1e4, 1.0, 0.1, 0.01)]
    assert shares == sorted(shares)
    assert shares[0] < 0.12
    assert shares[3] > 0.75


def test_dirichlet_minimum_comes_from_a_client_s_own_favourite_classes():
    labels = np.repeat(np.arange(10), 1000)
    parts = Dirichlet(0.05, min_examples=20)(labels, 100, seed=0)
    small = [part for part in parts if len(part) == 20]
    assert len(small) > 10
    assert np.mean([np.bincount(labels[part]).max() / 20 for part in small]) > 0.8


def test_quantity_is_skewed_in_size_but_not_in_labels():
    labels = np.repeat(np.arange(4), 5000)
    sizes = {alpha: [len(part) for part in QuantitySkew(alpha)(labels, 10, seed=1)] for alpha in (100.0, 0.2)}
    assert max(sizes[100.0]) / min(sizes[100.0]) < 2 < max(sizes[0.2]) / min(sizes[0.2])
    biggest = max(QuantitySkew(0.2)(labels, 10, seed=1), key=len)
    shares = np.bincount(labels[biggest]) / len(biggest)
    assert abs(shares - 0.25).max() < 0.05


def test_natural_takes_the_largest_the_first_or_random_users():
    users = np.array(["c", "a", "a", "b", "b", "b", "c"])
    labels = np.zeros(7, int)
    pick = {
        order: [part.tolist() for part in Natural("user", order)(labels, 2, 0, {"user": users})]
        for order in ("largest", "first", "random")
    }
    assert pick["largest"] == [[3, 4, 5], [0, 6]]
    assert pick["first"] == [[0, 6], [1, 2]]
    assert all(len(set(users[rows])) == 1 for rows in pick["random"])


def test_seed_changes_the_draw():
    labels = np.repeat(np.arange(5), 100)
    for partition in (IID(), Dirichlet(), ClassesPerClient(), DominantClasses(), Shards(), QuantitySkew()):
        first, second = partition(labels, 4, 0), partition(labels, 4, 1)
        assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True)), partition


@pytest.mark.parametrize(
    "partition",
    [
        IID(),
        Dirichlet(0.05),
        Dirichlet(0.001, min_examples=100),
        Dirichlet(100.0),
        ClassesPerClient(2),
        ClassesPerClient(4, equal=False),
        DominantClasses(),
        Shards(),
        QuantitySkew(0.05),
        Natural("user", "largest"),
    ],
    ids=repr,
)
@pytest.mark.one_case
def test_sixty_thousand_labels_and_five_hundred_clients_take_under_two_seconds(partition: Partition):
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(10), 6000))
    columns = {"user": rng.integers(0, 3000, 60_000).astype(str)}
    start = time.perf_counter()
    parts = partition(labels, 500, 0, columns)
    assert time.perf_counter() - start < 2
    assert min(len(part) for part in parts) >= 1


@pytest.mark.parametrize(
    ("partition", "labels", "clients", "message"),
    [
        (IID(), np.zeros(3, int), 4, "4 clients cannot share 3 examples; use at most 3"),
        (IID(), np.zeros(3, int), 0, "at least 1, got 0"),
        (Dirichlet(min_examples=10), np.zeros(30, int), 4, "need 40, but there are 30; use at most 3 clients"),
        (QuantitySkew(min_examples=10), np.zeros(30, int), 4, "need 40, but there are 30"),
        (ClassesPerClient(k=3), np.arange(2).repeat(9), 2, "k=3 classes per client is too many: choose at most 2"),
        (ClassesPerClient(k=2), np.array([0] * 9 + [1]), 5, "a class with 1 examples would serve 5 of the 5 clients"),
        (DominantClasses(k=2), np.arange(2).repeat(9), 2, "choose at most 1"),
        (
            DominantClasses(k=2, share=0.4),
            np.arange(4).repeat(9),
            2,
            "does not make them dominant; choose more than 0.5",
        ),
        (DominantClasses(k=1, share=0.9), np.arange(5).repeat(5), 5, "too few for one of every class"),
        (Shards(k=4), np.arange(2).repeat(5), 3, "one example per shard"),
        (Natural("user"), np.zeros(3, int), 1, "the data has no columns"),
    ],
)
def test_impossible_partitions_say_what_to_do(partition, labels, clients, message):
    with pytest.raises(UserError, match=message):
        partition(labels, clients, 0)


def test_natural_names_the_columns_and_the_number_of_users():
    columns = {"user": np.array([1, 1, 2]), "date": np.array([1, 2, 3])}
    with pytest.raises(UserError, match=r"no column 'users'; did you mean user\? Choices: date, user"):
        Natural("users")(np.zeros(3, int), 1, 0, columns)
    with pytest.raises(UserError, match="2 values, fewer than 3 clients; leave the number of clients out"):
        Natural("user")(np.zeros(3, int), 3, 0, columns)


def test_several_labels_per_example_work_where_classes_do_not_matter():
    labels = np.zeros((40, 14), np.float32)
    columns = {"user": np.arange(40) % 4}
    for name, kind in PARTITIONS.items():
        if name in ("iid", "quantity_skew", "natural"):
            assert len(kind()(labels, 4, 0, columns)) == 4
        else:
            with pytest.raises(UserError, match=rf"{name} .*shape \(40, 14\).*use iid, quantity_skew or natural"):
                kind()(labels, 3, 0, columns)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dirichlet(alpha=0), "alpha must be a positive number, got 0"),
        (lambda: Dirichlet(alpha=float("inf")), "alpha"),
        (lambda: Dirichlet(min_examples=0), "min_examples must be a whole number of at least 1"),
        (lambda: ClassesPerClient(k=0), "k must be"),
        (lambda: ClassesPerClient(k=1.5), "whole number"),
        (lambda: DominantClasses(share=1.0), r"between 0 and 1 \(exclusive\), got 1.0"),
        (lambda: Shards(k=-1), "got -1"),
        (lambda: QuantitySkew(alpha=float("nan")), "alpha"),
        (lambda: Natural(order="smallest"), "Natural: unknown order 'smallest'; choices: all"),
    ],
)
def test_fields_are_checked(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_partitions_are_frozen():
    with pytest.raises(FrozenInstanceError):
        Dirichlet().alpha = 1.0
