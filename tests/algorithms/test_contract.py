"""Every registered method passes the contract."""

import dataclasses

import pytest

from polyfed.algorithm import MODEL_WORDS
from polyfed.algorithms import REGISTRY
from polyfed.testing import AlgorithmContract

ALIGNING = {"local_epochs": 2, "rad_size": 20, "rad_batch": 8, "eta0": 1.0}
"""Of FedHeNN, whose defaults want 5,000 public examples."""


OF_NETWORKS = [name for name, method in REGISTRY.items() if method.requires & MODEL_WORDS]
"""The methods that train clients' own networks; test_fedpnas.py has the others, which need images."""


@pytest.mark.parametrize("name", OF_NETWORKS)
class TestRegistered(AlgorithmContract):
    @pytest.fixture
    def algorithm(self, name):
        return REGISTRY[name](lr=0.05, momentum=0.5, batch_size=8, **(ALIGNING if "fedhenn" in name else {}))


POLICIES = [(name, policy) for name in ("fedavg", "fedprox", "fedavg_ft") for policy in ("local", "recompute")]
FAST = [("fedavg", "recompute"), ("fedavg_ft", "local")]


@pytest.mark.parametrize(
    ("name", "policy"), [c if c in FAST else pytest.param(*c, marks=pytest.mark.slow) for c in POLICIES]
)
class TestBufferPolicies(AlgorithmContract):
    @pytest.fixture
    def algorithm(self, name, policy):
        return dataclasses.replace(REGISTRY[name](lr=0.05, batch_size=8), buffers=policy)
