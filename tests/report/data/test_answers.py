"""What the page of a comparison tells those who decide: answers in words, what they rest on, no test above the details."""

import json
import re

import pytest
from rich.console import Console

from polyfed.cli.commands.results.report_command import show_report
from polyfed.core.errors import UserError
from polyfed.report.data.answers import SiteAnswer, parse_answer_for_mean_over_sites, parse_site_answers
from polyfed.report.data.run_groups import read_run_groups
from polyfed.report.data.score_format import score_format_of
from polyfed.report.page.sentences import result_summary_sentences

SITES = {"north": 60, "south": 50, "St. Mary's <b>": 40}


def test_an_answer_has_the_words_of_the_comparison_without_site_and_answer():
    for kind, sentence, words in (
        ("join", "x: join with fedavg: 4.1 to 6.0 points better", "with fedavg: 4.1 to 6.0 points better."),
        ("stay", "x: stay alone: fedavg is 0.010 worse in AUC.", "fedavg is 0.010 worse in AUC."),
        ("undecided", "x: not decided: 6 test examples are too few", "6 test examples are too few."),
        ("undecided", "", "there is no interval."),
        (
            "undecided",
            "x: not decided: fedavg is worse or better; one seed",
            "fedavg is worse or better; one seed.",
        ),
        (
            "stay",
            "x: stay alone: fedavg is 4.1 to 6.0 points worse",
            "fedavg is 4.1 to 6.0 points worse.",
        ),
    ):
        assert SiteAnswer("x", kind, sentence=sentence).sentence_without_site_and_advice() == words
    content = {"answers": [{"client": "x: y", "answer": "undecided", "sentence": "x: y: not decided: one seed"}]}
    (one,) = parse_site_answers(content)
    assert one.sentence_without_site_and_advice() == "one seed."
    assert parse_site_answers({}) == []
    assert parse_answer_for_mean_over_sites({"mean_answer": None}) is None


@pytest.mark.parametrize("damaged", ["join", {"client": "x"}, {"client": "x", "answer": "maybe"},
                                     {"client": "x", "answer": "join", "interval": [1]},
                                     {"client": "x", "answer": "join", "gain": "much"}])  # fmt: skip
def test_a_damaged_answer_is_named(damaged):
    with pytest.raises(UserError, match="make it again: polyfed compare"):
        parse_site_answers({"answers": [damaged]})


@pytest.fixture
def page(write_comparison, tmp_path):
    """The page of a comparison as text, up to the details and the whole of it."""

    def page(sites=SITES, **more):
        folder = write_comparison(tmp_path / "mine", sites, seeds=(0,), **{"keep": False, **more})
        show_report([folder], Console(quiet=True), out=tmp_path / "page.html")
        text = (tmp_path / "page.html").read_text(encoding="utf-8")
        text = text[text.index("<body>") :]
        return text.partition(">Details<")[0], text

    return page


def test_each_site_has_a_line_and_no_test_stands_above_the_details(page):
    top, whole = page()
    row = r'<tr class="(\w+)" data-t><td><span class="badge">([^<]+)</span></td><th scope="row">([^<]+)</th>'
    lines = re.findall(row, top)
    assert lines == [("join", "Join", "St. Mary&#39;s &lt;b&gt;"), ("stay", "Stay alone", "south"),
                     ("undecided", "Not decided", "north")]  # fmt: skip
    assert "1 of 3 sites should join with fedavg; 1 should stay alone; 1 is not decided." in top
    assert all(f"words of {site}." in top for site in ("north", "south"))
    parts = ("1 of 3 sites", "Before you rely on this", "tune none", 'class="answers"', "Mean over sites:",
             "Join with fedavg: 0.010 to 0.050 better in AUC.", "<table>", "It does not cover a change")  # fmt: skip
    order = [top.index(part) for part in parts]
    assert order == sorted(order)
    assert "fedprox failed and is not compared" in top
    assert "logistic regression alone" in top
    for word in ("p (", "p ="):
        assert word not in top
        assert word in whole
    assert "the score no longer rises" in whole
    assert "The runs kept no predictions" in whole


def test_methods_that_were_left_out_are_on_the_first_screen_and_not_in_the_heading(page):
    top, _ = page(title="fedbn")
    assert "Left out, since sites have several architectures: fedbn." in top
    assert "<h1>Join, or train alone?</h1>" in top


def test_a_table_without_simple_models_speaks_of_none(page):
    assert "simple models included" not in page(references={})[0]


def test_simple_models_stand_among_the_methods_by_their_score(page):
    told = {"sentence": "Trees.", "alone": True, "scores": dict.fromkeys(SITES, 0.99), "mean": 0.99, "gain": 0.05,
            "gain_interval": [0.02, 0.08], "interval": [0.97, 1.0]}  # fmt: skip
    references = {"gradient_boosting": told, "pooled": {"sentence": "Pooled.", "scores": {}, "mean": 1.0},
                  "majority": told | {"mean": 0.5}}  # fmt: skip
    verdict = "mean over clients: gradient boosting alone is 0.020 to 0.080 better in AUC than training alone"
    top, whole = page(references=references, verdicts=[verdict])
    assert "majority" not in whole
    assert whole.count(">always answering the most frequent class</") == 2
    assert "<h1>Join, or train alone? Mine</h1>" in top
    rows = re.findall(r"<tr><t[dh][^>]*>([^<]+)</t[dh]>", top[top.index("Best first") :])
    assert rows[:2] == ["method", "gradient boosting alone"]
    assert not any("pooled" in row for row in rows)
    assert "For reference, all data in one place, which no site has: one network reaches a mean AUC of 1.000 " in top
    assert "The network is scored after its last round, not its best, so it can do worse than training alone." in top
    assert "+0.020 to +0.080" in top
    assert "The answers above compare with the best that a site has alone, simple models included" in top
    better = "gradient boosting alone is 0.020 to 0.080 better in AUC than training alone."
    assert f"Without joining, on average over sites: {better}" in top
    assert top.count("Mean over sites:") == 1


def test_the_pooled_curve_looks_like_no_verdict(page):
    """Its interval, of one curve by itself, is far narrower than that of the answer."""
    top, whole = page(keep=True)
    assert "ROC curve" not in top
    assert "is not an answer: only the answers above say whether a method is better for a site" in whole
    assert "% interval 0." in whole


@pytest.mark.thorough
def test_many_sites_are_grouped_by_answer_below_the_mean_and_drawn_together(page):
    top, _ = page({f"site-{k:02d}": 8 for k in range(45)})
    assert "15 of 45 sites should join with fedavg; 15 should stay alone; 15 are not decided." in top
    headings = ["15 sites should join", "15 sites should stay alone", "15 sites not decided"]
    places = [top.index(text) for text in ("Mean over sites:", *(f"<h3>{heading}</h3>" for heading in headings))]
    assert places == sorted(places)
    assert top.count("Mean over sites:") == 1
    for k, heading in enumerate(headings):
        group = top.partition(f"<h3>{heading}</h3>")[2].partition("<h3>")[0]
        assert group.partition("</details>")[0].count('class="badge"') == 15
        names, _, _ = group.partition("<details>")
        assert len(re.findall(r'<span class="name">site-\d\d</span>', names)) == 15, k
        on_screen = names.partition('<span class="screen"> and 3 more</span>')[0]  # print has them all
        assert len(re.findall(r"site-\d\d", on_screen)) == 12, k
    assert "All sites, from the largest gain to the smallest." in top
    drawing = next(one for one in re.findall(r"<svg.*?</svg>", top, re.DOTALL) if "Gain of each site" in one)
    assert drawing.count('class="mark ') == 45


@pytest.mark.parametrize(("more", "outcome"), [
    ({}, "Outcome: <b>sick against healthy</b>."),
    ({"class_names": None}, "Outcome: <b>class 1 against class 0</b>."),
    ({"class_names": None, "task": "regression"}, ""),
])  # fmt: skip
def test_a_comparison_without_a_name_says_how_many_sites_and_examples_and_what_is_predicted(page, more, outcome):
    top, _ = page({"north": 60, "e-coli": 50, "south": 40}, title="comparison", **more)
    assert "<h1>Join, or train alone? 3 sites with 45 examples</h1>" in top  # of 10 for training and 5 tested each
    assert outcome in top
    assert ("Outcome" in top) == bool(outcome)


def test_views_of_researchers_stand_apart_from_the_details(page):
    _, whole = page(site_model={"over": "local", "gain": 0.0, "deviation": 0.1, "clients": {"north": {"gain": 0.0}}})
    details, researchers = whole.partition('<h2 class="below">For researchers</h2>')[::2]
    assert "<h3>Gain of each site by partial pooling over sites</h3>" in researchers
    assert "<h3>Learning curves</h3>" in details


def test_a_method_has_one_colour_in_all_figures(page):
    _, whole = page(keep=True, methods={"fedrep": 1.3, "fedavg": 1.6, "fedprox": 1.2, "local": 1.0})
    colours = {}
    for colour, label in re.findall(r'class="swatch (s\d d\d)"(?:(?!</svg>).)*</svg>(\w+)', whole, re.DOTALL):
        colours.setdefault(label, set()).add(colour)
    assert colours.keys() == {"fedavg", "fedrep", "fedprox", "training"}
    assert all(len(of_method) == 1 for of_method in colours.values()), colours
    assert len(set.union(*colours.values())) == 4


def test_sites_that_are_others_in_each_seed_have_no_answer(page):
    top, _ = page(answers=[], same_clients=False)
    assert "no site has an answer by its name, unless all seeds share one partition." in top
    assert "Mean over sites:" in top


def test_a_comparison_of_an_earlier_version_is_shown_as_before(page):
    top, whole = page(answers=[], mean_answer=None, warnings=[])
    assert "Not decided" not in top
    assert "Should each site join" not in whole


def test_of_a_loss_the_lowest_is_the_best(comparison_of, tmp_path):
    scores = {"local": {0: {"x": 0.3, "y": 0.2}}, "fedavg": {0: {"x": 0.1, "y": 0.25}}}
    content = comparison_of(scores, score="cost", score_label="cost", score_unit="", higher_is_better=False)
    (tmp_path / "comparison.yaml").write_text("title: mine\n")
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    ((setting,), _) = read_run_groups([tmp_path])
    assert [(gain.client, gain.mean) for gain in setting.gains_over_local(setting.methods[0])] == [
        ("x", 0.2),
        ("y", -0.05),
    ]
    assert setting.best_method_besides_local.label == "fedavg"
    assert "fedavg has the lowest mean, 0.175; training alone has 0.250." in result_summary_sentences(setting)
    show_report([tmp_path], Console(quiet=True), out=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<td><b>0.100</b></td>" in text  # of x
    assert "<td><b>0.200</b></td>" in text  # of y, alone
    assert "the lowest of a row is bold" in text
    assert "+0.200" in text


def test_the_score_of_a_run_is_the_first_it_was_asked_for(write_run, tmp_path):
    """Of a run that names its metrics and one that has told them, with a metric of its own."""
    folder = write_run(tmp_path / "a", "fedavg", {"x": [0.5, 0.7]}, score="brier")
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(f"{config}metrics: [brier, accuracy]\n")
    other = write_run(tmp_path / "b", "fedavg", {"x": [0.5, 0.6]}, score="cost")
    told = {"name": "cost", "label": "cost in €", "unit": "", "higher_is_better": False}
    (other / "manifest.json").write_text(json.dumps({"score": told}))
    ((first, second), _) = read_run_groups([folder, other])
    assert (first.score_format, first.methods[0].mean_score_by_run) == (score_format_of("brier"), (0.7,))
    assert (second.score_format.label, second.score_format.higher_is_better) == ("cost in €", False)
