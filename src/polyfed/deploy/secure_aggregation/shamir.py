"""Implements Shamir's secret sharing over a prime field (How to Share a Secret, 1979; Bonawitz et al. 2017, section
3.1).

It does not run in constant time, since the time of Python's integer arithmetic depends on the values. A site computes only
with its own secrets, and its replies do not wait for them alone; but on a machine shared with strangers this could leak.
"""

import secrets
from collections.abc import Mapping, Sequence

PRIME = 2**257 - 93  # the largest prime below 2^257, since secrets are 32 bytes
ELEMENT_BYTES = 33


def split_secrets_by_holder(values: Sequence[int], num_holders: int, threshold: int) -> list[list[int]]:
    """Splits each secret into a share per holder; `threshold` recover it, fewer reveal nothing.

    Returns:
        For each holder its shares, one per value; holder k has the point k + 1.

    Raises:
        ValueError: the threshold is not from 1 to `num_holders`, or a value is outside the field.

    >>> shares = split_secrets_by_holder([7, 8], num_holders=3, threshold=2)
    >>> [recover_secret({1: shares[0][k], 3: shares[2][k]}) for k in (0, 1)]
    [7, 8]
    """
    if not 1 <= threshold <= num_holders:
        raise ValueError(f"the threshold must be from 1 to {num_holders}, got {threshold}")
    if not all(0 <= value < PRIME for value in values):
        raise ValueError("a value is not an element of the field")
    polynomials = [[value, *(secrets.randbelow(PRIME) for _ in range(threshold - 1))] for value in values]
    return [[_evaluate_polynomial(polynomial, x) for polynomial in polynomials] for x in range(1, num_holders + 1)]


def _evaluate_polynomial(polynomial: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % PRIME
    return value


def recover_secret(shares: Mapping[int, int]) -> int:
    """Returns the secret of at least `threshold` shares; does not detect too few.

    Args:
        shares: point (from 1) -> share.
    """
    return sum(weight * shares[x] for x, weight in lagrange_weights_at_zero(tuple(shares)).items()) % PRIME


def lagrange_weights_at_zero(points: Sequence[int]) -> dict[int, int]:
    """Returns {point: weight}: the sum of shares times weights is the secret.

    Raises:
        ValueError: points are not positive, or one occurs twice.

    >>> lagrange_weights_at_zero((1, 2)) == {1: 2, 2: PRIME - 1}
    True
    """
    if len(set(points)) < len(points) or not all(0 < x < PRIME for x in points):
        raise ValueError(f"points must differ and be positive, got {points}")
    weights = {}
    for x in points:
        numerator = denominator = 1
        for point in points:
            if point != x:
                numerator, denominator = numerator * point % PRIME, denominator * (point - x) % PRIME
        weights[x] = numerator * pow(denominator, -1, PRIME) % PRIME
    return weights


def field_element_to_bytes(number: int) -> bytes:
    """Encodes an element of the prime field as 33 bytes."""
    return number.to_bytes(ELEMENT_BYTES, "big")


def field_elements_from_bytes(data: bytes) -> list[int]:
    """Decodes bytes to a list of prime field elements, 33 bytes for each.

    Raises:
        ValueError: the bytes are not elements of the field.

    >>> field_elements_from_bytes(field_element_to_bytes(3) + field_element_to_bytes(4))
    [3, 4]
    """
    numbers = [int.from_bytes(data[at : at + ELEMENT_BYTES], "big") for at in range(0, len(data), ELEMENT_BYTES)]
    if len(data) % ELEMENT_BYTES or any(number >= PRIME for number in numbers):
        raise ValueError("these bytes are not elements of the field")
    return numbers
