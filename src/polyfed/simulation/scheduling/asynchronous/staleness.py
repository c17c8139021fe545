"""Computes how much a stale update counts, from the number of server updates since its client started."""

from collections.abc import Callable

from polyfed.core.errors import UserError

_FORMS = {"constant": 0, "polynomial": 1, "hinge": 2}


def build_staleness_function(text: object) -> Callable[[int], float]:
    """Builds the function s(τ) that a text describes.

    τ is the number of server updates between the start of a client's local update and the server's use of it; s(0) = 1.

    - "constant": s(τ) = 1.
    - "polynomial:A": s(τ) = (1 + τ)^(−A). With A = 0.5 it is FedBuff's 1/√(1 + τ).
    - "hinge:A:B": s(τ) = 1 up to τ = B, then 1/(A·(τ − B) + 1).

    Source: Xie, Koyejo and Gupta 2019, section 5.2 of "Asynchronous federated optimization".

    Raises:
        UserError: another text, or a negative parameter.

    >>> polynomial, hinge = build_staleness_function("polynomial:0.5"), build_staleness_function("hinge:10:4")
    >>> polynomial(0), polynomial(3), hinge(4), hinge(5)
    (1.0, 0.5, 1.0, 0.09090909090909091)
    """
    name, *parts = str(text).split(":")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = [-1.0]
    if name not in _FORMS or len(numbers) != _FORMS[name] or not all(0 <= n < float("inf") for n in numbers):
        raise UserError(
            f"staleness must be 'constant', 'polynomial:A' or 'hinge:A:B' with numbers from 0, got {text!r}"
        )
    if name == "constant":
        return lambda staleness: 1.0
    if name == "polynomial":
        return lambda staleness: float((1.0 + staleness) ** -numbers[0])
    slope, limit = numbers
    return lambda staleness: 1.0 if staleness <= limit else 1.0 / (slope * (staleness - limit) + 1.0)
