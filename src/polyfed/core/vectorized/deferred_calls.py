"""Collects the calls of `fit` and `predict_sets` that many clients make, so that calls of different clients can be
carried out together.

A client half runs until it asks for what takes long, training (`fit`) or outputs (`predict`). There it is parked: the call
is kept and the half is left. When the calls have been carried out, the half runs again from its start, and gets at the same
call what was found. So nothing of a method has to know of it; it relies on what every method keeps: what a client computes
follows from what it is given (see `Algorithm`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from polyfed.core.examples.examples import Examples
from polyfed.core.tasks.task import Task

Tensors = Sequence[Tensor]


@final
@dataclass(frozen=True, eq=False)
class PerClientTerm:
    """Holds a penalty or step direction: a function for all clients, and one client's tensors for it.

    So those of many clients can be computed at once.

    Args:
        function: two clients' are equal (`==`) only if they are the same function.
        tensors: of the client; the function may change them in place.
        takes_network: a penalty is called with the network, or with a stack of many (`StackedNetworks`), instead of with the
            trained parameters. (A direction always is.)
        num_rows: examples of its own that a penalty takes through each network at once, 0 for none.

    >>> import torch
    >>> def pull(weights, anchors): return sum((w - a).square().sum() for w, a in zip(weights, anchors))
    >>> PerClientTerm(pull, [torch.ones(2)])([torch.zeros(2)])
    tensor(2.)
    """

    function: Callable[..., Tensor]
    tensors: Tensors = ()
    takes_network: bool = False
    num_rows: int = 0

    def __call__(self, *arguments: Any) -> Tensor:
        """Returns the function's result for these arguments, followed by the client's tensors."""
        return self.function(*arguments, self.tensors)


@final
class CallDeferred(BaseException):  # not an error: no `except Exception` of a method may take it
    """Raised when a client's code makes a call that will be carried out later, together with calls of other clients."""


@final
@dataclass(frozen=True, eq=False)
class FitCall:
    """Holds one call of `fit`: its arguments, and the network's parameters and buffers at that time."""

    module: nn.Module
    state: Mapping[str, Tensor]
    trained_names: frozenset[str]
    examples: Examples
    options: Any
    lr: float
    seed: int
    task: Task
    penalty: PerClientTerm | None
    gradient: PerClientTerm | None
    batches_per_step: int
    reported_loss: str


@final
@dataclass(frozen=True, eq=False)
class PredictCall:
    """Holds one call of `predict_sets`: the sets of examples, and the network's parameters and buffers at that time."""

    module: nn.Module
    state: Mapping[str, Tensor]
    sets: Sequence[Examples]


@final
@dataclass(frozen=True, eq=False)
class FitCallResult:
    """Holds what training changed: parameters, buffers, the client's tensors, loss and number of steps."""

    state: Mapping[str, Tensor]
    tensors: Tensors
    loss: float
    steps: int

    def copy_into_network(self, module: nn.Module, *tensors: Tensors) -> None:
        """Copies trained parameters and buffers into `module`, and changed tensors into `tensors`.

        They are then as training the client alone would have left them.
        """
        copy_tensors_into_module(module, self.state)
        with torch.no_grad():
            for target, source in zip((t for group in tensors for t in group), self.tensors, strict=True):
                target.copy_(source)
        module.eval()


@final
@dataclass(eq=False)
class ReplayedCallResults:
    """Holds the results of a client's calls, while its code is run again until all have one.

    `runs_alone` is set once one of its calls must be carried out by itself; then all later ones are. With
    `stop_at_first_call` the code is left there instead.
    """

    results: list[FitCallResult | list[Tensor]] = field(default_factory=list)
    runs_alone: bool = False
    pending_call: FitCall | PredictCall | None = None
    stop_at_first_call: bool = False
    _next: int = 0

    def restart_calls(self) -> None:
        """Goes back to the first call; must be called before each run of the client's code."""
        self._next, self.pending_call = 0, None

    def replay_or_defer_next_call(
        self, make_call: Callable[[], FitCall | PredictCall | None]
    ) -> FitCallResult | list[Tensor] | None:
        """Returns the stored result of the next call; None if the caller has to carry it out itself.

        Raises:
            CallDeferred: the call is to be carried out with others'.
        """
        if self._next < len(self.results):
            self._next += 1
            return self.results[self._next - 1]
        if self.runs_alone or (call := make_call()) is None:
            if self.stop_at_first_call:
                raise CallDeferred
            self.runs_alone = True
            return None
        self.pending_call = call
        raise CallDeferred


_CURRENT_RUN: ContextVar[ReplayedCallResults | None] = ContextVar("the client half that is run", default=None)


def current_deferred_run() -> ReplayedCallResults | None:
    """Returns the `ReplayedCallResults` that is collecting calls now; None outside a `deferring_calls` block."""
    return _CURRENT_RUN.get()


@contextmanager
def deferring_calls(run: ReplayedCallResults | None) -> Iterator[None]:
    """Collects in `run`, unless it is None, the `fit` and `predict_sets` calls inside the `with` block."""
    token = _CURRENT_RUN.set(run)
    try:
        yield
    finally:
        _CURRENT_RUN.reset(token)


def copy_tensors_into_module(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies tensors into the parameters and buffers of the same names in a module; skips those with equal values."""
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in state and not torch.equal(tensor, state[name]):
                tensor.copy_(state[name])


def copy_all_parameters_and_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns `{name: copy}` for all parameters and buffers of a module, frozen ones included, on the module's device."""
    return {name: tensor.detach().clone() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
