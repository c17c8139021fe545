"""Every registered method passes the contract."""

import dataclasses

import pytest

from polyfed.algorithms import REGISTRY
from polyfed.core.methods.declared_words import MODEL_REQUIREMENTS
from polyfed.testing import AlgorithmContract, example_of

OF_NETWORKS = [name for name, method in REGISTRY.items() if method.requires & MODEL_REQUIREMENTS]
"""The methods that train clients' own networks; test_fedpnas.py has the others, which need images."""


FEW = {"fedavg", "fedrep", "pfedla"}
"""One of each kind is in `make test`; CI runs all."""


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.thorough) for n in OF_NETWORKS])
class TestRegistered(AlgorithmContract):
    @pytest.fixture(autouse=True)
    def suiting_clients(self, name):
        if "adapters" in REGISTRY[name].requires:
            self.clients = example_of(name).clients

    @pytest.fixture
    def algorithm(self, name):
        return example_of(name).build(momentum=0.5)


POLICIES = [(name, policy) for name in ("fedavg", "fedprox", "fedavg_ft") for policy in ("local", "recompute")]
CI = ("fedavg", "recompute")


@pytest.mark.parametrize(
    ("name", "policy"),
    [pytest.param(*c, marks=pytest.mark.thorough if c == CI else pytest.mark.slow) for c in POLICIES],
)
class TestBufferPolicies(AlgorithmContract):
    @pytest.fixture
    def algorithm(self, name, policy):
        return dataclasses.replace(REGISTRY[name](lr=0.05, batch_size=8), buffers=policy)
