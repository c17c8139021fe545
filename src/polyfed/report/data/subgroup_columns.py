"""Refuses columns for scores of subgroups that the test examples do not have, before torch is imported."""

from collections.abc import Collection, Sequence
from pathlib import Path

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.atomic_files import open_file
from polyfed.core.io.values.validation import DAMAGED_FILE_ERRORS, parse_json


def check_subgroup_column(column: str, columns: Collection[str]) -> None:
    """Raises a `UserError` unless `column` is one of the test examples' `columns`."""
    if column not in columns:
        hint = did_you_mean(column, columns) if columns else "the predictions have none other than targets and outputs"
        raise UserError(
            f"--subgroup {column!r}: the test examples have no such column; {hint}. Name it before training "
            f"(--data.subgroups {column}), a number with its limits (--data.subgroups age=50:65)"
        )


def check_columns_of_predictions(folders: Sequence[Path], subgroups: Sequence[str]) -> None:
    """Raises a `UserError` if no predictions in the folders have one of the columns; reads the files' headers alone.

    Damaged files and folders without predictions are left to the page, which says what is wrong with them.
    """
    import pyarrow.parquet

    for folder in folders:
        headers = []
        for path in folder.glob("**/predictions/*.parquet"):
            try:
                with open_file(path) as file:
                    metadata = pyarrow.parquet.read_schema(file).metadata or {}
                headers.append(parse_json(metadata.get(b"polyfed", b"{}")))
            except (OSError, *DAMAGED_FILE_ERRORS):
                return
        for column in subgroups if headers else ():
            check_subgroup_column(column, sorted({name for header in headers for name in header["columns"].values()}))
