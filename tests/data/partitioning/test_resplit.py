"""Repeated splits by client: sizes and shares stay, nothing is lost or shared, and nobody's draw depends on another's."""

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.core.errors import UserError
from polyfed.data import Examples, Normalise
from polyfed.data.partitioning.resplit import resplit_clients

STORE = torch.arange(300.0).view(100, 3), torch.arange(100) % 4


def flip(x, generator):
    return x


def views(augment=None):
    """Two clients whose sets are views of one store: rows 0 to 49, and 50 to 99."""
    examples = Examples(*STORE)
    parts = [torch.arange(start, start + 50).split([30, 8, 12]) for start in (0, 50)]
    return [
        pf.Client(
            name, None, train=Examples(*STORE, index=train, augment=augment),
            val=examples.select(val), test=examples.select(test), global_test=examples.select(torch.tensor([3, 4])),
        )
        for name, (train, val, test) in zip(("north", "south"), parts, strict=True)
    ]  # fmt: skip


def copies():
    """The same with tensors of their own for each set."""
    return [
        pf.Client(c.id, None, *((s.x[s.index].clone(), s.labels.clone()) for s in (c.train, c.test, c.val)))
        for c in views()
    ]


def inputs(examples):
    return examples.batch(torch.arange(len(examples)))[0]


def everything(client):
    return torch.cat([inputs(part) for part in (client.train, client.val, client.test)])


@pytest.mark.parametrize("make", [views, copies])
def test_each_client_keeps_its_examples_and_sizes(make):
    before = make()
    for divided in resplit_clients(before, splits=4):
        assert [c.id for c in divided] == ["north", "south"]
        for old, new in zip(before, divided, strict=True):
            assert [len(p) for p in (new.train, new.val, new.test)] == [30, 8, 12]
            assert torch.equal(everything(new)[:, 0].sort().values, everything(old)[:, 0].sort().values)
            assert torch.equal(new.test.labels, (inputs(new.test)[:, 0] / 3).long() % 4)  # labels go with inputs


def test_classes_keep_their_shares():
    """12 of 50 test examples, of which each of four classes has 12 or 13: three of each."""
    for divided in resplit_clients(views(), splits=5):
        for client in divided:
            assert client.test.labels.bincount(minlength=4).tolist() == [3, 3, 3, 3]
            assert client.val.labels.bincount(minlength=4).tolist() == [2, 2, 2, 2]


def test_a_class_of_two_is_trained_on_too():
    x, y = torch.randn(20, 2), torch.tensor([1, 1] + [0] * 18)
    client = pf.Client("north", None, (x[:10], y[:10]), (x[10:], y[10:]))
    for (divided,) in resplit_clients([client], splits=10):
        assert divided.train.labels.sum() == 1


def test_views_stay_views():
    before = views()
    for divided in resplit_clients(before, splits=2):
        for old, new in zip(before, divided, strict=True):
            assert new.train.x is old.train.x
            assert new.test.x is old.train.x
    one, other = resplit_clients(copies(), splits=2)
    assert one[0].train.x is other[0].test.x  # put together once


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_targets_that_a_client_makes_floats_do_not_copy_the_inputs(task):
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    y = y if task == "regression" else torch.stack([y, 1 - y], 1)
    parts = [Examples(x, y, index=rows) for rows in torch.arange(20).split([12, 8])]
    client = pf.Client("north", None, *parts, task=task)
    for (divided,) in resplit_clients([client], splits=2):
        assert divided.train.x is x
        assert torch.equal(divided.train.labels.reshape(12, -1)[:, 0].long(), y.reshape(20, -1)[divided.train.index, 0])


def test_splits_differ_and_the_same_seed_gives_the_same():
    def rows(found):
        return [tuple(c.test.index.tolist()) for divided in found for c in divided]

    first = rows(resplit_clients(views(), splits=3))
    assert len(set(first)) == 6
    assert rows(resplit_clients(views(), splits=3)) == first
    assert set(rows(resplit_clients(views(), splits=3, seed=1))).isdisjoint(first)
    assert rows(resplit_clients(views(), splits=5))[:6] == first
    assert rows(resplit_clients(views()[::-1], splits=3)) == [first[k] for k in (1, 0, 3, 2, 5, 4)]


def test_training_examples_alone_are_augmented():
    for divided in resplit_clients(views(augment=flip), splits=2):
        for client in divided:
            assert client.train.augment is flip
            assert client.test.augment is client.val.augment is None


def test_what_else_a_client_has_stays():
    before = pf.Client("north", lambda: torch.nn.Linear(3, 1), (STORE[0][:9], STORE[0][:9, 0]),
                       (STORE[0][9:12], STORE[0][9:12, 0]), task="regression")  # fmt: skip
    for (divided,) in resplit_clients([before], splits=2):
        assert divided.model is before.model
        assert divided.task == "regression"
        assert divided.val is None
    kept = views()[0]
    assert resplit_clients([kept], splits=2)[0][0].global_test is kept.global_test


def images(transform=None, size=8):
    return Examples(
        torch.zeros(6, 1, size, size, dtype=torch.uint8), torch.zeros(6, dtype=torch.int64), transform=transform
    )


@pytest.mark.parametrize(
    ("train", "test", "sentence"),
    [
        (images(Normalise((0.0,), (1.0,))), images(Normalise((0.5,), (1.0,))), "'north': train and test .* transforms"),
        (images(), images(size=9), r"inputs are torch.uint8 of shape \(1, 8, 8\) and torch.uint8 of shape \(1, 9, 9\)"),
        (Examples(*STORE), Examples(STORE[0].double(), STORE[1]), "torch.float64"),
    ],
)
def test_sets_of_another_form_are_refused(train, test, sentence):
    with pytest.raises(UserError, match=sentence):
        resplit_clients([pf.Client("north", None, train, test)], splits=2)


@pytest.mark.parametrize("splits", [1, 0, -3, 2.0, True, "5"])
def test_fewer_than_two_splits_are_refused(splits):
    with pytest.raises(UserError, match=f"at least 2, got {splits!r}"):
        resplit_clients(views(), splits)


def test_an_example_in_two_sets_is_refused():
    x, y = STORE
    common = x[80:], y[80:]
    shared = [pf.Client(n, None, (x[k:80:2], y[k:80:2]), common) for k, n in enumerate(("north", "south"))]
    with pytest.raises(UserError, match="test of client 'north' and test of client 'south' hold the same example"):
        resplit_clients(shared, splits=2)
    with pytest.raises(UserError, match="train of client 'north' and test of client 'north'"):
        resplit_clients([pf.Client("north", None, STORE, STORE)], splits=2)
    index = torch.tensor([0, 1, 2]), torch.tensor([2, 3])
    with pytest.raises(UserError, match="hold the same example"):
        resplit_clients([pf.Client("north", None, *(Examples(*STORE, index=rows) for rows in index))], splits=2)


def test_columns_stay_with_their_examples():
    """Sets of stores of their own: what is known of an example goes where the example goes."""

    def part(start, number):
        numbers = np.arange(start, start + number)
        x = torch.from_numpy(numbers).float()[:, None] * torch.ones(3)
        return Examples(x, torch.from_numpy(numbers % 2), columns={"number": numbers})

    client = pf.Client("north", None, part(0, 20), part(100, 10), part(200, 6))
    for (again,) in resplit_clients([client], splits=3):
        for examples in (again.train, again.val, again.test):
            rows = torch.arange(len(examples))
            assert examples.batch(rows)[0][:, 0].tolist() == examples.column("number").tolist()


def test_no_patient_is_lost_where_one_client_alone_has_validation_examples():
    """A patient of both could be drawn for the validation set of one, which the other does not have."""

    def examples(ids):
        return Examples(torch.randn(len(ids), 3), torch.arange(len(ids)) % 2, group=list(ids))

    north = pf.Client("north", None, examples("aabbccddkkllmm"), examples("eeffnn"), examples("gghhoo"))
    south = pf.Client("south", None, examples("aabbccddeeff"), examples("gghh"))
    for split_north, split_south in resplit_clients([north, south], 12):
        assert len(split_south.train) + len(split_south.test) == 16
        trained, validated = (
            {name for part in parts for name in part.column("group").tolist()}
            for parts in ((split_north.train, split_south.train), (split_north.val,))
        )
        assert not trained & validated
