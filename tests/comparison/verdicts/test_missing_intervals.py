"""What is said where a client has no interval, and what the mean then counts."""

from polyfed.comparison.verdicts.verdict_sentences import describe_limits_of_results
from polyfed.report.data.answers import parse_site_answers
from tests.comparison.verdicts.test_verdict_sentences import answers_of, made, rights, three_sites


def test_methods_that_predict_alike_are_not_said_to_lack_examples():
    alike = {"north": [rights(200, 0.7, k) for k in range(3)]}
    content = made({"local": alike, "fed": alike}, metric="brier")
    assert answers_of(content)["north"]["sentence"] == (
        "north: not decided: fed has the same Brier score as training alone, which says nothing of new examples (200 test "
        "examples)"
    )


def test_the_mean_counts_the_clients_that_are_in_its_interval():
    """The AUC of one positive and one negative example is a number, and says nothing of others."""
    right = three_sites()
    for of_method in right.values():
        of_method["tiny"] = [rights(2, 1.0)] * 3
    content = made(right, metric="auc")
    assert answers_of(content)["tiny"]["interval"] is None
    assert content["mean_answer"]["basis"].startswith(
        "3 of 4 clients with 1200 test examples, 200 of the rarer class at "
    )
    assert "(best estimate " in content["mean_answer"]["sentence"]
    assert "; 3 of 4 clients with 1200 test examples" in content["mean_answer"]["sentence"]
    three = made(three_sites(), metric="auc")["mean_answer"]
    assert three["gain"] == content["mean_answer"]["gain"]
    assert three["basis"].startswith("1200 test examples, 200 of")


def test_sites_whose_names_are_numbers_are_called_sites_in_sentences():
    right = {method: dict(zip(("1", "12", "3"), rows.values(), strict=True)) for method, rows in three_sites().items()}
    sentences = made(right)["verdicts"]
    assert [sentence.partition(":")[0] for sentence in sentences] == [
        "mean over clients",
        "site 1",
        "site 12",
        "site 3",
    ]
    content = {"answers": [{"client": "1", "answer": "join", "sentence": sentences[1]}]}
    assert parse_site_answers(content)[0].sentence_without_site_and_advice().startswith("with fed: ")


def test_a_missing_score_names_the_fold_as_progress_and_page_do():
    content = {**made(three_sites()), "folds": 5}
    (sentence, *_) = describe_limits_of_results(content, {("fed", "1"): ["north"]}, ())
    assert sentence.startswith("fed has no score for north in fold 2, ")
    (sentence, *_) = describe_limits_of_results(content | {"folds": None}, {("fed", "1"): ["north"]}, ())
    assert sentence.startswith("fed has no score for north with seed 1, ")
