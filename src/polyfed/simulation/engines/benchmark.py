"""Measures for `engine="auto"` whether clients train faster together, with their networks stacked into one computation,
or one by one.
"""

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
    FitCall,
    ReplayedCallResults,
    copy_tensors_into_module,
    deferring_calls,
)
from polyfed.simulation.engines.base import ClientTask
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.settings import Settings

MIN_CLIENTS = 32
"""Clients of one architecture in a round from which on "auto" measures. Runs with fewer keep their results bit for bit."""
MIN_SPEEDUP = 1.5
"""Speed-up from which on clients are trained together: above the noise of two timings, and worth results that differ in
their last bits."""
_TRIED = 32  # most clients in a measurement
_LONGEST = 0.02  # seconds of a CPU step beyond which the overhead of Python and of launching operations is negligible
_STEPS = 2


@final
@dataclass(frozen=True)
class EngineChoice:
    """Holds what `engine="auto"` chose, together or one by one, and the measurements behind it.

    Attributes:
        engine: "cohort" or "one by one".
        gains: architecture -> measured speed-up of a training step of many clients together; None without a measurement.
        apart: architectures whose clients are trained one by one all the same.
    """

    engine: str = "one by one"
    gains: Mapping[str, float] | None = None
    apart: tuple[str, ...] = ()

    @property
    def uses_cohorts(self) -> bool:
        """Returns True if clients are trained together, with their networks stacked into one computation."""
        return self.engine == "cohort"

    def __str__(self) -> str:
        """Describes in a sentence how clients are trained, and why."""
        gains = ", ".join(f"{gain:.1f}" for gain in (self.gains or {}).values())
        way = "trained together" if self.uses_cohorts else "trained one by one"
        hint = "; engine=inprocess or pool trains them one by one" if self.uses_cohorts else ""
        return f"engine auto: clients are {way} (measured: {gains} times as fast together){hint}"

    def to_manifest_entry(self) -> dict[str, Any]:
        """Returns the choice as a dict of plain values for the file `manifest.json`.

        >>> EngineChoice.from_manifest_entry(EngineChoice("cohort", {"ab12": 8.5}, ("cd34",)).to_manifest_entry())
        EngineChoice(engine='cohort', gains={'ab12': 8.5}, apart=('cd34',))
        """
        return {**asdict(self), "apart": list(self.apart)}

    @staticmethod
    def from_manifest_entry(entry: Mapping[str, Any]) -> "EngineChoice":
        """Restores the choice from the dict that `to_manifest_entry` returned."""
        return EngineChoice(str(entry["engine"]), entry.get("gains"), tuple(entry.get("apart", ())))


def benchmark_engines(
    settings: Settings,
    algorithm: Algorithm[Any, Any],
    clients: Sequence[Client],
    device: torch.device,
    build_tasks_of_clients: Callable[[Sequence[str]], Sequence[ClientTask]],
) -> EngineChoice:
    """Measures whether clients train faster together (networks stacked) or one by one.

    It should if a round has at least `MIN_CLIENTS` of one architecture, the method's training can be stacked, and two
    steps of it are at least `MIN_SPEEDUP` times as fast together.

    Args:
        settings, algorithm, clients, device: of the run.
        build_tasks_of_clients: returns the tasks of the next round for these client ids. They are started, and
            abandoned where training begins.
    """
    share = settings.count_round_clients(len(clients)) / len(clients)
    if settings.engine != "auto":
        return EngineChoice()
    by_model: dict[int, list[Client]] = {}
    for client in clients:
        by_model.setdefault(id(client.model), []).append(client)
    large_groups = [members[:_TRIED] for members in by_model.values() if len(members) * share >= MIN_CLIENTS]
    gains: dict[str, float] = {}
    for members in large_groups:
        engine = InProcessEngine(algorithm, members, device)
        calls = [_first_fit(engine, task) for task in build_tasks_of_clients([client.id for client in members])]
        fit_calls = [call for call in calls if call is not None]
        if len(fit_calls) == len(members):
            gains[architecture_hash(fit_calls[0].module)] = round(
                measure_speedup_of_joint_training(fit_calls, device), 2
            )
    apart = tuple(sorted(name for name, speedup in gains.items() if speedup < MIN_SPEEDUP))
    return EngineChoice("cohort" if len(apart) < len(gains) else "one by one", gains, apart)


def _first_fit(engine: InProcessEngine, task: ClientTask) -> FitCall | None:
    """Returns the arguments of a client's first call of `fit`; None if that call cannot be stacked."""
    deferred_run = ReplayedCallResults(stop_at_first_call=True)
    try:
        with deferring_calls(deferred_run):
            list(engine.run([task]))
    except CallDeferred:
        pass
    return deferred_run.pending_call if isinstance(deferred_run.pending_call, FitCall) else None


@grad_enabled()
def measure_speedup_of_joint_training(fit_calls: Sequence[FitCall], device: torch.device) -> float:
    """Returns by which factor a step is faster together than one by one; 0 if it cannot be stacked."""
    short_calls = [
        replace(call, options=replace(call.options, local_epochs=1, local_steps=_STEPS)) for call in fit_calls
    ]
    first = short_calls[0]
    if len(group_fit_calls(short_calls)) > 1:
        return 0.0
    for name, parameter in first.module.named_parameters():
        parameter.requires_grad_(name in first.trained_names)

    def train_first() -> None:
        fit(
            first.module, first.examples, first.options, lr=first.lr, seed=first.seed, penalty=first.penalty,
            task=first.task, gradient=first.gradient,
            batches_per_step=first.batches_per_step,
        )  # fmt: skip

    try:
        copy_tensors_into_module(first.module, first.state)
        single_seconds = _measure_seconds(train_first, device)
        if device.type == "cpu" and single_seconds / _STEPS > _LONGEST:
            return 0.0
        return single_seconds * len(fit_calls) / _measure_seconds(lambda: train_cohort(short_calls), device)
    except Exception:  # the run itself reports whatever a network raises
        return 0.0


def _measure_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns how long a function takes: the shortest of several timings, after one warm-up call that fills caches.

    On a CPU it counts this thread's processor seconds, which other programs do not affect.
    """
    clock, timings = time.thread_time if device.type == "cpu" else time.perf_counter, []
    for _ in range(4):
        started = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        timings.append(clock() - started)
    return min(timings[1:])
