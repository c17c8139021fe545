"""What people pass by mistake is taken where its meaning is plain, and else refused with what to give."""

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.evaluation.metrics import resolve_metrics
from polyfed.testing import small_clients

ROWS = [{"age": 40.0 + k, "sex": "fm"[k % 2], "ill": int(k % 3 == 0), "hospital": "ab"[k % 2]} for k in range(40)]


def sites():
    return pf.data.split_table(ROWS, "ill", "hospital")


def test_metrics_and_seeds_may_be_given_one_by_one():
    for names in (iter(["auc", "brier"]), np.array(["auc", "brier"]), {"auc": 0, "brier": 0}):
        assert [metric.name for metric in resolve_metrics(names, "classification")] == ["auc", "brier"]
    result = pf.compare(
        small_clients(), (name for name in ["fedprox"]), rounds=1, seeds=(seed for seed in [3, 5]), tune="none",
        references=False, quiet=True, engine="inprocess", parallel=1,
    )  # fmt: skip
    assert result.results["seeds"] == [3, 5]


def test_a_metric_that_fails_says_what_it_gets():
    score = pytest.importorskip("sklearn.metrics").accuracy_score
    with pytest.raises(pf.ClientError, match=r"'accuracy_score' failed on outputs of shape .*outputs\.argmax\(1\)"):
        pf.federate(small_clients(), "fedavg", rounds=1, metrics=[score], quiet=True, engine="inprocess")


def test_one_row_is_predicted_as_a_mapping_or_a_series():
    tables = sites()
    clients = tables.build_clients(lambda: nn.Linear(tables.num_features, tables.num_outputs))
    run = pf.federate(clients, "fedavg", rounds=1, quiet=True, engine="inprocess")
    row = {"age": 41.0, "sex": "f"}
    expected = run.predict("a", [row])
    assert torch.equal(run.predict("a", row), expected)
    assert torch.equal(run.predict("a", pytest.importorskip("pandas").Series(row)), expected)


def test_columns_are_named_by_texts():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(ROWS)
    for target, site in ((frame["ill"], "hospital"), ("ill", frame["hospital"])):
        with pytest.raises(pf.UserError, match=r"target and site must be names of columns, .*got a Series"):
            pf.data.split_table(frame, target, site)
    with pytest.raises(pf.UserError, match="did you mean val_fraction"):
        pf.data.split_table(frame, "ill", "hospital", val_frac=0.1)


def test_a_table_in_place_of_clients_says_how_to_make_them():
    with pytest.raises(pf.UserError, match=r"got ClientTables; give its clients, \.build_clients\(network\)"):
        pf.federate(sites(), "fedavg", rounds=1)
    frame = pytest.importorskip("pandas").DataFrame(ROWS)
    with pytest.raises(pf.UserError, match=r"pf\.data\.split_table\(rows, target, site\), got DataFrame"):
        pf.look(frame)


def test_an_estimator_in_place_of_a_network_says_what_to_give():
    estimator = pytest.importorskip("sklearn.linear_model").LogisticRegression()
    with pytest.raises(
        pf.UserError, match=r"got LogisticRegression; give a function that returns a new torch\.nn\.Module"
    ):
        pf.Client("north", estimator, (torch.zeros(4, 2), [0, 1, 0, 1]), (torch.ones(4, 2), [0, 1, 0, 1]))


def test_whole_numbers_as_inputs_say_how_to_convert_arrays_too():
    data, others = [(np.arange(40).reshape(10, 4) + k, [0, 1] * 5) for k in (0, 1)]
    with pytest.raises(pf.UserError, match=r"x\.float\(\) of a tensor or x\.astype\('float32'\) of an array$"):
        pf.federate([pf.Client("a", lambda: nn.Linear(4, 2), data, others)], "fedavg", rounds=1, quiet=True)
