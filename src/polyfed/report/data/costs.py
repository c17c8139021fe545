"""Computes what joining with a method costs a federation, and what its sites disclose to the server."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, final

from polyfed.core.errors import UserError
from polyfed.core.io.values.number_checks import is_number
from polyfed.core.methods.declared_words import meaning_of_disclosure
from polyfed.report.audit.audit_file import FILE as AUDIT_FILE
from polyfed.report.data.run_groups import MethodRuns
from polyfed.simulation.rounds.replies.secure_aggregation import effective_disclosures
from polyfed.simulation.storage.configuration import build_method


@final
@dataclass(frozen=True)
class MethodCost:
    """Holds the cost of one run of a method until the round whose scores count, as means over seeds.

    Attributes:
        megabytes: sent up and down by all clients together, of 2^20 bytes.
        seconds: of clients and server, without evaluation.
        scored_rounds: the lowest and the highest round whose scores count.
        planned_rounds: rounds of each run.
        clients: number of clients.
        simulated_seconds: simulated time; None if the runs simulated none.
    """

    megabytes: float
    seconds: float
    scored_rounds: tuple[int, int]
    planned_rounds: int
    clients: int
    simulated_seconds: float | None = None


def cost_of_method(method: MethodRuns) -> MethodCost:
    """Returns the cost of one run of a method until the round whose scores count."""
    costs = [run.cost_until_scored_round for run in method.runs]
    rounds = [run.scored_round for run in method.runs]
    simulated = [run.simulated_seconds for run in method.runs if run.simulated_seconds is not None]
    return MethodCost(
        fmean(cost.megabytes for cost in costs),
        fmean(cost.seconds for cost in costs),
        (min(rounds), max(rounds)),
        max(run.planned_rounds for run in method.runs),
        max(len(run.score_by_client) for run in method.runs),
        fmean(simulated) if len(simulated) == len(method.runs) else None,
    )


def disclosures_of_method(method: MethodRuns, results: Mapping[str, Any]) -> dict[str, str] | None:
    """Returns `{word: meaning}` of what the server learns; None for a method not of polyfed.

    Args:
        method: the runs of the method.
        results: of its comparison, for the method's fields; empty for runs by themselves.
    """
    run, fields = method.runs[0], _fields_of_method(method, results)
    if ":" in str(fields.get("name", ":")):  # code of the user's, which a page does not run
        return None
    for candidate in (fields, {"name": fields["name"]}):
        try:
            words = effective_disclosures(build_method(candidate), run.uses_secure_sums)
        except UserError:  # fields of another version
            continue
        return {str(word): meaning_of_disclosure(word) for word in sorted(words)}
    return None


def describe_protection(method: MethodRuns, results: Mapping[str, Any]) -> str:
    """Says in one sentence what protects the data where they stay, and whether that was audited.

    Args:
        method: the runs of the method.
        results: of its comparison, for the method's fields; empty for runs by themselves.
    """
    privacy = _fields_of_method(method, results).get("privacy")
    epsilon = privacy.get("target_epsilon") if isinstance(privacy, Mapping) else None
    bound = f" (ε at most {epsilon:g})" if is_number(epsilon) else ""
    folders = [run.folder for run in method.runs if run.folder is not None]
    was_audited = any((folder / AUDIT_FILE).exists() for folder in folders)
    unmeasured = "not measured (an audit tries to find training examples in them)"
    secure = "" if all(run.uses_secure_sums for run in method.runs) else "no "
    return (
        f"These runs used {secure}secure sums and {'' if privacy else 'no '}differential privacy in training{bound}; what "
        f"networks and messages reveal was {'audited, see the details' if was_audited else unmeasured}."
    )


def _fields_of_method(method: MethodRuns, results: Mapping[str, Any]) -> Mapping[str, Any]:
    entry = (results.get("methods") or {}).get(method.label) or {}
    fields: Mapping[str, Any] = method.runs[0].config.get("algorithm") or {
        **entry.get("fields", {}),
        "name": entry.get("name", method.runs[0].method),
    }
    return fields
