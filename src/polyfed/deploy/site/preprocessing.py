"""Sites of tables agree on one preprocessing before round 1 (`preprocess="federated"`), by the messages of a run.

1. Each site tells a hash of its columns, categories and classes, and, where its owner lets names go, these themselves
   (`SchemaSummary`). Where the hashes differ the server needs the names, and merges them.
2. Two rounds of the method `Moments`, as a run of its own with the same checks, and secure sums if the run has them.
3. The result goes with the introduction of the run to each site, which keeps it, and prepares and codes its rows by it.

So a site that comes back, and a run that is resumed, know it already, and nothing is asked twice.
"""

import json
import math
from pathlib import Path
from typing import Any, TypedDict

from polyfed.algorithms import registry_name
from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import create_private_folder, read_file, read_text_file, write_file_atomically
from polyfed.core.io.validation import parse_json, validation_error
from polyfed.data.tabular.harmonise import count_and_sum_with_targets, preprocessor_of
from polyfed.data.tabular.preprocessing import TablePreprocessor, preprocessor_from_json
from polyfed.data.tabular.schema import table_schema
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection
from polyfed.deploy.protocol.table_summary import SchemaSummary, short_hash
from polyfed.deploy.protocol.wire import SITE_HEAD_BYTES
from polyfed.deploy.secure_aggregation import RefusalError
from polyfed.deploy.site.private_state import InvalidSiteStateError
from polyfed.simulation.rounds.federated_preprocessing import (
    Moments,
    apply_preprocessing,
    build_moments_method,
)

MOMENTS_NAME = registry_name(Moments())
_MIN_ROWS = 5  # rows with a value that a sum is told of
_FILE = "preprocessing.json"
_HEAD_RESERVE = 4096  # of a head, for what else it holds


class _CommonPreprocessing(TypedDict):
    """What the server tells: columns and classes where those of the sites differ, and what was fitted."""

    columns: list[dict[str, Any]] | None
    classes: list[str] | None
    mean: list[float]
    spread: list[float]
    target: list[list[float]]


def uses_federated_preprocessing(client: Client) -> bool:
    """Whether a site's examples are of a table that is prepared by sums over all sites."""
    return isinstance(client.train.transform, TablePreprocessor) and client.train.transform.scope == "federated"


def check_table_sums_allowed(client: Client, protection: ReplyProtection, *, secure: bool) -> None:
    """Raises a `RefusalError` if sums of the site's rows are not to leave it."""
    if not uses_federated_preprocessing(client):
        raise RefusalError("its data do not ask for preprocessing from sums over all sites (preprocess='federated')")
    if protection.noise_multiplier or protection.clip_norm is not None:
        raise RefusalError(
            "its table asks for preprocess='federated', whose sums would leave it without its noise and "
            "clipping; preprocess='site' sends none"
        )
    count, _ = count_and_sum_with_targets(client.train)
    if not secure and bool(((count > 0) & (count < _MIN_ROWS)).any()):
        raise RefusalError(
            f"a column of its table has values in fewer than {_MIN_ROWS} training rows, which their sum would nearly "
            "tell; leave that column out, or take preprocess='site' or secure sums"
        )


def summarize_schema(client: Client, run: str, *, with_names: bool) -> SchemaSummary:
    """What a site tells of its table.

    Args:
        client: with examples of it.
        run: its identifier, which enters the hash.
        with_names: whether names of columns, categories and classes go up. They do not if they are too long to be read.
    """
    preprocessor = preprocessor_of(client.train)
    summary: SchemaSummary = {
        "whole": short_hash(run, table_schema(preprocessor)), "numbers": len(preprocessor.mean),
        "targets": build_moments_method(preprocessor).size - len(preprocessor.mean),
    }  # fmt: skip
    if with_names and len(json.dumps(table_schema(preprocessor))) < SITE_HEAD_BYTES - _HEAD_RESERVE:
        summary["schema"] = table_schema(preprocessor)
    return summary


def save_common_preprocessing(folder: Path, description: Any, client: Client) -> None:
    """Writes down what the server says that sites have agreed on, for the run of this folder.

    Raises:
        RefusalError: it is not that of the run, or does not suit the site's table.
    """
    file = folder / _FILE
    try:
        parse_common_preprocessing(preprocessor_of(client.train), description)
    except UserError as error:
        raise RefusalError("the common preprocessing does not suit its table (its log tells why)") from error
    text = json.dumps(description)
    if not file.exists():
        create_private_folder(folder, parents=True)
        write_file_atomically(file, text.encode())
    elif read_text_file(file) != text:
        raise RefusalError("the common preprocessing is not that with which it began this run")


def apply_common_preprocessing(client: Client, folder: Path) -> Client:
    """The client, its table prepared as the sites have agreed on for the run of this folder.

    Raises:
        InvalidSiteStateError: nothing was agreed on, or what was written is damaged.
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
    """The common preprocessing, of a site with this table.

    Raises:
        UserError: it holds what is none.

    >>> from polyfed.data.tabular.preprocessing import Column
    >>> own = TablePreprocessor((Column("age"),), (61.0,), (1.0,), (), "federated", ("no", "yes"))
    >>> parse_common_preprocessing(own,
    ...     {"columns": None, "classes": None, "mean": [50.0], "spread": [9.0], "target": []}).mean
    (50.0,)
    """
    if wrong := validation_error(description, _CommonPreprocessing):
        raise UserError(f"this is no preprocessing of a table: {wrong}")
    numbers = [
        *description["mean"],
        *description["spread"],
        *(number for pair in description["target"] for number in pair),
    ]
    if not all(map(math.isfinite, numbers)) or any(len(pair) != 2 for pair in description["target"]):
        raise UserError("this is no preprocessing of a table: its numbers are not finite, or not in pairs")
    site_fields = preprocessor.to_json_dict()
    columns_and_classes = {
        name: site_fields[name] if description[name] is None else description[name] for name in ("columns", "classes")
    }
    return preprocessor_from_json({**site_fields, **description, **columns_and_classes, "scope": "federated"})
