"""Converts the method and settings of a run to the content of `config.yaml`, and back."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, final

from polyfed.algorithms import get, registry_name
from polyfed.core.algorithm import Algorithm
from polyfed.core.errors import UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.metrics import is_built_in_metric, metric_path_or_name, resolve_metrics
from polyfed.core.io.trusted_code import find_trusted_import_path, import_trusted_dataclass
from polyfed.core.io.values.plain_values import to_plain_values
from polyfed.core.io.values.validation import build_dataclass, validation_error
from polyfed.core.tasks.task import Task, TaskSpec
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.privacy.options import Privacy
from polyfed.simulation.settings import Settings

_ABSENT = "(absent)"  # stands for a field without a value


def describe_method_and_settings(algorithm: Algorithm[Any, Any], settings: Settings) -> dict[str, Any]:
    """Returns the content of `config.yaml`: all settings, and the method's name and fields."""
    return {"algorithm": _describe_method(algorithm), **to_plain_values(dataclasses.asdict(settings), "settings")}


def _describe_method(algorithm: Algorithm[Any, Any]) -> dict[str, Any]:
    fields = {f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm)}  # type: ignore[arg-type]
    if isinstance(privacy := fields.get("privacy"), Privacy):
        fields["privacy"] = dataclasses.asdict(privacy)
    return {
        "name": find_trusted_import_path(type(algorithm)) or registry_name(algorithm),
        **to_plain_values(fields, registry_name(algorithm)),
    }


@final
class RestoredConfiguration(NamedTuple):
    """Holds the settings and the method of a run, as restored from its `config.yaml`."""

    settings: Settings
    method: Algorithm[Any, Any]


def restore_settings_and_method(
    config: Mapping[str, Any], algorithm: Algorithm[Any, Any] | None
) -> RestoredConfiguration:
    """Restores the settings and the method of a run from its `config.yaml`.

    Args:
        config: the content of `config.yaml`.
        algorithm: the method that the caller gives; None builds it from the configuration.

    Raises:
        UserError: `algorithm` is not the method of the run.
    """
    settings = build_settings(config)
    saved = read_section(config, "algorithm")
    if not isinstance(algorithm, Algorithm):  # None, or something that `federate` rejects later
        return RestoredConfiguration(settings, build_method(saved) if algorithm is None else algorithm)
    if isinstance(algorithm, LocalTraining):
        algorithm = algorithm.with_privacy_of_run(settings.rounds)
    current = _describe_method(algorithm)
    declared_fields = dataclasses.fields(algorithm)  # type: ignore[arg-type]
    # A field that was added to the method after the run began had its default there.
    default_by_field = {
        f.name: f.default for f in declared_fields if f.name not in saved and f.default is not dataclasses.MISSING
    }
    saved = {**to_plain_values(default_by_field, registry_name(algorithm)), **saved}
    if changed_names := sorted(
        f for f in current.keys() | saved.keys() if current.get(f, _ABSENT) != saved.get(f, _ABSENT)
    ):
        changes = ", ".join(
            f"{f} was {saved.get(f, _ABSENT)!r} and is now {current.get(f, _ABSENT)!r}" for f in changed_names
        )
        raise UserError(f"algorithm is not that of the run: {changes}; resume with the same, or start another run")
    return RestoredConfiguration(settings, algorithm)


def build_settings(config: Mapping[str, Any]) -> Settings:
    """Builds the `Settings` from a configuration.

    Raises:
        UserError: a value of the wrong type or outside its range.
    """
    names = [f.name for f in dataclasses.fields(Settings)]
    return build_dataclass(Settings, {name: config[name] for name in names if name in config}, "the configuration")


def read_section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a section of a configuration as a mapping with the key `name` and further fields.

    Raises:
        UserError: the section is missing, or no such mapping.
    """
    if name not in config:
        raise UserError(f"the configuration lacks {name!r}; `polyfed run --print-config` shows a complete one")
    if error_text := validation_error(config[name], dict[str, Any], name):
        raise UserError(
            f"the configuration is damaged: {error_text}; `polyfed run --print-config` shows a complete one"
        )
    return dict(config[name])


def build_method(fields: Mapping[str, Any]) -> Algorithm[Any, Any]:
    """Builds a method from its name and fields, as in a configuration file.

    Raises:
        UserError: an unknown method, or a field that it does not have.
    """
    arguments = dict(fields)
    method_class = find_method_class(str(arguments.pop("name", "")))
    return build_dataclass(method_class, arguments, "algorithm")


def find_method_class(name: str) -> type[Algorithm[Any, Any]]:
    """Returns the class of a method, by its name in the registry, or by `module:Name` for a user's class.

    Raises:
        UserError: there is no such method.

    >>> find_method_class("fedavg").__name__
    'FedAvg'
    """
    base: Any = Algorithm
    method_class: type[Algorithm[Any, Any]] = (
        import_trusted_dataclass(name, base, "method") if ":" in name else get(name)
    )
    return method_class


def resolve_or_restore_metrics(
    settings: Settings, metrics: Any, task: Task, resumed: Any
) -> tuple[Settings, tuple[Metric, ...]]:
    """Returns the settings with the names of the metrics, and the metrics, of a run that begins or is `resumed`."""
    if resumed is not None:
        return settings, restore_metrics(settings, metrics, task, resumed)
    resolved = resolve_metrics(metrics, task)
    names = () if metrics is None else tuple(map(metric_path_or_name, resolved))
    return dataclasses.replace(settings, metrics=names), resolved


def restore_metrics(settings: Settings, metrics: Any, task: Task | TaskSpec, out: Any) -> tuple[Metric, ...]:
    """Restores the metrics of a run from their names in its `config.yaml`.

    Args:
        settings: of the run.
        metrics: the metrics that the caller gives; None takes those in the settings.
        task: of the clients.
        out: the run directory, for the error message.

    Raises:
        UserError: `metrics` are not those of the run, or one that is not built in is missing.
    """
    names = settings.metrics
    if metrics is not None:
        resolved = resolve_metrics(metrics, task)
        current_names = tuple(map(metric_path_or_name, resolved))
        if current_names != (names or tuple(metric.name for metric in resolve_metrics(None, task))):
            raise UserError(
                f"metrics are not those of the run: they were {', '.join(names) or 'not given'} and are now "
                f"{', '.join(current_names)}; resume with the same, or start another run"
            )
        return resolved
    if custom_names := [name for name in names if not is_built_in_metric(name) and ":" not in name]:
        raise UserError(
            f"the run in {out} has the metric {custom_names[0]!r}, which is not built in; give its metrics again: "
            f"polyfed.resume({str(out)!r}, metrics=[...])"
        )
    return resolve_metrics(names, task)
