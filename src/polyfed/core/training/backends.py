"""Trains one network, or many of one architecture at once, for the same loop of `fit`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyfed.core.algorithm import Client, Loss, Task
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples, split_into_batches
from polyfed.core.examples.pytree import call_network, logits_of
from polyfed.core.nn.memory_format import to_preferred_memory_format
from polyfed.core.nn.optimizers import Optimizer
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.losses import build_early_stopping, build_loss, sampling_weights
from polyfed.core.vectorized.cohort_batches import CohortBatches, Minibatch
from polyfed.core.vectorized.deferred_calls import (
    FitCall,
    FitCallResult,
    PerClientTerm,
    current_deferred_run,
    full_state,
)
from polyfed.core.vectorized.stacked_module import Stacked

Direction = Callable[[Callable[[int], Tensor]], Tensor]
Member = TypeVar("Member")


class TrainingBackend(ABC):
    """Does for the training loop what differs between one network and a stack of them. A loss is one number a network."""

    device: torch.device

    @abstractmethod
    def criterion(self, task: Task) -> Loss:
        """The mean loss of a minibatch."""

    @abstractmethod
    def iter_minibatches(self, optimizer: Optimizer) -> Iterator[Sequence[Sequence[Minibatch]]]:
        """The minibatches of each step; those whose gradients are accumulated come as one."""

    @abstractmethod
    def compute_outputs(self, batch: Minibatch) -> Tensor:
        """Logits."""

    @abstractmethod
    def compute_penalty(self, term: Callable[[], Tensor] | PerClientTerm, parameters: Sequence[nn.Parameter]) -> Tensor:
        """A further term of the loss."""

    @abstractmethod
    def compute_direction(self, gradient: Direction | PerClientTerm, loss_of: Callable[[int], Tensor]) -> Tensor:
        """Leaves the direction of a step in the parameters' `grad`, and returns the loss to be reported."""

    @abstractmethod
    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float) -> None:
        """Scales gradients down to this global norm."""

    @abstractmethod
    def record_loss(self, loss: Tensor) -> None:
        """Takes in the loss of the step that was made."""

    @abstractmethod
    def mean_loss(self) -> float:
        """Over all examples seen."""


@final
class SingleClientBackend(TrainingBackend):
    """One network with one client's examples."""

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
        """The task's loss, or the client's own."""
        client_loss, options = None if self._client is None else self._client.loss, self._options
        return build_loss(self._examples, task, client_loss, options.label_smoothing, options.class_weights)

    def iter_minibatches(self, optimizer: Optimizer) -> Iterator[Sequence[Sequence[Minibatch]]]:
        """Epoch by epoch, each in an order of its own, until patience ends."""
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
            for group in _chunks(batches, self._batches_per_step * options.accumulate)[:steps_left]:
                batches_of_step = [
                    (to_preferred_memory_format(self._model, x), y)
                    for x, y in (data.batch(rows, generator) for rows in group)
                ]
                self._rows_of_step = sum(len(rows) for rows in group)
                yield _chunks([Minibatch(x, y) for x, y in batches_of_step], options.accumulate)
                steps_left = None if steps_left is None else steps_left - 1
            if steps_left == 0 or (stop is not None and epoch < epochs and stop()):
                break

    def _early_stop(self, patience: int) -> Callable[[], bool]:
        if self._client is None:
            raise UserError(
                f"patience={patience}: fit was given examples without a client, whose validation examples it needs"
            )
        return build_early_stopping(self._model, self._client, self.criterion(self._task), patience)

    def compute_outputs(self, batch: Minibatch) -> Tensor:
        """Shape (batch, ...)."""
        return logits_of(call_network(self._model, batch.x))

    def compute_penalty(self, term: Callable[[], Tensor] | PerClientTerm, parameters: Sequence[nn.Parameter]) -> Tensor:
        """A scalar."""
        if not isinstance(term, PerClientTerm):
            return term()
        return term(self._model if term.takes_network else parameters)

    def compute_direction(self, gradient: Direction | PerClientTerm, loss_of: Callable[[int], Tensor]) -> Tensor:
        """As the method finds it."""
        return gradient(self._model, loss_of) if isinstance(gradient, PerClientTerm) else gradient(loss_of)

    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float) -> None:
        """By torch."""
        nn.utils.clip_grad_norm_(parameters, max_norm)

    def record_loss(self, loss: Tensor) -> None:
        """Weighs it by the examples of the step."""
        self._loss_sum += loss * self._rows_of_step
        self._num_seen += self._rows_of_step

    def mean_loss(self) -> float:
        """One number."""
        return float(self._loss_sum) / self._num_seen


@final
class CohortBackend(TrainingBackend):
    """Stacked networks with the streams of their clients' minibatches."""

    def __init__(self, networks: Stacked, batches: CohortBatches, label_smoothing: float) -> None:
        self.device, self._networks, self._batches = batches.device, networks, batches
        self._label_smoothing, self._rows = label_smoothing, torch.empty(0)

    def criterion(self, task: Task) -> Loss:
        """The task's loss of each client, (k,)."""
        return self._networks.criterion(task, self._label_smoothing)

    def iter_minibatches(self, optimizer: Optimizer) -> Iterator[Sequence[Sequence[Minibatch]]]:
        """Those who have made all their steps are left out, so that neither gradient nor momentum moves them."""
        for batches, rows in self._batches:
            self._networks.keep_first_clients(len(rows), optimizer)
            self._rows = rows
            yield [[batch] for batch in batches]

    def compute_outputs(self, batch: Minibatch) -> Tensor:
        """Shape (k·rows, ...)."""
        self._networks.valid_rows = batch.valid_rows
        return logits_of(self._networks(batch.x))

    def compute_penalty(self, term: Callable[[], Tensor] | PerClientTerm, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Of each client, (k,)."""
        assert isinstance(term, PerClientTerm)
        if term.takes_network:
            return term.function(self._networks, self._active_tensors(term))
        return torch.vmap(term.function)(list(parameters), self._active_tensors(term))

    def compute_direction(self, gradient: Direction | PerClientTerm, loss_of: Callable[[int], Tensor]) -> Tensor:
        """Of all clients at once: what a method does to parameters number by number, it does to stacks of them."""
        assert isinstance(gradient, PerClientTerm)
        return gradient.function(self._networks, loss_of, self._active_tensors(gradient))

    def _active_tensors(self, term: PerClientTerm) -> list[Tensor]:
        return [tensor[: self._networks.num_clients] for tensor in term.tensors]

    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float) -> None:
        """Each client's by its own norm."""
        self._networks.clip_gradients(max_norm)

    def record_loss(self, loss: Tensor) -> None:
        """Of each client."""
        self._networks.record_losses(loss, self._rows)

    def mean_loss(self) -> float:
        """Over all clients; `Stacked.mean_losses` has each one's."""
        return float(self._networks.mean_losses().mean())


def create_backend(
    model: nn.Module,
    examples: Client | Examples | CohortBatches,
    options: LocalTraining,
    task: Task,
    batches_per_step: int,
    seed: int,
) -> TrainingBackend:
    """Returns the backend of a stack of networks for `CohortBatches`, else that of one network."""
    if isinstance(examples, CohortBatches):
        assert isinstance(model, Stacked)
        return CohortBackend(model, examples, options.label_smoothing)
    return SingleClientBackend(model, examples, options, task, batches_per_step, seed)


def _chunks(members: Sequence[Member], size: int) -> list[Sequence[Member]]:
    return [members[i : i + size] for i in range(0, len(members), size)]


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
) -> tuple[float, int] | None:
    """Trains this network together with the cohort's.

    Returns:
        The loss and the number of steps, with the trained weights already in `model`; None if it must be trained alone:
        `train_alone`, a client's own loss, inputs of several parts, or a term that is no `PerClientTerm`.
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
            or not all(isinstance(term, PerClientTerm) for term in terms)
        ):
            return None
        return FitCall(
            model, full_state(model), trained, data, options, lr, seed, task, penalty, gradient, batches_per_step,
            reported_loss,
        )  # fmt: skip

    result = deferred_run.next_result(make_call)
    if not isinstance(result, FitCallResult):
        return None
    result.copy_into(model, *(term.tensors for term in (penalty, gradient) if isinstance(term, PerClientTerm)))
    return result.loss, result.steps
