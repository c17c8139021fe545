"""Computes the (ε, δ)-differential privacy of the noisy messages that a site has sent, and counts these messages in a
file, the privacy ledger.

Exchanging the whole data set of a site moves the clipped change by at most 2C, so that each message is a Gaussian mechanism
with μ = 2/z (Dong, Roth and Su 2022, "Gaussian Differential Privacy"). Messages compose to one Gaussian mechanism with
μ² = Σ μ_i², even if the server chooses each request by the earlier replies. Its privacy loss distribution is normal, so that
(ε, δ) is known exactly (Balle and Wang 2018, "Improving the Gaussian Mechanism for Differential Privacy"), and no accountant
can give less. Discretised privacy loss distributions, as in dp-accounting, approach the same value from above
(`tests/deploy/privacy/test_accountant.py`), but need minutes and gigabytes where z is small.
"""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypedDict

from scipy.special import log_ndtr

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import MAX_ROUNDS_BYTES, read_file, write_file_atomically
from polyfed.core.io.validation import parse_json, validation_error
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection

_LOG = logging.getLogger("polyfed.site")
_BISECTION_STEPS = 200  # more than float64 can tell apart


class _LedgerContent(TypedDict):
    """Describes the JSON in the ledger: for each data set, the number of messages sent with each noise multiplier."""

    version: Literal[1]
    data_sets: dict[str, dict[str, int]]


def compute_epsilon(message_count_by_noise_multiplier: Mapping[float, int], delta: float) -> float:
    """Returns the ε of the (ε, δ)-differential privacy that all messages of a site guarantee together; infinite if a
    message had no noise.

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


def record_message_and_get_epsilon(ledger: Path, data_set: str, protection: ReplyProtection) -> float:
    """Records in a site's privacy ledger (a JSON file) that one message is about to be sent, and returns the ε of all
    recorded messages; raises an error if the message would exceed the budget.

    The ledger counts every message about a data set over all runs, methods, networks and settings, even if rows or test
    examples changed. Only the owner can start a new count, by giving the data set another name. The caller records a message
    before it looks at the data, and must be the ledger's only writer.

    Args:
        ledger: a JSON file, created with the first message.
        data_set: the owner's name of the data set.
        protection: the clipping and noise of the message. Without noise it is recorded too, and ε becomes infinite.

    Returns:
        The ε of all messages about this data set.

    Raises:
        UserError: the message would exceed `max_epsilon` (it is not recorded then), or the ledger is lost or damaged.
    """
    messages_by_data_set, messages_by_multiplier, total_epsilon = _count_one_more_message(ledger, data_set, protection)
    if data_set not in messages_by_data_set and protection.noise_multiplier:
        other_data_sets = ", ".join(map(repr, sorted(messages_by_data_set))) or "none"
        _LOG.warning("the budget of the data set %r begins (others of this site: %s)", data_set, other_data_sets)
    content = {
        name: {str(z): number for z, number in entries.items()}
        for name, entries in {**messages_by_data_set, data_set: messages_by_multiplier}.items()
    }
    write_file_atomically(ledger, json.dumps({"version": 1, "data_sets": content}).encode())
    message_counts = {
        name: sum(entries.values())
        for name, entries in {**messages_by_data_set, data_set: messages_by_multiplier}.items()
    }
    write_file_atomically(
        _count_file(ledger), json.dumps(message_counts).encode()
    )  # written last, so that the ledger is never behind its count
    return total_epsilon


def read_spent_epsilon(ledger: Path, data_set: str, protection: ReplyProtection) -> float:
    """Returns the ε that all messages recorded in a site's privacy ledger have spent for one data set, at the δ in
    `protection`.

    Raises:
        UserError: the ledger is lost or damaged.
    """
    return compute_epsilon(_read_ledger(ledger).get(data_set, {}), protection.delta)


def check_budget_for_next_message(ledger: Path, data_set: str, protection: ReplyProtection) -> None:
    """Raises an error if one more message would exceed the site's privacy budget (largest ε); does not record a
    message.

    Raises:
        UserError: as `record_message_and_get_epsilon`.
    """
    _count_one_more_message(ledger, data_set, protection)


def _count_one_more_message(
    ledger: Path, data_set: str, protection: ReplyProtection
) -> tuple[dict[str, dict[float, int]], dict[float, int], float]:
    """Computes what the ledger's counts and ε would be after one more message about a data set, without writing the
    ledger.

    Returns:
        The ledger as it is, the message counts of the data set with one more message, and their ε.
    """
    messages_by_data_set = _read_ledger(ledger)
    messages_by_multiplier = dict(messages_by_data_set.get(data_set, {}))
    messages_by_multiplier[protection.noise_multiplier] = messages_by_multiplier.get(protection.noise_multiplier, 0) + 1
    total_epsilon = compute_epsilon(messages_by_multiplier, protection.delta)
    if protection.max_epsilon is not None and total_epsilon > protection.max_epsilon:
        unprotected = (
            f" ({messages_by_multiplier[0.0]} messages have left without noise)"
            if 0.0 in messages_by_multiplier
            else ""
        )
        raise UserError(
            f"epsilon would be {total_epsilon:.3g}{unprotected}, above max-epsilon = {protection.max_epsilon:g} of the "
            f"data set {data_set!r}; nothing more is sent"
        )
    return messages_by_data_set, messages_by_multiplier, total_epsilon


def _read_ledger(ledger: Path) -> dict[str, dict[float, int]]:
    """Reads the ledger: data set -> noise multiplier -> number of messages sent.

    Raises:
        UserError: `record_message_and_get_epsilon` did not write this ledger, or it is missing although messages were sent.
    """
    advice = "put back a copy of it; without one, nobody knows what has been spent, and nothing is sent"
    if not ledger.exists():
        if _count_file(ledger).exists() or any(
            b'"epsilon"' in read_file(file, MAX_ROUNDS_BYTES) for file in ledger.parent.glob("*/metrics.jsonl")
        ):
            raise UserError(f"{ledger} is missing, and runs beside it have sent messages; {advice}")
        return {}
    try:
        content = parse_json(read_file(ledger))
        if wrong := validation_error(content, _LedgerContent):
            raise ValueError(wrong)
        pages = {
            name: dict(_parse_entry(z, number) for z, number in page.items())
            for name, page in content["data_sets"].items()
        }
    except (OSError, ValueError) as error:
        raise UserError(f"{ledger} is damaged ({error}); {advice}") from error
    _check_not_older(ledger, pages)
    return pages


def _count_file(ledger: Path) -> Path:
    """Returns the path of a second file with the number of messages sent about each data set, by which an outdated copy
    of the ledger is detected.
    """
    return ledger.with_name(f"{ledger.stem}-count.json")


def _check_not_older(ledger: Path, messages_by_data_set: Mapping[str, Mapping[float, int]]) -> None:
    """Raises a `UserError` if the ledger counts fewer messages than were sent, so that it must be an outdated copy."""
    file = _count_file(ledger)
    if not file.exists():  # of an earlier version, or before the first message
        return
    try:
        message_counts = parse_json(read_file(file))
        if wrong := validation_error(message_counts, dict[str, int]):
            raise ValueError(wrong)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} is damaged ({error}); it shows whether {ledger.name} is an older copy. Remove it if that ledger is "
            "the newest"
        ) from error
    for data_set, number in message_counts.items():
        if (recorded := sum(messages_by_data_set.get(data_set, {}).values())) < number:
            raise UserError(
                f"{ledger} has {recorded} messages about the data set {data_set!r}, and {number} were sent: it is an "
                "older copy or was changed. Put back the newest, or add the missing messages by hand; nothing is sent "
                "until then"
            )


def _parse_entry(multiplier: str, number: int) -> tuple[float, int]:
    z = float(multiplier)
    if not 0 <= z < math.inf or number < 1:
        raise ValueError(f"it has the entry {multiplier!r}: {number!r}")
    return z, number
