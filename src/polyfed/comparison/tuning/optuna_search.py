"""Defines ranges of hyper-parameters, and searches in them with Optuna."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from polyfed.core.errors import UserError, check_extra_installed

_START = 4  # random trials before Optuna's estimator takes over; few, since searches are small


@final
@dataclass(frozen=True)
class SearchRange:
    """Holds a range from `low` to `high` inclusive, of whole numbers if both are.

    If both are positive the range is sampled on a log scale, as learning rates need it; otherwise uniformly.

    Raises:
        UserError: text that is not a range, or a range without a number in it.

    >>> SearchRange.from_low_to_high("0.001..0.3")
    SearchRange(low=0.001, high=0.3)
    """

    low: float
    high: float

    @classmethod
    def from_low_to_high(cls, text: str) -> "SearchRange":
        """Parses a text of the form "LOW..HIGH".

        Raises:
            UserError: it has another form, or LOW is not below HIGH.
        """
        low, dots, high = text.partition("..")
        first, last = parse_number_or_text(low), parse_number_or_text(high)
        if not dots or isinstance(first, str) or isinstance(last, str):
            raise UserError(f"a range to search is LOW..HIGH, such as 0.001..0.3, got {text!r}")
        if not float("-inf") < first < last < float("inf"):
            raise UserError(f"a range to search goes from the lower to the higher number, got {text!r}")
        return cls(first, last)


def parse_number_or_text(text: str) -> int | float | str:
    """Converts a text to the int or float that it denotes; returns a text that is not a number unchanged.

    >>> [parse_number_or_text(text) for text in ("2", "1e-3", "mean")]
    [2, 0.001, 'mean']
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@final
class OptunaSearch:
    """Searches the hyper-parameters of one method with the package Optuna, which suggests the values to try next.

    It depends only on the seed and the scores. A search that was interrupted therefore asks for the same runs again,
    and finds them finished.

    Args:
        values: field -> list of values to try, or a range as text.
        seed: of the sampler.
    """

    def __init__(self, values: Mapping[str, Any], seed: int) -> None:
        optuna = import_optuna()
        self._values = values
        self._space = {
            name: _optuna_distribution(optuna.distributions, values) for name, values in self._values.items()
        }
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_START)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._failed = optuna.trial.TrialState.FAIL

    def suggest_fields(self) -> dict[str, Any]:
        """Returns the values that Optuna suggests to try next, as `{hyper-parameter: value}`."""
        self._trial = self._study.ask(self._space)
        parameters = self._trial.params.items()
        return {n: v if isinstance(self._values[n], str) else self._values[n][v] for n, v in parameters}

    def report_score(self, validation_score: float | None) -> None:
        """Reports the validation score (higher is better, or None) of the values suggested last."""
        if validation_score is None:
            self._study.tell(self._trial, state=self._failed)
        else:
            self._study.tell(self._trial, validation_score)


def import_optuna() -> Any:
    """Imports the package Optuna and returns it.

    Raises:
        UserError: optuna is not installed.
    """
    check_extra_installed("optuna", "tune", "a search with trials", "leave out trials=... (--trials)")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _optuna_distribution(kinds: Any, values: Any) -> Any:
    """Returns Optuna's distribution for a list of values or a range."""
    if not isinstance(values, str):
        # Positions, since values may be mappings, which Optuna does not support.
        return kinds.CategoricalDistribution(range(len(values)))
    search_range = SearchRange.from_low_to_high(values)
    is_integer = isinstance(search_range.low, int) and isinstance(search_range.high, int)
    kind = kinds.IntDistribution if is_integer else kinds.FloatDistribution
    return kind(search_range.low, search_range.high, log=search_range.low > 0)
