"""Implements `polyfed flower doctor`: checks the folder of a server or site of a deployment for mistakes, and prints
what it detects.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from polyfed.cli.commands.terminal import print_json
from polyfed.cli.static_registry import ALGORITHMS, read_value_or_outline_without_import
from polyfed.core.errors import RoundError, UserError, check_extra_installed, did_you_mean
from polyfed.core.io.text.terminal_text import sanitise_for_terminal
from polyfed.core.io.values.number_checks import is_positive_number
from polyfed.core.methods.declared_words import disclosures_needing_consent
from polyfed.deploy.doctor import DoctorFinding, Findings, note_finding, ok_finding, problem_finding
from polyfed.simulation.settings import Settings

SETTINGS_KEYS = (
    "rounds", "seed", "clients-per-round", "evaluate-every", "checkpoint-every", "on-error", "min-replies", "metrics",
    "compress", "compress-down", "secure",
)  # fmt: skip
"""The words of a server's configuration that are fields of `Settings`;
`polyfed.deploy.server.server_config.build_or_restore_server` takes these."""
_FUNCTIONS = {
    "one_architecture": ("model", "the common network"), "architectures": ("architectures", "what builds each network"),
    "public_data": ("public", "unlabelled examples that are no site's"),
}  # fmt: skip


class DoctorReport(TypedDict):
    """Describes what `polyfed flower doctor DIR --json` prints."""

    format: int
    folder: str
    wrong: int
    """Counts the findings of level "wrong"."""
    findings: list[dict[str, str]]
    """Holds `level` ("ok", "note" or "wrong"), `component` and `text` of each finding."""


def check_folder_and_print_findings(
    folder: Path, trial_port: int = 8000, server_address: str | None = None, *, as_json: bool = False
) -> None:
    """Checks the folder of a deployment's server or site for mistakes, and prints one line per result, or all as JSON.

    Raises:
        UserError: the folder is none of a project, a server or a site.
        RoundError: something is wrong.
    """
    check_extra_installed("cryptography", "flower", "polyfed flower doctor")
    from polyfed.deploy.doctor.examine import run_folder_checks

    findings, inside = [], f"{folder.resolve()}{os.sep}"
    for finding in run_folder_checks(
        folder,
        read_value_or_outline_without_import("polyfed.deploy.protocol.wire", "PROTOCOL"),
        check_server_configuration,
        trial_port,
        server_address,
    ):
        findings.append(finding)
        if not as_json:
            line = str(finding)  # paths of what is wrong stay whole: commands to type have them
            print(sanitise_for_terminal(line.replace(inside, "") if finding.level == "ok" else line), flush=True)
    count = sum(finding.level == "wrong" for finding in findings)
    if as_json:
        report: DoctorReport = {
            "format": 1, "folder": str(folder), "wrong": count,
            "findings": [
                {"level": f.level, "component": f.component, "text": " ".join(f.text.split())} for f in findings
            ],
        }  # fmt: skip
        print_json(report)
    else:
        print(f"{sum(finding.level == 'ok' for finding in findings)} checks passed, {count} failed")
    if count:
        raise RoundError(f"{count} {'thing is' if count == 1 else 'things are'} wrong in {folder}")


def check_server_configuration(config: Mapping[str, Any], file: Path) -> Findings:
    """Yields findings on names, types and contradictions of a server's configuration, or one "ok"."""
    findings = list(_configuration_findings(config, file))
    yield from findings
    if not any(finding.level == "wrong" for finding in findings):
        yield ok_finding("configuration", f"{file} can be read")


def _is_update_bound(value: Any) -> bool:
    """Returns whether a value is a bound on updates: one of the words or a positive number, also as a text."""
    words = read_value_or_outline_without_import("polyfed.deploy.server.update_bound", "BOUND_WORDS")
    try:
        return value in words or (not isinstance(value, bool) and 0 < float(value) < float("inf"))
    except (TypeError, ValueError):
        return False


def _configuration_findings(config: Mapping[str, Any], file: Path) -> Iterator[DoctorFinding]:
    yield from _setting_findings(config, file)
    method, values = _method_fields(config), {key: value for key, value in config.items() if value != ""}
    if (name := str(method.get("name"))) in ALGORITHMS:
        yield from _needs_findings(name, method, values, file)


def _setting_findings(config: Mapping[str, Any], file: Path) -> Iterator[DoctorFinding]:
    """Yields findings on names, types and contradictions of the server's settings."""
    fields = {
        f.name.replace("_", "-"): f
        for f in dataclasses.fields(read_value_or_outline_without_import("polyfed.deploy.server.server", "Deployment"))
    }
    values = {key: value for key, value in config.items() if value != "" and key != "algorithm"}
    choices = [*fields, *SETTINGS_KEYS, "keep"]
    for key in values:
        if key not in choices and key.partition(".")[0] not in ("algorithm", "asynchronous"):
            yield problem_finding(
                "configuration", f"{file} has {key!r}, which is not a word of it; {did_you_mean(key, choices)}"
            )
    for key in ("join-seconds", "round-seconds", "max-megabytes"):
        value = values.get(key, 1)
        if not is_positive_number(value):
            yield problem_finding("configuration", f"{file}: {key} must be positive, got {value!r}")
    if not _is_update_bound(bound := values.get("max-update-norm", "auto")):
        yield problem_finding(
            "configuration", f"{file}: max-update-norm must be auto, a positive number, or off, got {bound!r}"
        )
    for key in ("allow-disclosure", "resume", "look"):
        if not isinstance(values.get(key, False), bool):
            yield problem_finding("configuration", f"{file}: {key} must be true or false, got {values[key]!r}")
    settings = {
        key.replace("-", "_"): values[key] for key in SETTINGS_KEYS if key in values and key not in ("metrics",)
    }
    try:
        plain = {key: value for key, value in settings.items() if not key.startswith("compress")}  # which takes torch
        parsed_settings = Settings(**plain)
        sites = [name for name in str(values.get("sites", "")).split(",") if name.strip()]
        parties = parsed_settings.count_round_clients(len(sites))
        yield from _secure_findings(parsed_settings, values, parties, file)
    except (UserError, TypeError) as error:
        yield problem_finding("configuration", f"{file}: {error}")
    yield from _method_findings(_method_fields(config), file)


def _method_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the name and fields of the configuration's method, whether its keys are nested or flat."""
    flat_fields = {key.split(".")[1]: value for key, value in config.items() if key.startswith("algorithm.")}
    return flat_fields | (config["algorithm"] if isinstance(config.get("algorithm"), Mapping) else {})


def _secure_findings(
    settings: Settings, values: Mapping[str, Any], parties: int, file: Path
) -> Iterator[DoctorFinding]:
    if not settings.secure:
        return
    threshold = values.get("secure-threshold")
    if parties < 2:
        yield problem_finding(
            "configuration",
            f"{file}: secure = true hides a site among those of its round, and a round has {parties}; "
            "raise clients-per-round",
        )
    if threshold is not None and (type(threshold) is not int or not max(1, parties // 2) < threshold <= parties):
        yield problem_finding(
            "configuration",
            f"{file}: secure-threshold must be above half of the {parties} sites of a round, and at "
            f"most {parties}, got {threshold!r}",
        )
    if values.get("compress", "none") != "none":
        yield problem_finding("configuration", f"{file}: compress and secure exclude one another; leave one out")


def _method_findings(fields: Mapping[str, Any], file: Path) -> Iterator[DoctorFinding]:
    name = fields.get("name")
    if not isinstance(name, str) or name not in ALGORITHMS:
        yield problem_finding(
            "configuration", f"{file}: algorithm.name is {name!r}; {did_you_mean(str(name), ALGORITHMS)}"
        )
        return
    field_names = {f.name for f in dataclasses.fields(ALGORITHMS[name])}
    for field in fields:
        if field not in field_names | {"name"}:
            yield problem_finding(
                "configuration", f"{file}: {name} has no field {field!r}; {did_you_mean(field, field_names)}"
            )


def _needs_findings(
    name: str, fields: Mapping[str, Any], values: Mapping[str, Any], file: Path
) -> Iterator[DoctorFinding]:
    method = ALGORITHMS[name]
    needs, project_folder = method.requires, file.parent.parent  # from which relative paths start
    needed_functions = dict(entry for word, entry in _FUNCTIONS.items() if word in needs)
    if needed_functions and not values.get("file"):
        yield problem_finding(
            "configuration",
            f"{file}: {name} needs {', '.join(f'{function_name}()' for function_name in needed_functions)} of the "
            "server; file = "
            '"/path/server.py"',
        )
    elif values.get("file"):
        from polyfed.deploy.doctor.site_config import check_file_defines_functions

        yield from check_file_defines_functions(
            "server.py", project_folder / Path(str(values["file"])).expanduser(), needed_functions
        )
    if "layer_catalogue" in needs:
        catalogue = fields.get("catalogue")
        if not catalogue or not (project_folder / Path(str(catalogue)).expanduser()).is_file():
            yield problem_finding(
                "configuration",
                f"{file}: {name} needs a catalogue of layer types, and {str(catalogue)!r} is not a file; "
                "polyfed graph MODEL --catalogue FILE writes one",
            )
    disclosures = sorted(disclosures_needing_consent(method.discloses))
    if disclosures and not values.get("allow-disclosure") and not values.get("secure"):
        yield note_finding(
            "consent",
            f"{name} discloses {' and '.join(disclosures)}: it runs only with polyfed flower run "
            "--allow-disclosure, and allow-disclosure=true at each site",
        )
