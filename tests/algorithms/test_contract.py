"""Every registered method passes the contract."""

import dataclasses

import pytest

from polyfed.algorithms import REGISTRY
from polyfed.testing import AlgorithmContract


@pytest.mark.parametrize("name", REGISTRY)
class TestRegistered(AlgorithmContract):
    @pytest.fixture
    def algorithm(self, name):
        return REGISTRY[name](lr=0.05, momentum=0.5, batch_size=8)


@pytest.mark.parametrize("policy", ["local", "recompute"])
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedavg_ft"])
class TestBufferPolicies(AlgorithmContract):
    @pytest.fixture
    def algorithm(self, name, policy):
        return dataclasses.replace(REGISTRY[name](lr=0.05, batch_size=8), buffers=policy)
