"""Builds Flower's ServerApp and ClientApp, which run polyfed's server and sites."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from polyfed.core.errors import ClientError, RoundError, UserError
from polyfed.deploy.flower.engine import FlowerEngine, SiteRegistry
from polyfed.deploy.flower.envelopes import envelope_to_record, packed_envelope_from_record
from polyfed.deploy.flower.private_api import try_to_shorten_reply_polling
from polyfed.deploy.logs import send_logs_to_stderr
from polyfed.deploy.protocol.wire import SERVER_HEAD_BYTES, Envelope
from polyfed.deploy.server.look import look_at_data
from polyfed.deploy.server.preprocessing import compute_common_preprocessing_with_sites
from polyfed.deploy.server.server_config import build_or_restore_server
from polyfed.deploy.site.process.node_config import answer_or_refuse_message, build_site
from polyfed.simulation.monitoring.progress import LineProgress, Progress
from polyfed.simulation.results.run import Run

_LOG = logging.getLogger("polyfed.server")


def run_deployment(grid: Grid, config: Mapping[str, Any], progress: Progress | None = None) -> Run:
    """Runs a whole federated training with the sites that are connected through Flower, and returns the finished run.

    Args:
        grid: Flower's connection to the SuperNodes.
        config: the configuration (`polyfed.deploy.server.server_config.build_or_restore_server`).
        progress: displays the rounds; None prints a line for each.

    Raises:
        UserError: the configuration is not valid, sites are missing, or one refuses.
        ClientError, RoundError: as `federate`.
    """
    server = build_or_restore_server(config)
    sites = SiteRegistry(
        grid, server.deployment.sites, server.build_introduction_request_header(), server.first_introductions
    )
    introductions = sites.wait_for_all_introductions(server.deployment.join_seconds)
    look_at_data(server, introductions, partial(FlowerEngine, grid, sites))
    prepared_server = compute_common_preprocessing_with_sites(server, introductions, partial(FlowerEngine, grid, sites))
    if prepared_server is not server:  # sites are introduced again, with the preprocessing
        server = prepared_server
        sites = SiteRegistry(
            grid, server.deployment.sites, server.build_introduction_request_header(), server.first_introductions
        )
        introductions = sites.wait_for_all_introductions(server.deployment.join_seconds)
    federation, engine = server.build_checked_federation(introductions), FlowerEngine(grid, sites, server)
    engine.bind_federation(federation)
    return server.run_or_resume_federation(federation, engine, progress or LineProgress(norms=True), introductions)


def server_app(config: Callable[[Context], Mapping[str, Any]] = lambda context: context.run_config) -> ServerApp:
    """Returns the Flower ServerApp that runs a project's server: `app = server_app()`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        send_logs_to_stderr()
        try_to_shorten_reply_polling()
        try:
            run_deployment(grid, config(context))
        except (UserError, ClientError, RoundError) as error:
            _LOG.error("%s", " ".join(str(error).split()))
            raise

    return app


def client_app() -> ClientApp:
    """Returns the ClientApp that answers for the site of the SuperNode's node configuration."""
    app = ClientApp()

    def answer(message: FlowerMessage, context: Context) -> FlowerMessage:
        return FlowerMessage(envelope_to_record(_answer_flower_message(message, context.node_config)), reply_to=message)

    for register in (app.query, app.train, app.evaluate):
        register()(answer)
    return app


def _answer_flower_message(message: FlowerMessage, config: Mapping[str, Any]) -> Envelope:
    send_logs_to_stderr()
    return answer_or_refuse_message(
        config, lambda: build_site(config), lambda: packed_envelope_from_record(message.content, SERVER_HEAD_BYTES)
    )
