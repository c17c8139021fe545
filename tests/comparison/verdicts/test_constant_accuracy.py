"""A comparison by accuracy warns where all methods only answer the most frequent class."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.comparison.verdicts.warning_sentences import describe_constant_accuracy


def results_with_means(fed, alone, constant, **more):
    means = {"local": {"statistics": {"mean": alone}}, "fedavg": {"statistics": {"mean": fed}}}
    results = {"score": "accuracy", "task": "classification", "class_names": ["a", "b"], "data": {}, "methods": means}
    return {**results, "leader": "fedavg", "reference": "local", "references": {"majority": {"mean": constant}}, **more}


@pytest.mark.parametrize(
    ("results", "advised"),
    [
        (results_with_means(0.863, 0.86, 0.863), "metrics=['auc'], --metrics auc"),
        (results_with_means(0.863, 0.86, 0.863, class_names=["a", "b", "c"]), "--metrics balanced_accuracy"),
        (results_with_means(0.88, 0.86, 0.863), None),
        (results_with_means(0.863, 0.84, 0.863), None),
        (results_with_means(0.863, 0.86, 0.863, references={}), None),
        (results_with_means(0.863, 0.86, 0.863, leader=None), None),
        (results_with_means(0.863, 0.863, 0.863, score="auc"), None),
    ],
)
def test_only_the_same_accuracy_of_all_three_is_warned_of(results, advised):
    sentences = describe_constant_accuracy(results)
    assert (advised is None) == (not sentences)
    assert not sentences or advised in sentences[0]


def test_a_comparison_of_a_rare_class_warns():
    def part(n):
        """Returns inputs that tell nothing, and labels of which a tenth is of the rarer class."""
        return torch.zeros(n, 3), (torch.arange(n) % 10 == 0).long()

    clients = [pf.Client(name, lambda: nn.Linear(3, 2), train=part(40), val=part(20), test=part(40)) for name in "ab"]
    method = pf.algorithms.FedAvg(lr=0.5, batch_size=40, local_epochs=20)
    comparison = pf.compare(clients, method, rounds=1, seeds=1, tune="none", budget="steps", metrics=["accuracy"])
    assert "accuracy cannot tell these methods apart; let another score decide (metrics=['auc'])" in str(comparison)
