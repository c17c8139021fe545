"""Splits: sizes as asked for, one distribution per client, nothing used twice."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.core.errors import UserError
from polyfed.data.partitioning.allocation import draw_stratified_rows
from polyfed.data.partitioning.partitions import IID, ClassesPerClient, Dirichlet, Natural, QuantitySkew
from polyfed.data.partitioning.split import ClientRows, Split, class_counts, partition_fingerprint, split_rows_by_client

quick = settings(deadline=None, max_examples=60)
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 300))


def parts_of(client: ClientRows):
    return client.train, client.val, client.test


@quick
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.floats(0, 1), st.booleans(), st.integers(0, 99))
def test_stratified_draws_each_class_within_one_example_of_its_share(counts, fraction, keep, seed):
    labels = np.repeat(np.arange(len(counts)), counts)
    size = round(fraction * len(labels))
    rows = draw_stratified_rows(labels, size, seed, keep)
    assert len(np.unique(rows)) == len(rows) == size
    drawn = np.bincount(labels[rows], minlength=len(counts))
    assert (abs(drawn - np.array(counts) * size / len(labels)) < 1).all()


def test_stratified_keeps_the_last_example_of_a_class_where_it_can():
    labels = np.array([0] * 9 + [1])
    assert all(1 not in labels[draw_stratified_rows(labels, 5, seed, leave_one_per_class=True)] for seed in range(20))


@quick
@given(
    st.integers(1, 20),
    st.floats(0, 0.45),
    st.floats(0, 0.45),
    st.floats(0, 1),
    st.floats(0, 0.3),
    st.integers(0, 10**6),
)
def test_rows_are_used_once_and_test_follows_train(clients, val, test, shrink, public, seed):
    config = Split(clients, None, val, test, shrink, public_fraction=public)
    rows, pool = split_rows_by_client(LABELS, config, Dirichlet(0.3), seed)
    used = np.concatenate([part for client in rows for part in parts_of(client)] + [pool])
    assert len(np.unique(used)) == len(used) <= len(LABELS)
    assert len(rows) == clients
    assert len(pool) == (max(1, round(public * len(LABELS))) if public else 0)
    for client in rows:
        assert len(client.train) >= 1
        total = sum(map(len, parts_of(client)))
        assert (len(client.test) >= 1) == (test > 0)
        if shrink == 0 and val == 0:
            assert abs(len(client.test) - test * total) <= 1
            counts = np.bincount(LABELS[np.concatenate(parts_of(client))], minlength=10)
            tested = np.bincount(LABELS[client.test], minlength=10)
            assert (abs(tested - counts * len(client.test) / total) < 1).all()
    again, _ = split_rows_by_client(LABELS, config, Dirichlet(0.3), seed)
    assert partition_fingerprint(rows) == partition_fingerprint(again)


def test_twenty_clients_with_exactly_a_thousand_training_images():
    labels = np.repeat(np.arange(10), 6000)
    for partition in (IID(), ClassesPerClient(2)):
        rows, _ = split_rows_by_client(labels, Split(20, 1000, val_fraction=0.1, test_fraction=0.3), partition, 0)
        assert [(len(c.train), len(c.val), len(c.test)) for c in rows] == [(1000, 167, 500)] * 20
    table = class_counts(labels, rows, 10)
    assert ((table > 0).sum(axis=1) == 2).all()
    assert set(table[table > 0]) == {500}


def test_too_many_examples_per_client_names_the_largest_possible_number():
    with pytest.raises(UserError, match="takes 429 examples with validation and test, but the partition gives client"):
        split_rows_by_client(LABELS, Split(10, 300), IID(), 0)
    with pytest.raises(UserError, match="only 300; choose at most 210"):
        split_rows_by_client(LABELS, Split(10, 300), IID(), 0)
    rows, _ = split_rows_by_client(LABELS, Split(10, 210), IID(), 0)
    assert [len(client.train) for client in rows] == [210] * 10


def test_shrinking_halves_the_training_data_of_a_share_of_the_clients():
    plain, _ = split_rows_by_client(LABELS, Split(10), IID(), 0)
    shrunk, _ = split_rows_by_client(LABELS, Split(10, shrink_fraction=0.4), IID(), 0)
    ratio = [len(b.train) / len(a.train) for a, b in zip(plain, shrunk, strict=True)]
    assert sorted(ratio) == [0.5] * 4 + [1.0] * 6
    for a, b in zip(plain, shrunk, strict=True):
        assert np.isin(b.train, a.train).all()
        assert np.array_equal(a.test, b.test)
    counts = class_counts(LABELS, shrunk, 10)[np.array(ratio) == 0.5]
    assert (abs(counts - class_counts(LABELS, plain, 10)[np.array(ratio) == 0.5] / 2) <= 1).all()


def test_newcomers_own_what_they_would_own_as_clients():
    plain, _ = split_rows_by_client(LABELS, Split(4), Dirichlet(0.3), 0)
    with_newcomers, _ = split_rows_by_client(LABELS, Split(4, unseen=3), Dirichlet(0.3), 0)
    assert partition_fingerprint(plain) == partition_fingerprint(with_newcomers)


def test_tiny_clients_keep_training_then_test_then_validation():
    for size, expected in ((1, (1, 0, 0)), (2, (1, 0, 1)), (3, (1, 1, 1))):
        rows, _ = split_rows_by_client(np.zeros(size, int), Split(1, val_fraction=0.1, test_fraction=0.1), IID(), 0)
        assert tuple(map(len, parts_of(rows[0]))) == expected


def test_public_rows_are_stratified_and_columns_follow_the_private_rows():
    users = np.arange(len(LABELS)) % 5
    rows, public = split_rows_by_client(LABELS, Split(5, public_fraction=0.1), Natural("user"), 0, {"user": users})
    assert np.bincount(LABELS[public]).tolist() == [30] * 10
    assert all(len(set(users[np.concatenate(parts_of(client))])) == 1 for client in rows)


def test_several_labels_per_example_are_split_without_strata():
    labels = (np.random.default_rng(0).random((100, 3)) < 0.3).astype(np.float32)
    rows, _ = split_rows_by_client(labels, Split(4), IID(), 0)
    assert [(len(c.train), len(c.test)) for c in rows] == [(17, 8)] * 4
    assert class_counts(labels, rows, 3, "all").sum(axis=0).tolist() == labels.sum(axis=0).tolist()


def test_fingerprint_tells_seeds_apart_and_is_stable():
    one, two = (split_rows_by_client(LABELS, Split(4), IID(), seed)[0] for seed in (0, 1))
    assert partition_fingerprint(one) != partition_fingerprint(two)
    content = struct.pack("<QqqQQq", 2, 0, 1, 0, 1, 2)  # length and rows of train, val and test
    client = ClientRows(np.arange(2), np.arange(0), np.arange(2, 3))
    assert partition_fingerprint([client]) == hashlib.sha256(content).hexdigest()[:16]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clients": 0}, "clients must be at least 1, got 0"),
        ({"examples_per_client": 0}, "examples_per_client must be at least 1"),
        ({"test_fraction": 1.0}, "test_fraction must be at least 0 and below 1, got 1.0"),
        ({"test_fraction": 0.6, "val_fraction": 0.4}, "leave nothing to train on"),
        ({"shrink_fraction": 1.5}, "between 0 and 1, got 1.5"),
        ({"global_test": -2}, "got -2"),
        ({"public_fraction": -0.1}, "public_fraction"),
        ({"unseen": -1}, "unseen must be at least 0, got -1"),
        (
            {"clients": 3, "unseen": 3},
            r"fewer than the 3 clients, of which they are the last, got 3; add the unseen clients",
        ),
    ],
)
def test_fields_are_checked(fields, message):
    with pytest.raises(UserError, match=message):
        Split(**fields)


def test_drawing_more_than_there_is_is_refused():
    with pytest.raises(UserError, match="cannot draw 4 of 3 examples"):
        draw_stratified_rows(np.zeros(3, int), 4, 0)


@pytest.mark.parametrize("partition", [Dirichlet(0.3), QuantitySkew(5.0)])
def test_a_draw_that_leaves_a_client_short_is_topped_up_and_any_other_is_left_as_it_was(partition):
    config, plain = Split(10, 80), Split(10)
    short = enough = 0
    for seed in range(12):
        sizes = [len(rows) for rows in partition(LABELS, 10, seed)]
        rows, _ = split_rows_by_client(LABELS, config, partition, seed)
        assert [len(client.train) for client in rows] == [80] * 10
        if min(sizes) < config.examples_drawn_per_client:
            short += 1
        else:
            enough += 1
            whole, _ = split_rows_by_client(LABELS, plain, partition, seed)
            owned = [np.concatenate(parts_of(client)) for client in whole]
            assert all(np.isin(np.concatenate(parts_of(a)), b).all() for a, b in zip(rows, owned, strict=True))
    assert short > 2
    assert enough > 2
    with pytest.raises(UserError, match="the partition gives"):  # 10 clients with 301 of 3,000
        split_rows_by_client(LABELS, Split(10, 211), partition, 0)


def test_sizes_may_be_numbers_of_numpy():
    config = Split(np.int64(4), np.int32(10), test_fraction=np.float64(0.25))
    assert config == Split(4, 10, test_fraction=0.25)
    assert {type(config.clients), type(config.examples_per_client), type(config.test_fraction)} == {int, float}
