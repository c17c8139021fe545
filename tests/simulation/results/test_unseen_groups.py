"""What an unseen client without a test set holds out: whole patients, and later days."""

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.errors import UserError
from polyfed.simulation.results.unseen_clients import build_unseen_client


def test_a_patient_or_a_later_day_is_held_out_whole():
    x, y = torch.arange(60.0).unsqueeze(1), torch.arange(60) % 2
    patients = pf.Examples(x, y, group=np.arange(60) // 4)
    client, held_out = build_unseen_client(lambda: nn.Linear(1, 2), patients)
    assert held_out == len(client.test) == 12
    assert not set(client.train.column("group").tolist()) & set(client.test.column("group").tolist())
    client, held_out = build_unseen_client(lambda: nn.Linear(1, 2), pf.Examples(x, y, time=np.arange(60) % 30))
    assert held_out == 12
    assert client.train.times.max() < client.test.times.min()
    with pytest.raises(UserError, match="all examples are of one group or time"):
        build_unseen_client(lambda: nn.Linear(1, 2), pf.Examples(x, y, group=["p"] * 60))
