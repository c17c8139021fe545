"""Intervals of examples in groups: 140 recordings of a voice are one patient."""

import numpy as np
import pytest
import torch

from polyfed.comparison.statistics.evidence import Evidence
from polyfed.comparison.statistics.mrmc import estimate_variance_components, score_seeds
from polyfed.comparison.statistics.pseudo_values.cluster_jackknife import (
    assign_group_numbers,
    jackknife_pseudo_values_by_group,
)
from polyfed.comparison.statistics.pseudo_values.jackknife import (
    NUM_GROUPS,
    example_class_of_each_pseudo_value,
    score_with_pseudo_values,
)
from polyfed.comparison.statistics.score_intervals import mean_gain_with_interval, mean_score_with_interval
from polyfed.comparison.verdicts.answer_basis import count_client_examples, count_examples_behind_answer
from polyfed.core.algorithm import Client
from polyfed.core.evaluation.metrics import METRICS
from polyfed.core.examples.examples import Examples

RNG = np.random.default_rng(0)


def drawn(task, groups=12, rows=5, classes=2):
    """Outputs, targets and groups of patients with several rows, in any order."""
    order = RNG.permutation(groups * rows)
    of = (np.arange(groups * rows) // rows)[order]
    if task == "regression":
        targets = torch.from_numpy(RNG.normal(size=(groups, 1))[of] + 0.1 * RNG.normal(size=(len(of), 1)))
        return targets + 0.5 * torch.from_numpy(RNG.normal(size=targets.shape)), targets, of
    targets = torch.from_numpy(np.arange(groups)[of] % classes)
    outputs = torch.nn.functional.one_hot(targets, classes) + 0.8 * torch.from_numpy(
        RNG.normal(size=(len(of), classes))
    )
    return outputs, targets, of


@pytest.mark.parametrize(
    ("name", "task", "classes"),
    [("accuracy", "classes", 2), ("auc", "classes", 2), ("auc", "classes", 3), ("balanced_accuracy", "classes", 2),
     ("r2", "regression", 0), ("mae", "regression", 0)],
)  # fmt: skip
def test_each_group_is_left_out_in_turn(name, task, classes):
    """The closed forms equal the definition: G·A − (G − 1)·A without the group."""
    metric = METRICS[name]
    outputs, targets, of = drawn(task, classes=classes)
    score, values = jackknife_pseudo_values_by_group(metric, outputs, targets, of, NUM_GROUPS, targets)
    rest = [torch.from_numpy(np.flatnonzero(of != group)) for group in range(12)]
    expected = [12 * metric(outputs, targets) - 11 * metric(outputs[rows], targets[rows]) for rows in rest]
    assert score == pytest.approx(metric(outputs, targets))
    assert values == pytest.approx(expected)


@pytest.mark.parametrize(("name", "task"), [("accuracy", "classes"), ("auc", "classes"), ("r2", "regression")])
def test_copies_of_a_patient_s_row_say_nothing_new(name, task):
    """140 copies of each row, as one group, give the interval of the single rows."""
    outputs, targets, _ = drawn(task, groups=30, rows=1)
    others = outputs + 0.5 * torch.from_numpy(RNG.normal(size=outputs.shape))
    many = torch.arange(30).repeat_interleave(140)
    arguments = METRICS[name], [outputs], [others], targets
    copies = METRICS[name], [outputs[many]], [others[many]], targets[many]
    assert mean_gain_with_interval(*copies, groups=many.numpy()) == pytest.approx(mean_gain_with_interval(*arguments))
    without = mean_gain_with_interval(*copies)
    single = mean_gain_with_interval(*arguments)
    assert without[2] - without[1] < (single[2] - single[1]) / 5, "rows taken for patients"


def test_groups_of_one_row_change_nothing():
    outputs, targets, _ = drawn("classes", groups=40, rows=1)
    for name in ("accuracy", "auc", "log_loss"):
        plain, grouped = (
            score_seeds(METRICS[name], [outputs], targets, groups) for groups in (None, RNG.permutation(40))
        )
        assert np.array_equal(plain.pseudo_values, grouped.pseudo_values)
    assert assign_group_numbers(np.arange(4), 4) is None


def test_more_groups_than_blocks_and_a_single_group():
    outputs, targets, of = drawn("classes", groups=NUM_GROUPS + 9, rows=3)
    score, values = score_with_pseudo_values(METRICS["balanced_accuracy"], outputs, targets, of)
    assert len(values) == NUM_GROUPS
    assert np.mean(values) == pytest.approx(score, abs=0.02)
    assert mean_score_with_interval(METRICS["accuracy"], [outputs], targets, groups=np.zeros(len(of), np.int64)) is None


def test_the_interval_covers_what_patients_vary():
    """Rows of a patient are right or wrong together: the interval by rows misses the truth, that by patients does not."""
    hit = {"rows": 0, "patients": 0}
    for _ in range(200):
        right = np.repeat(RNG.random(24) < 0.7, 20)
        outputs = torch.from_numpy(np.stack([~right, right], axis=1).astype(np.float64))
        targets, of = torch.ones(len(right), dtype=torch.int64), np.arange(24).repeat(20)
        for name, groups in (("rows", None), ("patients", of)):
            _, low, high = mean_score_with_interval(METRICS["accuracy"], [outputs], targets, groups=groups)
            hit[name] += low <= 0.7 <= high
    assert hit["patients"] >= 186
    assert hit["rows"] < 120


def test_a_comparison_counts_groups():
    outputs, targets, of = drawn("classes", groups=20, rows=8)
    worse = outputs + 1.5 * torch.from_numpy(RNG.normal(size=outputs.shape))
    by_label = {"local": worse, "fedavg": outputs}
    scores = {
        label: {seed: {"a": METRICS["accuracy"](made, targets)} for seed in (0, 1)} for label, made in by_label.items()
    }
    widths = {}
    for name, groups in (("rows", None), ("groups", of)):
        evidence = Evidence(METRICS["accuracy"], [0, 1], scores, lambda label, seed, client: by_label[label],
                            lambda client: targets, True, True, {}, lambda client, g=groups: g)  # fmt: skip
        gain = evidence.estimate_scores_and_gains(["local", "fedavg"], "local", None)["fedavg"].gain_by_client["a"]
        widths[name] = gain.high - gain.low
    assert widths["groups"] != widths["rows"]
    examples = Examples(outputs.float(), targets, group=of)
    sizes = count_client_examples([Client("a", None, examples, examples, examples)], None)
    assert sizes["a"]["groups"] == [20, 20]
    content = {"data": {"0": sizes}, "class_names": None, "task": "classification"}
    assert count_examples_behind_answer(content, ["a"], by_class=False).sentence == "160 test examples of 20 groups"


def test_a_client_with_one_negative_validation_example_does_not_choose_a_method():
    x, y = torch.zeros(18, 1), torch.tensor([0] + [1] * 17)
    sizes = count_client_examples([Client("a", None, (x, y), (x, y), (x, y))], None)
    assert sizes["a"]["val_rarest"] == 1
    y = torch.tensor([0, 1] * 9)
    assert "val_rarest" not in count_client_examples([Client("a", None, (x, y), (x, y), (x, y))], None)["a"]


def test_a_few_events_decide_a_c_index_of_patients_with_several_rows():
    """Of 240 rows of 120 patients with five events, 9.7 % of comparisons of two sites made a false claim about a site."""
    patients = np.arange(240) // 2
    events = torch.from_numpy(patients % 24 == 0)  # of early and late times
    targets = torch.stack([torch.from_numpy(patients + 1.0), events], dim=1)
    for metric, truth in ((METRICS["c_index"], targets), (METRICS["f1"], events.long())):
        classes = example_class_of_each_pseudo_value(metric, truth, patients)
        assert (len(classes), sorted(np.unique(classes, return_counts=True)[1])) == (NUM_GROUPS, [5, NUM_GROUPS - 5])
    rng = np.random.default_rng(1)
    risk = torch.from_numpy(rng.normal(size=120)[patients])
    outputs = [(risk + torch.from_numpy(rng.normal(size=120)[patients]))[:, None] for _ in range(2)]
    components = estimate_variance_components(METRICS["c_index"], outputs[:1], outputs[1:], targets, patients)
    assert components.degrees_of_freedom < 6
