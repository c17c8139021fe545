"""Own data as users have them: images of any origin, types of numbers, and targets of the tasks."""

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg
from polyfed.core.errors import UserError
from polyfed.core.examples.as_examples import as_examples
from polyfed.core.examples.examples import Examples, Normalise

# What is proved here holds of the examples that were trained on.
pytestmark = pytest.mark.filterwarnings("ignore:test examples that are also training examples:UserWarning")

RNG = np.random.default_rng(0)
COLOUR, GREY = (RNG.integers(0, 256, shape, dtype=np.uint8) for shape in ((6, 4, 5, 3), (6, 4, 5)))
LABELS = [0, 1, 0, 1, 0, 1]


def hub_images(pixels):
    import datasets
    from PIL import Image as image

    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    columns = {"image": [image.fromarray(p) for p in pixels], "label": LABELS}
    return datasets.Dataset.from_dict(columns, features=kinds)


def pil_pairs(pixels):
    from PIL import Image as image

    return [(image.fromarray(p), y) for p, y in zip(pixels, LABELS, strict=True)]


def expected(pixels):
    floats = torch.from_numpy(pixels).float() / 255
    return floats.unsqueeze(1) if floats.dim() == 3 else floats.movedim(-1, 1)


@pytest.mark.parametrize("pixels", [COLOUR, GREY], ids=["colour", "grey"])
@pytest.mark.parametrize("source", [hub_images, pil_pairs])
def test_pictures_are_kept_as_bytes_and_reach_the_network_as_floats(source, pixels):
    examples = as_examples(source(pixels))
    assert examples.x.dtype == torch.uint8
    x, y = examples.batch(torch.arange(6))
    torch.testing.assert_close(x, expected(pixels))
    assert y.tolist() == LABELS


def test_arrays_of_bytes_from_the_hub_are_images_too():
    import datasets

    kinds = datasets.Features({"x": datasets.Array2D((4, 5), "uint8"), "label": datasets.Value("int64")})
    examples = as_examples(datasets.Dataset.from_dict({"x": list(GREY), "label": LABELS}, features=kinds))
    torch.testing.assert_close(examples.batch(torch.arange(6))[0], expected(GREY))


def test_tensors_of_bytes_are_images_from_three_dimensions_on():
    channels_first = torch.from_numpy(COLOUR).movedim(-1, 1)
    assert as_examples((channels_first, LABELS)).transform == Normalise((0.0,) * 3, (1.0,) * 3)
    assert as_examples((GREY, LABELS)).x.shape == (6, 1, 4, 5)
    assert as_examples((channels_first.flatten(1), LABELS)).transform is None
    given = Examples(channels_first, torch.tensor(LABELS))
    assert as_examples(given) is given  # whoever builds Examples chooses the transform


def test_a_federation_of_pictures_runs_without_a_word_about_types():
    def net():
        return nn.Sequential(nn.Flatten(), nn.Linear(60, 2))

    data = hub_images(COLOUR)
    run = pf.federate([pf.Client("a", net, data, data)], FedAvg(), rounds=1, workers=0)
    assert run.table()[0]["loss"] < 2  # raw pixels up to 255 would give tens


def test_only_tensors_of_float64_stay_float64():
    rows = [[0.5], [1.5]]
    double = torch.tensor(rows, dtype=torch.float64)
    assert as_examples((double, [0, 1])).x.dtype == torch.float64
    assert as_examples([(row, torch.tensor(0)) for row in (*double, double[0])]).x.dtype == torch.float64
    assert as_examples((double, double[:, 0])).y.dtype == torch.float64
    for given in (rows, double.numpy()):
        examples = as_examples((given, given))
        assert (examples.x.dtype, examples.y.dtype) == (torch.float32, torch.float32)


def test_targets_of_regression_are_a_column_of_floats_on_the_same_store():
    x = torch.arange(6.0).view(6, 1)
    whole = pf.Client("a", None, (x, torch.arange(6)), (x, np.arange(6)), task="regression")
    for examples in (whole.train, whole.test):
        assert (examples.y.shape, examples.y.dtype) == ((6, 1), torch.float32)
    store = Examples(x, torch.arange(6.0), index=torch.tensor([1, 2]))
    one = pf.Client("a", None, store, store, task="regression")
    assert one.train.labels.tolist() == [[1.0], [2.0]]
    assert one.train.x is x
    assert one.train.y.data_ptr() == store.y.data_ptr()
    column = Examples(x, torch.arange(6.0).view(6, 1))
    assert pf.Client("a", None, column, column, task="regression").train is column


def test_whole_numbers_are_learnt_by_a_network_with_one_output():
    x = torch.arange(6.0).view(6, 1) / 6
    one = pf.Client("a", lambda: nn.Linear(1, 1), (x, torch.arange(6)), (x, torch.arange(6)), task="regression")
    run = pf.federate([one], FedAvg(batch_size=0, local_steps=500, lr=0.5), rounds=2, workers=0)
    assert run.table()[0]["r2"] > 0.99  # targets (n,) against outputs (n, 1) would give the mean: 0


def test_whole_numbers_as_labels_of_several_kinds():
    x, y = torch.zeros(2, 3), torch.tensor([[0, 1], [1, 1]])
    data = Examples(x, y)
    one = pf.Client("a", lambda: nn.Linear(3, 2), data, data, task="multilabel")
    assert one.train.y.dtype == torch.float32
    pf.federate([one], FedAvg(), rounds=1, workers=0)


def test_columns_follow_the_rows_and_are_checked():
    store = Examples(
        torch.arange(6.0).view(6, 1), torch.zeros(6), columns={"age": range(6), "sex": torch.arange(6) % 2}
    )
    few = store.select(torch.tensor([5, 2])).select(torch.tensor([1, 0, 1]))
    assert few.column("age").tolist() == [2, 5, 2]
    assert few.to(torch.device("cpu")).column("sex").tolist() == [0, 1, 0]
    with pytest.raises(UserError, match="no column 'agee'; did you mean age"):
        store.column("agee")
    for values, sentence in (
        ([1, 2], r"column 'a' has shape \(2,\) for 6 examples"),
        (np.zeros((6, 2)), r"column 'a' has shape \(6, 2\)"),
        (np.zeros(6, "datetime64[s]"), "column 'a' is of type datetime64"),
    ):
        with pytest.raises(UserError, match=sentence):
            Examples(torch.zeros(6, 1), torch.zeros(6), columns={"a": values})
