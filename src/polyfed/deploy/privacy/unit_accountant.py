"""Computes the ε that a site's releases guarantee to each example or patient, and records training steps in the ledger.

A step of training with `privacy` is a sampled Gaussian mechanism; a message with the site's own noise, which hides the whole
data set, hides each patient in it too. All compose by their Rényi divergences (Mironov, Talwar and Zhang 2019). Steps are
recorded before their noise is drawn: those that are then not carried out waste some budget.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from polyfed.core.errors import UserError
from polyfed.core.training.privacy.randomness import PrivateSteps
from polyfed.core.training.privacy.sampled_gaussian import epsilon_of_divergences, renyi_divergences
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection
from polyfed.deploy.privacy.ledger import Ledger, StepKind, read_ledger, write_ledger


def compute_unit_epsilon(
    messages: Mapping[float, int], private_steps: Mapping[StepKind, int], unit: str, delta: float
) -> float:
    """Returns the ε of each unit under all releases of a data set; infinite if one had no protection.

    That is a message with neither noise nor privacy, or steps that protected another unit.

    Args:
        messages: number of messages sent with each noise multiplier of the site.
        private_steps: number of steps of each kind.
        unit: "example" or "group".
        delta: δ.

    >>> round(compute_unit_epsilon({}, {StepKind("example", 0.01, 1.0): 1000}, "example", 1e-5), 2)
    2.11
    """
    if 0.0 in messages or any(kind.unit != unit for kind in private_steps):
        return math.inf
    if not messages and not private_steps:
        return 0.0
    of_steps = [n * renyi_divergences(kind.sampling_rate, kind.noise_multiplier) for kind, n in private_steps.items()]
    of_messages = [n * renyi_divergences(1.0, z / 2) for z, n in messages.items()]  # a change moves by at most 2C
    return epsilon_of_divergences(np.sum([*of_steps, *of_messages], axis=0), delta)


def read_spent_unit_epsilon(file: Path, data_set: str, unit: str, delta: float) -> float:
    """Returns the ε that all that the ledger has of a data set has spent for each unit.

    Raises:
        UserError: the ledger is lost or damaged.
    """
    return _unit_epsilon_of_data_set(read_ledger(file), data_set, unit, delta)


def mark_private_run(file: Path, data_set: str) -> None:
    """Records in the ledger that a run with `privacy` uses a data set, which ends the guarantee for the whole data set."""
    ledger = read_ledger(file)
    if data_set not in ledger.private_steps:
        write_ledger(file, replace(ledger, private_steps={**ledger.private_steps, data_set: {}}))


def check_budget_for_steps(file: Path, data_set: str, protection: ReplyProtection, steps: PrivateSteps) -> None:
    """Raises a `UserError` if so many more steps would exceed the budget of a unit; records nothing."""
    _count_more_steps(file, data_set, protection, steps)


def record_private_steps(file: Path, data_set: str, protection: ReplyProtection, steps: PrivateSteps) -> float:
    """Records in the ledger that training steps are about to be carried out, and returns the ε of each unit with them.

    Raises:
        UserError: the units would exceed `max_epsilon` (they are not recorded then), or the ledger is lost or damaged.
    """
    ledger, epsilon = _count_more_steps(file, data_set, protection, steps)
    write_ledger(file, ledger)
    return epsilon


def _count_more_steps(
    file: Path, data_set: str, protection: ReplyProtection, steps: PrivateSteps
) -> tuple[Ledger, float]:
    """Returns the ledger with more steps, and the ε of each unit with them; raises a `UserError` if it is too large."""
    ledger, kind = read_ledger(file), StepKind(steps.unit, steps.sampling_rate, steps.noise_multiplier)
    page = dict(ledger.private_steps.get(data_set, {}))
    page[kind] = page.get(kind, 0) + steps.number
    ledger = replace(ledger, private_steps={**ledger.private_steps, data_set: page})
    epsilon = _unit_epsilon_of_data_set(ledger, data_set, steps.unit, protection.delta)
    if protection.max_epsilon is not None and epsilon > protection.max_epsilon:
        raise UserError(
            f"epsilon of each {steps.unit} would be {epsilon:.3g}{_reason_of_infinity(ledger, data_set, steps.unit)}, above "
            f"max-epsilon = {protection.max_epsilon:g} of the data set {data_set!r}, with {steps.number} more steps of "
            f"noise {steps.noise_multiplier:.3g}"
        )
    return ledger, epsilon


def _unit_epsilon_of_data_set(ledger: Ledger, data_set: str, unit: str, delta: float) -> float:
    messages, steps = ledger.messages.get(data_set, {}), ledger.private_steps.get(data_set, {})
    return compute_unit_epsilon(messages, steps, unit, delta)


def _reason_of_infinity(ledger: Ledger, data_set: str, unit: str) -> str:
    """Returns why the ε of a unit is infinite, in brackets; "" if it is finite."""
    if number := ledger.messages.get(data_set, {}).get(0.0, 0):
        return f" ({number} messages have left without noise or privacy)"
    other_units = {kind.unit for kind in ledger.private_steps.get(data_set, {})} - {unit}
    return f" (earlier runs protected each {other_units.pop()} instead)" if other_units else ""
