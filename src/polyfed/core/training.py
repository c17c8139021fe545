"""Local training: the hyper-parameters that methods share, and `fit`, the only training loop."""

import dataclasses
import math
import subprocess
import sys
from abc import ABC
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, final, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from polyfed.core.algorithm import Task
from polyfed.core.buffers import Policy
from polyfed.core.errors import UserError, nearest
from polyfed.core.evaluation import loss_function
from polyfed.core.examples import Examples, split_rows
from polyfed.core.gradients import gradients
from polyfed.core.layout import arrange
from polyfed.core.optimizers import SGD, Adam, Group
from polyfed.core.seeds import derive, local_rng, torch_generator

Optimizer = Literal["sgd", "adam"]
Schedule = Literal["constant", "cosine", "exponential"]
Precision = Literal["fp32", "bf16"]
Reported = Literal["task", "loss", "total"]


@dataclass(frozen=True, kw_only=True)
class LocalTraining(ABC):
    """Hyper-parameters of local training; every method that trains on clients has them. Defaults without a paper are
    polyfed's choice.

    Args:
        local_epochs: passes over the client's training examples in a round.
        local_steps: if given, exactly this many minibatches instead of `local_epochs`.
        batch_size: examples in a minibatch; 0 takes all of the client's examples (full batch).
        lr: learning rate of round 1.
        schedule: how `lr` falls over the rounds t = 1..R: "constant"; "cosine", lr·½(1 + cos(π(t−1)/R)); "exponential",
            lr·decay^(t−1).
        decay: factor a round of the exponential schedule.
        optimizer: "sgd" or "adam", started afresh each round.
        momentum, nesterov: of SGD.
        weight_decay: L2 penalty, as the optimiser applies it.
        clip_norm: gradients are scaled down to at most this global norm; None leaves them.
        label_smoothing: of the cross-entropy (classification only).
        buffers: "average", "local" or "recompute", see `polyfed.core.buffers`.
        precision: "fp32", or "bf16" for autocast to bfloat16 (weights stay float32).

    Raises:
        UserError: a value outside its range, with the value.
    """

    local_epochs: int = 1
    local_steps: int | None = None
    batch_size: int = 32
    lr: float = 0.01
    schedule: Schedule = "constant"
    decay: float = 0.99
    optimizer: Optimizer = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_norm: float | None = None
    label_smoothing: float = 0.0
    buffers: Policy = "average"
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        self._check_kinds()
        self._require(self.local_epochs >= 1, "local_epochs", "at least 1")
        self._require(self.local_steps is None or self.local_steps >= 1, "local_steps", "at least 1, or none")
        self._require(self.batch_size >= 0, "batch_size", "at least 1, or 0 for the full batch")
        self._require(self.lr > 0 and math.isfinite(self.lr), "lr", "positive")
        self._require(0 < self.decay <= 1, "decay", "above 0 and at most 1")
        self._require(0 <= self.momentum < 1, "momentum", "at least 0 and below 1")
        self._require(not self.nesterov or self.momentum > 0, "nesterov", "false unless momentum is positive")
        self._require(self.weight_decay >= 0, "weight_decay", "at least 0")
        self._require(self.clip_norm is None or self.clip_norm > 0, "clip_norm", "positive, or none")
        self._require(0 <= self.label_smoothing < 1, "label_smoothing", "at least 0 and below 1")

    def _check_kinds(self) -> None:
        """A whole number given as 1.5 or "3", or a choice that is none, would fail late, inside a client, or not at all."""
        for field, hint in _hints(type(self)).items():
            if get_origin(hint) is Literal:
                value, choices = getattr(self, field), get_args(hint)
                if value not in choices:
                    hints = nearest(str(value), choices)
                    raise UserError(f"{type(self).__name__}: unknown {field} {value!r}; {hints}")
            united = get_origin(hint) in (Union, UnionType)
            kinds, value = set(get_args(hint)) if united else {hint}, getattr(self, field)
            if value is None and NoneType in kinds:
                continue
            if float in kinds:
                self._require(isinstance(value, Real) and not isinstance(value, bool), field, "a number")
            elif int in kinds:
                self._require(isinstance(value, Integral) and not isinstance(value, bool), field, "a whole number")
            elif bool in kinds:
                self._require(isinstance(value, bool), field, "true or false")

    def _require(self, holds: bool, field: str, wanted: str) -> None:
        if not holds:
            raise UserError(f"{type(self).__name__}: {field} must be {wanted}, got {getattr(self, field)!r}")

    def lr_at(self, round_number: int, rounds: int) -> float:
        """The learning rate of a round, counted from 1.

        >>> from polyfed.algorithms import FedAvg
        >>> [round(FedAvg(lr=1.0, schedule="cosine").lr_at(t, 4), 3) for t in (1, 2, 3, 4)]
        [1.0, 0.854, 0.5, 0.146]
        """
        past = min(round_number, rounds) - 1
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * past / rounds))
        return self.lr * (self.decay**past if self.schedule == "exponential" else 1.0)


TAKEN_OVER = tuple(field.name for field in dataclasses.fields(LocalTraining) if field.name != "buffers")
"""What one method takes over from another to train as it does; how buffers are treated is a method's own."""


@lru_cache
def _hints(method: type[LocalTraining]) -> dict[str, Any]:
    """The declared types of a method's fields."""
    hints = get_type_hints(method)
    return {field.name: hints[field.name] for field in dataclasses.fields(method)}


@final
@dataclass(frozen=True)
class Forward:
    """One minibatch in `fit`: `inputs` as the model got them; its `outputs`, shape (batch, ...); `targets`; and the
    `representation`, the input of the module that `fit` was asked to watch, None if of none."""

    inputs: Tensor
    outputs: Tensor
    targets: Tensor
    representation: Tensor | None = None


@final
@dataclass(frozen=True)
class Fitted:
    """What `fit` found: `loss`, the mean of the reported loss over all examples seen; `steps` of the optimiser."""

    loss: float
    steps: int


@gradients()
def fit(
    model: nn.Module,
    examples: Examples,
    options: LocalTraining,
    *,
    lr: float,
    seed: int,
    task: Task = "classification",
    penalty: Callable[[], Tensor] | None = None,
    gradient: Callable[[Callable[[int], Tensor]], Tensor] | None = None,
    batches_per_step: int = 1,
    loss: Callable[[Forward], Tensor] | None = None,
    representation: str | None = None,
    reported: Reported = "loss",
    rate: Callable[[str], float] | None = None,
) -> Fitted:
    """Trains `model` in place by minibatches. Gradients are recorded whatever the caller's mode (`torch.no_grad`).

    Args:
        model: takes a batch of `examples` (transformed inputs) and returns logits, shape (batch, outputs); it lies on the
            device of `examples`.
        options: epochs or steps, batch size, optimiser, clipping, precision.
        lr: learning rate of this round.
        seed: decides the order of examples, augmentation and dropout.
        task: which loss.
        penalty: a further term of the loss, called at every step; its gradient reaches what it depends on.
        gradient: how the direction of a step is found, for methods in which it is not the gradient of a minibatch's loss.
            It is called with `loss_of`; `loss_of(k)` puts the gradient of the loss of the step's k-th minibatch at the
            present parameters into their `grad` and returns that loss. It leaves in `grad` what the optimiser is to
            descend, the parameters as it found them, and returns the loss to be reported.
        batches_per_step: minibatches that each step takes; the last step of an epoch may have fewer, and then repeats
            them.
        loss: the loss of a minibatch in place of the task's.
        representation: name of the module whose input `loss` gets as the representation, the last linear layer, say.
        reported: which loss is reported: "task", the task's own, whatever is trained on; "loss", the one that is trained on,
            without the penalty; "total", with it. It does not change what is trained.
        rate: by what factor a parameter's learning rate differs from `lr`, by its name; None: none does.

    >>> from polyfed.algorithms import Local
    >>> line = nn.Linear(1, 1)
    >>> with torch.no_grad(): _ = line.weight.fill_(0.0), line.bias.fill_(0.0)
    >>> data = Examples(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [2.0]]))
    >>> found = fit(line, data, Local(batch_size=0, local_steps=500), lr=0.1, seed=0, task="regression")
    >>> found.loss < 0.01, found.steps
    (True, 500)
    """
    device = examples.x.device
    number = len(examples)
    size = min(options.batch_size or number, number)
    generator = torch_generator(derive(seed, "batches"))
    criterion = loss_function(task, options.label_smoothing)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = _optimizer([Group(parameters, lr)] if rate is None else _by_rate(model, lr, rate), options)
    autocast = _autocast(options.precision, device)
    has_batch_norm = any(isinstance(m, _BatchNorm) for m in model.modules())
    total, seen, steps, steps_left = torch.zeros((), device=device), 0, 0, options.local_steps
    watched: dict[str, Tensor] = {}
    hook = None if representation is None else _watch(model, representation, watched)
    model.train()

    def loss_of(batches: Sequence[tuple[Tensor, Tensor]], k: int = 0) -> Tensor:
        x, y = batches[k % len(batches)]
        optimizer.zero_grad()
        with autocast:
            outputs = model(x)
            value = criterion(outputs, y) if loss is None else loss(Forward(x, outputs, y, watched.get("input")))
        whole = value if penalty is None else value + penalty()
        torch.autograd.backward(whole)
        if options.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, options.clip_norm)
        if reported == "task" and loss is not None:
            with torch.no_grad(), autocast:
                return criterion(outputs, y).detach()
        return (whole if reported == "total" else value).detach()

    with local_rng(derive(seed, "dropout"), device):
        for _ in range(options.local_epochs if steps_left is None else steps_left):  # an epoch has at least one step
            order = torch.randperm(number, generator=generator).to(device)
            batches = split_rows(order, size, at_least_two=has_batch_norm)
            for group in _groups(batches, batches_per_step)[:steps_left]:
                drawn = [examples.batch(rows, generator) for rows in group]
                step_loss = partial(loss_of, [(arrange(model, x), y) for x, y in drawn])
                found = step_loss(0) if gradient is None else gradient(step_loss)
                optimizer.step()
                steps += 1
                rows_in_step = sum(len(rows) for rows in group)
                total += found * rows_in_step
                seen += rows_in_step
                if steps_left is not None:
                    steps_left -= 1
            if steps_left == 0:
                break
    model.eval()
    if hook is not None:
        hook.remove()
    return Fitted(float(total) / seen, steps)


def _watch(model: nn.Module, name: str, watched: dict[str, Tensor]) -> RemovableHandle:
    """Puts the input of a module into `watched` at each call."""

    def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        watched["input"] = inputs[0]

    return model.get_submodule(name).register_forward_pre_hook(keep)


def _groups(batches: Sequence[Tensor], size: int) -> list[Sequence[Tensor]]:
    return [batches[i : i + size] for i in range(0, len(batches), size)]


def _by_rate(model: nn.Module, lr: float, rate: Callable[[str], float]) -> list[Group]:
    """The trained parameters in groups of one learning rate each."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(rate(name), []).append(parameter)
    return [Group(members, lr * factor) for factor, members in groups.items()]


def _optimizer(groups: list[Group], options: LocalTraining) -> SGD | Adam:
    if options.optimizer == "adam":
        return Adam(groups, weight_decay=options.weight_decay)
    return SGD(groups, options.momentum, options.nesterov, options.weight_decay)


def _autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, torch.bfloat16)


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raises a `UserError` where bfloat16 does not run, before work is lost: some virtual machines report AMX but kill the
    process at its first instruction, so a child process tries it."""
    if precision == "bf16" and device.type == "cpu" and not _bf16_runs():
        raise UserError(
            "precision='bf16' kills the process on this processor (tried in a child process); use precision='fp32', or "
            "set the environment variable ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 to keep oneDNN from AMX"
        )


_BF16_PROBE = """
import torch
net = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 5), torch.nn.Flatten(), torch.nn.Linear(32 * 576, 64))
with torch.autocast("cpu", torch.bfloat16):
    net(torch.randn(32, 3, 28, 28)).float().sum().backward()
"""


@lru_cache(maxsize=1)
def _bf16_runs() -> bool:
    return subprocess.run([sys.executable, "-c", _BF16_PROBE], capture_output=True, check=False).returncode == 0
