"""How many test examples an answer rests on, and of which class there are fewest."""

import pytest
import torch

from polyfed.comparison.verdicts.answer_basis import count_examples_behind_answer
from polyfed.tasks import Classification, Multilabel


@pytest.mark.parametrize(("targets", "rarest"), [
    ([0, 1, 1, 1], (1, 0)), ([2, 2, 2, 0, 0], (2, 0)), ([1, 1], (0, 1)),
    ([[1, 0], [1, 0], [1, 1]], (1, 1)), ([[1, 1], [1, 1]], (0, 0)),
])  # fmt: skip
def test_the_rarest_class_is_counted(targets, rarest):
    task = Multilabel() if isinstance(targets[0], list) else Classification()
    assert task.rarest_class(torch.tensor(targets)) == rarest


def test_what_events_are_called():
    def words(classes, rarest, task="classification", names=None):
        row = {"test": 54, "classes": [1] * classes, "rarest": rarest}
        content = {"data": {"0": {"a": row}}, "task": task, "class_names": names}
        return count_examples_behind_answer(content, ["a"], by_class=True).sentence

    assert words(2, [4, 0]) == "54 test examples, 4 of the rarer class"
    assert words(2, [4, 0], names=["healthy", "ill"]) == "54 test examples, 4 of the rarer class (healthy)"
    assert words(3, [4, 0]) == "54 test examples, 4 of the rarest class"
    assert words(2, [0, 1]) == "54 test examples, all of one class"
    assert words(2, [3, 1], "multilabel") == "54 test examples, 3 on the rarer side of a label"
