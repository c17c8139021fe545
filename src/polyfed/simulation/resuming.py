"""Where a run goes on: the newest checkpoint that belongs to it and can be used."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyfed.core.errors import UserError
from polyfed.simulation.forms import Forms, explained
from polyfed.simulation.rounds import Federation
from polyfed.simulation.runs import chain
from polyfed.simulation.runs import checkpoint as checkpoints
from polyfed.simulation.runs.checkpoint import Checkpoint
from polyfed.simulation.runs.directory import RunDirectory, read_config, read_metrics, read_text


def go_back(directory: RunDirectory, federation: Federation) -> tuple[Checkpoint | None, list[dict[str, Any]]]:
    """The newest checkpoint of a run that can be used and the records up to it; what is newer is removed from its
    directory. If another round than the last is kept, its checkpoint must be whole too. No checkpoint: the run begins anew.

    Raises:
        UserError: there are checkpoints, but none is whole.
    """
    metrics = directory.path / "metrics.jsonl"
    records, config = read_metrics(metrics), read_config(directory.path)
    chain.check_config(directory.path, config, directory.manifest())
    expected = chain.expected_at(config, directory.manifest(), read_text(metrics))

    forms: list[Forms] = []  # made once, if there is a checkpoint

    def check(found: Checkpoint) -> None:
        forms.extend([Forms(federation)] if not forms else [])
        kept = None
        if federation.settings.keep != "last":
            kept = kept_state(directory, federation, records[: found.round], found, expected)
        for state in [found] if kept is None or kept is found else [found, kept]:
            waiting = [] if state.unfinished is None else [state.unfinished]
            if wrong := forms[0].flaw(state, [*records[: state.recorded], *waiting]):
                raise UserError(explained(wrong, directory.checkpoints, federation, state.round))

    start, notes = checkpoints.load(directory.checkpoints, directory.rounds_told(), check, expected)
    if start is None and notes:
        raise UserError(
            f"no checkpoint of the run in {directory.path} is whole and of a round that metrics.jsonl reaches: "
            f"{'; '.join(notes)}. Put a copy of what was lost back, or delete the folder {directory.checkpoints}: then the "
            "run starts again from round 1"
        )
    history = directory.keep_rounds(0 if start is None else start.recorded)
    checkpoints.drop_newer(directory.checkpoints, 0 if start is None else start.round)
    for note in notes:
        warnings.warn(f"{note}; the one before it is used", RuntimeWarning, stacklevel=3)
    return start, history


def kept_state(
    directory: RunDirectory,
    federation: Federation,
    history: Sequence[Mapping[str, Any]],
    now: Checkpoint,
    expected: Callable[[int], chain.Binding] | None = None,
) -> Checkpoint | None:
    """The state after the round that is kept, of these; None if there is none yet.

    Raises:
        UserError: its checkpoint is damaged.
    """
    keep = federation.settings.keep
    kept = keep if isinstance(keep, int) else federation.best_round(history)
    if kept is None or kept >= now.round:
        return now if kept == now.round else None
    return checkpoints.load_round(directory.checkpoints, kept, expected)
