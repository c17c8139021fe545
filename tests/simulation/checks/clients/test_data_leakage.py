"""Test examples that were trained on are told of, and what only looks like them is not."""

import re
import warnings

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.examples.examples import Examples
from polyfed.core.seeds import torch_generator
from polyfed.data import IID, SOURCES, Split, make_clients
from polyfed.simulation.checks.clients import data_leakage
from polyfed.simulation.checks.clients.data_leakage import warn_of_test_leakage


def rows(number, seed=0, width=4):
    return torch.randn(number, width, generator=torch_generator(seed))


def client(name, train, test, val=None):
    sets = [None if x is None else (x, torch.arange(len(x)) % 2) for x in (train, test, val)]
    return pf.Client(name, lambda: nn.Linear(4, 2), *sets)


def told(*clients):
    """The warning as text; empty without one."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_test_leakage(clients)
    assert len(found) <= 1
    assert all(warning.category is UserWarning for warning in found)
    return str(found[0].message) if found else ""


OWN = "test examples that are also training examples of the same client: "
OTHERS = "test examples equal to training examples of another client: "
ADVICE = "; scores of examples that were trained on say nothing about new data: give others"
IF_SAME = ADVICE.replace("; ", "; if they are the same examples, ")


def test_the_same_object():
    x = rows(40)
    assert told(client("north", x, x)) == f"{OWN}40 of 40 of 'north'{ADVICE}"


def test_copies_in_another_order():
    x = rows(40)
    assert told(client("north", x, x[:9].flip(0).clone())).startswith(f"{OWN}9 of 9 of 'north';")


@pytest.mark.parametrize(("found", "of", "is_told"), [(2, 40, True), (2, 41, False), (1, 4, False), (3, 41, True)])
def test_from_two_examples_and_one_in_twenty_on(found, of, is_told):
    x = rows(60)
    text = told(client("north", x, torch.cat([x[:found], rows(of - found, seed=1)])))
    assert text == (f"{OWN}{found} of {of} of 'north'{ADVICE}" if is_told else "")


def test_validation_examples():
    x = rows(40)
    expected = "validation examples that are also training examples of the same client: 5 of 5 of 'north';"
    assert told(client("north", x, rows(10, seed=1), x[:5])).startswith(expected)


def test_views_of_one_store():
    store = Examples(rows(60), torch.arange(60) % 2)
    parts = [store.select(torch.arange(start, end)) for start, end in ((0, 40), (40, 60), (30, 50))]
    assert told(pf.Client("a", None, parts[0], parts[1])) == ""
    assert told(pf.Client("a", None, parts[0], parts[2])).startswith(f"{OWN}10 of 20 of 'a';")


def test_another_clients_training_examples():
    x, y = rows(40), rows(40, seed=1)
    found = told(client("north", x, rows(10, seed=2)), client("south", y, torch.cat([x[:6], rows(4, seed=3)])))
    assert found == f"{OTHERS}6 of 10 of 'south'{IF_SAME}"


def test_a_test_set_that_all_share_is_no_leak():
    common = rows(20, seed=9)
    assert told(*(client(f"c{k}", rows(30, seed=k), common) for k in range(3))) == ""


def test_many_clients_are_counted_and_the_worst_are_named():
    clients = [client(f"c{k}", x := rows(20, seed=k), x[: k + 2]) for k in range(5)]
    clients += [client("half", x := rows(20, seed=7), torch.cat([x[:2], rows(2, seed=8)]))]
    text = told(*clients)
    assert text == f"{OWN}2 of 2 of 'c0', 3 of 3 of 'c1', 4 of 4 of 'c2' and of 3 more{ADVICE}"


@pytest.mark.parametrize(
    "draw",
    [
        lambda number, seed: torch.zeros(number, 4),
        lambda number, seed: torch.randint(0, 2, (number, 3), generator=torch_generator(seed)),
        lambda number, seed: torch.randint(0, 4, (number, 3), generator=torch_generator(seed)).float(),
    ],
    ids=["constant", "eight kinds", "sixty-four kinds"],
)
def test_inputs_that_repeat_by_nature_are_no_leak(draw):
    clients = [client(f"c{k}", draw(40, 3 * k), draw(20, 3 * k + 1), draw(20, 3 * k + 2)) for k in range(6)]
    assert told(*clients) == ""


def test_the_same_rows_are_told_even_if_inputs_repeat():
    x = torch.randint(0, 2, (40, 3), generator=torch_generator(0))
    assert told(client("north", x, x)).startswith(f"{OWN}40 of 40 of 'north';")


def test_digits_as_they_are_dealt():
    clients, _ = make_clients(SOURCES["digits"]().load(), Split(clients=10), IID(), seed=0)
    assert told(*(pf.Client(c.id, None, c.train, c.test) for c in clients)) == ""


def test_images_of_bytes_and_stores_that_are_not_contiguous():
    images = torch.randint(0, 256, (30, 3, 8, 8), generator=torch_generator(0)).to(torch.uint8)
    turned = images.transpose(2, 3)
    assert told(client("a", images, images[:5].clone())).startswith(f"{OWN}5 of 5")
    assert told(client("a", turned, turned[:5].clone())).startswith(f"{OWN}5 of 5")
    assert told(client("a", turned, images[:5])) == ""


def test_types_and_shapes_are_told_apart():
    x = torch.arange(40).view(20, 2)
    assert told(client("a", x, x[:5].to(torch.int32))) == ""
    assert (
        told(client("a", torch.zeros(20, 4) + x.repeat(1, 2), (torch.zeros(20, 4) + x.repeat(1, 2)).view(20, 2, 2)))
        == ""
    )


def test_beyond_so_many_examples_clients_are_only_compared_with_themselves(monkeypatch):
    x, y = rows(40), rows(40, seed=1)
    assert OTHERS in told(client("north", x, y[:10]), client("south", y, y[:10]))
    monkeypatch.setattr(data_leakage, "_MOST", 60)
    assert told(client("north", x, y[:10]), client("south", y, y[:10])) == f"{OWN}10 of 10 of 'south'{ADVICE}"


@pytest.mark.parametrize(
    "call",
    [
        lambda clients: pf.federate(clients, "local", rounds=1, workers=0),
        lambda clients: pf.compare(clients, ["fedavg"], seeds=[0], rounds=1, tune={"lr": [0.1]}, parallel=1),
    ],
    ids=["federate", "compare"],
)
@pytest.mark.one_case
def test_it_is_told_once(call):
    x = rows(40)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call([client("north", x, x), client("south", rows(40, seed=1), rows(10, seed=2))])
    texts = [str(warning.message) for warning in found if re.match(OWN, str(warning.message))]
    assert texts == [f"{OWN}40 of 40 of 'north'{ADVICE}"]


def test_clients_that_were_looked_at_are_looked_at_again_in_other_company():
    x = rows(40)
    north, south = client("north", x, rows(10, seed=1)), client("south", rows(40, seed=2), x[:10])
    assert (told(north), told(south)) == ("", "")
    assert told(north, south) == f"{OTHERS}10 of 10 of 'south'{IF_SAME}"
    assert told(south, north) == ""
