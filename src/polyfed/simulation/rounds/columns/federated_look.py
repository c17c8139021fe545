"""Summarises the columns of all sites' data by messages, as real sites do: a method in three rounds whose replies are
counts and sums.

The rounds are the passes of `polyfed.data.look.counts`. Counts of fewer than five rows stay at their site. With secure sums
the server sees the sum over all sites alone, and so nothing of a single one.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from polyfed.algorithms.base.averaging import Averaging
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.io.values.validation import parse_json, validation_error
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.state_dict import StateDict, StateDictSpec, state_dict_spec
from polyfed.data.look import counts as passes
from polyfed.data.look.counts import MIN_COUNT, Counts, find_numeric_column_positions, suppress_small_counts
from polyfed.data.look.look import Look, read_columns_by_site
from polyfed.data.look.site_columns import LookColumn, SiteColumns, merge_columns
from polyfed.data.look.summaries import ALL_SITES, CommonScaleAndRange, build_summaries
from polyfed.simulation.engines.base import Engine
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.training_round import run_unevaluated_rounds
from polyfed.simulation.settings import Settings

PASSES = (("rows", "count", "total", "whole", "codes", "cells", "categories"), ("squares",), ("histograms",))
"""Lists the names of the tensors that a site sends in each round."""
_COUNTS = frozenset({"count", "whole", "codes", "cells", "categories", "histograms"})


def columns_to_json(columns: Sequence[LookColumn]) -> str:
    """Returns the descriptions of table columns as a JSON text, which `columns_from_json` reads."""
    return json.dumps([[c.name, None if c.values is None else list(c.values), c.is_target] for c in columns])


def columns_from_json(text: str) -> tuple[LookColumn, ...]:
    """Reads descriptions of table columns from a text made by `columns_to_json`.

    Raises:
        UserError: the text is not such a list.

    >>> columns_from_json(columns_to_json([LookColumn("age"), LookColumn("ill", ("no", "yes"), True)]))[1].values
    ('no', 'yes')
    """
    try:
        content = parse_json(text)
    except ValueError as error:
        raise UserError(f"these are not columns of a look: {error}") from error
    if error_text := validation_error(content, list[list[Any]], "columns"):
        raise UserError(f"these are not columns of a look: {error_text}")
    columns = []
    for entry in content:
        is_column = len(entry) == 3 and isinstance(entry[0], str) and isinstance(entry[2], bool)
        if not is_column or validation_error(entry[1], list[str] | None):
            raise UserError("these are not columns of a look: a column needs a name, its categories and true or false")
        columns.append(LookColumn(entry[0], None if entry[1] is None else tuple(entry[1]), entry[2]))
    if len({column.name for column in columns}) < len(columns):
        raise UserError("these are not columns of a look: a name occurs twice")
    return tuple(columns)


@final
@dataclass(frozen=True, kw_only=True)
class FederatedLook(Averaging):
    """Collects counts and sums of the data columns of all sites, implemented as a method in three rounds.

    The method's fields for training have no use.

    Args:
        columns: those of all sites, as `columns_to_json` writes them.
        by_site: whether the server keeps the counts of each site; with secure sums it has their sum alone.
    """

    requires: ClassVar[frozenset[str]] = frozenset()
    discloses: ClassVar[frozenset[str]] = frozenset({"summaries"})
    groups: ClassVar[tuple[str, ...]] = ("counts",)
    _largest: ClassVar[float] = 1e100  # sums are in the units of the data
    columns: str = "[]"
    by_site: bool = True
    weighted: bool = False

    @property
    def aggregates_by_sum(self) -> bool:
        """Returns True if the server needs only the sum over all sites, and no site's counts."""
        return not self.by_site

    def server_init(self, server: ServerContext) -> dict[str, Any]:
        """Returns the server's state before round 1, which holds no counts yet."""
        count = len(find_numeric_column_positions(columns_from_json(self.columns)))
        zeros, ones = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
        return {
            "frame": {"center": zeros, "scale": ones, "low": zeros, "high": ones},
            "done": 0,
            "sum": {},
            "sites": {},
        }

    def dispatch(self, server_state: dict[str, Any], client_info: ClientInfo) -> Message:
        """Returns which of the three rounds this is, and what earlier rounds have shown of all sites."""
        return Message({"frame": server_state["frame"]}, {"done": float(server_state["done"])})

    def local_update(
        self, message: Message, client_state: dict[str, Any], client: Client, seed: int
    ) -> tuple[Message, dict[str, Any]]:
        """Returns a client's counts and sums; hides counts of few rows unless a secure sum does."""
        done = int(message.scalars["done"])
        site = read_columns_if_enough_examples(client).align_to_columns(columns_from_json(self.columns))
        site, frame = passes.drop_values_of_few_rows(site) if self.by_site else site, message.tensors["frame"]
        counts = passes.count_values(site)
        if done == 1:
            counts |= passes.sum_squares(site, frame["center"], frame["scale"])
        if done == 2:
            counts |= passes.count_histograms(site, frame["low"], frame["high"])
        counts = suppress_small_counts(counts, site.columns) if self.by_site else counts
        return Message({"counts": {name: counts[name] for name in PASSES[done]}}), client_state

    def reply_spec(self, server_state: dict[str, Any], message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the reply's names, shapes and types; raises a `ValueError` for impossible values."""
        columns = columns_from_json(self.columns)
        frame = server_state["frame"]
        empty = SiteColumns(columns, torch.zeros(0, len(columns), dtype=torch.float64), {})
        zeros = {
            **passes.count_values(empty),
            **passes.sum_squares(empty, frame["center"], frame["scale"]),
            **passes.count_histograms(empty, frame["low"], frame["high"]),
        }
        for name, tensor in reply.tensors.get("counts", {}).items():
            if tensor.is_meta:  # of a masked part, or not read yet
                continue
            least = passes.NOT_SHOWN if name == "categories" else passes.SUPPRESSED
            if name in _COUNTS and bool(((tensor < least) | (tensor != tensor.floor())).any()):
                raise ValueError("a count of rows is negative, or no whole number")
            if name == "squares" and bool((tensor < 0).any()):
                raise ValueError("a sum of squares is negative")
        return {"counts": state_dict_spec({name: zeros[name] for name in PASSES[int(server_state["done"])]})}

    def server_step(
        self, server_state: dict[str, Any], mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> dict[str, Any]:
        """Returns the next state with the sums over all sites; the state itself if it keeps each site's."""
        if self.by_site:
            return server_state
        total = {name: tensor * len(client_ids) for name, tensor in mean["counts"].items()}
        return self._next_state(
            server_state, {n: t.round() if n in _COUNTS | {"rows"} else t for n, t in total.items()}
        )

    def update_state_from_single_replies(
        self, server_state: dict[str, Any], replies: Mapping[str, Message]
    ) -> dict[str, Any]:
        """Returns the server's next state, with the counts of each site and their sum added."""
        sites = {
            i: {**server_state["sites"].get(i, {}), **dict(reply.tensors["counts"])}
            for i, reply in sorted(replies.items())
        }
        total = passes.add_counts([dict(reply.tensors["counts"]) for reply in replies.values()])
        return self._next_state({**server_state, "sites": sites}, total)

    def _next_state(self, server_state: dict[str, Any], total: Counts) -> dict[str, Any]:
        counts = {**server_state["sum"], **total}
        frame: dict[str, Tensor] = dict(server_state["frame"])
        if server_state["done"] == 0:
            frame["center"], frame["scale"] = passes.choose_center_and_scale(counts)
        elif server_state["done"] == 1:
            frame["low"], frame["high"] = passes.choose_histogram_limits(counts, frame["center"], frame["scale"])
        return {**server_state, "sum": counts, "frame": frame, "done": server_state["done"] + 1}

    def personal_model(self, message: Message, client_state: dict[str, Any], client: Client, seed: int) -> nn.Module:
        """Returns a network that returns its inputs unchanged, since this method evaluates nothing."""
        return nn.Identity()


def read_columns_if_enough_examples(client: Client) -> SiteColumns:
    """Returns the columns of one client's examples.

    Raises:
        UserError: the client has too few examples for any count of them to leave it.
    """
    site = read_columns_by_site([client])[client.id]
    if len(site.cells) < MIN_COUNT:
        raise UserError(f"client {client.id!r} has fewer than {MIN_COUNT} examples, of which no count may leave it")
    return site


@exclusive_single_torch_thread_with_grad()
def look_between_sites(clients: Iterable[Client], *, seed: int = 0, secure: bool = False) -> Look:
    """Summarises the data columns of clients in this process by messages, as real sites would.

    Args:
        clients: the clients.
        seed: of the run.
        secure: whether the server sees the sum over all clients alone, in fixed point.

    Raises:
        UserError: a client has fewer than five examples, or sums are too large for fixed point.
    """
    client_by_id = {client.id: client for client in sorted(clients, key=lambda client: client.id)}
    columns = merge_columns([read_columns_if_enough_examples(client).columns for client in client_by_id.values()])
    federation = Federation(client_by_id, build_look_method(columns, secure), build_look_settings(seed, secure))
    engine = InProcessEngine(federation.algorithm, list(client_by_id.values()), torch.device("cpu"), federation.metrics)
    return run_look_rounds(federation, engine, columns)


def build_look_method(columns: Sequence[LookColumn], secure: bool) -> FederatedLook:
    """Builds the method that collects counts and sums of these columns."""
    return FederatedLook(columns=columns_to_json(columns), by_site=not secure)


def build_look_settings(seed: int, secure: bool) -> Settings:
    """Builds the settings of the three rounds that summarise the sites' data; every client takes part in each."""
    return Settings(rounds=len(PASSES), seed=seed, secure=secure)


def run_look_rounds(federation: Federation, engine: Engine, columns: Sequence[LookColumn]) -> Look:
    """Runs the three rounds that summarise the sites' data, and returns the summary of all sites."""
    state, _ = run_unevaluated_rounds(federation, engine)
    sites = state["sites"] or {ALL_SITES: suppress_small_counts(state["sum"], columns)}
    return Look.of(build_summaries(columns, sites, CommonScaleAndRange(**state["frame"])))
