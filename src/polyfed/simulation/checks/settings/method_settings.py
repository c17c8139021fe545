"""Checks that the settings of a run suit its method, whether its clients are a list or are made on demand."""

from collections.abc import Sequence
from typing import Any

from polyfed.algorithms import registry_name
from polyfed.core.algorithm import Algorithm
from polyfed.core.errors import UserError
from polyfed.core.robust.parse import parse_robust_rule
from polyfed.core.robust.rule import CombiningRule
from polyfed.simulation.engines.devices import check_engine_installed
from polyfed.simulation.rounds.planning.evaluation_sample import check_evaluation_sample
from polyfed.simulation.rounds.replies.regional_sums import check_regions
from polyfed.simulation.rounds.replies.secure_aggregation import check_secure_support
from polyfed.simulation.scheduling.asynchronous.rules import parse_asynchronous
from polyfed.simulation.settings import Settings


def check_settings_suit_method(algorithm: Algorithm[Any, Any], settings: Settings, client_ids: Sequence[str]) -> None:
    """Raises a `UserError` if settings (secure sums, regions, engine, ...) do not suit the method or clients.

    Args:
        algorithm, settings: of the run.
        client_ids: of all clients, sorted.
    """
    num_round_clients = settings.count_round_clients(len(client_ids))
    check_evaluation_sample(settings, client_ids)
    if settings.secure:
        check_secure_support(algorithm, num_round_clients)
    if settings.regions is not None:
        check_regions(algorithm, settings.regions, client_ids)
    check_robust_rule(algorithm, settings, num_round_clients)
    check_engine_installed(settings.engine)


def check_robust_rule(algorithm: Algorithm[Any, Any], settings: Settings, num_round_clients: int) -> None:
    """Raises a `UserError` if a round or buffer has too few replies for the robust rule.

    Raises:
        UserError: the rule cannot combine so few replies, or protects nothing with them.
    """
    if (rule := parse_robust_rule(getattr(algorithm, "robust", None))) is None:
        return
    asynchronous = parse_asynchronous(settings.asynchronous)
    num_replies = num_round_clients if asynchronous is None else asynchronous.buffer
    error_text = rule.client_count_error(num_replies)
    if error_text is None and asynchronous is not None and num_replies < 3 and isinstance(rule, CombiningRule):
        error_text = f"of fewer than 3 replies it leaves none out, and a server update has {num_replies}"
    if error_text is not None:
        buffer = (
            "" if asynchronous is None else f" (asynchronous={asynchronous.rule}: a round is one buffer of replies)"
        )
        raise UserError(f"{registry_name(algorithm)}: robust='{rule}' is not possible: {error_text}{buffer}")
