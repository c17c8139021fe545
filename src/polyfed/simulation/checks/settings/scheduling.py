"""Checks before the first round that the sampler, the simulated time and the asynchronous rule suit the run."""

from typing import Any

from polyfed.algorithms import REGISTRY, registry_name
from polyfed.algorithms.base.server_update import ServerUpdateMethod
from polyfed.core.algorithm import Algorithm
from polyfed.core.errors import UserError
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.planning.round_scheduler import find_concurrency
from polyfed.simulation.rounds.replies.secure_aggregation import supports_secure_sum
from polyfed.simulation.scheduling.asynchronous.rules import AsynchronousRule, FedAsync, parse_asynchronous
from polyfed.simulation.scheduling.sampling.registry import build_sampler
from polyfed.simulation.scheduling.sampling.sampler import AvailableSampler
from polyfed.simulation.scheduling.timing.build_times import build_client_times

# What a reply holds that has no earlier version.
_NO_WEIGHTS = frozenset({"class_means", "representations", "guidance"})


def check_scheduling(federation: Federation) -> None:
    """Raises a `UserError` if a run's sampler, simulated time or asynchronous rule does not suit its clients or method.

    Raises:
        UserError: an unknown sampler or one that lacks what it reads, a client without speed or availability, or a method,
            a setting or a number of clients with which asynchronous rounds are not possible.
    """
    settings = federation.settings
    sampler = federation.sampler or build_sampler(settings.sampler)
    name = type(sampler).__name__
    if sampler.reads_losses and settings.secure:
        raise UserError(
            f"sampler {name} reads the clients' training losses, which secure=True hides; leave one of them out"
        )
    if sampler.reads_losses and getattr(federation.algorithm, "privacy", None) is not None:
        raise UserError(
            f"sampler {name} reads the clients' training losses, which privacy withholds; leave one of them out"
        )
    if isinstance(sampler, AvailableSampler) and settings.availability is None:
        raise UserError("sampler='available' needs to know when clients are available; give availability=...")
    build_client_times(settings, federation.algorithm, federation.client_registry)
    rule = parse_asynchronous(settings.asynchronous)
    if rule is not None:
        check_asynchronous_support(federation.algorithm, rule)
        find_concurrency(federation)
        if rule.buffer > (number := len(federation.client_registry.ids)):
            raise UserError(
                f"asynchronous={rule.rule}: buffer={rule.buffer} waits for more clients than the {number} there are; a "
                "client sends one reply to a buffer"
            )


def supports_asynchronous(algorithm: Algorithm[Any, Any], rule: AsynchronousRule) -> bool:
    """Returns True if a method can run in asynchronous rounds with this rule."""
    try:
        check_asynchronous_support(algorithm, rule)
    except UserError:
        return False
    return True


def check_asynchronous_support(algorithm: Algorithm[Any, Any], rule: AsynchronousRule) -> None:
    """Raises a `UserError` if a method cannot run in asynchronous rounds.

    The server must need no more than the mean of replies, and replies must hold weights of which an earlier version exists.
    """
    name = registry_name(algorithm)
    if getattr(algorithm, "adapters", None) is not None:
        raise UserError(
            f"asynchronous={rule.rule} adds changes to the newest weights, and with adapters=... ranks differ; leave one of "
            "them out"
        )
    if not _is_mean_of_weights(algorithm):
        able = [n for n, method in REGISTRY.items() if _has_default_form(method)]
        raise UserError(
            f"asynchronous={rule.rule} needs a method whose server takes the mean of the clients' weights, and {name} does "
            f"not; methods that do: {', '.join(able)}"
        )
    if isinstance(rule, FedAsync) and isinstance(algorithm, ServerUpdateMethod):
        raise UserError(
            f"asynchronous=fedasync mixes each client's model into the global one, and the server of {name} makes a step of "
            "its own; give asynchronous=fedbuff, or another method"
        )


def _is_mean_of_weights(algorithm: Algorithm[Any, Any]) -> bool:
    return (
        supports_secure_sum(algorithm)
        and not algorithm.discloses & _NO_WEIGHTS
        and not algorithm.traits & {"everyone_trains", "one_version"}
    )


def _has_default_form(method: type[Algorithm[Any, Any]]) -> bool:
    """Returns True if a method of the registry, with its default fields, can run in asynchronous rounds."""
    try:
        return _is_mean_of_weights(method())
    except (TypeError, UserError):  # it has no defaults for all fields
        return False
