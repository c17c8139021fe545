"""Renders the page of `polyfed report`: one HTML file that needs no network connection and no other files."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from polyfed.core.io.text.number_format import (
    capitalize_first,
    count_with_noun,
    join_first_and_count_rest,
)
from polyfed.core.machine.package_versions import package_versions
from polyfed.report.data.predictions import GroupPredictions
from polyfed.report.data.provenance import Provenance, read_provenance
from polyfed.report.data.run_groups import RunGroup
from polyfed.report.page import sentences
from polyfed.report.page.advice.answer_table import html_pooled_gains
from polyfed.report.page.advice.decision import (
    confidence_level_of,
    html_advice_section,
    is_comparison_with_answers,
    keep_advice_for_reader,
)
from polyfed.report.page.advice.header_card import html_header_card
from polyfed.report.page.elements import (
    html_bullet_list,
    html_dropdown_panels,
    html_paragraph,
    read_asset,
    render_template,
)
from polyfed.report.page.predictions import subgroups, survival_curves
from polyfed.report.page.predictions.performance import html_performance_section
from polyfed.report.page.sections import (
    PageDetails,
    html_class_counts,
    html_client_scores,
    html_gains_over_local,
    html_learning_curves,
    html_methods_table,
)

_TITLE_OF_NO_NAME = "comparison"  # what `compare` calls a comparison that is given no title
_CLASSES_HEADING = "Label distribution of each site"
_METHODS_ACROSS = 4  # up to which the table of clients' scores fits into half of the page
_PREDICTIONS_HEADING = "ROC curves, calibration and confusion matrix"
TASK_SECTIONS: Mapping[str, tuple[str, Callable[[GroupPredictions, str], Markup]]] = {
    "kaplan_meier": (survival_curves.HEADING, survival_curves.html_survival_curves)
}
"""Name in `Task.page_sections` -> heading of the panel, and the function that renders it from the predictions and a key."""


def render_page(
    groups: Sequence[RunGroup], page_details: Sequence[PageDetails], notes: Sequence[str], title: str
) -> str:
    """Renders the whole page of the report as one HTML text.

    Args:
        groups: groups of comparable runs, from `polyfed.report.data.run_groups.read_run_groups`.
        page_details: what the page shows in addition to the scores, for each group.
        notes: sentences for the top of the page.
        title: the page's title.
    """
    style, script, tables_script, curves_script = map(read_asset, ("page.css", "page.js", "tables.js", "curves.js"))
    origins = [read_provenance(run_group) for run_group in groups]
    heading = _page_heading(groups[0], origins[0]) if len(groups) == 1 else title
    curves: dict[str, Any] = {}
    is_single_group = len(groups) == 1
    rendered_groups = [
        _html_group(run_group, page_details[k], f"p{k}", curves, is_single_group=is_single_group)
        for k, run_group in enumerate(groups)
    ]
    has_menus = any(group_details.predictions for group_details in page_details)
    return render_template(
        "page",
        title=heading if heading == title else f"{heading} – polyfed",
        heading=heading,
        style=style,
        notes=notes,
        groups=rendered_groups,
        origins=[origin for origin in origins if origin.folder_name],
        versions=package_versions(),
        curves=curves,
        scripts=Markup("\n").join([script, *([curves_script] if has_menus else []), tables_script]),
    )


def _page_heading(run_group: RunGroup, origin: Provenance) -> str:
    """Returns the heading of the page by the data: of a comparison the question that was asked, of runs their methods."""
    results = run_group.comparison_results
    if not is_comparison_with_answers(run_group):
        data = capitalize_first(origin.data_name or run_group.title)
        if not results and not origin.data_name:
            data = origin.folder_name or data
        if run_group.progress:
            return f"Join, or train alone? {data}"
        return f"{data}: {join_first_and_count_rest([m.label for m in run_group.methods], 3)}"
    name = capitalize_first(origin.data_name or run_group.title)
    if name == capitalize_first(_TITLE_OF_NO_NAME):
        name = _describe_size(run_group)
    left_out_labels = [*(results.get("skipped") or {}), *(results.get("failed") or {})]
    names_absent_method = any(label.lower() in name.lower() for label in left_out_labels)
    return "Join, or train alone?" + ("" if names_absent_method else f" {name}")


def _describe_size(run_group: RunGroup) -> str:
    """Returns how many sites and examples a comparison has, such as "4 sites with 920 examples"."""
    examples = count_with_noun(sentences.count_examples(run_group), "example")
    return f"{count_with_noun(len(run_group.clients), 'site')} with {examples}"


def _html_group(
    run_group: RunGroup, page_details: PageDetails, key: str, curves: dict[str, Any], *, is_single_group: bool
) -> Markup:
    """Renders the section of one group of runs; stores its learning curves in `curves`, from which the script draws."""
    is_decided = is_comparison_with_answers(run_group)
    prediction_panels = _prediction_panels(run_group, page_details, key)
    view_panels = _method_view_panels(page_details, key)
    results, notes = sentences.result_summary_sentences(run_group), sentences.omission_and_tuning_notes(run_group)
    quarters = {
        "Learning curves": html_learning_curves(run_group, key, curves),
        "Gain of each site over training alone": html_gains_over_local(run_group, key),
        "Scores of each site": html_client_scores(run_group),
        _CLASSES_HEADING: html_class_counts(page_details, key),
    }
    context = {
        "title": capitalize_first(run_group.title),
        "description": sentences.describe_comparison(run_group),
        "card": html_header_card(run_group),
        "is_single_group": is_single_group,
    }
    if not is_decided:
        is_narrow = len(run_group.methods) <= _METHODS_ACROSS
        quarter_parts = [(heading, html) for heading, html in quarters.items() if heading != _CLASSES_HEADING]
        quarter_parts, wide = (quarter_parts, []) if is_narrow else (quarter_parts[:-1], quarter_parts[-1:])
        return render_template(
            "group",
            **context,
            results=[*results, *page_details.data_warnings],
            notes=notes,
            notes_title=count_with_noun(len(notes), "note"),
            methods_table=html_methods_table(run_group),
            shown=quarter_parts,
            details=[
                *wide,
                *prediction_panels,
                (_CLASSES_HEADING, quarters[_CLASSES_HEADING]),
                *page_details.panels.items(),
            ],
            for_researchers=view_panels,
        )
    convergence = run_group.comparison_results.get("convergence") or {}
    judgements = [
        f"{label}: {keep_advice_for_reader(entry['sentence'], run_group)}"
        for label, entry in convergence.items()
        if entry.get("sentence")
    ]
    if not page_details.class_counts:
        del quarters[_CLASSES_HEADING]  # examples without classes, as of a regression
    (curves_heading, curves_figure), *other_quarters = quarters.items()
    pooled = html_pooled_gains(run_group, confidence_level_of(run_group))
    details = [
        *page_details.panels.items(),
        *prediction_panels,
        (curves_heading, html_bullet_list(judgements) + curves_figure),
        ("All methods: percentiles, tests, costs", html_methods_table(run_group)),
        ("All answers as sentences, and notes", html_bullet_list(results) + html_bullet_list(notes)),
        *other_quarters,
    ]
    for_researchers = [*([("Gain of each site by partial pooling over sites", pooled)] if pooled else []), *view_panels]
    decision = html_advice_section(run_group, key, page_details.data_warnings)
    return render_template(
        "decided_group", **context, decision=decision, details=details, for_researchers=for_researchers
    )


def _prediction_panels(run_group: RunGroup, page_details: PageDetails, key: str) -> list[tuple[str, Markup]]:
    """Renders the panels made from test predictions, with headings, or one that says why there are none."""
    if page_details.predictions is None:
        if page_details.predictions_note:
            return [(_PREDICTIONS_HEADING, html_paragraph(page_details.predictions_note))]
        return []
    level, predictions = confidence_level_of(run_group), page_details.predictions
    panels = []
    if predictions.binary_questions:
        panels.append((_PREDICTIONS_HEADING, html_performance_section(predictions, level, key)))
    sections = [TASK_SECTIONS[name] for name in predictions.task.page_sections if name in TASK_SECTIONS]
    panels += [(heading, render(predictions, f"{key}-t{k}")) for k, (heading, render) in enumerate(sections)]
    for k, column in enumerate(page_details.subgroup_columns):
        panel = subgroups.html_subgroup_scores(predictions, column, run_group.score_format, level, f"{key}-g{k}")
        panels.append((f"Subgroups by {column}", panel))
    return panels


def _method_view_panels(page_details: PageDetails, key: str) -> list[tuple[str, Markup]]:
    """Renders the panels that single methods add, each with its heading; a panel that several methods add has a menu."""
    panels = []
    for k, (heading, by_method) in enumerate(page_details.method_views.items()):
        if len(by_method) == 1:
            ((method, html),) = by_method.items()
            panels.append((f"{heading} ({method})", html))
        else:
            panels.append((heading, html_dropdown_panels(f"{key}-v{k}", "Method", by_method)))
    return panels
