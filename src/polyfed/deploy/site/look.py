"""Answers the server's request for summary statistics of a site's data: only with its owner's consent, and without
counts of few rows.
"""

from collections.abc import Mapping
from typing import Any

from polyfed.algorithms import registry_name
from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import UserError
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.protocol.wire import Envelope
from polyfed.simulation.rounds.columns.federated_look import (
    FederatedLook,
    columns_from_json,
    columns_to_json,
    read_columns_if_enough_examples,
)

LOOK_NAME = registry_name(FederatedLook())
LOOK = "look"  # an entry of `disclose`


def build_look_if_owner_allows(
    fields: Mapping[str, Any], *, secure: bool, consents: bool, protection: ReplyProtection
) -> FederatedLook:
    """Builds the method that computes summary statistics of the site's data from the fields that the server sends;
    raises a `RefusalError` if the site's owner does not allow it.

    Raises:
        RefusalError: the owner has not consented, the site adds noise or clips, or the server asks for counts of few rows.
    """
    if not consents:
        raise RefusalError(
            "a look shows the server names, counts, means and histograms of the columns of its data, which this site does "
            "not allow (disclose=look)"
        )
    if protection.noise_multiplier or protection.clip_norm is not None or protection.protects_units:
        raise RefusalError("a look would leave it without its noise and clipping")
    if fields.get("by_site") is not (not secure):
        raise RefusalError("counts of few rows leave it in secure sums alone")
    try:
        columns_from_json(str(fields.get("columns")))
    except UserError as error:
        raise RefusalError(str(error)) from error
    return FederatedLook(columns=str(fields["columns"]), by_site=not secure)


def answer_look(head: Mapping[str, Any], algorithm: Algorithm[Any, Any], client: Client) -> Envelope:
    """Returns a reply with the names and categories of a client's columns, which the server merges with those of the
    other sites.

    Raises:
        RefusalError: the message names another method, or the client has too few examples.
    """
    if not isinstance(algorithm, FederatedLook):
        raise RefusalError("the server asks for a look under the name of another method")
    try:
        columns = columns_to_json(read_columns_if_enough_examples(client).columns)
    except UserError as error:
        raise RefusalError(str(error)) from error
    return Envelope({"client": client.id, "run": head["run"], "columns": columns})
