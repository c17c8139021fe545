"""Trains a client's network: `fit` is the only training loop in polyfed."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import Inputs, first_leaf
from polyfed.core.io.text.number_format import join_first_and_count_rest
from polyfed.core.nn.grad_mode import grad_enabled
from polyfed.core.nn.optimizers import ParameterGroup, build_optimizer
from polyfed.core.nn.tied_weights import all_names_by_first_name
from polyfed.core.seeds import derive_seed, temporary_rng_seed
from polyfed.core.tasks.task import DEFAULT_TASK, Task
from polyfed.core.tasks.task_lookup import get_task
from polyfed.core.training.backends import TrainingBackend, create_backend, fit_with_cohort
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.precision import autocast_context
from polyfed.core.training.privacy.private_backend import WITHHELD_LOSS, PrivateBackend
from polyfed.core.vectorized.cohort_batches import CohortBatches, Minibatch
from polyfed.core.vectorized.deferred_calls import PerClientTerm
from polyfed.core.vectorized.stacked_module import StackedNetworks

ReportedLoss = Literal["task", "loss", "total"]


@final
@dataclass(frozen=True)
class ForwardPass:
    """Holds a minibatch's `inputs`, `outputs`, `targets` and, if requested, `representation` for a loss.

    `inputs` are as the model got them; `outputs` are logits, shape (batch, ...); `representation` is the input of the
    module that `fit` was asked to watch, None if it watches none.
    """

    inputs: Inputs
    outputs: Tensor
    targets: Tensor
    representation: Tensor | None = None


@final
@dataclass(frozen=True)
class FitResult:
    """Holds `loss`, the mean reported loss over all examples seen, and `steps` of the optimiser."""

    loss: float
    steps: int


def reply_scalars(client: Client, loss: float) -> dict[str, float]:
    """Returns the scalars of a reply, "num_examples" and, unless training is private, "train_loss".

    The server weighs the client by the number of training examples.
    """
    return {"num_examples": len(client.train)} | ({} if loss == WITHHELD_LOSS else {"train_loss": loss})


@grad_enabled()
def fit(
    model: nn.Module,
    examples: Client | Examples | CohortBatches,
    options: LocalTraining,
    *,
    lr: float,
    seed: int,
    task: Task | str = DEFAULT_TASK,
    penalty: Callable[[], Tensor] | PerClientTerm | None = None,
    gradient: Callable[[Callable[[int], Tensor]], Tensor] | PerClientTerm | None = None,
    batches_per_step: int = 1,
    loss: Callable[[ForwardPass], Tensor] | None = None,
    representation: str | None = None,
    reported_loss: ReportedLoss = "loss",
    lr_factor: Callable[[str], float] | None = None,
) -> FitResult:
    """Trains `model` in place by minibatches, and returns the mean loss and the number of optimiser steps.

    Gradients are recorded whatever the caller's mode (`torch.no_grad`).

    Args:
        model: takes a batch of `examples` (transformed inputs) and returns logits, shape (batch, outputs), as described in
            `polyfed.core.examples.pytree`; it lies on the device of `examples`.
        examples: the client, whose training examples, task and own loss are taken, and by whose validation examples
            training may stop; or examples alone. (Many clients' are `CohortBatches`, with a `StackedNetworks` as the model.)
        options: epochs or steps, batch size, optimiser, clipping, precision.
        lr: learning rate of this round.
        seed: decides the order of examples, augmentation and dropout.
        task: which loss; of examples that come without a client.
        penalty: a further term of the loss, called once at every step; its gradient reaches what it depends on.
            `PerClientTerm`s are called with the trained parameters, and many can be computed at once.
        gradient: how the direction of a step is found, for methods in which it is not the gradient of a minibatch's loss.
            It is called with `loss_of`; `loss_of(k)` puts the gradient of the loss of the step's k-th minibatch (with
            `accumulate`, the k-th so many) at the present parameters into their `grad` and returns that loss. It leaves in
            `grad` what the optimiser is to descend, the parameters as it found them, and returns the loss to be reported. As
            `PerClientTerm` it is called with the network first, or with a stack of many.
        batches_per_step: minibatches that each step takes; the last step of an epoch may have fewer, and then repeats
            them.
        loss: the loss of a minibatch in place of the task's.
        representation: name of the module whose input `loss` gets as the representation, the last linear layer, say.
        reported_loss: which loss is reported: "task", the task's own, whatever is trained on; "loss", the one that is
            trained on, without the penalty; "total", with it. It does not change what is trained.
        lr_factor: by what factor a parameter's learning rate differs from `lr`, by its name; None: none does.

    >>> from polyfed.algorithms import Local
    >>> line = nn.Linear(1, 1)
    >>> with torch.no_grad(): _ = line.weight.fill_(0.0), line.bias.fill_(0.0)
    >>> data = Examples(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [2.0]]))
    >>> trained = fit(line, data, Local(batch_size=0, local_steps=500), lr=0.1, seed=0, task="regression")
    >>> trained.loss < 0.01, trained.steps
    (True, 500)
    """
    task = examples.task if isinstance(examples, Client) else get_task(task)
    if not isinstance(examples, CohortBatches):
        train_alone = (
            loss is not None or representation is not None or lr_factor is not None or not _supports_cohort(options)
        )
        call_arguments = lr, seed, task, penalty, gradient, batches_per_step, reported_loss
        if (
            cohort_result := fit_with_cohort(model, examples, options, *call_arguments, train_alone=train_alone)
        ) is not None:
            return FitResult(*cohort_result)
    if options.privacy is not None and not isinstance(examples, CohortBatches):
        client_loss = examples.loss if isinstance(examples, Client) else None
        private_data = examples.train if isinstance(examples, Client) else examples
        backend: TrainingBackend = PrivateBackend(model, private_data, client_loss, options, seed)
    else:
        backend = create_backend(model, examples, options, task, batches_per_step, seed)  # or many at once
    criterion = backend.criterion(task)
    weight_of = len if options.accumulate == 1 or loss is not None else backend.minibatch_weight(task)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = build_optimizer(
        _group_by_lr(model, lr, options, lr_factor), options.optimizer, momentum=options.momentum, nesterov=options.nesterov,
        weight_decay=options.weight_decay, options=options.optimizer_options,
    )  # fmt: skip
    full_rates = [group.lr for group in optimizer.groups]
    autocast = autocast_context(options.precision, backend.device)
    steps = 0
    captured: dict[str, Tensor] = {}
    hook = None if representation is None else _capture_input(model, representation, captured)
    model.train()

    def loss_of(minibatches: Sequence[Sequence[Minibatch]], k: int = 0) -> Tensor:
        parts = minibatches[k % len(minibatches)]
        weights = [weight_of(part.y) for part in parts]
        total_weight = sum(weights) or 1.0  # 0 if nothing counts
        optimizer.zero_grad()
        if isinstance(backend, PrivateBackend):
            if loss is not None:
                raise UserError(f"{type(options).__name__}: its own loss cannot be trained privately")
            term = None if penalty is None else partial(backend.compute_penalty_per_client, penalty, parameters)
            return backend.write_private_gradient(parts[0], criterion, term)
        shares = [weight / total_weight for weight in weights]
        losses = [
            backward_pass(part, share, with_penalty=not k)
            for k, (part, share) in enumerate(zip(parts, shares, strict=True))
        ]
        if options.clip_norm is not None:
            backend.clip_gradients(parameters, options.clip_norm)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def backward_pass(batch: Minibatch, share: float, *, with_penalty: bool) -> Tensor:
        """Adds the gradient of the loss of a batch to `grad`, and returns its share of the loss to be reported."""
        x, y = batch.x, batch.y
        with autocast:
            outputs = backend.compute_outputs(batch)
            value = criterion(outputs, y) if loss is None else loss(ForwardPass(x, outputs, y, captured.get("input")))
        value = value if share == 1 else value * share
        total = (
            value + backend.compute_penalty_per_client(penalty, parameters)
            if penalty is not None and with_penalty
            else value
        )
        if not total.requires_grad:
            names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
            raise UserError(
                f"the loss depends on none of the parameters that this step trains ({join_first_and_count_rest(names)}): "
                "take layers that forward leaves out or detaches out of the network, or choose another method"
            )
        torch.autograd.backward(total.sum() if total.dim() else total)
        if reported_loss == "task" and loss is not None:
            with torch.no_grad(), autocast:
                return criterion(outputs, y).detach() * share
        return (total if reported_loss == "total" else value).detach()

    try:
        with temporary_rng_seed(derive_seed(seed, "dropout"), backend.device):
            for minibatches_of_step in backend.iter_minibatches(optimizer):
                step_loss = partial(loss_of, minibatches_of_step)
                reported_value = (
                    step_loss(0) if gradient is None else backend.write_direction_to_grad(gradient, step_loss)
                )
                if steps <= options.warmup_steps:
                    for parameter_group, full in zip(optimizer.groups, full_rates, strict=True):
                        parameter_group.lr = full * min(1.0, (steps + 1) / (options.warmup_steps + 1))
                optimizer.step()
                steps += 1
                backend.record_loss(reported_value)
    finally:
        model.eval()
        if hook is not None:
            hook.remove()
    return FitResult(backend.mean_loss(), steps)


_COHORT_OPTIONS = frozenset({
    "local_epochs", "local_steps", "batch_size", "lr", "schedule", "decay", "warmup_rounds", "warmup_steps", "optimizer",
    "momentum", "nesterov", "weight_decay", "lr_by_name", "clip_norm", "label_smoothing", "buffers",
})  # fmt: skip
"""Options with which many networks can be trained at once; with any other that is not at its default, each is alone."""


def _supports_cohort(options: LocalTraining) -> bool:
    other_fields = (field for field in dataclasses.fields(LocalTraining) if field.name not in _COHORT_OPTIONS)
    built_in = options.optimizer.lower() in ("sgd", "adam", "adamw")
    return built_in and all(getattr(options, field.name) == field.default for field in other_fields)


def _capture_input(model: nn.Module, name: str, captured: dict[str, Tensor]) -> RemovableHandle:
    """Registers a hook that stores the input of a module in `captured` at each call."""

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured["input"] = args[0] if args else first_leaf(kwargs)

    return model.get_submodule(name).register_forward_pre_hook(keep, with_kwargs=True)


def _group_by_lr(
    model: nn.Module, lr: float, options: LocalTraining, lr_factor: Callable[[str], float] | None
) -> list[ParameterGroup]:
    """Groups the trained parameters by learning rate, for the optimiser."""
    groups: dict[float, list[nn.Parameter]] = {}
    named = (
        all_names_by_first_name(model.module if isinstance(model, StackedNetworks) else model)
        if options.lr_by_name
        else {}
    )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            factor = options.lr_factor(*named.get(name, [name])) * (1.0 if lr_factor is None else lr_factor(name))
            groups.setdefault(factor, []).append(parameter)
    return [ParameterGroup(members, lr * factor) for factor, members in groups.items()]
