"""Finds out, before a comparison trains anything, whether its clients suit a method."""

from polyfed.comparison.client_set import ClientSet
from polyfed.comparison.plan import Method, settings_of_method
from polyfed.core.errors import UserError
from polyfed.simulation.checks.method_settings import check_settings_suit_method
from polyfed.simulation.checks.private_training import check_and_complete_privacy
from polyfed.simulation.checks.scheduling import check_scheduling
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.start.preparation import check_method
from polyfed.simulation.settings import Settings
from polyfed.simulation.sources.preparation import build_federation_of_source


def explain_unsuited_method(client_set: ClientSet, method: Method, settings: Settings) -> str | None:
    """Returns why the clients or the settings do not suit a method, as a run would say it in an error; None if they suit
    it."""
    settings = client_set.settings_of_run(method, settings_of_method(settings, method))
    try:
        if client_set.clients_of_run(method) is client_set.source:
            build_federation_of_source(
                client_set.source, method, settings, client_set.public, None
            ).initial_checkpoint()
            return None
        check_method(client_set.clients, method, client_set.public)
        check_settings_suit_method(method, settings, sorted(client.id for client in client_set.clients))
        check_and_complete_privacy(method, client_set.clients, settings.rounds)
        clients = {c.id: c for c in sorted(client_set.clients, key=lambda c: c.id)}
        federation = Federation(clients, method, settings, client_set.public)
        federation.initial_checkpoint()
        check_scheduling(federation)
    except UserError as reason:
        return str(reason)
    return None
