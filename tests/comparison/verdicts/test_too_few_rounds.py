"""A comparison whose training was too short to judge decides nothing, and says so before it trains."""

import pytest

import polyfed as pf
from polyfed.testing import small_clients
from tests.comparison.verdicts.test_verdict_sentences import made, three_sites

DOUBT = "too few evaluated rounds ({} of at least 6)"


@pytest.mark.parametrize("short", ["local", "fed"])
def test_no_answer_rests_on_a_method_of_few_rounds(short):
    content = made(three_sites(), losses={short: [0.9, 0.5, 0.4]})
    answers = [content["mean_answer"], *content["answers"]]
    assert {answer["answer"] for answer in answers} == {"undecided"}
    assert all(answer["sentence"].endswith("; " + DOUBT.format(3)) for answer in answers)
    assert {answer["answer"] for answer in made(three_sites(), losses={short: [0.5] * 6})["answers"]} != {"undecided"}


def test_short_training_is_named_even_where_examples_are_few():
    """More examples would not help: the width of the interval is not the reason given."""
    sentence = made(three_sites(4), losses={"fed": [0.5] * 2})["mean_answer"]["sentence"]
    assert "cannot answer" not in sentence
    assert sentence.endswith(DOUBT.format(2))


def test_one_seed_and_few_rounds_are_both_named():
    right = {method: {c: rows[:1] for c, rows in sites.items()} for method, sites in three_sites().items()}
    assert made(right, losses={"fed": [0.5]})["answers"][0]["sentence"].endswith("one seed and " + DOUBT.format(1))


@pytest.mark.parametrize(
    ("rounds", "every", "budget", "advice"),
    [
        (2, 1, "best", "(2 of at least 6): train longer (rounds=6), or compare after all rounds (budget='steps')"),
        (6, 2, "best", "(3 of at least 6): evaluate every round (evaluate_every=1), train longer (rounds=12), or"),
        (2, 1, "steps", None),
        (6, 1, "best", None),
    ],
)
def test_it_is_said_before_training(rounds, every, budget, advice, capsys):
    options = {"seeds": [0], "tune": "none", "references": False, "evaluate_every": every, "budget": budget}
    pf.compare(small_clients(2), "fedprox", rounds=rounds, **options)
    printed = capsys.readouterr().err
    assert ("too few evaluated rounds for an answer" in printed) == (advice is not None)
    assert advice is None or advice in printed


def test_a_plan_says_it():
    plan = pf.compare(small_clients(2), "fedprox", rounds=2, seeds=2, tune="none", plan_only=True, quiet=True)
    assert any("too few evaluated rounds for an answer" in sentence for sentence in plan.verdicts)
