"""Preprocessing of tables that is common to all sites, from sums over them: as a method in two rounds, by the way that a
round of training takes, with the same checks of replies, secure sums and count of bytes.

In round 1 each site sends how many of its training rows have each column of numbers and the sum of the values, which gives
the mean; in round 2 the sum of squared differences from it, which gives the variance. Both in float64. Targets of regression
are columns of numbers here. Categories and classes are those of all the tables.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from polyfed.algorithms.base.averaging import Averaging
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.machine.threads import single_torch_thread
from polyfed.core.messages.fixed_point import FRACTION_BITS
from polyfed.core.state_dict import StateDict, StateDictSpec
from polyfed.data.tabular.harmonise import (
    count_and_sum_with_targets,
    merge_table_definitions,
    needs_common_preprocessing,
    preprocessor_of,
    recode_examples,
)
from polyfed.data.tabular.preprocessing import TablePreprocessor, mean_or_zero, set_statistics
from polyfed.models import ModelSpec
from polyfed.simulation.engines.base import Engine
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.training_round import run_round
from polyfed.simulation.settings import Settings

_ROUNDS = 2


@final
@dataclass(frozen=True, kw_only=True)
class Moments(Averaging):
    """Means and variances of a table's columns of numbers over the training rows of all sites. The server half needs the sum
    over sites alone, so that it suits secure sums. Its fields for training have no use.

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
        """Nothing is known."""
        zeros = torch.zeros(self.size, dtype=torch.float64)
        return {"moments": {"count": zeros, "total": zeros}, "mean": zeros, "variance": zeros, "done": 0}

    def dispatch(self, server_state: dict[str, Any], client_info: ClientInfo) -> Message:
        """The mean, once it is known; and which of the two rounds it is."""
        return Message(
            {"moments": server_state["moments"], "known": {"mean": server_state["mean"]}},
            {"done": float(server_state["done"])},
        )

    def local_update(
        self, message: Message, client_state: dict[str, Any], client: Client, seed: int
    ) -> tuple[Message, dict[str, Any]]:
        """The counts and sums of the client's training rows."""
        count, total = count_and_sum_with_targets(
            client.train, message.tensors["known"]["mean"] if message.scalars["done"] else None
        )
        return Message({"moments": {"count": count, "total": total}}), client_state

    def reply_spec(self, server_state: dict[str, Any], message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Their form; and, where they are read, whether rows can have them."""
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
        """The mean, then the variance: means over sites of sums and counts have the ratio of the sums themselves."""
        moment = mean_or_zero(mean["moments"]["count"], mean["moments"]["total"])
        name = "variance" if server_state["done"] else "mean"
        return {**server_state, name: moment, "done": server_state["done"] + 1}

    def personal_model(self, message: Message, client_state: dict[str, Any], client: Client, seed: int) -> nn.Module:
        """None: nothing is evaluated."""
        return nn.Identity()


@final
@dataclass(frozen=True, eq=False)
class CommonPreprocessing:
    """`prepared`, the common preprocessing; `facts`, for `manifest.json`: rounds, bytes that all sites sent and received."""

    prepared: TablePreprocessor
    facts: Mapping[str, int]


@single_torch_thread()
def fit_common_preprocessing(clients: Sequence[Client], *, seed: int = 0, secure: bool = False) -> CommonPreprocessing:
    """Preprocessing fitted on the sums over all clients, with the categories and classes of all.

    Args:
        clients: whose examples are of tables of the same columns (`Examples.transform` is a `Prepared`).
        seed: of the run.
        secure: whether replies are summed in fixed point, as secure sums between real sites are.

    Raises:
        UserError: examples of no table or of different ones, or sums that fixed point cannot hold.
    """
    client_by_id = {client.id: client for client in sorted(clients, key=lambda client: client.id)}
    template = merge_table_definitions({i: preprocessor_of(client.train) for i, client in client_by_id.items()})
    federation = Federation(client_by_id, build_moments_method(template), build_moments_settings(seed, secure))
    engine = InProcessEngine(federation.algorithm, list(client_by_id.values()), torch.device("cpu"), federation.metrics)
    return run_moments_rounds(federation, engine, template)


def build_moments_method(template: TablePreprocessor) -> Moments:
    """What is asked for tables like this."""
    return Moments(size=len(template.mean) + (len(template.classes) if template.task == "regression" else 0))


def build_moments_settings(seed: int, secure: bool) -> Settings:
    """Of the two rounds, in which every site takes part."""
    return Settings(rounds=_ROUNDS, seed=seed, secure=secure)


def run_moments_rounds(federation: Federation, engine: Engine, template: TablePreprocessor) -> CommonPreprocessing:
    """Plays the two rounds; `template` with what they gave."""
    checkpoint, history = federation.initial_checkpoint(), list[Mapping[str, Any]]()
    for _ in range(_ROUNDS):
        next_checkpoint = run_round(federation, checkpoint, history, engine, SilentProgress(), lambda *_: None)
        history.append(next_checkpoint.unevaluated_record or {})
        checkpoint = replace(next_checkpoint, unevaluated_record=None)  # there is nothing to evaluate
    facts = {
        "rounds": _ROUNDS, "bytes_down": history[-1]["bytes_down_total"], "bytes_up": history[-1]["bytes_up_total"]
    }  # fmt: skip
    state: Any = checkpoint.state
    if federation.settings.secure:
        _warn_of_inexact_columns(template, state["variance"], state["moments"]["count"])
    return CommonPreprocessing(set_statistics(template, state["mean"], state["variance"], "federated"), facts)


def _warn_of_inexact_columns(template: TablePreprocessor, variance: Tensor, count: Tensor) -> None:
    """Warns of columns whose variance a sum in fixed point cannot tell from 0, or not to a hundredth.

    `count` is the mean over sites; each site's sum is rounded to 2^-BITS.
    """
    names = [column.name for column in template.columns if column.categories is None] + list(template.classes)
    is_inexact = variance * count.clamp(min=1.0) < 100 * 2.0 ** -(FRACTION_BITS + 1)
    if inexact_names := [name for name, inexact in zip(names, is_inexact.tolist(), strict=False) if inexact]:
        warnings.warn(
            f"the columns {', '.join(inexact_names)} vary by too little for secure sums, which are in fixed point, or "
            "not at all: their spread is not exact; give them in a smaller unit, or leave them out (--data.drop)",
            UserWarning,
            stacklevel=2,
        )


def apply_preprocessing(client: Client, common: TablePreprocessor) -> Client:
    """The client, all of its examples coded and prepared alike. A built-in network for its own table is made for the common
    one.

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
        model = replace(model, input_shape=(len(common.feature_names),), num_classes=len(common.classes))
    return replace(client, model=model, train=train, test=test, val=val[0] if val else None)


def with_common_preprocessing(clients: Sequence[Client], seed: int, secure: bool) -> Sequence[Client]:
    """The clients; those of tables that have yet to agree on one preprocessing, such as tables that were read one by one,
    with the one that they agree on.

    Raises:
        UserError: their tables differ, or some have none.
    """
    if not needs_common_preprocessing(
        [c.train.transform for c in clients if isinstance(c.train.transform, TablePreprocessor)]
    ):
        return clients
    common = fit_common_preprocessing(clients, seed=seed, secure=secure).prepared
    return [apply_preprocessing(client, common) for client in clients]
