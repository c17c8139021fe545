"""Data without the packages of the extras: what still works, and what says which extra to install."""

import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.data import Shift
from polyfed.data.sources.arrays import Parquet
from polyfed.data.sources.registry import SOURCES

COLOUR = np.random.default_rng(0).integers(0, 256, (6, 8, 10, 3), dtype=np.uint8)


@pytest.fixture
def without_extras(monkeypatch):
    """Calls it, and none of their packages can be imported any more."""

    def hide():
        for package in ("datasets", "huggingface_hub", "kornia", "kornia_rs", "kornia_rs.io", "pandas"):
            monkeypatch.setitem(sys.modules, package, None)

    return hide


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_pictures_of_a_parquet_file_have_the_same_bits(tmp_path, encode, without_extras, form):
    pictures = [{"bytes": encode(picture, form), "path": None} for picture in COLOUR]
    file = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"image": pictures, "label": [0, 1, 2] * 2}), file)
    with_extras = Parquet(path=str(file)).load().train.x
    without_extras()
    assert torch.equal(Parquet(path=str(file)).load().train.x, with_extras)
    if form == "PNG":
        assert torch.equal(with_extras, torch.from_numpy(COLOUR).permute(0, 3, 1, 2))


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "emnist", "cifar10", "sentiment140", "chest_xray14"])
def test_the_hub_says_what_to_install_or_to_give(without_extras, name):
    without_extras()
    needs = r"^'.*' from the Hugging Face hub needs the package datasets, which is not installed: "
    with pytest.raises(UserError, match=needs + r"pip install 'polyfed\[hub\]', or give path=... with "):
        SOURCES[name]().load()


def test_shifts_say_what_to_install(without_extras):
    examples = Examples(torch.from_numpy(COLOUR[:, :8, :8]).permute(0, 3, 1, 2), torch.arange(6))
    without_extras()
    quarter = Shift(rotation=90).apply(examples)
    assert torch.equal(quarter.x, examples.x.rot90(1, (2, 3)))
    cure = r"needs the package kornia, which is not installed: pip install 'polyfed\[augment\]', or"
    with pytest.raises(UserError, match=rf"^a rotation by 30 degrees {cure} turn by multiples of 90 degrees$"):
        Shift(rotation=30).apply(examples)
    with pytest.raises(UserError, match=rf"^hue=0.25 {cure} leave the hue as it is$"):
        Shift(hue=0.25).apply(examples)
