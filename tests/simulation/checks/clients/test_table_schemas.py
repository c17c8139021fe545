"""Tables that cannot be trained on together are refused before round 1, by every method and in comparisons."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.comparison.references.reference_models import train_pooled_reference
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples, PartwiseTransform
from polyfed.data.tabular.preprocessing import Column, TablePreprocessor

ANY_MEANING = [
    name
    for name, method in REGISTRY.items()
    if name in {"local", "fd", "pfedhn", "flha_ghn", "fedl2g"} or "one_representation" in method.requires
]
"""Methods whose networks need not read the same inputs; those that share last layers of one width are among them."""
ONE_MEANING = sorted(
    name for name, method in REGISTRY.items() if name not in ANY_MEANING and "images" not in method.requires
)
DRAW = np.random.default_rng(0)
ROWS = {"age": DRAW.normal(60, 9, 30).tolist(), "crp": DRAW.random(30).tolist(), "ill": ["no", "yes"] * 15}


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))


def clients_of(rows, name, model=net, **options):
    return pf.data.split_table(rows, "ill", None, name=name, **options).build_clients(model)


def swapped(rows):
    return {name: rows[name] for name in ("crp", "age", "ill")}


@pytest.mark.parametrize("name", ONE_MEANING)
@pytest.mark.one_case
def test_swapped_columns_are_refused_where_networks_read_inputs_of_one_meaning(name):
    clients = [*clients_of(ROWS, "a"), *clients_of(swapped(ROWS), "b")]
    public = clients[0].train if "public_data" in REGISTRY[name].requires else None
    with pytest.raises(UserError, match=r"another table than .*its columns are in another order"):
        pf.federate(clients, name, rounds=1, workers=0, public=public)


@pytest.mark.parametrize("name", ["fedavg", "fml", *ANY_MEANING])
@pytest.mark.one_case
def test_other_classes_are_refused_by_every_method(name):
    other = {**ROWS, "ill": ["maybe", "yes"] * 15}
    with pytest.raises(UserError, match="client 'b' has another table than 'a': its classes are others") as told:
        pf.federate([*clients_of(ROWS, "a"), *clients_of(other, "b")], name, rounds=1, workers=0)
    assert "maybe" not in str(told.value)


@pytest.mark.parametrize("name", ["fedproto", "pfedhn", "local"])
@pytest.mark.one_case
def test_other_columns_are_taken_where_inputs_need_no_common_meaning(name):
    run = pf.federate([*clients_of(ROWS, "a"), *clients_of(swapped(ROWS), "b")], name, rounds=1, workers=0)
    assert len(run.table()) == 3


def other_rows(what):
    if what == "categories":
        return ({**ROWS, "crp": ["f", "m"] * 15}, {**ROWS, "crp": ["f", "x"] * 15})
    empty = {column: [None, *ROWS[column][1:]] for column in ("age", "crp")}
    return ({**ROWS, "age": empty["age"]}, {**ROWS, "crp": empty["crp"]})


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("categories", "it has other categories in 'crp'"),
        ("cells", "only one of the two has empty cells in 'age', 'crp'"),
    ],
)
def test_features_of_one_number_but_other_meaning_are_refused(what, sentence):
    one, other = other_rows(what)
    clients = [*clients_of(one, "a", lambda: nn.Linear(3, 2)), *clients_of(other, "b", lambda: nn.Linear(3, 2))]
    with pytest.raises(UserError, match=sentence) as told:
        pf.federate(clients, "fedavg", rounds=1, workers=0)
    assert "'x'" not in str(told.value)


def test_the_first_client_is_not_taken_as_right_where_most_have_another_table():
    clients = [*clients_of(swapped(ROWS), "a"), *clients_of(ROWS, "b"), *clients_of(ROWS, "c")]
    with pytest.raises(UserError, match="client 'a' has another table than 'b'"):
        pf.federate(clients, "fedavg", rounds=1, workers=0)


def test_a_table_and_plain_inputs_are_not_averaged():
    x, y = torch.randn(20, 2), torch.arange(20) % 2
    clients = [*clients_of(ROWS, "a"), pf.Client("b", net, (x[:10], y[:10]), (x[10:], y[10:]))]
    with pytest.raises(UserError, match="client 'b' has no table, as 'a' has"):
        pf.federate(clients, "fedavg", rounds=1, workers=0)
    assert pf.federate(clients, "fedproto", rounds=1, workers=0).history


def test_numbers_scaled_by_sites_and_by_sums_are_not_averaged():
    both = two_sites()
    common = pf.data.split_table(both, "ill", "site", preprocess="federated").build_clients(net)
    with pytest.raises(UserError, match="the numbers of client 'b' are scaled differently from those of 'n'"):
        pf.federate([*common, *clients_of(ROWS, "b")], "fedavg", rounds=1, workers=0)


def test_a_client_is_not_tested_on_another_table():
    (one,), (other,) = clients_of(ROWS, "a"), clients_of(swapped(ROWS), "b")
    mixed = pf.Client("a", net, one.train, other.test)
    with pytest.raises(UserError, match=r"its test examples are of another table .*its columns are in another order"):
        pf.federate([mixed], "local", rounds=1, workers=0)


def test_public_examples_of_another_table_are_refused():
    both = two_sites()
    options = {"preprocess": "federated", "public_fraction": 0.2}
    sites = pf.data.split_table(both, "ill", "site", **options)
    clients, words = sites.build_clients(net), {"rounds": 1, "workers": 0}
    assert pf.federate(clients, "fedmd", public=sites.public, **words).history
    other = pf.data.split_table({"crp": both["crp"], **both}, "ill", "site", **options)
    with pytest.raises(
        UserError, match=r"public=.*are of another table than client 'n': its columns are in another order"
    ):
        pf.federate(clients, "fedmd", public=other.public, **words)
    older = pf.data.split_table({**both, "age": [age + 9 for age in both["age"]]}, "ill", "site", **options)
    run = pf.federate(clients, "fedmd", public=older.public, **words)  # prepared as the clients' rows are
    assert run.federation.public.transform == clients[0].train.transform
    own = pf.data.split_table(both, "ill", "site").build_clients(net)
    alike = replace(sites.public, x=sites.public.x.float())
    with pytest.raises(UserError, match=r"public=.*are scaled differently from the inputs of client 'n'") as told:
        pf.federate(own, "fedmd", public=alike, **words)
    assert "mean=" not in str(told.value)
    with pytest.raises(UserError, match="the inputs of client 'n' are rows of a table, and the others are not"):
        pf.federate(clients, "fedmd", public=torch.tensor([both["age"], both["crp"]]).T.double(), **words)


def two_sites():
    again = {"age": [age + 0.5 for age in ROWS["age"]], "crp": ROWS["crp"], "ill": ROWS["ill"]}
    return {name: values + again[name] for name, values in ROWS.items()} | {"site": ["n"] * 30 + ["s"] * 30}


def test_a_comparison_leaves_out_what_the_tables_do_not_suit():
    clients = [*clients_of(ROWS, "a"), *clients_of(swapped(ROWS), "b")]
    with pytest.raises(
        UserError, match=r"no method that federates suits these clients: .*columns are in another order"
    ):
        pf.compare(clients, ["fedavg"], rounds=1, tune="none", parallel=1)
    assert train_pooled_reference(clients, pf.algorithms.Local(), rounds=1, seed=0) is None
    assert train_pooled_reference(clients[:1], pf.algorithms.Local(), rounds=1, seed=0) is not None


def test_tables_that_are_parts_of_inputs_are_compared_too():
    def client(name, columns):
        table = TablePreprocessor(tuple(map(Column, columns)), (0.0, 0.0), (1.0, 1.0), classes=("no", "yes"))
        x = {"image": torch.randn(8, 1, 2, 2), "rows": torch.randn(8, 2)}
        both = Examples(x, torch.arange(8) % 2, transform=PartwiseTransform({"rows": table}))
        return pf.Client(name, TwoParts, both, both.head(4))

    with pytest.warns(UserWarning, match="trained on"), pytest.raises(UserError, match="columns are in another order"):
        pf.federate([client("a", ["x", "y"]), client("b", ["y", "x"])], "fedavg", rounds=1, workers=0)


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 2)

    def forward(self, image, rows):
        return self.last(torch.cat([image.flatten(1), rows], dim=1))


def test_tables_read_one_by_one_that_agree_before_round_1_merge_their_classes():
    other = {**ROWS, "ill": ["maybe", "yes"] * 15}
    three = lambda: nn.Linear(2, 3)  # noqa: E731
    clients = [
        *clients_of(ROWS, "a", three, preprocess="federated"),
        *clients_of(other, "b", three, preprocess="federated"),
    ]
    run = pf.federate(clients, "fedavg", rounds=1, workers=0)
    assert run.federation.clients["a"].train.transform.classes == ("maybe", "no", "yes")
    swapped_ = clients_of(swapped(ROWS), "b", three, preprocess="federated")
    with pytest.raises(UserError, match="its columns are in another order"):
        pf.federate([clients[0], *swapped_], "fedavg", rounds=1, workers=0)


def frame_client(name, train, test, loader=lambda frame: frame):
    import pandas

    frame, y = pandas.DataFrame(ROWS)[["age", "crp"]], torch.arange(30) % 2
    return pf.Client(name, net, (loader(frame[train][:20]), y[:20]), (loader(frame[test][20:]), y[20:]))


AGE_CRP, CRP_AGE = ["age", "crp"], ["crp", "age"]


def test_frames_with_columns_in_another_order_are_refused_like_tables():
    north, south = frame_client("north", AGE_CRP, AGE_CRP), frame_client("south", CRP_AGE, CRP_AGE)
    sentence = (
        "client 'south' has another table than 'north': its columns are in another order, first at column 1: "
        "'crp' in place of 'age'; give frame"
    )
    with pytest.raises(UserError, match=sentence):
        pf.federate([north, south], "fedavg", rounds=1, workers=0)
    with pytest.raises(UserError, match="'odd': its test examples are of another table than its training examples"):
        pf.federate([frame_client("odd", AGE_CRP, CRP_AGE)], "local", rounds=1, workers=0)
    for divide in ({"folds": 2}, {"resplit": 2}):
        with pytest.raises(UserError, match="inputs have other columns, or in another order"):
            pf.compare([frame_client("odd", AGE_CRP, CRP_AGE)], ["fedavg"], rounds=1, workers=0, tune="none", **divide)
    with pytest.raises(UserError, match=r"the public examples .* are of another table than client 'north'"):
        pf.federate([north], "fedmd", rounds=1, workers=0, public=south.train)
    assert train_pooled_reference([north, south], pf.algorithms.FedAvg(), rounds=1, seed=0) is None


def test_frames_are_taken_where_nothing_says_that_columns_differ():
    north, south = frame_client("north", AGE_CRP, AGE_CRP), frame_client("south", CRP_AGE, CRP_AGE)
    arrays = frame_client("arrays", CRP_AGE, CRP_AGE, loader=lambda frame: frame.to_numpy())
    for clients, method in (([north, south], "local"), ([north, arrays], "fedavg")):
        run = pf.federate(clients, method, rounds=1, workers=0)
    import pandas

    frame = pandas.DataFrame(ROWS)
    assert run.predict("north", frame[AGE_CRP]).equal(run.predict("north", frame[AGE_CRP].to_numpy()))
    assert run.predict("north", frame[[*CRP_AGE, *frame.columns.difference(CRP_AGE)]]).equal(
        run.predict("north", frame[AGE_CRP])
    )
    with pytest.raises(UserError, match=r"inputs for client 'north' need once each column of the client's: 'crp'$"):
        run.predict("north", frame[["age"]])
