"""The network on the pooled data of clients whose rows have groups."""

from functools import partial

from torch import nn

import polyfed as pf
from polyfed.comparison.references.reference_models import train_pooled_reference
from polyfed.data import Examples
from tests.comparison.references.test_reference_models import TRAINING, separable


def test_pooling_patients_is_not_told_as_a_leak(recwarn):
    """Its network is scored on the clients' test examples, and needs a test set of its own for form's sake alone."""
    data = [
        pf.Client(
            f"client-{k}", partial(nn.Linear, 5, 2),
            *(Examples(*separable(20, 2 * k + of, 2), group=[f"{name}{k}{i // 2}" for i in range(20)])
              for of, name in enumerate("pt")),
        )
        for k in range(2)
    ]  # fmt: skip
    assert train_pooled_reference(data, TRAINING, rounds=1, seed=0) is not None
    assert not [str(warning.message) for warning in recwarn]
