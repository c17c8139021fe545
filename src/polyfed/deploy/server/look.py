"""Looks at the data of all sites from the server (summary statistics of each column), before round 1 and with the
consent of each site.
"""

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import create_private_folder_if_missing, write_file_atomically
from polyfed.data.look.look import Look
from polyfed.data.look.site_columns import LookColumn, merge_columns
from polyfed.deploy.protocol.wire import SERVER_HEAD_BYTES, SITE_HEAD_BYTES, Envelope, parse_head
from polyfed.deploy.server.preprocessing import MessageExchangeEngine
from polyfed.deploy.server.reply_validation import sanitize_line
from polyfed.deploy.server.server import DeploymentServer
from polyfed.report.page.panels.look import write_look_page
from polyfed.simulation.rounds.client_registry import ClientRegistry
from polyfed.simulation.rounds.columns.federated_look import (
    FederatedLook,
    build_look_method,
    build_look_settings,
    columns_from_json,
    run_look_rounds,
)
from polyfed.simulation.rounds.federation import Federation

_LOG = logging.getLogger("polyfed.server")
_MAX_COLUMNS, _MAX_NAME_LENGTH = 2000, 200  # of a site; characters of a name or category


def look_at_data(
    server: DeploymentServer,
    introductions: Mapping[str, Mapping[str, Any]],
    build_engine: Callable[[DeploymentServer], Any],
) -> Look | None:
    """Collects, logs and writes sites' summary statistics if the operator asks for it; or None.

    The files are `OUT-look.json` and `OUT-look.html`.

    Args:
        server: the server of a run.
        introductions: header of each site's introduction.
        build_engine: builds the engine (`MessageExchangeEngine`) of a server.

    Returns:
        The look; None if it was not asked for, or the run is resumed.

    Raises:
        UserError: a site does not consent, or has too few examples.
        ClientError: a site's reply cannot be used.
    """
    deployment = server.deployment
    if not deployment.look or deployment.resume:
        return None
    secure = server.settings.secure
    if (deployment.secure_threshold or 0) <= len(introductions) // 2:  # it was set for the sites of a round
        deployment = dataclasses.replace(deployment, secure_threshold=None)
    look_server = dataclasses.replace(
        server,
        algorithm=FederatedLook(by_site=not secure),
        settings=build_look_settings(server.settings.seed, secure),
        run=f"{server.run}-look",
        deployment=deployment,
    )
    columns = _collect_columns(look_server, sorted(introductions), build_engine(look_server))
    look_server = dataclasses.replace(look_server, algorithm=build_look_method(columns, secure))
    if (size := len(json.dumps(look_server.algorithm.columns))) > SERVER_HEAD_BYTES - SITE_HEAD_BYTES:  # type: ignore[attr-defined]
        raise UserError(
            f"the columns and categories of all sites take {size / 2**10:.0f} kB, more than a message may; leave look out"
        )
    engine = build_engine(look_server)
    tasks = {str(introduction.get("task")) for introduction in introductions.values()}
    registry = ClientRegistry(tuple(sorted(introductions)), next(iter(tasks)))  # type: ignore[arg-type]  # compared later
    federation = Federation({}, look_server.algorithm, look_server.settings, remote_clients=registry)
    engine.bind_federation(federation)
    summary = run_look_rounds(federation, engine, columns)
    for line in str(summary).splitlines():
        _LOG.info("%s", line)
    out = server.deployment.out
    if not out.parent.exists():
        create_private_folder_if_missing(out.parent, parents=True)
    write_file_atomically(
        out.with_name(f"{out.name}-look.json"),
        json.dumps(summary.to_json_dict(), ensure_ascii=False, indent=1).encode(),
    )
    write_look_page(summary, out.with_name(f"{out.name}-look.html"))
    return summary


def _collect_columns(
    server: DeploymentServer, sites: list[str], engine: MessageExchangeEngine
) -> tuple[LookColumn, ...]:
    """Requests from each site the names and categories of its columns, and returns those of all sites."""
    by_site: dict[str, tuple[LookColumn, ...]] = {}
    envelopes = {
        site: Envelope({**server.build_introduction_request_header(), "kind": "look", "client": site}) for site in sites
    }
    for site, answer in engine.exchange(envelopes, 0):
        try:
            head: dict[str, Any] = {"refused": answer} if isinstance(answer, str) else parse_head(answer.head)
            if head.get("refused"):
                raise UserError(str(head["refused"]))
            by_site[site] = columns_from_json(str(head["columns"]))
            _check_names(by_site[site])
        except (UserError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"site {site!r} shows no look at its data: {sanitize_line(error)}") from error
    return merge_columns([by_site[site] for site in sorted(by_site)])


def _check_names(columns: tuple[LookColumn, ...]) -> None:
    if len(columns) > _MAX_COLUMNS:
        raise UserError(f"it has {len(columns)} columns; at most {_MAX_COLUMNS} are read")
    names = [name for column in columns for name in (column.name, *(column.values or ()))]
    if any(not name.isprintable() or len(name) > _MAX_NAME_LENGTH for name in names):
        raise UserError(f"a name has characters that cannot be printed, or more than {_MAX_NAME_LENGTH}")
