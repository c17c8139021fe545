"""Fits one preprocessing for the tables of all sites, from sums that the sites send. It is implemented as a method in
two rounds, with the same checks, secure sums and count of bytes as training.

In round 1 each site sends how many of its training rows have each column of numbers and the sum of the values, which gives
the mean; in round 2 the sum of squared differences from it, which gives the variance. Both in float64. Targets of regression
are columns of numbers here. Categories and classes are those of all the tables.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from polyfed.algorithms.base.averaging import Averaging
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.io.text.advice import keep_advice_for_this_process
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.messages.fixed_point import FRACTION_BITS
from polyfed.core.state_dict import StateDict, StateDictSpec
from polyfed.data.concat import rows_in_stored_tensors
from polyfed.data.look.counts import unlike_most_values
from polyfed.data.tabular.fit_preprocessor import mean_or_zero, preprocessor_with_statistics
from polyfed.data.tabular.harmonise import (
    count_and_sum_columns_and_targets,
    merge_table_definitions,
    needs_common_preprocessing,
    preprocessor_of,
    recode_examples,
)
from polyfed.data.tabular.preprocessing import TablePreprocessor
from polyfed.models import ModelSpec
from polyfed.simulation.engines.base import Engine
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.training_round import run_unevaluated_rounds
from polyfed.simulation.settings import Settings

MIN_ROWS = 5
"""Sets the number of rows with a value below which a column's sum stays at its site."""
_ROUNDS = 2


@final
@dataclass(frozen=True, kw_only=True)
class Moments(Averaging):
    """Computes means and variances of numeric columns over all sites, as a method of two rounds.

    The server half needs the sum over sites alone, so that it suits secure sums. The method's fields for training have no
    use.

    Args:
        size: columns of numbers, and targets of regression.
    """

    requires: ClassVar[frozenset[str]] = frozenset()
    discloses: ClassVar[frozenset[str]] = frozenset({"moments"})
    groups: ClassVar[tuple[str, ...]] = ("moments",)
    _largest: ClassVar[float] = 1e100  # sums are in the units of the table
    size: int = 0
    weighted: bool = False

    def server_init(self, server: ServerContext) -> dict[str, Any]:
        """Returns the server's state before round 1: zeros for all means and variances."""
        zeros = torch.zeros(self.size, dtype=torch.float64)
        return {"moments": {"count": zeros, "total": zeros}, "mean": zeros, "variance": zeros, "done": 0}

    def dispatch(self, server_state: dict[str, Any], client_info: ClientInfo) -> Message:
        """Returns the message to a client: which of the two rounds this is, and in round 2 the mean of each column."""
        return Message(
            {"moments": server_state["moments"], "known": {"mean": server_state["mean"]}},
            {"done": float(server_state["done"])},
        )

    def local_update(
        self, message: Message, client_state: dict[str, Any], client: Client, seed: int
    ) -> tuple[Message, dict[str, Any]]:
        """Returns each column's number of values and, in round 1, their sum, in round 2 that of squares.

        Squares are of the differences from the mean over all clients.
        """
        count, total = count_and_sum_columns_and_targets(
            client.train, message.tensors["known"]["mean"] if message.scalars["done"] else None
        )
        return Message({"moments": {"count": count, "total": total}}), client_state

    def reply_spec(self, server_state: dict[str, Any], message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the reply's names, shapes and types; raises a `ValueError` for impossible values."""
        for name, tensor in reply.tensors.get("moments", {}).items():
            if tensor.is_meta:  # of a masked part, or not read yet
                continue
            if name == "count" and bool(((tensor < 0) | (tensor != tensor.floor())).any()):
                raise ValueError("how many rows it counts is negative, or no whole number")
            if name == "total" and server_state["done"] and bool((tensor < 0).any()):
                raise ValueError("a sum of squares is negative")
        return super().reply_spec(server_state, message, reply)

    def server_step(
        self, server_state: dict[str, Any], mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> dict[str, Any]:
        """Returns the next state with the columns' means (round 1) or variances (round 2)."""
        moment = mean_or_zero(mean["moments"]["count"], mean["moments"]["total"])
        name = "variance" if server_state["done"] else "mean"
        return {**server_state, name: moment, "done": server_state["done"] + 1}

    def personal_model(self, message: Message, client_state: dict[str, Any], client: Client, seed: int) -> nn.Module:
        """Returns a network that returns its inputs unchanged, since this method evaluates nothing."""
        return nn.Identity()


@final
@dataclass(frozen=True, eq=False)
class CommonPreprocessing:
    """Holds the preprocessing that all sites share, and the cost of fitting it in rounds and bytes.

    Attributes:
        prepared: the common preprocessing.
        facts: for `manifest.json`: number of rounds, and bytes that all sites sent and received.
    """

    prepared: TablePreprocessor
    facts: Mapping[str, int]


@exclusive_single_torch_thread_with_grad()
def fit_common_preprocessing(clients: Sequence[Client], *, seed: int = 0, secure: bool = False) -> CommonPreprocessing:
    """Fits one preprocessing for all clients' tables from sums, categories and classes.

    Args:
        clients: whose examples are of tables of the same columns (`Examples.transform` is a `Prepared`).
        seed: of the run.
        secure: whether replies are summed in fixed point, as secure sums between real sites are.

    Raises:
        UserError: examples of no table or of different ones, or sums that fixed point cannot hold.
    """
    check_sums_hide_single_values(clients, secure=secure)
    client_by_id = {client.id: client for client in sorted(clients, key=lambda client: client.id)}
    template = merge_table_definitions({i: preprocessor_of(client.train) for i, client in client_by_id.items()})
    federation = Federation(client_by_id, build_moments_method(template), build_column_moments_settings(seed, secure))
    engine = InProcessEngine(federation.algorithm, list(client_by_id.values()), torch.device("cpu"), federation.metrics)
    return run_moments_rounds(federation, engine, template)


def columns_with_few_values(client: Client) -> list[str]:
    """Returns the numeric columns with a value, or a value unlike most, in fewer than `MIN_ROWS` rows."""
    count, _ = count_and_sum_columns_and_targets(client.train)
    preprocessor = preprocessor_of(client.train)
    rows = client.train.input_tensor[rows_in_stored_tensors(client.train)]
    numeric = {c.name: rows[:, position] for position, c in enumerate(preprocessor.columns) if c.categories is None}
    counts = zip((*numeric, *preprocessor.classes), count.tolist(), strict=False)
    return [
        name
        for name, number in counts
        if 0 < number < MIN_ROWS or (name in numeric and _has_few_unlike_values(numeric[name]))
    ]


def _has_few_unlike_values(values: Tensor) -> bool:
    are_marks = bool(((values == 0) | (values == 1) | values.isnan()).all())
    return not are_marks and 0 < int(unlike_most_values(values).sum()) < MIN_ROWS


def check_sums_hide_single_values(clients: Sequence[Client], *, secure: bool) -> None:
    """Raises a `UserError` if a column's sum nearly reveals values and no secure sum hides it.

    Raises:
        UserError: a column of a client has so few values that their sum would nearly reveal them, and is not hidden in a
            secure sum.
    """
    for client in () if secure else clients:
        table = client.train.transform
        is_federated = isinstance(table, TablePreprocessor) and table.scope == "federated"
        if is_federated and (names := columns_with_few_values(client)):
            raise UserError(
                f"client {client.id!r}: column {names[0]!r} has values in fewer than {MIN_ROWS} training rows, or values "
                "unlike all others in so few, which their sum would nearly reveal, so that between real sites it is refused "
                f"(preprocess='federated'); leave the column out (drop={names[0]!r}, --data.drop {quote(names[0])}), or use "
                "preprocess='site' or secure=True"
            )


def build_moments_method(template: TablePreprocessor) -> Moments:
    """Builds the method that computes the means and variances for tables with the columns of `template`."""
    return Moments(size=len(template.mean) + (len(template.classes) if template.task.standardises_targets else 0))


def build_column_moments_settings(seed: int, secure: bool) -> Settings:
    """Builds the settings of the two rounds that compute means and variances; every client takes part in both."""
    return Settings(rounds=_ROUNDS, seed=seed, secure=secure)


def run_moments_rounds(federation: Federation, engine: Engine, template: TablePreprocessor) -> CommonPreprocessing:
    """Runs the two rounds that compute means and variances over all sites, and returns `template` with these values."""
    state, last = run_unevaluated_rounds(federation, engine)
    facts = {"rounds": _ROUNDS, "bytes_down": last["bytes_down_total"], "bytes_up": last["bytes_up_total"]}
    if federation.settings.secure:
        _warn_of_inexact_columns(template, state["variance"], state["moments"]["count"])
    return CommonPreprocessing(
        preprocessor_with_statistics(template, state["mean"], state["variance"], "federated"), facts
    )


def _warn_of_inexact_columns(template: TablePreprocessor, variance: Tensor, count: Tensor) -> None:
    """Warns of variances too small for fixed-point numbers: like 0, or not exact to a hundredth.

    `count` is the mean over sites; each site's sum is rounded to 2^-BITS.
    """
    names = [column.name for column in template.columns if column.categories is None] + list(template.classes)
    is_inexact = variance * count.clamp(min=1.0) < 100 * 2.0 ** -(FRACTION_BITS + 1)
    if inexact_names := [name for name, inexact in zip(names, is_inexact.tolist(), strict=False) if inexact]:
        warnings.warn(
            keep_advice_for_this_process(
                f"the columns {', '.join(inexact_names)} vary by too little for secure sums, which are in fixed point, or "
                "not at all: their spread is not exact; give them in a smaller unit, or leave them out "
                "(drop=..., --data.drop)"
            ),
            UserWarning,
            stacklevel=2,
        )


def apply_preprocessing(client: Client, common: TablePreprocessor) -> Client:
    """Returns the client with all examples, and a built-in network, converted to the common table's preprocessing.

    Raises:
        UserError: the common table is not that of the client.
    """
    client_preprocessing, model = preprocessor_of(client.train), client.model
    train, test, *val = recode_examples(
        [part for part in (client.train, client.test, client.val) if part is not None], common
    )
    for part in (test, *val):
        common.warn_of_changed_constants(
            part.input_tensor if part.index is None else part.input_tensor[part.index], f"client {client.id!r}"
        )
    if isinstance(model, ModelSpec) and model.input_shape == (len(client_preprocessing.feature_names),):
        num_outputs = common.task.num_outputs(torch.zeros(1, len(common.classes)), common.classes)
        model = replace(model, input_shape=(len(common.feature_names),), num_classes=num_outputs)
    return replace(client, model=model, train=train, test=test, val=val[0] if val else None)


def unify_preprocessing_of_clients(clients: Sequence[Client], seed: int, secure: bool) -> Sequence[Client]:
    """Returns the clients with one common preprocessing if their tables were read one by one, otherwise unchanged.

    Raises:
        UserError: their tables differ, or some have none.
    """
    tables = [c.train.transform for c in clients if isinstance(c.train.transform, TablePreprocessor)]
    check_sums_hide_single_values(clients, secure=secure)
    if not needs_common_preprocessing(tables):
        return clients
    common = fit_common_preprocessing(clients, seed=seed, secure=secure).prepared
    return [apply_preprocessing(client, common) for client in clients]
