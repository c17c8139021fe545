"""An experiment: data, clients, networks, method and settings, as a configuration describes them."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from polyfed.algorithms import name_of
from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.code import check_trusted, class_named
from polyfed.core.errors import UserError, nearest
from polyfed.core.examples import Examples
from polyfed.core.objectives import loss_named
from polyfed.core.seeds import derive
from polyfed.core.training import TAKEN_OVER, LocalTraining
from polyfed.core.typed import conforms, made
from polyfed.data import PARTITIONS, SOURCES, PadCropFlip, Partition, Shift, Source, Split, fingerprint, make_clients
from polyfed.data.pool import Pool
from polyfed.data.sites import check_sites
from polyfed.models import ModelSpec
from polyfed.simulation.preparing import agree, with_prepared
from polyfed.simulation.runs.configuration import kind_of, method_of, section, settings_of
from polyfed.simulation.settings import Settings


@final
@dataclass(frozen=True)
class Experiment:
    """What `polyfed run` runs. `config` is the complete configuration from which it was made; `sites`, whose the networks in
    `models` are, by name, or empty: then they are dealt in turn; `loss`, the user's own by `module:name`, or None."""

    source: Source
    partition: Partition
    split: Split
    shifts: tuple[Shift, ...]
    augment: bool
    models: tuple[Mapping[str, Any], ...]
    algorithm: Algorithm[Any, Any]
    baselines: Mapping[str, Algorithm[Any, Any]]
    settings: Settings
    config: Mapping[str, Any]
    sites: tuple[str, ...] = ()
    loss: str | None = None


@final
@dataclass(frozen=True)
class Participants:
    """The clients of an experiment, its public examples, and what is known of the data.

    Attributes: `clients`, who federate; `unseen`, who come after; `classes`, the number of training examples per class
    of each client and unseen client, for one-label tasks; `partition_fingerprint`, a hash of who owns which rows;
    `preparation`, what preprocessing from sums over all sites has cost.
    """

    clients: tuple[Client, ...]
    unseen: tuple[Client, ...]
    public: Examples | None
    pool: Pool
    classes: Mapping[str, tuple[int, ...]]
    partition_fingerprint: str
    preparation: Mapping[str, int] = field(default_factory=dict)


def from_config(config: Mapping[str, Any]) -> Experiment:
    """The experiment of a complete configuration (of `polyfed.cli.commands.options.parse`, or a run's `config.yaml`).

    Raises:
        UserError: a section or field is missing, unknown or out of range.
    """
    data = section(config, "data")
    partition, models = section(data, "partition"), config.get("model")
    data.pop("partition")
    shifts, augment = data.pop("shifts", None) or (), data.pop("augment", False)
    split = {f.name: data.pop(f.name) for f in dataclasses.fields(Split) if f.name in data}
    named = models if isinstance(models, Mapping) and models and not isinstance(models.get("name"), str) else {}
    sites = tuple(map(str, named))
    loss = config.get("loss")
    several: list[Any] = list(named.values()) or (list(models) if isinstance(models, list | tuple) else [models])
    wrong = conforms(several, list[dict[str, Any]], "model") or conforms(shifts, list[dict[str, float]], "data.shifts")
    wrong = (
        wrong
        or conforms(augment, bool, "data.augment")
        or conforms(loss, str | None, "loss")
        or ("" if several else "model names no network")
    )
    wrong = wrong or conforms(loss, str | None, "loss")
    if wrong := wrong or next(("model has no name" for one in several if not isinstance(one.get("name"), str)), ""):
        raise UserError(f"the configuration is damaged: {wrong}; `polyfed run --print-config` shows a complete one")
    method = method_of(section(config, "algorithm"))
    return Experiment(
        source=_choice(SOURCES, Source, data, "data"),
        partition=_choice(PARTITIONS, Partition, partition, "data.partition"),
        split=made(Split, split, "data"),
        shifts=tuple(_shift(shift) for shift in shifts),
        augment=augment,
        models=tuple(several),
        algorithm=method,
        baselines=_baselines(config.get("baselines") or (), method),
        settings=settings_of(config),
        config=config,
        sites=sites,
        loss=loss,
    )


def _choice(registry: Mapping[str, Any], base: type[Any], fields: Mapping[str, Any], what: str) -> Any:
    """A choice of a registry, or a class of the user's by `module:Name`, from its name and fields."""
    rest = dict(fields)
    name = str(rest.pop("name", ""))
    if ":" in name:
        return made(class_named(name, base, base.__name__.lower()), rest, what)
    if name not in registry:
        raise UserError(f"unknown {what} {name!r}; {nearest(name, registry)}")
    return made(registry[name], rest, what)


def check_cluster(settings: Settings) -> None:
    """Raises if a file names the Ray cluster that is to run the clients: who runs a cluster runs code where it is joined.

    Raises:
        UserError: another address than this machine's, which nobody allowed.
    """
    if settings.engine == "ray" and settings.ray_address not in ("local", "auto"):
        check_trusted(settings.ray_address, f"join the Ray cluster at {settings.ray_address!r}")


def _shift(fields: Mapping[str, float]) -> Shift:
    known = [field.name for field in dataclasses.fields(Shift)]
    if unknown := sorted(set(fields) - set(known)):
        raise UserError(f"a shift has no {unknown[0]!r}; {nearest(unknown[0], known)}")
    # The type of `data.shifts` makes all its numbers floats.
    labels = fields.get("labels", 0)
    fields = dict(fields) | ({"labels": int(labels)} if float(labels).is_integer() else {})
    return made(Shift, fields, "data.shifts")


def _baselines(entries: Sequence[Any], method: Algorithm[Any, Any]) -> dict[str, Algorithm[Any, Any]]:
    """The methods to run beside `method`, by name, which is also that of their folder. One that is `method` itself, alike
    in every field, would repeat the same run and is left out."""
    found: dict[str, Algorithm[Any, Any]] = {}
    if wrong := conforms(entries, list[str | dict[str, Any]], "baselines"):
        raise UserError(f"the configuration is damaged: {wrong}")
    for entry in entries:
        fields = {"name": entry} if isinstance(entry, str) else dict(entry)
        name = str(fields.pop("name", ""))
        baseline = like(name, method, fields)
        if name in found:
            raise UserError(
                f"baselines has {name!r} twice, and both would go to the folder baselines/{name}; keep one, and run the "
                "other by itself with another --out"
            )
        if name == name_of(method) and baseline != method:
            raise UserError(
                f"baselines has {name!r}, which is also the method of the run, with other fields; take it out of "
                "--baselines, and run it by itself with another --out"
            )
        found[name] = baseline
    return {name: baseline for name, baseline in found.items() if name != name_of(method)}


def like(name: str, method: Algorithm[Any, Any], fields: Mapping[str, Any] | None = None) -> Algorithm[Any, Any]:
    """The method `name` with the local training of `method`, so that both spend the same; each keeps its own policy for
    buffers. `fields` win over that.

    >>> from polyfed.algorithms import get
    >>> like("local", get("fedprox")(lr=0.5, mu=1)).lr
    0.5
    >>> like("fedprox", get("local")(lr=0.5), {"mu": 0.25}).mu
    0.25
    """
    shared = {n: getattr(method, n) for n in TAKEN_OVER} if isinstance(method, LocalTraining) else {}
    return made(kind_of(name), {**shared, **(fields or {})}, name)


def participants(experiment: Experiment) -> Participants:
    """Loads the data and deals it to the clients.

    Raises:
        UserError: the data cannot be read, or the partition is impossible.
    """
    pool = experiment.source.load()
    seed = derive(experiment.settings.seed, "partition")
    augment = PadCropFlip() if experiment.augment else None
    if experiment.split.test_fraction == 0:
        raise UserError("test_fraction must be above 0, got 0.0: clients without test examples cannot be evaluated")
    data, public = make_clients(pool, experiment.split, experiment.partition, seed, experiment.shifts, augment, False)
    if untested := [d for d in data if not len(d.test)]:
        raise UserError(
            f"{untested[0].id} has {len(untested[0].train)} example, too few to test on; use fewer clients, or "
            "a partition that gives each client at least 2; leave a site out that has so few rows"
        )
    specs = [network(m, pool) for m in experiment.models]
    own = [specs[i % len(specs)] for i in range(len(data))]
    if experiment.sites:
        by_site = dict(zip(experiment.sites, specs, strict=True))
        check_sites(by_site, [d.id for d in data])
        own = [by_site[d.id] for d in data]
    loss = None if experiment.loss is None else loss_named(experiment.loss)
    clients = tuple(
        Client(d.id, own[i], d.train, d.test, d.val, d.global_test, pool.task, loss) for i, d in enumerate(data)
    )
    classes = {}
    if pool.task == "classification":
        classes = {c.id: tuple(c.train.labels.bincount(minlength=pool.num_classes).tolist()) for c in clients}
    stay, preparation = len(clients) - experiment.split.unseen, dict[str, int]()
    if pool.prepared is not None and pool.prepared.scope == "federated":
        settings = experiment.settings
        agreed = agree(clients[:stay], seed=settings.seed, secure=settings.secure)
        clients = tuple(with_prepared(client, agreed.prepared) for client in clients)
        public = None if public is None else dataclasses.replace(public, transform=agreed.prepared)
        preparation = dict(agreed.facts)
    seen, unseen = clients[:stay], clients[stay:]
    return Participants(seen, unseen, public, pool, classes, fingerprint([d.rows for d in data]), preparation)


def facts_of(found: Participants) -> dict[str, Any]:
    """What `manifest.json` tells of the data."""
    return {
        "partition_fingerprint": found.partition_fingerprint, "class_names": list(map(str, found.pool.class_names))
    }  # fmt: skip


def network(model: Mapping[str, Any], pool: Pool) -> ModelSpec:
    """The network of a section `model` for these data.

    Raises:
        UserError: an unknown name or argument, or a vocabulary smaller than that of the data.
    """
    arguments = {k: v for k, v in model.items() if k != "name"}
    spec = ModelSpec(model["name"], arguments, pool.input_shape, pool.num_classes)
    size = spec.arguments.get("vocabulary", len(pool.vocabulary))
    if pool.vocabulary and size < len(pool.vocabulary):
        raise UserError(
            f"the text has {len(pool.vocabulary)} tokens, but the network {spec.name} is built for {size}; "
            f"give --model.vocabulary {len(pool.vocabulary)} or a smaller --data.vocabulary_size"
        )
    return spec


def rebuild(config: Mapping[str, Any], out: str | Path) -> tuple[tuple[Client, ...], Examples | None]:
    """Clients and public examples of a run from its configuration.

    Raises:
        UserError: the run was started in Python with clients of the user's own.
    """
    if "deployment" in config:
        raise UserError(
            f"the run in {out} is of real sites: go on with it by polyfed flower run PROJECT --resume {out}"
        )
    if "data" not in config:
        raise UserError(
            f"the clients of {out} were made in Python; go on with it there: polyfed.resume({str(out)!r}, clients=[...])"
        )
    found = participants(from_config(config))
    return found.clients, found.public
