"""Measures in which direction each client changes the model, and describes clients that depart from the others.

The cosine of a client is that between its update and the mean of all updates of the round, each scaled down to the median
norm, so that a single huge update does not decide what the mean is. It is near 1 where clients agree, about 1/√n where n
clients change unrelated things, and negative where one pulls against the rest.

Updates are let go once they are summed, so of each only a sketch stays: of up to 4,096 numbers the update itself; of more,
s·X, where the rows of X are the update in pieces of 4,096 and s are fixed random signs, which keeps inner products on
average (a random projection). The error of a cosine is then about 0.02.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import nlargest
from typing import Any, final

import torch
from torch import Tensor

from polyfed.core.robust.counted_median import BOUND_TOLERANCE, are_counts_possible

COSINE = "update_cosine"
"""The field of the client rows of `metrics.jsonl` with the cosine of a client's update to the mean."""
LOSS_CHANGE = "train_loss_change"
"""The field of the client rows with the training loss minus that of the round in which the client last took part."""
SKETCH_SIZE = 4096
_AGAINST, _AGREE = -0.2, 0.2  # a client's mean cosine, and that of the others, from which on it pulls against them
_LARGEST = 8  # rounds of a client over which both are means: those with its largest updates
_IDLE = 0.01  # times the median norm of the others, below which a client has hardly trained
_ROSE, _ABOVE = 1.5, 2.0  # a loss that rose by this factor, and is above that of the others by this one
_FEWEST = 3  # clients among which one can depart from the others
WARNED_ROUNDS = 10  # a sentence about a client is not repeated for so many rounds


@final
@dataclass(frozen=True)
class UpdateSketch:
    """Holds a client's update in few numbers, with the forms of its tensors: only sketches of the same forms compare."""

    forms: tuple[tuple[int, ...], ...]
    numbers: Tensor


@lru_cache(maxsize=4)
def _random_signs(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(48)
    return torch.randint(0, 2, (count,), generator=generator).float() * 2 - 1


def sketch_update(changes: Iterable[Tensor], forms: Sequence[tuple[int, ...]] | None = None) -> UpdateSketch:
    """Returns the sketch of an update, which is given as the change in each tensor, always in the same order.

    Args:
        changes: the changes. With `forms` each can be let go before the next is computed, so that no copy of the whole
            update is in memory.
        forms: the shapes of the changes.

    >>> sketch_update([torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])]).numbers
    tensor([1., 2., 3.])
    """
    if forms is None:
        changes = list(changes)
        forms = [tuple(change.shape) for change in changes]
    forms, total = tuple(forms), sum(map(math.prod, forms))
    flat = (change.detach().reshape(-1).to("cpu", torch.float32) for change in changes)
    if total <= SKETCH_SIZE:
        return UpdateSketch(forms, torch.cat([torch.zeros(0), *flat]))
    # A power of two, so that models of about one size share their signs.
    signs = _random_signs(2 ** math.ceil(math.log2(total // SKETCH_SIZE + 2)))
    numbers, position = torch.zeros(SKETCH_SIZE), 0
    for values in flat:
        row, column = divmod(position, SKETCH_SIZE)
        position += len(values)
        if column:  # the rest of a piece that an earlier tensor began
            begun, values = values[: SKETCH_SIZE - column], values[SKETCH_SIZE - column :]
            numbers[column : column + len(begun)].add_(begun, alpha=float(signs[row]))
            row += 1
        rows = len(values) // SKETCH_SIZE
        if rows:
            numbers += signs[row : row + rows] @ values[: rows * SKETCH_SIZE].view(rows, SKETCH_SIZE)
        if len(rest := values[rows * SKETCH_SIZE :]):
            numbers[: len(rest)].add_(rest, alpha=float(signs[row + rows]))
    return UpdateSketch(forms, numbers)


def cosines_to_mean(sketches: Mapping[str, UpdateSketch]) -> dict[str, float]:
    """Returns clients' cosines to the mean update, each update scaled down to the median norm.

    Only clients with networks of the most frequent form count.

    Empty for fewer than two clients, and for updates of zero.

    >>> first, second = (sketch_update([torch.tensor(v)]) for v in ([1.0, 0.0], [0.0, 1.0]))
    >>> cosines_to_mean({"a": first, "b": second, "c": first})
    {'a': 0.8944, 'b': 0.4472, 'c': 0.8944}
    """
    ids_by_form: dict[object, list[str]] = {}
    for client in sorted(sketches):
        ids_by_form.setdefault(sketches[client].forms, []).append(client)
    ids = max(ids_by_form.values(), key=len, default=[])
    if len(ids) < 2 or not len(sketches[ids[0]].numbers):
        return {}
    rows = torch.stack([sketches[client].numbers for client in ids]).to(torch.float64)
    norms = rows.norm(dim=1)
    median = statistics.median_low(norms.tolist())
    limited = rows * torch.where(norms > median, median / norms, 1.0)[:, None]
    mean = limited.mean(dim=0)
    lengths = norms * mean.norm()
    cosines = (rows @ mean) / lengths
    return {client: round(float(c), 4) for client, c in zip(ids, cosines, strict=True) if math.isfinite(float(c))}


def loss_change(client: str, loss: float, earlier_records: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns how a client's training loss changed since its last round; None without one.

    >>> loss_change("a", 0.5, [{"clients": {"a": {"train_loss": 0.75}}}, {"clients": {"b": {}}}])
    -0.25
    """
    for record in reversed(earlier_records):
        before = record["clients"].get(client, {}).get("train_loss")
        if isinstance(before, int | float) and math.isfinite(before):
            return float(loss) - float(before) if math.isfinite(loss) else None
    return None


def describe_departing_clients(
    record: Mapping[str, Any], earlier_records: Sequence[Mapping[str, Any]] = ()
) -> list[str]:
    """Returns a sentence for each client that departs from the others in a way that somebody can look into.

    - It pulls against the others: its cosine is negative and theirs are not, in the mean over the rounds with its largest
      updates. Where a model has almost converged, updates of honest sites that differ cancel out, so that some are opposed
      to the mean; but those are small, and in the rounds before, with larger updates, all moved the model the same way.
    - It sends back almost what it has received.
    - Its training loss rises, far above that of the others, while theirs does not.

    A sentence that was said of a client in the last ten records is not repeated.

    And one sentence if the mean of a secure sum is beyond the bound that every site keeps, or its counts cannot be.

    >>> rows = {"a": {"update_norm": 1.0}, "b": {"update_norm": 1.1}, "c": {"update_norm": 0.001}}
    >>> describe_departing_clients({"round": 2, "clients": rows})
    ["round 2: 'c' sends back almost what it has received (norm 0.001, the others' median 1): does its training run, and
    has it its examples?"]
    """
    rows, number = record["clients"], record["round"]
    said = [text for before in earlier_records[1 - WARNED_ROUNDS :] for text in before.get("warnings", ())]
    departures = [
        *_opposed_clients(rows, earlier_records),
        *_idle_clients(rows),
        *_rising_losses(rows, earlier_records),
    ]
    return [
        *(
            f"round {number}: {departure}{details}"
            for departure, details in departures
            if not any(departure in text for text in said)
        ),
        *_broken_bound_sentences(record.get("robust", {}), number),
    ]


def _values_and_medians_of_others(
    rows: Mapping[str, Mapping[str, Any]], field: str, *, lower: bool = False
) -> dict[str, tuple[float, float]]:
    """Returns each client's value of a field, and the median of the other clients' values; empty for few clients.

    Of two in the middle it is the one that accuses less, since one may lie: the upper for what is too large, else the lower.
    """
    values = {i: float(row[field]) for i, row in rows.items() if isinstance(row.get(field), int | float)}
    ordered = sorted((value, i) for i, value in values.items() if math.isfinite(value))
    if len(ordered) < _FEWEST:
        return {}
    middle = (len(ordered) - 1 - lower) // 2  # of the others: one place higher for those up to there
    return {i: (value, ordered[middle + (rank <= middle)][0]) for rank, (value, i) in enumerate(ordered)}


def _opposed_clients(
    rows: Mapping[str, Mapping[str, Any]], earlier_records: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Yields what each client that pulls against the others does, and the details of this round."""
    for client, newest in _values_and_medians_of_others(rows, COSINE).items():
        if newest[0] >= 0:  # most clients, so that their earlier rounds are not read
            continue
        rounds_of_client = [
            record["clients"]
            for record in ({"clients": rows}, *earlier_records)
            if COSINE in record["clients"].get(client, {})
        ]
        largest = nlargest(
            _LARGEST, rounds_of_client, key=lambda rows_of_round: float(rows_of_round[client].get("update_norm") or 0)
        )
        if len(rounds_of_client) < 2:
            continue
        if statistics.fmean(rows_of_round[client][COSINE] for rows_of_round in largest) > _AGAINST:
            continue
        medians = [
            _values_and_medians_of_others(rows_of_round, COSINE).get(client, (0.0, 0.0))[1] for rows_of_round in largest
        ]
        if statistics.fmean(medians) >= _AGREE:
            yield (
                f"the update of {client!r} pulls against the others",
                f" (cosine {newest[0]:.2f}, their median {newest[1]:.2f}): are its labels, its preprocessing and its loss "
                "those that all agreed on?",
            )


def _idle_clients(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for client, (norm, median) in _values_and_medians_of_others(rows, "update_norm", lower=True).items():
        if norm < _IDLE * median:
            yield (
                f"{client!r} sends back almost what it has received",
                f" (norm {norm:.3g}, the others' median {median:.3g}): does its training run, and has it its examples?",
            )


def _rising_losses(
    rows: Mapping[str, Mapping[str, Any]], earlier_records: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    changes = _values_and_medians_of_others(rows, LOSS_CHANGE)
    for client, (loss, others) in _values_and_medians_of_others(rows, "train_loss").items():
        change, others_change = changes.get(client, (0.0, 0.0))
        stands_out = change > 0 and others_change <= 0 and loss > _ROSE * (loss - change) and loss > _ABOVE * others
        first = next((r["clients"][client]["train_loss"] for r in earlier_records
                      if isinstance(r["clients"].get(client, {}).get("train_loss"), float)), 0.0)  # fmt: skip
        # A loss that has almost vanished may double and mean nothing.
        if stands_out and loss > first / 2:
            yield (
                f"the training loss of {client!r} rose",
                f" from {loss - change:.3g} to {loss:.3g}, and the others' did not (median {others:.3g}): has its data "
                "changed, or are labels swapped?",
            )


def _broken_bound_sentences(report: Mapping[str, Any], number: int) -> list[str]:
    """Returns a sentence for each sign that a site of a secure sum does not do what all others do."""
    norm, bound, sentences = report.get("norm_of_mean"), report.get("bound"), list[str]()
    if norm is not None and bound is not None and norm > bound * (1 + BOUND_TOLERANCE):
        sentences.append(
            f"round {number}: the mean of the secure sum has an update of norm {norm:.4g}, and every site limits its own to "
            f"{bound:.4g}: one of them does not, and nobody can see which. The mean was scaled to the bound; ask the sites "
            "for their versions and logs"
        )
    if "within_median" in report:
        counts, updates = [report["within_median"], report["within_bound"]], report["updates"]
        if not are_counts_possible(counts, updates):
            sentences.append(
                f"round {number}: of {updates} updates, {counts[0]} are said to be up to the median and {counts[1]} up to "
                "the bound, which cannot be: a site counts wrongly, and nobody can see which. The bound stays as it is; ask "
                "the sites for their versions and logs"
            )
    return sentences


def update_bound_sentences(record: Mapping[str, Any]) -> list[str]:
    """Returns a sentence on the bound on updates and whose were scaled down; none without a bound.

    >>> update_bound_sentences({"round": 3, "robust": {"rule": "clip:3.0x", "bound": 2.0, "scaled": {"b": 0.01}}})
    ['the bound on updates was 2; scaled down to it: b (times 0.01)']
    >>> update_bound_sentences({"robust": {"bound": 2.0, "updates": 3, "within_bound": 2}})
    ["the bound on updates was 2; scaled down to it: 1 of 3; the sites' own logs say whose"]
    """
    report = record.get("robust", {})
    bound, scaled = report.get("bound"), report.get("scaled", {})
    if not isinstance(bound, int | float):
        return []
    listed = ", ".join(f"{client} (times {factor:.2g})" for client, factor in sorted(scaled.items()))
    if "within_bound" in report and 0 < report["updates"] - report["within_bound"] <= report["updates"]:
        listed = f"{report['updates'] - report['within_bound']} of {report['updates']}; the sites' own logs say whose"
    return [f"the bound on updates was {bound:.4g}" + (f"; scaled down to it: {listed}" if listed else "")]
