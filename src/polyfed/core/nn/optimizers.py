"""Provides SGD, Adam and AdamW with results equal to torch's bit for bit, and all other optimisers of `torch.optim` by
name.

The classes of `torch.optim` import torch's compiler (`torch._dynamo`, and sympy with it) when the first one is made, which
costs each process a second or two. So the usual three do without them.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import adam, sgd

from polyfed.core.errors import UserError, did_you_mean

_OPTIONS_WITH_FIELDS = {"params", "lr", "weight_decay", "momentum", "nesterov"}  # fields of their own
# No method; needs many passes a step; needs sparse gradients.
_UNSUPPORTED_CLASSES = {"Optimizer", "LBFGS", "SparseAdam"}


@final
@dataclass(eq=False)
class ParameterGroup:
    """Holds parameters of one learning rate, and the optimiser's state of each (momentum or Adam's moments)."""

    parameters: list[nn.Parameter]
    lr: float
    state: dict[nn.Parameter, list[Tensor | None]] = field(default_factory=dict)


class Optimizer(Protocol):
    """Defines the interface of optimisers; rates in `groups` may change between steps."""

    groups: list[ParameterGroup]

    def zero_grad(self) -> None:
        """Clears the gradients of all parameters in `groups`."""

    def step(self) -> None:
        """Updates every parameter that has a gradient, in place."""


@final
@dataclass(eq=False)
class SGD:
    """Updates parameters by stochastic gradient descent, as `torch.optim.SGD` does.


    >>> weight = nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = SGD([ParameterGroup([weight], lr=0.5)])
    >>> weight.square().sum().backward()
    >>> optimizer.step(), weight.item()
    (None, 0.0)
    """

    groups: list[ParameterGroup]
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def zero_grad(self) -> None:
        """Clears the gradients of all parameters."""
        _clear_gradients(self.groups)

    @torch.no_grad()
    def step(self) -> None:
        """Updates every parameter that has a gradient."""
        for group in self.groups:
            parameters, grads = _parameters_and_gradients(group)
            momenta = [group.state.get(p, [None])[0] for p in parameters]
            sparse = any(slope.is_sparse for slope in grads)
            plain = False if grads and grads[0].is_cpu else None  # what torch finds out for the CPU, at each step
            sgd.sgd(
                list(parameters), grads, momenta, sparse, foreach=plain, fused=plain, lr=group.lr,
                momentum=self.momentum, nesterov=self.nesterov, weight_decay=self.weight_decay, dampening=0.0,
                maximize=False,
            )  # fmt: skip
            if self.momentum:
                group.state.update({p: [momentum] for p, momentum in zip(parameters, momenta, strict=True)})


@final
@dataclass(eq=False)
class Adam:
    """Updates parameters by Adam, as `torch.optim.Adam` does (Kingma and Ba 2015, β = 0.9 and 0.999, ε = 1e-8).

    `decoupled` makes it AdamW, in which weight decay shrinks weights by 1 − lr·decay before the step (Loshchilov and Hutter
    2019).


    >>> weight = nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = Adam([ParameterGroup([weight], lr=0.5)])
    >>> weight.square().sum().backward()
    >>> optimizer.step(), round(weight.item(), 4)
    (None, 0.5)
    """

    groups: list[ParameterGroup]
    weight_decay: float = 0.0
    decoupled: bool = False

    def zero_grad(self) -> None:
        """Clears the gradients of all parameters."""
        _clear_gradients(self.groups)

    @torch.no_grad()
    def step(self) -> None:
        """Updates every parameter that has a gradient."""
        penalty = 0.0 if self.decoupled else self.weight_decay
        for group in self.groups:
            parameters, grads = _parameters_and_gradients(group)
            for p in parameters:
                if self.decoupled and self.weight_decay:
                    p.mul_(1 - group.lr * self.weight_decay)
                if p not in group.state:
                    group.state[p] = [torch.zeros_like(p), torch.zeros_like(p), torch.tensor(0.0)]
            first, second, steps = ([m for p in parameters if (m := group.state[p][i]) is not None] for i in range(3))
            adam.adam(
                list(parameters),
                grads,
                first,
                second,
                [],
                steps,
                has_complex=any(p.is_complex() for p in parameters),
                lr=group.lr,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                weight_decay=penalty,
                amsgrad=False,
                maximize=False,
            )


@final
class TorchOptimizer:
    """Updates parameters by any optimiser of `torch.optim`.

    Raises:
        UserError: the optimiser does not take the options.
    """

    def __init__(
        self, groups: list[ParameterGroup], kind: type[torch.optim.Optimizer], options: Mapping[str, Any]
    ) -> None:
        self.groups = groups
        try:
            inner = kind([{"params": group.parameters, "lr": group.lr} for group in groups], **options)
        except (TypeError, ValueError) as error:
            raise UserError(f"optimizer {kind.__name__} does not take these options or parameters: {error}") from error
        self._its_groups, self._move, self.zero_grad = inner.param_groups, inner.step, inner.zero_grad

    def step(self) -> None:
        """Updates every parameter that has a gradient."""
        for group, its in zip(self.groups, self._its_groups, strict=True):
            its["lr"] = group.lr
        self._move()


def _torch_optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    classes = {
        key.lower(): kind
        for key, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and key not in _UNSUPPORTED_CLASSES
    }
    if name.lower() not in classes:
        raise UserError(f"unknown optimizer {name!r}; {did_you_mean(name.lower(), classes)}")
    return classes[name.lower()]


def check_optimizer(name: str, weight_decay: float, options: Mapping[str, Any]) -> None:
    """Raises a `UserError` unless torch has an optimiser of this name that accepts these options.

    Raises:
        UserError: torch has no such optimiser, or it does not take an option.


    >>> check_optimizer("rmsprop", 0.0, {"alpha": 0.9})
    >>> check_optimizer("adamv", 0.0, {})
    Traceback (most recent call last):
    polyfed.core.errors.UserError: unknown optimizer 'adamv'; did you mean ...
    """
    option_names = set(inspect.signature(_torch_optimizer_class(name)).parameters)
    if clash := sorted(_OPTIONS_WITH_FIELDS & options.keys() - ({"momentum"} if name.lower() != "sgd" else set())):
        raise UserError(f"optimizer_options cannot have {clash[0]!r}, which is a field of its own; set {clash[0]}")
    if unknown := sorted(options.keys() - option_names):
        raise UserError(
            f"optimizer {name!r} has no option {unknown[0]!r}; "
            f"{did_you_mean(unknown[0], option_names - _OPTIONS_WITH_FIELDS)}"
        )
    if weight_decay and "weight_decay" not in option_names:
        raise UserError(f"optimizer {name!r} has no weight decay; weight_decay must be 0, got {weight_decay!r}")


def build_optimizer(
    groups: list[ParameterGroup],
    name: str,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    options: Mapping[str, Any] | None = None,
) -> Optimizer:
    """Builds "sgd", "adam", "adamw", or any optimiser of `torch.optim` for dense gradients.

    Args:
        groups: the parameters, with their learning rates.
        name: in upper or lower case.
        momentum, nesterov: of SGD.
        weight_decay: as the optimiser applies it.
        options: further ones, as torch's class takes them.
    """
    sgd_too = {"momentum": momentum, "nesterov": nesterov} if name.lower() == "sgd" else {}
    if options or name.lower() not in ("sgd", "adam", "adamw"):
        kind = _torch_optimizer_class(name)
        decays = {"weight_decay": weight_decay} if "weight_decay" in inspect.signature(kind).parameters else {}
        return TorchOptimizer(groups, kind, {**sgd_too, **decays, **(options or {})})
    if name.lower() == "sgd":
        return SGD(groups, momentum, nesterov, weight_decay)
    return Adam(groups, weight_decay, decoupled=name.lower() == "adamw")


def _parameters_and_gradients(group: ParameterGroup) -> tuple[list[nn.Parameter], list[Tensor]]:
    pairs = [(p, p.grad) for p in group.parameters if p.grad is not None]
    return [p for p, _ in pairs], [slope for _, slope in pairs]


def _clear_gradients(groups: Iterable[ParameterGroup]) -> None:
    for group in groups:
        for parameter in group.parameters:
            parameter.grad = None
