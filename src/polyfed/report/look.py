"""Implements `polyfed.look`: describes the data of several sites before anything is trained."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import expand_user_path
from polyfed.core.io.values.keyword_names import suggest_keywords
from polyfed.data.clients import ClientData
from polyfed.data.look.look import Look, look_at_sites
from polyfed.data.sources.client_source import is_client_source
from polyfed.data.table import ClientTables
from polyfed.report.page.panels.look import write_look_page
from polyfed.simulation.checks.clients.client_list import class_names_of, list_clients
from polyfed.simulation.rounds.columns.federated_look import look_between_sites


@suggest_keywords
def look(
    clients: Iterable[Client | ClientData] | ClientTables,
    *,
    class_names: Sequence[str] = (),
    between_sites: bool = False,
    secure: bool = False,
    seed: int = 0,
    out: str | Path | None = None,
) -> Look:
    """Describes several sites' data side by side, and returns what differs.

    Empty columns, numbers that stand for "not measured", other units, rare classes.

    It reads all examples of each client (for training, validation and test), and shows counts, sums and percentiles of them,
    never a row.

    Args:
        clients: clients, or a table that was divided by `polyfed.data.split_table`.
        class_names: names of the classes; empty for those of a table, or numbers.
        between_sites: whether to show what a deployment would: counts of fewer than five rows hidden, nothing but messages.
        secure: as `between_sites`, and the server sees the sum over all sites alone.
        seed: of the messages.
        out: an HTML page to write.

    Returns:
        The look: `print` shows it, `findings` holds what differs, `table()` a row for each column and site.

    Raises:
        UserError: no client, or an argument that is none; between sites, a client with fewer than five examples.

    >>> from polyfed.testing import small_clients
    >>> look(small_clients(2)).table()[0]["site"]
    'client-0'
    """
    if hasattr(clients, "iloc"):  # a frame, whose items are the names of its columns
        raise UserError(
            "look takes clients (pf.Client) or the tables of pf.data.split_table(rows, target, site), got "
            f"{type(clients).__name__}"
        )
    if is_client_source(clients):
        list_clients(clients)  # which says that it takes a list
    if between_sites or secure:
        client_list = list(clients) if not isinstance(clients, ClientTables) else clients.build_clients(None)
        if odd := [client for client in client_list if not isinstance(client, Client)]:
            raise UserError(f"between sites look takes clients (pf.Client), got {type(odd[0]).__name__}")
        summary = look_between_sites([c for c in client_list if isinstance(c, Client)], seed=seed, secure=secure)
    else:
        if not isinstance(clients, ClientTables):
            clients = list(clients)
            whole_clients = [client for client in clients if isinstance(client, Client)]
            if clients and len(whole_clients) == len(clients):
                shared = list_clients(whole_clients)  # whose labels have common numbers, where they were texts
                clients, class_names = [*shared], class_names or class_names_of(shared) or ()
        summary = look_at_sites(clients, class_names)
    if out is not None:
        write_look_page(summary, expand_user_path(out, "out"))
    return summary
