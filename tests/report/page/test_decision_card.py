"""The card and the table of answers: the decision in a sentence, its cost, what is disclosed, and each site's interval."""

import dataclasses
import re

import pytest
import yaml

from polyfed.report.data.answers import ANSWER_LABELS, SiteAnswer
from polyfed.report.data.costs import cost_of_method, describe_protection, disclosures_of_method
from polyfed.report.data.run_groups import read_run_groups
from polyfed.report.data.score_format import score_format_of
from polyfed.report.page.advice.answer_table import WIDTH, gain_axis, html_answer_table, html_pooled_gains
from polyfed.report.page.advice.decision import html_advice_section
from polyfed.report.page.advice.header_card import html_header_card
from polyfed.report.page.charts.caterpillar_plot import svg_caterpillar_plot
from polyfed.report.page.charts.forest_plot import IntervalMark
from polyfed.report.page.charts.svg_charts import CHART_WIDTH, estimate_text_width
from polyfed.report.page.sections import (
    html_client_scores,
    html_gains_over_local,
    html_learning_curves,
    html_methods_table,
)
from polyfed.report.page.sentences import describe_comparison

SITES = {"north": 60, "south": 50, "<i>west</i>": 40}


@pytest.fixture
def group(write_comparison, tmp_path):
    """A comparison of three sites, one of each answer unless told otherwise."""

    def group(**more):
        write_comparison(tmp_path / "mine", SITES, seeds=(0, 1), keep=False, **more)
        ((found,), _) = read_run_groups([tmp_path / "mine"])
        return found

    return group


def answers(*kinds, method="fedavg"):
    return [{"client": f"s{k}", "answer": kind, "method": method, "gain": 0.1, "interval": [0.0, 0.2],
             "test_examples": 9, "sentence": ""} for k, kind in enumerate(kinds)]  # fmt: skip


def test_the_card_says_decision_gain_cost_disclosure_and_why_this_round(group):
    card = html_header_card(group())
    texts = re.findall(r">([^<>\n]+)<", card)
    assert texts[0] == "1 of 3 sites should join with fedavg; 1 should stay alone; 1 is not decided."
    told = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)", card))
    assert told == {"Mean gain": "+0.030 AUC", "Sent": "2 MB", "Rounds": "2", "Computing time": "3 s",
                    "The server learns": "weights"}  # fmt: skip
    assert "95 % interval +0.010 to +0.050; over training alone" in texts
    assert "all sites, up and down; 0.667 MB for each" in texts
    assert any(text.startswith("Gain and costs are those of fedavg. Scores: equal local steps.") for text in texts)
    assert "The method fedavg: The average of the sites&#39; models, weighted by examples." in texts


def test_the_card_says_in_a_few_words_which_round_is_scored(group):
    best = "each method at its best round by validation loss (alone: each client at its own), with equal local training"
    card = html_header_card(group(budget={"kind": "best", "limit": None, "sentence": best}))
    assert (
        "Gain and costs are those of fedavg. Each method is scored after the round that did best on validation examples ("
        in card
    )


@pytest.mark.parametrize(("gain", "times"), [(0.05, "about 7.9 times"), (0.001, "more than 100 times")])
def test_an_undecided_comparison_says_how_many_examples_would_decide_it(group, gain, times):
    interval = [gain - 0.1, gain + 0.1]
    mean = {**answers("undecided")[0], "client": None, "gain": gain, "interval": interval}
    run_group = group(answers=answers("undecided"), mean_answer=mean)
    card = html_header_card(run_group)
    assert f"To decide the mean difference, if it is as small as estimated, takes {times} as many examples." in card
    assert "Before it trains, a comparison can say how small a gain it can decide." in card
    sites = [{**answer, "gain": gain, "interval": interval} for answer in answers("join", "undecided")]
    results = {**run_group.comparison_results, "answers": sites, "mean_answer": {**mean, "answer": "join"}}
    card = html_header_card(dataclasses.replace(run_group, comparison_results=results))
    assert f"To decide the difference at s1, if it is as small as estimated, takes {times} as many examples." in card


def test_the_line_below_the_heading_says_what_the_score_is(group):
    found = group()
    line = describe_comparison(found)
    assert line.startswith(
        "3 sites with 150 test examples, 3 methods, 2 seeds; AUC on each site's own test examples, after round 2. AUC: "
    )
    sizes = {"data": {"0": {site: {"train": 30, "val": 5, "test": 50} for site in found.clients}}}
    results = {**found.comparison_results, **sizes}
    whole = describe_comparison(dataclasses.replace(found, comparison_results=results))
    assert whole.startswith("3 sites with 255 examples, 150 of them for tests, 3 methods")  # the heading has all
    accuracy = dataclasses.replace(found, score_format=score_format_of("accuracy"))
    assert describe_comparison(accuracy).endswith(", after round 2.")


def test_an_error_is_named_once_and_stands_below_the_number_if_its_name_is_long(group):
    found = group(
        score="mae", score_label="mean absolute error (SD of the target)", score_unit="", higher_is_better=False
    )
    card = html_header_card(found)
    assert "<dd>+0.030<small>mean absolute error (SD of the target); 95 % interval +0.010 to +0.050; over" in card
    section = html_advice_section(found, "k")
    assert "mean mean" not in section.lower()
    assert ">mean absolute error (SD of the target)</th>" in section
    assert 'role="region" aria-label="Answer, gain and interval of each site"' in section


@pytest.mark.parametrize(("kinds", "sentence", "kind"), [
    (["join"] * 3, "All 3 sites should join with fedavg.", "join"),
    (["stay"] * 2, "All 2 sites should stay alone.", "stay"),
    (["undecided"] * 2, "Not decided for any site.", "undecided"),
    (["stay", "undecided"], "1 of 2 sites should stay alone; 1 is not decided.", "undecided"),
    (["join"], "s0 should join with fedavg.", "join"),
    ([], "On average, sites should join with fedavg.", "join"),
])  # fmt: skip
def test_the_decision_is_one_sentence(group, kinds, sentence, kind):
    card = html_header_card(group(answers=answers(*kinds)))
    assert f'<h2 class="verdict">{sentence}</h2>' in card
    _, *meanings = re.findall('<p class="meaning">(?:<b>([^<]*):</b> )?', card)  # the first is what the method does
    labels = [label for key, label in ANSWER_LABELS.items() if key in kinds]
    assert meanings == (labels if len(labels) > 1 else ["" for _ in labels])
    assert f'<div class="lead {kind}">' in card


@pytest.mark.parametrize(("reasons", "is_early"), [
    (("9 test examples cannot answer; local had not converged", "one cannot tell; fedavg had not converged"), True),
    (("one seed and too few evaluated rounds (3 of at least 6)",) * 2, True),
    (("fedavg is between 1 point worse and 1 point better", "one cannot tell; fedavg had not converged"), False),
    (("", "one cannot tell; fedavg had not converged"), False),
])  # fmt: skip
def test_answers_of_networks_that_still_learn_ask_for_training_and_not_for_examples(group, reasons, is_early):
    undecided = answers(*["undecided"] * len(reasons))
    for answer, reason in zip(undecided, reasons, strict=True):
        answer["sentence"] = f"s: not decided: {reason}"
    card = html_header_card(group(answers=undecided))
    assert ("Training ended too early for an answer" in card) == is_early
    assert ("as many examples. " in card) == (not is_early)


def test_runs_have_a_card_without_a_decision(write_run, tmp_path):
    write_run(tmp_path / "a", "fedproto", {"x": [0.5, 0.7], "y": [0.4, 0.5]}, wanted=4, megabytes=3)
    write_run(tmp_path / "a/baselines/local", "local", {"x": [0.5, 0.5], "y": [0.4, 0.6]}, megabytes=0)
    ((found,), _) = read_run_groups([tmp_path / "a"])
    card = html_header_card(found)
    assert "fedproto: mean accuracy 60.0\xa0%; training alone: 55.0\xa0%." in card
    assert "over training alone, without an interval; 1 of 2 sites gain" in card
    assert "Scores of fedproto are those after round 2 of 4, the last that was evaluated." in card
    assert "class means" in card
    assert (cost_of_method(found.methods[0]).megabytes, cost_of_method(found.methods[0]).scored_rounds) == (6, (2, 2))
    assert disclosures_of_method(found.local_method, {}) == {}


def test_a_run_without_a_score_has_no_card_and_code_of_the_user_is_not_run(write_run, tmp_path):
    write_run(tmp_path / "a", "fedavg", {"x": [None]})
    ((found,), _) = read_run_groups([tmp_path / "a"])
    assert html_header_card(found) == ""
    write_run(tmp_path / "b", "nowhere:Method", {"x": [0.5]})
    ((found,), _) = read_run_groups([tmp_path / "b"])
    assert disclosures_of_method(found.methods[0], {}) is None
    assert "the method is not one of polyfed&#39;s" in html_header_card(found)


def test_intervals_of_all_sites_are_drawn_on_one_axis(group):
    found = group()
    told = [SiteAnswer("<i>a</i>", "join", "fedavg", 0.5, (0.25, 1.0), 9, "<i>a</i>: join with <b>", "local"),
            SiteAnswer("b", "stay", None, -1.0, None, None, "b: stay alone", "ridge"),
            SiteAnswer("c", "undecided", sentence="c: not decided: few examples")]  # fmt: skip
    axis = gain_axis(told)
    assert (axis.low, axis.high) == (-1.0, 1.0)
    table = html_answer_table(told, found, axis, 0.95)
    rows = re.findall(r"<tr class.*?</tr>", table, re.DOTALL)
    assert [row.count('class="line"') for row in rows] == [1, 0, 0]
    start, end = map(float, re.search(r'class="line" d="M([\d.]+) \d+H([\d.]+)"', rows[0]).groups())
    assert end - start == pytest.approx(0.375 * (WIDTH - 32), abs=0.2)
    zeros = {re.search(r'class="axis" d="M([\d.]+)', row)[1] for row in rows}
    assert zeros == {f"{WIDTH / 2:.1f}"}
    assert [re.findall(r"<(rect|circle)", row) for row in rows] == [["circle"], ["rect"], []]
    said = [re.search('class="say(?: why)?">([^<]*)<', row)[1] for row in rows]
    assert said == ["with &lt;b&gt;.", "there is no interval.", "few examples."]
    assert "&lt;i&gt;a&lt;/i&gt;" in rows[0]
    assert re.findall("<td>([^<]*)</td>", rows[1]) == ["−1.000", "–", "ridge regression", "–"]
    same = html_answer_table(told[:1], found, axis, 0.95)
    assert "gain over training alone, AUC" in same
    assert ">compared with<" not in same
    assert ">compared with<" in table


def test_gains_shrunk_towards_all_sites_are_a_table_of_their_own(group):
    clients = {"north": {"interval": [0.01, 0.03]}, "south": {"interval": [-0.02, 0.01]}}
    found = dataclasses.replace(group(), comparison_results={"site_model": {"over": "ridge", "clients": clients}})
    table = html_pooled_gains(found, 0.95)
    assert "Gain over ridge regression, shrunk towards the mean over sites" in table
    assert re.findall("<td[^>]*>([^<]*)</td>", table) == ["+0.010 to +0.030", "−0.020 to +0.010"]
    assert html_pooled_gains(dataclasses.replace(found, comparison_results={}), 0.95) == ""


def test_warnings_advise_whoever_made_the_comparison(group, tmp_path):
    found = group(warnings=["Not tuned (tune='none', --tune none)"])
    assert "Not tuned (tune=&#39;none&#39;)." in html_advice_section(found, "k")
    experiment = {"config": {"data": {"name": "heart"}}, "methods": {}, "same_data": False, "resplit": None}
    description = {"title": "mine", "same_clients": True, "reference": "local"}
    description["experiment"] = {**experiment, "references": False}
    (tmp_path / "mine/comparison.yaml").write_text(yaml.safe_dump(description))
    section = html_advice_section(found, "k")
    assert "Not tuned (--tune none)." in section
    assert "What begins with -- is an option of polyfed" in section
    results = {**found.comparison_results, "warnings": ["Not tuned"]}
    section = html_advice_section(dataclasses.replace(found, comparison_results=results), "k")
    assert "What begins with --" not in section


def test_the_card_says_why_it_is_of_a_method_that_does_not_lead_the_table(group):
    run_group = group()
    (fedavg,) = (method for method in run_group.methods if method.label == "fedavg")
    rival = dataclasses.replace(fedavg, label="rival", statistics={**fedavg.statistics, "mean": 0.99})
    for rival_is_ready, leader_is_ready, reason in (
        (False, True, " of the methods that had converged (stopped improving)"), (True, True, ""), (False, False, ""),
    ):  # fmt: skip
        courses = {"rival": {"converged": rival_is_ready}, "fedavg": {"converged": leader_is_ready}}
        results = {"best_by": "validation", "leader": "fedavg", "convergence": courses}
        changed = dataclasses.replace(
            run_group,
            methods=(rival, *run_group.methods),
            comparison_results={**run_group.comparison_results, **results},
        )
        card = html_header_card(changed)
        assert (
            f"Gain and costs are those of fedavg, chosen as the best by validation examples{reason}. Scores: " in card
        )
        table = html_advice_section(changed, "k")
        assert f"The answers are about fedavg, chosen as the best by validation examples{reason}: so another " in table
    assert "The answers are about" not in html_advice_section(run_group, "k")


def test_the_card_has_the_gain_of_each_method_that_somebody_asked_for(group):
    run_group = group()
    (fedavg,) = (method for method in run_group.methods if method.label == "fedavg")
    asked = {"gain": -0.02, "gain_interval": [-0.05, 0.01]}
    gains = {"fedavg": {"gain": 0.01}, "fedavg_ft": {"gain": 0.02}, "asked": asked}
    methods = tuple(
        dataclasses.replace(fedavg, label=label, statistics={**fedavg.statistics, **gain})
        for label, gain in gains.items()
    )
    card = html_header_card(dataclasses.replace(run_group, methods=(*methods, run_group.local_method)))
    (texts,) = re.findall(r"Mean gain of each method over training alone \(95 % interval\): (.*?)\.</p>", card)
    assert texts == "fedavg +0.010; asked −0.020 (−0.050 to +0.010); fedavg_ft +0.020"


@pytest.mark.parametrize(("over", "is_said"), [("ridge", False), ("local", True)])
def test_a_mean_over_another_alternative_than_a_sites_says_so(group, over, is_said):
    (answer,) = answers("undecided")
    mean = {**answer, "client": None, "over": "ridge"}
    section = html_advice_section(group(answers=[answer | {"over": over}], mean_answer=mean), "k")
    assert ("This is over what does best alone on average over sites" in section) == is_said


def test_a_pooled_network_of_one_fold_stands_beside_scores_of_that_fold_and_in_no_table(group):
    references = {"pooled": {"alone": False, "sentence": "Pooled.", "scores": {"s0": 0.7}, "mean": 0.7}}
    found = group(folds=2, fold_repeats=1, references=references)
    section = html_advice_section(found, "k")
    assert (
        "For reference, all data in one place, which no site has, in the first fold only, to save time: one network reaches "
        "a mean AUC of 0.700." in section
    )
    means = [
        f"{name} {method.mean_score_by_run[0]:.3f}"
        for name, method in (("fedavg", found.best_method_besides_local), ("training alone", found.local_method))
    ]
    assert f"In the same fold: {' and '.join(means)}. These have fewer test examples than the table" in section
    assert "for reference" not in html_client_scores(found)


def test_the_labels_of_the_axis_of_many_sites_are_whole():
    marks = [IntervalMark("a site", value, -1.0, 1.0, "undecided") for value in (-0.5, 0.5)]
    chart = svg_caterpillar_plot(marks, key="k", title="gains", x_label="gain", unit="%")
    (place,) = re.findall(r'x="([\d.]+)"[^>]*>\+100<', chart)
    assert float(place) + estimate_text_width("+100") / 2 <= CHART_WIDTH


def test_the_table_shows_what_a_score_rests_on_and_why_a_site_has_no_answer(group):
    few = {"sentence": "s0: not decided: 9 test examples, 2 of the rarer class (ill), cannot answer",
           "basis": "9 test examples, 2 of the rarer class (ill)", "rarest": 2}  # fmt: skip
    many = {"basis": "9 test examples, 4 of the rarer class (ill)", "rarest": 4}
    of_few, of_many = answers("undecided", "undecided")
    table = html_advice_section(group(answers=[of_few | few, of_many | many]), "k")
    assert '<th scope="col">test examples</th><th scope="col">rarer class</th></tr>' in table
    assert "<td>9</td><td>&lt;5</td></tr>" in table
    assert (
        '<span class="say why">9 test examples, fewer than 5 of the rarer class (ill), cannot answer.</span>' in table
    )
    assert table.count("say why") == 1
    assert "Right of the line at 0 joining is better" in table


def test_the_card_says_what_protects_the_data(group):
    found = group()
    assert (
        "No row of a site&#39;s data is sent. These runs used no secure sums and no differential privacy in training; what "
        "networks and messages reveal was not measured (an audit tries to find training examples in them)."
    ) in html_header_card(found)
    (method,) = (method for method in found.methods if method.label == "fedavg")
    config = {"algorithm": {"name": "fedavg", "privacy": {"target_epsilon": 8.0}}}
    runs = tuple(dataclasses.replace(run, uses_secure_sums=True, config=config) for run in method.runs)
    (runs[0].folder / "audit.json").write_text("{}")
    said = describe_protection(dataclasses.replace(method, runs=runs), {})
    assert "used secure sums and differential privacy in training (ε at most 8); " in said
    assert said.endswith("was audited, see the details.")


def test_a_comparison_of_folds_speaks_of_folds(group):
    found = group(folds=2, fold_repeats=1)
    assert ">folds that reach it</th>" in html_methods_table(found)
    assert ">lowest fold</th>" in html_gains_over_local(found, "k")
    curves = html_learning_curves(found, "k", {})
    assert "means of 2 folds" in curves
    assert "Tables score the folds of a site together, so their values differ." in curves


def test_a_model_of_a_site_alone_has_one_name_on_the_page(group):
    rival = {"over": "cox_ridge", "sentence": "s0: not decided"}
    references = {"cox_ridge": {"alone": True, "sentence": "fitted by each client", "scores": {"s0": 0.7}},
                  "pooled_cox_ridge": {"alone": False, "sentence": "fitted to all", "scores": {"s0": 0.7}}}  # fmt: skip
    (answer,) = answers("undecided")
    mean = {**answer, "client": None, **rival}
    found = group(task="survival", answers=[answer | rival], mean_answer=mean, references=references)
    section = html_advice_section(found, "k")
    assert "over Cox regression with a ridge penalty alone" in html_header_card(found)
    assert "gain over Cox regression with a ridge penalty, AUC" in section
    assert ">Cox regression with a ridge penalty alone</th>" in section
    assert "to save time: Cox regression with a ridge penalty reaches a mean AUC of " in section
    assert "cox ridge" not in section


def test_differences_between_the_sites_data_are_the_first_warnings(group):
    section = html_advice_section(group(), "k", ["chol is 0 at south. See below."])
    assert (
        "<h3>Before you rely on this</h3><ul><li>chol is 0 at south. See below.</li><li>Methods were not tuned"
        in section
    )


def test_a_mean_that_one_site_makes_wide_names_it_instead_of_asking_for_more_examples(group):
    sites = [{**row, "gain": 0.0, "interval": [-0.03, 0.03]} for row in answers("undecided", "undecided", "undecided")]
    sites[1]["interval"] = [-0.5, 0.1]
    mean = {**sites[0], "client": None, "gain": 0.001, "interval": [-0.2, 0.1]}
    found = group(answers=sites, mean_answer=mean)
    card = html_header_card(found)
    assert "It is mostly s1 that makes the mean&#39;s interval wide: each site counts the same there." in card
    assert "as many examples" not in card
    section = html_advice_section(found, "k")
    assert "In the mean each site counts the same, however many examples it has." in section
    assert "A gain of 0 says that both sides did equally well on these test examples" in section


def test_a_site_that_cannot_answer_has_no_gain_on_the_page(group):
    (answer,) = answers("undecided")
    answer |= {"gain": 0.011, "sentence": "s0: not decided: 9 test examples cannot answer: the interval is 0.6 wide"}
    section = html_advice_section(group(answers=[answer]), "k")
    assert "+0.011" not in section.partition("</table>")[0]


@pytest.mark.parametrize(
    ("validation", "words"), [(0, "a fifth of a site&#39;s training examples"), (9, "validation ex")]
)
def test_the_card_says_which_examples_chose_the_round_and_the_method(group, validation, words):
    sizes = {"0": {"s0": {"train": 40, "val": validation, "test": 9, "classes": None}}}
    best = {"kind": "best", "limit": None, "sentence": "each method at its best round by validation loss"}
    tuning = {"sentence": "lr", "methods": {}}
    card = html_header_card(group(budget=best, data=sizes, tuning=tuning, best_by="test"))
    assert f"Each method is scored after the round that did best on {words}" in card
    assert "the answers are about was chosen by the test examples; the intervals allow for that choice" in card


def test_an_auc_that_is_the_same_for_any_data_has_no_interval(group):
    scores = {"scores": {"s0": 0.5, "s1": 0.5}, "mean": 0.5, "interval": [0.487, 0.513]}
    constant = {"alone": True, "sentence": "shares", **scores}
    assert "0.487" not in html_advice_section(group(references={"majority": constant}), "k")


def test_no_client_option_or_code_of_training_alone_stands_on_the_card(group):
    found = group()
    section = html_advice_section(found, "k").partition("</div>")[2] + html_header_card(found)  # below the warnings
    assert not re.search(r"\bclients?\b|\(local\)|--\w|polyfed audit", re.sub(r"<[^>]*>", " ", section))
