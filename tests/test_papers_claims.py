"""What docs/results.md says of the papers' methods is carried by intervals."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def claims(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    import papers_claims

    return papers_claims


def test_a_sentence_on_a_paper_that_its_intervals_do_not_carry_is_not_written(claims, tmp_path, monkeypatch):
    gain = {"own": "A", "over": "B", "at": "x", "unit": "%", "gain": 2.0, "low": -1.0, "high": 5.0}
    (tmp_path / "a-table1.json").write_text(json.dumps({"gains": [gain, {**gain, "at": "y", "gain": 3.0}]}), "utf-8")
    for place, kinds, text in (
        ("x", claims.NOT, "- A +2.0 (−1.0 to +5.0)."),
        (("x", "y"), claims.NOT, "- A from +2.0 (−1.0 to +5.0) to +3.0 (−1.0 to +5.0)."),
    ):
        monkeypatch.setattr(claims, "CONCLUSIONS", (("A {}.", (("a-table1", "A", "B", place, kinds),)),))
        assert text in claims.conclusions(tmp_path)
    for name, place, kinds in (
        ("B", "x", claims.AHEAD),
        ("B", "x", claims.BEHIND),
        ("C", "", claims.NOT),
        ("B", "z", claims.NOT),
        ("B", ("x", "z"), claims.NOT),
    ):
        monkeypatch.setattr(claims, "CONCLUSIONS", (("A {}.", (("a-table1", "A", name, place, kinds),)),))
        with pytest.raises(SystemExit, match=f"is not carried: A against {name} in a-table1"):
            claims.conclusions(tmp_path)


def test_a_summary_names_one_or_two_places_and_counts_more_in_points(claims):
    fraction = {"gain": 0.05, "low": 0.01, "high": 0.09, "unit": "fraction"}
    percent = {"gain": -2.0, "low": -3.0, "high": 1.0, "unit": "%"}
    of_curve = {"gain": 0.1, "low": 0.0, "high": 0.2}
    assert claims.gathered([]) == ""
    assert (
        claims.gathered([("digits", fraction), ("b", percent)])
        == "digits: +5.0 (+1.0 to +9.0)<br>b: −2.0 (−3.0 to +1.0)"
    )
    assert claims.gathered([("a", fraction), ("b", percent), ("c", of_curve)]) == (
        "3 places: from −2.0 (−3.0 to +1.0) to +10.0 (+0.0 to +20.0)"
    )
    sizes = [("20 examples", fraction), ("40 examples", percent), ("80 examples", of_curve)]
    assert claims.gathered(sizes) == "20, 40, 80 examples: from −2.0 (−3.0 to +1.0) to +10.0 (+0.0 to +20.0)"
