"""docs/multicentre.md is what its script makes of the measurements at real sites."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def sites(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    import multicentre_page

    return multicentre_page


def test_the_page_of_real_sites_is_made_of_the_measurements(sites, tmp_path):
    sites.write(ROOT / "benchmarks" / "results" / "multicentre", tmp_path)
    ours, made = ((folder / "multicentre.md").read_text("utf-8") for folder in (ROOT / "docs", tmp_path))
    assert ours == made, "run python benchmarks/multicentre.py page"


def test_an_answer_on_real_sites_is_that_of_the_comparison(sites):
    found = sites.read(ROOT / "benchmarks" / "results" / "multicentre")
    for name, one in found.items():
        low, high = one["mean_answer"]["interval"]
        assert one["mean_answer"]["answer"] != "join" or low > 0, name
        assert one["mean_answer"]["answer"] != "stay" or high < 0, name
    assert sites.with_interval(-0.0789, [-0.133, 0.0251], "", True) == "−0.079 (−0.133 to +0.025)"
    assert sites.with_interval(0.25, None, "%") == "25.0"
