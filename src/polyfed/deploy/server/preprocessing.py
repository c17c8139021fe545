"""Computes at the server, before round 1, one preprocessing for the tables of all sites (`preprocess="federated"`)."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from polyfed.core.errors import UserError
from polyfed.core.io.values.validation import validation_error
from polyfed.core.tasks.task import Task
from polyfed.core.tasks.task_lookup import get_task
from polyfed.data.tabular.harmonise import merge_table_definitions
from polyfed.data.tabular.preprocessing import Column, TablePreprocessor
from polyfed.data.tabular.schema import read_schema
from polyfed.deploy.protocol.table_summary import SchemaSummary
from polyfed.deploy.protocol.wire import SERVER_HEAD_BYTES, SITE_HEAD_BYTES, Envelope, PackedEnvelope, parse_head
from polyfed.deploy.server.reply_validation import sanitize_line
from polyfed.deploy.server.server import DeploymentServer
from polyfed.simulation.rounds.client_registry import ClientRegistry
from polyfed.simulation.rounds.columns.federated_preprocessing import (
    Moments,
    build_column_moments_settings,
    build_moments_method,
    run_moments_rounds,
)
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.replies.secure_aggregation import disclosures_to_allow

_MAX_COLUMNS = 5000  # of a table
_MAX_NAME_LENGTH = 200  # characters of a column's name or of a category


class MessageExchangeEngine(Protocol):
    """Describes an engine that exchanges messages of any kind with the sites, besides training and evaluation tasks."""

    def bind_federation(self, federation: Federation) -> None:
        """Sets the federation whose tasks this engine will execute."""

    def exchange(
        self, envelopes: Mapping[str, Envelope], round_number: int
    ) -> Iterator[tuple[str, PackedEnvelope | str]]:
        """Sends a message to each site, and yields (site, reply, or reason as text) as replies arrive."""


def compute_common_preprocessing_with_sites(
    server: DeploymentServer,
    introductions: Mapping[str, Mapping[str, Any]],
    build_engine: Callable[[DeploymentServer], Any],
) -> DeploymentServer:
    """Computes one preprocessing for all tables, and returns a server with it, if a site asks.

    Args:
        server: the server of a run that has not begun.
        introductions: header of each site's introduction.
        build_engine: builds the engine (`MessageExchangeEngine`) of a server.

    Returns:
        The server with the preprocessing; `server` itself if no site asks for one.

    Raises:
        UserError: only some sites ask for it, their tables differ, one refuses, or consent is missing.
        ClientError: a site's reply cannot be used.
    """
    asking_sites = sorted(i for i in introductions if introductions[i].get("prepares") is True)
    if not asking_sites:
        return server
    if other_sites := sorted(set(introductions) - set(asking_sites)):
        raise UserError(
            f"site {asking_sites[0]!r} asks for preprocessing from sums over all sites (preprocess='federated'), and "
            f"{other_sites[0]!r} does not; all sites of a run need the same"
        )
    secure, deployment = server.settings.secure, server.deployment
    if not deployment.allow_disclosure and disclosures_to_allow(Moments(), secure):
        raise UserError(
            "preprocess='federated' discloses counts, means and variances of the sites' columns to the server; if they "
            "agree, allow it: polyfed flower run DIR --allow-disclosure, and allow-disclosure=true at each site"
        )
    # The threshold was set for the sites of a round; here all sites take part.
    if (deployment.secure_threshold or 0) <= len(introductions) // 2:
        deployment = replace(deployment, secure_threshold=None)
    settings = build_column_moments_settings(server.settings.seed, secure)
    moments_server = replace(
        server, algorithm=Moments(), settings=settings, run=f"{server.run}-tables", deployment=deployment
    )
    merged_table, sends_names = _merge_tables(
        _collect_schema_summaries(moments_server, asking_sites, build_engine(moments_server))
    )
    moments_server = replace(moments_server, algorithm=build_moments_method(merged_table))
    engine = build_engine(moments_server)
    federation = Federation(
        {}, moments_server.algorithm, settings, remote_clients=ClientRegistry(tuple(asking_sites), merged_table.task)
    )
    engine.bind_federation(federation)
    moments_result = run_moments_rounds(federation, engine, merged_table)
    fields = moments_result.prepared.to_json_dict()
    common: dict[str, Any] = {
        "columns": fields["columns"] if sends_names else None, "classes": fields["classes"] if sends_names else None,
        "mean": fields["mean"], "spread": fields["spread"], "target": fields["target"],
    }  # fmt: skip
    if (size := len(json.dumps(common))) > SERVER_HEAD_BYTES - SITE_HEAD_BYTES:
        raise UserError(
            f"the columns and categories of all sites take {size / 2**10:.0f} kB, more than a message may; agree on a "
            "schema with fewer (pf.data.split_table(..., schema=FILE), see docs/tabular/several_files.md)"
        )
    return replace(server, preprocessing=common, preprocessing_facts=moments_result.facts)


def _collect_schema_summaries(
    server: DeploymentServer, sites: list[str], engine: MessageExchangeEngine
) -> dict[str, tuple[SchemaSummary, Any]]:
    """Requests from each site a summary of its table, and returns (summary, kind of task) by site."""
    summaries: dict[str, tuple[SchemaSummary, Any]] = {}
    envelopes = {
        site: Envelope({**server.build_introduction_request_header(), "kind": "prepare", "client": site})
        for site in sites
    }
    for site, answer in engine.exchange(envelopes, 0):
        try:
            head: dict[str, Any] = {"refused": answer} if isinstance(answer, str) else parse_head(answer.head)
            reason = sanitize_line(head["refused"]) if head.get("refused") else _schema_summary_error(head.get("table"))
        except (UserError, ValueError, TypeError, KeyError) as error:
            reason = sanitize_line(error)
        if reason:
            raise UserError(f"site {site!r} does not take part: {reason}")
        summaries[site] = head["table"], head.get("task")
    return dict(sorted(summaries.items()))


def _schema_summary_error(table: Any) -> str:
    """Returns why a site's table summary is not valid; "" if it is valid."""
    if error_text := validation_error(table, SchemaSummary):
        return f"its summary of its table cannot be read: {error_text}"
    if {"whole", "numbers", "targets"} - table.keys():
        return "it sends no summary of its table"
    if not (0 <= table["numbers"] <= _MAX_COLUMNS and 0 <= table["targets"] <= _MAX_COLUMNS):
        return f"its table has {table['numbers']} columns of numbers; at most {_MAX_COLUMNS} are read"
    if "schema" not in table:
        return ""
    schema = read_schema(table["schema"])
    if len(schema.columns) > _MAX_COLUMNS:
        return f"its table has {len(schema.columns)} columns; at most {_MAX_COLUMNS} are read"
    lists = [[column.name for column in schema.columns], schema.classes, *(c.categories or () for c in schema.columns)]
    if any(len(set(names)) < len(names) for names in lists):
        return "columns, classes or categories of its table have a name twice"
    if any(not name.isprintable() or len(name) > _MAX_NAME_LENGTH for names in lists for name in names):
        return f"a name in its table has characters that cannot be printed, or more than {_MAX_NAME_LENGTH}"
    if (len(schema.mean), build_moments_method(schema).size) != (table["numbers"], table["numbers"] + table["targets"]):
        return "its table has another number of numeric columns than it reports"
    return ""


def _merge_tables(tables: Mapping[str, tuple[SchemaSummary, Any]]) -> tuple[TablePreprocessor, bool]:
    """Builds the sites' common table, and says whether tables differ and sites need its columns."""
    summaries = {site: table for site, (table, _) in tables.items()}
    first = next(iter(summaries.values()))
    are_equal = all({**summary, "schema": 0} == {**first, "schema": 0} for summary in summaries.values())
    if not are_equal:
        if without := [site for site, summary in summaries.items() if "schema" not in summary]:
            raise UserError(
                f"the tables of the sites differ in columns, categories or classes, and {without[0]!r} does not "
                "send its names: allow-disclosure, or disclose=columns, lets it (if they take less than "
                f"{SITE_HEAD_BYTES // 2**10} kB); or agree on one schema, pf.data.split_table(..., schema=FILE), see "
                "docs/tabular/several_files.md"
            )
        return merge_table_definitions(
            {site: read_schema(summary["schema"]) for site, summary in summaries.items()}
        ), True
    columns = tuple(Column(str(number)) for number in range(first["numbers"]))
    targets = tuple(map(str, range(first["targets"])))
    task = next(iter(tables.values()))[1]
    common_table = TablePreprocessor(
        columns, (0.0,) * len(columns), (1.0,) * len(columns), (), "federated", targets, _task_of_sites(task)
    )
    return common_table, False


def _task_of_sites(spec: Any) -> Task:
    try:
        return get_task(spec)
    except UserError as error:
        raise UserError(
            f"a site reports the task {str(spec)[:200]!r}, which this server cannot build: {error}"
        ) from error
