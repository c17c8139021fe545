"""Renders how well each client's gradients agree in a FedPNAS run: before and after its adaptation (α_i of eq. 5), and
with the federated gradient (Proposition 1).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.report.page.charts.svg_charts import ChartBar, svg_bar_chart
from polyfed.report.page.elements import html_figure, html_paragraph, html_side_by_side, html_table
from polyfed.simulation import federate
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.results.gradient_conflicts import measure_gradient_conflicts

_CLIENTS = 20  # whose gradients are computed for a page
_ROWS = 64  # training examples of each


def html_gradient_agreement(folder: Path, clients: Sequence[Client], public: Any, key: str) -> Markup:
    """Renders how clients' gradients agree: before and after adaptation, and with the federated one.

    Agreement is the cosine: the first chart shows α_i of normalised gradients.

    Args:
        folder: a finished run of `fedpnas` or `ca_fedpnas`, which is only read.
        clients: its clients.
        public: its public examples, or None.
        key: for ids on the page.

    Raises:
        UserError: too many clients, or a run that cannot be read.
    """
    if len(clients) > _CLIENTS:
        raise UserError(
            f"the federated gradient of {len(clients)} sites takes long to compute; "
            "polyfed.simulation.results.gradient_conflicts does it in Python"
        )
    run = federate.resume(folder, clients=clients, public=public, progress=SilentProgress())
    names, step_weights = measure_gradient_conflicts(run, rows=_ROWS)
    parts = []
    for name, title, values in (
        ("alpha", "α: cosine of a site's gradient with that after its own step", step_weights.cosine),
        ("federated", "Own gradient along the federated one", step_weights.federated_cosine),
    ):
        bars = [ChartBar(client, value, value, value) for client, value in zip(names, values.tolist(), strict=True)]
        chart = svg_bar_chart(bars, key=f"{key}-{name}", title=title, x_label="of normalised gradients", signed=True)
        parts.append(html_figure(chart, f"{title} (personal stack, at the server's θ after the last round)."))
    rows = [
        [client, *(f"{value:.3g}" for value in values)]
        for client, *values in zip(
            names,
            step_weights.alpha.tolist(),
            step_weights.cosine.tolist(),
            step_weights.federated_cosine.tolist(),
            step_weights.cosine_gap.tolist(),
            strict=True,
        )
    ]
    columns = ["site", "α = gᵀg̃", "α, normalised", "along the federated gradient", "gap"]
    numbers_html = html_table("Weights of the third step (eq. 5), and Proposition 1's gap", columns, rows)
    contradicted = int((step_weights.federated_cosine < 0).sum())
    summary = (
        f"{contradicted} of {len(names)} sites have a gradient that contradicts the federated one. Their α is meant to "
        "protect them: Proposition 1 expects both values to be close. The mean gap is "
        f"{float(step_weights.cosine_gap.mean()):.2f}. Up to {_ROWS} training images of each site."
    )
    return html_paragraph(summary) + html_side_by_side(parts) + numbers_html
