"""A look at clients whose inputs are pandas frames calls columns by their names."""

import pandas as pd
import pytest

import polyfed as pf

NUMBERS = pd.DataFrame({"age": [50, 60, 70], "lab": [1, 2, 4]})


@pytest.mark.parametrize(
    ("inputs", "names"), [(NUMBERS, ["age", "lab"]), ({"blood": NUMBERS}, ["blood: age", "blood: lab"])]
)
def test_columns_of_frames_keep_their_names(inputs, names):
    client = pf.Client("a", None, (inputs, [0, 1, 0]), (inputs, [0, 1, 0]))
    assert [column.name for column in pf.look([client]).columns] == [*names, "class"]
