"""Writes the page's sentences about the scores of a group of comparable runs, and claims nothing that one seed cannot
support.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.algorithms import REGISTRY
from polyfed.comparison.tuning.ranking import format_chosen_fields
from polyfed.core.io.text.number_format import (
    NumberUnit,
    capitalize_first,
    count_with_noun,
    end_with_period,
    format_number,
    join_with_and,
)
from polyfed.core.io.text.site_words import say_sites
from polyfed.core.methods.method_card import card_of_method
from polyfed.report.data.run_groups import MethodRuns, RunGroup
from polyfed.report.data.run_records import mean_of_defined
from polyfed.report.data.score_format import score_format_of
from polyfed.report.data.small_counts import hide_small_counts
from polyfed.simulation.storage.directory import call_to_resume

_NAMED = 3  # sites named in a sentence


def unit_of_score(score: str) -> NumberUnit:
    """Returns "%" for a score that is a share, such as accuracy, else "".

    >>> unit_of_score("accuracy"), unit_of_score("brier")
    ('%', '')
    """
    return score_format_of(score).unit


def count_examples(run_group: RunGroup) -> int:
    """Returns how many examples the sites of a comparison have, in training, validation and test; 0 if it does not say."""
    sites: Mapping[str, Any] = next(iter((run_group.comparison_results.get("data") or {}).values()), {})
    return sum(entry.get(part, 0) for entry in sites.values() for part in ("train", "val", "test"))


def describe_comparison(run_group: RunGroup) -> str:
    """Says in one sentence how many sites, test examples, methods, seeds and rounds there are."""
    mean_answer = run_group.comparison_results.get("mean_answer") or {}
    number, total = mean_answer.get("clients") or 2 * [len(run_group.clients)]
    sites = f"{number} of " * (number < total) + count_with_noun(total, "site")
    if tested := mean_answer.get("test_examples"):
        examples = count_examples(run_group)
        of_all = f"{count_with_noun(examples, 'example')}, {tested} of them for tests" if examples > tested else ""
        sites += f" with {of_all or count_with_noun(tested, 'test example')}"
    rounds = sorted({run.scored_round for method in run_group.methods for run in method.runs})
    rounds_text = f"after round {rounds[0]}"
    if len(rounds) > 1:
        rounds_text = f"after rounds {rounds[0]} to {rounds[-1]}, each run after its own"
    seeds = f"one {run_group.repeat}" if len(run_group.seeds) == 1 else f"{len(run_group.seeds)} {run_group.repeat}s"
    if folds := run_group.comparison_results.get("folds"):
        repeats = len(run_group.seeds) // folds
        draws_text = f", drawn {repeats} times" if repeats > 1 else ""
        seeds = f"{folds} folds{draws_text} (each example is tested by networks that were not trained on it)"
    score = run_group.score_format.label
    sentence = (
        f"{sites}, {count_with_noun(len(run_group.methods), 'method')}, {seeds}; {score} on each site's own test "
        f"examples, {rounds_text}."
    )
    return f"{sentence} {run_group.score_format.explanation}".rstrip()


def result_summary_sentences(run_group: RunGroup) -> list[str]:
    """Returns the sentences that sum up the results of a group of comparable runs, the most important first."""
    local_method = run_group.local_method
    scored_methods = [method for method in run_group.methods if not math.isnan(run_group.mean_score(method))]
    if not scored_methods:
        return [
            *_failure_sentences(run_group),
            "No method has a mean score: all trainings diverged. Lower the learning rate.",
        ]
    sentences = [*_failure_sentences(run_group), _best_method_sentence(run_group, scored_methods)]
    if run_group.comparison_results:
        verdicts = run_group.comparison_results.get("verdicts", ())
        sentences += [end_with_period(say_sites(hide_small_counts(text))) for text in verdicts]
    elif local_method is None:
        is_from_python = "data" not in run_group.methods[0].runs[0].config
        cure = "compare with polyfed.compare(clients, ...)" if is_from_python else "add --baselines [local]"
        sentences.append(f"Training alone was not run, so that nothing can be said of gains: {cure}.")
    else:
        ranked = sorted((x for x in scored_methods if x is not local_method), key=run_group.ranking_key, reverse=True)
        sentences += [text for method in ranked[:_NAMED] if (text := _gain_sentence(run_group, method))]
    if not run_group.comparison_results:
        repeat = run_group.repeat
        chance = f"One {repeat}: differences of a few points can be chance, and no test was made."
        bands = (
            f"{len(run_group.seeds)} {repeat}s; bands and ranges go from the lowest to the highest; no test was made."
        )
        more = "" if run_group.progress else " polyfed compare runs several seeds and tests."
        sentences.append((chance if len(run_group.seeds) == 1 else bands) + more)
    return [*sentences, *_unfinished_sentences(run_group)]


def _failure_sentences(run_group: RunGroup) -> list[str]:
    return [f"{label} failed and is not in the table: {end_with_period(reason)}" for label, reason in
            run_group.comparison_results.get("failed", {}).items()]  # fmt: skip


def _best_method_sentence(run_group: RunGroup, scored_methods: Sequence[MethodRuns]) -> str:
    """Returns the sentence that names the method with the best mean score over the seeds that all methods have."""
    unit, local_method = run_group.score_format.unit, run_group.local_method
    best = max(scored_methods, key=run_group.ranking_key)
    best_mean = format_number(run_group.mean_score(best), unit)
    if len(run_group.methods) == 1:
        return f"{best.label} has a mean of {best_mean} over sites."
    if not run_group.common_seeds and len(scored_methods) > 1 and not run_group.comparison_results:
        return (
            "No seed has a score of every method, so that none can be called the "
            f"{run_group.score_format.highest_or_lowest}."
        )
    seeds = ""
    if set(run_group.common_seeds) < set(run_group.seeds) and not run_group.comparison_results:
        which = "seed" if len(run_group.common_seeds) == 1 else "seeds"
        seeds = f" of the {which} that every method with a score has ({join_with_and(run_group.common_seeds)})"
    if (
        local_method is not None
        and local_method is not best
        and run_group.mean_score(local_method) == run_group.mean_score(best)
    ):
        better = "higher" if run_group.score_format.higher_is_better else "lower"
        return f"No method has a {better} mean{seeds} than training alone, {best_mean}."
    local_text = ""
    if local_method is not None and local_method in scored_methods and local_method is not best:
        local_text = f"; training alone has {format_number(run_group.mean_score(local_method), unit)}"
    return f"{best.label} has the {run_group.score_format.highest_or_lowest} mean{seeds}, {best_mean}{local_text}."


def describe_methods(methods: Sequence[MethodRuns]) -> list[str]:
    """Returns for each method of polyfed what it does, in a few words, such as "fedprox: FedAvg with a proximal term"."""
    names = ["training alone" if m.runs[0].method == "local" else m.label for m in methods]
    cards = {name: card_of_method(REGISTRY.get(m.runs[0].method)) for name, m in zip(names, methods, strict=True)}
    return [f"{label}: {say_sites(card.summary)}" for label, card in cards.items() if card is not None]


def explain_choice(run_group: RunGroup, method: MethodRuns) -> str:
    """Returns why the answers are about a method that does not lead the table of the methods; empty if it does."""
    results = run_group.comparison_results
    others = [other for other in run_group.methods if other not in (method, run_group.local_method)]
    better = [other for other in others if run_group.ranking_key(other) > run_group.ranking_key(method)]
    if not results or not better:
        return ""
    courses = results.get("convergence") or {}
    unready = {x.label for x in (method, *better) if (courses.get(x.label) or {}).get("converged") is False}
    is_readiest = bool(unready) and method.label not in unready
    of_ready = " of the methods that had converged (stopped improving)" if is_readiest else ""
    return f", chosen as the best by {results['best_by']} examples{of_ready}"


def omission_and_tuning_notes(run_group: RunGroup) -> list[str]:
    """Returns sentences on what a comparison left out, and how it chose fields and rounds."""
    results = run_group.comparison_results
    if not results:
        return describe_methods(run_group.methods)
    sentences = [capitalize_first(end_with_period(say_sites(hide_small_counts(text)))) for text in results["notes"]]
    if results["best"] is not None:
        sentences.append(
            f"The best by {results['best_by']} examples is {results['best']}, with which “p (best)” compares."
        )
    sentences += [f"Left out: {end_with_period(text)}" for text in results["skipped"].values()]
    if results["tuning"]:
        sentences.append(f"Searched {end_with_period(say_sites(results['tuning']['sentence']))}")
        sentences += [
            f"{label} got {fields} of {count_with_noun(tuning['runs'], 'run')}."
            for label, tuning in results["tuning"]["methods"].items()
            if (fields := format_chosen_fields(tuning))
        ]
    return [*sentences, f"Rounds: {end_with_period(say_sites(results['budget']['sentence']))}"]


def _gain_sentence(run_group: RunGroup, method: MethodRuns) -> str:
    gains, score_format = run_group.gains_over_local(method), run_group.score_format
    if not gains:
        return ""
    gain_count, loss_count = sum(g.mean > 0 for g in gains), sum(g.mean < 0 for g in gains)
    sites_text = count_with_noun(len(gains), "site") + (
        "" if run_group.same_clients or len(run_group.seeds) == 1 else " of all seeds"
    )
    text = (
        f"{method.label} against training alone: "
        f"{score_format.format_signed(mean_of_defined([g.mean for g in gains]))} on average; {sites_text}: "
        f"{gain_count} gain, {loss_count} lose"
    )
    losers = [f"{g.client} {score_format.format_signed(g.mean)}" for g in gains[::-1] if g.mean < 0][:_NAMED]
    return f"{text} (most: {', '.join(losers)})." if losers else f"{text}."


def _unfinished_sentences(run_group: RunGroup) -> list[str]:
    about_data = [text for method in run_group.methods for run in method.runs for text in run.data_warnings]
    sentences = [f"The data: {end_with_period(text)}" for text in dict.fromkeys(about_data)]
    for method in run_group.methods:
        for run in method.runs:
            number = run.seed + (run_group.repeat == "fold")  # folds count from 1 on the page
            seed = f", {run_group.repeat} {number}" if len(run_group.seeds) > 1 else ""
            if run.rounds_done < run.planned_rounds and not run_group.comparison_results:
                hint = f": {call_to_resume(run.folder)}" if run.folder else ""
                sentences.append(
                    f"{method.label}{seed} has {run.rounds_done} of {run.planned_rounds} rounds and can go on{hint}."
                )
            if missing := sorted(client for client, value in run.score_by_client.items() if value is None):
                client_names = ", ".join(missing[:_NAMED]) + (" and more" if len(missing) > _NAMED else "")
                sentences.append(
                    f"{method.label}{seed} has no score for {count_with_noun(len(missing), 'site')} "
                    f"({client_names}), left out of its mean."
                )
            if run.failure_count:
                sentences.append(
                    f"{method.label}{seed}: {count_with_noun(run.failure_count, 'failure')} of sites in its rounds."
                )
            if run.warnings:
                first = end_with_period(run.warnings[0])
                sentences.append(
                    f"{method.label}{seed}: {count_with_noun(len(run.warnings), 'warning')} about its rounds; the "
                    f"first: {first}"
                )
    return sentences
