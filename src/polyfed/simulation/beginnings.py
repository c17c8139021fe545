"""What a method says against a client when it begins, asked for before the first round."""

from collections.abc import Sequence
from typing import Any

from polyfed.core.adapters import form_of
from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import UserError
from polyfed.core.gradients import gradients
from polyfed.core.inputs import form_of as form_of_inputs
from polyfed.core.scratch import scratch
from polyfed.core.seeds import local_rng


def check_beginnings(clients: Sequence[Client], algorithm: Algorithm[Any, Any]) -> None:
    """Makes the private state of one client of each network and form of inputs, and drops it.

    Raises:
        UserError: the method refuses this network: its last layer has no bias, say.
    """
    known: set[tuple[str, str]] = set()
    for client in clients:
        network = "" if client.model is None else form_of(algorithm, scratch(client.model))
        if (kind := (network, str(form_of_inputs(client.train.x)))) in known:
            continue
        known.add(kind)
        try:
            with gradients(), local_rng(0):
                algorithm.client_init(client, 0)
        except UserError:
            raise
        except Exception:  # whatever else is raised is told in round 1, with the client and the place
            continue
