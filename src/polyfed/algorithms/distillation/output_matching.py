"""What methods share in which a network learns from the outputs of others."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.core.algorithm import Task
from polyfed.core.examples.examples import Examples
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.loop import ForwardPass, fit


def softened_kl_divergence(
    teacher: Tensor, student: Tensor, temperature: float, task: Task = "classification"
) -> Tensor:
    """KL(teacher ‖ student) at a temperature, the mean over the batch (and over labels or outputs, where each has its own).

    Args:
        teacher, student: logits (outputs in regression), shape (batch, outputs).

    >>> z = torch.tensor([[1.0, 2.0]])
    >>> softened_kl_divergence(z, z, 20.0).item(), softened_kl_divergence(torch.log(3 * z), 0 * z, 1.0).item() > 0
    (0.0, True)
    """
    dtype = torch.promote_types(student.dtype, torch.float32)  # under autocast logits are too coarse to be compared
    teacher, student = teacher.to(dtype), student.to(dtype)
    if task == "regression":
        return (teacher - student).square().mean() / (2 * temperature**2)
    if task == "multilabel":  # a label is there or not: logits z and 0
        teacher, student = (F.pad(z.unsqueeze(-1), (0, 1)) for z in (teacher, student))
    log_p, log_q = (F.log_softmax(z / temperature, dim=-1) for z in (teacher, student))
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def fit_to_targets(
    student: nn.Module,
    inputs: Examples,
    targets: Tensor,
    options: LocalTraining,
    *,
    lr: float,
    seed: int,
    distance: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Trains a network in place towards given outputs, on inputs without labels.

    Args:
        student: what is trained.
        inputs: n of them.
        targets: the outputs to learn, (n, outputs).
        options, lr, seed: as in `fit`.
        distance: the distance of targets and outputs of a minibatch, in this order.

    >>> line, x = nn.Linear(1, 1), torch.tensor([[0.0], [1.0]])
    >>> options = LocalTraining(local_steps=200, batch_size=0)
    >>> fit_to_targets(line, Examples(x, torch.zeros(2)), 3 * x, options, lr=0.5, seed=0, distance=F.mse_loss)
    >>> round(line(x)[1].item(), 3)
    3.0
    """

    def loss(batch: ForwardPass) -> Tensor:
        return distance(batch.targets, batch.outputs)

    examples = Examples(inputs.raw_inputs, targets.to(inputs.device), transform=inputs.transform)
    fit(student, examples, options, lr=lr, seed=seed, loss=loss)
