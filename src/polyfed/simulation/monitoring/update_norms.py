"""Measures how much each client changes the weights that it received, and describes rounds with problems in warnings.

The norm of a reply is Euclidean, over its floating-point tensors. A group that the message has under the same name
counts by its change; any other group (class means, outputs on public examples, updates) counts as it is. A large norm
is a sign of a single update that outweighs all others, by mistake or on purpose; nothing is limited here (`robust=` does).
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyfed.core.algorithm import Message
from polyfed.core.io.text.number_format import join_first_and_count_rest
from polyfed.simulation.monitoring.update_directions import (
    COSINE,
    LOSS_CHANGE,
    UpdateSketch,
    cosines_to_mean,
    describe_departing_clients,
    loss_change,
    sketch_update,
)

NORM = "update_norm"  # in the client rows of `metrics.jsonl`
OUTLIER_FACTOR = 10.0  # times the median of the others, from which on a norm stands out
_LOSSES = {"train_loss": "training loss", "loss": "test loss", "val_loss": "validation loss"}
_NAMED = 3  # clients in a sentence
_NOBODY = "no client has a finite"
_EVAL = "what forward does in eval mode alone (statistics of BatchNorm, a branch on self.training)"


class MeasuredUpdate(NamedTuple):
    """Holds an update's norm and a sketch of its direction; None without floating-point tensors."""

    norm: float | None
    sketch: UpdateSketch | None


def measure_update(reply: Message, message: Message, differences: Iterable[str] = ()) -> MeasuredUpdate:
    """Returns norm and direction sketch of reply minus message; None without floating-point tensors.

    Args:
        reply: of a client, decompressed; adapters may be of a lower rank than those in `message`.
        message: the message that the client received.
        differences: groups of the reply that are differences already, so that nothing is subtracted.

    >>> w = torch.tensor([3.0, 0.0])
    >>> measure_update(Message({"model": {"w": w}}), Message({"model": {"w": torch.tensor([0.0, 4.0])}})).norm
    5.0
    >>> measure_update(Message({"classes": {"sums": w}}), Message()).norm, measure_update(Message(), Message()).norm
    (3.0, None)
    """
    difference_groups, tensors = frozenset(differences), list[tuple[Tensor, Tensor | None]]()
    for group, state_dict in reply.tensors.items():
        received = {} if group in difference_groups else message.tensors.get(group, {})
        tensors += [(t.detach(), received.get(name)) for name, t in state_dict.items() if t.is_floating_point()]
    squares: list[float] = []

    def iterate_changes() -> Iterator[Tensor]:
        for sent, before in tensors:
            change = _change_of_tensor(sent, before)
            squares.append(float(torch.linalg.vector_norm(change, dtype=torch.float64)) ** 2)
            yield change

    sketch = sketch_update(iterate_changes(), [tuple(sent.shape) for sent, _ in tensors])
    if not squares or not all(map(math.isfinite, squares)):
        return MeasuredUpdate(None, None)
    return MeasuredUpdate(math.sqrt(math.fsum(squares)), sketch)


def describe_measures(
    measures: Mapping[str, MeasuredUpdate],
    scalars_by_client: Mapping[str, Mapping[str, float]],
    earlier_records: Sequence[Mapping[str, Any]],
) -> dict[str, dict[str, float]]:
    """Returns the client rows' fields on updates: norm, cosine to the mean, and change of the loss.

    Args:
        measures: of the round's replies.
        scalars_by_client: the scalars of the replies, of which the training loss is read.
        earlier_records: the records of the rounds before.
    """
    cosines = cosines_to_mean({i: measured.sketch for i, measured in measures.items() if measured.sketch is not None})
    rows = {}
    for i, measured in measures.items():
        loss = scalars_by_client.get(i, {}).get("train_loss")
        change = None if loss is None else loss_change(i, loss, earlier_records)
        values = {NORM: measured.norm, COSINE: cosines.get(i), LOSS_CHANGE: change}
        rows[i] = {name: value for name, value in values.items() if value is not None}
    return rows


def _change_of_tensor(sent: Tensor, received: Tensor | None) -> Tensor:
    """Returns a sent tensor minus the received one, of which a lower rank has the first components."""
    sent = sent.to(torch.promote_types(sent.dtype, torch.float32))  # a difference in half precision may overflow
    if received is None or received.dim() != sent.dim():
        return sent
    first = received[tuple(slice(size) for size in sent.shape)]
    return sent - first.to(sent) if first.shape == sent.shape else sent


def outlier_norm_ratios(norm_by_client: Mapping[str, float]) -> dict[str, float]:
    """Returns `{client: norm / others' median}` for ratios of at least `OUTLIER_FACTOR`.

    >>> (outlier_norm_ratios({"a": 2.0, "b": 1.0, "c": 300.0}), outlier_norm_ratios({"a": 2.0}),
    ...  outlier_norm_ratios({"a": 0.0, "b": 1.0}))
    ({'c': 200.0}, {}, {})
    """
    outliers = {}
    for client, norm in norm_by_client.items():
        other_norms = [value for other_client, value in norm_by_client.items() if other_client != client]
        median = statistics.median(other_norms) if other_norms else 0.0
        if median > 0 and norm >= OUTLIER_FACTOR * median:
            outliers[client] = norm / median
    return outliers


def norms_by_client(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns `{client: norm of its update}` of a record; empty for early versions and secure sums.

    >>> norms_by_client({"clients": {"a": {"update_norm": 1.5}, "b": {"loss": 1.0}}})
    {'a': 1.5}
    """
    return {client: row[NORM] for client, row in record["clients"].items() if isinstance(row.get(NORM), int | float)}


def describe_round_warnings(record: Mapping[str, Any], earlier_records: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """Returns a sentence for each problem of a round: losses, update norms, clients unlike others.

    >>> rows = {"a": {"loss": None, "update_norm": 1.0}, "b": {"loss": 0.5, "update_norm": 40.0}}
    >>> describe_round_warnings({"round": 2, "clients": rows})
    ["round 2: the test loss of 'a' is not finite", "round 2: the update of 'b' has a norm of 40, 40 times the median of the
    others"]
    """
    return [
        *_loss_warnings(record), *_norm_warnings(record), *describe_departing_clients(record, earlier_records)
    ]  # fmt: skip


def describe_diverged_losses(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns a sentence on losses of the last record that no client has finite; "" without any.

    >>> describe_diverged_losses([{"round": 2, "clients": {"a": {"loss": None}, "b": {"loss": None}}}])
    'round 2: no client has a finite test loss; the training has diverged, or an update has ruined the model'
    """
    return "; ".join(text for text in _loss_warnings(records[-1]) if _NOBODY in text) if records else ""


def _loss_warnings(record: Mapping[str, Any]) -> list[str]:
    sentences = []
    for name, words in _LOSSES.items():
        values = {client: row[name] for client, row in record["clients"].items() if name in row}
        affected = [client for client, value in values.items() if not _is_finite(value)]
        train_losses = [record["clients"][client].get("train_loss") for client in affected]
        eval_only = name != "train_loss" and all(map(_is_finite, train_losses))
        if affected and len(affected) == len(values):
            cause = "the training has diverged, or an update has ruined the model"
            sentences.append(
                f"round {record['round']}: {_NOBODY} {words}; {cause}{f', or {_EVAL}' if eval_only else ''}"
            )
        elif affected:
            names = join_first_and_count_rest(list(map(repr, affected)), _NAMED)
            cause = f", and the training loss is: an outlier among the examples, or {_EVAL}" if eval_only else ""
            sentences.append(f"round {record['round']}: the {words} of {names} is not finite{cause}")
    return sentences


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _norm_warnings(record: Mapping[str, Any]) -> list[str]:
    norms = norms_by_client(record)
    return [
        f"round {record['round']}: the update of {client!r} has a norm of {norms[client]:.4g}, {times:.4g} times the median "
        "of the others"
        for client, times in outlier_norm_ratios(norms).items()
    ]
