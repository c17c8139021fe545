"""Builds an experiment from a configuration: data, clients, networks, method and settings."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from polyfed.algorithms import registry_name
from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.examples.examples import Examples
from polyfed.core.io.text.number_format import count_with_noun, join_first_and_count_rest
from polyfed.core.io.text.terminal_text import fold_spelling
from polyfed.core.io.trusted_code import check_code_trusted, import_trusted_dataclass
from polyfed.core.io.values.validation import build_dataclass, validation_error
from polyfed.core.seeds import derive_seed
from polyfed.core.training.config import TRANSFERABLE_FIELDS, LocalTraining
from polyfed.core.training.losses import import_loss
from polyfed.data import (
    PARTITIONS,
    SOURCES,
    PadCropFlip,
    Partition,
    Shift,
    Source,
    Split,
    make_clients,
    partition_fingerprint,
)
from polyfed.data.look.site_statistics import warn_of_coded_values
from polyfed.data.partitioning.partitions import Natural
from polyfed.data.pooled_dataset import PooledDataset
from polyfed.data.table import check_model_per_client
from polyfed.models import ModelSpec
from polyfed.simulation.rounds.columns.federated_preprocessing import apply_preprocessing, fit_common_preprocessing
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.configuration import build_method, build_settings, find_method_class, read_section


@final
@dataclass(frozen=True)
class Experiment:
    """Describes an experiment of the command `polyfed run`: data, partition, networks, method, baselines and settings.

    Attributes:
        source, partition, split, shifts, augment: the data, and how they are divided into clients.
        models: the sections of the networks; assigned to the clients in turn unless `sites` names their owners.
        algorithm, baselines: the methods; baselines by name.
        settings: of each run.
        config: the complete configuration.
        sites: the names of the sites, one for each network of `models`; or empty.
        loss: the user's loss function as `module:name`; None takes the task's own.
    """

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
    """Holds the clients of an experiment, its public examples, and facts about the data.

    Attributes:
        clients: take part in the federation.
        unseen: take no part; they get networks afterwards.
        public: unlabelled examples that belong to no client, or None.
        pool: the data set before it was divided.
        classes: numbers of training examples per class, by client (unseen ones too); empty unless the task has one label.
        partition_fingerprint: a hash of which client has which rows.
        preparation: rounds and bytes that federated preprocessing took; empty without it.
        data_warnings: sentences about the data that the page of a run repeats.
    """

    clients: tuple[Client, ...]
    unseen: tuple[Client, ...]
    public: Examples | None
    pool: PooledDataset
    classes: Mapping[str, tuple[int, ...]]
    partition_fingerprint: str
    preparation: Mapping[str, int] = field(default_factory=dict)
    data_warnings: tuple[str, ...] = ()


def build_experiment(config: Mapping[str, Any]) -> Experiment:
    """Builds the experiment that a complete configuration describes, such as the content of a run's `config.yaml`.

    Raises:
        UserError: a section or field is missing, unknown or out of range.
    """
    data = read_section(config, "data")
    partition, models = read_section(data, "partition"), config.get("model")
    data.pop("partition")
    shifts, augment = data.pop("shifts", None) or (), data.pop("augment", False)
    split = {f.name: data.pop(f.name) for f in dataclasses.fields(Split) if f.name in data}
    models_by_site = (
        models if isinstance(models, Mapping) and models and not isinstance(models.get("name"), str) else {}
    )
    sites = tuple(map(str, models_by_site))
    loss = config.get("loss")
    model_sections: list[Any] = list(models_by_site.values()) or (
        list(models) if isinstance(models, list | tuple) else [models]
    )
    if error_text := (
        validation_error(model_sections, list[dict[str, Any]], "model")
        or validation_error(shifts, list[dict[str, float]], "data.shifts")
        or validation_error(augment, bool, "data.augment")
        or validation_error(loss, str | None, "loss")
        or ("" if model_sections else "model names no network")
        or ("" if all(isinstance(section.get("name"), str) for section in model_sections) else "model has no name")
    ):
        raise UserError(
            f"the configuration is damaged: {error_text}; `polyfed run --print-config` shows a complete one"
        )
    method = build_method(read_section(config, "algorithm"))
    return Experiment(
        source=_build_choice(SOURCES, Source, data, "data"),
        partition=_build_choice(PARTITIONS, Partition, partition, "data.partition"),
        split=build_dataclass(Split, split, "data"),
        shifts=tuple(_build_shift(shift) for shift in shifts),
        augment=augment,
        models=tuple(model_sections),
        algorithm=method,
        baselines=_build_baselines(config.get("baselines") or (), method),
        settings=build_settings(config),
        config=config,
        sites=sites,
        loss=loss,
    )


def _build_choice(registry: Mapping[str, Any], base: type[Any], fields: Mapping[str, Any], section_name: str) -> Any:
    """Builds an object from its fields and the name of a registered class or of `module:Name`."""
    arguments = dict(fields)
    name = str(arguments.pop("name", ""))
    if ":" in name:
        return build_dataclass(import_trusted_dataclass(name, base, base.__name__.lower()), arguments, section_name)
    if name not in registry:
        raise UserError(f"unknown {section_name} {name!r}; {did_you_mean(name, registry)}")
    return build_dataclass(registry[name], arguments, section_name)


def check_ray_cluster_trusted(settings: Settings) -> None:
    """Raises a `UserError` if a file names a remote Ray cluster, whose owner can run code here.

    Raises:
        UserError: the address is not this machine's, and the user has not trusted it.
    """
    if settings.engine == "ray" and settings.ray_address not in ("local", "auto"):
        check_code_trusted(settings.ray_address, f"join the Ray cluster at {settings.ray_address!r}")


def _build_shift(fields: Mapping[str, float]) -> Shift:
    field_names = [field.name for field in dataclasses.fields(Shift)]
    if unknown_names := sorted(set(fields) - set(field_names)):
        raise UserError(f"a shift has no {unknown_names[0]!r}; {did_you_mean(unknown_names[0], field_names)}")
    # The command line parses all numbers of `data.shifts` as floats.
    labels = fields.get("labels", 0)
    fields = dict(fields) | ({"labels": int(labels)} if float(labels).is_integer() else {})
    return build_dataclass(Shift, fields, "data.shifts")


def _build_baselines(entries: Sequence[Any], method: Algorithm[Any, Any]) -> dict[str, Algorithm[Any, Any]]:
    """Builds an experiment's baselines as `{name: method}`; the name is also that of its folder.

    A baseline that equals `method` in every field would repeat its run, and is left out.
    """
    baselines: dict[str, Algorithm[Any, Any]] = {}
    if error_text := validation_error(entries, list[str | dict[str, Any]], "baselines"):
        raise UserError(f"the configuration is damaged: {error_text}")
    for entry in entries:
        fields = {"name": entry} if isinstance(entry, str) else dict(entry)
        name = str(fields.pop("name", ""))
        baseline = build_method_like(name, method, fields)
        if name in baselines:
            raise UserError(
                f"baselines has {name!r} twice, and both would go to the folder baselines/{name}; keep one, and run the "
                "other by itself with another --out"
            )
        if name == registry_name(method) and baseline != method:
            raise UserError(
                f"baselines has {name!r}, which is also the method of the run, with other fields; take it out of "
                "--baselines, and run it by itself with another --out"
            )
        baselines[name] = baseline
    return {name: baseline for name, baseline in baselines.items() if name != registry_name(method)}


def build_method_like(
    name: str, method: Algorithm[Any, Any], fields: Mapping[str, Any] | None = None
) -> Algorithm[Any, Any]:
    """Builds a method with the local training of `method`, which `fields` override.

    Each keeps its own policy for buffers, and `fields` override both.

    >>> from polyfed.algorithms import get
    >>> build_method_like("local", get("fedprox")(lr=0.5, mu=1)).lr
    0.5
    >>> build_method_like("fedprox", get("local")(lr=0.5), {"mu": 0.25}).mu
    0.25
    """
    shared = {n: getattr(method, n) for n in TRANSFERABLE_FIELDS} if isinstance(method, LocalTraining) else {}
    method_class = find_method_class(name)
    return build_dataclass(method_class, {**shared, **(fields or {})}, name)


def load_participants(experiment: Experiment) -> Participants:
    """Loads the data of an experiment, and partitions them into clients.

    Raises:
        UserError: the data cannot be read, or the partition is impossible.
    """
    pool = experiment.source.load()
    seed = derive_seed(experiment.settings.seed, "partition")
    augment = PadCropFlip() if experiment.augment else None
    if experiment.split.test_fraction == 0:
        raise UserError("test_fraction must be above 0, got 0.0: clients without test examples cannot be evaluated")
    data, public = make_clients(pool, experiment.split, experiment.partition, seed, experiment.shifts, augment, False)
    if untested := [d for d in data if not len(d.test)]:
        folded, others = fold_spelling(untested[0].id), [d.id for d in data if d is not untested[0]]
        alike = [name for name in others if len(untested) == 1 and fold_spelling(name) == folded]
        largest = f"--data.partition.order largest --data.clients {len(data) - len(untested)}"
        names = join_first_and_count_rest([d.id for d in untested], 10)
        number = count_with_noun(max(len(d.train) for d in untested), "example")
        raise UserError(
            f"{names} {f'have at most {number} each' if len(untested) > 1 else f'has {number}'}, too few to test on; "
            + (f"it may be another spelling of {alike[0]}: spell them alike in the table" if alike else
               f"take such sites out of the data, or keep the largest alone ({largest})"
               if isinstance(experiment.partition, Natural) else
               "use fewer clients, or a partition that gives each client at least 2")
        )  # fmt: skip
    if pool.preprocessor is not None:
        warn_of_coded_values(data)
    specs = [model_spec_for_data(m, pool) for m in experiment.models]
    client_specs = [specs[i % len(specs)] for i in range(len(data))]
    if experiment.sites:
        by_site = dict(zip(experiment.sites, specs, strict=True))
        check_model_per_client(by_site, [d.id for d in data])
        client_specs = [by_site[d.id] for d in data]
    loss = None if experiment.loss is None else import_loss(experiment.loss)
    clients = tuple(
        Client(d.id, client_specs[i], d.train, d.test, d.val, d.global_test, pool.task, loss)
        for i, d in enumerate(data)
    )
    classes = {}
    if pool.task.counts_each_example_once:
        counts_by_client = {c.id: pool.task.class_counts(c.train.labels, pool.num_outputs) for c in clients}
        classes = {client: counts for client, counts in counts_by_client.items() if counts is not None}
    num_federating, preparation = len(clients) - experiment.split.unseen, dict[str, int]()
    if pool.preprocessor is not None and pool.preprocessor.scope == "federated":
        settings = experiment.settings
        common = fit_common_preprocessing(clients[:num_federating], seed=settings.seed, secure=settings.secure)
        clients = tuple(apply_preprocessing(client, common.prepared) for client in clients)
        public = None if public is None else dataclasses.replace(public, transform=common.prepared)
        preparation = dict(common.facts)
    federating, unseen = clients[:num_federating], clients[num_federating:]
    return Participants(
        federating, unseen, public, pool, classes, partition_fingerprint([d.rows for d in data]), preparation
    )


def describe_participants(loaded: Participants) -> dict[str, Any]:
    """Returns facts for `manifest.json`: the partition's fingerprint, class names, and data warnings."""
    facts = {
        "partition_fingerprint": loaded.partition_fingerprint, "class_names": list(map(str, loaded.pool.class_names))
    }  # fmt: skip
    return facts | ({"data_warnings": list(loaded.data_warnings)} if loaded.data_warnings else {})


def model_spec_for_data(model: Mapping[str, Any], pool: PooledDataset) -> ModelSpec:
    """Builds a network's specification for a data set from a `model` section of the configuration.

    Raises:
        UserError: an unknown name or argument, or a vocabulary smaller than that of the data.
    """
    arguments = {k: v for k, v in model.items() if k != "name"}
    spec = ModelSpec(model["name"], arguments, pool.input_shape, pool.num_outputs)
    size = spec.arguments.get("vocabulary", len(pool.vocabulary))
    if pool.vocabulary and size < len(pool.vocabulary):
        raise UserError(
            f"the text has {len(pool.vocabulary)} tokens, but the network {spec.name} is built for {size}; "
            f"give --model.vocabulary {len(pool.vocabulary)} or a smaller --data.vocabulary_size"
        )
    return spec


def rebuild_clients(config: Mapping[str, Any], out: str | Path) -> tuple[tuple[Client, ...], Examples | None]:
    """Builds the clients and public examples of an existing run again from its configuration.

    Raises:
        UserError: the run has clients that were made in Python, or real sites.
    """
    if "deployment" in config:
        raise UserError(
            f"the run in {out} is of real sites: go on with it by polyfed flower run PROJECT --resume {out}"
        )
    if "data" not in config:
        raise UserError(
            f"the clients of {out} were made in Python; go on with it there: polyfed.resume({str(out)!r}, clients=[...])"
        )
    loaded = load_participants(build_experiment(config))
    return loaded.clients, loaded.public
