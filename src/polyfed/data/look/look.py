"""Defines `Look`, a description of the data of several sites side by side, and builds it from data in this process."""

import html
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.data.clients import ClientData
from polyfed.data.look.counts import MIN_COUNT
from polyfed.data.look.findings import SiteDifferenceFinding, find_differences
from polyfed.data.look.site_columns import LookColumn, SiteColumns, read_columns_of_client
from polyfed.data.look.site_statistics import find_identifiers, summarise_sites
from polyfed.data.look.summaries import SiteDataStatistics, SiteSummaries
from polyfed.data.look.text_format import format_look
from polyfed.data.table import ClientTables
from polyfed.data.tabular.columns import sorted_unique_texts


@final
@dataclass(frozen=True)
class Look:
    """Describes the data of several sites side by side by statistics, without any single row; `print` shows it as text.

    Args:
        summaries: columns and statistics of each site.
        findings: what differs between the sites, the most serious first.

    >>> from polyfed.testing import small_clients
    >>> look = look_at_sites(small_clients(2))
    >>> list(look.sites), look.columns[-1].name, look.sites["client-0"].numbers["x0"].missing
    (['client-0', 'client-1'], 'class', 0.0)
    """

    summaries: SiteSummaries
    findings: tuple[SiteDifferenceFinding, ...]

    @classmethod
    def of(cls, summaries: SiteSummaries, identifiers: Collection[str] = ()) -> "Look":
        """Returns the `Look` for these statistics of the sites, with the differences between the sites."""
        return cls(summaries, tuple(find_differences(summaries, identifiers)))

    def __repr__(self) -> str:
        return f"Look({len(self.columns)} columns at {', '.join(list(self.sites)[:5])})"  # shows no data

    def __str__(self) -> str:
        return format_look(self.summaries, self.findings)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    @property
    def columns(self) -> tuple[LookColumn, ...]:
        """Returns the columns of all sites: first the features, then the targets."""
        return self.summaries.columns

    @property
    def sites(self) -> Mapping[str, SiteDataStatistics]:
        """Returns `{site: statistics of its examples}`."""
        return self.summaries.sites

    def table(self) -> list[dict[str, Any]]:
        """Returns a dict per column and site: rows, missing, mean, sd, zeros, percentiles and categories."""
        return self.summaries.table()

    def to_json_dict(self) -> dict[str, Any]:
        """Returns the sites, columns and findings as a dict that can be written as JSON."""
        local = self.summaries.is_local
        return {
            "format": 1,
            "between_sites": not local,
            "smallest_count": 1 if local else MIN_COUNT,
            "sites": {
                name: {"rows": site.rows, "parts": dict(site.parts), "different_tokens": site.different_tokens}
                for name, site in self.sites.items()
            },
            "edges": {name: list(ends) for name, ends in self.summaries.edges.items()},
            "columns": self.table(),
            "findings": [finding.to_json_dict() for finding in self.findings],
        }


def read_columns_by_site(
    clients: Iterable[Client | ClientData] | ClientTables, class_names: Sequence[str] = ()
) -> dict[str, SiteColumns]:
    """Returns `{site: columns}` with the examples of each client as columns.

    Raises:
        UserError: `clients` is empty, or holds something else than clients.
    """
    if isinstance(clients, ClientTables):
        class_names = class_names or clients.class_names
        clients = clients.client_data
    sites: dict[str, SiteColumns] = {}
    for client in clients:
        if not isinstance(client, Client | ClientData):
            raise UserError(
                "look takes clients (pf.Client) or the tables of pf.data.split_table(rows, target, site), got "
                f"{type(client).__name__}"
            )
        if client.id in sites:
            raise UserError(f"two clients are called {client.id!r}; give each another name")
        sites[client.id] = read_columns_of_client(client, class_names)
    if not sites:
        raise UserError("look needs at least one client")
    return {name: sites[name] for name in sorted_unique_texts(list(sites))}


def look_at_sites(
    clients: Iterable[Client | ClientData] | ClientTables,
    class_names: Sequence[str] = (),
    *,
    hide_small_categories: bool = False,
) -> Look:
    """Returns a `Look`, a description of the data of several clients in this process side by side.

    Args:
        clients: clients, or a table that was divided by `polyfed.data.split_table`.
        class_names: names of the classes; empty for those of a table, or numbers.
        hide_small_categories: whether counts of fewer than `MIN_COUNT` rows of a category or class are not shown.
    """
    columns = read_columns_by_site(clients, class_names)
    summaries = summarise_sites(columns, hide_small_categories=hide_small_categories)
    return Look.of(summaries, find_identifiers(columns))
