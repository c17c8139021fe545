"""Defines the options of differentially private training, and how much noise they take."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, final

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.values.keyword_names import suggest_keywords
from polyfed.core.io.values.number_checks import is_real_number


@suggest_keywords
@final
@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Holds the options of DP-SGD at a client: clipped gradients of units plus Gaussian noise.

    For all that a client sends in a run, and for its personal network, an attacker can tell little about whether a unit was
    among the training examples: (ε, δ)-differential privacy under adding or removing one unit. The number of units counts as
    known. Test and validation examples are not protected: their scores are exact.

    Args:
        target_epsilon: ε of the whole run, from which the noise is computed for each client; give this or
            `noise_multiplier`.
        noise_multiplier: σ; the noise on a sum of gradients has standard deviation σ·`max_grad_norm`.
        delta: δ (1e-5, polyfed's choice); it should be well below one over the number of units.
        max_grad_norm: C; each unit's gradient is scaled down to at most this global norm (1, polyfed's choice).
        unit: what is protected: an "example" (polyfed's choice), or a "group" of examples, such as all rows of a patient
            (`group=`).
        run_epochs, run_steps: how often the whole run goes through a client's units, and single steps beside; the run sets
            them.

    Raises:
        UserError: a value outside its range, or both or none of `target_epsilon` and `noise_multiplier`.

    >>> Privacy(target_epsilon=8.0).unit
    'example'
    """

    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    max_grad_norm: float = 1.0
    unit: Literal["example", "group"] = "example"
    run_epochs: int = 0
    run_steps: int = 0

    def __post_init__(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise UserError(
                "privacy: give target_epsilon, from which the noise follows, or noise_multiplier, one of them; got "
                f"target_epsilon={self.target_epsilon!r} and noise_multiplier={self.noise_multiplier!r}"
            )
        for name in ("target_epsilon", "noise_multiplier", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not (is_real_number(value) and 0 < value < math.inf):
                raise UserError(f"privacy: {name} must be a positive number, got {value!r}")
        if not (is_real_number(self.delta) and 0 < self.delta < 1):
            raise UserError(f"privacy: delta must be above 0 and below 1, got {self.delta!r}")
        for name in ("run_epochs", "run_steps"):
            if type(value := getattr(self, name)) is not int or value < 0:
                raise UserError(f"privacy: {name} must be a whole number from 0, got {value!r}")
        if self.unit not in ("example", "group"):
            raise UserError(f"privacy: unit must be 'example' or 'group', got {self.unit!r}")

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Self:
        """Builds the options from `{name: value}`, as a configuration file has them.

        Raises:
            UserError: an unknown name, or what the class refuses.
        """
        names = [field.name for field in fields(cls)]
        if unknown := sorted(options.keys() - set(names)):
            raise UserError(f"privacy: unknown option {unknown[0]!r}; {did_you_mean(unknown[0], names)}")
        return cls(**options)

    def number_of_steps(self, sampling_rate: float) -> int:
        """Returns a client's optimiser steps in the whole run if each takes a unit with this probability."""
        return self.run_epochs * math.ceil(1 / sampling_rate) + self.run_steps

    def noise_for(self, sampling_rate: float) -> float:
        """Returns the noise multiplier σ with which the whole run meets the options; raises a `UserError` if none does.

        Args:
            sampling_rate: the probability with which a step takes a unit.

        >>> round(Privacy(target_epsilon=8.0, run_epochs=10).noise_for(0.1), 2)
        1.0
        """
        from polyfed.core.training.privacy.sampled_gaussian import noise_multiplier_for_epsilon  # late: numpy and scipy

        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.target_epsilon is not None
        steps = self.number_of_steps(sampling_rate)
        return noise_multiplier_for_epsilon(self.target_epsilon, sampling_rate, steps, self.delta)

    def epsilon_after(self, sampling_rate: float, share_of_run: float) -> float:
        """Returns ε after a share of the run's optimiser steps, from 0 to 1."""
        from polyfed.core.training.privacy.sampled_gaussian import epsilon_of_steps  # late: numpy and scipy

        steps = math.ceil(share_of_run * self.number_of_steps(sampling_rate))
        return epsilon_of_steps(sampling_rate, self.noise_for(sampling_rate), steps, self.delta)
