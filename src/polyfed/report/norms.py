"""How much each client changes what it received, by round: a figure, its numbers, and whose updates stand out."""

import math

from polyfed.report.charts import COLOURS, Curve, line_chart
from polyfed.report.html import figure, legend, paragraphs, table
from polyfed.report.records import Told
from polyfed.report.words import many
from polyfed.simulation.norms import outlying

HEADING = "How much each client changes"
_DRAWN = 12  # clients
_ROUNDS = 8  # in the table


def section(run: Told, key: str) -> str:
    """HTML of the norms of a run's updates, the largest first; empty without any.

    Args:
        run: as read.
        key: for ids on the page.
    """
    if run.hides_updates:
        return "<p>Secure sums hide single updates from the server, so that it knows no norm of one.</p>"
    rounds = sorted(run.norms)
    clients = sorted({client for norms in run.norms.values() for client in norms})
    if not rounds:
        return ""
    largest = {client: max(norms.get(client, 0.0) for norms in run.norms.values()) for client in clients}
    order = sorted(clients, key=lambda client: (-largest[client], client))
    drawn = order[:_DRAWN]
    curves = []
    for style, client in enumerate(drawn):
        values = [run.norms[number].get(client, math.nan) for number in rounds]
        curves.append(
            Curve(client, [float(number) for number in rounds], values, values, values, style % (3 * COLOURS))
        )
    title = "Norm of each client's update by round"
    chart = line_chart(curves, key=f"{key}-norms", title=title, x_label="rounds", y_label="norm", whole=True)
    shown = rounds[-_ROUNDS:]
    rows = [
        [client, *(f"{norms[client]:.4g}" if client in (norms := run.norms[number]) else "–" for number in shown)]
        for client in drawn
    ]
    behind = table(f"{title}, the last {many(len(shown), 'round')}", ["client", *map(str, shown)], rows)
    caption = f"{title}: of what came down, or of the reply where it changes nothing that came down."
    if len(order) > len(drawn):
        caption += f" The {len(drawn)} clients with the largest of {len(order)}."
    return paragraphs(_standing_out(run)) + figure(chart + legend(drawn), caption, behind)


def _standing_out(run: Told) -> list[str]:
    """A sentence for each client whose norm was many times the median of the others' in some round."""
    most: dict[str, tuple[float, int, int]] = {}
    for number in sorted(run.norms):
        for client, times in outlying(run.norms[number]).items():
            before, at, count = most.get(client, (0.0, number, 0))
            most[client] = (times, number, count + 1) if times > before else (before, at, count + 1)
    return [
        f"The update of {client} stands out in {many(count, 'round')}: up to {times:.4g} times the median norm of the "
        f"others (round {number})."
        for client, (times, number, count) in sorted(most.items(), key=lambda item: -item[1][0])
    ]
