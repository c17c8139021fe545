"""Implements the steps of the training loop `fit`, for one network and for many networks of one architecture at once."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples, split_into_batches
from polyfed.core.examples.pytree import call_network_on_copy_if_it_changes_inputs, logits_of
from polyfed.core.nn.memory_format import to_preferred_memory_format
from polyfed.core.nn.optimizers import Optimizer
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.core.tasks.task import Loss, Task
from polyfed.core.tasks.task_lookup import has_elementwise_loss
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.losses import build_early_stopping, build_loss, sampling_weights
from polyfed.core.vectorized.cohort_batches import CohortBatches, Minibatch
from polyfed.core.vectorized.deferred_calls import (
    FitCall,
    FitCallResult,
    PerClientTerm,
    copy_all_parameters_and_buffers,
    current_deferred_run,
)
from polyfed.core.vectorized.stacked_module import StackedNetworks

Direction = Callable[[Callable[[int], Tensor]], Tensor]
Member = TypeVar("Member")


class TrainingBackend(ABC):
    """Defines the steps of the training loop that differ for one network and for a stack.

    A loss is one number per network: a scalar for one network, shape (k,) for k stacked networks.
    """

    device: torch.device

    @abstractmethod
    def criterion(self, task: Task) -> Loss:
        """Returns the function (outputs, targets) -> mean loss of a minibatch."""

    def minibatch_weight(self, task: Task) -> Callable[[Tensor], float]:
        """Returns the function (targets) -> weight of a minibatch among those whose gradients are accumulated."""
        return len

    @abstractmethod
    def iter_minibatches(self, optimizer: Optimizer) -> Iterator[Sequence[Sequence[Minibatch]]]:
        """Yields for each optimiser step lists of minibatches; gradients of one list are accumulated."""

    @abstractmethod
    def compute_outputs(self, batch: Minibatch) -> Tensor:
        """Returns the network's logits for a minibatch."""

    @abstractmethod
    def compute_penalty_per_client(
        self, term: Callable[[], Tensor] | PerClientTerm, parameters: Sequence[nn.Parameter]
    ) -> Tensor:
        """Returns the penalty that the method adds to the loss, for each client."""

    @abstractmethod
    def write_direction_to_grad(self, gradient: Direction | PerClientTerm, loss_of: Callable[[int], Tensor]) -> Tensor:
        """Writes the step that `gradient` computes to the parameters' `grad`; returns the loss to report."""

    @abstractmethod
    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float) -> None:
        """Scales each client's gradients down in place, so that their global norm is at most `max_norm`."""

    @abstractmethod
    def record_loss(self, loss: Tensor) -> None:
        """Adds the loss of one step to the sum from which `mean_loss` is computed."""

    @abstractmethod
    def mean_loss(self) -> float:
        """Returns the mean training loss over all examples seen; for several networks, the mean of the networks' means."""


class OneNetworkBackend(TrainingBackend, ABC):
    """Implements the steps that all ways to train one network have in common."""

    _model: nn.Module

    def compute_outputs(self, batch: Minibatch) -> Tensor:
        """Returns the network's logits for a minibatch, shape (batch, ...)."""
        return logits_of(call_network_on_copy_if_it_changes_inputs(self._model, batch.x))

    def compute_penalty_per_client(
        self, term: Callable[[], Tensor] | PerClientTerm, parameters: Sequence[nn.Parameter]
    ) -> Tensor:
        """Returns the penalty that the method adds to the client's loss, a scalar tensor."""
        if not isinstance(term, PerClientTerm):
            return term()
        return term(self._model if term.takes_network else parameters)

    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float) -> None:
        """Scales the gradients down in place, so that their global norm is at most `max_norm`."""
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:  # torch has no norm of these
                parameter.grad = parameter.grad.to_dense()
        nn.utils.clip_grad_norm_(parameters, max_norm)


@final
class SingleClientBackend(OneNetworkBackend):
    """Trains one network on one client's examples."""

    def __init__(
        self,
        model: nn.Module,
        client: Client | Examples,
        options: LocalTraining,
        task: Task,
        batches_per_step: int,
        seed: int,
    ) -> None:
        self._client = client if isinstance(client, Client) else None
        data = client.train if isinstance(client, Client) else client
        self.device, self._model, self._examples, self._options = data.device, model, data, options
        self._task, self._batches_per_step, self._seed = task, batches_per_step, seed
        self._sampling_weights = sampling_weights(data, task, options.sampler)
        self._loss_sum, self._num_seen, self._rows_of_step = torch.zeros((), device=self.device), 0, 0

    def criterion(self, task: Task) -> Loss:
        """Returns the client's loss function (outputs, targets) -> mean loss, if it has one; else that of the task."""
        client_loss, options = None if self._client is None else self._client.loss, self._options
        return build_loss(self._examples, task, client_loss, options.label_smoothing, options.class_weights)

    def minibatch_weight(self, task: Task) -> Callable[[Tensor], float]:
        """Returns the task's function (targets) -> weight of a minibatch; the number of examples for a client's own loss."""
        if self._client is not None and self._client.loss is not None:
            return len
        return task.minibatch_weight(self._examples.labels, self._options.class_weights)

    def iter_minibatches(self, optimizer: Optimizer) -> Iterator[Sequence[Sequence[Minibatch]]]:
        """Yields the minibatches of each optimiser step, epoch by epoch, each epoch in a new random order.

        It ends early when the validation loss has not improved for `patience` epochs.
        """
        options, data, number, steps_left = (
            self._options,
            self._examples,
            len(self._examples),
            self._options.local_steps,
        )
        size = min(options.batch_size or number, number)
        generator = torch_generator(derive_seed(self._seed, "batches"))
        has_batch_norm = any(isinstance(m, _BatchNorm) for m in self._model.modules())
        stop = None if options.patience is None else self._early_stop(options.patience)
        epochs = options.local_epochs if steps_left is None else steps_left  # an epoch has at least one step
        for epoch in range(1, epochs + 1):
            if self._sampling_weights is None:
                order = torch.randperm(number, generator=generator).to(self.device)
            else:
                weights = self._sampling_weights.cpu()
                order = torch.multinomial(weights, number, replacement=True, generator=generator).to(self.device)
            batches = split_into_batches(order, size, at_least_two=has_batch_norm)
            for group in _split_into_chunks(batches, self._batches_per_step * options.accumulate)[:steps_left]:
                batches_of_step = [
                    (to_preferred_memory_format(self._model, x), y)
                    for x, y in (self._task.trim_minibatch(*data.batch(rows, generator)) for rows in group)
                ]
                self._rows_of_step = sum(len(rows) for rows in group)
                yield _split_into_chunks([Minibatch(x, y) for x, y in batches_of_step], options.accumulate)
                steps_left = None if steps_left is None else steps_left - 1
            if steps_left == 0 or (stop is not None and epoch < epochs and stop()):
                break

    def _early_stop(self, patience: int) -> Callable[[], bool]:
        if self._client is None:
            raise UserError(
                f"patience={patience}: fit was given examples without a client, whose validation examples it needs"
            )
        return build_early_stopping(self._model, self._client, self.criterion(self._task), patience)

    def write_direction_to_grad(self, gradient: Direction | PerClientTerm, loss_of: Callable[[int], Tensor]) -> Tensor:
        """Lets `gradient` write the step to the parameters' `grad`; returns the loss to report."""
        return gradient(self._model, loss_of) if isinstance(gradient, PerClientTerm) else gradient(loss_of)

    def record_loss(self, loss: Tensor) -> None:
        """Adds the loss of a step to the sum for `mean_loss`, weighted by the number of examples of the step."""
        self._loss_sum += loss * self._rows_of_step
        self._num_seen += self._rows_of_step

    def mean_loss(self) -> float:
        """Returns the mean training loss over all examples seen."""
        return float(self._loss_sum) / self._num_seen


@final
class CohortBackend(TrainingBackend):
    """Trains the stacked networks of k clients at once, each on minibatches of that client's examples."""

    def __init__(self, networks: StackedNetworks, batches: CohortBatches, label_smoothing: float) -> None:
        self.device, self._networks, self._batches = batches.device, networks, batches
        self._label_smoothing, self._rows = label_smoothing, torch.empty(0)

    def criterion(self, task: Task) -> Loss:
        """Returns the function (outputs, targets) -> mean loss of each client's part of a batch, shape (k,)."""
        return self._networks.criterion(task, self._label_smoothing)

    def iter_minibatches(self, optimizer: Optimizer) -> Iterator[Sequence[Sequence[Minibatch]]]:
        """Yields the minibatches of each step, for those clients that have not yet made all their steps.

        Clients that have made all their steps are left out, so that neither gradient nor momentum moves them.
        """
        for batches, rows in self._batches:
            self._networks.keep_first_clients(len(rows), optimizer)
            self._rows = rows
            yield [[batch] for batch in batches]

    def compute_outputs(self, batch: Minibatch) -> Tensor:
        """Returns the logits of all clients' networks for their minibatches, shape (k·rows, ...)."""
        self._networks.valid_rows = batch.valid_rows
        return logits_of(call_network_on_copy_if_it_changes_inputs(self._networks, batch.x))

    def compute_penalty_per_client(
        self, term: Callable[[], Tensor] | PerClientTerm, parameters: Sequence[nn.Parameter]
    ) -> Tensor:
        """Returns the penalties that the method adds to the clients' losses, shape (k,)."""
        assert isinstance(term, PerClientTerm)
        if term.takes_network:
            return term.function(self._networks, self._active_tensors(term))
        return torch.vmap(term.function)(list(parameters), self._active_tensors(term))

    def write_direction_to_grad(self, gradient: Direction | PerClientTerm, loss_of: Callable[[int], Tensor]) -> Tensor:
        """Lets `gradient` write all clients' steps to `grad`; returns each client's loss, (k,).

        The function works on stacked parameters as it does on single ones, element by element.
        """
        assert isinstance(gradient, PerClientTerm)
        return gradient.function(self._networks, loss_of, self._active_tensors(gradient))

    def _active_tensors(self, term: PerClientTerm) -> list[Tensor]:
        return [tensor[: self._networks.num_clients] for tensor in term.tensors]

    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float) -> None:
        """Scales each client's gradients down in place to a global norm of at most `max_norm`."""
        self._networks.clip_gradients(max_norm)

    def record_loss(self, loss: Tensor) -> None:
        """Adds each client's loss of a step, shape (k,), to the sums for `mean_loss`."""
        self._networks.record_losses(loss, self._rows)

    def mean_loss(self) -> float:
        """Returns the mean of the clients' mean training losses (`StackedNetworks.mean_losses`)."""
        return float(self._networks.mean_losses().mean())


def create_backend(
    model: nn.Module,
    examples: Client | Examples | CohortBatches,
    options: LocalTraining,
    task: Task,
    batches_per_step: int,
    seed: int,
) -> TrainingBackend:
    """Returns the backend for stacked networks if `examples` is a `CohortBatches`, else that for one network."""
    if isinstance(examples, CohortBatches):
        assert isinstance(model, StackedNetworks)
        return CohortBackend(model, examples, options.label_smoothing)
    return SingleClientBackend(model, examples, options, task, batches_per_step, seed)


def _split_into_chunks(members: Sequence[Member], size: int) -> list[Sequence[Member]]:
    return [members[i : i + size] for i in range(0, len(members), size)]


class LossAndSteps(NamedTuple):
    """Holds the mean training loss of one client, and the number of optimiser steps that it made."""

    loss: float
    steps: int


def fit_with_cohort(
    model: nn.Module,
    client: Client | Examples,
    options: LocalTraining,
    lr: float,
    seed: int,
    task: Task,
    penalty: Any,
    gradient: Any,
    batches_per_step: int,
    reported_loss: str,
    *,
    train_alone: bool,
) -> LossAndSteps | None:
    """Trains a client's network together with others; None if it must be trained by itself.

    Returns:
        The loss and the number of steps, with the trained weights already in `model`; None if it must be trained alone:
        `train_alone`, a client's own loss, a task whose loss is not a mean over examples, inputs of several parts, or a term
        that is no `PerClientTerm`.
    """
    if (deferred_run := current_deferred_run()) is None:
        return None

    def make_call() -> FitCall | None:
        terms = [term for term in (penalty, gradient) if term is not None]
        has_client_loss = isinstance(client, Client) and client.loss is not None
        trained = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
        data = client.train if isinstance(client, Client) else client
        is_structured = not isinstance(data.x, Tensor)  # which are not stacked
        if (
            train_alone
            or has_client_loss
            or is_structured
            or not trained
            or not has_elementwise_loss(task)
            or not all(isinstance(term, PerClientTerm) for term in terms)
        ):
            return None
        return FitCall(
            model, copy_all_parameters_and_buffers(model), trained, data, options, lr, seed, task, penalty, gradient,
            batches_per_step, reported_loss,
        )  # fmt: skip

    result = deferred_run.replay_or_defer_next_call(make_call)
    if not isinstance(result, FitCallResult):
        return None
    result.copy_into_network(model, *(term.tensors for term in (penalty, gradient) if isinstance(term, PerClientTerm)))
    return LossAndSteps(result.loss, result.steps)
