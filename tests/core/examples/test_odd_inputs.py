"""Tensors and arrays that are not plain ones are read as what they hold, or refused with a cure, before anything runs."""

import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ChainDataset, IterableDataset, Subset, TensorDataset

import polyfed as pf
from polyfed.core.errors import UserError

X = torch.arange(12.0).view(4, 3)
Y = torch.tensor([0, 1, 0, 1])
ARRAY = X.numpy().copy()


def network():
    return nn.Linear(3, 2)


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([X[0], X[1][:2]])


@pytest.mark.parametrize(
    ("odd", "cure"),
    [
        (lambda x: x.to_sparse(), "sparse tensor (torch.sparse_coo); give tensor.to_dense()"),
        (lambda x: x.to("meta"), "meta device, which has no values; make it on the CPU"),
    ],
)
def test_a_tensor_without_rows_of_numbers_is_refused_wherever_it_is(odd, cure):
    rows = [(odd(x), y) for x, y in zip(X, Y, strict=True)]
    for source in (
        (odd(X), Y),
        (X, odd(Y)),
        ({"a": X, "b": odd(X)}, Y),
        rows,
        [(x, odd(y)) for x, y in TensorDataset(X, Y)],
    ):
        with pytest.raises(UserError, match=re.escape(cure)):
            pf.Client("a", network, train=source, test=(X, Y))
    for store in ((odd(X), Y), (X, odd(Y))):
        with pytest.raises(UserError, match=re.escape(cure)):
            pf.Client("a", network, train=pf.Examples(*store), test=(X, Y))
    client = pf.Client("a", network, train=(X, Y), test=(X[:1], Y[:1]))
    with pytest.raises(UserError, match=re.escape(cure)):
        pf.federate([client], "local", rounds=1, public=odd(X), quiet=True)


def test_nested_tensors_are_refused():
    with pytest.raises(UserError, match=r"nested tensor.*to_padded_tensor"):
        pf.Examples(nested(), Y[:2])


@pytest.mark.parametrize(
    "array", [ARRAY[::-1], ARRAY[:, ::-1], ARRAY.astype(">f4"), np.broadcast_to(ARRAY[:1], (4, 3)), np.ma.array(ARRAY)]
)
@pytest.mark.filterwarnings("error")
def test_arrays_of_any_layout_are_read_without_a_warning(array):
    assert pf.data.as_examples((array, Y)).x.tolist() == np.asarray(array).tolist()
    assert pf.data.as_examples((X, array[:, 0].astype(int))).y.tolist() == array[:, 0].tolist()


@pytest.mark.filterwarnings("error")
def test_arrays_that_may_not_be_written_to_are_copied(tmp_path):
    np.save(tmp_path / "x.npy", ARRAY)
    array = ARRAY.copy()
    array.flags.writeable = False
    for one in (array, np.load(tmp_path / "x.npy", mmap_mode="r")):
        assert pf.data.as_examples((one, Y)).x.tolist() == X.tolist()


def test_masked_values_are_not_read_as_numbers():
    with pytest.raises(UserError, match=r"masked values; give array.filled"):
        pf.data.as_examples((np.ma.masked_greater(ARRAY, 5), Y))


def test_complex_inputs_of_a_view_and_labels():
    turned = torch.complex(X, X).conj()
    assert not pf.data.as_examples((turned, Y)).x.is_conj()
    with pytest.raises(UserError, match="labels are complex numbers"):
        pf.data.as_examples((X, ARRAY[:, 0].astype(complex)))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TensorDataset(X, Y))


class Failing(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        raise OSError("the disk is away")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (Stream(), "a Stream can only be read from its start to its end; give its items as a list"),
        (ChainDataset([Stream()]), "a ChainDataset can only be read"),
        (zip(X, Y, strict=True), "a zip can only be read"),
        ((iter(ARRAY), Y), "can be read only once; give its items as a list"),
        ([], "the list has no examples"),
        (Subset(TensorDataset(X, Y), []), "the Subset has no examples"),
        (Failing(), "item 0 of the Failing cannot be read: OSError: the disk is away"),
        (Subset(TensorDataset(X, Y), [9]), "item 0 of the Subset cannot be read: IndexError"),
    ],
)
def test_data_sets_that_cannot_be_read_say_why(source, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        pf.data.as_examples(source, "train")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"index": torch.ones(4, dtype=torch.bool)}, "torch.bool of shape (4,); give mask.nonzero().squeeze(1)"),
        ({"index": torch.tensor([0.0])}, "index must be int64 rows of shape (n,)"),
        ({"index": torch.tensor([[0]])}, "index must be int64 rows of shape (n,)"),
        ({"index": [0, 1]}, "index must be a tensor of rows, got list"),
        ({"columns": ["f", "m", "f", "m"]}, "columns must be a mapping of names to values, got list"),
        ({"y": Y.numpy()}, "labels must be a tensor, got ndarray"),
    ],
)
def test_examples_say_what_does_not_fit(fields, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        pf.Examples(**{"x": X, "y": Y, **fields})
    assert pf.Examples(X, Y, np.array([1, 2])).labels.tolist() == [1, 0]


@pytest.mark.parametrize("kind", [torch.int8, torch.int16, torch.int32, torch.bool, torch.uint16, torch.uint64])
def test_whole_labels_of_any_type_are_classes(kind):
    client = pf.Client("a", network, train=pf.Examples(X, Y.to(kind)), test=(X[:1], Y[:1]))
    assert client.train.y.dtype == torch.int64
    assert client.train.y.tolist() == Y.tolist()
