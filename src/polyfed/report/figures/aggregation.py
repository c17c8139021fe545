"""Reads the aggregation weights α (how much each client takes of every other client's layers) that a pFedLA or
HeurpFedLA run stored.

Dimensions: R rounds, N clients, L layers. α[r, i, l, j] is the weight that client i gives to layer l of client j.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import UserError
from polyfed.core.io.array_files import read_npz
from polyfed.core.io.atomic_files import MAX_TEXT_BYTES, expand_user_path

_KEYS = ("alpha", "rows", "layers", "clients")


@final
@dataclass(frozen=True, eq=False)
class AggregationWeights:
    """Holds by round the weight of each client in each layer of every client's network.

    Attributes:
        rounds: the rounds' numbers, (R,), ascending; 0 is before training.
        clients: the N clients' ids, in the order of dimensions 1 and 3 of `alpha`.
        layers: the L layers' names.
        alpha: float32, (R, N, L, N), after each round; a client that is not in a round keeps its last weights.
    """

    rounds: NDArray[np.int64]
    clients: tuple[str, ...]
    layers: tuple[str, ...]
    alpha: NDArray[np.float32]


def read_aggregation_weights(run_directory: str | Path) -> AggregationWeights:
    """Reads the aggregation weights of every round from the files `analysis/round-N.npz` in a run directory.

    Raises:
        UserError: there are no such files, or one of them is damaged or does not fit the others.
    """
    folder = expand_user_path(run_directory, "the run directory") / "analysis"
    files = sorted(folder.glob("round-*.npz"))
    if not files:
        raise UserError(
            f"{run_directory} has no aggregation weights (analysis/round-*.npz); give the run directory of a pfedla or "
            "heur_pfedla run, or the folder baselines/NAME in which one is kept"
        )
    first = _read_weights_file(files[0])
    clients, layers = first["clients"].tolist(), first["layers"].tolist()
    if missing := sorted(set(clients) - set(first["rows"].tolist())):
        raise UserError(
            f"{files[0]} has no weights of client {missing[0]!r}: the file of round 0, which has all, is missing"
        )
    position = {client: i for i, client in enumerate(clients)}
    alpha = np.zeros((len(files), len(clients), len(layers), len(clients)), np.float32)
    for r, file in enumerate(files):
        arrays = first if r == 0 else _read_weights_file(file)
        if arrays["clients"].tolist() != clients or arrays["layers"].tolist() != layers:
            raise UserError(f"{file} has other clients or layers than {files[0].name}; the files are of different runs")
        alpha[r] = alpha[max(r - 1, 0)]
        alpha[r, [position[row] for row in arrays["rows"].tolist()]] = arrays["alpha"]
    rounds = np.array([int(file.stem.removeprefix("round-")) for file in files], np.int64)
    return AggregationWeights(rounds, tuple(clients), tuple(layers), alpha)


def _read_weights_file(file: Path) -> dict[str, NDArray[Any]]:
    """Reads and checks the arrays of one round's file."""
    if not file.stem.removeprefix("round-").isdecimal():
        raise UserError(f"{file} is not named after a round; take it out of the folder")
    try:
        arrays = read_npz(file, _KEYS, MAX_TEXT_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}); restore it, or run again") from error
    if missing := [key for key in _KEYS if key not in arrays]:
        raise UserError(f"{file} has no {missing[0]!r}; it is not of a pfedla or heur_pfedla run")
    rows, layers, clients = arrays["rows"], arrays["layers"], arrays["clients"]
    shape = (len(rows), len(layers), len(clients)) if rows.ndim == layers.ndim == clients.ndim == 1 else None
    if arrays["alpha"].shape != shape or not shape or shape[1] == 0:
        names = " and ".join(f"{key} {arrays[key].shape}" for key in _KEYS)
        raise UserError(f"{file} holds shapes that do not fit: {names}; alpha must be (rows, layers, clients)")
    if not set(rows.tolist()) <= set(clients.tolist()) or not np.isfinite(arrays["alpha"]).all():
        raise UserError(f"{file} is damaged (rows of unknown clients, or weights that are not numbers); run again")
    return arrays


def split_rounds_into_thirds(aggregation: AggregationWeights) -> list[NDArray[np.int64]]:
    """Returns the positions in `aggregation.rounds` of each third of training, without round 0.

    As in the paper's Fig. 5.

    Round 0 is before training and left out. Fewer than three rounds give fewer parts.
    """
    trained = np.flatnonzero(aggregation.rounds > 0)
    rounds = trained if len(trained) else np.arange(len(aggregation.rounds))
    return [part.astype(np.int64) for part in np.array_split(rounds, 3) if len(part)]
