"""Chooses the replies that lie closest to the others: Krum and multi-Krum."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.io.values.number_checks import is_whole_number
from polyfed.core.robust.rule import CombiningRule, check_same_form_and_sort_ids, names_of_distances, stack_as_double
from polyfed.core.state_dict import StateDict, weighted_mean


def krum_scores(tensors_by_client: Mapping[str, StateDict], liars: int) -> dict[str, float]:
    """Returns each client's score: the sum of the squared distances to the n − f − 2 closest other replies.

    s(i) = Σ_{i→j} ‖V_i − V_j‖² (Blanchard et al. 2017, section 4), over all floating-point tensors together; whole
    numbers, such as counters of BatchNorm, do not count.

    Args:
        tensors_by_client: client id -> tensors, at least f + 3 clients.
        liars: f.
    """
    ids = check_same_form_and_sort_ids(tensors_by_client)
    squares = torch.zeros(len(ids), len(ids), dtype=torch.float64)
    for name in names_of_distances(tensors_by_client[ids[0]]):
        rows = stack_as_double(tensors_by_client, ids, name).cpu()
        for i in range(len(ids) - 1):
            # Differences first: products of large vectors would lose the small distances between them.
            squares[i, i + 1 :] += (rows[i + 1 :] - rows[i]).square().sum(dim=1)
    squares = squares + squares.T
    squares.fill_diagonal_(torch.inf)
    closest = squares.sort(dim=1).values[:, : len(ids) - liars - 2]
    return dict(zip(ids, closest.sum(dim=1).tolist(), strict=True))


def _check_liars(word: str, liars: int) -> None:
    if not is_whole_number(liars, 1):
        raise UserError(f"robust='{word}:F' takes the number of lying clients F, a whole number from 1, got {liars!r}")


def _client_count_error(liars: int, num_clients: int) -> str | None:
    if num_clients >= 2 * liars + 3:
        return None
    most = (num_clients - 3) // 2
    cure = f"bear at most {most} (robust='krum:{most}')" if most >= 1 else "take robust='median' or 'clip'"
    return (
        f"it needs at least 2f + 3 = {2 * liars + 3} clients a round to bear f = {liars} lying ones, and a round has "
        f"{num_clients}; {cure}"
    )


@final
@dataclass(frozen=True)
class Krum(CombiningRule):
    """Takes the one reply that is closest to the others.

    Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient
    Descent", NeurIPS 2017, section 4: Kr = V_i* with i* = argmin_i s(i), s as in `krum_scores`; of equal scores the
    first id. It bears f lying clients of n ≥ 2f + 3. The paper has no weights.

    Args:
        liars: f, the number of lying clients that it bears.

    >>> Krum().client_count_error(5), Krum(2).client_count_error(5)
    (None, "it needs at least 2f + 3 = 7 clients a round to bear f = 2 lying ones, and a round has 5; bear at most 1
    (robust='krum:1')")
    """

    liars: int = 1
    word: ClassVar[str] = "krum"

    def __post_init__(self) -> None:
        _check_liars(self.word, self.liars)

    def __str__(self) -> str:
        return f"{self.word}:{self.liars}"

    def client_count_error(self, num_clients: int) -> str | None:
        """Returns why Krum cannot choose among so few clients; None if it can."""
        return _client_count_error(self.liars, num_clients)

    def combine(self, tensors_by_client: Mapping[str, StateDict], weights: Mapping[str, float]) -> dict[str, Tensor]:
        """Returns the tensors of the client with the least score."""
        scores = krum_scores(tensors_by_client, self.liars)
        return dict(tensors_by_client[min(scores, key=lambda i: (scores[i], i))])


@final
@dataclass(frozen=True)
class MultiKrum(CombiningRule):
    """Averages the replies that are closest to the others.

    Blanchard et al. 2017, section 6 ("Multi-Krum"): the unweighted mean of the m replies with the least scores s.

    Args:
        liars: f, the number of lying clients that it bears.
        chosen: m, the number of replies that are averaged; None takes n − f.

    >>> str(MultiKrum()), str(MultiKrum(2, 4))
    ('multi_krum:1', 'multi_krum:2,4')
    """

    liars: int = 1
    chosen: int | None = None
    word: ClassVar[str] = "multi_krum"

    def __post_init__(self) -> None:
        _check_liars(self.word, self.liars)
        m = self.chosen
        if m is not None and not is_whole_number(m, 1):
            raise UserError(f"robust='multi_krum:F,M' averages M replies, a whole number from 1, got {m!r}")

    def __str__(self) -> str:
        return f"{self.word}:{self.liars}" + ("" if self.chosen is None else f",{self.chosen}")

    def client_count_error(self, num_clients: int) -> str | None:
        """Returns why multi-Krum cannot choose among so few clients; None if it can."""
        most = num_clients - self.liars
        if self.chosen is not None and self.chosen > most:
            return f"it averages {self.chosen} replies, and only n − f = {most} of {num_clients} may be honest"
        return _client_count_error(self.liars, num_clients)

    def combine(self, tensors_by_client: Mapping[str, StateDict], weights: Mapping[str, float]) -> dict[str, Tensor]:
        """Returns the unweighted mean of the tensors of the clients with the least scores."""
        scores = krum_scores(tensors_by_client, self.liars)
        order = sorted(scores, key=lambda i: (scores[i], i))
        best = order[: self.chosen or len(order) - self.liars]
        return weighted_mean({i: tensors_by_client[i] for i in best})
