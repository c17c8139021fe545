"""Lets a site take part in runs with `privacy`: with random numbers of its own secret, and each step in its ledger.

The steps of a training are recorded before its first sample is drawn. So a site that is killed at any time has released
nothing that its ledger does not have, and steps that were recorded and not carried out waste some budget.
"""

import hashlib
import hmac
import json
import logging
import math
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, final

from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import read_file, write_file_atomically
from polyfed.core.io.values.validation import parse_json, validation_error
from polyfed.core.serialization import serialize_state
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.privacy.options import Privacy
from polyfed.core.training.privacy.private_backend import number_of_units
from polyfed.core.training.privacy.randomness import PrivateRandomness, PrivateSteps, use_randomness_source
from polyfed.data.tabular.preprocessing import TablePreprocessor
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection
from polyfed.deploy.privacy.secret_randomness import SecretRandomness
from polyfed.deploy.privacy.unit_accountant import (
    check_budget_for_steps,
    mark_private_run,
    read_spent_unit_epsilon,
    record_private_steps,
)
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.site.request_log import hash_task_inputs
from polyfed.deploy.site.site_task import SiteTask
from polyfed.simulation.checks.settings.private_training import check_privacy_covers_method, check_privacy_suits_client
from polyfed.simulation.engines.base import Engine, TaskResult

_LOG = logging.getLogger("polyfed.site")
_PERSONAL_NOISE_FILE = "personal-noise.json"
_MOST_STEPS = 10**12


class _PersonalNoise(TypedDict):
    """Describes the newest evaluation's secret: hash of inputs, key, and trainings in the ledger."""

    inputs: str
    key: str
    recorded: int


def private_training_options(algorithm: Algorithm[Any, Any]) -> tuple[LocalTraining, Privacy] | None:
    """Returns a method and its `privacy`; None if it trains without."""
    if not isinstance(algorithm, LocalTraining) or algorithm.privacy is None:
        return None
    return algorithm, algorithm.privacy


@final
@dataclass(frozen=True)
class PrivateTrainingGuard:
    """Keeps the budget of each example or patient of a site.

    Args:
        ledger: the privacy ledger.
        data_set: the owner's name of the data set.
        protection: δ and the budget, `max_epsilon`.
    """

    ledger: Path
    data_set: str
    protection: ReplyProtection

    def check_budget_is_left(self, algorithm: Algorithm[Any, Any]) -> None:
        """Raises a `RefusalError` if the method has `privacy` and the budget of a unit is spent; looks at no data."""
        if (private := private_training_options(algorithm)) is None:
            return
        unit, limit = private[1].unit, self.protection.max_epsilon
        spent = read_spent_unit_epsilon(self.ledger, self.data_set, unit, self.protection.delta)
        if limit is not None and spent > limit:
            _LOG.error("epsilon of each %s of the data set %r is %.3g, above %g", unit, self.data_set, spent, limit)
            raise RefusalError(
                f"what it has sent before leaves no budget (max-epsilon) for each {unit} of its data set"
            )

    def check_run_if_new(self, client: Client, algorithm: Algorithm[Any, Any], folder: Path) -> None:
        """Raises a `RefusalError` if a new run cannot keep its `privacy` or budget; else records it.

        The server gets a sentence without numbers of the data; the site's log has all. A run that goes on has spent a part
        of its plan, so that its steps are checked one training at a time.

        Args:
            client: the site's client.
            algorithm: the method.
            folder: the run's folder at the site.
        """
        if (private := private_training_options(algorithm)) is not None and not (folder / "run.json").exists():
            self._check_plan(client, *private)
            mark_private_run(self.ledger, self.data_set)

    def _check_plan(self, client: Client, algorithm: LocalTraining, privacy: Privacy) -> None:
        try:
            check_privacy_covers_method(algorithm, [client.id])
        except UserError as error:  # it depends on the method alone
            raise RefusalError(str(error)) from error
        if self.protection.protects_units and privacy.unit == "example" and client.train.group is not None:
            raise RefusalError(
                "its max-epsilon is of each group of rows, such as a patient; run with algorithm.privacy.unit = 'group'"
            )
        if not privacy.run_epochs + privacy.run_steps:
            raise RefusalError(
                "the server does not say how many steps the run has, on which the noise of privacy depends"
            )
        if isinstance(client.train.transform, TablePreprocessor):
            _LOG.warning(
                "means and spreads of the table's columns are computed without noise; epsilon does not cover them"
            )
        try:
            check_privacy_suits_client(client, algorithm)
            rate = algorithm.sampling_rate(number_of_units(client.train, privacy))
            noise_multiplier = privacy.noise_for(rate)
        except UserError as error:
            _LOG.error("%s", error)
            raise RefusalError(
                "its network, task or number of examples does not suit this privacy; its log says why, and the cure"
            ) from error
        self._check_steps(PrivateSteps(privacy.unit, rate, noise_multiplier, privacy.number_of_steps(rate)), "this run")

    def _check_steps(self, steps: PrivateSteps, purpose: str) -> None:
        if steps.number > _MOST_STEPS:
            raise RefusalError(f"{purpose} has {steps.number} steps, and a site counts at most {_MOST_STEPS}")
        try:
            check_budget_for_steps(self.ledger, self.data_set, self.protection, steps)
        except UserError as error:
            _LOG.error("%s", error)
            raise RefusalError(
                f"{purpose} would spend more than the budget (max-epsilon) of each {steps.unit} of its data set; take a "
                "smaller target_epsilon or a larger noise_multiplier, or fewer rounds"
            ) from error

    def record_steps(self, steps: PrivateSteps) -> float:
        """Records steps in the ledger and returns each unit's ε; raises a `RefusalError` over the budget."""
        self._check_steps(steps, "this training")
        epsilon, delta = record_private_steps(self.ledger, self.data_set, self.protection, steps), self.protection.delta
        _LOG.info(
            "(epsilon, delta) spent for each %s of the data set %r: (%.3g, %g)",
            steps.unit,
            self.data_set,
            epsilon,
            delta,
        )
        return epsilon


@final
class PrivateTask:
    """Supplies the private trainings of one task with secret random numbers, once the ledger has their steps.

    An evaluation that trains, such as fine-tuning, is repeated with the same random numbers if the same network is to be
    made again, for the export at the end of the run: then it is the network that was evaluated, and costs nothing more.

    Args:
        guard: keeps the budget.
        algorithm: the method, with or without `privacy`.
        site_task: the task.
        folder: the run's folder at the site.
    """

    def __init__(
        self, guard: PrivateTrainingGuard, algorithm: Algorithm[Any, Any], site_task: SiteTask, folder: Path
    ) -> None:
        self._guard, self._options, self._site_task = guard, private_training_options(algorithm), site_task
        self._file = folder / _PERSONAL_NOISE_FILE
        self._trainings, self._epsilon = 0, math.nan
        self._personal: _PersonalNoise | None = None

    def run(self, engine: Engine) -> TaskResult:
        """Runs the task and returns its result.

        Raises:
            RefusalError: the budget refused a training of the task.
            RuntimeError: the method has `privacy`, and the reply was computed without private training.
        """
        with use_randomness_source(self._begin_training):
            result = next(iter(engine.run([self._site_task.task])))
        if result.failure is not None and isinstance(refusal := result.failure.__cause__, RefusalError):
            raise refusal
        is_local = self._site_task.task.phase == "local"
        if self._options is not None and is_local and result.failure is None and not self._trainings:
            raise RuntimeError("the method has privacy, but has trained without it; nothing is sent")
        return result

    def describe_cost(self) -> dict[str, Any]:
        """Returns the ε and δ of each unit after this task, for the site's own record; empty if it trained nothing."""
        if self._options is None or not self._trainings:
            return {}
        epsilon = self._epsilon if math.isfinite(self._epsilon) else None
        return {"epsilon": epsilon, "delta": self._guard.protection.delta, "privacy_unit": self._options[1].unit}

    def _begin_training(self, steps: PrivateSteps) -> PrivateRandomness:
        self._trainings += 1
        if self._site_task.task.phase == "local":
            self._epsilon = self._guard.record_steps(steps)
            return SecretRandomness()
        personal = self._read_personal_noise() if self._personal is None else self._personal
        if personal["recorded"] >= self._trainings:
            self._epsilon = read_spent_unit_epsilon(
                self._guard.ledger, self._guard.data_set, steps.unit, self._guard.protection.delta
            )
        else:
            self._epsilon = self._guard.record_steps(steps)
            personal = {**personal, "recorded": self._trainings}
            write_file_atomically(self._file, json.dumps(personal).encode())
        self._personal = personal
        return SecretRandomness(_derive_key(bytes.fromhex(personal["key"]), self._trainings, steps))

    def _read_personal_noise(self) -> _PersonalNoise:
        """Returns the stored secret of the trainings with exactly these inputs, or a new one."""
        inputs = self._hash_inputs_of_personal_network()
        try:
            stored = parse_json(read_file(self._file)) if self._file.exists() else None
        except (OSError, ValueError):  # another secret costs some budget, and is as safe
            stored = None
        if stored is None or validation_error(stored, _PersonalNoise) or stored["inputs"] != inputs:
            return {"inputs": inputs, "key": secrets.token_hex(32), "recorded": 0}
        return _PersonalNoise(inputs=inputs, key=stored["key"], recorded=stored["recorded"])

    def _hash_inputs_of_personal_network(self) -> str:
        """Returns a hash of all that decides the personal network apart from its noise: message, private state and data."""
        head, task = {**self._site_task.head, "phase": "personal", "metrics": None}, self._site_task.task
        digest = hashlib.sha256(hash_task_inputs(head, task.message).encode())
        digest.update(serialize_state(task.client_state))
        digest.update(read_file(self._file.with_name("run.json")))  # has the fingerprint of data and network
        return digest.hexdigest()


def _derive_key(key: bytes, number: int, steps: PrivateSteps) -> bytes:
    """Returns the key of a training's random numbers, from the task's key and what the training does."""
    return hmac.digest(key, f"{number} {steps}".encode(), "sha256")
