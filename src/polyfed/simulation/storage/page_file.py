"""Reaches the package that writes HTML pages, which imports this one: in this place alone, by name and late."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyfed.core.algorithm import Client


def write_page_of(folder: Path | None, out: str | Path | None, images_of: "Sequence[Client] | None" = None) -> Path:
    """Writes a directory's page by `polyfed.report.page_file.write_report`; returns its path.

    Raises:
        UserError: `folder` is None.

    Args:
        folder: of the run or comparison; None if it was kept in memory.
        out: the page; None for `report.html` in `folder`.
        images_of: clients whose test images of segmentations are on the page; None for no images.
    """
    page: Path = import_module("polyfed.report.page_file").write_report(folder, out, images_of=images_of)
    return page
