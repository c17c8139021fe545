"""Chooses once, for a run with `engine="auto"`, whether clients are trained together; the file `manifest.json` records
the choice.
"""

from collections.abc import Sequence

from polyfed.simulation.engines.base import ClientTask
from polyfed.simulation.engines.benchmark import EngineChoice, benchmark_engines
from polyfed.simulation.engines.devices import choose_client_device
from polyfed.simulation.monitoring.progress import Progress
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.sources.source_clients import SourceClients
from polyfed.simulation.storage.checkpoint import Checkpoint
from polyfed.simulation.storage.directory import RunDirectory


def resolve_auto_engine(
    federation: Federation, checkpoint: Checkpoint, directory: RunDirectory | None, progress: Progress
) -> EngineChoice:
    """Chooses, for `engine="auto"`, whether clients are trained together or one by one: a resumed run keeps its earlier
    choice, a new run measures both.

    Args:
        federation: of the run.
        checkpoint: the state from which the run begins or continues.
        directory: of the run, or None; its manifest holds the choice.
        progress: shows the measurement.
    """
    settings = federation.settings
    is_source = isinstance(federation.clients, SourceClients)  # whose clients are not made to measure
    if settings.engine != "auto" or checkpoint.round == settings.rounds or is_source:
        return EngineChoice()
    manifest = {} if directory is None else directory.read_manifest()
    if "auto" in manifest:
        return EngineChoice.from_manifest_entry(manifest["auto"])

    def tasks(ids: Sequence[str]) -> list[ClientTask]:
        return [
            task
            for block in federation.build_task_blocks("local", ids, checkpoint.round + 1, checkpoint)
            for task in block
        ]

    clients, device = list(federation.clients.values()), choose_client_device(settings)
    choice = benchmark_engines(settings, federation.algorithm, clients, device, tasks)
    if choice.gains:
        progress.say(str(choice))
    if directory is not None:
        directory.add_to_manifest({"auto": choice.to_manifest_entry()})
    return choice
