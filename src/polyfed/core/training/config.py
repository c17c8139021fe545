"""Defines the hyper-parameters of local training that methods share, and that the training loop `fit` reads."""

import dataclasses
import fnmatch
import math
from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.values.frozen_mapping import FrozenMapping
from polyfed.core.io.values.number_checks import is_real_number
from polyfed.core.io.values.plain_values import convert_numpy_fields_in_place
from polyfed.core.io.values.validation import field_types
from polyfed.core.nn.buffers import BufferPolicy
from polyfed.core.nn.optimizers import check_optimizer
from polyfed.core.tasks.task import Loss
from polyfed.core.training.field_ranges import MAX_FLOAT32, check_field_ranges
from polyfed.core.training.losses import ClassWeights, build_loss
from polyfed.core.training.precision import Precision
from polyfed.core.training.privacy.options import Privacy

Schedule = Literal["constant", "cosine", "exponential"]
_MIN_FLOAT32 = 1.2e-38  # below it all weights may become 0


@dataclass(frozen=True, kw_only=True)
class LocalTraining(ABC):
    """Holds the hyper-parameters of local training; every method that trains on clients inherits them.

    Defaults without a paper are polyfed's choice.

    Args:
        local_epochs: passes over the client's training examples in a round.
        local_steps: if given, exactly this many minibatches instead of `local_epochs`.
        batch_size: examples in a minibatch; 0 takes all of the client's examples (full batch).
        lr: learning rate of round 1.
        schedule: how `lr` falls over the rounds t = 1..R: "constant"; "cosine", lr·½(1 + cos(π(t−1)/R)); "exponential",
            lr·decay^(t−1).
        decay: factor a round of the exponential schedule.
        warmup_rounds: w; in the first w rounds the rate is t/(w+1) of what the schedule says.
        warmup_steps: w; in the first w steps of each round the s-th has s/(w+1) of the round's rate, since the optimiser
            starts afresh.
        optimizer: "sgd", "adam", "adamw", or any class of `torch.optim` by its name; started afresh each round.
        optimizer_options: further arguments of that class, such as {"betas": [0.9, 0.95]}.
        momentum, nesterov: of SGD.
        weight_decay: L2 penalty, as the optimiser applies it.
        lr_by_name: factors of the rate by the names of parameters, {"head.*": 10, "*.bias": 2}; of the patterns that fit,
            the first holds, and 1 where none does. (What is not to be trained has `requires_grad=False`.)
        accumulate: minibatches of which each step takes the mean gradient, so that k of b examples are one of k·b in
            the memory of b; `local_steps` counts steps.
        clip_norm: gradients are scaled down to at most this global norm; None leaves them.
        label_smoothing: of the cross-entropy (classification only).
        class_weights: of the task's loss: numbers, one a class, or "balanced", the inverse of how often the client has
            each; see `polyfed.core.training.losses`. A client's own loss has its own.
        sampler: "shuffle" draws each example once an epoch; "balanced" as many, with replacement, every class as often as
            the others; the name of a column of the training examples, by the weights in it.
        patience: stop a round's training after so many epochs in a row without a lower loss on the client's validation
            examples, which every client must have; None trains on to the end. It never trains longer.
        buffers: "average", "local" or "recompute", see `polyfed.core.nn.buffers`.
        precision: "fp32", or "bf16" for autocast to bfloat16 (weights stay float32).
        privacy: differentially private training, `polyfed.Privacy(target_epsilon=8.0)`, say; None trains without noise.

    Raises:
        UserError: a value outside its range, with the value.
    """

    private_fits: ClassVar[tuple[str, ...]] = ()
    """The fields with the epochs of each `fit` that a client makes in a round, to train and to be evaluated, where noise on
    gradients covers all that the method computes from training examples; `local_epochs` first, None means as many. Empty
    where it is not known to, and `privacy` is refused."""

    local_epochs: int = 1
    local_steps: int | None = None
    batch_size: int = 32
    lr: float = 0.01
    schedule: Schedule = "constant"
    decay: float = 0.99
    warmup_rounds: int = 0
    warmup_steps: int = 0
    optimizer: str = "sgd"
    optimizer_options: Mapping[str, Any] | None = None
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    lr_by_name: Mapping[str, float] | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    label_smoothing: float = 0.0
    class_weights: ClassWeights = None
    sampler: str = "shuffle"
    patience: int | None = None
    buffers: BufferPolicy = "average"
    precision: Precision = "fp32"
    privacy: Privacy | None = None

    def __post_init__(self) -> None:
        convert_numpy_fields_in_place(self)
        self._check_kinds()
        check_field_ranges(type(self).__name__, vars(self))
        self._require(not self.nesterov or self.momentum > 0, "nesterov", "false unless momentum is positive")
        self._require(isinstance(self.sampler, str), "sampler", "'shuffle', 'balanced' or the name of a column")
        privacy: Any = self.privacy
        if isinstance(privacy, Mapping):  # from a file
            object.__setattr__(self, "privacy", Privacy.from_mapping(privacy))
        self._require(
            self.privacy is None or isinstance(self.privacy, Privacy), "privacy", "a polyfed.Privacy, or none"
        )
        self._freeze()
        self._require(isinstance(self.optimizer, str), "optimizer", "a name")
        try:
            check_optimizer(self.optimizer, self.weight_decay, self.optimizer_options or {})
        except UserError as error:
            raise UserError(f"{type(self).__name__}: {error}") from None

    def _freeze(self) -> None:
        """Checks lists and mappings in the fields, and replaces them by types that can be hashed."""
        for field in ("optimizer_options", "lr_by_name"):
            value = getattr(self, field)
            self._require(value is None or isinstance(value, Mapping), field, "a mapping from names, or none")
            if value is not None:
                object.__setattr__(self, field, FrozenMapping(value))
        numbers = [value for value in (self.optimizer_options or {}).values() if is_real_number(value)]
        self._require(
            all(abs(number) <= MAX_FLOAT32 for number in numbers), "optimizer_options", "of numbers up to 3.4e38"
        )
        rates = (self.lr_by_name or {}).values()
        self._require(
            all(is_real_number(rate) and 0 < rate <= MAX_FLOAT32 / self.lr for rate in rates),
            "lr_by_name",
            "of positive factors, with which lr stays below 3.4e38",
        )
        weights = self.class_weights
        if weights is not None and weights != "balanced":
            is_number_list = isinstance(weights, tuple | list) and all(
                is_real_number(w) and 0 <= w <= MAX_FLOAT32 for w in weights
            )
            requirement = "'balanced', a list of numbers of at least 0, some of them positive, or none"
            self._require(is_number_list and any(w >= _MIN_FLOAT32 for w in weights), "class_weights", requirement)
            object.__setattr__(self, "class_weights", tuple(weights))

    def _check_kinds(self) -> None:
        """Raises an error if a field's value has the wrong type or is not one of the choices.

        Otherwise 1.5 or "3" for a whole number would fail late, inside a client, or not at all.
        """
        for field, hint in field_types(type(self)).items():
            if get_origin(hint) is Literal:
                value, choices = getattr(self, field), get_args(hint)
                if value not in choices:
                    hints = did_you_mean(str(value), choices)
                    raise UserError(f"{type(self).__name__}: unknown {field} {value!r}; {hints}")
            united = get_origin(hint) in (Union, UnionType)
            kinds, value = set(get_args(hint)) if united else {hint}, getattr(self, field)
            if value is None and NoneType in kinds:
                continue
            if float in kinds:
                self._require(is_real_number(value), field, "a number")
            elif int in kinds:
                self._require(isinstance(value, Integral) and not isinstance(value, bool), field, "a whole number")
            elif bool in kinds:
                self._require(isinstance(value, bool), field, "true or false")

    def _require(self, holds: bool, field: str, requirement: str) -> None:
        if not holds:
            raise UserError(f"{type(self).__name__}: {field} must be {requirement}, got {getattr(self, field)!r}")

    def _at_least(self, least: int, *fields: str) -> None:
        for field in fields:
            self._require_number(field, lambda value: least <= value < math.inf, f"at least {least}")

    def _positive(self, *fields: str) -> None:
        for field in fields:
            self._require_number(field, lambda value: 0 < value < math.inf, "positive")

    def _require_number(self, field: str, holds: Callable[[float], bool], requirement: str) -> None:
        """Raises an error if a field (unless None is allowed) is no number that meets the requirement."""
        value, none = getattr(self, field), NoneType in get_args(field_types(type(self))[field])
        self._require(
            (none and value is None) or holds(value), field, f"{requirement}, or none" if none else requirement
        )

    def lr_at(self, round_number: int, rounds: int) -> float:
        """Returns the learning rate in a round, given the number of the round (from 1) and of all rounds.

        >>> from polyfed.algorithms import FedAvg
        >>> [round(FedAvg(lr=1.0, schedule="cosine").lr_at(t, 4), 3) for t in (1, 2, 3, 4)]
        [1.0, 0.854, 0.5, 0.146]
        """
        past = min(round_number, rounds) - 1
        lr = self.lr
        if past < self.warmup_rounds:
            lr *= (past + 1) / (self.warmup_rounds + 1)
        if self.schedule == "cosine":
            return lr * 0.5 * (1 + math.cos(math.pi * past / rounds))
        return lr * (self.decay**past if self.schedule == "exponential" else 1.0)

    def steps_of_fit(self, num_units: int) -> int:
        """Returns how many optimiser steps one private `fit` takes on this many units."""
        if self.local_steps is not None:
            return self.local_steps
        return self.local_epochs * math.ceil(1 / self.sampling_rate(num_units))

    def sampling_rate(self, num_units: int) -> float:
        """Returns the probability with which a private step takes a unit: `batch_size` over the number of units."""
        return min(1.0, (self.batch_size or num_units) / num_units)

    def with_privacy_of_run(self, rounds: int) -> Self:
        """Returns the method with the epochs and steps that a client takes in a run of this many rounds, in `privacy`."""
        if self.privacy is None:
            return self
        fits = [None, *(getattr(self, name) for name in self.private_fits[1:])]  # None: as local training
        like_local, epochs = fits.count(None), sum(number for number in fits if number is not None)
        if self.local_steps is None:
            epochs += like_local * self.local_epochs
        privacy = dataclasses.replace(
            self.privacy, run_epochs=rounds * epochs, run_steps=rounds * like_local * (self.local_steps or 0)
        )
        return dataclasses.replace(self, privacy=privacy)

    def criterion(self, client: Client) -> Loss:
        """Returns a client's loss function: its own, or the task's with class weights and label smoothing."""
        return build_loss(client.train, client.task, client.loss, self.label_smoothing, self.class_weights)

    def lr_factor(self, *parameter_names: str) -> float:
        """Returns the factor of `lr_by_name` for the parameter with this name or these names.

        A parameter with several names (tied weights) has the factor of the first pattern that any of them fits.

        >>> from polyfed.algorithms import FedAvg
        >>> method = FedAvg(lr_by_name={"head.*": 10.0, "*.bias": 2.0})
        >>> [method.lr_factor(name) for name in ("head.bias", "body.bias", "body.weight")]
        [10.0, 2.0, 1.0]
        """
        patterns = (self.lr_by_name or {}).items()
        factors = (f for pattern, f in patterns if any(fnmatch.fnmatchcase(name, pattern) for name in parameter_names))
        return next(map(float, factors), 1.0)


TRANSFERABLE_FIELDS = tuple(field.name for field in dataclasses.fields(LocalTraining) if field.name != "buffers")
"""Names the fields that one method copies from another to train like it; the policy for buffers is not copied."""
