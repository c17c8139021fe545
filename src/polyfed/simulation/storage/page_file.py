"""Reaches the package that writes HTML pages, which imports this one: in this place alone, by name and late."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyfed.core.algorithm import Client


def write_page_of(result: Any, out: str | Path | None, images_of: "Sequence[Client] | None" = None) -> Path:
    """Writes the page of a run or comparison by `polyfed.report.page_file.write_report`; returns its path.

    Args:
        result: the run or comparison.
        out: the page; None for `report.html` in its directory.
        images_of: clients whose test images of segmentations are on the page; None for no images.

    Raises:
        UserError: `out` is None for a result that was kept in memory.
    """
    page: Path = import_module("polyfed.report.page_file").write_report(result, out, images_of=images_of)
    return page
