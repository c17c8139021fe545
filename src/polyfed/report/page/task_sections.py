"""Maps the names of sections that a task asks of the page (`Task.page_sections`) to their headings and renderers."""

from collections.abc import Callable, Mapping

from markupsafe import Markup

from polyfed.report.data.predictions import GroupPredictions
from polyfed.report.page import survival_curves

TASK_SECTIONS: Mapping[str, tuple[str, Callable[[GroupPredictions, str], Markup]]] = {
    "kaplan_meier": (survival_curves.HEADING, survival_curves.html_survival_curves),
}
"""Name -> heading of the panel, and the function that renders it from the predictions and a key for ids."""


def html_task_sections(predictions: GroupPredictions, key: str) -> list[tuple[str, Markup]]:
    """Renders the sections that the predictions' task asks for, each with its heading; unknown names are left out."""
    sections = [TASK_SECTIONS[name] for name in predictions.task.page_sections if name in TASK_SECTIONS]
    return [(heading, render(predictions, f"{key}-t{k}")) for k, (heading, render) in enumerate(sections)]
