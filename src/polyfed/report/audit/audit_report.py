"""Defines `AuditReport`, the result of `polyfed.audit`."""

import dataclasses
from dataclasses import dataclass
from typing import Any, final

from polyfed.core.errors import UserError
from polyfed.report.audit.attack_rates import AttackRate
from polyfed.report.audit.attributes import ATTRIBUTE_COLUMNS, AttributeAudit
from polyfed.report.audit.messages.message_audit import MessageAudit

JSON_FORMAT = 1


@final
@dataclass(frozen=True)
class ClientAudit:
    """Holds how well the attack found a client's training examples.

    Attributes:
        client: its id, or "all".
        examples: number of training examples, of which each run was trained on a random half.
        auc: how often a member has a higher score than a non-member; 0.5 is guessing.
        tpr_at_1_percent, tpr_at_10_percent: share of members that are found, where 1 % or 10 % of non-members are taken for
            members; 0.01 and 0.1 are guessing.
        epsilon: ε of differentially private training, the largest of the runs; None without `privacy`.
    """

    client: str
    examples: int
    auc: AttackRate
    tpr_at_1_percent: AttackRate
    tpr_at_10_percent: AttackRate
    epsilon: float | None = None


@final
@dataclass(frozen=True)
class AuditReport:
    """Holds the results of an audit; `print` shows them.

    Attributes:
        method: name of the audited method.
        shadow_runs: number of runs that were trained; each was attacked with what the others show.
        clients: one entry for each client that was attacked.
        overall: of all these clients together.
        sentences: what was tried, and what the numbers do not say.
        messages: what was reconstructed from messages, one entry for each client whose messages were attacked.
        attributes: how often columns of a table were guessed, of all attacked clients together; empty for other inputs.
    """

    method: str
    shadow_runs: int
    clients: tuple[ClientAudit, ...]
    overall: ClientAudit
    sentences: tuple[str, ...]
    messages: tuple[MessageAudit, ...] = ()
    attributes: tuple[AttributeAudit, ...] = ()

    def __post_init__(self) -> None:
        if not self.clients:
            raise UserError("an audit report needs at least one client, got none")

    def table(self) -> list[dict[str, Any]]:
        """Returns a dict of numbers for each client and one for all, with intervals as `auc_low`, `auc_high`."""
        rows = []
        for entry in (*self.clients, self.overall):
            row: dict[str, Any] = {"client": entry.client, "examples": entry.examples}
            for name in ("auc", "tpr_at_1_percent", "tpr_at_10_percent"):
                rate: AttackRate = getattr(entry, name)
                row |= {name: rate.value, f"{name}_low": rate.low, f"{name}_high": rate.high}
            rows.append(row | {"epsilon": entry.epsilon})
        return rows

    def to_json_dict(self) -> dict[str, Any]:
        """Returns the report as plain values, as `polyfed audit --json` prints it."""
        return {"format": JSON_FORMAT, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        width = max(6, *(len(entry.client) for entry in (*self.clients, self.overall))) + 2
        head = f"{'client':{width}}{'examples':>8}  {'AUC':23}{'TPR at 1 % FPR':23}{'TPR at 10 % FPR':23}"
        with_epsilon = self.overall.epsilon is not None
        lines = [(head + ("ε" if with_epsilon else "")).rstrip()]
        for entry in (*self.clients, self.overall):
            rates = (entry.auc, entry.tpr_at_1_percent, entry.tpr_at_10_percent)
            line = f"{entry.client:{width}}{entry.examples:>8}  " + "".join(f"{rate!s:23}" for rate in rates)
            lines.append((line + ("" if entry.epsilon is None else f"{entry.epsilon:.3g}")).rstrip())
        return "\n".join([*lines, *self._lines_on_attributes(), *self._lines_on_messages(width), *self.sentences])

    def _lines_on_attributes(self) -> list[str]:
        """Returns the table of guessed columns; empty if there are none."""
        if not self.attributes:
            return []
        rows = [ATTRIBUTE_COLUMNS, *(entry.describe() for entry in self.attributes)]
        widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
        return [
            "",
            *("".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
        ]

    def _lines_on_messages(self, width: int) -> list[str]:
        """Returns the table of what was reconstructed from messages; empty if none were attacked."""
        if not self.messages:
            return []
        texts = [(entry.client, entry.describe_images(), entry.describe_labels()) for entry in self.messages]
        across = max(len(images) for _, images, _ in texts) + 2
        head = "PSNR of images in dB"
        across = max(across, len(head) + 2)
        rows = [f"{client:{width}}{images:{across}}{labels}" for client, images, labels in texts]
        return ["", f"{'client':{width}}{head:{across}}labels", *rows, ""]
