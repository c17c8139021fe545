"""What FedHeNN's server believes of its clients, and what it does when a network fails there."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyfed as pf
from polyfed.algorithms import FedHeNN
from polyfed.core.examples.as_examples import as_examples
from polyfed.core.seeds import torch_generator
from polyfed.simulation.results.run import Run
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.testing import SmallNet, small_clients

OPTIONS: dict[str, Any] = {"lr": 0.05, "batch_size": 8, "rad_size": 20, "rad_batch": 8, "local_epochs": 1}
SEED = 3
PUBLIC = torch.randn(40, 6, generator=torch_generator(8))


def wide_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def federate(method: pf.Algorithm, **settings: Any) -> Run:
    """Of two architectures, one with 99 parameters and one, client-1's, with 123."""
    nets = [SmallNet, wide_net, SmallNet]
    clients = [pf.Client(c.id, net, c.train, c.test) for c, net in zip(small_clients(), nets, strict=True)]
    return pf.federate(clients, method, **({"rounds": 2, "seed": SEED, "workers": 0, "public": PUBLIC} | settings))


def claiming(monkeypatch: pytest.MonkeyPatch, capacity: float) -> None:
    """One client says that it has so many parameters."""
    honest = FedHeNN.local_update

    def local(self: FedHeNN, down: Any, own: Any, client: pf.Client, seed: int) -> Any:
        reply, after = honest(self, down, own, client, seed)
        told = {"capacity": capacity} if client.id == "client-1" else {}
        return pf.Message(reply.tensors, {**reply.scalars, **told}), after

    monkeypatch.setattr(FedHeNN, "local_update", local)


@pytest.mark.parametrize("capacity", [1e30, 1e12 + 1, 99.5, 0, -3])
@pytest.mark.one_case
def test_a_capacity_that_is_none_is_refused_and_the_client_named(
    monkeypatch: pytest.MonkeyPatch, capacity: float
) -> None:
    claiming(monkeypatch, capacity)
    with pytest.raises(pf.ClientError, match=r"'client-1'.*capacity") as refused:
        federate(FedHeNN(weighting="capacity", **OPTIONS))
    assert f"is {capacity!r}; it must be a whole number from 1 to 1,000,000,000,000" in str(refused.value)
    assert federate(FedHeNN(**OPTIONS), rounds=1).history  # nobody asks for it


def test_where_the_server_has_the_networks_it_counts_their_parameters_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    claiming(monkeypatch, 1e11)
    told = federate(FedHeNN(weighting="capacity", **OPTIONS), rounds=1)
    assert told.last.state["capacities"]["client-1"] == 1e11
    counted = federate(FedHeNN(weighting="capacity", share="weights", **OPTIONS), rounds=2, clients_per_round=2)
    assert counted.last.state["capacities"] == {
        i: {"client-1": 123}.get(i, 99) for i in counted.last.state["representations"]
    }


class Fussy(nn.Module):
    """Takes as many examples as a minibatch has, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 8:
            raise IndexError(f"{len(x)} examples at a time")
        return self.head(self.body(x))


def test_a_network_that_fails_at_the_server_ends_the_run_with_what_to_do() -> None:
    data = small_clients()[0]
    clients, method = {"fussy": pf.Client("fussy", Fussy, data.train, data.test)}, FedHeNN(share="weights", **OPTIONS)
    at = Federation(clients, method, Settings(rounds=4, seed=SEED), as_examples(PUBLIC, labelled=False))
    key = at.client_info("fussy", 1).architecture
    state, replies = method.server_init(at.server_context()), {"fussy": pf.Message({"model": Fussy().state_dict()})}
    with pytest.raises(pf.UserError) as failed:
        method.aggregate(state, replies, at.server_context())
    assert f"client 'fussy', a Fussy (architecture {key})" in str(failed.value)
    assert "IndexError: 40 examples at a time; fix the network, or set share='representations'" in str(failed.value)
    assert isinstance(failed.value.__cause__, IndexError)
    named = FedHeNN(share="weights", module="hat", **OPTIONS)
    with pytest.raises(pf.UserError, match="module='hat': the network of 'fussy' has no such module"):  # as it is
        named.aggregate(state, replies, at.server_context())


def test_a_representation_beyond_all_bounds_is_refused() -> None:
    reply = pf.Message({"representations": {"a": torch.full((40, 3), 3e38)}})
    with pytest.raises(ValueError, match="diverged"):
        FedHeNN(rad_size=20).reply_spec({"public": {}}, pf.Message(), reply)
