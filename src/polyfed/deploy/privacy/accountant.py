"""Computes the (ε, δ)-differential privacy of the noisy messages that a site has sent, and counts these messages in a
file, the privacy ledger.

Exchanging the whole data set of a site moves the clipped change by at most 2C, so that each message is a Gaussian mechanism
with μ = 2/z (Dong, Roth and Su 2022, "Gaussian Differential Privacy"). Messages compose to one Gaussian mechanism with
μ² = Σ μ_i², even if the server chooses each request by the earlier replies. Its privacy loss distribution is normal, so that
(ε, δ) is known exactly (Balle and Wang 2018, "Improving the Gaussian Mechanism for Differential Privacy"), and no accountant
can give less. Discretised privacy loss distributions, as in dp-accounting, approach the same value from above
(`tests/deploy/privacy/test_accountant.py`), but need minutes and gigabytes where z is small.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from scipy.special import log_ndtr

from polyfed.core.errors import UserError
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection
from polyfed.deploy.privacy.ledger import Ledger, read_ledger, write_ledger

_LOG = logging.getLogger("polyfed.site")
_BISECTION_STEPS = 200  # more than float64 can tell apart


def compute_epsilon(message_count_by_noise_multiplier: Mapping[float, int], delta: float) -> float:
    """Returns the ε of (ε, δ)-differential privacy of all messages; infinite if one had no noise.

    Neighbouring data sets differ in the site's whole data set. ε is infinite as soon as one message had no noise.

    Args:
        message_count_by_noise_multiplier: number of messages sent with each noise multiplier z (`ReplyProtection`).
        delta: δ.

    >>> round(compute_epsilon({8.0: 100}, 1e-5), 2), compute_epsilon({8.0: 100, 0.0: 1}, 1e-5), compute_epsilon({}, 1e-5)
    (13.21, inf, 0.0)
    """
    sent = {multiplier: number for multiplier, number in message_count_by_noise_multiplier.items() if number}
    if any(multiplier <= 0 for multiplier in sent):
        return math.inf
    mu = math.sqrt(sum(number * (2 / multiplier) * (2 / multiplier) for multiplier, number in sent.items()))
    target = math.log(delta)
    if not mu or _log_delta(0.0, mu) <= target:
        return 0.0
    low, high = 0.0, 1.0
    while math.isfinite(high) and _log_delta(high, mu) > target:
        low, high = high, 2 * high
    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _log_delta(middle, mu) > target else (low, middle)
    return high  # of the two ends, the one at which the guarantee holds


def _log_delta(epsilon: float, mu: float) -> float:
    """Returns the logarithm of the δ that a Gaussian mechanism guarantees at a given ε.

    With Φ, the distribution function of N(0, 1), it is ln δ(ε) = ln(Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ)).
    """
    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return first + math.log(-math.expm1(second - first)) if second < first else -math.inf


def record_message_and_get_epsilon(file: Path, data_set: str, protection: ReplyProtection) -> float:
    """Records in the ledger that a message is about to be sent, and returns the ε of all.

    The ledger counts every message about a data set over all runs, methods, networks and settings, even if rows or test
    examples changed. Only the owner can start a new count, by giving the data set another name. The caller records a message
    before it looks at the data, and must be the ledger's only writer.

    Args:
        file: a JSON file, created with the first message.
        data_set: the owner's name of the data set.
        protection: the clipping and noise of the message. Without noise it is recorded too, and ε becomes infinite.

    Returns:
        The ε of all messages about this data set.

    Raises:
        UserError: the message would exceed `max_epsilon` (it is not recorded then), or the ledger is lost or damaged.
    """
    ledger, total_epsilon = _count_one_more_message(file, data_set, protection)
    if sum(ledger.messages[data_set].values()) == 1 and protection.noise_multiplier:
        other_data_sets = ", ".join(map(repr, sorted(ledger.messages.keys() - {data_set}))) or "none"
        _LOG.warning("the budget of the data set %r begins (others of this site: %s)", data_set, other_data_sets)
    write_ledger(file, ledger)
    return total_epsilon


def read_spent_epsilon(file: Path, data_set: str, protection: ReplyProtection) -> float:
    """Returns the ε that recorded messages have spent for a data set, at the δ of `protection`.

    Raises:
        UserError: the ledger is lost or damaged.
    """
    return _epsilon_of_data_set(read_ledger(file), data_set, protection.delta)


def check_budget_for_next_message(file: Path, data_set: str, protection: ReplyProtection) -> None:
    """Raises an error if one more message would exceed the privacy budget; records nothing.

    Raises:
        UserError: as `record_message_and_get_epsilon`.
    """
    _count_one_more_message(file, data_set, protection)


def _count_one_more_message(file: Path, data_set: str, protection: ReplyProtection) -> tuple[Ledger, float]:
    """Returns the ledger with one more message, unwritten, and its ε; raises a `UserError` over the budget."""
    ledger = read_ledger(file)
    messages = dict(ledger.messages.get(data_set, {}))
    messages[protection.noise_multiplier] = messages.get(protection.noise_multiplier, 0) + 1
    ledger = replace(ledger, messages={**ledger.messages, data_set: messages})
    total_epsilon = _epsilon_of_data_set(ledger, data_set, protection.delta)
    if protection.max_epsilon is not None and total_epsilon > protection.max_epsilon:
        unprotected = f" ({messages[0.0]} messages have left without noise)" if 0.0 in messages else ""
        if data_set in ledger.private_steps:
            unprotected = " (runs with privacy have left without noise that hides the whole data set)"
        raise UserError(
            f"epsilon would be {total_epsilon:.3g}{unprotected}, above max-epsilon = {protection.max_epsilon:g} of the "
            f"data set {data_set!r}; nothing more is sent"
        )
    return ledger, total_epsilon


def _epsilon_of_data_set(ledger: Ledger, data_set: str, delta: float) -> float:
    """Returns ε for the exchange of a whole data set, which training with `privacy` does not hide."""
    return math.inf if data_set in ledger.private_steps else compute_epsilon(ledger.messages.get(data_set, {}), delta)
