"""What a table lacks is named all at once."""

import pytest

from polyfed.core.errors import UserError
from polyfed.core.examples.text_columns import check_names_of_columns


@pytest.mark.parametrize(
    ("header", "names", "sentence"),
    [
        (["age", "", "lab"], ["labb"], "target: the table has no column 'labb'; did you mean lab? Choices: age, lab"),
        (["age", "b"], ["x", "age", "y", "x"], "target: the table has no column 'x' (nor 'y'); choices: age, b"),
        (["age", "lab"], [*"abcdefg"], "no column 'a' (nor 'b', 'c', 'd', 'e', 'f', ...); choices: age, lab"),
        (["Export of May"], ["age"], "it has 'Export of May' alone; the first line of a file must name the columns"),
        ([], ["ill"], "no column 'ill'; its first line must name the columns, and it is empty"),
    ],
)
def test_columns_that_a_table_lacks_are_named_together(header, names, sentence):
    with pytest.raises(UserError) as error:
        check_names_of_columns(header, names, "target")
    assert sentence in str(error.value)


def test_columns_that_are_there_pass():
    check_names_of_columns(["age", "lab"], ["lab", "age", "lab"], "features")
