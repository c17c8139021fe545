"""Maps the names in `Task.page_sections` (sections that a task adds to the page) to their headings and to the functions
that render them.
"""

from collections.abc import Callable, Mapping

from markupsafe import Markup

from polyfed.report.data.predictions import GroupPredictions
from polyfed.report.page import survival_curves

TASK_SECTIONS: Mapping[str, tuple[str, Callable[[GroupPredictions, str], Markup]]] = {
    "kaplan_meier": (survival_curves.HEADING, survival_curves.html_survival_curves),
}
"""Name -> heading of the panel, and the function that renders it from the predictions and a key for ids."""


def html_task_sections(predictions: GroupPredictions, key: str) -> list[tuple[str, Markup]]:
    """Renders the sections that the task of the predictions adds to the page, as (heading, HTML) pairs; leaves out
    unknown names.
    """
    sections = [TASK_SECTIONS[name] for name in predictions.task.page_sections if name in TASK_SECTIONS]
    return [(heading, render(predictions, f"{key}-t{k}")) for k, (heading, render) in enumerate(sections)]
