"""What is said of a comparison: claims as rarely wrong as they say, whoever was chosen, and none made of rounding."""

import numpy as np
import pytest

from polyfed.runs.summary import Reading, summarise
from polyfed.runs.verdicts import verdicts


def said(gains, contenders, score="accuracy"):
    found = {"gain_per_seed": list(gains), "clients": {}}
    content = {"reference": "local", "score": score, "seeds": list(range(len(gains)))}
    return verdicts(content | {"methods": {"best": {"statistics": found}}}, "best", contenders)[0]


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("methods", [1, 4, 8])
def test_the_best_of_several_without_a_difference_is_rarely_said_to_gain(methods, seeds):
    """Normal scores without any difference: the claim may be wrong in 2.5 of 100 cases, and was in 7 to 13 of 100 when the
    best of 5 or 9 methods was taken as if it had not been chosen."""
    draw, wrong, cases = np.random.default_rng(methods * 100 + seeds), 0, 600
    for _ in range(cases):
        scores = draw.normal(size=(methods + 1, seeds))
        gains = scores[1:] - scores[0]
        wrong += said(gains[scores[1:].mean(axis=1).argmax()], methods, "r2").startswith("best gains")
    assert wrong / cases <= 0.025 + 3 * (0.025 * 0.975 / cases) ** 0.5


def test_the_sentence_says_that_the_best_was_chosen():
    assert said([0.04, 0.05, 0.06], 1) == "best gains 2.5 to 7.5 points over local, mean over clients"
    assert said([0.04, 0.05, 0.06], 1, "auc").startswith("best gains 0.025 to 0.075 of AUC over local")
    assert said([0.049, 0.05, 0.051], 4).endswith("over local, mean over clients, at 95 % for the best of 4")


def test_two_equal_gains_are_no_interval():
    told = said([0.02, 0.02], 1)
    assert told == "best against local: 2.0 points in each of 2 seeds, too few to say how far that varies"
    assert said([0.02, 0.02, 0.02, 0.02], 1).startswith("best gains 2.0 to 2.0 points")


def results(scores, *, same_clients=True):
    """Of scores by method, seed and client; None is not defined."""
    labels, seeds = list(scores), [0, 1]
    history = {
        (label, seed): [
            {
                "round": 1, "seconds_clients": 1.0, "seconds_server": 0.0, "bytes_down_total": 1, "bytes_up_total": 1,
                "clients": {client: {"accuracy": value} for client, value in found.items()},
                "summary": {"accuracy": {"mean": float(np.mean([v for v in found.values() if v is not None]))}},
            }
        ]
        for label, by_seed in scores.items()
        for seed, found in by_seed.items()
    }  # fmt: skip
    description = {
        "title": "", "task": "classification", "score": "accuracy", "seeds": seeds, "evaluated": {}, "left_out": {},
        "methods": {label: {"name": label} for label in labels}, "reference": "local", "same_clients": same_clients,
        "settings": {"rounds": 1},
    }  # fmt: skip
    clients = scores["local"][0]
    data = {str(seed): {client: {"train": 1, "test": 10, "classes": [1]} for client in clients} for seed in seeds}
    return summarise(description, data, None, history, Reading(), on_disk=False)


def test_equal_means_are_no_loss_whatever_the_rounding():
    """0.8 - 0.7 is not 0.2 - 0.1 in floating point."""
    scores = {"local": {0: {"a": 0.7, "b": 0.2}, 1: {"a": 0.3, "b": 0.3}},
              "fed": {0: {"a": 0.8, "b": 0.1}, 1: {"a": 0.2, "b": 0.4}}}  # fmt: skip
    found = results(scores, same_clients=True)["methods"]["fed"]["statistics"]
    assert (found["gain"], found["losers"], found["participants"]) == (0.0, 0, 2)
    assert [client["gain"] for client in found["clients"].values()] == [0.0, 0.0]


def test_clients_that_differ_from_seed_to_seed_are_counted_in_each():
    """In each seed another client loses more than it wins in the other."""
    scores = {"local": {0: {"a": 0.5, "b": 0.5}, 1: {"a": 0.5, "b": 0.5}},
              "fed": {0: {"a": 0.4, "b": 0.7}, 1: {"a": 0.7, "b": 0.4}}}  # fmt: skip
    alike, dealt_anew = (results(scores, same_clients=same)["methods"]["fed"]["statistics"] for same in (True, False))
    assert (alike["losers"], alike["participants"]) == (0, 2)
    assert (dealt_anew["losers"], dealt_anew["participants"]) == (2, 4)


def test_local_reaches_what_it_reaches_and_no_interval_leaves_the_scale():
    scores = {"local": {0: {"a": 0.9}, 1: {"a": 0.1}}, "fed": {0: {"a": 0.95}, 1: {"a": 0.05}}}
    found = results(scores, same_clients=True)
    assert found["methods"]["local"]["statistics"]["to_target"]["reached"] == 2
    assert found["methods"]["fed"]["statistics"]["to_target"]["reached"] == 1
    assert found["methods"]["fed"]["statistics"]["interval"] == [0.0, 1.0]


def test_a_method_without_a_score_for_a_client_has_no_mean_beside_the_others():
    """Whoever diverged would be left out of its mean, which would be the better for it."""
    scores = {"local": {0: {"a": 0.9, "b": 0.3}, 1: {"a": 0.9, "b": 0.3}},
              "wild": {0: {"a": 0.9, "b": None}, 1: {"a": 0.9, "b": 0.3}},
              "fed": {0: {"a": 0.9, "b": 0.4}, 1: {"a": 0.9, "b": 0.4}}}  # fmt: skip
    found = results(scores)
    assert found["best"] == "fed"
    assert [found["methods"][m]["statistics"]["mean"] for m in scores] == [
        pytest.approx(0.6),
        None,
        pytest.approx(0.65),
    ]
    assert found["methods"]["wild"]["statistics"]["gain_interval"] is None
    assert found["methods"]["wild"]["runs"]["0"]["to_target"] is None
    assert found["notes"][0] == "wild has no score for b with seed 0, and so no mean beside the others"


def test_a_client_without_a_score_by_any_method_is_left_out_of_all_means():
    scores = {m: {s: {"a": 0.5 + k / 10, "b": None} for s in (0, 1)} for k, m in enumerate(("local", "fed"))}
    found = results(scores)
    assert found["methods"]["fed"]["statistics"]["mean"] == pytest.approx(0.6)
    assert not any("no mean" in note for note in found["notes"])
