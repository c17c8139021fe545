"""Renders the cosine of each client's update to the mean by round, and what a robust rule did with the updates."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from polyfed.core.errors import UserError
from polyfed.core.io.text.number_format import count_with_noun
from polyfed.core.io.values.number_checks import is_number
from polyfed.report.data.run_records import RunRecord, read_checked_round_records
from polyfed.report.page.charts.svg_charts import COLOUR_COUNT, ChartLine, svg_line_chart
from polyfed.report.page.elements import html_bullet_list, html_figure, html_legend, html_table
from polyfed.simulation.monitoring.update_directions import COSINE

DIRECTIONS_HEADING = "Cosine of each site's update to the mean update"
_DRAWN = 12  # clients
_ROUNDS = 8  # in the table


def html_update_directions(run: RunRecord, key: str) -> Markup:
    """Renders the lowest cosines to the mean update by round, and sentences on a robust rule.

    Args:
        run: as read.
        key: for ids on the page.
    """
    if run.folder is None:
        return Markup()
    try:
        records = read_checked_round_records(run.folder / "metrics.jsonl")
    except UserError:  # the page says so elsewhere
        return Markup()
    sentences = html_bullet_list(describe_robust_rule(records))
    if run.uses_secure_sums:
        return sentences
    cosines = {
        record["round"]: by_client
        for record in records
        if (by_client := {i: row[COSINE] for i, row in record["clients"].items() if _is_number(row.get(COSINE))})
    }
    return sentences + _html_cosines(cosines, key) if cosines else sentences


def _html_cosines(cosines: Mapping[int, Mapping[str, float]], key: str) -> Markup:
    rounds = sorted(cosines)
    lowest: dict[str, float] = {}
    for by_client in cosines.values():
        for client, cosine in by_client.items():
            lowest[client] = min(lowest.get(client, 1.0), cosine)
    order = sorted(lowest, key=lambda client: (lowest[client], client))
    drawn_clients, curves = order[:_DRAWN], []
    for style, client in enumerate(drawn_clients):
        values = [cosines[number].get(client, math.nan) for number in rounds]
        numbers = [float(number) for number in rounds]
        curves.append(ChartLine(client, numbers, values, values, values, style % (3 * COLOUR_COUNT)))
    title = "Cosine of each site's update to the mean by round"
    chart = svg_line_chart(
        curves, key=f"{key}-cosines", title=title, x_label="rounds", y_label="cosine", integer_x=True
    )
    last_rounds = rounds[-_ROUNDS:]
    rows = [
        [client, *(f"{cosines[n][client]:.2f}".replace("-", "−") if client in cosines[n] else "–" for n in last_rounds)]
        for client in drawn_clients
    ]
    table_title = f"{title}, the last {count_with_noun(len(last_rounds), 'round')}"
    table = html_table(table_title, ["site", *map(str, last_rounds)], rows)
    caption = (
        f"{title}: 1 where sites agree, negative where one pulls against the rest. In the mean each update counts with "
        "at most the median norm."
    )
    if len(order) > len(drawn_clients):
        caption += f" The {len(drawn_clients)} sites with the lowest of {len(order)}."
    return html_figure(chart + html_legend(drawn_clients), caption, table)


def describe_robust_rule(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Says which robust rule a run had, its last bound, and which updates it scaled down.

    >>> describe_robust_rule([{"round": 1, "robust": {"rule": "clip:3.0x", "bound": 2.0, "scaled": {"b": 0.01}}}])
    ['Replies are combined by the rule clip:3.0x; its bound on the norm of an update was 2 in round 1.', 'The update of b
    was scaled down in 1 round, to 0.01 of its norm at least.']
    """
    reports = {r["round"]: r["robust"] for r in records if isinstance(r.get("robust"), Mapping)}
    if not reports:
        return []
    last = max(reports)
    bound = reports[last].get("bound")
    limit = f"; its bound on the norm of an update was {bound:.4g} in round {last}" if _is_number(bound) else ""
    factors: dict[str, list[float]] = {}
    for report in reports.values():
        scaled = report.get("scaled")
        for client, factor in scaled.items() if isinstance(scaled, Mapping) else ():
            if _is_number(factor):
                factors.setdefault(str(client), []).append(factor)
    counted_sentence = []
    if counted := [r for r in reports.values() if is_number(r.get("within_bound")) and is_number(r.get("updates"))]:
        num_updates = sum(report["updates"] for report in counted)
        num_scaled = sum(max(report["updates"] - report["within_bound"], 0) for report in counted)
        counted_sentence = [
            f"Of {num_updates} updates in all rounds, {num_scaled} were scaled down to it; secure sums hide whose, and each "
            "site's own log says so."
        ]
    return [
        f"Replies are combined by the rule {reports[last].get('rule')}{limit}.",
        *counted_sentence,
        *(
            f"The update of {client} was scaled down in {count_with_noun(len(values), 'round')}, to {min(values):.2g} of "
            "its norm at least."
            for client, values in sorted(factors.items(), key=lambda item: min(item[1]))
        ),
    ]


def _is_number(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)
