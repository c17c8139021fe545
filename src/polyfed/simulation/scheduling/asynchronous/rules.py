"""Defines `FedBuff` and `FedAsync`: when the server uses replies, and how much each counts."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.values.number_checks import is_positive_number, is_whole_number
from polyfed.core.io.values.plain_values import convert_numpy_fields_in_place
from polyfed.core.io.values.validation import build_dataclass
from polyfed.simulation.scheduling.asynchronous.staleness import build_staleness_function


@final
@dataclass(frozen=True, kw_only=True)
class FedBuff:
    """Updates the server whenever a buffer of K replies is full, while M clients are at work (Nguyen et al. 2022).

    θ ← θ + η Σ_i s(τ_i)·w_i·Δ_i / Σ_i w_i over the K replies. Δ_i is what client i has changed in the version from which
    it started, τ_i the number of server updates since then, s the staleness function, and w_i the method's weight (the
    number of examples, or 1). The method's own server step, if it has one, follows.

    A client sends at most one reply to a buffer, and starts again from the next version (polyfed's choice).

    Args:
        buffer: K, the replies of a server update; a round of the run is one server update.
        concurrency: M, the clients at work at once: a whole number, or a fraction in (0, 1]; None takes
            `clients_per_round`.
        staleness: s(τ): "polynomial:0.5", which is the paper's 1/√(1 + τ), "constant", "polynomial:A" or "hinge:A:B".
        server_lr: η (1, polyfed's choice).

    Raises:
        UserError: a value outside its range.

    >>> FedBuff(buffer=10, concurrency=40).scale(3)
    0.5
    """

    rule: ClassVar[str] = "fedbuff"
    buffer: int = 10
    concurrency: int | float | None = None
    staleness: str = "polynomial:0.5"
    server_lr: float = 1.0

    def __post_init__(self) -> None:
        convert_numpy_fields_in_place(self)
        if not is_whole_number(self.buffer, 1):
            raise UserError(f"FedBuff: buffer must be a whole number of at least 1, got {self.buffer!r}")
        check_concurrency(self.concurrency, "FedBuff")
        build_staleness_function(self.staleness)  # which checks it
        if not is_positive_number(self.server_lr):
            raise UserError(f"FedBuff: server_lr must be a positive number, got {self.server_lr!r}")

    def scale(self, staleness: int) -> float:
        """Returns the factor η·s(τ) of an update."""
        return self.server_lr * build_staleness_function(self.staleness)(staleness)


@final
@dataclass(frozen=True, kw_only=True)
class FedAsync:
    """Updates the server with every single reply, while M clients are at work (Xie et al. 2019).

    θ ← (1 − α_τ)·θ + α_τ·θ_i with α_τ = α·s(τ). θ_i is the model that client i has trained, τ the number of server updates
    since it started, and s the staleness function. The paper's clients train with a proximal term; the method `fedprox` has
    it.

    Args:
        mixing: α, above 0 and at most 1 (0.6, polyfed's choice).
        concurrency: M, the clients at work at once, as for `FedBuff`.
        staleness: s(τ): "constant", "polynomial:A" or "hinge:A:B"; "polynomial:0.5" is the paper's.

    Raises:
        UserError: a value outside its range.

    >>> FedAsync(mixing=0.5, staleness="hinge:10:4").scale(4)
    0.5
    """

    rule: ClassVar[str] = "fedasync"
    mixing: float = 0.6
    concurrency: int | float | None = None
    staleness: str = "polynomial:0.5"

    def __post_init__(self) -> None:
        convert_numpy_fields_in_place(self)
        if not (is_positive_number(self.mixing) and self.mixing <= 1):
            raise UserError(f"FedAsync: mixing must be above 0 and at most 1, got {self.mixing!r}")
        check_concurrency(self.concurrency, "FedAsync")
        build_staleness_function(self.staleness)  # which checks it

    @property
    def buffer(self) -> int:
        """Returns the number of replies of a server update, which is 1."""
        return 1

    def scale(self, staleness: int) -> float:
        """Returns the share α·s(τ) of a client's model in the next global model."""
        return self.mixing * build_staleness_function(self.staleness)(staleness)


AsynchronousRule = FedBuff | FedAsync
RULES: Mapping[str, type[FedBuff] | type[FedAsync]] = {"fedbuff": FedBuff, "fedasync": FedAsync}


def parse_asynchronous(value: Any) -> AsynchronousRule | None:
    """Returns the rule that the setting `asynchronous` describes, None for a synchronous run.

    Args:
        value: a `FedBuff` or `FedAsync`; the name of one, for its defaults; a mapping with `rule` and its fields; or None.

    Raises:
        UserError: another value, an unknown rule or field, or a value outside its range.

    >>> parse_asynchronous({"rule": "fedbuff", "buffer": 3}).buffer
    3
    """
    if value is None or isinstance(value, FedBuff | FedAsync):
        return value
    fields = {"rule": value} if isinstance(value, str) else value
    if not isinstance(fields, Mapping) or "rule" not in fields:
        raise UserError(
            f"asynchronous must be polyfed.FedBuff(...), polyfed.FedAsync(...), or a mapping with rule: fedbuff or rule: "
            f"fedasync, got {value!r}"
        )
    name = str(fields["rule"])
    if name not in RULES:
        raise UserError(f"unknown asynchronous.rule {name!r}; {did_you_mean(name, RULES)}")
    kind: Any = RULES[name]
    rule: AsynchronousRule = build_dataclass(
        kind, {key: entry for key, entry in fields.items() if key != "rule"}, f"asynchronous {name}"
    )
    return rule


def describe_asynchronous(rule: AsynchronousRule) -> dict[str, Any]:
    """Returns a rule as the setting `asynchronous` holds it: a mapping with `rule` and all fields.

    >>> describe_asynchronous(FedAsync(mixing=0.5))
    {'rule': 'fedasync', 'mixing': 0.5, 'concurrency': None, 'staleness': 'polynomial:0.5'}
    """
    return {"rule": rule.rule, **dataclasses.asdict(rule)}


def check_concurrency(value: Any, rule: str) -> None:
    """Raises a `UserError` unless a value is None, a whole number of at least 1, or a fraction above 0 and at most 1."""
    if value is not None and not is_whole_number(value, 1) and not (isinstance(value, float) and 0 < value <= 1):
        raise UserError(
            f"{rule}: concurrency must be a number of clients from 1, or a fraction above 0 and at most 1.0, got {value!r}"
        )
