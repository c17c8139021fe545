"""Listed classes: each client has exactly its classes, all in the same number."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.cli.commands.options import configuration_parser
from polyfed.core.errors import UserError
from polyfed.data import PARTITIONS, ListedClasses
from polyfed.simulation.experiment import build_experiment


@st.composite
def lists_and_labels(draw):
    num_classes = draw(st.integers(1, 8))
    one = st.lists(st.integers(0, num_classes - 1), min_size=1, unique=True).map(tuple)
    lists = tuple(draw(st.lists(one, min_size=1, max_size=8)))
    sizes = draw(st.lists(st.integers(8, 60), min_size=num_classes, max_size=num_classes))
    labels = np.repeat(np.arange(num_classes), sizes)
    return lists, np.random.default_rng(draw(st.integers(0, 99))).permutation(labels), draw(st.integers(0, 10**9))


@settings(deadline=None, max_examples=60)
@given(lists_and_labels())
def test_each_client_has_its_classes_in_equal_numbers_as_many_as_there_are(case):
    lists, labels, seed = case
    parts = ListedClasses(lists)(labels, len(lists), seed)
    everything = np.concatenate(parts)
    assert len(np.unique(everything)) == len(everything)
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    table = np.stack([np.bincount(labels[part], minlength=8) for part in parts])
    assert [tuple(np.flatnonzero(row)) for row in table] == [tuple(sorted(own)) for own in lists]
    (count,) = np.unique(table[table > 0])
    users = (table > 0).sum(axis=0)
    sizes = np.bincount(labels, minlength=8)
    assert count == min(sizes[c] // users[c] for c in np.flatnonzero(users))
    again = ListedClasses(lists)(labels, len(lists), seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_which_examples_depends_on_the_seed():
    labels = np.repeat([0, 1], 100)
    one, two = (ListedClasses(((0,), (0, 1)))(labels, 2, seed)[0] for seed in (0, 1))
    assert not np.array_equal(one, two)


def test_classes_are_the_numbers_of_the_labels_even_if_some_do_not_occur():
    labels = np.repeat([2, 5, 9], 10)
    parts = ListedClasses(((9, 2), (5,)))(labels, 2, seed=0)
    assert [sorted(set(labels[part].tolist())) for part in parts] == [[2, 9], [5]]


def test_impossible_lists_are_said():
    labels = np.repeat([0, 1, 3], [9, 9, 1])
    for lists, clients, sentence in (
        (((0,), (1,)), 3, r"lists classes for 2 clients, but there are 3; give --data\.partition\.classes one list"),
        ((), 3, "lists classes for 0 clients, but there are 3"),
        (((0,), (2,)), 2, "gives client 1 class 2, of which there are no examples; the classes run from 0 to 3"),
        (((3,), (0, 3)), 2, "gives class 3 with 1 examples to 2 clients; list it for fewer of them"),
    ):
        with pytest.raises(UserError, match=sentence):
            ListedClasses(lists)(labels, clients, 0)
    with pytest.raises(UserError, match="listed_classes divides examples by their class"):
        ListedClasses(((0,),))(np.zeros((4, 2)), 1, 0)


@pytest.mark.parametrize(
    ("classes", "sentence"),
    [
        (3, "must be one list of classes a client, got 3"),
        ((0, 1), "classes of client 0 must be a list of at least one whole number from 0, got 0"),
        (((0,), ()), r"classes of client 1 must be .*, got \(\)"),
        (((0,), (1, -1)), "classes of client 1 must be"),
        (((True,),), "classes of client 0 must be"),
        (((1.0,),), "classes of client 0 must be"),
        (((0, 1, 0),), r"classes of client 0 names one twice, \[0, 1, 0\]"),
    ],
)
def test_lists_are_checked(classes, sentence):
    with pytest.raises(UserError, match=sentence):
        ListedClasses(classes)


def test_it_is_registered_and_takes_lists_from_files_and_options():
    assert PARTITIONS["listed_classes"] is ListedClasses
    assert ListedClasses([[0, 1], [2]]) == ListedClasses(((0, 1), (2,)))
    lists = [[0, 1], [2]]
    data = {"data": {"clients": 2, "partition": {"name": "listed_classes", "classes": lists}}}
    words = ["--data.partition", "listed_classes", "--data.partition.classes", "[[0, 1], [2]]", "--data.clients=2"]
    for given_words, config in (([], data), (words, {})):
        parsed = configuration_parser.parse_configuration(given_words, config, "polyfed run")
        assert build_experiment(parsed).partition == ListedClasses(((0, 1), (2,)))
    with pytest.raises(
        UserError, match=r"--data\.partition\.classes must be a list such as \[\[0, 1\], \[2, 3\]\], got"
    ):
        configuration_parser.parse_configuration(
            ["--data.partition", "listed_classes", "--data.partition.classes", "[0, 1]"], {}, "polyfed run"
        )
