"""Says which sizes the sets of clients may have; the command line asks it before torch is imported."""

from collections.abc import Mapping
from typing import Any

from polyfed.core.errors import UserError


def check_split_sizes(sizes: Mapping[str, Any]) -> None:
    """Raises a `UserError` if a field of `polyfed.data.Split` is outside its range, or leaves nothing to train on.

    >>> check_split_sizes({"test_fraction": 1.5})
    Traceback (most recent call last):
    polyfed.core.errors.UserError: test_fraction must be at least 0 and below 1, got 1.5
    """
    clients, unseen, per_client = sizes.get("clients"), sizes.get("unseen", 0), sizes.get("examples_per_client")
    if clients is not None and clients < 1:
        raise UserError(f"clients must be at least 1, got {clients}")
    if unseen < 0:
        raise UserError(f"unseen must be at least 0, got {unseen}")
    if clients is not None:
        check_unseen_among_clients(unseen, clients)
    if per_client is not None and per_client < 1:
        raise UserError(f"examples_per_client must be at least 1 or null, got {per_client}")
    for name in ("val_fraction", "test_fraction", "public_fraction"):
        if not 0 <= sizes.get(name, 0.0) < 1:
            raise UserError(f"{name} must be at least 0 and below 1, got {sizes[name]}")
    val_fraction, test_fraction = sizes.get("val_fraction", 0.0), sizes.get("test_fraction", 0.0)
    if val_fraction + test_fraction >= 1:
        raise UserError(
            f"val_fraction={val_fraction} and test_fraction={test_fraction} leave nothing to train on; their sum must be "
            "below 1"
        )
    if not 0 <= sizes.get("shrink_fraction", 0.0) <= 1:
        raise UserError(f"shrink_fraction must be between 0 and 1, got {sizes['shrink_fraction']}")
    if sizes.get("global_test", 0) < -1:
        raise UserError(f"global_test must be a number of examples, 0 or -1 (all), got {sizes['global_test']}")


def check_unseen_among_clients(unseen: int, clients: int) -> None:
    """Raises a `UserError` unless there are fewer unseen clients than clients, of which they are the last."""
    if unseen >= clients:
        raise UserError(
            f"unseen must be fewer than the {clients} clients, of which they are the last, got {unseen}; add the "
            "unseen clients to clients"
        )
