"""Writes the HTML page of runs and comparisons, for the command and for Python."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import expand_user_path, write_file_atomically
from polyfed.core.io.text.number_format import join_first_and_count_rest
from polyfed.core.io.values.keyword_names import suggest_keywords
from polyfed.report.data.run_groups import RunGroup, read_run_groups
from polyfed.report.data.run_records import RunRecord
from polyfed.report.page.page import render_page
from polyfed.report.page.panels.method_panels import MethodResult, method_adds_panels
from polyfed.report.page.panels.page_details import collect_page_details
from polyfed.simulation.checks.clients.client_list import list_clients
from polyfed.simulation.storage.directory import check_directory_exists

PAGE = "report.html"
_MAX_PANELS = 12  # clients or layers with panels of one kind, of all runs together


@suggest_keywords
def write_report(
    runs: Any,
    out: str | Path | None = None,
    *,
    subgroups: Sequence[str] = (),
    images_of: Sequence[Client] | None = None,
) -> Path:
    """Writes one HTML page of runs and comparisons, as `polyfed report` does, and returns its path.

    Args:
        runs: a `Run`, `SavedRun`, `Comparison` or directory, or a list of them: methods on the same data are side by side.
        out: the page; None for `report.html` in the first directory. What was kept in memory needs it.
        subgroups: columns of the test examples, such as "sex"; the page has scores by their values.
        images_of: clients whose test images of segmentations are on the page, which are their data; None for no images.

    Raises:
        UserError: a directory holds no run, the page cannot be written, or has no place.

    >>> write_report([])
    Traceback (most recent call last):
    polyfed.core.errors.UserError: give write_report a run, a comparison or a directory, or a list of them
    """
    results = list(runs) if isinstance(runs, list | tuple) else [runs]
    if not results:
        raise UserError("give write_report a run, a comparison or a directory, or a list of them")
    path = None if out is None else expand_user_path(out, "out")
    if path is None and any(getattr(result, "out", "") is None for result in results):
        raise UserError(
            'this was kept in memory; say where the page goes, report("page.html"), or save it, save("DIR")'
        )
    clients = list_clients(images_of) if images_of is not None else []
    with TemporaryDirectory(prefix="polyfed-") as unsaved:
        folders = [_directory_of(result, Path(unsaved) / f"run {k}") for k, result in enumerate(results, start=1)]
        groups, notes = read_run_groups(folders)
        return write_page(
            folders, groups, notes, path, subgroups=subgroups, show_images=bool(clients), images_of=clients
        )


def _directory_of(result: Any, unsaved: Path) -> Path:
    """Returns the directory of a run or comparison; one that was kept in memory is written to `unsaved`."""
    place = getattr(result, "out", result)
    folder = expand_user_path(result.save(unsaved) if place is None else place, "runs")
    check_directory_exists(folder)
    return folder


def write_page(
    folders: Sequence[Path],
    groups: Sequence[RunGroup],
    notes: Sequence[str],
    out: Path | None = None,
    *,
    subgroups: Sequence[str] = (),
    show_images: bool = False,
    images_of: Sequence[Client] = (),
    on_result: Callable[[RunRecord, MethodResult], None] = lambda run, result: None,
) -> Path:
    """Writes the HTML page of groups of comparable runs, and returns its path.

    Args:
        folders: directories of the runs and comparisons.
        groups: the groups of runs in them.
        notes: sentences for the top of the page.
        out: the page; None for `report.html` in the first folder.
        subgroups: columns of the test examples, such as "sex"; the page has scores by their values.
        show_images: whether to show test images of segmentations, which are the clients' data.
        images_of: the clients that they are of, where these were made in Python.
        on_result: called with the run and each result that a method's panel is made from.

    Raises:
        UserError: the test examples have no column of `subgroups`, or the page cannot be written.
    """
    # The page gets fewer clients and layers of each run where many runs have such pictures.
    view_count = sum(method_adds_panels(method.runs[0].method) for run_group in groups for method in run_group.methods)
    max_panels = max(1, _MAX_PANELS // max(1, view_count))
    details = [
        collect_page_details(
            run_group,
            f"v{k}",
            max_panels,
            subgroups=subgroups,
            show_images=show_images,
            images_of=images_of,
            on_result=on_result,
        )
        for k, run_group in enumerate(groups)
    ]
    title = f"polyfed: {join_first_and_count_rest([folder.resolve().name for folder in folders], 3)}"
    page = folders[0] / PAGE if out is None else out
    try:
        write_file_atomically(page, render_page(groups, details, notes, title).encode(), private=out is None)
    except OSError as error:
        raise UserError(
            f"cannot write the page {page} ({error.strerror}); give another out=... (--out FILE.html)"
        ) from error
    return page
