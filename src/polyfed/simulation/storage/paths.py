"""Chooses names for files and folders of a run."""

import hashlib
import re
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from polyfed.core.errors import UserError, did_you_mean

COMPARISON_DESCRIPTION = "comparison.yaml"
_DEVICE = r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\.|$)"  # which no file can be called on Windows
_PLAIN = re.compile(rf"(?!\.|{_DEVICE})[a-z0-9_.-]{{1,100}}")
_LONGEST = 100  # file systems allow 255 bytes; a prefix and a suffix are added


def safe_file_name(client: str) -> str:
    """Converts a client id to a text that can safely serve as a file name, different for each id.

    Short lower-case ASCII ids stay unchanged; others get a hash, so that names differ also where a file system ignores
    case or where they had to be shortened. No name begins with a dot, which would hide the file from listings.

    >>> safe_file_name("client-007"), safe_file_name("St. Mary's/north"), safe_file_name("aux")
    ('client-007', 'St.%20Mary%27s%2Fnorth-582fa6f2', 'aux-321f6814')
    """
    if _PLAIN.fullmatch(client):
        return client
    text = quote(client, safe="").replace(".", "%2E") if client.startswith(".") else quote(client, safe="")
    return f"{text[:_LONGEST]}-{hashlib.sha256(client.encode()).hexdigest()[:8]}"


def choose_stored_model(folder: Path, clients: Mapping[str, str], client: str | None, remedy: str = "") -> str:
    """Returns the name of the files with a client's network, or of the only network's.

    Args:
        folder: the run directory, for errors.
        clients: name of the files -> client's id, of all networks in the directory; at least one.
        client: its id; None for the only one.
        remedy: end of the error where none is named: what to give in place of a client.

    Raises:
        UserError: there are several networks and no client is named, or the one that is named has none.

    >>> choose_stored_model(Path("runs/a"), {"north": "north", "south": "south"}, "nort")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: runs/a has no model of client 'nort'; did you mean north? Choices: north, south
    """
    ids = list(map(str, clients.values()))
    if client is None and len(ids) > 1:
        raise UserError(
            f"{folder} has models of several clients; give client=... (--client) with one of {', '.join(ids)}{remedy}"
        )
    name = next(iter(clients)) if client is None else safe_file_name(client)
    if name not in clients:
        raise UserError(f"{folder} has no model of client {client!r}; {did_you_mean(str(client), ids)}")
    return name


def describe_missing_hypernetwork(place: object, method: str) -> str:
    """Returns a sentence that says which method gives weights to unseen clients, as that of `place` does not."""
    return (
        f"{place}: {method} cannot give weights to a network that took no part; use a run of flha_ghn (polyfed run "
        "--algorithm flha_ghn, or polyfed.algorithms.FLHAGHN), which generates them from its layers"
    )


def find_comparison_of_run(folder: Path) -> Path | None:
    """Returns the directory of the comparison to which a run directory belongs; None if it belongs to none."""
    parents = folder.absolute().parents[:3]
    return next((parent for parent in parents if (parent / COMPARISON_DESCRIPTION).exists()), None)


def choose_run_directory(name: str) -> Path:
    """Returns an unused path `runs/NAME-DATE-TIME`, with a number appended if that exists."""
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    tries = (base if i == 0 else base.with_name(f"{base.name}-{i}") for i in range(1000))
    return next(path for path in tries if not path.exists())
