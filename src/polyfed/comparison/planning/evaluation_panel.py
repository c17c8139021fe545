"""Draws the clients that every run of a comparison evaluates, where not all are evaluated."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import final

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.io.text.number_format import count_with_noun
from polyfed.core.io.text.site_words import name_sites
from polyfed.data.partitioning.folds import describe_small_clients
from polyfed.simulation.rounds.planning.evaluation_sample import check_evaluation_sample, draw_clients
from polyfed.simulation.settings import Settings


@final
@dataclasses.dataclass(frozen=True)
class EvaluationPanel:
    """Holds the clients that all runs of a comparison evaluate: the same with every method and seed, and in each round.

    Attributes:
        clients: their ids, sorted; empty if all clients are evaluated.
        population: the number of clients from which they were drawn at random; None if they were not drawn.
        too_small: client id -> how many examples it has, of those that are too small for folds: they only train.
    """

    clients: tuple[str, ...] = ()
    population: int | None = None
    too_small: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def settings_of_run(self, settings: Settings) -> Settings:
        """Returns the settings of one run, which evaluates the clients of the panel."""
        return dataclasses.replace(settings, evaluate_clients=self.clients) if self.clients else settings

    def select(self, clients: Sequence[Client]) -> list[Client]:
        """Returns those of the clients that are evaluated."""
        return [client for client in clients if not self.clients or client.id in self.clients]

    def without_small_clients(self, clients: Sequence[Client], num_folds: int) -> "EvaluationPanel":
        """Returns the panel without clients that are too small for folds.

        Raises:
            UserError: none is left.
        """
        too_small = describe_small_clients(self.select(clients), num_folds)
        large = tuple(sorted(client.id for client in self.select(clients) if client.id not in too_small))
        if not large:
            raise UserError(f"folds={num_folds} (--folds {num_folds}) are too many for the clients that are evaluated, "
                            f"{name_sites(too_small)}; give fewer folds, or evaluate larger clients")  # fmt: skip
        return EvaluationPanel(large, None, too_small) if too_small else self

    def describe(self) -> str:
        """Returns a sentence on which clients were evaluated; "" if all were.

        >>> EvaluationPanel(("north", "south"), None, {"tiny": "3 examples"}).describe()
        'tiny (3 examples) is too small for folds: it trains and is not tested; means are over 2 other clients.'

        >>> EvaluationPanel(("north", "south"), 50).describe()[:58]
        '2 of 50 clients, drawn at random, were evaluated, the same'
        """
        if not self.clients:
            return ""
        if self.too_small:
            verb, train = ("is", "it trains") if len(self.too_small) == 1 else ("are", "they train")
            return (
                f"{name_sites(self.too_small)} {verb} too small for folds: {train} and {verb} not tested; means are over "
                f"{count_with_noun(len(self.clients), 'other client')}."
            )
        if self.population is None:
            return f"Only the clients {', '.join(self.clients)} were evaluated; means are over these."
        return (
            f"{len(self.clients)} of {self.population} clients, drawn at random, were evaluated, the same with every "
            "method, seed and round. The intervals of means are of all clients: they cover the draw too."
        )


def draw_panel(settings: Settings, client_ids: Sequence[str], seed: int, *, divides_examples: bool) -> EvaluationPanel:
    """Draws the clients that a comparison evaluates, from its first seed.

    Args:
        settings: of the runs.
        client_ids: of all clients.
        seed: the first seed.
        divides_examples: whether the comparison divides examples again (`folds`, `resplit`).

    Raises:
        UserError: more clients than there are, an unknown id, or settings that exclude one another.

    >>> draw_panel(Settings(evaluate_clients=2), ["a", "b", "c", "d"], seed=0, divides_examples=False).population
    4
    """
    ids = sorted(client_ids)
    check_evaluation_sample(settings, ids)
    number = settings.count_evaluated(len(ids))
    if number == len(ids):
        return EvaluationPanel()
    if settings.evaluate_all_at_end:
        raise UserError("evaluate_all_at_end: a comparison evaluates the same clients in every round; leave it out")
    if isinstance(settings.evaluate_clients, tuple):
        return EvaluationPanel(tuple(sorted(settings.evaluate_clients)))
    if divides_examples:
        raise UserError(
            f"evaluate_clients={settings.evaluate_clients} draws some of many clients, and folds and resplit divide the few "
            "examples of each client again; leave one of the two out"
        )
    return EvaluationPanel(tuple(draw_clients(ids, number, seed, 0)), len(ids))
