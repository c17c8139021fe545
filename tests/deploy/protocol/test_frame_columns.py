"""Sites whose inputs are pandas frames: other names of columns, or another order, are found before round 1."""

import json
import logging

import pandas
import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FedAvg, FedProto
from polyfed.core.errors import UserError
from polyfed.deploy.protocol.table_summary import (
    build_table_hashes_for_header,
    describe_table_difference,
    sites_without_column_names,
)
from polyfed.deploy.protocol.wire import SITE_HEAD_BYTES

from ..conftest import MemoryGrid

NEEDS = FedAvg.requires


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)


def client(name, *columns, frame=True):
    numbers = torch.randn(20, 2, generator=torch.Generator().manual_seed(len(name)))
    inputs = pandas.DataFrame(numbers.numpy(), columns=list(columns)) if frame else numbers
    data = inputs, torch.arange(20) % 2
    return pf.Client(name, Net, data, data)


@pytest.fixture
def play(nodes, run, tmp_path):
    (tmp_path / "server.py").write_text("from tests.deploy.protocol.test_frame_columns import Net as model\n")

    def start(*clients, method=None, **words):
        return run(grid=MemoryGrid(nodes(list(clients), **words)), method=method, sites=",".join(c.id for c in clients))

    return start


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        (("crp", "age"), "its columns are in another order, first at column 1: 'crp' in place of 'age'"),
        (("age", "ldl"), "it has no column 'crp', and 'ldl' more"),
    ],
)
def test_frames_with_other_columns_are_refused(play, columns, sentence):
    sites = client("a", "age", "crp"), client("bb", "age", "crp"), client("ccc", *columns)
    with pytest.raises(
        UserError, match=f"frame of site 'ccc' has other columns than that of 'a'.*{sentence}; give frame"
    ):
        play(*sites)


def test_frames_with_the_same_columns_train(play):
    assert play(client("a", "age", "crp"), client("bb", "age", "crp")).last.round == 3


def test_frames_beside_tensors_train_with_a_warning(play, caplog):
    with caplog.at_level(logging.WARNING, "polyfed.server"):
        assert play(client("a", "age", "crp"), client("bb", frame=False), client("ccc", "age", "crp")).last.round == 3
    assert "'bb': the columns of their inputs are not compared" in caplog.text


def test_a_method_whose_networks_differ_compares_no_columns(play):
    assert play(client("a", "age", "crp"), client("bb", "crp", "age"), method=FedProto(lr=0.05)).last.round == 3


def summary(name, *columns, run="run", **options):
    return build_table_hashes_for_header(client(name, *columns), NEEDS, run, **{"with_names": False, **options})


def test_without_consent_a_hash_of_the_run_alone_is_sent():
    first, second = summary("a", "age", "crp"), summary("b", "crp", "age")
    assert "age" not in json.dumps(first)
    assert first["frame"] != summary("a", "age", "crp", run="other")["frame"]
    assert "the columns are named if both sites allow it" in describe_table_difference({"a": first, "b": second})
    assert describe_table_difference({"a": first, "b": summary("b", "age", "crp")}) is None
    assert summary("a", "age", "crp", adds_noise=True) == {"frame": {}}


@pytest.mark.parametrize("frame", [None, 3, [], {"whole": 3}, {"names": ["age"]}, {"whole": "x", "names": 3}])
def test_a_summary_of_another_form_counts_as_none(frame):
    heads = {"a": summary("a", "age", "crp"), "b": {"frame": frame}}
    assert describe_table_difference(heads) is None
    assert sites_without_column_names(heads) == ["b"]
    assert sites_without_column_names({"b": {"frame": frame}}) == []


def test_a_site_whose_hash_and_names_contradict_each_other_is_named():
    honest = summary("a", "age", "crp", with_names=True)
    lie = {"frame": {**honest["frame"], "whole": "0" * 16}}
    assert "site 'b'" in describe_table_difference({"a": honest, "a2": honest, "b": lie})


def test_long_names_stay_within_a_header(play):
    columns = [f"{number} {'é' * 700}" for number in range(2)]
    assert len(json.dumps(summary("a", *columns, with_names=True))) < SITE_HEAD_BYTES
    assert play(client("a", *columns), client("bb", *columns)).last.round == 3
    long = [f"{number} {'é' * 9000}" for number in range(2)]
    assert list(summary("a", *long, with_names=True)["frame"]) == ["whole"]
    rows = {name: [1.0, 2.0] * 10 for name in long} | {"ill": ["no", "yes"] * 10}
    table = pf.data.split_table(rows, "ill", None, name="a").build_clients(Net)[0]
    told = build_table_hashes_for_header(table, NEEDS, "run", with_names=True)
    assert list(told["table"]) == ["whole"]
