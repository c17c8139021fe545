"""Made images with blobs: the same at every call, sites that differ, and shapes that networks take."""

import numpy as np
import pytest
import torch

from polyfed import UserError
from polyfed.data.sources.blobs import SITES, Blobs


def test_they_are_the_same_at_every_call_and_the_sites_differ():
    first, second = Blobs().load(), Blobs().load()
    assert first.fingerprint == second.fingerprint
    assert first.task == "segmentation"
    assert (first.num_outputs, first.input_shape, len(first.train)) == (2, (1, 32, 32), 112)
    assert first.train.y.dtype == torch.uint8
    inside = first.train.y[:, None] == 1
    contrasts = []
    for site in SITES:
        rows = torch.from_numpy(first.columns["site"] == site)
        x, is_blob = first.train.x[rows].float(), inside[rows]
        contrasts.append(float(x[is_blob].mean() - x[~is_blob].mean()))
    assert min(contrasts[:3]) > 20 > -20 > contrasts[3]
    empty = ~inside.flatten(1).any(1)
    assert 0.05 < float(empty.float().mean()) < 0.2


def test_volumes_and_other_sizes():
    pool = Blobs(images=(2, 2, 2, 2), image_size=16, volumes=True).load()
    assert tuple(pool.train.x.shape) == (8, 1, 16, 16, 16)
    assert tuple(pool.train.y.shape) == (8, 16, 16, 16)
    assert pool.train.batch(torch.arange(2))[0].dtype == torch.float32
    assert np.unique(pool.columns["site"]).tolist() == list(SITES)


def test_options_out_of_range_are_refused():
    with pytest.raises(UserError, match="four numbers"):
        Blobs(images=(1, 2, 2, 2))
    with pytest.raises(UserError, match="at least 16"):
        Blobs(image_size=8)
