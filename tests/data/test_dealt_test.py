"""Published test examples that are assigned to clients: no example is lost, and none is in two places."""

from pathlib import Path

import numpy as np
import pytest
import torch

from polyfed.core.errors import UserError
from polyfed.data import SOURCES, Split, make_clients
from polyfed.data.partitioning.partitions import IID
from polyfed.data.sources.published.tweets import Sentiment140
from polyfed.data.sources.published.vision import CIFAR10, CIFAR100, EMNIST, MNIST, FashionMNIST

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (10, 28, 28), dtype=np.uint8)
COLOUR = RNG.integers(0, 256, (10, 32, 32, 3), dtype=np.uint8)


def check(whole, plain):
    """The test examples come after the others, and there is no common test set."""
    assert torch.equal(whole.train.x, torch.cat([plain.train.x, plain.test.x]))
    assert torch.equal(whole.train.y, torch.cat([plain.train.y, plain.test.y]))
    assert whole.test is None
    assert whole.train.transform == plain.train.transform
    assert whole.fingerprint != plain.fingerprint


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "emnist"])
def test_idx_files(name, tmp_path, write_idx):
    prefixes = ("emnist-letters-train", "emnist-letters-test") if name == "emnist" else ("train", "t10k")
    for prefix, images in zip(prefixes, (GREY, GREY[:4]), strict=True):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte.gz", np.arange(len(images)))
    source = {"mnist": MNIST, "fashion_mnist": FashionMNIST, "emnist": EMNIST}[name]
    check(source(path=str(tmp_path), deal_test=True).load(), source(path=str(tmp_path)).load())


def test_cifar_with_its_columns(tmp_path, write_images_parquet):
    labels = [0, 1, 2, 9, 3, 4, 0, 1]
    write_images_parquet(tmp_path / "train-0.parquet", COLOUR[:8], labels, "img", "fine_label", coarse_label=[1] * 8)
    write_images_parquet(tmp_path / "test-0.parquet", COLOUR[8:], [5, 6], "img", "fine_label", coarse_label=[7, 8])
    for source in (CIFAR10, CIFAR100):
        plain, whole = (source(path=str(tmp_path), deal_test=divided).load() for divided in (False, True))
        check(whole, plain)
        assert plain.columns["coarse_label"].tolist() == [1] * 8
        assert whole.columns["coarse_label"].tolist() == [*[1] * 8, 7, 8]
    clients, public = make_clients(whole, Split(2, test_fraction=0.5, public_fraction=0.2), IID(), 0)
    assert len(public) + sum(len(c.train) + len(c.test) for c in clients) == 10
    for number in (-1, 1):
        with pytest.raises(
            UserError, match=f"global_test={number} needs a common test set, and deal_test gives its exam"
        ):
            make_clients(whole, Split(2, global_test=number), IID(), 0)
    (tmp_path / "test-0.parquet").unlink()
    with pytest.raises(UserError, match="deal_test: these files hold no published test examples"):
        CIFAR100(path=str(tmp_path), deal_test=True).load()


def test_tweets_have_the_words_of_the_training_texts(tmp_path: Path):
    line = '"{}","1","Mon","q","{}","{}"\n'
    train = "".join(
        line.format(label, user, text) for label, user, text in ((0, "anna", "so bad"), (4, "bob", "so good"))
    )
    (tmp_path / "training.1600000.processed.noemoticon.csv").write_text(train)
    test = "".join(
        line.format(label, user, text) for label, user, text in ((4, "eve", "so new"), (2, "eve", "neutral"))
    )
    (tmp_path / "testdata.manual.2009.06.14.csv").write_text(test)
    plain, whole = (Sentiment140(path=str(tmp_path), deal_test=divided).load() for divided in (False, True))
    check(whole, plain)
    assert whole.vocabulary == plain.vocabulary
    assert whole.columns["user"].tolist() == ["anna", "bob", "eve"]


def test_every_source_with_a_published_test_set_has_the_option():
    names = {name for name, source in SOURCES.items() if "deal_test" in source.__dataclass_fields__}
    assert names == {"mnist", "fashion_mnist", "emnist", "cifar10", "cifar100", "sentiment140"}
