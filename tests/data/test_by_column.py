"""Clients that the data name: every value of a column is one, with its name as the id."""

import re

import numpy as np
import pytest

from polyfed.cli.main import main
from polyfed.core.errors import UserError
from polyfed.data import ListedClasses, Split, make_clients
from polyfed.data.partitioning.allocation import unique_values_as_texts
from polyfed.data.partitioning.partitions import IID, Natural
from polyfed.data.partitioning.split import split_rows_by_client
from polyfed.data.sources.published.vision import Digits
from polyfed.simulation.storage.directory import read_config, read_metrics

SITES = ["south", "north", "west", "east"]
SIZES = [40, 30, 20, 10]


def column(values=SITES):
    return {"site": np.repeat(np.array(values), SIZES)}


def sites_of(config, partition=None, values=SITES, seed=0):
    """Id -> the sites among its rows."""
    found = column(values)
    rows, _ = split_rows_by_client(np.zeros(100, int), config, partition or Natural("site"), seed, found)
    return {client.id: set(found["site"][np.concatenate([client.train, client.test])].tolist()) for client in rows}


def test_every_value_is_a_client_of_its_name_in_order():
    found = sites_of(Split())
    assert list(found) == sorted(SITES)
    assert all(owned == {name} for name, owned in found.items())
    assert list(sites_of(Split(clients=4))) == sorted(SITES)


@pytest.mark.parametrize(
    ("order", "expected"), [("largest", ["south", "north"]), ("first", ["south", "north"]), ("all", sorted(SITES))]
)
def test_an_order_says_which_and_without_a_number_all_come(order, expected):
    partition = Natural("site", order)
    number = None if order == "all" else 2
    assert list(sites_of(Split(clients=number), partition)) == expected
    assert sorted(sites_of(Split(), partition)) == sorted(SITES)
    first = list(sites_of(Split(), partition, values=["d", "c", "b", "a"]))
    assert first == (["a", "b", "c", "d"] if order == "all" else ["d", "c", "b", "a"])


def test_too_few_clients_are_refused_by_the_names_of_those_left_out():
    with pytest.raises(UserError, match="has 4 values, so that 3 clients would leave out 'east'; leave the number"):
        sites_of(Split(clients=3))
    many = {"site": np.arange(12)}
    with pytest.raises(
        UserError, match=r"leave out '4', '5', '6', '7', '8' and 3 more; .*order largest, first or random"
    ):
        split_rows_by_client(np.zeros(12, int), Split(clients=4), Natural("site"), 0, many)


def test_too_many_clients_are_refused():
    with pytest.raises(UserError, match="4 values, fewer than 10 clients; leave the number of clients out"):
        sites_of(Split(clients=10))


@pytest.mark.parametrize(
    ("values", "ids"),
    [
        ([10, 9, 7, 8], ["7", "8", "9", "10"]),
        ([1.5, 0.1, 2.0, -1.0], ["-1.0", "0.1", "1.5", "2.0"]),
        (np.array([1.5, 0.1, 2.0, -1.0], np.float32), ["-1.0", "0.1", "1.5", "2.0"]),
        ([b"b", b"a", b"d", b"\xff"], ["\\xff", "a", "b", "d"]),
        (np.array(["x", 2, 3.5, True], object), ["2", "3.5", "True", "x"]),
        (np.array(["2020-01-02", "2020-01-01", "2021-01-01", "2022-01-01"], "M8[D]"),
         ["2020-01-01", "2020-01-02", "2021-01-01", "2022-01-01"]),
    ],
)  # fmt: skip
def test_other_values_become_texts(values, ids):
    found = [
        client.id for client in split_rows_by_client(np.zeros(100, int), Split(), Natural("site"), 0, column(values))[0]
    ]
    assert found == ids
    assert all(type(name) is str for name in found)


def test_values_of_one_text_are_one_client():
    texts, _, which, sizes = unique_values_as_texts(np.array([1, "1", "a"], object), "site")
    assert texts == ("1", "a")
    assert (which.tolist(), sizes.tolist()) == ([0, 0, 1], [2, 1])


@pytest.mark.parametrize(
    "values", [["a", "", "b"], ["a", " ", "b"], [1.0, np.nan, 2.0], np.array(["a", None, "b"], object)]
)
def test_a_row_without_a_value_is_refused(values):
    with pytest.raises(UserError, match="column 'site' has no value in 1 of 3 rows; fill it in, or drop these rows"):
        unique_values_as_texts(np.array(values), "site")


def test_a_column_has_one_value_per_example():
    with pytest.raises(UserError, match=re.escape("column 'site' has shape (3, 2), not one value per example")):
        unique_values_as_texts(np.zeros((3, 2)), "site")


def test_other_partitions_number_their_clients():
    assert list(sites_of(Split(), IID())) == [f"client-{i:03d}" for i in range(10)]
    listed = ListedClasses(((0, 1), (1, 2), (0, 2)))
    clients, _ = make_clients(Digits().load(), Split(), listed, seed=0)
    assert [client.id for client in clients] == ["client-000", "client-001", "client-002"]


def test_not_all_sites_can_be_unseen():
    with pytest.raises(UserError, match="unseen must be fewer than the 4 clients, of which they are the last, got 4"):
        sites_of(Split(unseen=4))


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Digits of four sites as a file, one of them with a name that a terminal or a folder might take for something else."""
    pool = Digits().load()
    x, y = pool.train.x[:240].flatten(1).float().numpy(), pool.train.y[:240].numpy()
    site = np.array(["St. Mary's/[north]", "south", "west", "östlich"])[np.arange(240) % 4]
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, site=site)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    return ["--data", "npz", "--data.path", "a.npz", "--data.partition", "natural", "--data.partition.column", "site"]


def test_a_run_its_models_and_tables_show_the_names(table, tmp_path, capsys):
    words = ["run", *table, "--rounds", "1", "--workers", "0", "--quiet", "--out", "out", "--model", "mlp"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    names = ["St. Mary's/[north]", "south", "west", "östlich"]
    assert all(name in shown for name in names)
    assert list(read_metrics(tmp_path / "out" / "metrics.jsonl")[-1]["clients"]) == sorted(names)
    assert len(list((tmp_path / "out" / "models").glob("*.safetensors"))) == 4
    assert (tmp_path / "out" / "models" / "south.safetensors").is_file()
    assert read_config(tmp_path / "out")["data"]["clients"] is None
    assert main(["run", "out", "--quiet", "--out", "again"]) == 0  # from the configuration that it left


def test_the_data_command_shows_and_draws_them(table, tmp_path, capsys):
    assert main(["data", *table, "--plot", "a.svg"]) == 0
    assert "St. Mary's/[north]" in capsys.readouterr().out
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_a_smaller_number_on_the_command_line(table, capsys):
    assert main(["data", *table, "--data.clients", "3"]) == 2
    assert "has 4 values, so that 3 clients would leave out 'östlich'" in capsys.readouterr().err
    assert main(["data", *table, "--data.clients", "3", "--data.partition.order", "largest"]) == 0
