"""Inputs and labels in containers that NumPy can read are taken; those that cannot be read say what to give."""

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.examples.converters import to_number_tensor

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
TEXTS = ["well", "ill", "well"] * 4


def labels_of(labels):
    client = pf.Client("north", lambda: nn.Linear(4, 2), (X, labels), (X, labels))
    return client.train.labels.tolist(), client.train.classes


@pytest.mark.parametrize("make", [
    lambda pd: pd.Categorical(TEXTS), lambda pd: pd.Index(TEXTS), lambda pd: pd.array(TEXTS, dtype="string"),
    lambda pd: pd.Series(TEXTS, dtype="category"), lambda pd: np.array(TEXTS, dtype=object), lambda pd: TEXTS,
    lambda pd: pytest.importorskip("pyarrow").array(TEXTS),
])  # fmt: skip
def test_labels_that_are_texts_are_numbered_in_every_container(make):
    assert labels_of(make(pytest.importorskip("pandas"))) == ([1, 0, 1] * 4, ("ill", "well"))


def test_labels_that_are_numbers_are_taken_from_every_container():
    pd, numbers = pytest.importorskip("pandas"), [1, 0, 1] * 4
    for labels in (pd.Categorical(numbers), pd.Index(numbers), np.array(numbers, dtype=object), pd.array(numbers)):
        assert labels_of(labels) == (numbers, None)


def test_an_array_of_python_numbers_is_read_as_numbers():
    tensor = to_number_tensor(np.array([[1.5, 2], [3, 4]], dtype=object), "train inputs")
    assert tensor.tolist() == [[1.5, 2.0], [3.0, 4.0]]
    assert tensor.dtype == torch.float32
    with pytest.raises(pf.UserError, match=r"x\.astype\('float32'\)"):
        to_number_tensor(np.array([[1.5, None]], dtype=object), "train inputs")


def test_a_sparse_matrix_is_refused_with_what_to_give():
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(pf.UserError, match=r"train inputs: a csr_matrix is sparse; give all numbers, \.toarray\(\)"):
        to_number_tensor(sparse.csr_matrix(X.numpy()), "train inputs")


@pytest.mark.parametrize(("labels", "remedy"), [
    (np.array([-1, 1] * 6), r"count from 0, found -1; number the classes: .*return_inverse=True"),
    (np.array([0.0, 1.0] * 6), r"labels\.long\(\) of a tensor, labels\.astype\(int\) of an array"),
])  # fmt: skip
def test_labels_of_another_form_say_what_to_give(labels, remedy):
    with pytest.raises(pf.UserError, match=remedy):
        labels_of(labels)
