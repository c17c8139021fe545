"""Prepares a run whose clients are those of a source: checks all that can be checked before a client is drawn."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from polyfed.algorithms import registry_name
from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.methods.capabilities import BringsNetwork
from polyfed.core.nn.module_cache import cached_module
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.precision import check_precision
from polyfed.data.sources.client_source import ClientSource
from polyfed.graphs.catalogue import LayerCatalogue
from polyfed.graphs.client_graph import graph_of_client
from polyfed.graphs.contraction import ContractionOptions
from polyfed.simulation.checks import requirements
from polyfed.simulation.checks.fingerprints import data_fingerprint
from polyfed.simulation.checks.settings.method_settings import check_settings_suit_method
from polyfed.simulation.checks.settings.scheduling import check_scheduling
from polyfed.simulation.checks.settings.training_options import check_training_options
from polyfed.simulation.engines.devices import choose_client_device
from polyfed.simulation.rounds.client_registry import ClientRegistry
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.scheduling.sampling.sampler import Sampler
from polyfed.simulation.settings import Settings
from polyfed.simulation.sources.drawn_client import DrawnClientChecker, make_client
from polyfed.simulation.sources.per_client import ValueByClient
from polyfed.simulation.sources.source_clients import SourceClients
from polyfed.simulation.storage.configuration import resolve_or_restore_metrics

_MANY = 10_000


def build_federation_of_source(
    source: ClientSource,
    algorithm: Algorithm[Any, Any],
    settings: Settings,
    public: Examples | None,
    metrics: Any,
    resumed: str | Path | None = None,
    sampler: Sampler | None = None,
) -> Federation:
    """Builds a run's `Federation` over a source, and checks it by its first client.

    Args:
        source: makes the clients.
        algorithm, settings, public, metrics, resumed, sampler: as for `check_and_build_federation`.

    Raises:
        UserError: something does not fit, or needs to know all clients before round 1.
    """
    clients = SourceClients(source)
    first = make_client(source, clients.first)
    _check_makes_the_same_again(source, first)
    _check_suits_source(algorithm, settings, len(clients))
    requirements.check_clients([first])
    settings, scores = resolve_or_restore_metrics(settings, metrics, first.task, resumed)
    if settings.keep in ("best", "loss") and first.val is None:
        raise UserError(
            f"keep={settings.keep!r} needs validation examples, and client {first.id!r} has none: give val=..."
        )
    if not isinstance(algorithm, BringsNetwork):
        requirements.check_networks_run([first])
    requirements.check_requirements([first], algorithm, public)
    check_settings_suit_method(algorithm, settings, clients.ids)
    device = choose_client_device(settings)
    if isinstance(algorithm, LocalTraining):
        check_precision(algorithm.precision, device)
        check_training_options([first], algorithm)
    registry = _build_registry(clients, first, algorithm)
    network = None
    if isinstance(algorithm, BringsNetwork) and registry.data_spec is not None:
        network = algorithm.network_for(registry.data_spec)
        requirements.check_networks_run([first], factory=network)
    checker = DrawnClientChecker(
        source, algorithm, first, network, registry.data_spec, registry.num_examples, registry.architectures
    )
    checker.check_number_of_examples(first)
    clients.checker = checker
    federation = Federation(clients, algorithm, settings, public, registry, scores, sampler=sampler)
    check_scheduling(federation)
    return federation


def _check_makes_the_same_again(source: ClientSource, first: Client) -> None:
    """Raises a `UserError` if a source makes another client the second time, by a draw without a seed, say."""
    if data_fingerprint([first], None) != data_fingerprint([make_client(source, first.id)], None):
        raise UserError(
            f"the source makes client {first.id!r} with other data the second time, so that neither engines nor a resumed "
            "run would see the same; draw splits and noise from a seed and the client's id"
        )


def _check_suits_source(algorithm: Algorithm[Any, Any], settings: Settings, num_clients: int) -> None:
    """Raises a `UserError` for methods and settings that need to know every client before round 1, or in each round."""
    name = registry_name(algorithm)
    if "everyone_trains" in algorithm.traits:
        raise UserError(f"{name} trains every client in every round, which a source of clients is not for; give a list")
    if isinstance(algorithm, LocalTraining) and algorithm.privacy is not None:
        raise UserError("privacy needs the numbers of examples of all clients before round 1; give a list of clients")
    if settings.keep == "loss" and not isinstance(settings.evaluate_clients, tuple):
        raise UserError(
            "keep='loss' needs the numbers of validation examples of all clients that are evaluated; name them, as in "
            "evaluate_clients=['a', 'b'], give a list of clients, or keep='last'"
        )
    if settings.cross_site:
        raise UserError("cross_site scores every client's model at every client; give a list of clients")
    if settings.count_evaluated(num_clients) == num_clients > _MANY:
        warnings.warn(
            f"all {num_clients} clients of the source are made and evaluated after every evaluated round; "
            "evaluate_clients=1000 evaluates a sample",
            RuntimeWarning,
            stacklevel=5,
        )


def _build_registry(clients: SourceClients, first: Client, algorithm: Algorithm[Any, Any]) -> ClientRegistry:
    """Builds what the server knows of the clients, from the first client and the source's manifest."""
    registry_of_first = ClientRegistry.from_clients([first], algorithm.requires)
    models, architectures, catalogue = (
        registry_of_first.models,
        registry_of_first.architectures,
        registry_of_first.layer_catalogue,
    )
    factories = tuple(clients.manifest.models) or ((first.model,) if first.model is not None else ())
    if models:
        keys = [cached_module(factory).architecture for factory in factories]
        models = dict(zip(keys, factories, strict=True))
        architectures = ValueByClient(clients.ids, partial(_key_of_client, keys, clients.model_of, clients.ids))
    if catalogue is not None and len(factories) > 1:
        contraction = ContractionOptions("layers" if "norms_in_layers" in algorithm.requires else "nodes")
        catalogue = LayerCatalogue.from_graphs(
            graph_of_client(replace(first, model=factory), contraction=contraction) for factory in factories
        )
    return ClientRegistry(
        clients.ids, first.task, clients.num_examples, architectures, models, catalogue, registry_of_first.data_spec
    )


def _key_of_client(keys: list[str], model_of: Mapping[str, int], ids: tuple[str, ...], place: int) -> str:
    """Returns the key of the architecture of the client at a place of the sorted ids."""
    return keys[model_of[ids[place]]] if model_of else keys[0]
