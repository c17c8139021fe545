"""Answers the server's request for summary statistics of a site's data: only with its owner's consent, and without
counts of few rows.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.algorithms import registry_name
from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import create_private_folder_if_missing, read_file, write_file_atomically
from polyfed.data.look.counts import MIN_COUNT
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
_LOG = logging.getLogger("polyfed.site")


def build_look_if_owner_allows(
    fields: Mapping[str, Any], *, secure: bool, owner_consents: bool, protection: ReplyProtection
) -> FederatedLook:
    """Builds the method that computes summary statistics of the site's data from the fields that the server sends.

    Raises:
        RefusalError: the owner has not consented, the site adds noise or clips, or the server asks for counts of few rows.
    """
    if not owner_consents:
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
    """Replies with the names and categories of a client's columns, which the server merges.

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


def check_and_record_rows_of_look(folder: Path, client: Client) -> None:
    """Records in a folder which rows a look shows, if no earlier look of almost the same rows is there.

    The folder has a file for each different set of rows, of 8 bytes a row (a hash of its values). Its owner may remove one.

    Raises:
        RefusalError: the rows differ from those of an earlier look in fewer than `MIN_COUNT`, which both would tell.
    """
    hashes = _hash_rows(client)
    file = folder / f"{hashlib.sha256(hashes.tobytes()).hexdigest()[:32]}.rows"
    rows = Counter(hashes.tolist())
    for earlier_file in sorted(folder.glob("*.rows")) if not file.exists() else ():
        earlier_rows = Counter(np.frombuffer(read_file(earlier_file), dtype="<u8").tolist())
        if 0 < max((rows - earlier_rows).total(), (earlier_rows - rows).total()) < MIN_COUNT:
            _LOG.warning(
                "a look is refused: the data differ in fewer than %d rows from those of %s; remove that file if these rows "
                "may be told, or if the server has seen nothing of the earlier look",
                MIN_COUNT,
                earlier_file,
            )
            raise RefusalError(
                f"its data differ in fewer than {MIN_COUNT} rows from those of an earlier look, and both together would "
                "tell these rows (its log says more)"
            )
    create_private_folder_if_missing(folder, parents=True)
    write_file_atomically(file, hashes.tobytes())


def _hash_rows(client: Client) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Returns a hash of each row's values, ascending."""
    site = read_columns_if_enough_examples(client)
    hashes = []
    for cells in site.cells.tolist():
        values = [
            cell if column.values is None or cell != cell else column.values[int(cell)]
            for cell, column in zip(cells, site.columns, strict=True)
        ]
        hashes.append(int.from_bytes(hashlib.sha256(json.dumps(values).encode()).digest()[:8], "little"))
    return np.sort(np.array(hashes, dtype="<u8"))
