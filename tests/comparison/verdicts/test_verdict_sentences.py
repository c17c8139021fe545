"""What is said of results made by hand: the same words everywhere, and none that the intervals do not support."""

import numpy as np
import pytest
import torch

from polyfed.comparison.build_results import ResultInputs, build_results
from polyfed.comparison.planning.budget import Budget, ResultCriteria
from polyfed.core.evaluation.metrics import METRICS
from polyfed.tasks import infer_task_of_targets

SEEDS = (0, 1, 2)


def rights(number, share, shift=0):
    """Which of so many examples a network has right; the same hard ones for every network, but for a few."""
    right = np.zeros(number, dtype=bool)
    right[: round(share * number)] = True
    return np.roll(right, shift)


def outputs_of(right):
    """Outputs for targets 0, 1, 0, ... that are right where asked for."""
    targets = torch.arange(len(right)) % 2
    return torch.eye(2)[torch.where(torch.as_tensor(right), targets, 1 - targets)].float() * 4 - 2


def made(right, *, metric="accuracy", losses=None, validation=None, simple=None, **changes):
    """Results of `right[method][client] = [which examples are right, a row a seed]`, by the last of one round; `validation`
    has a score of each method, `simple[name][client]` which examples a model has right that each client has alone."""
    score = METRICS[metric]
    clients = sorted(next(iter(right.values())))
    seeds = SEEDS[: len(next(iter(right["local"].values())))]
    outputs = {(m, s, c): outputs_of(right[m][c][k]) for m in right for c in clients for k, s in enumerate(seeds)}
    targets = {c: torch.arange(len(right["local"][c][0])) % 2 for c in clients}
    losses = losses or {}
    histories = {}
    for m in right:
        for s in seeds:
            spent = {"bytes_down_total": 5, "bytes_up_total": 5, "seconds_clients": 1.0, "seconds_server": 0.0}
            rows = {c: {metric: score(outputs[m, s, c], targets[c])} for c in clients}
            course = losses.get(m, [0.5] * 8)
            mean = np.mean([row[metric] for row in rows.values()])
            now = {"clients": rows, "summary": {metric: {"mean": mean}}, "best_round": None}
            if validation is not None:
                now["summary"][f"val_{metric}"] = {"mean": validation[m]}
            histories[m, s] = [{"round": t + 1, **spent, "train_loss": loss, **now} for t, loss in enumerate(course)]
    description = {
        "title": "t", "task": "classification", "seeds": list(seeds), "reference": "local", "evaluated": {}, "skipped": {},
        "methods": {m: {"name": m} for m in right}, "same_clients": True, "settings": {"rounds": 8},
        "tuning": {"sentence": "", "by": "validation", "methods": {}, "edge": []},
    }  # fmt: skip
    sizes = {
        c: {
            "train": 50,
            "test": len(targets[c]),
            "classes": None,
            "rarest": infer_task_of_targets(targets[c]).rarest_class(targets[c]),
        }
        for c in clients
    }
    fitted = {(m, c): outputs_of(rows) for m, of in (simple or {}).items() for c, rows in of.items()}
    own = {m: {c: score(fitted[m, c], targets[c]) for c in of} for m, of in (simple or {}).items()}
    references = {m: {"sentence": "", "alone": True, "runs": {str(s): own[m] for s in seeds}, "scores": own[m],
                      "mean": np.mean([*own[m].values()])} for m in own}  # fmt: skip
    material = ResultInputs(
        description=description | changes,
        client_sizes={str(s): sizes for s in seeds},
        class_names=None,
        histories=histories,
        metric=score,
        outputs=lambda label, seed, client, number: outputs[label, seed, client],
        targets=lambda seed, client: targets[client],
        references=references,
        left_out=(),
        reference_outputs=lambda name, seed, client: fitted[name, client],
    )
    return build_results(material, ResultCriteria())


def three_sites(number=400):
    """North gains ten points on 400 examples, east loses ten, west stays as it is."""
    local = {c: [rights(number, 0.7, k) for k in range(3)] for c in ("north", "east", "west")}
    fed = {
        "north": [rights(number, 0.8, k) for k in range(3)],
        "east": [rights(number, 0.6, k) for k in range(3)],
        "west": [rights(number, 0.7, -k) for k in range(3)],
    }
    return {"local": local, "fed": fed}


def test_each_site_has_its_answer_in_words():
    content = made(three_sites())
    answers = {one["client"]: one for one in content["answers"]}
    assert {client: one["answer"] for client, one in answers.items()} == {
        "north": "join", "east": "stay", "west": "undecided"}  # fmt: skip
    assert answers["north"]["sentence"].startswith("north: join with fed: ")
    assert answers["north"]["sentence"].endswith(
        "better than training alone on new examples (best estimate 10.0 points better; 400 test examples)"
    )
    assert answers["east"]["sentence"].startswith("east: stay alone: fed is ")
    assert answers["west"]["gain"] == 0
    assert answers["west"]["sentence"].endswith("(best estimate no difference; 400 test examples)")
    low, high = answers["north"]["interval"]
    assert answers["north"]["gain"] == pytest.approx(0.1)
    assert low < 0.1 < high
    assert content["verdicts"] == [
        content["mean_answer"]["sentence"], *(answers[c]["sentence"] for c in ("north", "east", "west"))
    ]  # fmt: skip
    assert content["mean_answer"]["answer"] == "undecided"
    clients = content["methods"]["fed"]["statistics"]["clients"]
    assert {c: row["verdict"] for c, row in clients.items()} == {"north": "gains", "east": "loses", "west": "undecided"}
    assert {c: row["p"] <= 0.05 for c, row in clients.items()} == {"north": True, "east": True, "west": False}
    assert content["methods"]["fed"]["statistics"]["losers"] == 1


def test_few_test_examples_decide_nothing():
    """The same shares of 20 examples: two of them changed sides."""
    content = made(three_sites(20))
    assert {one["answer"] for one in content["answers"]} == {"undecided"}
    assert "not decided: fed is between " in content["verdicts"][1]
    assert "20 test examples)" in content["verdicts"][1]


def test_p_and_words_and_the_best_agree():
    """With four methods: whichever leads, its words are those of its p, and no p is below what the sentence says."""
    rng = np.random.default_rng(0)
    for gain in (0.0, 0.03, 0.08, 0.35):
        names = ("local", "a", "b", "c")
        right = {
            m: {c: [rng.random(200) < 0.6 + (gain if m == "b" else 0) for _ in SEEDS] for c in "xyz"} for m in names
        }
        content = made(right)
        mean = content["mean_answer"]
        assert mean["method"] == content["leader"]
        found = content["methods"][content["leader"]]["statistics"]
        assert (mean["answer"] != "undecided") == (found["p_reference"] <= 0.05)
        assert content["best"] == max(content["methods"], key=lambda m: content["methods"][m]["statistics"]["mean"])
        if mean["answer"] == "join":
            assert content["best"] == content["leader"]
    assert mean["answer"] == "join"
    assert content["methods"]["a"]["statistics"]["p_best"] <= 0.05


def test_one_seed_has_intervals_and_decides_nothing():
    content = made({m: {c: rows[:1] for c, rows in of.items()} for m, of in three_sites().items()})
    north = next(one for one in content["answers"] if one["client"] == "north")
    assert north["interval"][0] > 0
    assert north["answer"] == "undecided"
    assert north["sentence"].endswith("400 test examples); one seed")
    assert any("With one seed the intervals hold for these very networks" in text for text in content["covers"])


FALLING = [1.0 - 0.1 * t for t in range(8)]


def test_no_answer_over_or_with_a_method_that_still_learns():
    content = made(three_sites(), losses={"local": FALLING})
    assert {one["answer"] for one in content["answers"]} == {"undecided"}
    assert content["verdicts"][0].endswith("local had not converged")
    assert content["convergence"]["local"]["converged"] is False
    assert content["warnings"][0].startswith("Not converged: local.")
    late = made(three_sites(), losses={"fed": FALLING})
    assert {one["answer"] for one in late["answers"]} == {"undecided"}
    assert late["verdicts"][0].endswith("fed had not converged")


def test_the_best_of_those_that_had_converged_leads():
    right = three_sites()
    right["slow"] = {c: [rights(400, 0.95, k) for k in range(3)] for c in right["local"]}
    assert made(right)["leader"] == "slow"
    content = made(right, losses={"slow": FALLING})
    assert content["leader"] == "fed"
    assert content["best"] == "slow"
    assert content["answers"][1]["answer"] == "join"


def test_validation_scores_choose_unless_training_was_fitted_to_them():
    right = three_sites()
    right["other"] = {c: [rights(400, 0.9, k) for k in range(3)] for c in right["local"]}
    flattered = {"local": 0.5, "fed": 0.9, "other": 0.6}
    content = made(right, validation=flattered)
    assert (content["best"], content["best_by"], content["leader"]) == ("fed", "validation", "fed")
    content = made(right, validation=flattered, methods={m: {"name": m, "patience": 2} for m in right})
    assert (content["best"], content["best_by"], content["leader"]) == ("other", "test", "other")
    assert any(note.startswith("since patience stops training by the validation examples") for note in content["notes"])


def test_a_budget_that_is_asked_for_is_the_question():
    right = three_sites()
    material = made(right, losses={"local": FALLING})
    assert material["budget"]["kind"] == "best"
    assert not Budget().determines_compared_round
    assert all(Budget(kind).determines_compared_round for kind in ("steps", "bytes", "seconds"))


def test_methods_that_were_not_tuned_are_named_on_top():
    assert any("not tuned (tune='none', --tune none)" in text for text in made(three_sites(), tuning=None)["warnings"])


def test_two_seeds_are_said_to_be_few():
    right = three_sites()
    two = {method: {client: rows[:2] for client, rows in of.items()} for method, of in right.items()}
    assert any("Two seeds" in text for text in made(two)["warnings"])
    assert not any("seeds" in text for text in made(right)["warnings"])


def test_lower_losses_are_gains():
    content = made(three_sites(), metric="brier")
    north, east = (content["methods"]["fed"]["statistics"]["clients"][c] for c in ("north", "east"))
    assert north["gain"] > 0 > east["gain"]
    assert north["mean"] < east["mean"]  # the Brier score itself
    assert {one["client"]: one["answer"] for one in content["answers"]}["north"] == "join"
    assert " better in Brier score than training alone" in next(v for v in content["verdicts"] if v.startswith("north"))
    worst = content["methods"]["fed"]["statistics"]["worst"]
    assert worst == pytest.approx(east["mean"])


def test_data_dealt_anew_have_no_answers_by_client_and_wider_intervals():
    fixed, divided = (made(three_sites(), same_clients=same) for same in (True, False))
    assert divided["answers"] == []
    assert len(divided["verdicts"]) == 1
    assert {c["verdict"] for c in divided["methods"]["fed"]["statistics"]["clients"].values()} == {None}
    assert any("partitions the data again" in text for text in divided["covers"])
    again = made(three_sites(), resplit=3)
    assert {one["client"] for one in again["answers"]} == {"north", "east", "west"}
    assert any("split 3 times" in text for text in again["covers"])
    assert fixed["methods"]["fed"]["statistics"]["gain"] == again["methods"]["fed"]["statistics"]["gain"]


def test_without_predictions_nothing_is_decided_and_that_is_said():
    right = three_sites()
    description = {
        "title": "t", "task": "classification", "seeds": [0], "reference": "local", "evaluated": {}, "skipped": {},
        "methods": {m: {"name": m} for m in right}, "same_clients": True, "settings": {"rounds": 1},
    }  # fmt: skip
    history = [{"round": 1, "bytes_down_total": 0, "bytes_up_total": 0, "seconds_clients": 1.0, "seconds_server": 0.0,
                "train_loss": None, "best_round": None, "clients": {"north": {"accuracy": 0.5}},
                "summary": {"accuracy": {"mean": 0.5}}}]  # fmt: skip
    data = {"0": {"north": {"train": 1, "test": 10, "classes": None}}}
    material = ResultInputs(
        description=description,
        client_sizes=data,
        class_names=None,
        histories={(m, 0): history for m in right},
        metric=METRICS["accuracy"],
    )
    content = build_results(material, ResultCriteria(Budget("steps")))
    assert content["verdicts"] == [
        "mean over clients: not decided: one seed (10 test examples)",
        "north: not decided: one seed (10 test examples)",
    ]
    assert content["predictions"] is False


def test_equal_means_are_no_loss_whatever_the_rounding():
    """0.8 - 0.7 is not 0.2 - 0.1 in floating point."""
    number = 10
    local = {"a": [rights(number, 0.7)] * 2, "b": [rights(number, 0.2)] * 2}
    fed = {"a": [rights(number, 0.8), rights(number, 0.6)], "b": [rights(number, 0.1), rights(number, 0.3)]}
    found = made({"local": local, "fed": fed})["methods"]["fed"]["statistics"]
    assert (found["gain"], found["losers"], found["participants"]) == (0.0, 0, 2)


def test_a_client_without_a_score_by_one_method_takes_its_mean():
    """Whoever diverged would be left out of its mean, which would be the better for it."""
    right = three_sites()
    content = made(right)
    assert content["methods"]["fed"]["statistics"]["mean"] is not None
    histories = {}
    for m in right:
        rows = {c: {"accuracy": None if m == "fed" and c == "east" else 0.5} for c in right[m]}
        known = [row["accuracy"] for row in rows.values() if row["accuracy"] is not None]
        histories[m, 0] = [
            {"round": 1, "bytes_down_total": 0, "bytes_up_total": 0, "seconds_clients": 1.0, "seconds_server": 0.0,
             "train_loss": None, "best_round": None, "clients": rows, "summary": {"accuracy": {"mean": np.mean(known)}}}
        ]  # fmt: skip
    description = {
        "title": "t", "task": "classification", "seeds": [0], "reference": "local", "evaluated": {}, "skipped": {},
        "methods": {m: {"name": m} for m in right}, "same_clients": True, "settings": {"rounds": 1},
    }  # fmt: skip
    data = {"0": {c: {"train": 1, "test": 10, "classes": None} for c in right["local"]}}
    content = build_results(
        ResultInputs(
            description=description,
            client_sizes=data,
            class_names=None,
            histories=histories,
            metric=METRICS["accuracy"],
        ),
        ResultCriteria(),
    )
    assert content["methods"]["fed"]["statistics"]["mean"] is None
    assert content["notes"][0] == "fed has no score for east with seed 0, and so no mean to compare with the others"


# -- what a site has alone beside its network -------------------------------------------------------------------------


def simple_model(north, east, west, number=400):
    return {c: rights(number, share) for c, share in (("north", north), ("east", east), ("west", west))}


def answers_of(content):
    return {one["client"]: one for one in content["answers"]}


def test_a_site_joins_only_if_the_method_beats_everything_that_it_has_alone():
    """North gains ten points over training alone; a simple model alone has as much, more, or less."""
    right = three_sites()
    for share, answer in ((0.6, "join"), (0.75, "join"), (0.8, "undecided"), (0.9, "stay")):
        content = made(right, simple={"logistic_regression": simple_model(share, 0.6, 0.6)})
        north = answers_of(content)["north"]
        assert north["answer"] == answer, share
        assert north["over"] == ("local" if share < 0.7 else "logistic_regression")
        assert north["gain"] == pytest.approx(min(0.1, 0.8 - share))
        assert north["gains"].keys() == {"local", "logistic_regression"}
        if answer == "join":
            best = "training alone" if share == 0.6 else "logistic regression"
            assert north["over_words"] == f"the best alone, {best}"
            assert f"better than the best that it has alone, {best}, on new" in north["sentence"]
        if share == 0.8:
            assert north["sentence"].startswith("north: not decided: fed is between ")
            assert "than the best that it has alone, logistic regression (best" in north["sentence"]
        if share == 0.9:
            assert north["sentence"].startswith("north: stay alone: fed is ")
            assert "worse than the best that it has alone, logistic regression, on new" in north["sentence"]
    assert answers_of(made(right))["north"]["answer"] == "join"


def test_the_lower_end_is_not_corrected_for_the_number_of_rivals_and_the_upper_is():
    right, weak = three_sites(), simple_model(0.3, 0.3, 0.3)
    one = answers_of(made(right, simple={"ridge": weak}))
    four = answers_of(made(right, simple={"ridge": weak, "mean": weak, "gradient_boosting": weak}))
    plain = answers_of(made(right))
    for client in "north", "east", "west":
        (low, high), (first, last), (before, after) = (found[client]["interval"] for found in (one, four, plain))
        assert low == pytest.approx(before)
        assert first == pytest.approx(before)
        assert after < high < last


def test_a_simple_model_alone_is_compared_with_training_alone():
    right = three_sites()
    worse, better = simple_model(0.5, 0.5, 0.5), simple_model(0.9, 0.9, 0.9)
    content = made(right, simple={"ridge": worse})
    assert content["verdicts"][1].startswith("mean over clients: ridge regression alone is ")
    assert " worse than training alone (best estimate 20.0 points worse)" in content["verdicts"][1]
    content = made(right, simple={"ridge": worse, "gradient_boosting": better})
    assert content["verdicts"][0].startswith("mean over clients: stay alone: fed is ")
    assert "gradient boosting alone is " in content["verdicts"][1]
    assert " better than training alone (best estimate 20.0 points better)" in content["verdicts"][1]
    told = content["references"]["gradient_boosting"]
    assert told["gain"] == pytest.approx(0.2)
    assert told["gain_interval"][0] > 0
    assert told["clients"]["north"]["gain_interval"][0] > 0
    assert any(
        "beats everything it has alone: training alone, ridge regression alone" in text for text in content["covers"]
    )


def test_without_simple_models_the_answers_say_that_they_are_over_training_alone_only():
    assert any("compare with training alone only" in text for text in made(three_sites())["covers"])


def test_a_model_without_a_score_at_a_site_is_no_rival_there():
    content = made(three_sites(), simple={"ridge": {"north": rights(400, 0.9), "east": rights(400, 0.9)}})
    assert answers_of(content)["west"]["over"] == "local"


def test_dealt_anew_the_rivals_count_too():
    right = three_sites()
    simple = {"logistic_regression": simple_model(0.9, 0.9, 0.9)}
    content = made(right, simple=simple, resplit=3)
    assert {one["over"] for one in content["answers"]} == {"logistic_regression"}
    assert {*map(len, (one["gains"] for one in content["answers"]))} == {2}
    divided = made(right, simple=simple, same_clients=False)
    assert divided["mean_answer"]["over"] == "logistic_regression"


def test_events_are_told_where_they_limit_the_score():
    content = made(three_sites(), metric="auc")
    north = answers_of(content)["north"]
    assert north["basis"] == "400 test examples, 200 of the rarer class"
    assert north["rarest"] == 200
    assert "of the rar" in content["mean_answer"]["sentence"]
    assert answers_of(made(three_sites()))["north"]["rarest"] is None  # of accuracy every example counts alike


def test_an_interval_that_says_nothing_is_not_told_as_two_numbers():
    content = made(three_sites(8))
    for one in content["answers"]:
        low, high = one["interval"]
        assert high - low > 0.5
        width = f"{100 * (high - low):.1f} points wide"
        assert one["sentence"].endswith(f"not decided: 8 test examples cannot answer: the interval is {width}")
    falling = made(three_sites(8), losses={"local": FALLING})
    assert all("cannot answer" not in one["sentence"] for one in falling["answers"])  # there is another reason
    assert all(one["sentence"].endswith("local had not converged") for one in falling["answers"])
