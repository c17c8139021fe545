"""Clients of one architecture side by side: their networks are stacked, and each step of training is one for all of them.

Small networks cost more in Python and in starting operations than in arithmetic; a hundred of them at once cost little more
than one. What a client computes is what it computes alone, up to rounding.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch

from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.compression import Compression
from polyfed.core.gathered import Fit, FitCall, Half, Parked, PredictCall, gathering
from polyfed.core.metrics import Metric
from polyfed.core.scratch import scratch
from polyfed.core.stacked import CannotStackError
from polyfed.core.together import FEWEST, groups, outputs_of, same_form, train
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.engines.work import Engine, Result, Task


@final
@dataclass(eq=False)
class _Waiting:
    """A task whose client half is run until it is through, and the seconds that were spent on it."""

    task: Task
    half: Half = field(default_factory=Half)
    seconds: float = 0.0


@final
class CohortEngine(Engine):
    """Runs the tasks of a round together, in this process.

    What cannot be computed together is computed one by one, as `InProcessEngine` does: clients whose architecture or options
    fewer than three have, networks that are not known to allow it, calls of `fit` with functions of a method's own. If a
    client fails while many are computed, each of them is computed alone, so that its failure is its own.

    Args:
        algorithm, clients, device, metrics, compression: as for `InProcessEngine`.
        told: is told, once for each reason, why clients are computed one by one.
        apart: architectures whose clients are computed one by one.
    """

    block_bytes: ClassVar[int] = 256 * 2**20

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        clients: Sequence[Client],
        device: torch.device,
        metrics: Sequence[Metric] = (),
        compression: Compression | None = None,
        told: Callable[[str], None] | None = None,
        apart: Sequence[str] = (),
    ) -> None:
        self._alone = InProcessEngine(algorithm, clients, device, metrics, compression)
        self._told, self._reasons = told, set[str]()
        self._apart = {
            client.id for client in clients if apart and client.model and scratch(client.model).architecture in apart
        }

    def run(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """All tasks together, in the order of their clients' ids; each result when its client is through."""
        waiting = [
            _Waiting(task, Half(alone=task.client in self._apart))
            for task in sorted(tasks, key=lambda task: task.client)
        ]
        while waiting:
            parked = []
            for one in waiting:
                if (result := self._advance(one)) is None:
                    parked.append(one)
                else:
                    yield result
            self._carry_out(parked)
            waiting = parked

    def _advance(self, one: _Waiting) -> Result | None:
        """The client's result, or None if it waits for others."""
        started = time.perf_counter()
        one.half.begin()
        try:
            with gathering(one.half):
                (result,) = self._alone.run([one.task])
        except Parked:
            one.seconds += time.perf_counter() - started
            return None
        return result.after(one.seconds + time.perf_counter() - started)

    def _carry_out(self, waiting: Sequence[_Waiting]) -> None:
        training = [one for one in waiting if isinstance(one.half.waiting, FitCall)]
        calls = [one.half.waiting for one in training if isinstance(one.half.waiting, FitCall)]
        for places in groups(calls):
            self._at_once([training[p] for p in places], lambda ps=places: train([calls[p] for p in ps]))  # type: ignore[misc]
        evaluated = [one for one in waiting if isinstance(one.half.waiting, PredictCall)]
        asked = [one.half.waiting for one in evaluated if isinstance(one.half.waiting, PredictCall)]
        for places in same_form(asked):
            self._at_once([evaluated[p] for p in places], lambda ps=places: outputs_of([asked[p] for p in ps]))  # type: ignore[misc]

    def _at_once(self, members: Sequence[_Waiting], compute: Callable[[], Sequence[Fit | list[torch.Tensor]]]) -> None:
        """Puts what is found for each of these clients where its half will find it."""
        started = time.perf_counter()
        found: Sequence[Fit | list[torch.Tensor]] = ()
        if len(members) >= FEWEST:
            try:
                found = compute()
            except CannotStackError as reason:
                self._say(f"clients are computed one by one: {reason}")
            except Exception as error:  # one client's; it is found out which when each is computed alone
                self._say(f"clients are computed one by one: {type(error).__name__}: {error}")
        each = (time.perf_counter() - started) / len(members)
        for place, one in enumerate(members):
            one.seconds += each
            if found:
                one.half.found.append(found[place])
            else:
                one.half.alone = True

    def _say(self, reason: str) -> None:
        if self._told is not None and reason not in self._reasons:
            self._reasons.add(reason)
            self._told(reason)

    def predict(self, task: Task, examples: Any) -> torch.Tensor:
        """As `InProcessEngine.predict`."""
        return self._alone.predict(task, examples)

    def close(self) -> None:
        """Nothing to give back."""
