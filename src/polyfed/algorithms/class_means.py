"""What methods share in which clients send means over their examples of each class, of representations or of outputs.

A reply has them as `sums`, (C, d), and `weights`, (C,): each class's mean times its weight, and that weight, so that sums
over clients are enough to weigh means by class. The means are those of the network that training ended with, over all of
the client's training examples.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from polyfed.algorithms.averaging import Averaging
from polyfed.alignment.representations import representation_name
from polyfed.core.algorithm import Client, Message
from polyfed.core.errors import UserError
from polyfed.core.evaluation import predict
from polyfed.core.examples import Examples
from polyfed.core.training import Forward, LocalTraining, fit
from polyfed.core.tree import Spec, Tree, UnlikeTreesError, mismatch, spec

_NEEDED = "networks need the same number of outputs, and last layers of one width"


def class_sums(values: Tensor, labels: Tensor, classes: int, weighted: bool = False) -> dict[str, Tensor]:
    """The reply's tensors, float32 on the CPU: `sums` and `weights`.

    Args:
        values: one row for each example, (n, d).
        labels: their classes, (n,).
        classes: C.
        weighted: a class's weight is its share of the examples (with n_i of the reply, their number); otherwise it is 1 for
            a class that the client has, and 0 for another.

    >>> class_sums(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 2]), 3)
    {'sums': tensor([[2.],
            [0.],
            [5.]]), 'weights': tensor([1., 0., 1.])}
    """
    labels, values = labels.cpu(), values.cpu().to(torch.float64)
    counts = torch.bincount(labels, minlength=classes).to(torch.float64)
    total = torch.zeros(classes, values.shape[1], dtype=torch.float64).index_add_(0, labels, values)
    weights = counts / len(labels) if weighted else (counts > 0).to(torch.float64)
    means = total / counts.clamp(min=1)[:, None]
    return {"sums": (means * weights[:, None]).float(), "weights": weights.float()}


def class_means(tree: Tree) -> tuple[Tensor, Tensor]:
    """The means, (C, d), and which classes there are, (C,) of bool, from `sums` and `weights`; zeros for a class without
    weight.

    >>> class_means({"sums": torch.tensor([[4.0], [0.0]]), "weights": torch.tensor([2.0, 0.0])})
    (tensor([[2.],
            [0.]]), tensor([ True, False]))
    """
    present = tree["weights"] > 0
    means = tree["sums"] / torch.where(present, tree["weights"], 1.0)[:, None]
    return torch.where(present[:, None], means, 0.0), present


def class_spec(reply: Message, known: Mapping[str, Spec] | None) -> Mapping[str, Spec]:
    """For `Algorithm.reply_spec`: the group "classes" in the form of the first, of whatever size before it is known.

    Raises:
        ValueError: a weight that no client can have.
    """
    tree = reply.tensors.get("classes", {})
    weights, sums = tree.get("weights"), tree.get("sums")
    if weights is not None and sums is not None and sums.dim() == 2 and len(sums) != len(weights.reshape(-1)):
        raise ValueError(f"it has sums of {len(sums)} classes and weights of {len(weights.reshape(-1))}")
    if weights is not None and not weights.is_meta and not bool(((weights >= 0) & (weights <= 1)).all()):
        raise ValueError("a weight of its class means is not between 0 and 1")
    return known or {"classes": {"sums": ((None, None), torch.float32), "weights": ((None,), torch.float32)}}


def points(replies: Mapping[str, Message]) -> Examples:
    """All clients' class means as examples, each with its class as the label, in the order of ids.

    Raises:
        UserError: they differ in form between clients.

    >>> one = Message({"classes": {"sums": torch.tensor([[0.0], [3.0]]), "weights": torch.tensor([0.0, 1.0])}})
    >>> points({"a": one}).y
    tensor([1])
    """
    trees = {i: replies[i].tensors["classes"] for i in sorted(replies)}
    first = next(iter(trees))
    for i, tree in trees.items():
        if difference := mismatch(tree, spec(trees[first])):
            raise UserError(f"the class means of {first!r} and {i!r} differ ({difference}); {_NEEDED}")
    found = [class_means(tree) for tree in trees.values()]
    x = torch.cat([means[present] for means, present in found])
    return Examples(x, torch.cat([present.nonzero().flatten() for _, present in found]))


def num_outputs(model: nn.Module, client: Client) -> int:
    """C: the outputs of a network that takes the client's inputs."""
    return predict(model, client.train.head()).shape[1]


def linear_head(model: nn.Module, client: Client, method: str) -> nn.Linear:
    """The last linear layer, which must be what gives the outputs, so that one with other weights can take its place.

    Raises:
        UserError: it does not.
    """
    name = representation_name(model, client.train)
    head, outputs = model.get_submodule(name), num_outputs(model, client)
    assert isinstance(head, nn.Linear)
    if flaw := _flaw(head, outputs):
        raise UserError(
            f"{method}: the last linear layer of the network of {client.id!r}, {name!r}, {flaw}; it must be a trained "
            f"nn.Linear with a bias and {outputs} outputs, which another can replace"
        )
    return head


def _flaw(head: nn.Linear, outputs: int) -> str:
    """Why another layer cannot take the place of this one; empty if it can."""
    if head.out_features != outputs:
        return f"has {head.out_features} outputs, and the network {outputs}"
    if "bias" in head._parameters and head._parameters["bias"] is None:
        return "has no bias"
    if not all(isinstance(p, nn.Parameter) for p in (head.weight, head.bias)):
        return "computes its weights from others (weight_norm, say)"
    return "" if head.weight.requires_grad and head.bias.requires_grad else "is not trained"


def unlike_classes(method: Averaging, error: UnlikeTreesError) -> UserError:
    """What to say where clients' class means differ in form."""
    return UserError(
        f"{type(method).__name__}: the class means of {error.first!r} and {error.other!r} differ ({error.differs}); "
        f"{_NEEDED}"
    )


def trained_on_points(
    model: nn.Module,
    examples: Examples,
    epochs: int,
    batch_size: int,
    lr: float,
    seed: int,
    loss: Callable[[Forward], Tensor] | None = None,
) -> dict[str, Tensor]:
    """The state of a small network of the server after training on class means by SGD."""
    options = LocalTraining(local_epochs=epochs, batch_size=batch_size)
    fit(model, examples, options, lr=lr, seed=seed, loss=loss)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
