"""Networks of a run directory that predict rows of a table."""

import pytest
from torch import nn

from polyfed.core.errors import UserError
from polyfed.data.tabular.preprocessing import Column, TablePreprocessor
from polyfed.data.tabular.table_reader import read_table
from polyfed.simulation.results.saved_model import SavedModel


def test_rows_whose_prediction_is_no_number_are_named():
    prepared = TablePreprocessor((Column("age"),), (50.0,), (1e-3,), classes=("no", "yes"))
    model = SavedModel(nn.Linear(1, 2), prepared, "north")
    assert len(model.predict(read_table({"age": [50.0, 60.0]}))["predicted"]) == 2
    with pytest.raises(UserError, match="the network's outputs are NaN or infinite for row 2: the values"):
        model.predict(read_table({"age": [50.0, 3e38]}))
