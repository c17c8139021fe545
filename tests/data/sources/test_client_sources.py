"""Sources that make clients one at a time: rows grouped by a column of a table, and made examples."""

import os
import pickle

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from polyfed.core.errors import UserError
from polyfed.data import ArrowClients, DatasetClients, ParquetClients, SyntheticClients
from polyfed.data.sources.by_client.row_index import index_rows, load_index, save_index
from polyfed.data.sources.client_source import SourceManifest, is_client_source

ROWS = 60
WORDS = {"client_column": "user", "inputs": ["a", "b"], "target": "label"}


def table(shuffled=True):
    generator = np.random.default_rng(0)
    users = np.array(["amy", "bob", "cem", "dot"])[generator.integers(0, 4, ROWS)]
    users = users if shuffled else np.sort(users)
    a = np.arange(ROWS, dtype=np.float64)
    return pyarrow.table(
        {
            "user": users,
            "a": a,
            "b": -a,
            "label": np.arange(ROWS) % 3,
            "kind": np.array(["x", "y", "z"])[np.arange(ROWS) % 3],
        }
    )


def sent_to_another_process(source):
    return pickle.loads(pickle.dumps(source))  # noqa: S301


def all_rows(client):
    return sorted(torch.cat([client.train.x, client.test.x])[:, 0].tolist())


def expected_rows(of, user):
    return sorted(float(a) for name, a in zip(of["user"].to_pylist(), of["a"].to_pylist(), strict=True) if name == user)


def every_source(of, folder):
    folder.mkdir()
    pyarrow.parquet.write_table(of, folder / "rows.parquet", row_group_size=7)
    from datasets import Dataset

    reversed_dataset = Dataset(pyarrow.Table.from_batches(of.to_batches())).select(range(ROWS - 1, -1, -1))
    return {
        "arrow": ArrowClients(of, **WORDS),
        "parquet": ParquetClients(folder / "rows.parquet", **WORDS),
        "dataset": DatasetClients(reversed_dataset, **WORDS),
    }


@pytest.mark.parametrize("shuffled", [True, False])
def test_each_client_has_its_rows(tmp_path, shuffled):
    of = table(shuffled)
    for kind, source in every_source(of, tmp_path / "data").items():
        assert is_client_source(source)
        assert list(source.ids) == ["amy", "bob", "cem", "dot"], kind
        for place, user in enumerate(source.ids):
            client = source.client(user)
            assert all_rows(client) == expected_rows(of, user), kind
            assert torch.equal(client.train.x[:, 1], -client.train.x[:, 0])
            assert torch.equal(client.train.y, client.train.x[:, 0].long() % 3)
            assert source.manifest().num_examples[place] == len(client.train)
            again = sent_to_another_process(source).client(user)
            assert torch.equal(client.train.x, again.train.x)
        with pytest.raises(KeyError):
            source.client("eve")


def test_parquet_files_are_made_once_and_again_for_other_data(tmp_path):
    pyarrow.parquet.write_table(table(), tmp_path / "rows.parquet")
    ParquetClients(tmp_path / "rows.parquet", **WORDS).client("amy")
    made = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("rows.clients-*")}
    assert len(made) == 2
    # The copy holds what the data hold: its owner alone reads it.
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("rows.clients-*")} == {0o600}
    ParquetClients(tmp_path / "rows.parquet", **WORDS).client("bob")
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("rows.clients-*")} == made
    pyarrow.parquet.write_table(table().slice(0, 40), tmp_path / "rows.parquet")
    assert sum(ParquetClients(tmp_path / "rows.parquet", **WORDS)._index.counts) == 40
    elsewhere = ParquetClients(tmp_path / "rows.parquet", cache_dir=tmp_path / "cache", **WORDS)
    elsewhere.client("amy")
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_the_copy_of_a_parquet_file_follows_no_link(tmp_path):
    pyarrow.parquet.write_table(table(), tmp_path / "rows.parquet")
    source, victim = ParquetClients(tmp_path / "rows.parquet", **WORDS), tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".partial-{os.getpid()}-{source._cache.name}.arrow").symlink_to(victim)
    source.client("amy")
    assert victim.read_text() == "precious"


def test_folder_of_files(tmp_path):
    of = table()
    for number, start in enumerate((0, 20, 40)):
        pyarrow.parquet.write_table(of.slice(start, 20), tmp_path / f"part-{number}.parquet")
    assert all_rows(ParquetClients(tmp_path, **WORDS).client("cem")) == expected_rows(of, "cem")


def test_texts_and_lists():
    of = table().append_column("pixels", pyarrow.array([[i, i + 1, i + 2, i + 3] for i in range(ROWS)]))
    source = ArrowClients(
        of, client_column="user", inputs="pixels", target="kind", shape=(1, 2, 2), val_fraction=0.2, test_fraction=0.3
    )
    client = source.client("bob")
    assert client.train.x.shape[1:] == (1, 2, 2)
    assert client.train.classes == ("x", "y", "z")
    assert torch.equal(client.train.y, client.train.x[:, 0, 0, 0].long() % 3)
    assert len(client.val) >= 1
    assert len(client.train) == source.manifest().num_examples[1]


@pytest.mark.parametrize(
    ("change", "error"),
    {
        "column": ({"target": "lable"}, "the table has no column 'lable'; did you mean label"),
        "texts": ({"inputs": ["a", "kind"]}, "client 'amy': column 'kind' is of string, and numbers are needed"),
        "fractions": ({"test_fraction": 0.0}, "test_fraction must be above 0"),
        "no inputs": ({"inputs": []}, "inputs must name a column at least"),
        "answer": ({"inputs": ["a", "label"]}, "the target 'label' is among the inputs"),
        "few": ({"least_rows": 500}, "no client has 500 rows or more"),
    }.values(),
)
def test_errors(change, error):
    with pytest.raises(UserError, match=error):
        ArrowClients(table(), **WORDS | change).client("amy")


def test_rows_without_client_and_empty_cells():
    with pytest.raises(UserError, match="rows without a client"):
        index_rows([pyarrow.array(["a", None])], "user")
    for without in (["a", ""], [1.0, float("nan")], pyarrow.array(["a", ""]).dictionary_encode()):
        with pytest.raises(UserError, match="rows without a client"):
            index_rows([without if isinstance(without, pyarrow.Array) else pyarrow.array(without)], "user")
    with pytest.raises(UserError, match=r"column 'user' is of list<.*>, and clients have texts or numbers as names"):
        index_rows([pyarrow.array([["a"], ["b"]])], "user")
    empty = table().set_column(1, "a", pyarrow.array([None, *map(float, range(ROWS - 1))]))
    user = empty["user"][0].as_py()
    with pytest.raises(UserError, match=f"client '{user}': column 'a' has empty cells"):
        ArrowClients(empty, **WORDS).client(user)


def test_small_clients_are_left_out():
    of = pyarrow.table({"user": ["a", "b", "a"], "a": [1.0, 2.0, 3.0], "b": [1.0, 2.0, 3.0], "label": [0, 1, 1]})
    assert list(ArrowClients(of, **WORDS).ids) == ["a"]
    assert all_rows(ArrowClients(of, **WORDS).client("a")) == [1.0, 3.0]


def test_index_file(tmp_path):
    index = index_rows([pyarrow.array(["é", "b", "é"])], "user")
    save_index(tmp_path / "i.npz", index, "key")
    again = load_index(tmp_path / "i.npz", "key")
    assert again.ids == index.ids == ("b", "é")
    assert again.rows.tolist() == index.rows.tolist()
    assert load_index(tmp_path / "i.npz", "other") is None
    assert load_index(tmp_path / "none.npz", "key") is None
    (tmp_path / "i.npz").write_bytes(b"PK\x03\x04 damaged")
    assert load_index(tmp_path / "i.npz", "key") is None


def test_synthetic_clients():
    source = SyntheticClients(1_000, shape=(1, 4, 4), seed=3)
    client, again = source.client(source.ids[7]), sent_to_another_process(source).client(source.ids[7])
    assert torch.equal(client.train.x, again.train.x)
    assert client.train.x.shape == (source.manifest().num_examples[7], 1, 4, 4)
    other = SyntheticClients(1_000, shape=(1, 4, 4), seed=4).client(source.ids[7])
    assert not torch.equal(client.test.x, other.test.x)
    assert client.model().forward(client.train.x).shape[1] == 4
    for wrong in ("client-0001000", "client-7", "x"):
        with pytest.raises(KeyError):
            source.client(wrong)
    with pytest.raises(UserError, match="a synthetic source needs"):
        SyntheticClients(0)
    mixed = SyntheticClients(5, model=[torch.nn.Flatten, torch.nn.Identity])
    assert mixed.client(mixed.ids[3]).model is torch.nn.Identity
    assert mixed.manifest().model_of.tolist() == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"num_examples": [0, 1]}, "num_examples must be whole numbers from 1"),
        ({"num_examples": [1.5]}, "num_examples must be whole numbers from 1"),
        ({"models": [torch.nn.Flatten, torch.nn.Identity]}, "the manifest has 2 models; model_of must say"),
        ({"models": [torch.nn.Flatten], "model_of": [1]}, "model_of names network 1, and there are 1"),
    ],
)
def test_manifests(words, error):
    with pytest.raises(UserError, match=error):
        SourceManifest(**words)
