"""Describes a comparison before it runs, for `comparison.yaml`, and finds every error that can be found by then."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from polyfed.algorithms import Local
from polyfed.comparison.plan import ComparisonPlan, Method, settings_of_method
from polyfed.comparison.planning.budget import Budget
from polyfed.comparison.planning.client_set import ClientSet
from polyfed.comparison.planning.method_selection import check_equal_training
from polyfed.comparison.planning.undefined_scores import warn_of_undefined_scores
from polyfed.comparison.statistics.curves.convergence import MIN_EVALUATED_ROUNDS
from polyfed.comparison.storage import comparison_directory
from polyfed.comparison.storage.comparison_directory import RESULTS_FORMAT
from polyfed.comparison.tuning import hyperparameter_search
from polyfed.comparison.verdicts.answer_basis import count_client_examples
from polyfed.core.errors import UserError
from polyfed.core.methods.capabilities import describe_evaluated_network
from polyfed.core.methods.declared_words import NEEDS_ONE_ARCHITECTURE
from polyfed.simulation.checks import requirements
from polyfed.simulation.checks.clients.undefined_scores import list_clients_without_score
from polyfed.simulation.checks.fingerprints import column_fingerprint, initial_weights_fingerprint
from polyfed.simulation.checks.networks.trial_evaluation import check_losses_and_metrics_work
from polyfed.simulation.checks.settings.method_settings import check_settings_suit_method
from polyfed.simulation.checks.settings.private_training import check_and_complete_privacy
from polyfed.simulation.checks.settings.scheduling import check_scheduling
from polyfed.simulation.rounds.columns.federated_preprocessing import check_sums_hide_single_values
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.start.preparation import check_method
from polyfed.simulation.settings import EXECUTION_FIELDS, Settings
from polyfed.simulation.sources.preparation import build_federation_of_source
from polyfed.simulation.storage.configuration import describe_method_and_settings

NOT_RESULTS = ("seed", "keep", "checkpoint_every", "cross_site", "evaluate_all_at_end", *EXECUTION_FIELDS)
"""Settings on which no result of a comparison depends, or which it sets itself."""


def describe_comparison(plan: ComparisonPlan) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...] | None]:
    """Returns the content of `comparison.yaml`, data sizes by seed, and class names.

    Every error that can be found before training is found here, for each seed.
    """
    skipped: dict[str, str] = {}
    data: dict[str, Any] = {}
    fingerprints, columns, first_weights = dict[str, str](), dict[str, str](), ""
    clients_without_score = dict[int, list[str]]()
    for seed in plan.seeds:
        client_set = plan.build_client_set(seed)
        settings = dataclasses.replace(plan.settings, seed=seed)
        requirements.check_clients(client_set.clients)
        if len(client_set.ids) == 1:
            raise UserError(f"{client_set.ids[0]!r} is the one client, and nobody can join it: give at least two")
        requirements.check_networks_run(client_set.clients)
        if settings.on_error == "raise":
            check_losses_and_metrics_work(client_set.clients, plan.metrics)
        check_sums_hide_single_values(client_set.clients, secure=settings.secure)
        settings.count_round_clients(len(client_set.ids))
        for label, method in plan.methods.items():
            if label in skipped:
                continue
            reasons = [
                explain_unsuited_method(client_set, variant, settings)
                for variant in hyperparameter_search.build_search_variants(plan, method) or [method]
            ]
            if reason := next(filter(None, reasons), None):
                if None in reasons:
                    raise UserError(f"not all values that are to be searched for {label} suit these clients: {reason}")
                skipped[label] = reason
        evaluated = plan.panel.select(client_set.clients)
        clients_without_score[seed] = list_clients_without_score(plan.metrics[0], evaluated)
        data[str(seed)] = count_client_examples(evaluated, client_set.class_names)
        fingerprints[str(seed)] = client_set.fingerprint_of_run()
        columns[str(seed)] = column_fingerprint(client_set.clients)
        first_weights = first_weights or initial_weights_fingerprint(client_set.clients)
    methods = {label: method for label, method in plan.methods.items() if label not in skipped}
    skipped = {k: v for k, v in skipped.items() if k not in plan.unasked or NEEDS_ONE_ARCHITECTURE not in v}
    if all(isinstance(method, Local) for method in methods.values()):
        if not skipped:
            raise UserError(
                "a comparison needs a method that federates, and all that it has train alone; name one besides local, such "
                "as fml: algorithms=['fml'] (--algorithms fml)"
            )
        raise UserError(f"no method that federates suits these clients: {'; '.join(skipped.values())}")
    warn_of_undefined_scores(plan, evaluated, clients_without_score)
    check_equal_training(methods)
    settings_kept = {k: v for k, v in plan.settings.without_default_scheduling.items() if k not in NOT_RESULTS}
    if not plan.panel.clients:
        del settings_kept["evaluate_clients"]
    description = {
        "format": RESULTS_FORMAT, "title": plan.title, "task": client_set.clients[0].task.spec,
        "metrics": [metric.describe() for metric in plan.metrics], "seeds": list(plan.seeds),
        "methods": {label: method_fields(method) for label, method in methods.items()},
        "evaluated": {label: describe_evaluated_network(method) for label, method in methods.items()},
        "skipped": skipped, "reference": reference_label(methods),
        "same_clients": bool(plan.num_resplits or plan.folds) or len(set(fingerprints.values())) == 1,
        "resplit": plan.num_resplits, "references": plan.with_references, "settings": settings_kept,
        "fingerprints": fingerprints, "columns": columns, "first_weights": first_weights, "search": plan.describe_search(),
        "trials": plan.num_trials, "experiment": plan.experiment,
    }  # fmt: skip
    if plan.panel.clients:
        description["panel"] = {
            "sentence": plan.panel.describe(), "clients": len(plan.panel.clients), "of": plan.panel.population,
            "too_small": dict(plan.panel.too_small),
        }  # fmt: skip
    if plan.folds is not None:
        description["folds"] = plan.folds.number
        if plan.most_repeats is not None:
            description["most_repeats"] = plan.most_repeats
    if plan.search_space is not None and plan.search_budget.determines_compared_round:
        description["searched_at"] = str(plan.search_budget)
    return description, data, client_set.class_names


def initial_search_budget(plan: ComparisonPlan) -> Budget:
    """Returns the budget of the search, with which the comparison began; other budgets do not repeat the search."""
    if plan.out is None or not (plan.out / comparison_directory.DESCRIPTION).exists():
        return plan.criteria.budget
    return Budget.from_text(comparison_directory.read_description(plan.out).get("searched_at", Budget().kind))


def reference_label(methods: Mapping[str, Method]) -> str | None:
    """Returns the label of the method that gains are measured against: the first that trains clients alone; or None."""
    return next((label for label, method in methods.items() if isinstance(method, Local)), None)


def method_fields(method: Method) -> dict[str, Any]:
    """Returns a method's name and fields, as in `config.yaml`."""
    return dict(describe_method_and_settings(method, Settings())["algorithm"])


def explain_unsuited_method(client_set: ClientSet, method: Method, settings: Settings) -> str | None:
    """Returns why clients or settings do not suit a method, as its run would say it; None if they do."""
    settings = client_set.settings_of_run(method, settings_of_method(settings, method))
    try:
        if client_set.clients_of_run(method) is client_set.source:
            build_federation_of_source(
                client_set.source, method, settings, client_set.public, None
            ).initial_checkpoint()
            return None
        check_method(client_set.clients, method, client_set.public)
        check_settings_suit_method(method, settings, sorted(client.id for client in client_set.clients))
        check_and_complete_privacy(method, client_set.clients, settings.rounds)
        clients = {c.id: c for c in sorted(client_set.clients, key=lambda c: c.id)}
        federation = Federation(clients, method, settings, client_set.public)
        federation.initial_checkpoint()
        check_scheduling(federation)
    except UserError as reason:
        return str(reason)
    return None


def describe_too_few_planned_rounds(plan: ComparisonPlan) -> list[str]:
    """Says that the planned rounds are too few for any answer; empty if there are enough, or the budget names the round."""
    settings, clients = plan.settings, plan.build_client_set(plan.seeds[0]).clients
    # Without validation examples convergence is judged by the training loss, which every round has.
    every = settings.evaluate_every if any(client.val is not None for client in clients) else 1
    evaluated = math.ceil(settings.rounds / every)
    if plan.criteria.budget.determines_compared_round or evaluated >= MIN_EVALUATED_ROUNDS:
        return []
    rounds, more_often = every * MIN_EVALUATED_ROUNDS, "evaluate every round (evaluate_every=1, --evaluate-every 1), "
    return [
        f"too few evaluated rounds for an answer ({evaluated} of at least {MIN_EVALUATED_ROUNDS}): "
        f"{more_often if every > 1 else ''}train longer (rounds={rounds}, --rounds {rounds}), or compare after all rounds "
        "(budget='steps', --budget steps)"
    ]
