"""Tables of users: what is read, what is refused and how, sites and groups."""

import re

import numpy as np
import pandas as pd
import pytest
import torch

import polyfed as pf
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.data import Split, make_clients
from polyfed.data.partitioning.partitions import Natural
from polyfed.data.partitioning.resplit import apply_common_preprocessing_to_public, resplit_clients
from polyfed.data.partitioning.validation_split import hold_out_missing_validation_sets
from polyfed.data.sources.table_file import TableFile
from polyfed.data.tabular.fit_preprocessor import fit_preprocessor
from polyfed.data.tabular.preprocessing import TablePreprocessor


def frame(number=80, seed=0):
    draw = np.random.default_rng(seed)
    age = draw.normal(60, 10, number)
    return pd.DataFrame(
        {
            "age": np.where(draw.random(number) < 0.1, np.nan, age),
            "sex": draw.choice(["f", "m"], number),
            "ward": draw.choice(["a", "b", None], number),
            "ill": np.where(age + draw.normal(0, 5, number) > 60, "yes", "no"),
            "cost": age * 100.5,
            "lab": draw.normal(0, 1, number),
            "patient": [f"p{i // 2}" for i in range(number)],
            "hospital": draw.choice(["north", "south", "west"], number, p=[0.5, 0.3, 0.2]),
        }
    )


def linear(sites):
    return lambda: torch.nn.Linear(sites.num_features, sites.num_outputs)


def write(tmp_path, data, name="a.csv", **options):
    path = tmp_path / name
    if isinstance(data, str):
        path.write_text(data, encoding=options.get("encoding", "utf-8"))
    elif name.endswith(".parquet"):
        data.to_parquet(path, index=False)
    else:
        data.to_csv(path, index=False, **options)
    return str(path)


@pytest.mark.parametrize(
    ("name", "options", "fields"),
    [
        ("a.csv", {}, {}),
        ("a.csv", {"sep": ";", "decimal": ","}, {"decimal": ","}),
        ("a.tsv", {"sep": "\t"}, {}),
        ("a.csv", {"na_rep": "unknown"}, {"missing": "unknown"}),
        ("a.csv", {"encoding": "utf-8-sig"}, {}),
        ("a.parquet", {}, {}),
    ],
)
@pytest.mark.one_case
def test_a_file_is_read_as_the_frame_is(tmp_path, name, options, fields):
    data = frame()
    expected = TableFile(target="ill", site="hospital", drop="cost,patient").build_dataset(_read(data))
    path = write(tmp_path, data, name, **options)
    pool = TableFile(path, "ill", "hospital", drop=["cost", "patient"], **fields).load()
    assert pool.preprocessor == expected.preprocessor
    assert pool.preprocessor.feature_names == (
        "age", "lab", "age is missing", "sex=f", "sex=m", "ward=a", "ward=b", "ward=(missing)"
    )  # fmt: skip
    assert torch.equal(pool.train.x.nan_to_num(-1), expected.train.x.nan_to_num(-1))
    assert pool.class_names == ("no", "yes")
    assert pool.columns["hospital"].tolist() == data.hospital.tolist()
    assert sorted(pool.columns) == ["hospital", "patient", "sex", "ward"]  # of few values each


def _read(data):
    from polyfed.data.tabular.table_reader import read_table

    return read_table(data)


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        ({"note": [f"came by foot {i}" for i in range(80)]}, {}, "'note' has 80 different texts .*drop='note'"),
        ({"day": ["2020-01-02"] * 80}, {}, "'day' holds dates or times: leave it out .*drop='day'"),
        ({"day": ["2.1.2020", "13.12.2021"] * 40}, {}, "'day' holds dates or times: leave it out"),
        ({"lab": ["1.5"] * 78 + ["?", "?"]}, {}, r"'lab' holds numbers, and '\?' in rows 79 and 80: .*missing=\['\?'\]"),
        ({"lab": ["1,500", "12,700.5"] * 40}, {}, "a comma before three digits in rows 1, .*: if it separates"),
        ({"lab": ["1,5", "2,7"] * 40}, {}, "'lab' has numbers with a comma in rows 1, 2, .*: give decimal=','"),
        ({"lab": [None] * 80}, {}, "'lab' has no value in any row: leave it out .drop='lab'"),
        ({"note": [f"came by foot {i}" for i in range(80)], "day": ["2020-01-02"] * 80, "lab": ["1.5"] * 79 + ["?"]}, {},
         "2 columns cannot be features as they are: 'note' has .* and 'day' holds dates or times; leave them out "
         r".drop='note,day'.*; besides, column 'lab' holds numbers, and '\?' in row 80"),
        ({"lab": ["999", "1,000"] * 40}, {}, "before three digits in rows 2, .*: if it separates thousands, take it out"),
        ({"lab": ["1.5"] * 78 + ["low", "<5"]}, {}, r"numbers, and '<5' and 'low' in rows 79 and 80: .*=\['<5', 'low'\]"),
        ({"lab": [f"{k}.5 %" for k in range(80)]}, {}, "'lab' has numbers with a sign such as % or € in .*: take"),
        ({"lab": [1.0, np.inf] * 40}, {}, "'lab' has an infinite value, .* in rows 2, 4, 6, 8, 10 and 35 more"),
        ({"lab": [1.0, 1e39] * 40}, {}, r"'lab' has an infinite value, or one beyond 3e\+38, in rows 2, 4"),
        ({"hospital": ["north"] * 77 + [None, "south", " "]}, {}, "site: column 'hospital' has no value in rows 78 and 80"),
        ({"ill": ["yes", None] + ["no"] * 78}, {}, "target: column 'ill' has no value in row 2"),
        ({"ill": ["no"] * 80}, {}, "target 'ill' has only one value, 'no'"),
        ({"ill": range(80)}, {}, "'ill' has 80 different whole numbers: give task='regression' if they are amounts"),
        ({}, {"target": "il"}, "target: the table has no column 'il'; did you mean ill"),
        ({}, {"target": ""}, "give target=... with the column to predict; the columns: age, sex"),
        ({}, {"positive": "maybe"}, "positive='maybe' is not a value of target 'ill'; its values: no, yes"),
        ({}, {"columns": "age,ill"}, "column 'ill' cannot be a feature"),
        ({}, {"target": "cost,sex"}, "several targets must be numbers, got cost, sex"),
        ({}, {"drop": "age,sex,ward,cost,patient,lab"}, "no column is left for features"),
        ({}, {"target": "cost,cost"}, "column 'cost' is named twice, as a target and as another target"),
        ({}, {"target": "hospital"}, "column 'hospital' is named twice, as a target and as .* the site"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_with_its_column_and_rows(tmp_path, change, fields, message):
    data = frame().assign(**change)
    source = TableFile(write(tmp_path, data), **({"target": "ill", "site": "hospital", "drop": "patient"} | fields))
    with pytest.raises(UserError, match=message):
        source.load()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a,b\n1,2\n73591\n",
            r"cannot be read as CSV \(CSV parse error: Expected 2 columns, got 1\); line 3 has 1 cell, and the first line 2",
        ),  # and not the row
        (
            'a,b,h\n1,2,x\n"3,4,x\n5,6,y\n',
            r"a quotation mark in line 3 is closed in line \d or not at all: fix line 3",
        ),
        ('a,b,h\n1,2,x\n"3' + ",4" * 99_999, "the row from line 3 on has no end: is a quotation mark there not closed"),
        ("a,b\n", "has no rows"),
        ("Ill in 2024,,\na,b,h\n1,2,x\n", "it holds 'Ill in 2024' alone: take titles above the names out"),
        ("a,a,h\n1,2,x\n", "has two columns 'a'; rename one"),
        ("", "cannot be read as CSV"),
        ("PK\0\0", "is not a CSV file: it holds bytes that are not text"),
        ("PK\3\4 a spreadsheet", "is not a CSV file: .* save the sheet as CSV"),
        (
            "a,b,\n1,2,3\n",
            "column 3 has values and no name; give it one in the first line, or if it names the rows, .*index=False",
        ),
        (",a,b\n0,1,2\n2,2,3\n", "column 1 has values and no name"),
        (",a,b\nAnn,1,2\nBob,2,3\n", "column 1 has values and no name"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        TableFile(write(tmp_path, text), "b", "h").load()


@pytest.mark.parametrize("first", [0, 1])
def test_row_numbers_without_a_name_are_left_out(tmp_path, first):
    """As R and pandas write them, unless they are told not to."""
    text = '"","age","y","h"\n' + "".join(f'"{first + k}",{50 + k},{k % 2},"north"\n' for k in range(6))
    assert TableFile(write(tmp_path, text), "y", "h").load().preprocessor.feature_names == ("age",)


def test_a_file_is_read_as_a_spreadsheet_writes_it(tmp_path):
    """Byte order mark, semicolons, decimal commas, quoted names with spaces, a separator at line ends, empty rows below."""
    text = '\ufeff"age";"h ";y;\r\n' + "61,5; north;no;\r\n50,25;south;yes;\r\n" * 4 + ";;;\r\n;;;\r\n\r\n"
    pool = TableFile(write(tmp_path, text), "y", "h", decimal=",").load()
    assert pool.preprocessor.feature_names == ("age",)
    assert pool.columns["h"].tolist() == ["north", "south"] * 4
    assert pool.train.x[:2, 0].tolist() == [61.5, 50.25]


def test_names_of_sites_and_groups_that_look_like_numbers_stay_apart(tmp_path):
    text = "age,ward,patient,y\n" + "61.5,010,007,no\n50,10,7,yes\n55,3.0,7.0,no\n" * 4
    source = TableFile(write(tmp_path, text), "y", "ward", group="patient")
    pool = source.load()
    assert pool.columns["ward"].tolist() == ["010", "10", "3"] * 4
    assert pool.columns["patient"].tolist() == ["007", "7", "7"] * 4


def test_the_encoding_of_a_file_can_be_given(tmp_path):
    path = write(tmp_path, "größe,h,y\n1,x,0\n2,x,1\n", encoding="latin-1")
    with pytest.raises(UserError, match=r"cannot be read as text in utf-8 .*encoding='cp1252'"):
        TableFile(path, "y", "h").load()
    assert TableFile(path, "y", "h", encoding="latin-1").load().preprocessor.feature_names == ("größe",)
    text = "size,h,y\n1,zürich,0\n2,genf,1\n"
    path = write(tmp_path, "size,h,y\n" + "3,genf,1\n" * 2000 + text[9:], encoding="latin-1")
    with pytest.raises(UserError, match=r"column 'h' of .* has texts that are not in utf-8; give encoding='cp1252'"):
        TableFile(path, "y", None).load()
    with pytest.raises(UserError, match=r"cannot be read as CSV .*invalid UTF8 data\); give encoding='cp1252'"):
        TableFile(path, "y", "h").load()
    path = write(tmp_path, text, encoding="utf-16")
    with pytest.raises(UserError, match="encoding='utf-16'"):
        TableFile(path, "y", "h").load()
    assert TableFile(path, "y", "h", encoding="utf-16").load().columns["h"].tolist() == ["zürich", "genf"]


@pytest.mark.parametrize("text", ["cost k€,h,y\n1,x,0\n2,x,1\n", "size,h,y\n1,5–9,0\n2,5–9,1\n"])
def test_a_file_of_windows_read_as_latin_1_makes_no_control_characters(tmp_path, text):
    path = write(tmp_path, text, encoding="cp1252")
    with pytest.raises(UserError, match=r"control characters; give encoding='cp1252'"):
        TableFile(path, "y", "h", encoding="latin-1").load()
    with pytest.raises(UserError, match=r"give encoding='cp1252'"):
        TableFile(path, "y", "h").load()
    assert TableFile(path, "y", "h", encoding="cp1252").load().preprocessor.feature_names == (text.split(",")[0],)


def test_an_identifier_and_copies_are_told(tmp_path):
    data = frame().drop(columns=["patient", "cost", "lab"])
    with pytest.warns(UserWarning, match=r"column 'visit_id' looks like an identifier .*drop='visit_id'"):
        TableFile(write(tmp_path, data.assign(visit_id=range(80))), "ill", "hospital").load()
    with pytest.warns(UserWarning, match=r"column 'mark' has numbers of more than 15 digits.*group='mark'"):
        TableFile(write(tmp_path, data.assign(mark=[2**60 + k for k in range(80)])), "ill", "hospital").load()
    copied = pd.concat(
        [data.assign(lab=np.arange(80) / 2), data.assign(lab=np.arange(80) / 2, hospital="south").head(3)]
    )
    equal = "3 of 83 rows are equal to other rows in all columns but hospital"
    with pytest.warns(UserWarning, match=rf"{equal} \(rows 1 and 81\): copies\?"):
        TableFile(write(tmp_path, copied), "ill", "hospital").load()
    with pytest.warns(UserWarning, match=rf"{equal} \(df.iloc\[0\] and df.iloc\[80\]\): copies\?"):
        pf.data.split_table(copied, "ill", "hospital")
    numbered = copied.assign(nr=np.random.default_rng(0).permutation(83) / 2)
    with pytest.warns(UserWarning, match=rf"{equal}, nr \(rows 1 and 81\): copies\?"):
        TableFile(write(tmp_path, numbered), "ill", "hospital", drop="nr").load()
    unlabeled = pd.concat([copied.head(1).assign(ill=None, lab=77.0), copied])
    with pytest.warns(UserWarning, match="1 of 84 rows"), pytest.warns(UserWarning, match=f"{equal}: copies"):
        TableFile(write(tmp_path, unlabeled), "ill", "hospital", missing_target="drop").load()


def test_the_task_follows_the_target():
    data = frame().assign(score=[0, 1, 2, 3] * 20, a=[0, 1] * 40, b=[1.0, 0.0] * 40)

    def pool(target, **fields):
        return TableFile(target=target, site="hospital", columns="sex", **fields).build_dataset(_read(data))

    assert (pool("score").task, pool("score").class_names) == ("classification", ("0", "1", "2", "3"))
    assert pool("b").class_names == ("0", "1")
    assert pool("a,b").task == "multilabel"
    assert pool("a,b").train.y.tolist()[:2] == [[0, 1], [1, 0]]
    assert pool("cost").task == pool("score", task="regression").task == "regression"
    assert pool("ill", positive="no").class_names == ("yes", "no")
    with pytest.raises(UserError, match="positive='no' is for two classes, and the task is regression"):
        pool("cost", positive="no")
    with pytest.raises(UserError, match="of several labels must be 0 or 1, and is not in rows 3"):
        pool("a,score", task="multilabel")


def test_preprocessing_is_fitted_on_the_training_rows_of_each_site():
    sites = pf.data.split_table(frame(), "ill", "hospital", drop=["cost", "patient"], val_fraction=0.1)
    clients = sites.build_clients(linear(sites))
    assert [c.id for c in clients] == ["north", "south", "west"]
    for client in clients:
        assert client.train.transform == fit_preprocessor(sites.dataset.preprocessor, [client.train])
        assert client.test.transform == client.val.transform == client.train.transform
        x = client.train.batch(torch.arange(len(client.train)))[0]
        known = x[:, 2] == 0
        assert abs(float(x[known, 0].mean())) < 1e-6
    shared = pf.data.split_table(frame(), "ill", "hospital", drop="cost,patient", preprocess="federated")
    assert len({part.train.transform for part in shared.client_data}) == 1


def test_it_is_fitted_again_where_examples_are_dealt_again():
    sites = pf.data.split_table(frame(), "ill", "hospital", drop=["cost", "patient"])
    clients = sites.build_clients(linear(sites))
    for again in (*resplit_clients(clients, 2), hold_out_missing_validation_sets(clients, seed=1)):
        for client in again:
            assert (
                client.test.transform
                == client.train.transform
                == fit_preprocessor(sites.dataset.preprocessor, [client.train])
            )


def test_numbers_that_float32_cannot_hold_keep_their_digits():
    data = frame().assign(taken=1e9 + np.arange(80) * 0.5)
    sites = pf.data.split_table(data, "ill", "hospital", columns="taken")
    assert sites.dataset.train.x.dtype == torch.float64
    x = sites.client_data[0].train.batch(torch.arange(5))[0]
    assert x.dtype == torch.float32
    assert len(x.unique()) == 5
    assert pf.data.split_table(data, "ill", "hospital", columns="age").dataset.train.x.dtype == torch.float32


def sets_of(clients, column="patient"):
    """patient -> the kinds of sets that it is in."""
    found = {}
    for client in clients:
        for kind in ("train", "val", "test"):
            part = getattr(client, kind)
            for value in () if part is None else part.column(column):
                found.setdefault(value, set()).add(kind)
    return found


def test_a_group_is_never_in_two_sets_even_of_two_sites():
    data = frame(200)
    sites = pf.data.split_table(data, "ill", "hospital", group="patient", drop="cost", val_fraction=0.2)
    clients = sites.build_clients(linear(sites))
    shared = data.groupby("patient").hospital.nunique()
    assert (shared > 1).sum() > 10
    assert "patient" not in sites.feature_names
    bare = [pf.Client(c.id, c.model, c.train, c.test) for c in clients]
    for again in (clients, *resplit_clients(clients, 3), hold_out_missing_validation_sets(bare, seed=0)):
        assert all(len(kinds) == 1 for kinds in sets_of(again).values())
        assert all(len(c.train) and len(c.val) and len(c.test) for c in again)
    ungrouped = pf.data.split_table(data, "ill", "hospital", drop="cost,patient", val_fraction=0.2)
    without = [(len(p.train), len(p.test)) for p in ungrouped.client_data]
    assert all(
        abs(len(p.test) - test) <= 0.2 * (train + test)
        for p, (train, test) in zip(sites.client_data, without, strict=True)
    )
    pool = TableFile(target="ill", group="patient", site="hospital").build_dataset(_read(data))
    with pytest.raises(UserError, match="examples_per_client=5 draws single examples, which a group does not allow"):
        make_clients(pool, Split(examples_per_client=5), Natural("hospital"), 0)


def test_networks_by_the_names_of_sites():
    sites = pf.data.split_table(frame(), "ill", "hospital", drop=["cost", "patient"])
    networks = {name: linear(sites) for name in ("west", "north", "south")}
    assert all(client.model is networks[client.id] for client in sites.build_clients(networks))
    with pytest.raises(UserError, match="model gives no network for 'west'; it names north, south"):
        sites.build_clients({name: networks[name] for name in ("north", "south")})
    with pytest.raises(UserError, match="names a network for 'nort', which is not a client; did you mean north"):
        sites.build_clients({**networks, "nort": networks["north"]})


def test_a_run_predicts_for_raw_rows_as_it_evaluated():
    data = frame()
    sites = pf.data.split_table(data, "ill", "hospital", drop=["cost", "patient"])
    run = pf.federate(sites.build_clients(linear(sites)), pf.algorithms.Local(lr=0.5), rounds=5, workers=0)
    rows = data.iloc[sites.client_data[0].rows.test]
    outputs = run.predictions("north").outputs
    columns = ["ward", "sex", "lab", "age"]
    assert torch.equal(run.predict("north", rows), outputs)
    assert torch.equal(run.predict("north", rows[columns].to_dict("list")), outputs)
    with pytest.raises(UserError, match="features: the table has no column 'sex'"):
        run.predict("north", rows.drop(columns="sex"))


@pytest.mark.filterwarnings("ignore:column 'age' nearly is the target 'cost':UserWarning")  # as these rows are made
def test_regression_is_learned_and_predicted_in_its_unit():
    data = frame(200)
    sites = pf.data.split_table(data, "cost", "hospital", columns="age")
    method = pf.algorithms.FedAvg(lr=0.1, local_epochs=3, batch_size=16)
    run = pf.federate(sites.build_clients(linear(sites)), method, rounds=10, workers=0)
    part = sites.client_data[0]
    rows = data.iloc[part.rows.test]
    known = rows[rows.age.notna()]
    error = run.predict("north", known)[:, 0].numpy() - known.cost.to_numpy()
    assert np.sqrt((error**2).mean()) < 0.5 * data.cost.std()  # of the mean it is 1
    assert abs(float(part.train.labels.mean())) < 0.5
    assert isinstance(part.train.transform, TablePreprocessor)


def test_a_frame_that_is_none_is_refused():
    with pytest.raises(UserError, match=r"a table must be a pandas frame, a mapping .*, got int"):
        pf.data.split_table(5, "a", "b")
    with pytest.raises(UserError, match="a column of the frame is called 0; names must be texts"):
        pf.data.split_table(pd.DataFrame([[1, 2]]), "a", "b")
    with pytest.raises(UserError, match=re.escape("cannot be read as a table")):
        pf.data.split_table(frame().assign(sex=[1, "f"] * 40), "ill", "hospital")
    with pytest.raises(UserError, match="table has no option 'gruop'; did you mean group"):
        pf.data.split_table(frame(), "ill", "hospital", gruop="patient")


def test_a_group_must_be_a_column():
    x, y = torch.ones(2, 1), torch.tensor([0, 1])
    with pytest.raises(UserError, match="group='patient' is not a column of the examples"):
        pf.Examples(x, y, columns={"sex": ["f", "m"]}, group="patient")


def test_public_rows_are_prepared_as_clients_are_after_each_dealing():
    sites = pf.data.split_table(
        frame(), "ill", "hospital", drop=["cost", "patient"], preprocess="federated", public_fraction=0.2
    )
    clients = sites.build_clients(linear(sites))
    assert sites.public.transform == clients[0].train.transform
    for again in (*resplit_clients(clients, 3), hold_out_missing_validation_sets(clients, seed=1)):
        now = apply_common_preprocessing_to_public(sites.public, again)
        assert now.transform == again[0].train.transform
        assert now.transform != sites.public.transform
    bare = Examples(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
    assert apply_common_preprocessing_to_public(bare, clients) is bare
    assert apply_common_preprocessing_to_public(None, clients) is None
