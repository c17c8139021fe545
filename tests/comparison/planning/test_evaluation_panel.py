"""Comparisons that evaluate some of many clients: the same in every run, and intervals of means that cover the draw."""

import math

import numpy as np
import pytest

import polyfed as pf
from polyfed.comparison.statistics.mrmc import VarianceComponents, estimate_mean_over_clients
from polyfed.core.errors import UserError
from polyfed.testing import small_clients

QUICK = {"rounds": 1, "seeds": [0, 1], "workers": 0, "quiet": True}


@pytest.mark.thorough
def test_every_run_evaluates_the_same_clients(tmp_path):
    words = {**QUICK, "out": tmp_path / "c", "tune": "none"}
    found = pf.compare(small_clients(6), ["fedavg"], evaluate_clients=3, **words)
    results = found.results
    panels = {tuple(run["scores"]) for method in results["methods"].values() for run in method["runs"].values()}
    assert len(panels) == 1
    assert list(panels.pop()) == results["clients"]
    assert len(results["clients"]) == 3
    assert results["panel"]["of"] == 6
    assert "3 of 6 clients, drawn at random, were evaluated" in results["covers"][0]
    assert all(set(entry["scores"]) == set(results["clients"]) for entry in results["references"].values())
    page = found.report().read_text()
    assert "3 of 6 sites, drawn at random" in page
    with pytest.raises(UserError, match="holds a comparison of something else"):
        pf.compare(small_clients(6), ["fedavg"], evaluate_clients=4, **words)


@pytest.mark.thorough
def test_search_and_named_clients():
    names = ["client-4", "client-1"]
    found = pf.compare(
        small_clients(5), ["fedavg"], evaluate_clients=names, tune={"lr": [0.1, 0.2]}, references=False, **QUICK
    )
    assert found.results["clients"] == sorted(names)
    assert found.results["panel"]["of"] is None
    assert "Only the clients client-1, client-4 were evaluated" in found.results["covers"][0]


def test_refused_with_folds():
    with pytest.raises(UserError, match="folds and resplit divide the few examples of each client again"):
        pf.compare(small_clients(4), ["fedavg"], evaluate_clients=2, folds=2, **QUICK | {"seeds": None})


def components(mean):
    values = np.array([mean, mean])
    return VarianceComponents(values, values, 0.0, 0.0, 1e-12, 9.0, 10)


def test_interval_covers_the_draw():
    values = [0.1, 0.2, 0.4, 0.3]
    fixed = estimate_mean_over_clients([components(v) for v in values])
    drawn = estimate_mean_over_clients([components(v) for v in values], population=8)
    whole = estimate_mean_over_clients([components(v) for v in values], population=4)
    assert whole == fixed
    assert drawn.value == fixed.value
    from polyfed.comparison.statistics.estimate import ALPHA, t_quantile

    half = t_quantile(ALPHA, 3) * math.sqrt((1 - 4 / 8) * np.var(values, ddof=1) / 4)
    assert drawn.high - drawn.value == pytest.approx(half, rel=1e-3)
    assert estimate_mean_over_clients([components(0.1)], population=8).high == math.inf
