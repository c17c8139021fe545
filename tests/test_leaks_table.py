"""The tables of docs/security/how_much_leaks.md on what leaks are what their script makes of the measurements."""

import json
import sys
from pathlib import Path

import pytest

from polyfed.algorithms import REGISTRY

ROOT = Path(__file__).parent.parent


@pytest.fixture
def leaks(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    import leaks

    return leaks


@pytest.fixture
def results(leaks):
    return json.loads(leaks.RESULTS.read_text(encoding="utf-8"))


def test_the_page_has_the_measured_numbers(leaks, results):
    page = leaks.PAGE.read_text(encoding="utf-8")
    assert page == leaks.updated_page(page, results), "run python benchmarks/leaks.py page"


def test_every_method_has_a_row_or_is_said_to_have_none(leaks, results):
    table = leaks.tables(results)
    assert [name for name in REGISTRY if f"`{name}`" not in table] == []


def test_no_rate_is_without_an_interval_and_no_reconstruction_without_a_control(results):
    for key, row in results["rows"].items():
        rate = row["tpr_at_1_percent"]
        assert 0 <= rate["low"] <= rate["value"] <= rate["high"] <= 1, key
        entries = row["as trained"] + row["one step"]
        assert all((e["best_psnr"] is None) == (e["other_best_psnr"] is None) for e in entries), key
        assert all(e["candidates"] or e["note"] or key == "local" for e in entries), key
    for key, row in results["hearts"].items():
        for rate in (entry[kind] for entry in row["attributes"] for kind in ("trained_on", "others")):
            assert 0 <= rate["low"] <= rate["value"] <= rate["high"] <= 1, key


def test_rows_say_what_was_measured(leaks):
    entry = {
        "best_psnr": 31.4, "other_best_psnr": 15.2, "labels_right": 0.9, "labels_right_by_guess": 0.5,
        "label_source": "last layer",
    }  # fmt: skip
    nothing = dict.fromkeys(entry) | {"labels_right_by_guess": 0.5, "label_source": ""}
    row = {
        "accuracy": 0.756, "tpr_at_1_percent": {"value": 0.031, "low": 0.0, "high": 0.0749},
        "as trained": [nothing, entry], "one step": [nothing],
    }  # fmt: skip
    assert leaks.show("fedavg", row) == "| `fedavg` | 76 | 3.1 (0.0 to 7.5) | 31 (15) | – | 90 (50) last layer |"
