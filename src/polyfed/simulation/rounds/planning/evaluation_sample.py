"""Draws the clients that are evaluated after a round, and describes how exactly they show the mean over all clients."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.evaluation.metric import Metric
from polyfed.core.seeds import derive_seed, numpy_generator
from polyfed.simulation.settings import Settings

_ERROR_RATE = 0.05


def check_evaluation_sample(settings: Settings, client_ids: Sequence[str]) -> None:
    """Raises a `UserError` if the setting `evaluate_clients` does not suit the clients or the setting `keep`.

    Raises:
        UserError: more clients than there are, an id that no client has, or a choice of the best round by scores of other
            clients in each round.
    """
    evaluate_clients = settings.evaluate_clients
    if isinstance(evaluate_clients, tuple):
        if unknown := sorted(set(evaluate_clients).difference(client_ids)):
            raise UserError(
                f"evaluate_clients: no client {unknown[0]!r}; {did_you_mean(unknown[0], client_ids[:1000])}"
            )
    elif settings.keep in ("best", "loss") and settings.count_evaluated(len(client_ids)) < len(client_ids):
        raise UserError(
            f"keep={settings.keep!r} compares rounds by their scores, and evaluate_clients={evaluate_clients} draws "
            "other clients for each round; give keep='last', the number of a round, or evaluate_clients=[...] with ids, the "
            "same in each round"
        )
    settings.count_evaluated(len(client_ids))


def sample_evaluated_clients(settings: Settings, client_ids: Sequence[str], round_number: int) -> list[str]:
    """Returns the ids, sorted, of the clients that are evaluated after a round.

    The draw depends on the seed and the round alone, so that every method evaluates the same clients.

    Args:
        settings: of the run.
        client_ids: of all clients, sorted.
        round_number: the round.

    >>> settings = Settings(rounds=9, evaluate_clients=2, evaluate_all_at_end=True)
    >>> len(sample_evaluated_clients(settings, list("abcd"), 1)), len(sample_evaluated_clients(settings, list("abcd"), 9))
    (2, 4)
    """
    total = len(client_ids)
    if settings.evaluate_all_at_end and round_number == settings.rounds:
        return list(client_ids)
    if isinstance(settings.evaluate_clients, tuple):
        return sorted(settings.evaluate_clients)
    number = settings.count_evaluated(total)
    return list(client_ids) if number == total else draw_clients(client_ids, number, settings.seed, round_number)


def draw_clients(client_ids: Sequence[str], number: int, seed: int, round_number: int) -> list[str]:
    """Draws `number` clients to be evaluated, each set of them equally likely, and returns their ids, sorted."""
    generator = numpy_generator(derive_seed(seed, round_number, "evaluated clients"))
    return sorted(client_ids[i] for i in generator.choice(len(client_ids), number, replace=False))


def has_other_clients_each_round(settings: Settings, num_clients: int) -> bool:
    """Returns True if each round evaluates other clients, so that scores of single rounds cannot be compared."""
    return not isinstance(settings.evaluate_clients, tuple) and settings.count_evaluated(num_clients) < num_clients


def describe_evaluation_sample(
    settings: Settings,
    num_clients: int,
    evaluated: Iterable[str],
    summary: Mapping[str, Mapping[str, float]],
    rows: Mapping[str, Mapping[str, Any]],
    metrics: Sequence[Metric],
) -> dict[str, Any]:
    """Returns the entry `evaluated` of a round's record, as `{"evaluated": {...}}`; empty if all clients were evaluated.

    The entry has the number of evaluated `clients`, how many there are (`of`), and, if they were drawn, `mean_interval`:
    metric -> ends of the 95 % interval of the mean over all clients.

    Args:
        settings: of the run.
        num_clients: of all clients.
        evaluated: the ids of those that were evaluated.
        summary: statistics of each metric over the evaluated clients.
        rows: client id -> values of the metrics.
        metrics: those of the run.
    """
    ids = list(evaluated)
    if len(ids) == num_clients or settings.count_evaluated(num_clients) == num_clients:
        return {}
    entry: dict[str, Any] = {"clients": len(ids), "of": num_clients}
    if not isinstance(settings.evaluate_clients, tuple):
        values = {m.name: [rows[i][m.name] for i in ids if rows[i].get(m.name) is not None] for m in metrics}
        entry["mean_interval"] = {
            m.name: interval
            for m in metrics
            if m.name in summary and (interval := mean_interval(values[m.name], num_clients, are_shares=m.unit == "%"))
        }
    return {"evaluated": entry}


def mean_interval(values: Sequence[float], population: int, *, are_shares: bool = False) -> list[float] | None:
    """Returns the 95 % interval of the mean over `population` from drawn clients; None for one value.

    The variance of the mean of n values, drawn from N without replacement, is (1 - n/N)·s²/n (finite-population
    correction); the quantile is that of Student's t with n - 1 degrees of freedom.

    Args:
        values: of the drawn clients.
        population: N, the number of all clients.
        are_shares: whether the values are shares, so that the interval ends at 0 and 1.

    >>> [round(end, 3) for end in mean_interval([0.4, 0.6, 0.5, 0.7], population=8)]
    [0.405, 0.695]
    >>> mean_interval([0.4, 0.6], population=2)
    [0.5, 0.5]
    """
    if len(values) < 2:
        return None
    from scipy.special import stdtrit  # imported late: it takes a quarter of a second

    sample = np.asarray(values, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        variance = (1 - len(sample) / population) * float(sample.var(ddof=1)) / len(sample)
        half = float(stdtrit(len(sample) - 1, 1 - _ERROR_RATE / 2)) * math.sqrt(max(variance, 0.0))
        ends = [float(sample.mean()) - half, float(sample.mean()) + half]
    if not all(map(math.isfinite, ends)):
        return None
    return [min(max(end, 0.0), 1.0) for end in ends] if are_shares else ends
