"""`polyfed predict`: what a client's network of a run says of the rows of a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.cli.commands.words import asked_for_help, help_of, take
from polyfed.core.errors import UserError
from polyfed.core.files import user_path

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 10


def command(words: list[str]) -> None:
    """usage: polyfed predict RUN|FOLDER FILE [--client ID] [--out FILE.csv]

    What the network of a client says of new rows, after a run whose data were a table (polyfed run --data table), or from a
    FOLDER of polyfed export. FILE is a CSV or Parquet file with the columns of the run, as raw as they were there; the
    preprocessing that belongs to the network is applied. The data of the run are not needed.

      --client ID     whose network (needed if the run has several)
      --out FILE.csv  all rows, in their order; without it the first are printed
    """
    if asked_for_help(words):
        print(help_of(command))
        return
    client, out = take(words, "--client"), take(words, "--out")
    if unknown := [word for word in words if word.startswith("-")]:
        raise UserError(f"unknown option {unknown[0]}; polyfed predict has --client and --out")
    if len(words) != 2:
        raise UserError(
            f"polyfed predict takes a run directory and a CSV or Parquet file, got {' and '.join(words) or 'none'}"
        )
    run(user_path(words[0]), client, words[1], None if out is None else user_path(out, "--out"))


def run(folder: Path, client: str | None, file: str, out: Path | None, console: "Console | None" = None) -> None:
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

    from polyfed.cli.commands.terminal import Table, say
    from polyfed.core.files import replaced
    from polyfed.core.text import defuse
    from polyfed.report.export.folder import Opened, is_exported
    from polyfed.simulation.kept import KeptModel, load_model
    from polyfed.simulation.runs.directory import read_config

    model: Opened | KeptModel
    if is_exported(folder):
        if client is not None:
            raise UserError(f"{folder} is the exported network of one client; leave --client {client} out")
        opened = model = Opened(folder)
        reading = opened.reading
    else:
        model = load_model(folder, client)
        data = read_config(folder).get("data")
        reading = data if isinstance(data, dict) and data.get("name") == "table" else {}
    table = _read(file, reading)
    found = {"row": list(range(1, table.num_rows + 1)), **model.predict(table)}
    console = console or Console()
    if out is not None:
        cells = [[defuse(v) if isinstance(v, str) else v for v in column] for column in found.values()]
        with replaced(out) as stream:
            pyarrow.csv.write_csv(pyarrow.table(cells, names=[defuse(name) for name in found]), stream)
        say(console, f"{table.num_rows} rows in {out}")
        return
    many = table.num_rows > _SHOWN
    shown = Table(title=f"the first of {table.num_rows} rows" if many else None, title_justify="left")
    for name in found:
        shown.add_column(name, justify="left" if name == "predicted" else "right")
    for row in range(min(_SHOWN, table.num_rows)):
        values = [column[row] for column in found.values()]
        shown.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in values))
    console.print(shown)
    if many:
        say(console, "--out FILE.csv writes all")


def _read(file: str, reading: dict[str, Any]) -> Any:
    """The file, read as that of the run was."""
    from polyfed.core.typed import made
    from polyfed.data.frames import read_table
    from polyfed.data.tables import TableFile, listed

    known = {"missing", "delimiter", "decimal", "encoding"}
    source = made(TableFile, {name: value for name, value in reading.items() if name in known}, "data")
    return read_table(
        file,
        missing=listed(source.missing),
        delimiter=source.delimiter,
        decimal=source.decimal,
        encoding=source.encoding,
    )
