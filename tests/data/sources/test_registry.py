"""Published data sets, read from small files in their formats, and from a hub that is not there."""

import hashlib
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from polyfed.core.errors import UserError
from polyfed.data import SOURCES, Normalise
from polyfed.data.sources.published.tweets import Sentiment140
from polyfed.data.sources.published.vision import CIFAR10, CIFAR100, EMNIST, MNIST, Digits, FashionMNIST
from polyfed.data.sources.published.xray import FINDINGS, ChestXray14

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (6, 28, 28), dtype=np.uint8)
COLOUR = RNG.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture
def no_network(monkeypatch):
    def refuse(repo, **_):
        raise ConnectionError(f"Couldn't reach '{repo}' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)


def test_digits_are_scikit_learn_s():
    from sklearn.datasets import load_digits

    reference, pool = load_digits(), Digits().load()
    assert np.array_equal(pool.train.y, reference.target)
    assert np.array_equal(pool.train.x.view(-1, 64), reference.data.astype(int) * 255 // 16)
    batch, _ = pool.train.batch(torch.arange(1797))
    assert abs(float(batch.mean())) < 0.01
    assert abs(float(batch.std()) - 1) < 0.01
    held_out = Digits(common_test=0.25).load()
    assert (len(held_out.train), len(held_out.test)) == (1348, 449)


@pytest.mark.parametrize("suffix", [".gz", ""])
def test_mnist_from_idx_files(tmp_path, write_idx, suffix):
    for source in (MNIST, FashionMNIST):
        for prefix, images in (("train", GREY), ("t10k", GREY[:2])):
            write_idx(tmp_path / f"{prefix}-images-idx3-ubyte{suffix}", images)
            write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte{suffix}", np.arange(len(images)))
        pool = source(path=str(tmp_path)).load()
        assert torch.equal(pool.train.x, torch.from_numpy(GREY)[:, None])
        assert pool.train.x.dtype == torch.uint8
        assert pool.test.y.tolist() == [0, 1]
        assert pool.num_outputs == 10
        assert pool.input_shape == (1, 28, 28)
        assert isinstance(pool.train.transform, Normalise)


def test_emnist_is_turned_upright_and_letters_count_from_zero(tmp_path, write_idx):
    for part in ("train", "test"):
        write_idx(tmp_path / f"emnist-letters-{part}-images-idx3-ubyte.gz", GREY)
        write_idx(tmp_path / f"emnist-letters-{part}-labels-idx1-ubyte.gz", np.array([1, 2, 3, 4, 5, 26]))
    pool = EMNIST(path=str(tmp_path)).load()
    assert torch.equal(pool.train.x[:, 0], torch.from_numpy(GREY).transpose(1, 2))
    assert pool.train.y.tolist() == [0, 1, 2, 3, 4, 25]
    assert pool.class_names[25] == "Z"
    with pytest.raises(UserError, match=r"holds no training images; give path=... .*emnist-balanced-train-images"):
        EMNIST(path=str(tmp_path), subset="balanced").load()
    with pytest.raises(UserError, match="EMNIST: unknown subset 'letter'; did you mean letters"):
        EMNIST(subset="letter")
    with pytest.raises(UserError, match="hub has no EMNIST subset 'byclass'"):
        EMNIST(subset="byclass").load()


def test_damaged_idx_files_are_refused(tmp_path, write_idx):
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", GREY)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.arange(5))
    with pytest.raises(UserError, match="do not belong together"):
        MNIST(path=str(tmp_path)).load()
    whole = (tmp_path / "train-images-idx3-ubyte.gz").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"junk", b""):
        (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(damaged)
        with pytest.raises(UserError, match="is not a complete IDX file"):
            MNIST(path=str(tmp_path)).load()


def test_cifar_from_parquet_in_the_hub_s_layout(tmp_path, write_images_parquet):
    write_images_parquet(tmp_path / "a/train-00000-of-00002.parquet", COLOUR[:4], [0, 1, 2, 9], "img")
    write_images_parquet(tmp_path / "a/train-00001-of-00002.parquet", COLOUR[4:], [3, 4], "img")
    write_images_parquet(tmp_path / "a/test-00000-of-00001.parquet", COLOUR[:2], [5, 6], "img")
    pool = CIFAR10(path=str(tmp_path)).load()
    assert torch.equal(pool.train.x, torch.from_numpy(COLOUR).permute(0, 3, 1, 2))
    assert pool.train.y.tolist() == [0, 1, 2, 9, 3, 4]
    assert pool.test.y.tolist() == [5, 6]
    assert pool.class_names[3] == "cat"
    write_images_parquet(tmp_path / "b/train-00000-of-00001.parquet", COLOUR, range(6), "img")
    with pytest.raises(UserError, match="has train files in several folders; give one of"):
        CIFAR10(path=str(tmp_path)).load()


def test_cifar100_keeps_the_coarse_labels_as_a_column(tmp_path, write_images_parquet):
    file = tmp_path / "train-00000-of-00001.parquet"
    write_images_parquet(file, COLOUR, [0, 99, 5, 5, 7, 8], "img", "fine_label", coarse_label=[1, 2, 3, 3, 1, 0])
    pool = CIFAR100(path=str(tmp_path)).load()
    assert pool.num_outputs == 100
    assert pool.columns["coarse_label"].tolist() == [1, 2, 3, 3, 1, 0]
    write_images_parquet(file, COLOUR, [0, 100, 5, 5, 7, 8], "img", "fine_label")
    with pytest.raises(UserError, match="labels run from 0 to 100; with 100 classes"):
        CIFAR100(path=str(tmp_path)).load()


def test_hub_data_sets_are_read_like_files(monkeypatch, encode):
    asked = {}

    def load(repo, revision=None):
        asked[repo] = revision
        image, label = ("img", "fine_label" if "100" in repo else "label") if "cifar" in repo else ("image", "label")
        pictures = COLOUR if "cifar" in repo else GREY
        features = datasets.Features({image: datasets.Image(), label: datasets.ClassLabel(num_classes=10)})
        table = {image: [{"bytes": encode(p), "path": None} for p in pictures], label: list(range(6))}
        data = datasets.Dataset.from_dict(table, features=features)
        return datasets.DatasetDict({"train": data, "test": data.select([0, 1])})

    monkeypatch.setattr(datasets, "load_dataset", load)
    for source in (MNIST(), FashionMNIST(), CIFAR10(), EMNIST()):
        pool = source.load()
        assert pool.train.y.tolist() == list(range(6))
        assert len(pool.test) == 2
    assert CIFAR100().load().num_outputs == 10  # the names that the hub states
    assert list(asked) == [
        *("ylecun/mnist", "zalando-datasets/fashion_mnist", "uoft-cs/cifar10", "tanganke/emnist_letters"),
        "uoft-cs/cifar100",
    ]


@pytest.mark.parametrize(
    "name", ["mnist", "fashion_mnist", "emnist", "cifar10", "cifar100", "sentiment140", "chest_xray14"]
)
def test_without_network_or_path_one_sentence_says_what_to_give(no_network, tmp_path, name):
    with pytest.raises(UserError, match=r"cannot load '.*' from the Hugging Face hub .*give path=...") as caught:
        SOURCES[name]().load()
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"'.*nowhere' does not exist; give path=..."):
        SOURCES[name](path=str(tmp_path / "nowhere")).load()
    with pytest.raises(UserError, match=r"give path=..."):
        SOURCES[name](path=str(tmp_path)).load()


def test_fashion_mnist_says_where_debian_has_it(no_network):
    with pytest.raises(UserError, match="apt-get install dataset-fashion-mnist"):
        FashionMNIST().load()


def test_the_hub_s_client_does_not_retry_without_network(monkeypatch):
    import huggingface_hub

    from polyfed.data.formats import hub

    monkeypatch.setattr(hub, "_hub_name_resolves", lambda: False)
    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    start = time.perf_counter()
    with pytest.raises(UserError, match="cannot load 'polyfed/none'"):
        hub.load_hub_tables("polyfed/none", "give path=...")
    assert time.perf_counter() - start < 5
    after = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    assert after == before


CSV = (
    '"0","1","Mon Apr 06","NO_QUERY","anna","@bob I miss you, http://x.org"\n'
    '"4","2","Mon Apr 06","NO_QUERY","bob","good caf\xe9 good"\n'
    '"0","3","Mon Apr 06","NO_QUERY","anna","bad"\n'
)


def test_sentiment140_from_the_published_csv(tmp_path):
    (tmp_path / "training.1600000.processed.noemoticon.csv").write_bytes(CSV.encode("latin1"))
    (tmp_path / "testdata.manual.2009.06.14.csv").write_bytes(
        b'"4","3","Mon","q","eve","good"\n"2","4","Mon","q","eve","neutral"\n'
    )
    words = tmp_path / "words.json"
    pool = Sentiment140(path=str(tmp_path), vocabulary=str(words), length=5).load()
    assert pool.train.x.shape == (3, 5)
    assert pool.train.y.tolist() == [0, 1, 0]
    assert pool.test.y.tolist() == [1]
    assert pool.columns["user"].tolist() == ["anna", "bob", "anna"]
    assert [pool.vocabulary[code] for code in pool.train.x[1].tolist()] == ["good", "café", "good", "<pad>", "<pad>"]
    assert len(pool.vocabulary) == 11
    small = Sentiment140(path=str(tmp_path / "training.1600000.processed.noemoticon.csv"), vocabulary_size=3).load()
    assert small.vocabulary == ("<pad>", "<unk>", "good")
    again = Sentiment140(path=str(tmp_path), vocabulary=str(words), vocabulary_size=3, length=5).load()
    assert torch.equal(again.train.x, pool.train.x)  # the saved vocabulary counts


def test_sentiment140_from_parquet_with_plain_labels(tmp_path):
    table = pyarrow.table({"text": ["so good", "so bad"], "label": [1, 0]})
    pyarrow.parquet.write_table(table, tmp_path / "train-00000-of-00001.parquet")
    pool = Sentiment140(path=str(tmp_path)).load()
    assert pool.train.y.tolist() == [1, 0]
    assert pool.test is None
    assert pool.input_shape == (25,)
    pyarrow.parquet.write_table(table.set_column(1, "label", [[1, 7]]), tmp_path / "train-00000-of-00001.parquet")
    with pytest.raises(UserError, match="or 0 and 1, and does not in row"):
        Sentiment140(path=str(tmp_path)).load()


def test_sentiment140_refuses_other_files(tmp_path):
    (tmp_path / "train.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="is not the published CSV"):
        Sentiment140(path=str(tmp_path)).load()
    with pytest.raises(UserError, match="vocabulary_size must be at least 3"):
        Sentiment140(vocabulary_size=2)
    with pytest.raises(UserError, match="length must be at least 1"):
        Sentiment140(length=0)


@pytest.fixture
def xray_folder(tmp_path, encode):
    rows = [
        ("a.png", "Cardiomegaly|Edema", 1),
        ("b.png", "No Finding", 1),
        ("c.png", "Hernia", 2),
        ("d.png", "Mass", 3),
    ]
    header = "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age"
    lines = [header, *(f"{name},{findings},0,{patient},58" for name, findings, patient in rows)]
    (tmp_path / "Data_Entry_2017.csv").write_text("\n".join(lines))
    for place, name, mode in (
        ("images_001/images", "a.png", "L"),
        ("images_001/images", "b.png", "RGBA"),
        (".", "c.png", "L"),
    ):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / name).write_bytes(encode(np.tile(GREY[0], (3, 3)), mode=mode))
    return tmp_path


def test_chest_xrays_from_the_published_folder(xray_folder):
    pool = ChestXray14(path=str(xray_folder), image_size=16).load()
    assert pool.task == "multilabel"
    assert pool.class_names == FINDINGS
    assert pool.train.x.shape == (3, 1, 16, 16)
    assert [[FINDINGS[i] for i in row.nonzero()[:, 0]] for row in pool.train.y] == [
        ["Cardiomegaly", "Edema"],
        [],
        ["Hernia"],
    ]
    assert pool.columns["patient"].tolist() == [1, 1, 2]
    assert pool.test is None
    (xray_folder / "test_list.txt").write_text("c.png\nd.png\n")
    split = ChestXray14(path=str(xray_folder), image_size=16).load()
    assert (len(split.train), len(split.test)) == (2, 1)
    assert split.columns["patient"].tolist() == [1, 1]


def test_chest_xrays_are_cached_at_their_size(xray_folder):
    cache = xray_folder / "small.npy"
    first = ChestXray14(path=str(xray_folder), image_size=16, cache=str(cache)).load()
    digest = hashlib.sha256(cache.read_bytes()).hexdigest()
    for file in xray_folder.rglob("*.png"):
        file.write_bytes(b"")  # not read again
    again = ChestXray14(path=str(xray_folder), image_size=16, cache=str(cache)).load()
    assert again.fingerprint == first.fingerprint
    assert hashlib.sha256(cache.read_bytes()).hexdigest() == digest
    with pytest.raises(UserError, match=r"holds shape \(3, 1, 16, 16\), not \(3, 1, 8, 8\); delete it"):
        ChestXray14(path=str(xray_folder), image_size=8, cache=str(cache)).load()
    cache.write_bytes(b"junk")
    with pytest.raises(UserError, match="cannot read the cache"):
        ChestXray14(path=str(xray_folder), image_size=16, cache=str(cache)).load()
    with pytest.raises(UserError, match=r"must be a file that ends in .npy"):
        ChestXray14(cache="small.npz")


def test_chest_xray_folders_that_do_not_fit_are_refused(xray_folder):
    source = ChestXray14(path=str(xray_folder))
    table = xray_folder / "Data_Entry_2017.csv"
    content = table.read_text()
    table.write_text(content.replace("Hernia", "Cold"))
    with pytest.raises(UserError, match="unknown finding 'Cold'"):
        source.load()
    table.write_text(content)
    (xray_folder / "c.png").write_bytes(b"junk")
    with pytest.raises(UserError, match=r"c\.png cannot be decoded"):
        source.load()
    for file in xray_folder.rglob("*.png"):
        file.unlink()
    with pytest.raises(UserError, match="has none of the 4 images of its table"):
        source.load()
    table.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="has not the published columns"):
        source.load()
    with pytest.raises(UserError, match="image_size must be between 8 and 1024"):
        ChestXray14(image_size=4)


def test_chest_xrays_from_the_hub(monkeypatch, encode):
    picture = encode(GREY[0])
    part = datasets.Dataset.from_dict(
        {"image": [{"bytes": picture, "path": None}] * 2, "label_names": [["Mass"], []], "patient_id": [4, 5]},
    )
    monkeypatch.setattr(
        datasets, "load_dataset", lambda repo, **_: datasets.DatasetDict({"train": part, "test": part.select([0])})
    )
    pool = ChestXray14(image_size=16).load()
    assert (len(pool.train), len(pool.test)) == (2, 1)
    assert pool.train.y.sum(dim=1).tolist() == [1, 0]
    assert pool.columns["patient"].tolist() == [4, 5]


@pytest.mark.slow
def test_fashion_mnist_as_debian_installs_it():
    start = time.perf_counter()
    pool = FashionMNIST(path=str(FASHION_FOLDER)).load()
    assert time.perf_counter() - start < 5
    assert (len(pool.train), len(pool.test)) == (60_000, 10_000)
    assert torch.bincount(pool.train.y).tolist() == [6000] * 10
    batch, _ = pool.train.batch(torch.arange(60_000))
    assert abs(float(batch.mean())) < 0.01
    assert abs(float(batch.std()) - 1) < 0.01
