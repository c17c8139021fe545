"""Clients train at the rate of the round, which the server says in its message: a schedule holds in every method."""

from dataclasses import replace

import pytest
import torch
from test_contract import OF_NETWORKS

from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.state_dict import iter_tensors
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.testing import example_of


@pytest.mark.parametrize("name", OF_NETWORKS)
@pytest.mark.one_case
def test_a_client_trains_at_the_rate_that_the_message_says(name):
    """One message makes the same reply and private state of methods with other rates, and another rate in it does not."""
    example = example_of(name)
    method, other = (example.build(lr=lr) for lr in (0.05, 0.4))
    clients = example.clients()
    federation = Federation({c.id: c for c in clients}, method, Settings(rounds=3, seed=3), example.public())
    message = method.dispatch(method.server_init(federation.server_context()), federation.client_info("client-0", 1))
    faster = replace(message, scalars={**message.scalars, "lr": 4 * message.scalars["lr"]})
    tensors = []
    with exclusive_single_torch_thread_with_grad():
        for trained_by, down in ((method, message), (other, message), (method, faster)):
            reply, state = trained_by.local_update(down, trained_by.client_init(clients[0], 3), clients[0], 7)
            tensors.append([*iter_tensors(reply.tensors), *iter_tensors(state)])
    first, same, changed = (torch.cat([t.double().flatten() for t in trees]) for trees in tensors)
    assert torch.equal(first, same)
    assert not torch.equal(first, changed)
