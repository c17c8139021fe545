"""Defines models without a network, which a client can fit on its own data only: a constant, and models of rows of
numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@final
@dataclass(frozen=True, eq=False)
class SimpleModelInputs:
    """Holds a client's inputs and targets to fit on, and test inputs, all standardised by the former.

    Attributes:
        fit: inputs for fitting, shape (n, features).
        y: targets of these.
        test: inputs of the test examples.
        groups: group of each example for fitting; rows of a group stay together in cross-validation. None without groups.
    """

    fit: Floats
    y: NDArray[Any]
    test: Floats
    groups: NDArray[Any] | None

    def subsample(self, number: int, seed: int) -> "SimpleModelInputs":
        """Returns these inputs with at most `number` of the examples for fitting, drawn at random."""
        if len(self.fit) <= number:
            return self
        rows = np.random.default_rng(seed).permutation(len(self.fit))[:number]
        return SimpleModelInputs(
            self.fit[rows], self.y[rows], self.test, None if self.groups is None else self.groups[rows]
        )


@final
@dataclass(frozen=True)
class SimpleModel:
    """Describes a model without a network, fitted to one client's rows to predict its test examples.

    Attributes:
        name: in tables and files, such as "logistic_regression".
        label: words for people, such as "logistic regression".
        fit: from inputs, number of outputs and seed to the outputs for the test examples, shape (n, outputs), in the form
            of a network's.
        is_trees: whether the model is made of trees, which take long with many features.
        library: the package that fits the model; empty for polyfed's own.
        is_pooled_too: whether the model is also fitted to the examples of all clients together, for comparison.
    """

    name: str
    label: str
    fit: Callable[[SimpleModelInputs, int, int], Floats]
    is_trees: bool = False
    library: str = ""
    is_pooled_too: bool = False


@final
@dataclass(frozen=True)
class ConstantModel:
    """Describes a model that ignores the input: it gives all examples of a client the same outputs.

    Attributes:
        name: in tables and files, such as "majority".
        content: what the outputs are, such as "share of each class", of the training examples.
        words: how sentences name the model, such as "always answering the mean".
        outputs: from the client's training targets and the number of outputs to the outputs for one example.
    """

    name: str
    content: str
    words: str
    outputs: Callable[[NDArray[Any], int], Floats]
