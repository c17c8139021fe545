"""Every registered method passes the contract."""

import dataclasses

import pytest

from polyfed.algorithms import REGISTRY
from polyfed.core.algorithm import MODEL_REQUIREMENTS
from polyfed.testing import AlgorithmContract

ALIGNING = {"local_epochs": 2, "rad_size": 20, "rad_batch": 8, "eta0": 1.0}
"""Of FedHeNN, whose defaults want 5,000 public examples."""

SMALL = {"feddf": {"server_steps": 5}, "flha_ghn": {"depth": 2, "hidden": 4}}


PUBLISHED = {
    "fedfomo": frozenset({"model", "before"}),  # the second is a mixture of models that were sent
    "fedhenn_homo": frozenset({"trained"}),
    "pfedla": frozenset({"model"}),
    "heur_pfedla": frozenset({"model"}),
    "lg_fedavg": frozenset({"head"}),
    "fedpac": frozenset({"head"}),
    "fd": frozenset({"classes"}),
    "moon": frozenset({"previous"}),
    "fedamp": frozenset({"model"}),
    "fedala": frozenset({"model"}),
    "scaffold": frozenset({"variate"}),  # in round 1 c_i is what is sent; later the server can add it up
}

OF_NETWORKS = [name for name, method in REGISTRY.items() if method.requires & MODEL_REQUIREMENTS]
"""The methods that train clients' own networks; test_fedpnas.py has the others, which need images."""


FEW = {"fedavg", "fedrep", "fedavg_kd", "flha_ghn", "fedhenn", "pfedla", "fedproto"}
"""One of each kind is in `make test`; CI runs all."""


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.thorough) for n in OF_NETWORKS])
class TestRegistered(AlgorithmContract):
    @pytest.fixture
    def algorithm(self, name):
        self.published = PUBLISHED.get(name, frozenset())
        momentum = 0.0 if name == "scaffold" else 0.5  # of which it takes none
        more = ALIGNING if "fedhenn" in name else SMALL.get(name, {})
        return REGISTRY[name](lr=0.05, momentum=momentum, batch_size=8, **more)


POLICIES = [(name, policy) for name in ("fedavg", "fedprox", "fedavg_ft") for policy in ("local", "recompute")]
FAST = [("fedavg", "recompute")]


@pytest.mark.parametrize(
    ("name", "policy"), [c if c in FAST else pytest.param(*c, marks=pytest.mark.slow) for c in POLICIES]
)
class TestBufferPolicies(AlgorithmContract):
    @pytest.fixture
    def algorithm(self, name, policy):
        return dataclasses.replace(REGISTRY[name](lr=0.05, batch_size=8), buffers=policy)
