"""Finds, before anything is trained, the test sets on which the score that decides is not defined: an AUC without two
classes, a C-index without an event."""

from collections.abc import Mapping, Sequence

from polyfed.comparison.plan import ComparisonPlan
from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError, warn_of_data
from polyfed.core.io.text.number_format import join_first_and_count_rest
from polyfed.core.io.text.site_words import name_sites

_WITH_FOLDS = "These folds do not count for the client"
_WITHOUT_FOLDS = "Such a client has no answer, and no part in that for the mean"


def warn_of_undefined_scores(
    plan: ComparisonPlan, clients: Sequence[Client], clients_without_score: Mapping[int, Sequence[str]]
) -> None:
    """Warns of clients whose score is not defined in some runs, and refuses a comparison in which a run has no score at all.

    Args:
        plan: the plan, with resolved metrics.
        clients: of one run.
        clients_without_score: seed -> ids of the clients without a score.

    Raises:
        UserError: in one run no client has a score, so that no method could have a mean.
    """
    if not any(clients_without_score.values()):
        return
    metric, task = plan.metrics[0], clients[0].task
    why = task.describe_rarest(0, "", 0)
    counts = {id_: sum(id_ in ids for ids in clients_without_score.values()) for id_ in sorted({c.id for c in clients})}
    # Fewer folds help only a client that has a score in some fold.
    by_fold = plan.folds is not None and any(0 < count < len(clients_without_score) for count in counts.values())
    remedies = ["give fewer folds (folds=..., --folds)"] if by_fold else []
    remedies += ["leave small sites out"]
    if others := sorted(other.name for other in task.metrics if other.per_example is not None):
        remedies.append(f"decide by a score that every example has (metrics=..., --metrics): {', '.join(others)}")
    remedy = "; or ".join(remedies)
    for seed, ids in clients_without_score.items():
        if len(ids) == len(clients):
            raise UserError(
                f"{metric.label} is not defined at any client in {plan.describe_seed(seed)}: their test examples are {why} "
                f"({name_sites(ids)}), so that no method could be compared; {remedy}"
            )
    noun = "folds" if plan.folds is not None else "runs"
    missing = [
        f"{name_sites([id_])} in {count} of {len(clients_without_score)} {noun}"
        for id_, count in counts.items()
        if count
    ]
    if missing:
        warn_of_data(
            f"{metric.label} is not defined at {join_first_and_count_rest(missing)}: the test examples there are {why}. "
            f"{_WITH_FOLDS if by_fold else _WITHOUT_FOLDS}; {remedy}"
        )
