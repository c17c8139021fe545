"""Computes, checks and combines class means: each client's mean representation, or mean output, over its examples of
each class.

A reply has them as `sums`, (C, d), and `weights`, (C,): each class's mean times its weight, and that weight, so that sums
over clients are enough to weigh means by class. The means are those of the network that training ended with, over all of
the client's training examples.
"""

from abc import ABC
from collections.abc import Callable, Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from polyfed.algorithms.base.averaging import Averaging
from polyfed.alignment.representations import representation_module_name
from polyfed.core.algorithm import Client, Message
from polyfed.core.errors import UserError
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.examples.examples import Examples
from polyfed.core.state_dict import IncompatibleTensorsError, StateDict, StateDictSpec, spec_mismatch, state_dict_spec
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.loop import ForwardPass, fit

_REQUIREMENT = "networks need the same number of outputs, and last layers of one width"


def class_means_with_weights(
    values: Tensor, labels: Tensor, num_classes: int, weighted: bool = False
) -> dict[str, Tensor]:
    """Returns values' mean for each class and its weight, as `{"sums": tensor, "weights": tensor}`.

    Returns `sums`, (C, d), each class's mean times its weight, and `weights`, (C,); both are float32 on the CPU.

    Args:
        values: one row for each example, (n, d).
        labels: their classes, (n,).
        num_classes: C.
        weighted: a class's weight is its share of the examples (with n_i of the reply, their number); otherwise it is 1 for
            a class that the client has, and 0 for another.

    >>> class_means_with_weights(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 2]), 3)
    {'sums': tensor([[2.],
            [0.],
            [5.]]), 'weights': tensor([1., 0., 1.])}
    """
    labels, values = labels.cpu(), values.cpu().to(torch.float64)
    counts = torch.bincount(labels, minlength=num_classes).to(torch.float64)
    totals = torch.zeros(num_classes, values.shape[1], dtype=torch.float64).index_add_(0, labels, values)
    weights = counts / len(labels) if weighted else (counts > 0).to(torch.float64)
    means = totals / counts.clamp(min=1)[:, None]
    return {"sums": (means * weights[:, None]).float(), "weights": weights.float()}


@final
class ClassMeans(NamedTuple):
    """Holds the mean of each class, (C, d), 0 where it has no examples, and whether it has some, (C,) of bool."""

    means: Tensor
    is_present: Tensor


def class_means_from_sums(sums_and_weights: StateDict) -> ClassMeans:
    """Returns the mean value of each class, computed from the clients' weighted sums and the sums of their weights.

    A class without weight counts as one without examples.

    >>> class_means_from_sums({"sums": torch.tensor([[4.0], [0.0]]), "weights": torch.tensor([2.0, 0.0])})
    ClassMeans(means=tensor([[2.],
            [0.]]), is_present=tensor([ True, False]))
    """
    present = sums_and_weights["weights"] > 0
    means = sums_and_weights["sums"] / torch.where(present, sums_and_weights["weights"], 1.0)[:, None]
    return ClassMeans(torch.where(present[:, None], means, 0.0), present)


def class_means_spec(reply: Message, expected: Mapping[str, StateDictSpec] | None) -> Mapping[str, StateDictSpec]:
    """Returns the shapes and dtypes that the class means in a client's reply must have.

    They are `expected`, or if that is None any number of classes and any width.

    Raises:
        ValueError: the reply has a weight outside 0 to 1, or sums and weights of different numbers of classes.
    """
    tensors = reply.tensors.get("classes", {})
    weights, sums = tensors.get("weights"), tensors.get("sums")
    if weights is not None and sums is not None and sums.dim() == 2 and len(sums) != len(weights.reshape(-1)):
        raise ValueError(f"it has sums of {len(sums)} classes and weights of {len(weights.reshape(-1))}")
    if weights is not None and not weights.is_meta and not bool(((weights >= 0) & (weights <= 1)).all()):
        raise ValueError("a weight of its class means is not between 0 and 1")
    return expected or {"classes": {"sums": ((None, None), torch.float32), "weights": ((None,), torch.float32)}}


def class_means_as_examples(replies: Mapping[str, Message]) -> Examples:
    """Returns all clients' class means as training examples, each labelled with its class, in the order of client ids.

    Raises:
        UserError: the class means of two clients differ in shape.

    >>> reply = Message({"classes": {"sums": torch.tensor([[0.0], [3.0]]), "weights": torch.tensor([0.0, 1.0])}})
    >>> class_means_as_examples({"a": reply}).y
    tensor([1])
    """
    state_dicts = {i: replies[i].tensors["classes"] for i in sorted(replies)}
    first = next(iter(state_dicts))
    for i, tensors in state_dicts.items():
        if difference := spec_mismatch(tensors, state_dict_spec(state_dicts[first])):
            raise UserError(f"the class means of {first!r} and {i!r} differ ({difference}); {_REQUIREMENT}")
    means_by_client = [class_means_from_sums(tensors) for tensors in state_dicts.values()]
    x = torch.cat([means[present] for means, present in means_by_client])
    return Examples(x, torch.cat([present.nonzero().flatten() for _, present in means_by_client]))


def count_outputs(model: nn.Module, client: Client) -> int:
    """Returns the number of outputs C of a network, which is run on the client's first examples to count them."""
    return predict(model, client.train.head()).shape[1]


def find_replaceable_head(model: nn.Module, client: Client, method: str) -> nn.Linear:
    """Returns the last linear layer of a client's network.

    Raises:
        UserError: another layer computes the outputs, or the weights of this one cannot be replaced.
    """
    name = representation_module_name(model, client.train)
    head, outputs = model.get_submodule(name), count_outputs(model, client)
    assert isinstance(head, nn.Linear)
    if error := _replacement_error(head, outputs):
        raise UserError(
            f"{method}: the last linear layer of the network of {client.id!r}, {name!r}, {error}; it must be a trained "
            f"nn.Linear with a bias and {outputs} outputs, which another can replace"
        )
    return head


def _replacement_error(head: nn.Linear, outputs: int) -> str:
    """Returns why the weights of a last layer cannot be replaced, or "" if they can."""
    if head.out_features != outputs:
        return f"has {head.out_features} outputs, and the network {outputs}"
    if "bias" in head._parameters and head._parameters["bias"] is None:
        return "has no bias"
    if not all(isinstance(p, nn.Parameter) for p in (head.weight, head.bias)):
        return "computes its weights from others (weight_norm, say)"
    return "" if head.weight.requires_grad and head.bias.requires_grad else "is not trained"


class AveragesClassMeans(Averaging, ABC):
    """Averages the clients' class means, whose shapes have to agree."""

    def make_incompatible_replies_error(self, error: IncompatibleTensorsError) -> UserError:
        """Returns the error to raise if clients' class means have different shapes."""
        return UserError(
            f"{type(self).__name__}: the class means of {error.first_client!r} and {error.other_client!r} differ "
            f"({error.difference}); {_REQUIREMENT}"
        )


def train_network_on_class_means(
    model: nn.Module,
    examples: Examples,
    epochs: int,
    batch_size: int,
    lr: float,
    seed: int,
    loss: Callable[[ForwardPass], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Trains a small network at the server by SGD on class means; returns its state dict."""
    options = LocalTraining(local_epochs=epochs, batch_size=batch_size)
    fit(model, examples, options, lr=lr, seed=seed, loss=loss)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
