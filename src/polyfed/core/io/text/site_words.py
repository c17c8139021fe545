"""Chooses between the words "site" and "client" in what people read: a comparison asks whether a site should join."""

import re
from collections.abc import Collection, Iterable, Mapping

from polyfed.core.io.text.number_format import join_first_and_count_rest

_SIMULATED = re.compile(r"client-\d+")


def say_sites(text: str) -> str:
    """Writes "site" where a text of a run or comparison says "client", as pages do everywhere.

    >>> say_sites("each client at its own round; client-0 and all clients")
    'each site at its own round; client-0 and all sites'
    """
    return re.sub(r"\bclient(s?)\b(?![-\w])", r"site\1", text)


def say_sites_of(names: Iterable[str], text: str) -> str:
    """Writes "site" as `say_sites` does, unless all names are polyfed's own, as terminals do.

    >>> say_sites_of(["north"], "mean over clients"), say_sites_of(["client-000"], "mean over clients")
    ('mean over sites', 'mean over clients')
    """
    return say_sites(text) if client_heading(names) == "site" else text


def client_heading(names: Iterable[str]) -> str:
    """Returns the heading of a column of names: "site", or "client" if all of them are polyfed's own.

    >>> client_heading(["north", "south"]), client_heading(["client-000", "client-001"])
    ('site', 'client')
    """
    return "client" if all(map(_SIMULATED.fullmatch, names)) else "site"


def name_sites(names: Collection[str], limit: int = 8) -> str:
    """Returns names of clients for a sentence: the first `limit`, and how many more; those without a letter as "site".

    Args:
        names: the clients; a mapping's values follow in brackets.
        limit: how many are written out.

    >>> name_sites(["north"]), name_sites(["1"]), name_sites(["1", "11", "12"], 2), name_sites({"1": "few rows"})
    ('north', 'site 1', 'sites 1, 11 and 1 more', 'site 1 (few rows)')
    """
    word = "" if all(any(map(str.isalpha, name)) for name in names) else "site " if len(names) == 1 else "sites "
    texts = [f"{name} ({text})" for name, text in names.items()] if isinstance(names, Mapping) else list(names)
    return f"{word}{join_first_and_count_rest(texts, limit)}"
