"""Computes a site's part of the one preprocessing that all sites' tables share (`preprocess="federated"`), before round
1.

1. Each site sends a hash of its columns, categories and classes and, if its owner allows it, the names (`SchemaSummary`).
   Where the hashes differ, the server needs the names, and merges them.
2. Two rounds of the method `Moments` follow, as a run of their own with the same checks, in secure sums if the run has them.
3. The server sends the result with the introduction of the run. Each site keeps it and transforms its rows with it.

So a site that returns, and a run that is resumed, have the preprocessing already.
"""

import json
import math
from pathlib import Path
from typing import Any, TypedDict

from polyfed.algorithms import registry_name
from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import (
    create_private_folder_if_missing,
    read_file,
    read_text_file,
    write_file_atomically,
)
from polyfed.core.io.values.validation import parse_json, validation_error
from polyfed.data.tabular.harmonise import preprocessor_of
from polyfed.data.tabular.preprocessing import TablePreprocessor, preprocessor_from_json
from polyfed.data.tabular.schema import table_schema
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.protocol.table_summary import SchemaSummary, hash_json_values
from polyfed.deploy.protocol.wire import SITE_HEAD_BYTES
from polyfed.deploy.site.private_state import InvalidSiteStateError
from polyfed.simulation.rounds.columns.federated_preprocessing import (
    MIN_ROWS,
    Moments,
    apply_preprocessing,
    build_moments_method,
    columns_with_few_values,
)

MOMENTS_NAME = registry_name(Moments())
_FILE = "preprocessing.json"
_HEAD_RESERVE = 4096  # bytes of a header for its other fields


class _CommonPreprocessing(TypedDict):
    """Describes the server's JSON: means and scales and, if tables differ, columns and classes."""

    columns: list[dict[str, Any]] | None
    classes: list[str] | None
    mean: list[float]
    spread: list[float]
    target: list[list[float]]


def uses_federated_preprocessing(client: Client) -> bool:
    """Returns whether a table's preprocessing is fitted over the tables of all sites."""
    return isinstance(client.train.transform, TablePreprocessor) and client.train.transform.scope == "federated"


def check_table_sums_allowed(client: Client, protection: ReplyProtection, *, secure_sums: bool) -> None:
    """Raises a `RefusalError` if the site must not send sums over its table's rows.

    It must not if its table does not ask for it, it adds noise or clips, or a column has too few values.
    """
    if not uses_federated_preprocessing(client):
        raise RefusalError("its data do not ask for preprocessing from sums over all sites (preprocess='federated')")
    if protection.noise_multiplier or protection.clip_norm is not None:
        raise RefusalError(
            "its table asks for preprocess='federated', whose sums would leave it without its noise and "
            "clipping; preprocess='site' sends none"
        )
    if protection.protects_units:
        raise RefusalError(
            "its table asks for preprocess='federated', whose sums have no noise, and its max-epsilon is of each example or "
            "patient; preprocess='site' sends none"
        )
    if not secure_sums and columns_with_few_values(client):
        raise RefusalError(
            f"a column of its table has values in fewer than {MIN_ROWS} training rows, or values unlike all others in so "
            "few, which their sum would nearly reveal; leave that column out, or use preprocess='site' or secure sums"
        )


def summarize_schema(client: Client, run: str, *, with_names: bool) -> SchemaSummary:
    """Describes a table for the server: a hash of its schema, counts and, if allowed, the schema.

    Args:
        client: client with examples from the table.
        run: identifier of the run, which enters the hash.
        with_names: whether names of columns, categories and classes are sent; they are left out if too long for a header.
    """
    preprocessor = preprocessor_of(client.train)
    summary: SchemaSummary = {
        "whole": hash_json_values(run, table_schema(preprocessor)), "numbers": len(preprocessor.mean),
        "targets": build_moments_method(preprocessor).size - len(preprocessor.mean),
    }  # fmt: skip
    if with_names and len(json.dumps(table_schema(preprocessor))) < SITE_HEAD_BYTES - _HEAD_RESERVE:
        summary["schema"] = table_schema(preprocessor)
    return summary


def check_and_save_common_preprocessing(folder: Path, description: Any, client: Client) -> None:
    """Saves in the run's folder the preprocessing that the server has computed for all sites.

    Raises:
        RefusalError: it differs from the one saved before in this run, or does not suit the site's table.
    """
    file = folder / _FILE
    try:
        parse_common_preprocessing(preprocessor_of(client.train), description)
    except UserError as error:
        raise RefusalError("the common preprocessing does not suit its table (its log tells why)") from error
    text = json.dumps(description)
    if not file.exists():
        create_private_folder_if_missing(folder, parents=True)
        write_file_atomically(file, text.encode())
    elif read_text_file(file) != text:
        raise RefusalError("the common preprocessing is not that with which it began this run")


def apply_common_preprocessing(client: Client, folder: Path) -> Client:
    """Returns the client with its table transformed by the sites' preprocessing in the run's folder.

    Raises:
        InvalidSiteStateError: there is no saved preprocessing, or it is damaged.
    """
    file = folder / _FILE
    try:
        return apply_preprocessing(
            client, parse_common_preprocessing(preprocessor_of(client.train), parse_json(read_file(file)))
        )
    except (OSError, ValueError, UserError) as error:
        raise InvalidSiteStateError(
            f"the common preprocessing of this run, {folder.name}/{_FILE}, is lost or damaged"
        ) from error


def parse_common_preprocessing(preprocessor: TablePreprocessor, description: Any) -> TablePreprocessor:
    """Builds the preprocessing that all sites share from the server's JSON description, for this site's table.

    Args:
        preprocessor: the site's own preprocessing, which gives columns and classes where the description has None.
        description: the server's JSON.

    Raises:
        UserError: the description is not a preprocessing of a table.

    >>> from polyfed.data.tabular.preprocessing import Column
    >>> preprocessor = TablePreprocessor((Column("age"),), (61.0,), (1.0,), (), "federated", ("no", "yes"))
    >>> parse_common_preprocessing(preprocessor,
    ...     {"columns": None, "classes": None, "mean": [50.0], "spread": [9.0], "target": []}).mean
    (50.0,)
    """
    if error_text := validation_error(description, _CommonPreprocessing):
        raise UserError(f"this is not the preprocessing of a table: {error_text}")
    numbers = [
        *description["mean"],
        *description["spread"],
        *(number for pair in description["target"] for number in pair),
    ]
    if not all(map(math.isfinite, numbers)) or any(len(pair) != 2 for pair in description["target"]):
        raise UserError("this is not the preprocessing of a table: its numbers are not finite, or not in pairs")
    site_fields = preprocessor.to_json_dict()
    columns_and_classes = {
        name: site_fields[name] if description[name] is None else description[name] for name in ("columns", "classes")
    }
    return preprocessor_from_json({**site_fields, **description, **columns_and_classes, "scope": "federated"})
