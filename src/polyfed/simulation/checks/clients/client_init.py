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
from polyfed.core.serialization import check_serializable


def check_client_init(clients: Sequence[Client], algorithm: Algorithm[Any, Any]) -> None:
    """Raises a `UserError` unless the method can create private states, one for each architecture and input shape.

    Raises:
        UserError: the method refuses this network: its last layer has no bias, say.
        TypeError: a private state holds a value that a checkpoint cannot restore.
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
                state = algorithm.client_init(client, 0)
        except UserError:
            raise
        except Exception:  # any other exception is reported in round 1, with client and traceback
            continue
        part = f"{type(algorithm).__name__}.client_init: the private state"
        check_serializable(state, part)
        if not isinstance(state, dict):
            raise TypeError(f"{part} is a {type(state).__name__}, not a dict; return {{}} if there is none")
