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
    for page in ("multicentre.md", "multicentre/measured.md", *(f"multicentre/{name}.md" for name in sites.PAGES)):
        ours, made = ((folder / page).read_text("utf-8") for folder in (ROOT / "docs", tmp_path))
        assert ours == made, f"{page}: run python benchmarks/multicentre.py page"
    assert sorted(name for _, _, names in sites.PAGES.values() for name in names) == sorted(sites.SECTIONS)
    assert len((ROOT / "docs" / "multicentre.md").read_text("utf-8").split()) < 2000


def test_the_page_says_which_answers_are_of_earlier_code(sites):
    found = sites.read(ROOT / "benchmarks" / "results" / "multicentre")
    text = (ROOT / "docs" / "multicentre.md").read_text("utf-8")
    for name, one in found.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| [{sites.SECTIONS[name][0]}]")]
        assert ("¹" in row) == ("first" not in one.get("again", ()))
        if "¹" in row:  # as docs/multicentre/measured.md says
            assert {answer["answer"] for answer in (one["mean_answer"], *one["answers"])} == {"undecided"}, name


def test_an_answer_on_real_sites_is_that_of_the_comparison(sites):
    found = sites.read(ROOT / "benchmarks" / "results" / "multicentre")
    for name, one in found.items():
        low, high = one["mean_answer"]["interval"]
        assert one["mean_answer"]["answer"] != "join" or low > 0, name
        assert one["mean_answer"]["answer"] != "stay" or high < 0, name
    assert sites.with_interval(-0.0789, [-0.133, 0.0251], "", True) == "−0.079 (−0.133 to +0.025)"
    assert sites.with_interval(0.25, None, "%") == "25.0"


def test_the_page_says_why_a_method_has_no_row(sites):
    skipped = {
        "fedgen": "fedgen needs one class per example, but the task of 'east' is survival",
        "takfl": "takfl needs one class per example, but the task of 'east' is survival",
        "fedavg": "fedavg needs one architecture, but the 2 clients have 2",
        "fedmd": "fedmd needs public examples; give public=...",
        "fedmrl": "FedMRL: the last layers are ['Identity', 'Identity']; give networks that end in an nn.Linear",
    }
    assert sites.not_compared(skipped) == [
        "- Not compared: `fedgen`, `takfl` need one class per example.",
        "- Not compared: `fedavg` needs one architecture.",
        "- Not compared: `fedmd` needs public examples.",
        "- Not compared: `fedmrl`. FedMRL: the last layers are ['Identity', 'Identity']; give networks that end in an "
        "nn.Linear.",
    ]


def test_a_later_local_has_a_row_where_its_folds_are_others(sites):
    def row(mean, gain=None):
        return {"mean": mean, "interval": None, "gain": gain, "gain_interval": None, "sites": {}}

    found = {"score_unit": "", "score_label": "AUC", "higher_is_better": True, "methods": {"local": row(0.7)},
             "references": {}, "joined": {"methods": {"local": row(0.8), "fedmrl": row(0.75, -0.05)}}}  # fmt: skip
    assert [line.split(" | ")[0] for line in sites.methods_table(found).splitlines()[2:]] == [
        "| `local` +", "| `fedmrl` +", "| `local`",
    ]  # fmt: skip
    found["joined"]["methods"]["local"] = row(0.7)
    assert "`local` +" not in sites.methods_table(found)
