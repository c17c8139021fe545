"""The page of results as `polyfed.compare` writes them, not as a test makes them up."""

import re

import pytest
from rich.console import Console

import polyfed as pf
from polyfed.cli.commands.results.report_command import show_report
from polyfed.testing import small_clients

QUICK = {"rounds": 2, "budget": "steps", "parallel": 1, "quiet": True}


def page(folder):
    show_report([folder], Console(quiet=True), out=folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "metrics"),
    [
        ({"seeds": [0, 1], "tune": {"lr": [0.1, 0.3]}}, None),
        ({"resplit": 2, "tune": "none", "references": False}, ["log_loss"]),
    ],
)
def test_a_comparison_has_a_page(tmp_path, words, metrics):
    bare = [pf.Client(c.id, c.model, c.train, c.test) for c in small_clients(2)]
    found = pf.compare(bare, ["fedprox"], **QUICK, **words, metrics=metrics, out=tmp_path / "a")
    text = page(tmp_path / "a")
    content = found.results
    for sentence in (content["mean_answer"]["sentence"].partition(": ")[2], *content["covers"], *content["warnings"]):
        assert sentence.rstrip(".") in text.replace("&#x27;", "'").replace("&#39;", "'")
    for label, method in content["methods"].items():
        if (p := method["statistics"]["p_reference"]) is not None:
            assert re.search(rf"<tr><t[dh][^>]*>{label}</t[dh]>.*?<td[^>]*>{p:.2g}</td>", text)
    for name in content["references"]:
        assert f"{name} (" in text
    has = "no predictions" not in text
    assert has == content["predictions"]
    assert 'id="p0-curves"' in text
