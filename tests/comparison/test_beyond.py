"""A search of hyper-parameters that goes on where the best value is the smallest or the largest."""

import math
import re

import numpy as np
import pytest

import polyfed as pf
from polyfed.algorithms import FedProx
from polyfed.comparison.tuning import hyperparameter_search
from polyfed.testing import small_clients
from tests.comparison.losses import set_loss

SHORT = {"rounds": 1, "seeds": [0], "references": False, "parallel": 1, "quiet": True}


def favouring(name, best):
    """`execute_or_load_runs` with validation losses that are lowest where a field is near a number, by its logarithm."""
    good = hyperparameter_search.execute_or_load_runs

    def play(plan, jobs, *rest):
        played, failed = good(plan, jobs, *rest)
        for job, one in played.items():
            if value := getattr(job.method, name, None):
                set_loss(one.history[-1], abs(math.log(value / best)))
        return played, failed

    return play


@pytest.mark.parametrize(
    ("best", "values", "tried"),
    [
        pytest.param(0.5, [0.1, 0.2, ...], [0.1, 0.2, 0.4, 0.8], marks=pytest.mark.thorough),
        (99, [0.1, 0.2, ...], [0.1, 0.2, 0.4, 0.8]),  # two further values at the most
        (0.01, [1, 2, ...], [1, 2, 0.5, 0.25]),
        (0.02, [0.01, 0.02, 0.1, "..."], [0.01, 0.02, 0.1]),
        pytest.param(99, [0.1, 0.2], [0.1, 0.2], marks=pytest.mark.thorough),
        (99, [np.float32(0.5), np.int64(1), ...], [0.5, 1, 2, 4]),
        pytest.param(0.02, "grid", [0.001, 0.003, 0.01, 0.03, 0.1], marks=pytest.mark.thorough),
        pytest.param(99, "grid", [0.001, 0.003, 0.01, 0.03, 0.1], marks=pytest.mark.thorough),
        (99, "grid,...", [0.001, 0.003, 0.01, 0.03, 0.1, 0.33, 1.1]),
    ],
)
@pytest.mark.one_case
def test_a_search_goes_on_beyond_the_edge_if_it_may(monkeypatch, best, values, tried):
    monkeypatch.setattr(hyperparameter_search, "execute_or_load_runs", favouring("mu", best))
    found = pf.compare(small_clients(2), [FedProx(mu=0.01)], **SHORT, tune={"mu": values})
    told = found.results["tuning"]["methods"]["fedprox"]
    assert [one["fields"]["mu"] for one in told["tried"]] == tried
    assert told["chosen"] == {"mu": min(tried, key=lambda mu: abs(math.log(mu / best)))}
    goes_on = values == "grid,..." or values[-1] in (..., "...")
    assert ("up to 2 values beyond" in found.results["tuning"]["sentence"]) == goes_on
    assert (f"{len(tried)} runs") in found.results["tuning"]["sentence"]
    assert ("mu of fedprox" in found.results["tuning"]["edge"]) == (best in (0.01, 99) and len(tried) > 2)


@pytest.mark.thorough
def test_a_search_that_went_on_repeats_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(hyperparameter_search, "execute_or_load_runs", favouring("mu", 99))
    words = SHORT | {"tune": {"mu": [0.1, 0.2, ...]}, "out": tmp_path / "a"}
    found = pf.compare(small_clients(2), ["fedprox"], **words)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("metrics.jsonl")}
    assert sum("0.8" in str(p) for p in before) == 1
    assert pf.compare(small_clients(2), ["fedprox"], **words).results == found.results
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("metrics.jsonl")} == before


@pytest.mark.parametrize(
    ("values", "asked", "message"),
    [
        ([0.1, ...], {}, "mu: '...' comes after two or more numbers above 0"),
        ([0.1, 0.1, ...], {}, "comes after two or more numbers above 0"),
        ([0.0, 0.1, ...], {}, "comes after two or more numbers above 0"),
        ([..., 0.1, 0.2], {}, "comes after two or more numbers above 0"),
        ([True, 0.2, ...], {}, "comes after two or more numbers above 0"),
        ([0.1, 0.2, ...], {"trials": 2}, "trials take a range"),
    ],
)
def test_a_search_goes_on_beyond_numbers_only(values, asked, message):
    with pytest.raises(pf.UserError, match=re.escape(message)):
        pf.compare(small_clients(2), ["fedprox"], **SHORT, tune={"mu": values}, **asked)


def test_a_value_beyond_that_a_method_refuses_is_not_tried(monkeypatch):
    """FedAvgM's momentum is below 1; after 0.9 comes 1.6."""
    monkeypatch.setattr(hyperparameter_search, "execute_or_load_runs", favouring("beta1", 1))
    found = pf.compare(small_clients(2), ["fedopt"], **SHORT, tune={"beta1": [0.5, 0.9, ...]})
    assert [one["fields"]["beta1"] for one in found.results["tuning"]["methods"]["fedopt"]["tried"]] == [0.5, 0.9]
