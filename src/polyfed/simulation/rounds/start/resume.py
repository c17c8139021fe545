"""Finds the checkpoint from which a run is resumed: the newest that is intact and belongs to the run."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

from polyfed.algorithms import registry_name
from polyfed.core.errors import UserError
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.start.state_validation import StateValidator
from polyfed.simulation.storage import integrity
from polyfed.simulation.storage.checkpoints import checkpoint as checkpoints
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.simulation.storage.directory import RunDirectory, read_config, read_metrics, read_metrics_text


@final
class RewoundRun(NamedTuple):
    """Holds the checkpoint from which a run resumes (None for a new one), and the records up to it."""

    checkpoint: Checkpoint | None
    records: list[dict[str, Any]]


def rewind_to_newest_checkpoint(directory: RunDirectory, federation: Federation) -> RewoundRun:
    """Loads the newest usable checkpoint of a run, and removes everything newer from the run directory.

    If the run keeps another round than the last, the checkpoint of that round must be whole too.

    Raises:
        UserError: there are checkpoints, but none is usable.
    """
    metrics = directory.path / "metrics.jsonl"
    records, config = read_metrics(metrics), read_config(directory.path)
    integrity.check_config_unchanged(directory.path, config, directory.read_manifest())
    expected = integrity.expected_run_hashes_by_round(config, directory.read_manifest(), read_metrics_text(metrics))

    validators: list[StateValidator] = []  # built once, if there is a checkpoint

    def check(checkpoint: Checkpoint) -> None:
        validators.extend([StateValidator(federation)] if not validators else [])
        kept_checkpoint = None
        if federation.settings.keep != "last":
            kept_checkpoint = load_kept_checkpoint(
                directory, federation, records[: checkpoint.round], checkpoint, expected
            )
        for state in (
            [checkpoint] if kept_checkpoint is None or kept_checkpoint is checkpoint else [checkpoint, kept_checkpoint]
        ):
            unevaluated = [] if state.unevaluated_record is None else [state.unevaluated_record]
            if error_text := validators[0].state_error(state, [*records[: state.last_recorded_round], *unevaluated]):
                raise UserError(
                    f"the checkpoint of round {state.round} in {directory.checkpoint_folder} is not what "
                    f"{registry_name(federation.algorithm)} wrote for these clients: {error_text}"
                )

    start, notes = checkpoints.load_newest_checkpoint(
        directory.checkpoint_folder, directory.last_complete_round(), check, expected, directory.state_store
    )
    if start is None and notes:
        raise UserError(
            f"no checkpoint of the run in {directory.path} is whole and of a round that metrics.jsonl reaches: "
            f"{'; '.join(notes)}. Put a copy of what was lost back, or delete the folder "
            f"{directory.checkpoint_folder}: then the run starts again from round 1"
        )
    history = directory.truncate_metrics_after(0 if start is None else start.last_recorded_round)
    checkpoints.remove_newer_checkpoints(
        directory.checkpoint_folder, 0 if start is None else start.round, directory.state_store
    )
    for note in notes:
        warnings.warn(f"{note}; the one before it is used", RuntimeWarning, stacklevel=3)
    return RewoundRun(start, history)


def load_kept_checkpoint(
    directory: RunDirectory,
    federation: Federation,
    history: Sequence[Mapping[str, Any]],
    latest: Checkpoint,
    expected_run_hashes_of_round: Callable[[int], integrity.RunHashes] | None = None,
) -> Checkpoint | None:
    """Loads the checkpoint after the round whose models the setting `keep` selects; None if it selects no round yet.

    Args:
        directory, federation: of the run.
        history: the records up to `latest`.
        latest: the newest checkpoint, which is returned if its round is the one.
        expected_run_hashes_of_round: the binding that a checkpoint of a round must have.

    Returns:
        The state; None if no round so far is to be kept.

    Raises:
        UserError: its checkpoint is damaged.
    """
    keep = federation.settings.keep
    kept_round = keep if isinstance(keep, int) else federation.best_round(history)
    if kept_round is None or kept_round >= latest.round:
        return latest if kept_round == latest.round else None
    return checkpoints.load_round_checkpoint(
        directory.checkpoint_folder, kept_round, expected_run_hashes_of_round, directory.state_store
    )
