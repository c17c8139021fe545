"""Mosaics: what is in a place is a picture of its class at half the size, and labels say which classes there are."""

import numpy as np
import pytest
import torch

from polyfed.core.errors import UserError
from polyfed.core.seeds import torch_generator
from polyfed.data.sources.published.mosaics import FashionMosaics, build_mosaics


def test_places_and_labels_by_loops():
    """Pictures of one grey level each, which tell their class; an empty place is black."""
    x = torch.arange(1, 21, dtype=torch.uint8)[:, None, None, None].expand(20, 1, 6, 4).clone()
    y = torch.arange(20) % 5
    made, labels = build_mosaics(x, y, 300, filled=0.4, seed=1, classes=5)
    assert (made.shape, made.dtype, labels.shape) == ((300, 1, 6, 4), torch.uint8, (300, 5))
    for picture, told in zip(made[:, 0], labels, strict=True):
        there = set()
        for tile in (picture[:3, :2], picture[:3, 2:], picture[3:, :2], picture[3:, 2:]):
            level = int(tile[0, 0])
            assert (tile == level).all()
            there |= {(level - 1) % 5} if level else set()
        assert told.nonzero().flatten().tolist() == sorted(there)
    assert float((labels.sum(1) == 0).float().mean()) == pytest.approx(0.6**4, abs=0.06)
    again, _ = build_mosaics(x, y, 300, filled=0.4, seed=1, classes=5)
    other, _ = build_mosaics(x, y, 300, filled=0.4, seed=2, classes=5)
    assert torch.equal(made, again)
    assert not torch.equal(made, other)


def test_a_picture_is_made_half_as_large_by_means():
    x = torch.randint(0, 256, (1, 1, 4, 4), generator=torch_generator(0), dtype=torch.uint8)
    made, _ = build_mosaics(x, torch.tensor([0]), 1, filled=1, seed=0, classes=1)
    wanted = [
        [round(float(x[0, 0, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].float().mean())) for j in (0, 1)] for i in (0, 1)
    ]
    assert made[0, 0, :2, :2].tolist() == wanted


def test_the_source_keeps_training_and_test_pictures_apart(tmp_path, write_idx):
    for name, level in (("train", 100), ("t10k", 200)):
        write_idx(tmp_path / f"{name}-images-idx3-ubyte", np.full((30, 28, 28), level))
        write_idx(tmp_path / f"{name}-labels-idx1-ubyte", np.arange(30) % 10)
    pool = FashionMosaics(path=str(tmp_path), num_train=50, num_test=20).load()
    assert (pool.task, pool.num_outputs, pool.input_shape, len(pool.train)) == ("multilabel", 10, (1, 28, 28), 50)
    assert pool.train.x.unique().tolist() == [0, 100]
    assert pool.test.x.unique().tolist() == [0, 200]
    assert len(pool.test) == 20


@pytest.mark.parametrize(
    ("fields", "part"), [({"filled": 0}, "filled must be"), ({"num_test": 0}, "at least 1, got 20")]
)
def test_mistakes(fields, part):
    with pytest.raises(UserError, match=part):
        FashionMosaics(**fields)
