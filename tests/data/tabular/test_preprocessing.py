"""Preprocessing of tables: the same numbers as scikit-learn's, by site and from sums over sites."""

import copy
import json

import numpy as np
import pandas as pd
import pytest
import torch

from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.io.values.validation import parse_json
from polyfed.data.partitioning.resplit import refit_preprocessors
from polyfed.data.tabular.fit_preprocessor import fit_preprocessor
from polyfed.data.tabular.preprocessing import Column, TablePreprocessor, encode_table, preprocessor_from_json
from polyfed.data.tabular.table_reader import read_table

COLUMNS = (
    Column("age", missing=True),
    Column("sex", ("f", "m"), True),
    Column("dose"),
    Column("stage", ("1", "2", "3")),
)
LIKE = TablePreprocessor(COLUMNS, (0.0, 0.0), (1.0, 1.0))


def rows(number=60, seed=0):
    draw = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "age": np.where(draw.random(number) < 0.2, np.nan, draw.normal(60, 12, number)),
            "sex": draw.choice(["f", "m", None], number),
            "dose": draw.integers(0, 9, number),
            "stage": draw.integers(1, 4, number),
        }
    )


def stored(frame):
    x = encode_table(read_table(frame), COLUMNS)
    return Examples(x, torch.zeros(len(x), dtype=torch.int64))


@pytest.mark.slow  # importing scikit-learn's parts takes longer than the test
def test_the_inputs_are_those_of_scikit_learn():
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    train, test = rows(60, 0), rows(30, 1)
    reference = ColumnTransformer(
        [
            ("values", make_pipeline(StandardScaler(), SimpleImputer(strategy="mean")), ["age", "dose"]),
            ("absent", SimpleImputer(strategy="constant", add_indicator=True), ["age"]),
            ("sex", OneHotEncoder(categories=[["f", "m", "none"]], handle_unknown="ignore"), ["sex"]),
            ("stage", OneHotEncoder(categories=[[1, 2, 3]], handle_unknown="ignore"), ["stage"]),
        ],
        sparse_threshold=0,
    )
    reference.fit(train.fillna({"sex": "none"}))
    expected = np.delete(
        reference.transform(test.fillna({"sex": "none"})), 2, axis=1
    )  # the imputed value beside its mark
    found = fit_preprocessor(LIKE, [stored(train)])(stored(test).x)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    assert len(LIKE.feature_names) == expected.shape[1]


def test_sums_over_sites_give_what_all_rows_in_one_place_give():
    parts = [rows(size, seed) for seed, size in enumerate((5, 40, 17))]
    together = fit_preprocessor(LIKE, [stored(part) for part in parts], "federated")
    alone = fit_preprocessor(LIKE, [stored(pd.concat(parts))])
    np.testing.assert_allclose(together.mean, alone.mean, rtol=1e-12)
    np.testing.assert_allclose(together.spread, alone.spread, rtol=1e-12)


def test_a_column_without_values_or_spread_at_a_site_is_0_in_all_rows():
    frame = rows(20).assign(age=np.nan, dose=7)
    own = fit_preprocessor(LIKE, [stored(frame)])
    assert own.mean == (0.0, 7.0)
    assert own.spread == (0.0, 0.0)
    for later in (frame, frame.assign(dose=1e6), frame.assign(age=81.0)):
        for x in (stored(later).x, stored(later).x.float()):
            assert own(x)[:, :2].abs().max() == 0
            assert torch.isfinite(own(x)).all()
    assert own.changed_constant_columns(stored(frame).x) == ()
    assert own.changed_constant_columns(stored(frame.assign(dose=8, age=81.0)).x) == ("age", "dose")
    assert preprocessor_from_json(json.loads(json.dumps(own.to_json_dict()))) == own


def test_unknown_categories_give_zeros_and_are_told():
    ready = fit_preprocessor(LIKE, [stored(rows())])
    with pytest.warns(UserWarning, match="column 'stage' has '4', which the table of the run did not have"):
        x = ready.encode(
            [{"age": 50, "sex": "f", "dose": 1, "stage": 4}, {"age": 50, "sex": "f", "dose": 1, "stage": 3}]
        )
    assert ready(x)[:, -3:].tolist() == [[0, 0, 0], [0, 0, 1]]
    with pytest.raises(
        UserError, match="column 'age' must hold numbers, as it did in the table of the run, got string"
    ):
        ready.encode({"age": ["old"], "sex": ["f"], "dose": [1], "stage": [1]})
    with pytest.raises(UserError, match=r"a number in another form in row 1; write numbers as in 1234\.5") as refusal:
        ready.encode({"age": ["53,300.00"], "sex": ["f"], "dose": [1], "stage": [1]})
    assert "53" not in str(refusal.value)  # a measurement of a patient


def test_it_can_be_saved_as_json_and_copied():
    ready = fit_preprocessor(LIKE, [stored(rows())])
    x = stored(rows(4, 3)).x
    expected = ready(x)
    for other in (preprocessor_from_json(parse_json(json.dumps(ready.to_json_dict()))), copy.deepcopy(ready)):
        assert other == ready
        assert torch.equal(other(x), expected)
    for broken in ({}, {**ready.to_json_dict(), "columns": [{"name": 3}]}, {**ready.to_json_dict(), "mean": [1.0]}, 7):
        with pytest.raises(UserError):
            preprocessor_from_json(broken)


def test_fitted_again_follows_the_training_rows_of_its_scope():
    site = fit_preprocessor(LIKE, [stored(rows())])
    a, b = stored(rows(30, 5)), stored(rows(10, 6))

    def with_transform(examples, transform):
        return Examples(examples.x, examples.y, transform=transform)

    own = refit_preprocessors(
        {"a": with_transform(a, site), "b": with_transform(b, site), "c": Examples(torch.ones(2), torch.ones(2))}
    )
    assert own == {"a": fit_preprocessor(LIKE, [a]), "b": fit_preprocessor(LIKE, [b])}
    shared = fit_preprocessor(LIKE, [a], "federated")
    both = refit_preprocessors({"a": with_transform(a, shared), "b": with_transform(b, shared)})
    assert both["a"] == both["b"] == fit_preprocessor(LIKE, [a, b], "federated")
