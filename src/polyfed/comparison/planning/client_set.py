"""Defines `ClientSet`, the clients of the runs of one seed: a list, or a source and its clients that are evaluated."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, final

from polyfed.algorithms import Local
from polyfed.comparison.planning.evaluation_panel import draw_panel
from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.data.sources.client_source import ClientSource
from polyfed.simulation.checks.fingerprints import data_fingerprint
from polyfed.simulation.settings import SCHEDULING_FIELDS, Settings
from polyfed.simulation.sources.source_clients import SourceClients

MOST_EVALUATED = 10_000
"""How many clients of a source a comparison evaluates at most: it keeps them in memory, with their scores in every run."""


@final
@dataclasses.dataclass(frozen=True)
class ClientSet:
    """Holds the clients that take part in the runs of one seed, and the public examples, if there are any.

    Attributes:
        clients: all clients of a list; of a source those that are evaluated.
        public: examples that are no client's.
        class_names: one per class, where labels were given as texts.
        config, facts: for `config.yaml` and `manifest.json` of the runs.
        source: makes the clients that train, if they are made when they are drawn; None for a list.
    """

    clients: tuple[Client, ...]
    public: Examples | None = None
    class_names: tuple[str, ...] | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: ClientSource | None = None

    @cached_property
    def ids(self) -> Sequence[str]:
        """Returns the ids of all clients, those that are not evaluated too."""
        return [client.id for client in self.clients] if self.source is None else SourceClients(self.source).ids

    def clients_of_run(self, method: Algorithm[Any, Any]) -> tuple[Client, ...] | ClientSource:
        """Returns the clients of a method's runs, or their source; for `Local` only those evaluated."""
        return self.clients if self.source is None or isinstance(method, Local) else self.source

    def settings_of_run(self, method: Algorithm[Any, Any], settings: Settings) -> Settings:
        """Returns a method's settings; over a source each evaluated client trains alone in every round."""
        if self.source is None:
            return settings
        settings = dataclasses.replace(settings, evaluate_clients=tuple(client.id for client in self.clients))
        if not isinstance(method, Local):
            return settings
        defaults = {
            name: getattr(Settings(), name) for name in (*SCHEDULING_FIELDS, "clients_per_round", "min_replies")
        }
        return dataclasses.replace(settings, **defaults)

    def fingerprint_of_run(self, method: Algorithm[Any, Any] | None = None) -> str:
        """Returns the fingerprint of the clients in a method's runs; without a method, that of all clients."""
        return self._fingerprint_of_clients if isinstance(method, Local) else self._fingerprint

    @cached_property
    def _fingerprint_of_clients(self) -> str:
        return data_fingerprint(self.clients, self.public)

    @cached_property
    def _fingerprint(self) -> str:
        if self.source is None:
            return self._fingerprint_of_clients
        return SourceClients(self.source).fingerprint(self.public)


def make_client_set_of_source(
    source: ClientSource,
    settings: Settings,
    public: Examples | None,
    first_seed: int,
    *,
    divides_examples: bool,
    searches: bool,
) -> ClientSet:
    """Makes the evaluated clients of a source once for all runs; others are made when drawn.

    Args:
        source: makes the clients.
        settings: of the runs; `evaluate_clients` says how many are evaluated, or which.
        public: examples that are no client's.
        first_seed: draws the clients.
        divides_examples: whether the comparison divides examples again (`folds`, `resplit`).
        searches: whether it searches hyper-parameters.

    Raises:
        UserError: too many clients to be evaluated, no validation examples to search with, or examples are divided again.
    """
    if divides_examples:
        raise UserError(
            "folds and resplit divide the examples of all clients again before round 1, and a source makes each client when "
            "it is drawn; leave them out, or give a list of clients"
        )
    clients = SourceClients(source)
    panel = draw_panel(settings, clients.ids, first_seed, divides_examples=False).clients or clients.ids
    if len(panel) > MOST_EVALUATED:
        raise UserError(
            f"a comparison keeps the clients that it evaluates, and {len(panel)} of the {len(clients.ids)} of the source "
            f"are too many; give evaluate_clients=200, say (at most {MOST_EVALUATED})"
        )
    evaluated = tuple(clients[client] for client in panel)
    if searches and (client := next((client for client in evaluated if client.val is None), None)) is not None:
        raise UserError(
            f"hyper-parameters are searched on validation examples, and client {client.id!r} of the source has none; make "
            "clients with val=... (val_fraction=0.2 of polyfed's sources), or give tune='none'"
        )
    return ClientSet(evaluated, public, evaluated[0].train.classes, source=source)
