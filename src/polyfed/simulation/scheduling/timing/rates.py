"""Defines `ClientRates`: how many examples or bytes each client handles in a simulated second."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from polyfed.core.errors import UserError
from polyfed.core.io.values.number_checks import is_positive_number
from polyfed.core.seeds import derive_seed, numpy_generator
from polyfed.simulation.scheduling.timing.device_files import (
    assign_entries_to_clients,
    is_device_file,
    read_device_file,
)

_LOWEST, _HIGHEST, _LARGEST_SIGMA = 1e-9, 1e15, 10.0  # beyond them simulated times are not finite numbers
_FORMS = "'constant:5', 'uniform:1-20', 'lognormal:1.0', 'lognormal:1.0:200', a CSV or JSON file, or {client: number}"


@final
@dataclass(frozen=True)
class ClientRates:
    """Gives each client's rate: stated by client, or drawn for each client from one distribution.

    A draw depends on the seed of the run and the client's id alone, not on the other clients.

    Args:
        name: of the setting, "speeds" or "bandwidth".
        seed: of the run.
        by_client: the rates that were stated; None if they are drawn.
        distribution: "constant", "uniform" or "lognormal".
        parameters: the constant; lowest and highest rate; or σ of the logarithm and the median.

    >>> rates = parse_rates("uniform:1-20", "speeds", seed=0, client_ids=["north"])
    >>> 1 <= rates.rate_of("north") <= 20, rates.rate_of("north") == rates.rate_of("north")
    (True, True)
    """

    name: str
    seed: int
    by_client: Mapping[str, float] | None = None
    distribution: str = "constant"
    parameters: tuple[float, ...] = (1.0,)

    def rate_of(self, client: str) -> float:
        """Returns a client's rate: examples or bytes in a simulated second."""
        if self.by_client is not None:
            return self.by_client[client]
        if self.distribution == "constant":
            return self.parameters[0]
        generator = numpy_generator(derive_seed(self.seed, client, self.name))
        if self.distribution == "uniform":
            return float(generator.uniform(self.parameters[0], self.parameters[1]))
        sigma, median = self.parameters
        return median * math.exp(sigma * float(generator.standard_normal()))


def parse_rates(value: Any, name: str, seed: int, client_ids: Sequence[str]) -> ClientRates:
    """Builds the rates that a setting describes.

    Args:
        value: a number or "constant:RATE" for all, "uniform:LOW-HIGH", "lognormal:SIGMA" or "lognormal:SIGMA:MEDIAN" (the
            median is 1 if it is not given), the path of a file, or `{client: rate}`.
        name: of the setting, "speeds" or "bandwidth".
        seed: of the run.
        client_ids: sorted.

    Raises:
        UserError: another form, a rate that is not positive, or a client without one.
    """
    check_rates(value, name)
    if isinstance(value, str) and is_device_file(value):
        value = read_device_file(value, name.removesuffix("s"), name)
        check_rates(value, name)
    if isinstance(value, Mapping):
        by_client = assign_entries_to_clients({str(i): float(rate) for i, rate in value.items()}, client_ids, name)
        return ClientRates(name, seed, by_client)
    if not isinstance(value, str):
        return ClientRates(name, seed, parameters=(float(value),))
    distribution, _, text = value.partition(":")
    parameters = tuple(map(float, text.split("-" if distribution == "uniform" else ":")))
    if distribution == "lognormal" and len(parameters) == 1:
        parameters = (*parameters, 1.0)
    return ClientRates(name, seed, None, distribution, parameters)


def check_rates(value: Any, name: str) -> None:
    """Raises a `UserError` unless a setting has one of the forms that `parse_rates` reads; files are not opened.

    Raises:
        UserError: another form, or a rate that is not positive.
    """
    if isinstance(value, Mapping):
        for client, rate in value.items():
            if not _is_rate(rate):
                raise UserError(
                    f"{name}: the rate of client {str(client)!r} must be a positive number, {_LOWEST:g} to {_HIGHEST:g}, "
                    f"got {rate!r}"
                )
        if value:
            return
    elif isinstance(value, str):
        distribution, _, text = value.partition(":")
        if is_device_file(value) or _are_parameters(distribution, text):
            return
    elif _is_rate(value):
        return
    raise UserError(
        f"{name} must be a positive number, {_FORMS}, got {value!r}; rates are from {_LOWEST:g} to {_HIGHEST:g}, and σ "
        f"of lognormal is at most {_LARGEST_SIGMA:g}"
    )


def _is_rate(value: Any) -> bool:
    return is_positive_number(value) and _LOWEST <= value <= _HIGHEST


def _are_parameters(distribution: str, text: str) -> bool:
    try:
        numbers = [float(part) for part in text.split("-" if distribution == "uniform" else ":")]
    except ValueError:
        return False
    if distribution == "lognormal":
        return (
            is_positive_number(numbers[0])
            and numbers[0] <= _LARGEST_SIGMA
            and all(map(_is_rate, numbers[1:2]))
            and (len(numbers) <= 2)
        )
    if not all(map(_is_rate, numbers)):
        return False
    if distribution == "uniform":
        return len(numbers) == 2 and numbers[0] <= numbers[1]
    return distribution == "constant" and len(numbers) == 1
