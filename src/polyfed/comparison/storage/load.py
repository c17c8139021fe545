"""Implements `polyfed.load`: reads a finished or unfinished run, or a finished comparison, from its directory."""

from pathlib import Path

from polyfed.comparison.storage.comparison import Comparison
from polyfed.comparison.storage.comparison_directory import DESCRIPTION, load_comparison
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import expand_user_path
from polyfed.core.io.values.keyword_names import suggest_keywords
from polyfed.simulation.results.saved_run import SavedRun, load_run
from polyfed.simulation.storage.directory import check_directory_exists


@suggest_keywords
def load(folder: str | Path) -> Comparison | SavedRun:
    """Reads a `SavedRun` or `Comparison` from its directory, without clients or training.

    Args:
        folder: what `out` was in `federate` or `compare`, or a directory of the command line.

    Returns:
        The `Comparison` that `compare` returned; or, for a run, a `SavedRun` with `table()`, `history`, `report()`, and
        `model` and `predict` where networks are stored.

    Raises:
        UserError: the directory holds neither, a file is damaged, or the comparison is not finished.

    >>> load("no/such/folder")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: no/such/folder does not exist
    """
    path = expand_user_path(folder, "the directory")
    check_directory_exists(path)
    if (path / DESCRIPTION).is_file():
        return load_comparison(path)
    if not (path / "config.yaml").is_file():
        inside = sorted({str(file.parent) for name in (DESCRIPTION, "config.yaml") for file in path.glob(f"*/{name}")})
        hint = f"; it has {', '.join(inside[:5])}" if inside else ""
        if (path / "signature.json").is_file():
            hint = f"; it is an exported network: see its README.md, or polyfed predict {path} FILE.csv"
        raise UserError(f"{path} holds neither a run (config.yaml) nor a comparison ({DESCRIPTION}){hint}")
    return load_run(path)
