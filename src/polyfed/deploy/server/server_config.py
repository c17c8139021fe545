"""Builds the server of a deployment from its configuration or, for a resumed run, from its run directory."""

import dataclasses
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from polyfed.algorithms import get, registry_name
from polyfed.core.algorithm import Algorithm, Architecture
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.evaluation.metrics import METRICS, is_built_in_metric
from polyfed.core.examples.as_examples import as_examples
from polyfed.core.examples.examples import Examples
from polyfed.core.io.atomic_files import expand_user_path
from polyfed.core.io.trusted_code import execute_file_and_get_function, is_code_trusted, trust_code
from polyfed.core.io.values.keyword_names import OTHER_NAMES
from polyfed.core.io.values.validation import parse_yaml
from polyfed.core.messages.lora import architecture_key_without_averaged_lora_ranks
from polyfed.core.methods.declared_words import CONSENT
from polyfed.core.nn.module_cache import cached_module
from polyfed.core.training.config import LocalTraining
from polyfed.deploy.server.server import Deployment, DeploymentServer
from polyfed.deploy.server.update_bound import bound_updates
from polyfed.simulation.checks.settings.method_settings import check_robust_rule
from polyfed.simulation.checks.settings.private_training import check_privacy_covers_method
from polyfed.simulation.checks.settings.scheduling import check_asynchronous_support
from polyfed.simulation.rounds.replies.secure_aggregation import check_secure_support, effective_disclosures
from polyfed.simulation.scheduling.asynchronous.rules import parse_asynchronous
from polyfed.simulation.settings import SCHEDULING_FIELDS, Settings
from polyfed.simulation.storage.configuration import restore_settings_and_method
from polyfed.simulation.storage.directory import RunDirectory, check_can_become_run_directory, read_config

_LOG = logging.getLogger("polyfed.server")


def build_or_restore_server(config: Mapping[str, Any]) -> DeploymentServer:
    """Builds the server of a deployment from Flower's flat configuration {option: value}.

    Args:
        config: fields of `Deployment` and `Settings` with hyphens (`sites` separated by commas; `file` is the server's
            Python file), `algorithm.name`, and the method's fields as `algorithm.FIELD`.

    Raises:
        UserError: a key is missing or unknown, a value does not fit, or consent is missing.

    >>> server = build_or_restore_server(
    ...     {"sites": "north,south", "out": "run", "rounds": 3, "algorithm.name": "local", "algorithm.lr": 0.1})
    >>> server.algorithm.lr, server.settings.rounds, server.deployment.sites
    (0.1, 3, ('north', 'south'))
    """
    deployment, method_fields, setting_values = _split_configuration(config)
    if deployment.resume:
        return _configure_resumed_server(deployment)
    check_can_become_run_directory(deployment.out)  # before any site is asked
    algorithm, settings = _build_method_and_settings(deployment, method_fields, setting_values)
    return _check_and_build_server(deployment, algorithm, settings, secrets.token_hex(8))


def check_server_configuration(config: Mapping[str, Any]) -> None:
    """Raises the `UserError` of `build_or_restore_server` for a new run, as far as no code of the operator is needed."""
    deployment, method_fields, setting_values = _split_configuration(config)
    _check_method_and_consent(deployment, *_build_method_and_settings(deployment, method_fields, setting_values))


def _split_configuration(config: Mapping[str, Any]) -> tuple[Deployment, dict[str, Any], dict[str, Any]]:
    """Returns the deployment of a flat configuration, the fields of its method with the name, and those of `Settings`."""
    options = {str(key): value for key, value in config.items() if value != ""}
    field_by_option = {f.name.replace("_", "-"): f.name for f in dataclasses.fields(Deployment)}
    setting_options = (
        "rounds", "seed", "clients-per-round", "evaluate-every", "checkpoint-every", "on-error", "min-replies",
        "metrics", "compress", "compress-down", "secure",
    )  # fmt: skip
    _remove_or_refuse_simulation_options(options)
    asynchronous = _take_asynchronous_rule(options)
    method_fields = {key.partition(".")[2]: value for key, value in options.items() if key.startswith("algorithm.")}
    privacy_words = [key for key in method_fields if key.startswith("privacy.")]
    if privacy_options := {key.partition(".")[2]: _parse_field_value(method_fields.pop(key)) for key in privacy_words}:
        method_fields["privacy"] = privacy_options
    choices = [*field_by_option, *setting_options, "algorithm.name"]
    if unknown := [key for key in options if key not in choices and not key.startswith("algorithm.")]:
        likely = OTHER_NAMES.get(unknown[0].replace("-", "_"), unknown[0])
        raise UserError(f"the configuration has no {unknown[0]!r}; {did_you_mean(likely, choices)}")
    for key in ("sites", "out"):
        if key not in options:
            raise UserError(f"the configuration lacks {key}")
    values = {field_by_option[key]: value for key, value in options.items() if key in field_by_option}
    values["sites"] = tuple(name.strip() for name in str(values["sites"]).split(",") if name.strip())
    values["out"] = expand_user_path(str(values["out"]), "out")
    values["file"] = None if "file" not in values else expand_user_path(str(values["file"]), "file")
    deployment = Deployment(**values)
    if deployment.file is not None:  # the operator has named it, unlike a file named in a run directory
        trust_code(str(deployment.file))
    setting_values = {k.replace("-", "_"): options[k] for k in setting_options if k in options}
    return deployment, method_fields, {**setting_values, "asynchronous": asynchronous}


def _build_method_and_settings(
    deployment: Deployment, method_fields: dict[str, Any], setting_values: Mapping[str, Any]
) -> tuple[Algorithm[Any, Any], Settings]:
    """Builds the method, with the bound on updates, and the settings."""
    if "name" not in method_fields:
        raise UserError('the configuration lacks algorithm.name; for example algorithm.name = "flha_ghn"')
    method_class = get(str(method_fields.pop("name")))
    fields = {f.name for f in dataclasses.fields(method_class)}  # type: ignore[arg-type]
    if unknown_fields := sorted(set(method_fields) - fields):
        raise UserError(
            f"algorithm.{unknown_fields[0]} is not a field of the method; {did_you_mean(unknown_fields[0], fields)}"
        )
    algorithm = method_class(**{name: _parse_field_value(value) for name, value in method_fields.items()})
    names = tuple(name.strip() for name in str(setting_values.get("metrics", "")).split(",") if name.strip())
    if unknown := [name for name in names if not is_built_in_metric(name)]:
        raise UserError(f"metrics has {unknown[0]!r}, which sites do not know; {did_you_mean(unknown[0], METRICS)}")
    settings = Settings(**{"on_error": "skip", **setting_values, "metrics": names})
    bounded = bound_updates(algorithm, deployment.max_update_norm, secure=settings.secure)
    _LOG.info("%s", bounded.sentence)
    return bounded.algorithm, settings


def _remove_or_refuse_simulation_options(options: dict[str, Any]) -> None:
    """Removes options of simulations that ask for nothing, and raises a `UserError` for others."""
    if (keep := options.pop("keep", "last")) != "last":
        raise UserError(
            f"keep = {keep!r} is not possible between sites, which keep only their newest states; leave it out"
        )
    if options.pop("evaluate-clients", None) is not None or options.pop("evaluate-all-at-end", None):
        raise UserError(
            "evaluate-clients draws some of many clients for a simulation; between sites every site is evaluated, with the "
            "messages of the next round; leave it out"
        )
    if options.pop("cross-site", False):
        raise UserError(
            "cross-site scores every site's model on the other sites' test examples, for which models would travel between "
            "sites; it is for simulations alone, so leave it out"
        )
    simulated = set(SCHEDULING_FIELDS) - {"asynchronous"}
    if refused := sorted(name for name in simulated if any(key.partition(".")[0] == name for key in options)):
        raise UserError(
            f"{refused[0]} is for simulations alone: real sites take the time that they take, and a round draws its sites "
            "uniformly; leave it out"
        )


def _take_asynchronous_rule(options: dict[str, Any]) -> dict[str, Any] | None:
    """Removes the options `asynchronous` or `asynchronous.FIELD`, and returns them; None without any."""
    keys = [key for key in options if key.partition(".")[0] == "asynchronous"]
    values = {key.partition(".")[2] or "rule": _parse_field_value(options.pop(key)) for key in keys}
    return {name: value for name, value in values.items() if value is not None} or None


def _parse_field_value(value: Any) -> Any:
    """Returns a method field's value; Flower knows no lists and no null, which are read as YAML."""
    if isinstance(value, str) and (value[:1] in "[{" or value in ("null", "none")):
        try:
            return None if value == "none" else parse_yaml(value)
        except ValueError as error:
            raise UserError(f"{value[:60]!r} in the configuration is not a list, mapping or null: {error}") from error
    return value


def _configure_resumed_server(deployment: Deployment) -> DeploymentServer:
    """Builds a resumed run's server from its directory; sites and consents must be configured anew."""
    config = read_config(deployment.out)
    if "deployment" not in config:
        raise UserError(f"{deployment.out} is the directory of a simulation: polyfed resume {deployment.out}")
    settings, algorithm = restore_settings_and_method(config, None)
    directory = RunDirectory.open(deployment.out)
    try:
        manifest = directory.read_manifest()
    finally:
        directory.close()
    saved_deployment = dict(config["deployment"])
    if set(saved_deployment["sites"]) != set(deployment.sites):
        raise UserError(
            f"the run in {deployment.out} is of {', '.join(saved_deployment['sites'])}, not of "
            f"{', '.join(deployment.sites)}; give the same sites"
        )
    file = deployment.file or (Path(saved_deployment["file"]) if saved_deployment.get("file") else None)
    saved_limits = {name: saved_deployment[name] for name in ("join_seconds", "round_seconds", "max_megabytes")}
    saved_limits["secure_threshold"] = saved_deployment.get("secure_threshold")
    # A run that began without a bound goes on without; its method says so in any case.
    saved_limits["max_update_norm"] = saved_deployment.get("max_update_norm", "off")
    server = _check_and_build_server(
        dataclasses.replace(deployment, file=file, **saved_limits),
        algorithm,
        settings,
        str(manifest.get("deployment", "")),
    )
    return dataclasses.replace(
        server, first_introductions=manifest.get("told", {}), preprocessing=manifest.get("prepared")
    )


def _check_method_and_consent(
    deployment: Deployment, algorithm: Algorithm[Any, Any], settings: Settings
) -> Algorithm[Any, Any]:
    """Checks settings and consents, and returns the method, with the noise that the run needs."""
    needs, name = algorithm.requires, registry_name(algorithm)
    parties = settings.count_round_clients(len(deployment.sites))
    if (rule := parse_asynchronous(settings.asynchronous)) is not None:
        check_asynchronous_support(algorithm, rule)
        if rule.buffer > len(deployment.sites):
            raise UserError(
                f"asynchronous.buffer = {rule.buffer} waits for more sites than the {len(deployment.sites)} there are; a "
                "site sends one reply to a buffer"
            )
        if settings.evaluate_every == 1 < settings.rounds:
            raise UserError(
                "asynchronous rounds do not wait for slow sites, but an evaluation waits for all, and evaluate-every = 1 "
                f"evaluates after each; give evaluate-every = {settings.rounds} (after the last), or a number between"
            )
    if settings.secure:
        check_secure_support(algorithm, parties)
    check_robust_rule(algorithm, settings, parties)
    if isinstance(algorithm, LocalTraining) and algorithm.privacy is not None:
        check_privacy_covers_method(algorithm, deployment.sites)
        algorithm = algorithm.with_privacy_of_run(settings.rounds)
    if settings.secure and not parties // 2 < (deployment.secure_threshold or parties) <= parties:
        raise UserError(
            f"secure-threshold must be above half of the {parties} sites of a round, and at most {parties}, got "
            f"{deployment.secure_threshold}"
        )
    if not deployment.allow_disclosure and (
        disclosures := sorted(effective_disclosures(algorithm, settings.secure) & CONSENT)
    ):
        raise UserError(
            f"{name} discloses {' and '.join(disclosures)} of the sites to the server; if they agree, allow it: "
            "polyfed flower run DIR --allow-disclosure, and allow-disclosure=true at each site"
        )
    if "layer_catalogue" in needs and getattr(algorithm, "catalogue", None) is None:
        raise UserError(
            f"{name} needs a layer catalogue that the sites have agreed on, so that none has to list its layers: "
            'algorithm.catalogue = "/path/catalogue.yaml"; each site adds to it with `polyfed graph MODEL --catalogue FILE`'
        )
    return algorithm


def _check_and_build_server(
    deployment: Deployment, algorithm: Algorithm[Any, Any], settings: Settings, run: str
) -> DeploymentServer:
    """Checks settings and consents, loads networks and public examples, and builds the server."""
    algorithm = _check_method_and_consent(deployment, algorithm, settings)
    needs, name = algorithm.requires, registry_name(algorithm)
    models: dict[str, Architecture] = {}
    if "one_architecture" in needs:
        model: Architecture = _load_server_function(deployment, "model", f"{name} needs one architecture")
        models = {architecture_key_without_averaged_lora_ranks(algorithm, cached_module(model)): model}
    if "architectures" in needs:
        factories: Sequence[Architecture] = _load_server_function(
            deployment, "architectures", f"{name} needs all architectures"
        )()
        models = {cached_module(factory).architecture: factory for factory in factories}
    public: Examples | None = None
    if "public_data" in needs:
        source = _load_server_function(deployment, "public", f"{name} needs public examples")()
        public = as_examples(source, "public()", labelled=False)
        if not len(public):
            raise UserError(f"public() in {deployment.file} gives no examples, and {name} needs some")
    return DeploymentServer(deployment, algorithm, settings, run, models, public)


def _load_server_function(
    deployment: Deployment, name: Literal["model", "architectures", "public"], reason: str
) -> Any:
    """Returns a function of the server's file; an error if none is named or it is not trusted."""
    file = deployment.file
    if file is None:
        raise UserError(
            f'{reason}: name a Python file with a function {name}() in the configuration, file = "/path/server.py"'
        )
    if not is_code_trusted(str(file)):
        raise UserError(
            f"{reason}: the directory of the run names the Python file {str(file)!r}, whose code would run; if it is yours, "
            f'name it in the configuration, file = "{file}"'
        )
    return execute_file_and_get_function(file, name, f"{reason}, file")
