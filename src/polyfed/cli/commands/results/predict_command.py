"""Implements `polyfed predict`, which predicts the rows of a table file with trained networks."""

from pathlib import Path
from shlex import quote
from typing import Any, TypedDict

from polyfed.cli.commands.argv import CommandParser, check_is_new_file, expand_optional_path
from polyfed.cli.commands.options.table_checks import check_prediction, check_table_exists
from polyfed.cli.commands.results.network_of_answer import check_is_run_of_client
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import expand_user_path
from polyfed.simulation.storage.directory import check_directory_exists

_SHOWN = 10


def predict_command(argv: list[str]) -> None:
    """Parses `polyfed predict`, and predicts a table's rows with trained networks."""
    parser = CommandParser(
        "polyfed predict DIR FILE [--client ID] [--out FILE.csv] [--json]",
        "Predicts new rows, each with the network of its site. DIR is the directory of a run on a table (a CSV or Parquet "
        "file, or heart), or a folder of polyfed export. FILE is a CSV or Parquet file with the columns of the run, as raw "
        "as they were there; the network's preprocessing is applied. The data of the run are not needed. For images, texts "
        "and other inputs: run.predict(client, inputs) in Python.",
    )
    parser.add_option(
        "--client", "ID", "client whose network predicts all rows; needed where FILE has no column of sites"
    )
    parser.add_option("--out", "FILE.csv", "write all rows, in their order; without it the first are printed")
    parser.add_flag("--json", "print all rows as JSON (docs/json.md)")
    options, (folder, file) = parser.parse_options_and_words(argv, "a run directory and a CSV or Parquet file", 2)
    if options.json and options.out is not None:
        raise UserError("--json prints all rows; give it or --out, not both")
    out = expand_optional_path(options.out, "--out")
    predict_file(expand_user_path(folder), options.client, file, out, as_json=options.json)


class PredictedRows(TypedDict):
    """Describes what `polyfed predict --json` prints."""

    format: int
    directory: str
    client: str | None
    """As it was given; null where each row has the network of its site, or the directory has one network."""
    file: str
    predictions: list[dict[str, Any]]
    """Holds `row`, from 1, `predicted`, and what else the task has, such as `probability of yes`, of each row."""


def predict_file(folder: Path, client: str | None, file: str, out: Path | None, *, as_json: bool = False) -> None:
    """Predicts all rows of the table `file`, and writes them to the CSV file `out`.

    Without `out` it prints the predictions for the first rows, or for all as JSON.

    Raises:
        UserError: there is no such model, the file cannot be read, or `out` exists.
    """
    check_is_new_file(out)
    check_directory_exists(folder)
    check_table_exists(file)
    words = f" --client {quote(client)}" if client is not None else ""
    check_is_run_of_client(folder, client, f"polyfed predict {{run}} {quote(file)}{words}")
    if not any((folder / name).exists() for name in ("signature.json", "config.yaml")):
        raise UserError(
            f"cannot read {folder}: it is neither a run directory (config.yaml) nor a folder of polyfed export"
        )
    check_prediction(folder, client, file)
    # imported late, as torch is
    import pyarrow
    import pyarrow.csv
    from rich.console import Console

    from polyfed.cli.commands.terminal import PlainTable, print_json, print_line
    from polyfed.core.io.atomic_files import open_atomic_file
    from polyfed.core.io.text.terminal_text import escape_spreadsheet_formula
    from polyfed.report.export.folder import ExportedModel, is_exported_folder
    from polyfed.simulation.results.saved_model import predict_saved_rows

    if is_exported_folder(folder):
        if client is not None:
            raise UserError(f"{folder} is the exported network of one client; leave --client {client} out")
        exported = ExportedModel(folder)
        predictions = exported.predict(exported.prepared.read(file))
    else:
        predictions = predict_saved_rows(folder, file, client)
    num_rows = len(next(iter(predictions.values())))
    columns = {"row": list(range(1, num_rows + 1)), **predictions}
    console = Console()
    if as_json:
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        content: PredictedRows = {
            "format": 1, "directory": str(folder), "client": client, "file": file, "predictions": rows
        }  # fmt: skip
        print_json(content)
        return
    if out is not None:
        cells = [
            [escape_spreadsheet_formula(v) if isinstance(v, str) else v for v in column] for column in columns.values()
        ]
        with open_atomic_file(out) as stream:
            pyarrow.csv.write_csv(
                pyarrow.table(cells, names=[escape_spreadsheet_formula(name) for name in columns]), stream
            )
        print_line(console, f"{num_rows} rows in {out}")
        return
    is_shortened = num_rows > _SHOWN
    output = PlainTable()
    if is_shortened:
        print_line(console, f"the first of {num_rows} rows")
    for name in columns:
        output.add_column(name, justify="left" if name == "predicted" else "right")
    for row in range(min(_SHOWN, num_rows)):
        values = [column[row] for column in columns.values()]
        output.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in values))
    console.print(output)
    if is_shortened:
        print_line(console, "--out FILE.csv writes all")
