"""`polyfed predict`: what a client's network of a run says of the rows of a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.cli.commands.argv import has_help_flag, help_text, pop_option
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import expand_user_path

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 10


def predict_command(argv: list[str]) -> None:
    """usage: polyfed predict RUN|FOLDER FILE [--client ID] [--out FILE.csv]

    What the network of a client says of new rows, after a run whose data were a table (polyfed run --data table), or from a
    FOLDER of polyfed export. FILE is a CSV or Parquet file with the columns of the run, as raw as they were there; the
    preprocessing that belongs to the network is applied. The data of the run are not needed.

      --client ID     whose network (needed if the run has several)
      --out FILE.csv  all rows, in their order; without it the first are printed
    """
    if has_help_flag(argv):
        print(help_text(predict_command))
        return
    client, out = pop_option(argv, "--client"), pop_option(argv, "--out")
    if unknown := [word for word in argv if word.startswith("-")]:
        raise UserError(f"unknown option {unknown[0]}; polyfed predict has --client and --out")
    if len(argv) != 2:
        raise UserError(
            f"polyfed predict takes a run directory and a CSV or Parquet file, got {' and '.join(argv) or 'none'}"
        )
    predict_file(expand_user_path(argv[0]), client, argv[1], None if out is None else expand_user_path(out, "--out"))


def predict_file(
    folder: Path, client: str | None, file: str, out: Path | None, console: "Console | None" = None
) -> None:
    """Writes a CSV file with a line for each row of `file`, or prints the first rows.

    Raises:
        UserError: there is no such model, the file cannot be read, or `out` is there already.
    """
    if out is not None and out.exists():
        raise UserError(f"{out} exists; choose another --out")
    # imported late, as torch is
    import pyarrow
    import pyarrow.csv
    from rich.console import Console

    from polyfed.cli.commands.terminal import PlainTable, print_line
    from polyfed.core.io.atomic_files import open_atomic_file
    from polyfed.core.io.terminal_text import escape_spreadsheet_formula
    from polyfed.report.export.folder import ExportedModel, is_exported_folder
    from polyfed.simulation.results.saved_model import SavedModel, load_saved_model
    from polyfed.simulation.storage.directory import read_config

    model: ExportedModel | SavedModel
    if is_exported_folder(folder):
        if client is not None:
            raise UserError(f"{folder} is the exported network of one client; leave --client {client} out")
        exported_model = model = ExportedModel(folder)
        table_options = exported_model.reading
    else:
        model = load_saved_model(folder, client)
        data = read_config(folder).get("data")
        table_options = data if isinstance(data, dict) and data.get("name") == "table" else {}
    table = _read_rows(file, table_options)
    columns = {"row": list(range(1, table.num_rows + 1)), **model.predict(table)}
    console = console or Console()
    if out is not None:
        cells = [
            [escape_spreadsheet_formula(v) if isinstance(v, str) else v for v in column] for column in columns.values()
        ]
        with open_atomic_file(out) as stream:
            pyarrow.csv.write_csv(
                pyarrow.table(cells, names=[escape_spreadsheet_formula(name) for name in columns]), stream
            )
        print_line(console, f"{table.num_rows} rows in {out}")
        return
    is_shortened = table.num_rows > _SHOWN
    shown = PlainTable(title=f"the first of {table.num_rows} rows" if is_shortened else None, title_justify="left")
    for name in columns:
        shown.add_column(name, justify="left" if name == "predicted" else "right")
    for row in range(min(_SHOWN, table.num_rows)):
        values = [column[row] for column in columns.values()]
        shown.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in values))
    console.print(shown)
    if is_shortened:
        print_line(console, "--out FILE.csv writes all")


def _read_rows(file: str, table_options: dict[str, Any]) -> Any:
    """The file, read as that of the run was."""
    from polyfed.core.io.validation import build_dataclass
    from polyfed.data.sources.table_file import TableFile, parse_names
    from polyfed.data.tabular.table_reader import read_table

    option_names = {"missing", "delimiter", "decimal", "encoding"}
    source = build_dataclass(
        TableFile, {name: value for name, value in table_options.items() if name in option_names}, "data"
    )
    return read_table(
        file,
        missing=parse_names(source.missing),
        delimiter=source.delimiter,
        decimal=source.decimal,
        encoding=source.encoding,
    )
