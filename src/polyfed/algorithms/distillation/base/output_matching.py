"""Trains networks to match the outputs of other networks: the distillation loss, and training on given outputs."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from polyfed.core.examples.examples import Examples
from polyfed.core.tasks.task import DEFAULT_TASK, Task
from polyfed.core.tasks.task_lookup import get_task
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.loop import ForwardPass, fit


def softened_kl_divergence(
    teacher: Tensor, student: Tensor, temperature: float, task: Task | str = DEFAULT_TASK
) -> Tensor:
    """Returns the mean KL(teacher ‖ student) of a minibatch at a temperature.

    Args:
        teacher, student: logits (outputs in regression), shape (batch, outputs).

    >>> z = torch.tensor([[1.0, 2.0]])
    >>> softened_kl_divergence(z, z, 20.0).item(), softened_kl_divergence(torch.log(3 * z), 0 * z, 1.0).item() > 0
    (0.0, True)
    """
    dtype = torch.promote_types(student.dtype, torch.float32)  # autocast's logits are too coarse for a comparison
    teacher, student = teacher.to(dtype), student.to(dtype)
    return get_task(task).output_distance(teacher, student, temperature)


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
    """Trains a network in place so that its outputs match the given targets on inputs without labels.

    Args:
        student: the network to train.
        inputs: n examples; their labels are not used.
        targets: the outputs to learn, (n, outputs).
        options, lr, seed: as in `fit`.
        distance: distance of a minibatch's targets and outputs, in this order.

    >>> line, x = nn.Linear(1, 1), torch.tensor([[0.0], [1.0]])
    >>> options = LocalTraining(local_steps=200, batch_size=0)
    >>> fit_to_targets(line, Examples(x, torch.zeros(2)), 3 * x, options, lr=0.5, seed=0, distance=nn.functional.mse_loss)
    >>> round(line(x)[1].item(), 3)
    3.0
    """

    def loss(batch: ForwardPass) -> Tensor:
        return distance(batch.targets, batch.outputs)

    examples = Examples(inputs.raw_inputs, targets.to(inputs.device), transform=inputs.transform)
    fit(student, examples, options, lr=lr, seed=seed, loss=loss)
