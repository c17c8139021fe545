"""Whether a run's clients are computed together: measured where the run is to decide (`engine="auto"`)."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import torch

from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.nn.grad_mode import grad_enabled
from polyfed.core.nn.module_cache import architecture_hash
from polyfed.core.training.cohort import group_fit_calls, train_cohort
from polyfed.core.training.loop import fit
from polyfed.core.vectorized.deferred_calls import (
    CallDeferred,
    DeferredRun,
    FitCall,
    copy_named_tensors,
    deferring_calls,
)
from polyfed.simulation.engines.base import ClientTask
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.settings import Settings

MIN_CLIENTS = 32
"""Clients of one architecture in a round from which on "auto" measures. Runs with fewer keep their results bit for bit."""
MIN_SPEEDUP = 1.5
"""How many times as fast training together must be: more than two timings differ by chance, and worth results that differ in
their last bits."""
_TRIED = 32  # clients that are measured together
_LONGEST = 0.02  # seconds of a step on a CPU beyond which Python and starting operations cost next to nothing
_STEPS = 2


@final
@dataclass(frozen=True)
class EngineChoice:
    """How "auto" was settled.

    Attributes: `engine`, "cohort" or "one by one"; `gains`, how many times as fast a step of many clients was, by
    architecture; `apart`, the architectures whose clients are computed one by one all the same.
    """

    engine: str = "one by one"
    gains: Mapping[str, float] | None = None
    apart: tuple[str, ...] = ()

    @property
    def uses_cohorts(self) -> bool:
        """Whether clients are computed together."""
        return self.engine == "cohort"

    def __str__(self) -> str:
        """A sentence for people."""
        gains = ", ".join(f"{gain:.1f}" for gain in (self.gains or {}).values())
        measurement = f"measured: {gains} times as fast together"
        if self.uses_cohorts:
            return (
                f"engine auto: clients are trained together ({measurement}); engine=inprocess or pool trains them one "
                "by one"
            )
        return f"engine auto: clients are trained one by one ({measurement})"

    def to_manifest(self) -> dict[str, Any]:
        """For `manifest.json`.

        >>> EngineChoice.from_manifest(EngineChoice("cohort", {"ab12": 8.5}, ("cd34",)).to_manifest())
        EngineChoice(engine='cohort', gains={'ab12': 8.5}, apart=('cd34',))
        """
        return {**asdict(self), "apart": list(self.apart)}

    @staticmethod
    def from_manifest(entry: Mapping[str, Any]) -> "EngineChoice":
        """What a manifest holds."""
        return EngineChoice(str(entry["engine"]), entry.get("gains"), tuple(entry.get("apart", ())))


def benchmark_engines(
    settings: Settings,
    algorithm: Algorithm[Any, Any],
    clients: Sequence[Client],
    device: torch.device,
    tasks: Callable[[Sequence[str]], Sequence[ClientTask]],
) -> EngineChoice:
    """Whether "auto" computes the clients of this run together: where a round has many of one architecture, the method
    trains them in a way that allows it, and two steps of its training that are timed here take at most 1/`MIN_SPEEDUP`
    of the time.

    Args:
        settings, algorithm, clients, device: of the run.
        tasks: gives the clients' tasks of the next round, by their ids. They are begun, and left where they train.
    """
    share = settings.cohort_size(len(clients)) / len(clients)
    if settings.engine != "auto":
        return EngineChoice()
    by_model: dict[int, list[Client]] = {}
    for client in clients:
        by_model.setdefault(id(client.model), []).append(client)
    large_groups = [members[:_TRIED] for members in by_model.values() if len(members) * share >= MIN_CLIENTS]
    gains: dict[str, float] = {}
    for members in large_groups:
        engine = InProcessEngine(algorithm, members, device)
        calls = [_first_fit(engine, task) for task in tasks([client.id for client in members])]
        fit_calls = [call for call in calls if call is not None]
        if len(fit_calls) == len(members):
            gains[architecture_hash(fit_calls[0].module)] = round(measure_speedup(fit_calls, device), 2)
    apart = tuple(sorted(name for name, speedup in gains.items() if speedup < MIN_SPEEDUP))
    return EngineChoice("cohort" if len(apart) < len(gains) else "one by one", gains, apart)


def _first_fit(engine: InProcessEngine, task: ClientTask) -> FitCall | None:
    """The call of `fit` with which a client begins, None if it is none that can be carried out with others'."""
    deferred_run = DeferredRun(stop_at_first_call=True)
    try:
        with deferring_calls(deferred_run):
            list(engine.run([task]))
    except CallDeferred:
        pass
    return deferred_run.pending_call if isinstance(deferred_run.pending_call, FitCall) else None


@grad_enabled()
def measure_speedup(calls: Sequence[FitCall], device: torch.device) -> float:
    """How many times as fast a step of these clients' training is together; 0 where they cannot be trained so."""
    short_calls = [replace(call, options=replace(call.options, local_epochs=1, local_steps=_STEPS)) for call in calls]
    first = short_calls[0]
    if len(group_fit_calls(short_calls)) > 1:
        return 0.0
    for name, parameter in first.module.named_parameters():
        parameter.requires_grad_(name in first.trained_names)

    def train_first() -> None:
        fit(
            first.module, first.examples, first.options, lr=first.lr, seed=first.seed, penalty=first.penalty,
            task=first.task, gradient=first.gradient,  # type: ignore[arg-type]
            batches_per_step=first.batches_per_step,
        )  # fmt: skip

    try:
        copy_named_tensors(first.module, first.state)
        single_seconds = _seconds(train_first, device)
        if device.type == "cpu" and single_seconds / _STEPS > _LONGEST:
            return 0.0
        return single_seconds * len(calls) / _seconds(lambda: train_cohort(short_calls), device)
    except Exception:  # whatever a network raises is reported where clients are computed
        return 0.0


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few times, after a first one that builds what is kept; on a CPU of its own seconds, which other
    programs' work does not stretch."""
    clock, timings = time.thread_time if device.type == "cpu" else time.perf_counter, []
    for _ in range(4):
        started = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        timings.append(clock() - started)
    return min(timings[1:])
