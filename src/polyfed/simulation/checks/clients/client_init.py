"""Checks before the first round that the method can create the private state that each client keeps from round to
round.
"""

from collections.abc import Sequence
from typing import Any

from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import UserError
from polyfed.core.examples.pytree import input_spec_of
from polyfed.core.messages.lora import architecture_key_without_averaged_lora_ranks
from polyfed.core.nn.grad_mode import grad_enabled
from polyfed.core.nn.module_cache import cached_module
from polyfed.core.seeds import temporary_rng_seed


def check_client_init(clients: Sequence[Client], algorithm: Algorithm[Any, Any]) -> None:
    """Raises a `UserError` unless the method can create private states, one for each architecture and input shape.

    Raises:
        UserError: the method refuses this network: its last layer has no bias, say.
    """
    checked_kinds: set[tuple[str, str]] = set()
    for client in clients:
        network = (
            ""
            if client.model is None
            else architecture_key_without_averaged_lora_ranks(algorithm, cached_module(client.model))
        )
        if (kind := (network, str(input_spec_of(client.train.x)))) in checked_kinds:
            continue
        checked_kinds.add(kind)
        try:
            with grad_enabled(), temporary_rng_seed(0):
                algorithm.client_init(client, 0)
        except UserError:
            raise
        except Exception:  # any other exception is reported in round 1, with client and traceback
            continue
