"""NaN and infinite values are refused before any work, with the place where they are."""

import re
import time

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedHeNN
from polyfed.core.errors import UserError
from polyfed.core.examples.as_examples import as_examples
from polyfed.core.examples.examples import Examples, Normalise
from polyfed.data.shifts import Shift
from polyfed.data.sources.arrays import Npz, Parquet
from polyfed.simulation.results.unseen_clients import build_unseen_client

SETS = ("train", "test", "val", "global_test")
LABELS = torch.arange(20) % 2


def line():
    return nn.Linear(4, 2)


def data(*wrong, rows=20, shape=(4,)):
    """Inputs of ones with these values in these places, each (row, ..., value)."""
    x = torch.ones(rows, *shape)
    for *place, value in wrong:
        x[tuple(place)] = value
    return x, LABELS[:rows]


def client(which, examples, **options):
    sets = {"train": data(), "test": data(), "val": data(), "global_test": data()} | {which: examples}
    return pf.Client("north", line, **sets, **options)


@pytest.mark.parametrize("which", SETS)
@pytest.mark.parametrize(("value", "shown"), [(torch.nan, "nan"), (torch.inf, "inf"), (-torch.inf, "-inf")])
def test_each_set_of_a_client(which, value, shown):
    sentence = f"client 'north': {which} inputs: row 12, column 3 is {shown}; fill it in or drop the row"
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}$"):
        client(which, data((12, 3, value)))


@pytest.mark.parametrize(
    ("wrong", "more"),
    [
        ([(15, 0)], "and 1 more value is not finite"),
        ([(13, 1), (13, 2), (19, 0), (19, 3)], "and 4 more values are not"),
    ],
)
def test_what_else_is_wrong_is_counted(wrong, more):
    given = data((12, 3, torch.nan), *((*place, torch.inf) for place in wrong))
    with pytest.raises(
        UserError, match=rf"test inputs: row 12, column 3 is nan; {more}.*fill them in or drop the rows"
    ):
        client("test", given)


@pytest.mark.parametrize(
    ("shape", "place", "where"),
    [((), (7,), "row 7 is nan"), ((2, 3), (7, 1, 2), r"row 7, position \(1, 2\) is nan")],
)
def test_inputs_of_other_shapes(shape, place, where):
    with pytest.raises(UserError, match=f"train inputs: {where}"):
        client("train", data((*place, torch.nan), shape=shape))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_of_numbers(kind):
    x, y = data((3, 1, torch.nan))
    with pytest.raises(UserError, match="row 3, column 1 is nan"):
        client("train", (x.to(kind), y))
    large = torch.full((20, 4), torch.finfo(kind).max, dtype=kind)  # their sum is infinite, they are not
    client("train", (large, y))


def test_arrays_datasets_and_numpys_own_numbers():
    x, y = (part.numpy() for part in data((3, 1, torch.nan)))
    for source in ((x, y), (x.astype(np.float64), y), list(zip(x, y.tolist(), strict=True))):
        with pytest.raises(UserError, match="row 3, column 1 is nan"):
            client("train", source)


@pytest.mark.parametrize(("task", "where"), [("regression", "row 5"), ("multilabel", "row 5, column 2")])
def test_targets(task, where):
    y = torch.ones(20) if task == "regression" else torch.ones(20, 3)
    y[(5,) if task == "regression" else (5, 2)] = torch.nan
    sets = {name: (torch.ones(20, 4), torch.ones_like(y)) for name in SETS} | {"val": (torch.ones(20, 4), y)}
    with pytest.raises(UserError, match=f"client 'north': val targets: {where} is nan"):
        pf.Client("north", line, **sets, task=task)


def test_public_examples():
    clients = [client("train", data()) for _ in range(1)]
    public = data((2, 0, torch.nan))[0]
    for call in (
        lambda: pf.federate(clients, FedHeNN(), rounds=1, public=public),
        lambda: pf.compare(clients, ["local", "fedhenn"], seeds=[0], rounds=1, public=public),
    ):
        with pytest.raises(UserError, match=r"^public inputs: row 2, column 0 is nan"):
            call()


def test_a_newcomer_is_told_the_row_of_its_own_data():
    with pytest.raises(UserError, match="client 'late': data inputs: row 17, column 0 is inf"):
        build_unseen_client(line, data((17, 0, torch.inf)), id="late")


def test_only_the_rows_of_the_client_count_and_by_their_position_in_its_set():
    x, y = data((12, 3, torch.nan))
    store = Examples(x, y)
    client("train", store.select(torch.tensor([0, 11, 13])))
    with pytest.raises(UserError, match="train inputs: row 2, column 3 is nan"):
        client("train", store.select(torch.tensor([0, 11, 12])))


def test_what_the_transform_fills_in_is_no_fault():
    x, y = data((12, 3, torch.nan))
    client("train", Examples(x, y, transform=torch.nan_to_num))
    with pytest.raises(UserError, match="row 12, column 3 is nan"):
        client("train", Examples(x, y, transform=lambda batch: 2 * batch))


def test_a_store_that_was_changed_is_looked_at_again():
    store = Examples(*data())
    client("train", store)
    store.x[4, 2] = torch.nan
    with pytest.raises(UserError, match="row 4, column 2 is nan"):
        client("train", store)


def test_large_sets_are_looked_at_in_blocks(monkeypatch):
    monkeypatch.setattr("polyfed.core.examples.nan_checks._BLOCK", 12)
    with pytest.raises(UserError, match="row 7, column 1 is nan; and 2 more values are not finite"):
        client("train", data((7, 1, torch.nan), (16, 0, torch.inf), (19, 3, torch.nan)))


def test_images_of_bytes_are_taken_as_they_are():
    images = Examples(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), LABELS[:4], transform=Normalise((0.0,), (1.0,)))
    assert as_examples(Shift(rotation=90).apply(images)).x.dtype == torch.uint8


def test_five_hundred_clients_of_one_store_cost_one_look_at_it():
    store = Examples(torch.ones(50_000, 100), torch.zeros(50_000, dtype=torch.int64))
    start = time.process_time()
    as_examples(store)
    once = time.process_time() - start
    start = time.process_time()
    rows = torch.arange(50_000).chunk(500)
    for part in rows:
        mine = store.select(part)
        pf.Client("a", line, mine, mine, global_test=store)
    # With a look at the common test set for each it would be 500 times as long.
    assert time.process_time() - start < 60 * max(once, 0.01)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_table_names_its_column(split, tmp_path):
    import pyarrow
    import pyarrow.parquet

    for part in ("train", "test"):
        lists = [[1.0, 2.0], [3.0, None if part == split else 4.0]]
        numbers = [1.0, float("inf") if part == split else 2.0]
        table = pyarrow.table({"vitals": lists, "age": numbers, "label": [0, 1]})
        pyarrow.parquet.write_table(table, tmp_path / f"{part}-0.parquet")
    with pytest.raises(UserError, match=f"^column 'vitals' of the {split} split: row 1, position 1 is nan"):
        Parquet(path=str(tmp_path), x="vitals").load()
    with pytest.raises(UserError, match=f"^column 'age' of the {split} split: row 1 is inf"):
        Parquet(path=str(tmp_path), x="age").load()


def test_an_archive_names_its_array(tmp_path):
    x = np.ones((3, 2))
    np.savez(
        tmp_path / "a.npz", x_train=x, y_train=[0, 1, 0], x_test=np.where([[1, 0]] * 3, x, np.nan), y_test=[0, 1, 0]
    )
    with pytest.raises(UserError, match=r"^x_test: row 0, position 1 is nan; and 2 more values are not finite"):
        Npz(path=str(tmp_path / "a.npz")).load()


def test_a_column_of_a_frame_is_called_by_its_name():
    frame = pd.DataFrame({"age": [50.0, 60.0], "lab": [1.0, np.nan]})
    with pytest.raises(UserError, match=r"^x inputs: row 1, column 'lab' is nan; fill it in or drop the row"):
        as_examples((frame, [0, 1]), "x")
    with pytest.raises(UserError, match=r"^x inputs 'blood': row 1, column 'lab' is nan"):
        as_examples(({"blood": frame}, [0, 1]), "x")


class Name(str):
    """A string that prints as something else."""

    __slots__ = ()

    def __repr__(self):
        return "name()"


@pytest.mark.parametrize("id", [np.str_("north"), Name("north")])
def test_ids_become_plain_strings(id):
    found = pf.Client(id, line, data(), data())
    assert type(found.id) is str
    assert found.id == "north"
    with pytest.raises(UserError, match=r"^client 'north': test examples are missing"):
        pf.Client(id, line, data(), None)


@pytest.mark.parametrize("given", [np.str_("north"), np.int64(7)])
def test_numpys_strings_and_numbers_seed_as_pythons_do(given):
    from polyfed.core.seeds import derive_seed

    assert derive_seed(0, given) == derive_seed(0, given.item())
