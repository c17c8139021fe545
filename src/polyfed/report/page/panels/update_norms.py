"""Renders the norm of each client's update by round, and names clients whose norms stand out."""

import math

from markupsafe import Markup

from polyfed.core.io.text.number_format import count_with_noun
from polyfed.report.data.run_records import RunRecord
from polyfed.report.page.charts.svg_charts import COLOUR_COUNT, ChartLine, svg_line_chart
from polyfed.report.page.elements import html_bullet_list, html_figure, html_legend, html_paragraph, html_table
from polyfed.simulation.monitoring.update_norms import outlier_norm_ratios

NORMS_HEADING = "Update norm of each site"
_DRAWN = 12  # clients
_ROUNDS = 8  # in the table


def html_update_norms(run: RunRecord, key: str) -> Markup:
    """Renders the largest update norms by round; empty if none were recorded.

    Args:
        run: as read.
        key: for ids on the page.
    """
    if run.uses_secure_sums:
        return html_paragraph("Secure sums hide single updates from the server, so that it knows no norm of one.")
    rounds = sorted(run.update_norms)
    clients = sorted({client for norms in run.update_norms.values() for client in norms})
    if not rounds:
        return Markup()
    largest = {client: max(norms.get(client, 0.0) for norms in run.update_norms.values()) for client in clients}
    order = sorted(clients, key=lambda client: (-largest[client], client))
    drawn_clients = order[:_DRAWN]
    curves = []
    for style, client in enumerate(drawn_clients):
        values = [run.update_norms[number].get(client, math.nan) for number in rounds]
        curves.append(
            ChartLine(client, [float(number) for number in rounds], values, values, values, style % (3 * COLOUR_COUNT))
        )
    title = "Norm of each site's update by round"
    chart = svg_line_chart(curves, key=f"{key}-norms", title=title, x_label="rounds", y_label="norm", integer_x=True)
    last_rounds = rounds[-_ROUNDS:]
    rows = [
        [
            client,
            *(
                f"{norms[client]:.4g}" if client in (norms := run.update_norms[number]) else "–"
                for number in last_rounds
            ),
        ]
        for client in drawn_clients
    ]
    numbers_html = html_table(
        f"{title}, the last {count_with_noun(len(last_rounds), 'round')}", ["site", *map(str, last_rounds)], rows
    )
    caption = f"{title}: how far the site moved the weights that it received; of other replies their own norm."
    if len(order) > len(drawn_clients):
        caption += f" The {len(drawn_clients)} sites with the largest of {len(order)}."
    return html_bullet_list(_outlier_sentences(run)) + html_figure(
        chart + html_legend(drawn_clients), caption, numbers_html
    )


def _outlier_sentences(run: RunRecord) -> list[str]:
    """Returns a sentence for each client with an update many times as long as the others' median."""
    largest: dict[str, tuple[float, int, int]] = {}
    for number in sorted(run.update_norms):
        for client, times in outlier_norm_ratios(run.update_norms[number]).items():
            before, at, count = largest.get(client, (0.0, number, 0))
            largest[client] = (times, number, count + 1) if times > before else (before, at, count + 1)
    return [
        f"The update of {client} stands out in {count_with_noun(count, 'round')}: up to {times:.4g} times the median "
        f"norm of the others (round {number})."
        for client, (times, number, count) in sorted(largest.items(), key=lambda item: -item[1][0])
    ]
