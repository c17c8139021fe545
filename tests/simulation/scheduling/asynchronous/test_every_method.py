"""Every method of the registry takes stale replies, or is refused before round 1."""

import pytest

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.core.errors import UserError
from polyfed.simulation.checks.settings.scheduling import supports_asynchronous
from polyfed.testing import small_adapter_clients, small_clients


@pytest.mark.thorough
@pytest.mark.parametrize("rule", [pf.FedBuff(buffer=2, concurrency=3), pf.FedAsync(concurrency=3)])
@pytest.mark.parametrize("name", [n for n, method in REGISTRY.items() if "images" not in method.requires])
def test_a_method_runs_with_stale_replies_or_is_refused_before_round_1(name, rule):
    method = REGISTRY[name](**REGISTRY[name].card.small)
    clients = (small_adapter_clients if "adapters" in method.requires else small_clients)(4)
    settings = {
        "asynchronous": rule,
        "speeds": "uniform:1-20",
        "rounds": 4,
        "public": clients[0].train.x,
        "workers": 0,
        "quiet": True,
    }
    if not supports_asynchronous(method, rule):
        with pytest.raises(UserError, match="asynchronous"):
            pf.federate(clients, method, **settings)
        return
    run = pf.federate(clients, method, **settings)
    assert not any(record["failures"] for record in run.history)
