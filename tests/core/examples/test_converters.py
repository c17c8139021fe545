"""Inputs of several tensors from what users have: datasets, columns of a hub's table, collators, pandas frames."""

import copy

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset

import polyfed as pf
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples, Normalise, PartwiseTransform
from polyfed.core.examples.pytree import named_leaves
from polyfed.data import as_examples
from polyfed.simulation.checks.requirements import check_networks_run

LABELS = [0, 1, 0, 1]
PIXELS = np.arange(4 * 6, dtype=np.uint8).reshape(4, 2, 3)


class Rows(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def test_a_pair_whose_inputs_are_a_structure():
    examples = as_examples(({"pixels": PIXELS, "more": (np.ones((4, 2)), [[1], [2], [3], [4]])}, LABELS))
    assert {name: (part.dtype, tuple(part.shape)) for name, part in named_leaves(examples.x)} == {
        "more/0": (torch.float32, (4, 2)), "more/1": (torch.int64, (4, 1)), "pixels": (torch.uint8, (4, 1, 2, 3)),
    }  # fmt: skip
    assert examples.transform == PartwiseTransform({"pixels": Normalise((0.0,), (1.0,))})
    x, _ = examples.batch(torch.tensor([3]))
    torch.testing.assert_close(x["pixels"], torch.from_numpy(PIXELS[3:]).unsqueeze(1) / 255)


def test_lists_of_numbers_and_of_arrays_stay_one_tensor():
    rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
    for given in (rows, tuple(map(tuple, rows)), np.array(rows)):
        assert as_examples((given, LABELS)).x.tolist() == rows
    assert as_examples(Rows(list(zip(rows, LABELS, strict=True)))).x.tolist() == rows


@pytest.mark.parametrize("kind", [tuple, dict])
def test_datasets_of_structures(kind):
    def item(i):
        parts = {"a": torch.full((2,), float(i)), "b": 10 * i}
        return parts if kind is dict else tuple(parts.values())

    examples = as_examples(Rows([(item(i), LABELS[i]) for i in range(4)]))
    a, b = examples.x.values() if kind is dict else examples.x
    assert isinstance(examples.x, kind)
    assert (a.tolist(), b.tolist()) == ([[0, 0], [1, 1], [2, 2], [3, 3]], [0, 10, 20, 30])
    assert examples.y.tolist() == LABELS


def test_datasets_of_mappings_with_a_label():
    several = as_examples(Rows([{"ids": [i, 1], "mask": [1, 1], "labels": LABELS[i]} for i in range(4)]))
    assert several.x["ids"].tolist() == [[i, 1] for i in range(4)]
    assert several.x.keys() == {"ids", "mask"}
    one = as_examples(Rows([{"x": [float(i)], "label": LABELS[i]} for i in range(4)]))
    assert one.x.tolist() == [[0], [1], [2], [3]]
    for items, sentence in (
        ([{"ids": [1]}] * 3, r"an example has \['ids'\], and no label"),
        ([{"label": 1}] * 3, "has a 'label' and nothing else"),
        ([({"a": 1.0}, 0), ({"b": 1.0}, 0), ({"a": 1.0}, 0)], r"the parts \['a'\] in an example, in another \['b'\]"),
        (
            [((torch.ones(1), 1), 0), ((torch.ones(1),), 0), ((torch.ones(1), 1), 0)],
            "have 2 parts in one example, in another a tuple",
        ),
        (
            [({"a": [1]}, 0), ({"a": [1, 2]}, 0), ({"a": [1]}, 0)],
            r"inputs 'a' differ in shape, \(1,\) and \(2,\); .*collate=",
        ),
    ):
        with pytest.raises(pf.UserError, match=sentence):
            as_examples(Rows(items))


def test_collate_pads_what_differs_in_length():
    texts = Rows([([7] * (i + 1), LABELS[i]) for i in range(4)])

    def padded(rows):
        ids = torch.zeros(len(rows), 4, dtype=torch.int64)
        for i, (tokens, _) in enumerate(rows):
            ids[i, : len(tokens)] = torch.tensor(tokens)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([y for _, y in rows])}

    def as_a_pair(rows):
        batch = padded(rows)
        return batch, batch.pop("labels")

    for collate in (padded, as_a_pair):
        examples = as_examples(texts, collate=collate)
        assert examples.x["attention_mask"].sum(1).tolist() == [1, 2, 3, 4]
        assert examples.y.tolist() == LABELS
    with pytest.raises(pf.UserError, match=r"collate must return .* got int"):
        as_examples(texts, collate=len)


def test_all_columns_of_numbers_of_a_hub_data_set_are_inputs():
    import datasets
    from PIL import Image as image

    kinds = datasets.Features({
        "image": datasets.Image(), "age": datasets.Value("float32"), "label": datasets.Value("int64"),
        "site": datasets.Value("string"), "coarse_label": datasets.ClassLabel(names=["old", "young"]),
    })  # fmt: skip
    columns = {
        "image": [image.fromarray(pixels) for pixels in PIXELS], "age": [50, 60, 70, 80], "label": LABELS,
        "site": ["n", "s", None, "n"], "coarse_label": [0, 1, 1, 0],
    }  # fmt: skip
    hub = datasets.Dataset.from_dict(columns, features=kinds)
    examples = as_examples(hub)
    assert examples.x["age"].tolist() == [50, 60, 70, 80]
    assert examples.x["image"].shape == (4, 1, 2, 3)
    assert examples.column("site").tolist() == ["n", "s", "", "n"]
    assert examples.column("coarse_label").tolist() == ["old", "young", "young", "old"]
    lone = as_examples(hub.remove_columns("age"))
    assert torch.equal(lone.x, examples.x["image"])
    with pytest.raises(pf.UserError, match=r"has columns \['label', 'site'\]; it needs 'label' and columns of numbers"):
        as_examples(hub.select_columns(["label", "site"]))


def test_a_network_that_does_not_take_a_column_says_which():
    x = {"age": torch.zeros(4, 1), "image": torch.zeros(4, 2)}

    class OfImages(torch.nn.Linear):
        def forward(self, image):
            return super().forward(image)

    data = x, torch.tensor(LABELS)
    one = pf.Client("north", lambda: OfImages(2, 2), data, data)
    with pytest.raises(
        pf.UserError, match=r"'north'.*fails on.*age: .*keyword arguments.*unexpected keyword argument 'age'"
    ):
        check_networks_run([one])


def test_pandas_frames_and_series():
    import pandas

    frame = pandas.DataFrame({"a": [1.0, 2, 3, 4], "b": [True, False, True, True], "sex": list("fmfm"), "y": LABELS})
    numbers = as_examples((frame[["a", "b"]][1:], frame["y"][1:]))  # an index that does not begin at 0
    assert (numbers.x.dtype, numbers.x.tolist()) == (torch.float32, [[2, 0], [3, 1], [4, 1]])
    assert numbers.y.tolist() == LABELS[1:]
    both = as_examples(({"table": frame[["a"]], "pixels": PIXELS}, frame["y"].astype("Int64")))
    assert both.x["table"].tolist() == [[1], [2], [3], [4]]
    assert as_examples(frame[["a"]], labelled=False).x.shape == (4, 1)
    assert (numbers.features, both.features, as_examples(frame[["a"]], labelled=False).features) == (
        ("a", "b"), ("table/a",), ("a",))  # fmt: skip
    with pytest.raises(UserError, match="row 1, column 'b' is nan"):
        as_examples((frame[["a", "b"]].astype({"b": "Float64"}).replace({"b": {0: pandas.NA}}), frame["y"]))
    sexes = as_examples((frame[["a"]], frame["sex"]))
    assert (sexes.labels.tolist(), sexes.classes) == ([0, 1, 0, 1], ("f", "m"))
    for given, sentence in (
        (
            frame,
            "train: a pandas DataFrame alone does not say what is to be predicted; give a pair.*pf.data.split_table",
        ),
        (frame["y"], "a pandas Series alone"),
        (
            (frame[["a", "sex"]], frame["y"]),
            "train inputs: column 'sex' of the pandas DataFrame holds (str|object), not numbers",
        ),
    ):
        with pytest.raises(pf.UserError, match=sentence):
            pf.Client("north", None, given, given)


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (torch.tensor([[0], [1]] * 5), r"got torch.int64 of shape \(10, 1\); give labels.squeeze\(1\)$"),
        (torch.eye(2).repeat(5, 1), r"got torch.float32 of shape \(10, 2\); give labels.argmax\(1\)"),
        (np.array([[True, False]] * 10), r"got torch.bool of shape \(10, 2\); give labels.argmax\(1\)"),
        (torch.ones(10, 2, dtype=torch.int32), r"got torch.int32 of shape \(10, 2\); give task='multilabel'"),
        (
            torch.ones(10, 4, 4, dtype=torch.int64),
            r"got torch.int64 of shape \(10, 4, 4\); give task='segmentation'",
        ),
        (
            torch.arange(10.0),
            r"got torch.float32 of shape \(10,\); give labels.long\(\) of a tensor, .*, or task='regression'",
        ),
        (torch.arange(10.0)[:, None], r"give labels.squeeze\(1\).long\(\)"),
        (torch.arange(10) / 4, r"with fractions; give task='regression'"),
        (torch.arange(20).view(10, 2), r"got torch.int64 of shape \(10, 2\); give one class an example"),
    ],
)
def test_labels_that_are_no_classes_are_refused_with_their_own_type_and_a_cure(labels, sentence):
    x = torch.randn(10, 3)
    for train in ((x, labels), Examples(x, torch.as_tensor(labels))):
        with pytest.raises(UserError, match=f"client 'c': train labels must be integers of shape .*{sentence}"):
            pf.Client("c", None, train=train, test=(x, torch.arange(10) % 2))


def test_several_labels_are_floats_whatever_type_they_had():
    x = torch.randn(10, 3)
    for labels in (
        torch.ones(10, 2, dtype=torch.int64),
        torch.ones(10, 2, dtype=torch.bool),
        np.ones((10, 2), np.uint8),
    ):
        client = pf.Client("c", None, (x, labels), (x, labels), task="multilabel")
        assert client.train.labels.dtype == client.test.labels.dtype == torch.float32
    with pytest.raises(
        UserError, match=r"got torch.int64 of shape \(10, 2, 2\); flatten labels and the network's output"
    ):
        pf.Client("c", None, (x, torch.ones(10, 2, 2).long()), (x, x), task="multilabel")
    with pytest.raises(UserError, match=r"got torch.int64 of shape \(10,\); give labels.unsqueeze\(1\)"):
        pf.Client("c", None, (x, torch.ones(10).long()), (x, x), task="multilabel")


def test_texts_as_labels_are_numbered_by_their_alphabet():
    x, texts = torch.randn(10, 3), ["no", "yes"] * 5
    forms = (texts, np.array(texts), np.array(texts, object), tuple(texts), pd.Series(texts, index=range(5, 15)),
             pd.Series(texts, dtype="category"))  # fmt: skip
    for labels in forms:
        client = pf.Client("c", None, (x, labels), (x[:2], ["yes", "perhaps"]))
        assert client.train.classes == client.test.classes == ("no", "perhaps", "yes")
        assert client.train.labels.tolist() == [0, 2] * 5
        assert client.test.labels.tolist() == [2, 1]
        assert torch.equal(client.train.x, x)
    rows = [(torch.ones(3), text) for text in texts]
    for source in (rows, [{"x": torch.ones(3), "label": text} for text in texts]):
        assert pf.Client("c", None, source, source).train.classes == ("no", "yes")


def test_labels_that_cannot_be_numbered_are_refused():
    x, texts = torch.randn(10, 3), ["no", "yes"] * 5
    for labels, sentence in (
        ([*texts[:9], None], r"client 'c': train labels are texts, but not in row 10 \(missing, or of another type\)"),
        (pd.Series([float("nan"), *texts[1:]]), "train labels are texts, but not in row 1 "),
        (
            [[text, text] for text in texts],
            r"train labels are texts of shape \(10, 2\); give one label for each example",
        ),
    ):
        with pytest.raises(UserError, match=sentence):
            pf.Client("c", None, (x, labels), (x, texts))
    with pytest.raises(UserError, match="the labels of client 'c': train are texts, those of client 'c': test numbers"):
        pf.Client("c", None, (x, texts), (x, [0, 1] * 5))
    with pytest.raises(UserError, match=r"client 'c': train labels are texts, and the task is regression"):
        pf.Client("c", None, (x, texts), (x, texts), task="regression")
    dates = pd.Series(pd.date_range("2020", periods=10))
    with pytest.raises(UserError, match="client 'c': train labels: the pandas Series holds datetime64") as told:
        pf.Client("c", None, (x, dates), (x, dates))
    assert "None" not in str(told.value)
    with pytest.raises(UserError, match="column 'seen' of the pandas Series holds datetime64"):
        pf.Client("c", None, (x, dates.rename("seen")), (x, dates))
    with pytest.raises(UserError, match=r"they hold texts: make numbers of them before; pf.data.split_table"):
        pf.Client("c", None, ([["a"]] * 10, [0, 1] * 5), (x, [0, 1] * 5))


def test_of_a_loader_the_data_set_is_taken_and_a_sentence_says_so():
    x, y = torch.randn(10, 3), torch.arange(10) % 2
    for options in ({"batch_size": 4}, {"batch_size": 4, "shuffle": True, "drop_last": True}, {"batch_size": None}):
        with pytest.warns(UserWarning, match="of a DataLoader its data set is taken.*batch_size=") as told:
            client = pf.Client("c", None, DataLoader(TensorDataset(x, y), **options), (x, y))
        assert len(told) == 1
        assert told[0].filename == __file__
        assert torch.equal(client.train.x, x)
        assert torch.equal(client.train.labels, y)
    with pytest.warns(UserWarning, match="and its collate_fn"):
        padded = pf.Client("c", None, DataLoader(TensorDataset(x, y), collate_fn=lambda items: (x + 1, y)), (x, y))
    assert torch.equal(padded.train.x, x + 1)


def test_a_loader_that_chooses_among_its_examples_is_refused():
    rows = TensorDataset(torch.randn(10, 3), torch.arange(10) % 2)
    for options in (
        {"sampler": SubsetRandomSampler([0, 1])},
        {"sampler": RandomSampler(rows, num_samples=5)},
        {"batch_sampler": [[0, 1], [2]]},
    ):
        with pytest.raises(
            UserError, match=r"client 'c': train: the DataLoader chooses.*Subset\(loader.dataset, indices"
        ):
            pf.Client("c", None, DataLoader(rows, **options), rows)


def test_inputs_and_labels_of_other_length_are_refused_with_client_and_set():
    x, y = torch.randn(10, 3), torch.arange(10) % 2
    sets = {"train": (x, y), "test": (x, y)}
    for name in ("train", "test", "val", "global_test"):
        with pytest.raises(UserError, match=rf"client 'c': {name}: inputs and labels must have one row per example"):
            pf.Client("c", None, **{**sets, name: (x, y[:9])})
    with pytest.raises(UserError, match="one row per example"):
        Examples(x, y[:9])


@pytest.mark.parametrize(
    ("net", "shape"), [(nn.Linear(4, 2), (4,)), (nn.Sequential(nn.Conv1d(1, 1, 3), nn.Flatten()), (1, 4))]
)
def test_whole_numbers_into_a_network_of_floats_name_the_cure(net, shape):
    x, y = torch.ones(10, *shape, dtype=torch.int64), torch.arange(10) % 2
    client = pf.Client("c", lambda: copy.deepcopy(net), (x[:5], y[:5]), (x[5:], y[5:]))
    with pytest.raises(UserError, match=r"inputs are torch.int64; convert the inputs, x.float\(\)"):
        pf.federate([client], "local", rounds=1, workers=0)
