"""Collects what the page shows of runs besides scores, most of it under "Details": class counts, predictions, the
sites' data, and panels of single methods.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from polyfed.comparison.storage.comparison_directory import DESCRIPTION, read_description
from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.tasks.task import DEFAULT_TASK
from polyfed.core.tasks.task_lookup import get_task
from polyfed.data.look.look import look_at_sites
from polyfed.data.partitioning.folds import build_folds, redraw_clients
from polyfed.report.audit.audit_file import read_audit
from polyfed.report.data.predictions import read_group_predictions
from polyfed.report.data.run_groups import RunGroup
from polyfed.report.data.run_records import RunRecord
from polyfed.report.page.panels import update_directions, update_norms
from polyfed.report.page.panels.audit_panel import AUDIT_HEADING, html_audits
from polyfed.report.page.panels.cross_site import CROSS_SITE_HEADING, html_cross_site
from polyfed.report.page.panels.look import LOOK_HEADING, data_warnings, html_look
from polyfed.report.page.panels.method_panels import (
    MethodResult,
    PanelInputs,
    build_method_panels,
    build_segmentation_panel,
    load_participants_offline,
)
from polyfed.report.page.sections import PageDetails
from polyfed.simulation.experiment import Participants
from polyfed.simulation.results.across_sites.cross_site_scores import average_cross_site, read_cross_site
from polyfed.simulation.storage.directory import read_manifest

_NO_CLASSES = "The examples of these sites have no classes to count."


def collect_page_details(
    run_group: RunGroup,
    key: str,
    max_panels: int,
    *,
    subgroups: Sequence[str],
    show_images: bool,
    images_of: Sequence[Client],
    on_result: Callable[[RunRecord, MethodResult], None],
) -> PageDetails:
    """Collects class counts, predictions and methods' panels of a group, of each one's first seed.

    Args:
        run_group: the group.
        key: prefix of ids on the page.
        max_panels: number of clients or layers to show at most.
        subgroups: columns of the test examples by whose values the page has scores.
        show_images: whether to show test images of segmentations.
        images_of: the clients that they are of, where these were made in Python; empty for those of the configuration.
        on_result: called with each result that a method's panel is made from.

    Raises:
        UserError: there are subgroups, and no predictions to divide into them.
    """
    details = _class_counts_and_panels(run_group, key, max_panels, show_images, images_of, on_result)
    return _add_predictions(details, run_group, subgroups)


def _class_counts_and_panels(
    run_group: RunGroup,
    key: str,
    max_panels: int,
    show_images: bool,
    images_of: Sequence[Client],
    on_result: Callable[[RunRecord, MethodResult], None],
) -> PageDetails:
    runs = [method.runs[0] for method in run_group.methods if method.runs[0].folder is not None]
    participants, reason = load_participants_offline(runs[0]) if runs else (None, "")
    shown_participants = _participants_of_comparison(runs[0]) if participants is None and runs else participants
    with_images = _clients_of_first_run(run_group, participants, shown_participants, images_of) if show_images else ()
    method_views: dict[str, dict[str, Markup]] = {}
    for position, method in enumerate(run_group.methods):
        run = method.runs[0]
        if run.folder is None:
            continue
        repeat = "fold 1" if run_group.repeat == "fold" else f"seed {run.seed}"
        panel_name = f"{method.label}, {repeat}" if len(method.runs) > 1 else method.label
        panel_key = f"{key}-{position}"
        panels = {
            update_norms.NORMS_HEADING: update_norms.html_update_norms(run, panel_key),
            update_directions.DIRECTIONS_HEADING: update_directions.html_update_directions(run, panel_key),
        }
        inputs = PanelInputs(run, participants, panel_key, max_panels, on_result)
        panels |= build_method_panels(inputs)
        panels |= build_segmentation_panel(inputs, with_images, reason) if show_images else {}
        for heading, html in panels.items():
            if html:
                method_views.setdefault(heading, {})[panel_name] = html
    panels, warnings = _site_panels(run_group, shown_participants, key)
    if run_group.comparison_results:
        counts = _comparison_class_counts(run_group)
    elif participants is None:
        manifest = read_manifest(runs[0].folder or Path()) if runs else {}
        names = tuple(str(name) for name in manifest.get("class_names") or ())
        counts = PageDetails(class_names=names, class_note=reason)
    elif not participants.classes:
        counts = PageDetails(class_note=_NO_CLASSES)
    else:
        class_counts = {client.id: participants.classes[client.id] for client in participants.clients}
        names = participants.pool.task.count_names(participants.pool.class_names)
        is_single_seed = len(run_group.seeds) == 1
        more = "" if is_single_seed else f"Seed {runs[0].seed}; the others divide the same data in their own draw."
        counts = PageDetails({runs[0].seed: class_counts}, names, more)
    return replace(counts, method_views=method_views, panels=panels, data_warnings=warnings)


def _participants_of_comparison(run: RunRecord) -> Participants | None:
    """Returns the clients of a run's comparison as its first seed divides them; None if not known."""
    for folder in list((run.folder or Path()).parents)[:3]:
        if (folder / DESCRIPTION).is_file():
            description = read_description(folder)
            if (experiment := description.get("experiment")) is not None and description.get("seeds"):
                config = {**experiment["config"], "seed": description["seeds"][0]}
                return load_participants_offline(replace(run, config=config, folder=None))[0]
    return None


def _clients_of_first_run(
    run_group: RunGroup, of_run: Participants | None, of_comparison: Participants | None, images_of: Sequence[Client]
) -> Sequence[Client]:
    """Returns the clients with the test examples of each method's first run; empty if they are not at hand.

    They are those of its configuration, else of the comparison or the caller, in the same folds or splits.
    """
    if of_run is not None and not images_of:
        return of_run.clients
    clients = images_of or (of_comparison.clients if of_comparison is not None else ())
    results = run_group.comparison_results or {}
    folds = build_folds(results.get("folds"))
    num_runs = folds.num_runs if folds is not None else results.get("resplit") or 1
    redrawn = redraw_clients(clients, results.get("resplit"), folds, range(num_runs)) if clients else None
    return redrawn[0] if redrawn else clients


def _site_panels(
    run_group: RunGroup, participants: Participants | None, key: str
) -> tuple[dict[str, Markup], Sequence[str]]:
    """Renders the look at the data, the cross-site scores and the last audits; adds the most serious data warnings."""
    panels, warnings = {}, list[str]()
    matrices = {}
    for method in run_group.methods:
        parts = [read_cross_site(run.folder) for run in method.runs if run.folder is not None]
        if scores := [part for part in parts if part is not None]:
            matrices[method.label] = average_cross_site(scores)
    audits = {
        method.label: audit
        for method in run_group.methods
        if (folder := method.runs[0].folder) is not None and (audit := read_audit(folder)) is not None
    }
    if audits:
        panels[AUDIT_HEADING] = html_audits(audits, f"{key}-audit")
    if matrices:
        panels[CROSS_SITE_HEADING] = html_cross_site(matrices, f"{key}-cross")
    if participants is not None:
        class_names = tuple(map(str, participants.pool.class_names))
        summary = look_at_sites(participants.clients, class_names, hide_small_categories=True)
        is_divided_again = run_group.repeat == "fold" or bool(run_group.comparison_results.get("resplit"))
        panels[LOOK_HEADING] = html_look(summary, f"{key}-look", show_splits=not is_divided_again)
        warnings = data_warnings(summary)
    return panels, warnings


def _comparison_class_counts(run_group: RunGroup) -> PageDetails:
    """Collects the class counts that a finished comparison holds, by seed where seeds differ in their data."""
    results = run_group.comparison_results
    counts_by_seed = {}
    for seed, clients in results.get("data", {}).items():
        if run_group.same_clients and int(seed) != run_group.seeds[0]:  # the same counts for each seed
            continue
        if counts := {client: entry["classes"] for client, entry in clients.items() if entry["classes"]}:
            counts_by_seed[int(seed)] = counts
    if not counts_by_seed:
        return PageDetails(class_note=_NO_CLASSES)
    names = _names_of_counts(results)
    class_count = max(len(counts) for by_client in counts_by_seed.values() for counts in by_client.values())
    names += map(str, range(len(names), class_count))  # clients made in Python have no names of classes
    return PageDetails(counts_by_seed, names)


def _names_of_counts(results: Mapping[str, Any]) -> list[str]:
    """Returns the names of what a comparison's task counts; those of classes if this process does not trust the task."""
    names = [str(name) for name in results.get("class_names") or ()]
    try:
        return list(get_task(results.get("task", DEFAULT_TASK)).count_names(names))
    except UserError:
        return names


def _add_predictions(details: PageDetails, run_group: RunGroup, subgroups: Sequence[str]) -> PageDetails:
    predictions, reason = read_group_predictions(run_group, details.class_names or None)
    if predictions is None and subgroups:
        raise UserError(f"--subgroup {subgroups[0]!r}: {reason.rstrip('.')}; leave it out")
    # Runs by themselves need not say what only comparisons are looked at for.
    return replace(
        details,
        predictions=predictions,
        predictions_note=reason if run_group.comparison_results else "",
        subgroup_columns=tuple(subgroups),
    )
