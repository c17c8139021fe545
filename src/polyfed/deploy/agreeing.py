"""Sites of tables agree on one preprocessing before round 1 (`preprocess="federated"`), by the messages of a run.

1. Each site tells a hash of its columns, categories and classes, and, where its owner lets names go, these themselves
   (`Described`). Where the hashes differ the server needs the names, and merges them.
2. Two rounds of the method `Moments`, as a run of its own with the same checks, and secure sums if the run has them.
3. The result goes with the introduction of the run to each site, which keeps it, and prepares and codes its rows by it.

So a site that comes back, and a run that is resumed, know it already, and nothing is asked twice.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypedDict

from polyfed.algorithms import name_of
from polyfed.core.algorithm import CONSENT, Client
from polyfed.core.errors import UserError
from polyfed.core.files import make_folder, read_file, read_text_file, replace_file
from polyfed.core.typed import conforms, from_json
from polyfed.data.common import merged, prepared_of, sums
from polyfed.data.features import Column, Prepared, from_description
from polyfed.data.schema import read_schema, schema_of
from polyfed.deploy.privacy import Protection
from polyfed.deploy.private import NotItsOwnError
from polyfed.deploy.replies import one_line
from polyfed.deploy.secure import RefusalError
from polyfed.deploy.server import Server
from polyfed.deploy.tables import hashed
from polyfed.deploy.wire import HEAD_BYTES, ORDER_BYTES, Letter, Packed, plain_head
from polyfed.simulation.preparing import Moments, fitted_on, method_for, settings_for, with_prepared
from polyfed.simulation.roster import Roster
from polyfed.simulation.rounds import Federation
from polyfed.simulation.secure import disclosed

MOMENTS = name_of(Moments())
_FEWEST = 5  # rows with a value that a sum is told of
_FILE = "preprocessing.json"
_MOST_COLUMNS, _LONGEST = 5000, 200  # of a table, characters of a name or category
_ROOM = 4096  # of a head, for what else it holds


class Described(TypedDict, total=False):
    """What a site tells of its table: a hash of all; how many columns of numbers and targets it has; its schema."""

    whole: str
    numbers: int
    targets: int
    schema: dict[str, Any]


class _Common(TypedDict):
    """What the server tells: columns and classes where those of the sites differ, and what was fitted."""

    columns: list[dict[str, Any]] | None
    classes: list[str] | None
    mean: list[float]
    spread: list[float]
    target: list[list[float]]


# -- site -------------------------------------------------------------------------------------------------------------


def asks_for_sums(client: Client) -> bool:
    """Whether a site's examples are of a table that is prepared by sums over all sites."""
    return isinstance(client.train.transform, Prepared) and client.train.transform.scope == "federated"


def check_sums(client: Client, protection: Protection, *, secure: bool) -> None:
    """Raises a `RefusalError` if sums of the site's rows are not to leave it."""
    if not asks_for_sums(client):
        raise RefusalError("its data do not ask for preprocessing from sums over all sites (preprocess='federated')")
    if protection.noise_multiplier or protection.clip_norm is not None:
        raise RefusalError(
            "its table asks for preprocess='federated', whose sums would leave it without its noise and "
            "clipping; preprocess='site' sends none"
        )
    count, _ = sums(client.train)
    if not secure and bool(((count > 0) & (count < _FEWEST)).any()):
        raise RefusalError(
            f"a column of its table has values in fewer than {_FEWEST} training rows, which their sum would nearly "
            "tell; leave that column out, or take preprocess='site' or secure sums"
        )


def described(client: Client, run: str, *, named: bool) -> Described:
    """What a site tells of its table.

    Args:
        client: with examples of it.
        run: its identifier, which enters the hash.
        named: whether names of columns, categories and classes go up. They do not if they are too long to be read.
    """
    own = prepared_of(client.train)
    told: Described = {
        "whole": hashed(run, schema_of(own)), "numbers": len(own.mean),
        "targets": method_for(own).size - len(own.mean),
    }  # fmt: skip
    if named and len(json.dumps(schema_of(own))) < HEAD_BYTES - _ROOM:
        told["schema"] = schema_of(own)
    return told


def keep_agreed(folder: Path, told: Any, client: Client) -> None:
    """Writes down what the server says that sites have agreed on, for the run of this folder.

    Raises:
        RefusalError: it is not that of the run, or does not suit the site's table.
    """
    file = folder / _FILE
    try:
        common_of(prepared_of(client.train), told)
    except UserError as error:
        raise RefusalError("the common preprocessing does not suit its table (its log tells why)") from error
    text = json.dumps(told)
    if not file.exists():
        make_folder(folder, parents=True)
        replace_file(file, text.encode())
    elif read_text_file(file) != text:
        raise RefusalError("the common preprocessing is not that with which it began this run")


def as_agreed(client: Client, folder: Path) -> Client:
    """The client, its table prepared as the sites have agreed on for the run of this folder.

    Raises:
        NotItsOwnError: nothing was agreed on, or what was written is damaged.
    """
    file = folder / _FILE
    try:
        return with_prepared(client, common_of(prepared_of(client.train), from_json(read_file(file))))
    except (OSError, ValueError, UserError) as error:
        raise NotItsOwnError(
            f"the common preprocessing of this run, {folder.name}/{_FILE}, is lost or damaged"
        ) from error


def common_of(own: Prepared, told: Any) -> Prepared:
    """The common preprocessing, of a site with this table.

    Raises:
        UserError: it holds what is none.

    >>> own = Prepared((Column("age"),), (61.0,), (1.0,), (), "federated", ("no", "yes"))
    >>> common_of(own, {"columns": None, "classes": None, "mean": [50.0], "spread": [9.0], "target": []}).mean
    (50.0,)
    """
    if wrong := conforms(told, _Common):
        raise UserError(f"this is no preprocessing of a table: {wrong}")
    numbers = [*told["mean"], *told["spread"], *(number for pair in told["target"] for number in pair)]
    if not all(map(math.isfinite, numbers)) or any(len(pair) != 2 for pair in told["target"]):
        raise UserError("this is no preprocessing of a table: its numbers are not finite, or not in pairs")
    known = own.described()
    given = {name: known[name] if told[name] is None else told[name] for name in ("columns", "classes")}
    return from_description({**known, **told, **given, "scope": "federated"})


# -- server -----------------------------------------------------------------------------------------------------------


class Asking(Protocol):
    """An engine that carries letters besides tasks."""

    def follow(self, federation: Federation) -> None:
        """Learns which federation its tasks are of."""

    def exchange(self, letters: Mapping[str, Letter], number: int) -> Iterator[tuple[str, Packed | str]]:
        """Sends a letter to each site, for a round, and yields what comes of it."""


def prepared_together(
    server: Server, told: Mapping[str, Mapping[str, Any]], engine_of: Callable[[Server], Any]
) -> Server:
    """The server that knows the preprocessing that its sites have agreed on; itself where they ask for none.

    Args:
        server: of a run that has not begun.
        told: what the sites have said of themselves.
        engine_of: makes the engine (`Asking`) of a server.

    Raises:
        UserError: only some sites ask for it, their tables differ, one refuses, or consent is missing.
        ClientError: what a site sent cannot be used.
    """
    asking = sorted(i for i in told if told[i].get("prepares") is True)
    if not asking:
        return server
    if others := sorted(set(told) - set(asking)):
        raise UserError(
            f"site {asking[0]!r} asks for preprocessing from sums over all sites (preprocess='federated'), and "
            f"{others[0]!r} does not; all sites of a run need the same"
        )
    secure, deployment = server.settings.secure, server.deployment
    if not deployment.allow_disclosure and disclosed(Moments(), secure) & CONSENT:
        raise UserError(
            "preprocess='federated' discloses counts, means and variances of the sites' columns to the server; if they "
            "agree, allow it: polyfed flower run DIR --allow-disclosure, and allow-disclosure=true at each site"
        )
    if (deployment.secure_threshold or 0) <= len(told) // 2:  # it was for the sites of a round, and here are all
        deployment = replace(deployment, secure_threshold=None)
    settings = settings_for(server.settings.seed, secure)
    before = replace(server, algorithm=Moments(), settings=settings, run=f"{server.run}-tables", deployment=deployment)
    like, names = _common_table(_tables(before, asking, engine_of(before)))
    before = replace(before, algorithm=method_for(like))
    engine = engine_of(before)
    federation = Federation({}, before.algorithm, settings, told=Roster(tuple(asking), like.task))
    engine.follow(federation)
    found = fitted_on(federation, engine, like)
    fitted = found.prepared.described()
    common: dict[str, Any] = {
        "columns": fitted["columns"] if names else None, "classes": fitted["classes"] if names else None,
        "mean": fitted["mean"], "spread": fitted["spread"], "target": fitted["target"],
    }  # fmt: skip
    if (size := len(json.dumps(common))) > ORDER_BYTES - HEAD_BYTES:
        raise UserError(
            f"the columns and categories of all sites take {size / 2**10:.0f} kB, more than a message may; agree on a "
            "schema with fewer (pf.data.table(..., schema=FILE), see docs/tabular.md)"
        )
    return replace(server, prepared=common, preparation=found.facts)


def _tables(server: Server, sites: list[str], engine: Asking) -> dict[str, tuple[Described, str]]:
    """What each site tells of its table, and its task."""
    found: dict[str, tuple[Described, str]] = {}
    letters = {site: Letter({**server.introduction(), "kind": "prepare", "client": site}) for site in sites}
    for site, answer in engine.exchange(letters, 0):
        try:
            head: dict[str, Any] = {"refused": answer} if isinstance(answer, str) else plain_head(answer.head)
            reason = one_line(head["refused"]) if head.get("refused") else _flaw(head.get("table"))
        except (UserError, ValueError, TypeError, KeyError) as error:
            reason = one_line(error)
        if reason:
            raise UserError(f"site {site!r} does not take part: {reason}")
        found[site] = head["table"], str(head.get("task"))
    return dict(sorted(found.items()))


def _flaw(table: Any) -> str:
    """Why what a site tells is no table; empty if it is one."""
    if wrong := conforms(table, Described):
        return f"what it tells of its table cannot be read: {wrong}"
    if {"whole", "numbers", "targets"} - table.keys():
        return "it does not tell what its table is like"
    if not (0 <= table["numbers"] <= _MOST_COLUMNS and 0 <= table["targets"] <= _MOST_COLUMNS):
        return f"its table has {table['numbers']} columns of numbers; at most {_MOST_COLUMNS} are read"
    if "schema" not in table:
        return ""
    known = read_schema(table["schema"])
    if len(known.columns) > _MOST_COLUMNS:
        return f"its table has {len(known.columns)} columns; at most {_MOST_COLUMNS} are read"
    lists = [[column.name for column in known.columns], known.classes, *(c.categories or () for c in known.columns)]
    if any(len(set(names)) < len(names) for names in lists):
        return "columns, classes or categories of its table have a name twice"
    if any(not name.isprintable() or len(name) > _LONGEST for names in lists for name in names):
        return f"a name in its table has characters that cannot be printed, or more than {_LONGEST}"
    if (len(known.mean), method_for(known).size) != (table["numbers"], table["numbers"] + table["targets"]):
        return "its table has other columns of numbers than it tells"
    return ""


def _common_table(tables: Mapping[str, tuple[Described, str]]) -> tuple[Prepared, bool]:
    """The table of all sites, and whether they must be told its names: not where all have the same."""
    told = {site: table for site, (table, _) in tables.items()}
    first = next(iter(told.values()))
    same = all({**one, "schema": 0} == {**first, "schema": 0} for one in told.values())
    if not same:
        if without := [site for site, one in told.items() if "schema" not in one]:
            raise UserError(
                f"the tables of the sites have other columns, categories or classes, and {without[0]!r} does not "
                "tell its own: allow-disclosure, or disclose=columns, lets it (if they take less than "
                f"{HEAD_BYTES // 2**10} kB); or agree on one schema, pf.data.table(..., schema=FILE), see docs/tabular.md"
            )
        return merged({site: read_schema(one["schema"]) for site, one in told.items()}), True
    columns = tuple(Column(str(number)) for number in range(first["numbers"]))
    targets = tuple(map(str, range(first["targets"])))
    task = next(iter(tables.values()))[1]
    like = Prepared(columns, (0.0,) * len(columns), (1.0,) * len(columns), (), "federated", targets, _task(task))
    return like, False


def _task(told: str) -> Any:
    if told not in ("classification", "multilabel", "regression"):
        raise UserError(f"sites have one task, and one tells {told[:40]!r}")
    return told
