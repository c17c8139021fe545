"""Predicts the rows of a table by the networks of their sites, which its column of sites names."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from shlex import quote
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.text.number_format import format_row_numbers
from polyfed.data.formats.files import Table
from polyfed.data.tabular.preprocessing import TablePreprocessor
from polyfed.data.tabular.table_reader import check_no_missing_values, column_as_texts, read_table


def predict_rows_by_site(
    rows: Any, ids: Sequence[str], transform: Any, predict: Callable[[str, Table], Tensor]
) -> Tensor:
    """Returns the outputs for each row of a table, in their order, of the network of the row's site.

    Args:
        rows: of a table, as `TablePreprocessor.encode` takes them, with its column of sites.
        ids: the clients of the run.
        transform: of their inputs; a `TablePreprocessor` knows the column of sites.
        predict: returns the outputs of a client's network for rows, shape (n, ...).

    Raises:
        UserError: the run has no column of sites, the rows lack it, or a row has no site or that of no client.
    """
    advice = f"name the client whose network predicts (client={ids[0]!r}, --client {quote(ids[0])})"
    if isinstance(rows, str) and rows in ids:
        raise UserError(f"the inputs are missing; give them after the client: predict({rows!r}, x)")
    if not isinstance(transform, TablePreprocessor) or transform.site is None:
        raise UserError(
            f"the clients are not the sites of a table's column, so that rows cannot tell whose they are; {advice}"
        )
    site = transform.site
    if isinstance(rows, Tensor | np.ndarray):
        raise UserError(f"{type(rows).__name__} has no column {site!r} with the site of each row; {advice}")
    table = read_table(rows, **asdict(replace(transform.reading, text_columns=(site,))))
    if site not in table.column_names:
        raise UserError(f"the rows have no column {site!r} with the site of each row; add it, or {advice}")
    sites = column_as_texts(table, site)
    check_no_missing_values(sites, site, "site", may_drop=False)
    for name in dict.fromkeys(sites.tolist()):
        if name not in ids:
            place = format_row_numbers(np.flatnonzero(sites == name))
            raise UserError(
                f"{place}: no client of this run is called {name!r}; {did_you_mean(name, ids)}. Or {advice}"
            )
    places = {name: np.flatnonzero(sites == name) for name in dict.fromkeys(sites.tolist())}
    outputs = torch.cat([predict(name, table.take(positions)) for name, positions in places.items()])
    return outputs[torch.from_numpy(np.argsort(np.concatenate(list(places.values())), kind="stable"))]
