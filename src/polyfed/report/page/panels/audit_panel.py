"""Renders the last audit of each run: how well training examples were found, and what messages gave away."""

from collections.abc import Mapping

from markupsafe import Markup

from polyfed.report.audit.attributes import ATTRIBUTE_COLUMNS
from polyfed.report.audit.audit_report import AuditReport, ClientAudit
from polyfed.report.page.elements import html_bullet_list, html_div, html_dropdown_panels, html_table

AUDIT_HEADING = "Audit: what networks and messages reveal"
_MAX_CLIENTS = 40


def html_audits(audit_by_method: Mapping[str, AuditReport], key: str) -> Markup:
    """Renders, for each audited method, its rates, its reconstructions, and what was tried; with a menu to choose."""
    return html_dropdown_panels(key, "Method", {name: _html_audit(report) for name, report in audit_by_method.items()})


def _html_audit(audit: AuditReport) -> Markup:
    rows = [_rates_row(entry) for entry in (*audit.clients[:_MAX_CLIENTS], audit.overall)]
    columns = ["site", "examples", "AUC", "TPR at 1 % FPR", "TPR at 10 % FPR", "ε"]
    with_epsilon = any(row[-1] for row in rows)
    if not with_epsilon:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    caption = "Training examples found from each site's network; 95 % intervals; guessing: 0.5, 0.01 and 0.1"
    parts = [html_table(caption, columns, rows)]
    if audit.attributes:
        caption = "Share of table rows whose column is guessed from network, other columns and label; 95 % intervals"
        parts.append(html_table(caption, ATTRIBUTE_COLUMNS, [entry.describe() for entry in audit.attributes]))
    if audit.messages:
        caption = "Reconstructed from one message of each site"
        texts = [[entry.client, entry.describe_images(), entry.describe_labels()] for entry in audit.messages]
        parts.append(html_table(caption, ["site", "PSNR of images in dB", "labels"], texts))
    notes = list(audit.sentences)
    if (hidden := len(audit.clients) - _MAX_CLIENTS) > 0:
        notes.append(f"{hidden} more sites are in audit.json of the run directory.")
    return html_div(Markup("{}{}").format(Markup("").join(parts), html_bullet_list(notes)))


def _rates_row(entry: ClientAudit) -> list[str]:
    rates = (entry.auc, entry.tpr_at_1_percent, entry.tpr_at_10_percent)
    epsilon = "" if entry.epsilon is None else f"{entry.epsilon:.3g}"
    return [entry.client, str(entry.examples), *map(str, rates), epsilon]
