"""Trains clients of one architecture together: stacks their networks, so that each training step is one computation for all
of them.

Small networks spend more time in Python and in launching operations than in arithmetic; a hundred at once cost little
more than one. Each client gets the result that it would get alone, up to rounding.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, final

import torch

from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.evaluation.metric import Metric
from polyfed.core.messages.compressors import Compressor
from polyfed.core.nn.module_cache import cached_module
from polyfed.core.training.cohort import (
    MIN_COHORT_SIZE,
    group_calls_to_predict_together,
    group_fit_calls,
    predict_cohort,
    train_cohort,
)
from polyfed.core.vectorized.deferred_calls import (
    CallDeferred,
    FitCall,
    FitCallResult,
    PredictCall,
    ReplayedCallResults,
    deferring_calls,
)
from polyfed.simulation.engines.base import ClientTask, Engine, TaskResult
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.sources.source_clients import SourceClients


@final
@dataclass(eq=False)
class _PendingTask:
    """Holds a task that waits for a stacked computation, its deferred calls, and the seconds spent on it so far."""

    task: ClientTask
    deferred_run: ReplayedCallResults = field(default_factory=ReplayedCallResults)
    seconds: float = 0.0


@final
class CohortEngine(Engine):
    """Trains clients of one architecture in this process as a stack of networks.

    Some clients are computed one by one, as by `InProcessEngine`: those whose architecture or options fewer than three
    share, networks that are not known to allow stacking, and calls of `fit` with functions of the method's own. If a
    client fails in a stacked computation, each of its clients is computed alone, so that only that client fails.

    Args:
        algorithm, clients, device, metrics, compression: as for `InProcessEngine`.
        sequential: architectures whose clients are computed one by one.
    """

    max_block_bytes: ClassVar[int] = 256 * 2**20

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        clients: Sequence[Client] | Mapping[str, Client],
        device: torch.device,
        metrics: Sequence[Metric] = (),
        compression: Compressor | None = None,
        sequential: Sequence[str] = (),
    ) -> None:
        self._single_engine = InProcessEngine(algorithm, clients, device, metrics, compression)
        self._source = clients if isinstance(clients, SourceClients) else None
        self._sequential_ids = {
            client.id
            for client in (() if isinstance(clients, Mapping) else clients)
            if sequential and client.model and cached_module(client.model).architecture in sequential
        }

    def run(self, tasks: Sequence[ClientTask]) -> Iterator[TaskResult]:
        """Trains clients together, in the order of ids, and yields each result when it is finished."""
        with nullcontext() if self._source is None else self._source.hold_clients():
            yield from self._run(tasks)

    def _run(self, tasks: Sequence[ClientTask]) -> Iterator[TaskResult]:
        waiting = [
            _PendingTask(task, ReplayedCallResults(runs_alone=task.client in self._sequential_ids))
            for task in sorted(tasks, key=lambda task: task.client)
        ]
        while waiting:
            still_pending = []
            for pending in waiting:
                if (result := self._advance(pending)) is None:
                    still_pending.append(pending)
                else:
                    yield result
            self._compute_deferred_calls(still_pending)
            waiting = still_pending

    def _advance(self, pending: _PendingTask) -> TaskResult | None:
        """Runs a task up to its next deferred call; returns its result, or None if it waits."""
        started = time.perf_counter()
        pending.deferred_run.restart_calls()
        try:
            with deferring_calls(pending.deferred_run):
                (result,) = self._single_engine.run([pending.task])
        except CallDeferred:
            pending.seconds += time.perf_counter() - started
            return None
        return replace(result, seconds=pending.seconds + time.perf_counter() - started)

    def _compute_deferred_calls(self, waiting: Sequence[_PendingTask]) -> None:
        """Computes the deferred calls of all waiting clients, and combines those that can be stacked."""
        ways: Sequence[tuple[type, Callable[..., Any], Callable[..., Any]]] = (
            (FitCall, group_fit_calls, train_cohort),
            (PredictCall, group_calls_to_predict_together, predict_cohort),
        )
        for kind, group_calls, compute in ways:
            alike = [pending for pending in waiting if isinstance(pending.deferred_run.pending_call, kind)]
            calls = [pending.deferred_run.pending_call for pending in alike]
            for places in group_calls(calls):
                self._compute_together([alike[p] for p in places], partial(compute, [calls[p] for p in places]))

    def _compute_together(
        self, members: Sequence[_PendingTask], compute: Callable[[], Sequence[FitCallResult | list[torch.Tensor]]]
    ) -> None:
        """Computes these clients' calls together, and hands on the results; on failure each runs alone."""
        started = time.perf_counter()
        outputs: Sequence[FitCallResult | list[torch.Tensor]] = ()
        if len(members) >= MIN_COHORT_SIZE:
            # Cannot be stacked, or fails at one client, which shows when each is computed alone.
            with suppress(Exception):
                outputs = compute()
        share_of_seconds = (time.perf_counter() - started) / len(members)
        for place, pending in enumerate(members):
            pending.seconds += share_of_seconds
            if outputs:
                pending.deferred_run.results.append(outputs[place])
            else:
                pending.deferred_run.runs_alone = True

    def predict(self, task: ClientTask, examples: Any) -> torch.Tensor:
        """Returns a client's outputs for these examples, as `InProcessEngine.predict` computes them."""
        return self._single_engine.predict(task, examples)
