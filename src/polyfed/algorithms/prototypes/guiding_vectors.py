"""Computes how guiding vectors, one for each class, should change so that a network that follows them has a lower loss on
other examples (Zhang et al. 2024, FedL2G).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Batch, Examples
from polyfed.core.examples.pytree import call_network, logits_of
from polyfed.core.nn.grad_mode import grad_enabled
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.core.tasks.task import Loss


def draw_first_vectors(classes: int, width: int, seed: int) -> Tensor:
    """Draws the first guiding vectors, (classes, width), of normal numbers, from the run's seed.

    >>> draw_first_vectors(3, 2, seed=0).shape
    torch.Size([3, 2])
    """
    return torch.randn(classes, width, generator=torch_generator(derive_seed(seed, "guides")))


def split_study_and_quiz(examples: Examples, quiz_rows: Tensor) -> tuple[Examples, Examples]:
    """Splits examples into study (to train on) and quiz (held out); a single one is in both.

    >>> data = Examples(torch.arange(3.0), torch.tensor([0, 1, 2]))
    >>> [len(part) for part in split_study_and_quiz(data, torch.tensor([1]))]
    [2, 1]
    """
    is_quiz = torch.zeros(len(examples), dtype=torch.bool).index_fill_(0, quiz_rows, value=len(examples) > 1)
    study_rows = (~is_quiz).nonzero().flatten()
    return examples.select(study_rows.to(examples.device)), examples.select(quiz_rows.to(examples.device))


def minibatch_of_two_or_more(examples: Examples, rows: Tensor) -> Batch:
    """Returns a minibatch with a single row twice, since BatchNorm needs the variance of two values."""
    return examples.batch((rows.repeat(2) if len(rows) == 1 else rows).to(examples.device))


def repeat_single_example(examples: Examples) -> Examples:
    """Returns the examples, a single one twice, for the reason of `minibatch_of_two_or_more`."""
    return examples if len(examples) > 1 else examples.select(torch.zeros(2, dtype=torch.int64, device=examples.device))


def guided_loss(label_loss: Loss, outputs: Tensor, guided: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
    """Returns the loss of a minibatch, CE(outputs) + the mean of ‖z − v_y‖²/d.

    Args:
        label_loss: CE.
        outputs: logits, (batch, classes).
        guided: what follows the vectors, z, (batch, ...): the logits, or a representation.
        targets: classes, (batch,).
        vectors: the guiding vectors, (classes, d).

    >>> z = torch.zeros(2, 1)
    >>> guided_loss(F.cross_entropy, z, z, torch.tensor([0, 0]), torch.tensor([[3.0]]))
    tensor(9.)
    """
    return label_loss(outputs, targets) + F.mse_loss(guided.flatten(1), vectors[targets])


@grad_enabled()
def compute_guiding_gradient(
    model: nn.Module, study: Batch, quiz: Batch, vectors: Tensor, lr: float, label_loss: Loss, module: str | None
) -> Tensor:
    """Returns the quiz loss's gradient for guiding vectors, (classes, d), after a guided step.

    With W' = W − η∇_W ℓ(W; V) it is ∇_V CE(W'; quiz) = −η ∇_V ⟨∇_W ℓ(W; V), g⟩, where g = ∇CE(W'; quiz) is a constant. Of
    W only first derivatives are differentiated, and with respect to V alone.

    Args:
        model: the network, in training mode; its weights stay as they are, its buffers do not.
        study, quiz: minibatches, inputs and classes.
        vectors: the guiding vectors V.
        lr: η.
        label_loss: CE.
        module: name of the module whose input follows the vectors; None: the logits do.

    Raises:
        UserError: a layer cannot be differentiated twice.
    """
    inputs: list[Tensor] = []

    def keep(_: nn.Module, layer_inputs: tuple[Any, ...]) -> None:
        inputs.append(layer_inputs[0])

    v = vectors.clone().requires_grad_()
    handle = None if module is None else model.get_submodule(module).register_forward_pre_hook(keep)
    try:
        outputs = logits_of(call_network(model, study[0]))
    finally:
        if handle is not None:
            handle.remove()
    loss = guided_loss(label_loss, outputs, inputs[-1] if inputs else outputs, study[1], v)
    names, weights = zip(*((name, p) for name, p in model.named_parameters() if p.requires_grad), strict=True)
    steps = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True, materialize_grads=True)
    moved = [(w - lr * step).detach().requires_grad_() for w, step in zip(weights, steps, strict=True)]

    def moved_network(*args: Any, **named: Any) -> Any:
        return functional_call(model, dict(zip(names, moved, strict=True)), args, named)

    quiz_loss = label_loss(logits_of(call_network(moved_network, quiz[0])), quiz[1])
    slopes = torch.autograd.grad(quiz_loss, moved, allow_unused=True, materialize_grads=True)
    product = torch.stack([(a * b.conj()).real.sum() for a, b in zip(steps, slopes, strict=True)]).sum()
    try:
        return -lr * torch.autograd.grad(product, v)[0]
    except RuntimeError as error:
        raise UserError(
            f"FedL2G: the gradient of guiding vectors through the network fails ({error}); give a network whose layers "
            "can be differentiated twice, or choose another method, such as fedproto"
        ) from error
