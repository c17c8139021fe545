"""What docs/scaling/limits.md computes for many clients, beside the state of a few clients (benchmarks/scaling.py)."""

import importlib.util
import sys
from pathlib import Path

import pytest

import polyfed as pf
from polyfed.core.state_dict import iter_tensors

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def scaling():
    found = importlib.util.spec_from_file_location("benchmark_scaling", ROOT / "benchmarks" / "scaling.py")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses look their module up
    found.loader.exec_module(module)
    yield module
    del sys.modules[found.name]


LABELS = ("pfedla", "pfedla hidden=10", "pfedla neighbours=8", "pfedhn",
          "pfedhn embedding_dim=32", "fedfomo", "fedhenn", "fedhenn rank=8", "fedhenn rank=8 sketch",
          "fedavg", "fedrep", "flha_ghn", "flha_ghn head=factored", "ca_fedpnas")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("label", LABELS)
def test_the_formula_of_the_state_is_exact(scaling, label):
    """Bytes of all tensors on the server after a round of everyone, for two numbers of clients. (Plain numbers and names are
    not counted.)"""
    assert set(LABELS) == set(scaling.CASES)
    case = scaling.CASES[label]
    for number in (7, 12):
        clients, public = scaling.federation(number)
        method = pf.algorithms.get(case.name)(**{**scaling.STEP, **case.fields})
        run = pf.federate(clients, method, rounds=1, public=public, workers=0)
        assert sum(t.nbytes for t in iter_tensors(run.last.state)) == case.state(number, scaling.TINY)


def test_powers_are_those_of_the_two_largest(scaling):
    assert scaling.power({10: 5.0, 100: 1.0, 1000: 100.0}) == {"from": 100, "to": 1000, "power": 2.0}
    assert scaling.power({10: 5.0}) is None
