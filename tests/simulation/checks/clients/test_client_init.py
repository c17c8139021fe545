"""What a method refuses in a client's network is said before the first round, in a simulation and at a site."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY, FedAvg
from polyfed.core.algorithm import Client
from polyfed.core.errors import ClientError, UserError
from polyfed.testing import small_clients


def without_bias():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3, bias=False))


def clients(model):
    return [Client(c.id, model, c.train, c.test, c.val) for c in small_clients()]


@pytest.mark.parametrize("name", ["fedpac", "fedgh", "fedproto", "fedtgp"])
def test_a_last_layer_that_cannot_be_replaced_is_refused_before_round_1(name, tmp_path):
    with pytest.raises(UserError, match="'client-0', '2', has no bias") as refusal:
        pf.federate(clients(without_bias), REGISTRY[name](), rounds=1, workers=0, out=tmp_path / "run")
    assert not isinstance(refusal.value, ClientError)
    assert not (tmp_path / "run").exists()


def test_one_client_of_many_is_named():
    first, *others = small_clients()
    odd = Client("odd", without_bias, first.train, first.test, first.val)
    with pytest.raises(UserError, match="the network of 'odd'"):
        pf.federate([first, *others, odd], REGISTRY["fedgh"](), rounds=1, workers=0)


@dataclass(frozen=True, kw_only=True)
class Begins(FedAvg.__base__):
    """Counts in a list who begins, and fails for one."""

    fails: str = ""

    def client_init(self, client, seed):
        BEGUN.append(client.id)
        torch.rand(1)
        if client.id == self.fails:
            raise ZeroDivisionError("of the method")
        return {}


BEGUN: list[str] = []


def test_one_client_of_each_network_and_form_is_tried():
    BEGUN.clear()
    before = torch.get_rng_state()
    pf.federate(small_clients(), Begins(lr=0.05), rounds=1, workers=0)
    assert BEGUN[0] == "client-0"
    assert sorted(BEGUN[1:]) == ["client-0", "client-1", "client-2"] * (len(BEGUN) // 3)
    assert torch.equal(before, torch.get_rng_state())


def test_another_exception_keeps_its_place_and_its_client():
    with pytest.raises(
        ClientError, match="round 1, client 'client-0', phase 'local': ZeroDivisionError: of the method"
    ):
        pf.federate(small_clients(), Begins(lr=0.05, fails="client-0"), rounds=1, workers=0)
