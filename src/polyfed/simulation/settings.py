"""Defines `Settings`, the options of a run that do not depend on the method."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, final, get_args

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.values.frozen_mapping import FrozenMapping
from polyfed.core.io.values.number_checks import MAX_COUNT, check_whole_number, is_number, is_whole_number
from polyfed.core.io.values.plain_values import convert_numpy_fields_in_place

EngineName = Literal["auto", "inprocess", "pool", "cohort", "ray"]
Keep = Literal["last", "best", "loss"] | int
Regions = int | Mapping[str, str]
EXECUTION_FIELDS = ("engine", "workers", "ray_address", "gpus_per_worker", "device")
"""Settings of where a run computes. No result depends on them, with the engine "cohort" up to rounding."""
SCHEDULING_FIELDS = ("sampler", "speeds", "bandwidth", "availability", "asynchronous")
"""Settings of which clients take part when: who is drawn, how fast and available clients are, whom the server waits for."""
_SCHEDULING_DEFAULTS = {**dict.fromkeys(SCHEDULING_FIELDS), "sampler": "uniform"}
_HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s/:]+):\d{1,5}")


def unknown_device_error(name: str) -> str:
    """Returns the error about a device that torch has not."""
    return f"unknown device {name!r}; use auto, cpu, cuda, cuda:N, mps, or what else torch has"


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """Holds the options of a run that do not depend on the method or the data, such as rounds, seed, engine and device.

    Args:
        rounds: communication rounds.
        seed: every random choice of the run derives from it.
        clients_per_round: clients that take part in a round: a fraction in (0, 1] (at least one client), or a whole
            number of clients. Note that 1.0 means all clients, and 1 means one client.
        engine: "auto", "inprocess", "pool", "cohort" for many clients at once, or "ray" for a cluster (pip install
            'polyfed[ray]'); "auto" never takes Ray, and takes a cohort if a measurement shows that it is faster.
        workers: processes of the pool or of Ray, or "auto" for one per core (of the cluster, with Ray; on macOS and Windows
            none but this process); 0 runs in this process. Results do not depend on it, with "cohort" up to rounding.
        ray_address: "local" starts a Ray on this machine for the run, "auto" joins the cluster that runs here (or at the
            environment's RAY_ADDRESS), HOST:PORT joins that one. A Ray that the process has joined already is used.
        gpus_per_worker: GPUs of each of Ray's workers; a fraction shares a GPU, and 0 computes on CPUs.
        device: "auto", "cpu", "cuda", "cuda:N" or "mps"; for Ray's workers `gpus_per_worker` decides.
        evaluate_every: rounds between evaluations of the clients' personal models; the last round is always evaluated.
        evaluate_clients: clients that are evaluated: a fraction in (0, 1] or a whole number, drawn again for each evaluation
            from the seed and the round alone, so that every method evaluates the same; or a list of ids, the same each time.
        evaluate_all_at_end: whether all clients are evaluated after the last round, whatever `evaluate_clients` says.
        checkpoint_every: rounds between checkpoints; the last round always has one.
        on_error: "raise" ends the run at a client's failure, "skip" records it and continues without that client.
        min_replies: a round with fewer valid replies ends the run.
        metrics: names of the scores to compute, of which the first decides; empty takes the task's own.
        compress: compression of the clients' replies: "none", "int8" (one byte a number) or "topk:SHARE" (only that share
            of the entries of each tensor, those that changed most); see `polyfed.core.messages.compressors`.
        compress_down: compression of the server's messages: "none" or "int8".
        secure: the server half of the method sees only the sum of a round's replies, in fixed point
            (`polyfed.core.messages.fixed_point`). Real sites mask their replies, so that only the sum can be seen; a
            simulation computes the same sum without encryption.
        regions: sums replies by region, so that the server gets one sum in fixed point per region: the region of each
            client, {client: region}, or a number, to which clients are assigned by a checksum of their ids. Any regions give
            the same bits. For methods whose server half is a mean.
        keep: the round whose models and predictions are kept: "last"; "best", by the mean score on the clients' validation
            examples; "loss", the lowest loss on all validation examples together; or the number of a round.

        cross_site: whether every client's model is scored on every other client's test examples at the end
            (`polyfed.simulation.results.across_sites.cross_site`); in simulations alone, since models travel.
        sampler: how the clients of a round are drawn: "uniform", "available", "power_of_choice" (or
            "power_of_choice:CANDIDATES"), "oort", or module:Class of your own; a mapping with `name` gives options, too.
        speeds: examples that a client goes through in a simulated second: a number, "uniform:1-20", "lognormal:1.0" (or
            "lognormal:SIGMA:MEDIAN"), a CSV or JSON file, or {client: number}. Setting it simulates time.
        bandwidth: bytes that a client sends and receives in a simulated second, as `speeds`; null: messages take no time.
        availability: when clients are available: a CSV file (client, start, end), FedScale's trace as JSON, or
            {client: [[start, end], ...]}, in simulated seconds; null: always.
        asynchronous: the rule of rounds that do not wait for every client, as {rule: fedbuff, buffer: 10} or
            {rule: fedasync, mixing: 0.6}; null: rounds wait for all their clients.

    Raises:
        UserError: a value outside its range, with the value.

    >>> Settings(rounds=2, clients_per_round=0.25).count_round_clients(10)
    3
    """

    rounds: int = 10
    seed: int = 0
    clients_per_round: int | float = 1.0
    engine: EngineName = "auto"
    workers: int | Literal["auto"] = "auto"
    ray_address: str = "local"
    gpus_per_worker: float = 0.0
    device: str = "auto"
    evaluate_every: int = 1
    evaluate_clients: int | float | tuple[str, ...] = 1.0
    evaluate_all_at_end: bool = False
    checkpoint_every: int = 1
    on_error: Literal["raise", "skip"] = "raise"
    min_replies: int = 1
    metrics: tuple[str, ...] = ()
    keep: Keep = "last"
    compress: str = "none"
    compress_down: str = "none"
    secure: bool = False
    regions: int | Mapping[str, str] | None = None
    cross_site: bool = False
    sampler: dict[str, Any] | str = "uniform"
    speeds: float | dict[str, float] | str | None = None
    bandwidth: float | dict[str, float] | str | None = None
    availability: dict[str, Any] | str | None = None
    asynchronous: dict[str, Any] | str | None = None

    def __post_init__(self) -> None:
        convert_numpy_fields_in_place(self)
        listed = isinstance(self.metrics, tuple | list)  # a file has a list
        if not (listed and all(isinstance(name, str) for name in self.metrics)):
            raise UserError(f"metrics must be names such as ('auc', 'accuracy'), got {self.metrics!r}")
        object.__setattr__(self, "metrics", tuple(self.metrics))
        for name in ("rounds", "evaluate_every", "checkpoint_every", "min_replies"):
            check_whole_number(name, getattr(self, name), 1)
        if not is_whole_number(self.seed):
            raise UserError(f"seed must be a whole number, got {self.seed!r}")
        if abs(self.seed) >= 2**63:
            raise UserError(f"seed must be below 2^63, got {self.seed}")
        if not _is_share_or_count(self.clients_per_round):
            raise UserError(
                f"clients_per_round must be a fraction above 0 and at most 1.0, or a number of clients from 1, "
                f"got {self.clients_per_round!r}"
            )
        listed_ids: Any = self.evaluate_clients  # a list in a file
        if isinstance(listed_ids, list):
            object.__setattr__(self, "evaluate_clients", tuple(listed_ids))
        if not (_is_share_or_count(self.evaluate_clients) or _is_list_of_ids(self.evaluate_clients)):
            raise UserError(
                "evaluate_clients must be a fraction above 0 and at most 1.0, a number of clients from 1, or a list of "
                f"different ids, got {self.evaluate_clients!r}"
            )
        words = {"engine": get_args(EngineName), "on_error": ("raise", "skip")}
        for name, choices in words.items():
            if (value := getattr(self, name)) not in choices:
                raise UserError(f"unknown {name} {value!r}; {did_you_mean(str(value), choices)}")
        for name in ("secure", "cross_site", "evaluate_all_at_end"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} must be true or false, got {getattr(self, name)!r}")
        is_round = is_whole_number(self.keep) and 1 <= self.keep <= self.rounds
        if self.keep not in ("last", "best", "loss") and not is_round:
            raise UserError(
                f"keep must be 'last', 'best', 'loss' or a round from 1 to {self.rounds}, got {self.keep!r}"
            )
        if self.workers != "auto" and not (is_whole_number(self.workers, 0) and self.workers <= MAX_COUNT):
            raise UserError(f"workers must be 'auto' or a number of processes from 0, got {self.workers!r}")
        if self.engine in ("pool", "ray") and self.workers == 0:
            raise UserError(f"engine={self.engine!r} needs at least one worker, got workers=0; use engine='inprocess'")
        self._check_ray()
        self._check_compression()
        self._check_scheduling()
        self._check_regions()

    def _check_regions(self) -> None:
        regions = self.regions
        if isinstance(regions, Mapping):
            object.__setattr__(self, "regions", FrozenMapping(regions))
        if isinstance(regions, Mapping) and (
            odd := [i for i, region in regions.items() if not isinstance(region, str)]
        ):
            raise UserError(f"regions: the region of client {odd[0]!r} must be a text, got {regions[odd[0]]!r}")
        if not (regions is None or is_whole_number(regions, 1) or (isinstance(regions, Mapping) and regions)):
            raise UserError(
                f"regions must be a number from 1, or the region of each client, {{client: region}}, got {regions!r}"
            )
        if self.secure and regions is not None:
            raise UserError("secure=True masks replies so that one sum alone can be read; leave regions=... out")

    def _check_ray(self) -> None:
        address, gpus = self.ray_address, self.gpus_per_worker
        if address not in ("local", "auto") and not (isinstance(address, str) and _HOST_AND_PORT.fullmatch(address)):
            raise UserError(f"ray_address must be 'local', 'auto' or HOST:PORT, got {address!r}")
        if not (is_number(gpus) and 0 <= gpus < float("inf") and (gpus <= 1 or gpus == int(gpus))):
            raise UserError(f"gpus_per_worker must be a fraction from 0 to 1 or a number of GPUs, got {gpus!r}")
        if self.engine == "ray" and self.device not in ("auto", "cpu"):
            raise UserError(
                f"engine='ray' takes no device, got {self.device!r}; gpus_per_worker says how much of a GPU each worker has"
            )
        if self.engine == "ray" and self.device == "cpu" and gpus:
            raise UserError(f"device='cpu' and gpus_per_worker={gpus} contradict one another; leave one out")

    def _check_compression(self) -> None:
        for name in ("compress", "compress_down"):
            if (value := getattr(self, name)) == "none":
                continue
            # imported late: it imports torch, which takes the command line too long
            from polyfed.core.messages.compressors import parse_compressor

            method = parse_compressor(value)
            if name == "compress_down" and method is not None and method.needs_reference:
                raise UserError(
                    f"compress_down must be 'none' or 'int8', got {str(value)!r}: the server does not know what a client "
                    "has, and a few entries alone are not a network"
                )
            object.__setattr__(self, name, "none" if method is None else str(method))
        if self.secure and self.compress != "none":
            raise UserError(
                f"compress={self.compress!r} and secure=True exclude one another: replies that were rounded or thinned "
                "each in its own way have no sum; leave one out (compress_down may stay)"
            )

    def _check_scheduling(self) -> None:
        if all(getattr(self, name) is None for name in SCHEDULING_FIELDS[1:]) and self.sampler == "uniform":
            return
        # imported late: they import torch and NumPy, which takes the command line too long
        from polyfed.simulation.scheduling.asynchronous.rules import describe_asynchronous, parse_asynchronous
        from polyfed.simulation.scheduling.sampling.registry import check_sampler
        from polyfed.simulation.scheduling.timing.availability import check_availability
        from polyfed.simulation.scheduling.timing.rates import check_rates

        check_sampler(self.sampler)
        for name in ("speeds", "bandwidth"):
            if (value := getattr(self, name)) is not None:
                check_rates(value, name)
        if self.availability is not None:
            check_availability(self.availability)
        rule = parse_asynchronous(self.asynchronous)
        if rule is not None:
            object.__setattr__(self, "asynchronous", describe_asynchronous(rule))
            if self.secure or self.regions is not None:
                option = "secure=True" if self.secure else "regions=..."
                raise UserError(
                    f"{option} sums the replies of one round, and with asynchronous={rule.rule} replies to several "
                    "versions of the model are added with different weights; leave one of them out"
                )
            if self.min_replies > rule.buffer:
                raise UserError(
                    f"min_replies={self.min_replies} is more than the {rule.buffer} replies of a server update "
                    f"(asynchronous={rule.rule})"
                )

    @property
    def simulates_time(self) -> bool:
        """Returns True if the run simulates how long clients take."""
        return any(getattr(self, name) is not None for name in SCHEDULING_FIELDS[1:])

    @property
    def without_default_scheduling(self) -> dict[str, Any]:
        """Returns all settings as `{name: value}`, but those of `SCHEDULING_FIELDS` only where they are not the default."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in SCHEDULING_FIELDS or value != _SCHEDULING_DEFAULTS[name]
        }

    @property
    def execution_settings(self) -> dict[str, Any]:
        """Returns the settings that say where and how a run computes, as `{name: value}`: engine, workers, device, ..."""
        return {name: getattr(self, name) for name in EXECUTION_FIELDS}

    def count_round_clients(self, num_clients: int) -> int:
        """Returns the number of clients that take part in a round, out of `num_clients`.

        Raises:
            UserError: `clients_per_round` or `min_replies` asks for more clients than there are.
        """
        size = _count_clients("clients_per_round", self.clients_per_round, num_clients)
        if self.min_replies > size:
            raise UserError(f"min_replies={self.min_replies} is more than the {size} clients of a round")
        return size

    def count_evaluated(self, num_clients: int) -> int:
        """Returns the number of clients, out of `num_clients`, that are evaluated after a round that is not the last.

        Raises:
            UserError: `evaluate_clients` asks for more clients than there are.

        >>> Settings(evaluate_clients=0.1).count_evaluated(50), Settings(evaluate_clients=("north",)).count_evaluated(50)
        (5, 1)
        """
        if isinstance(self.evaluate_clients, tuple):
            return len(self.evaluate_clients)
        return _count_clients("evaluate_clients", self.evaluate_clients, num_clients)


def _is_share_or_count(value: Any) -> bool:
    """Returns whether a value is a fraction in (0, 1], or a whole number from 1."""
    if is_whole_number(value):
        return value >= 1
    return isinstance(value, float) and 0 < value <= 1


def _is_list_of_ids(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and bool(value)
        and all(isinstance(client, str) for client in value)
        and len(set(value)) == len(value)
    )


def _count_clients(name: str, share_or_count: float, num_clients: int) -> int:
    """Returns how many of `num_clients` clients a fraction or a whole number means; a fraction means at least one."""
    if isinstance(share_or_count, int):
        if share_or_count > num_clients:
            raise UserError(f"{name}={share_or_count} asks for more clients than the {num_clients} there are")
        return share_or_count
    return max(1, round(share_or_count * num_clients + 1e-9))


def read_scheduling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of `SCHEDULING_FIELDS` in a run's configuration, with their defaults where it has none.

    >>> read_scheduling({"rounds": 3, "speeds": "uniform:1-20"})["sampler"]
    'uniform'
    """
    return {name: config.get(name, default) for name, default in _SCHEDULING_DEFAULTS.items()}
