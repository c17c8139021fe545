"""Stores predictions, which are the outputs of the evaluated networks for each client's test and validation examples,
by round.

During a run, each evaluated round is one file in `predictions/.rounds`; at the end they become one Parquet file for
each client, `predictions/ID.parquet`. All evaluated rounds are kept as long as they take at most `LIMIT_BYTES`
together; beyond that, only the round with the best validation score and the last one. A round of more than
`LARGEST_BYTES` is not kept.
"""

import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import safetensors.torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.io.array_files import read_safetensors
from polyfed.core.io.atomic_files import (
    UNLIMITED_BYTES,
    create_private_folder_if_missing,
    expand_user_path,
    flush_files_to_disk,
    open_file,
    write_file_atomically,
)
from polyfed.data.partitioning.group_split import group_numbers
from polyfed.simulation.storage.directory import read_config, read_metrics
from polyfed.simulation.storage.paths import safe_file_name
from polyfed.simulation.storage.predictions import predictions_parquet

LIMIT_BYTES = 64 * 2**20  # of all evaluated rounds together
LARGEST_BYTES = 256 * 2**20  # of one round
FOLDER = "predictions"
_SPOOL, _OLD, _NEW = ".rounds", ".rounds-old", ".rounds-new"

OutputsByClient = Mapping[str, Mapping[str, Tensor]]  # client -> "test" or "val" -> (n, ...)


@final
@dataclass(frozen=True, eq=False)
class Predictions:
    """Holds the outputs of one client's personal network after a round, with the targets of the same examples.

    Attributes:
        round: counted from 1.
        outputs: of the network (logits; numbers for regression), float32, shape (n, ...).
        targets: of the same examples, shape (n,) of classes, (n, labels) or (n, outputs).
        columns: further columns of the same examples (`Examples.columns`), each of shape (n,), without groups and times.
        groups: anonymous number of the group of each example (`Examples.group`), shape (n,); None without groups.
    """

    round: int
    outputs: Tensor
    targets: Tensor
    columns: Mapping[str, NDArray[Any]]
    groups: NDArray[np.int64] | None = None

    def __repr__(self) -> str:
        return f"Predictions(round {self.round}, {len(self.targets)} examples)"  # and no targets


def read_predictions(folder: str | Path, client: str, *, split: str = "test", round: int | None = None) -> Predictions:
    """Reads the predictions of one client after a round from a run directory.

    Args:
        folder: of a run that has ended.
        client: its id.
        split: "test" or "val".
        round: None takes the one that the run keeps (`keep`).

    Raises:
        UserError: there are no predictions for this client, split or round, or the file is damaged.
    """
    file = _predictions_file(folder, client)
    available = predictions_parquet.list_rounds_in_file(file, split)
    chosen_round = _default_round(Path(folder), available) if round is None else round
    if chosen_round not in available:
        raise UserError(missing_predictions_message(client, split, chosen_round, available))
    return Predictions(chosen_round, *predictions_parquet.read_outputs_and_targets(file, split, chosen_round))


def missing_predictions_message(client: str, split: str, round: int | None, available: Sequence[int]) -> str:
    """Returns the error message for predictions that were not stored; it lists the rounds that were, if there are any."""
    if not available:
        return f"no predictions of client {client!r} on its {split} examples were kept"
    return f"no predictions of client {client!r} after round {round} were kept; give one of {', '.join(map(str, available))}"


def _default_round(folder: Path, available: Sequence[int]) -> int | None:
    """Returns the round that the run keeps; if it is not available, the last one that is; None if none is."""
    keep = read_config(folder).get("keep") if (folder / "config.yaml").exists() else None
    if isinstance(keep, int):
        return keep
    if keep in ("best", "loss"):
        records = read_metrics(folder / "metrics.jsonl")
        best = records[-1].get("best_round") if records else None
        if best is not None:
            return int(best)
    return available[-1] if available else None


def _predictions_file(folder: str | Path, client: str) -> Path:
    file = expand_user_path(folder, "the run directory") / FOLDER / f"{safe_file_name(client)}.parquet"
    if not file.is_file():
        raise UserError(
            f"{file} is missing: predictions are written when a run ends, for clients that could be evaluated; see "
            f"{Path(folder) / 'metrics.jsonl'}"
        )
    return file


@final
class PredictionStore:
    """Stores the predictions of all clients during a run: in the run directory, or in memory if the run has none.

    Args:
        clients: client id -> client; empty in a deployment, whose sites keep their own predictions.
        folder: the run directory, or None.
    """

    def __init__(self, clients: Mapping[str, Client], folder: Path | None = None) -> None:
        self._clients = clients
        self._memory: dict[int, OutputsByClient] = {}
        self._folder = None if folder is None else folder / FOLDER
        self._sizes: dict[int, int] = {}
        self._keeps_all = True  # whether all evaluated rounds are kept
        self._has_warned = False

    def load_history_and_remove_later_rounds(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Loads the stored predictions of the rounds in `history`, and removes those of later rounds."""
        if self._folder is None:
            return
        last_round = history[-1]["round"] if history else 0
        for name in (_OLD, _NEW):
            shutil.rmtree(self._folder / name, ignore_errors=True)
        spool = self._folder / _SPOOL
        if not spool.is_dir() and history and self._folder.is_dir():
            self._restore_rounds(last_round)
        for file in sorted(spool.glob("round-*.safetensors")):
            number = file.stem.removeprefix("round-")
            if not number.isdecimal() or int(number) > last_round:
                file.unlink()
            else:
                self._sizes[int(number)] = _num_bytes(file)
        evaluated = {r["round"] for r in history if any("loss" in row for row in r["clients"].values())}
        self._keeps_all = evaluated <= self._sizes.keys() and sum(self._sizes.values()) <= LIMIT_BYTES

    def store_round_or_explain(
        self, round_number: int, outputs_by_client: OutputsByClient, best_round: int | None
    ) -> str | None:
        """Stores a round's predictions, and removes others for room; says once if it is too large.

        Args:
            round_number: the round.
            outputs_by_client: of each client that could be evaluated.
            best_round: the round with the best validation score so far.
        """
        size = sum(t.nbytes for outputs in outputs_by_client.values() for t in outputs.values())
        if not size:
            return None
        rows = max(len(t) for outputs in outputs_by_client.values() for t in outputs.values())
        # Half of the rows, since the last and the best round are kept.
        if too_large := size > LARGEST_BYTES or rows > predictions_parquet.MOST_ROWS // 2:
            self._keeps_all = False
        else:
            self._write(round_number, outputs_by_client)
            self._sizes[round_number] = size
            self._keeps_all = self._keeps_all and sum(self._sizes.values()) <= LIMIT_BYTES
        if not self._keeps_all:
            for dropped_round in [n for n in self._sizes if n not in (round_number, best_round)]:
                self._drop(dropped_round)
        if not too_large or self._has_warned:
            return None
        self._has_warned = True
        return (
            f"the predictions of a round take {size / 2**20:.0f} MiB, with up to {rows} examples of one client, and at most "
            f"{LARGEST_BYTES >> 20} MiB or {predictions_parquet.MOST_ROWS // 2} examples are kept, so that there are none "
            "of this run"
        )

    def write_one_file_per_client(self) -> None:
        """Writes all rounds to one Parquet file for each client, and removes the rounds' files."""
        if self._folder is None or not (self._folder / _SPOOL).is_dir():
            return  # nothing was kept, or everything is written already
        self._write_files_of_clients(self._folder, {number: self._read(number) for number in sorted(self._sizes)})
        # Renamed first: a folder that is removed half must not be mistaken for a complete one.
        (self._folder / _SPOOL).rename(self._folder / _OLD)
        shutil.rmtree(self._folder / _OLD)

    def _write_files_of_clients(self, folder: Path, outputs_by_round: Mapping[int, OutputsByClient]) -> None:
        files = []
        predicted_ids = {client for outputs in outputs_by_round.values() for client in outputs}
        for client in sorted(predicted_ids & self._clients.keys()):
            client_outputs = {
                number: outputs[client] for number, outputs in outputs_by_round.items() if client in outputs
            }
            files.append(folder / f"{safe_file_name(client)}.parquet")
            predictions_parquet.write_outputs_of_client(files[-1], self._clients[client], client_outputs)
        flush_files_to_disk(files)

    def write_memory_to_run_directory(self, folder: Path) -> None:
        """Writes the rounds that are in memory to a run directory, one Parquet file for each client."""
        if self._memory:
            self._write_files_of_clients(create_private_folder_if_missing(folder / FOLDER), self._memory)

    def get_predictions(self, client: str, split: str, round: int) -> Predictions:
        """Returns the stored predictions of a client after a round.

        Raises:
            UserError: the predictions were not kept, or their file is damaged.
        """
        if self._folder is not None:
            return read_predictions(self._folder.parent, client, split=split, round=round)
        if split not in predictions_parquet.SPLITS:
            raise UserError(f"split must be 'test' or 'val', got {split!r}")
        available = sorted(
            n for n, outputs_by_client in self._memory.items() if split in outputs_by_client.get(client, {})
        )
        if round not in available:
            raise UserError(missing_predictions_message(client, split, round, available))
        examples = getattr(self._clients[client], split)
        columns = {name: examples.column(name) for name in examples.columns_for_subgroup_scores}
        outputs = self._memory[round][client][split]
        targets = self._clients[client].task.stored_targets(examples.labels.cpu(), outputs)
        return Predictions(round, outputs, targets, columns, group_numbers(examples))

    # -- one round ------------------------------------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / _SPOOL / f"round-{number:06d}.safetensors"

    def _write(self, number: int, outputs_by_client: OutputsByClient) -> None:
        if self._folder is None:
            self._memory[number] = outputs_by_client
            return
        path = self._path(number)
        create_private_folder_if_missing(path.parent.parent)
        create_private_folder_if_missing(path.parent)
        write_file_atomically(path, _encode_outputs(outputs_by_client))

    def _read(self, number: int) -> OutputsByClient:
        try:
            tensors = read_safetensors(self._path(number))
        except (OSError, ValueError) as error:
            warnings.warn(f"{self._path(number)} is damaged and left out ({error})", RuntimeWarning, stacklevel=4)
            return {}
        outputs_by_client: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            split, _, client = name.partition("/")
            outputs_by_client.setdefault(client, {})[split] = tensor
        return outputs_by_client

    def _drop(self, number: int) -> None:
        del self._sizes[number]
        if self._folder is None:
            del self._memory[number]
        else:
            self._path(number).unlink(missing_ok=True)

    def _restore_rounds(self, last_round: int) -> None:
        """Restores the rounds' files from the Parquet files, for an ended run that lost its last rounds."""
        assert self._folder is not None
        outputs_by_round: dict[int, dict[str, dict[str, Tensor]]] = {}
        names = {file.name for file in self._folder.glob("*.parquet")}
        for client in self._clients:
            file = self._folder / f"{safe_file_name(client)}.parquet"
            if file.name not in names or not file.is_file():
                continue
            try:
                for split in predictions_parquet.SPLITS:
                    for number in predictions_parquet.list_rounds_in_file(file, split):
                        outputs = predictions_parquet.read_outputs_and_targets(file, split, number)[0]
                        outputs_by_round.setdefault(number, {}).setdefault(client, {})[split] = outputs
            except UserError as error:
                warnings.warn(f"{error}; its rounds are left out", RuntimeWarning, stacklevel=5)
        if not outputs_by_round or max(outputs_by_round) <= last_round:
            return  # it is complete
        new = create_private_folder_if_missing(self._folder / _NEW)
        for number, round_outputs in outputs_by_round.items():
            write_file_atomically(new / self._path(number).name, _encode_outputs(round_outputs))
        new.rename(self._folder / _SPOOL)


def _encode_outputs(outputs_by_client: OutputsByClient) -> bytes:
    tensors = {
        f"{split}/{client}": t.contiguous()
        for client, outputs in outputs_by_client.items()
        for split, t in outputs.items()
    }
    return bytes(safetensors.torch.save(tensors))


def _num_bytes(file: Path) -> int:
    """Returns the bytes of a safetensors file's tensors, without its header."""
    with open_file(file, UNLIMITED_BYTES) as opened:
        return max(0, os.fstat(opened.fileno()).st_size - 8 - int.from_bytes(opened.read(8), "little"))
