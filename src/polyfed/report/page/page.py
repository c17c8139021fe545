"""The page of `polyfed report`: one HTML file that needs nothing else, neither a network nor other files."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from polyfed.core.io.number_format import capitalize_first, count_with_noun, join_with_and
from polyfed.report.data.run_groups import RunGroup
from polyfed.report.page import performance as by_example
from polyfed.report.page import sentences, subgroups
from polyfed.report.page.decision import has_answers, html_decision, interval_level_of
from polyfed.report.page.elements import html_collapsible, html_dropdown_panels, html_json_script, html_list
from polyfed.report.page.sections import (
    PageExtras,
    html_class_counts,
    html_client_scores,
    html_gains,
    html_learning_curves,
    html_methods_table,
)
from polyfed.simulation.storage.directory import package_versions

_SEPARATE = "How well predictions separate, and how far they can be believed"


def render_page(groups: Sequence[RunGroup], extras: Sequence[PageExtras], notes: Sequence[str], title: str) -> str:
    """The whole page.

    Args:
        groups: as gathered.
        extras: of each of them.
        notes: sentences for the top.
        title: of the page.
    """
    package_files = files("polyfed.report.page")
    style, script = (package_files.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    curves_script = package_files.joinpath("curves.js").read_text(encoding="utf-8")
    curves: dict[str, Any] = {}
    is_single_group = len(groups) == 1
    parts = [
        _html_group(run_group, extras[k], f"p{k}", curves, is_single_group=is_single_group)
        for k, run_group in enumerate(groups)
    ]
    heading = _page_heading(groups[0]) if is_single_group and has_answers(groups[0]) else title
    # With no choice of sites there is nothing for this script to do.
    scripts = script if not any(page_extras.predictions for page_extras in extras) else f"{script}\n{curves_script}"
    version_by_package = package_versions()
    footer = (
        f"Made by polyfed {version_by_package['polyfed']}, torch {version_by_package['torch']}. All of it is in this "
        "file."
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        # Nothing may be fetched, whatever a name of a client holds.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body><main>"
        f"<h1>{escape(heading)}</h1>{html_list(notes)}{''.join(parts)}<footer>{escape(footer)}</footer></main>\n"
        f"{html_json_script('data', curves)}<script>{scripts}</script></body></html>\n"
    )


def _page_heading(run_group: RunGroup) -> str:
    """The heading: the question, and the comparison's title, unless that names a method that was not compared."""
    results = run_group.comparison_results
    left_out_labels = [*(results.get("skipped") or {}), *(results.get("failed") or {})]
    names_absent_method = any(label.lower() in run_group.title.lower() for label in left_out_labels)
    return "Join, or train alone?" + ("" if names_absent_method else f" {capitalize_first(run_group.title)}")


def _html_group(
    run_group: RunGroup, extras: PageExtras, key: str, curves: dict[str, Any], *, is_single_group: bool
) -> str:
    heading = (
        f'<p class="facts">{escape(capitalize_first(run_group.title))}: '
        if is_single_group
        else f'<h2>{escape(capitalize_first(run_group.title))}</h2><p class="facts">'
    )
    facts = f"{heading}{escape(sentences.describe_comparison(run_group))}</p>"
    if has_answers(run_group):
        # the title is the page's heading
        plain = f'<p class="facts">{escape(sentences.describe_comparison(run_group, "site"))}</p>'
        return _html_decided_group(run_group, extras, key, curves, plain if is_single_group else facts)
    parts = [
        f"<section>{facts}",
        html_list(sentences.result_sentences(run_group)),
        _html_notes(sentences.comparison_notes(run_group)),
        html_methods_table(run_group),
        '<div class="grid2">',
        f"<div><h3>Learning curves</h3>{html_learning_curves(run_group, key, curves)}</div>",
        f"<div><h3>What each client gains over training alone</h3>{html_gains(run_group, key)}</div>",
        f"<div><h3>Scores of each client</h3>{html_client_scores(run_group)}</div>",
        f"<div><h3>Who has what</h3>{html_class_counts(run_group, extras, key)}</div></div>",
    ]
    parts += [f"<h3>{escape(name)}</h3>{shown}" for name, shown in _prediction_panels(run_group, extras, key)]
    return "".join(
        [*parts, *(f"<h3>{escape(name)}</h3>{shown}" for name, shown in _method_view_panels(extras, key)), "</section>"]
    )


def _html_decided_group(run_group: RunGroup, extras: PageExtras, key: str, curves: dict[str, Any], facts: str) -> str:
    """What is to be decided first; all else opens below it."""
    sentences_html = (
        f"{html_list(sentences.result_sentences(run_group))}{html_list(sentences.comparison_notes(run_group))}"
    )
    convergence = run_group.comparison_results.get("convergence") or {}
    convergence_html = html_list(
        [f"{label}: {entry['sentence']}" for label, entry in convergence.items() if entry.get("sentence")]
    )
    below = [
        *((name, shown) for name, shown in _prediction_panels(run_group, extras, key)),
        ("Learning curves", f"{convergence_html}{html_learning_curves(run_group, key, curves)}"),
        ("All methods: percentiles, tests, costs", f"{html_methods_table(run_group)}"),
        ("In sentences, and how to read them", sentences_html),
        ("What each client gains over training alone", html_gains(run_group, key)),
        ("Scores of each client", html_client_scores(run_group)),
        ("Who has what", html_class_counts(run_group, extras, key)),
        *_method_view_panels(extras, key),
    ]
    parts = [html_collapsible(name, shown, opened=name.startswith("Subgroups by")) for name, shown in below]
    top = html_decision(run_group, extras.predictions, key)
    return f'<section class="decided">{facts}{top}<h2 class="below">Details</h2>{"".join(parts)}</section>'


def _prediction_panels(run_group: RunGroup, extras: PageExtras, key: str) -> list[tuple[str, str]]:
    """Heading and HTML of what predictions tell, or why they tell nothing."""
    if extras.predictions is None:
        return [(_SEPARATE, f"<p>{escape(extras.predictions_note)}</p>")] if extras.predictions_note else []
    level, predictions = interval_level_of(run_group), extras.predictions
    parts = (
        [(_SEPARATE, by_example.html_performance_section(predictions, level, key))]
        if predictions.binary_questions
        else []
    )
    parts += [
        (
            f"Subgroups by {column}",
            subgroups.html_subgroups(predictions, column, run_group.score_format, level, f"{key}-g{k}"),
        )
        for k, column in enumerate(extras.subgroup_columns)
    ]
    if not extras.subgroup_columns and (columns := predictions.column_names()):
        hint = (
            "polyfed report DIR --subgroup COLUMN adds scores of groups; the test examples have "
            f"{join_with_and(columns)}."
        )
        parts.append(("Subgroups", f"<p>{escape(hint)}</p>"))
    return parts


def _method_view_panels(extras: PageExtras, key: str) -> list[tuple[str, str]]:
    """Heading and HTML of what the methods have to show."""
    panels = []
    for k, (name, by_method) in enumerate(extras.method_views.items()):
        if len(by_method) == 1:
            ((method, html),) = by_method.items()
            panels.append((f"{name} ({method})", html))
        else:
            panels.append((name, html_dropdown_panels(f"{key}-v{k}", "Method", by_method)))
    return panels


def _html_notes(notes: Sequence[str]) -> str:
    shown = f"<summary>{count_with_noun(len(notes), 'note')} on how to read this</summary>{html_list(notes)}"
    return f'<details class="notes">{shown}</details>' if notes else ""
