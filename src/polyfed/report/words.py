"""What a setting's scores say, in sentences; with no claim that one seed does not carry."""

import math
from collections.abc import Sequence

from polyfed.comparison.choices import chosen_words
from polyfed.report.charts import Unit, number
from polyfed.report.gathering import Line, Setting
from polyfed.report.records import mean
from polyfed.report.scale import scale_of

_NAMED = 3  # clients named in a sentence


def unit_of(score: str) -> Unit:
    """How values of a score are told: shares such as the accuracy in per cent, others as they are.

    >>> unit_of("accuracy"), unit_of("brier")
    ('%', '')
    """
    return scale_of(score).unit


def facts(setting: Setting, noun: str = "client") -> str:
    """What was compared, in one sentence; `noun` is what takes part."""
    clients = many(len(setting.clients), noun)
    rounds = sorted({run.round for line in setting.lines for run in line.runs})
    told = f"after round {rounds[0]}" if len(rounds) == 1 else f"after rounds {rounds[0]} to {rounds[-1]}"
    seeds = "one seed" if len(setting.seeds) == 1 else f"{len(setting.seeds)} seeds"
    score = setting.scale.label
    return (
        f"{clients}, {many(len(setting.lines), 'method')}, {seeds}; {score} on each {noun}'s own test examples, {told}."
    )


def summary(setting: Setting) -> list[str]:
    """Sentences, the most important first."""
    local = setting.local
    known = [line for line in setting.lines if not math.isnan(setting.mean(line))]
    if not known:
        return [
            *_failed(setting),
            "No method has a mean score: all trainings diverged. Lower the rate (--algorithm.lr).",
        ]
    found = [*_failed(setting), _highest(setting, known)]
    if setting.results:
        found += [_sentence(text) for text in setting.results.get("verdicts", ())]
    elif local is None:
        found.append("Training alone was not run, so that nothing can be said of gains: add --baselines [local].")
    else:
        ranked = sorted((x for x in known if x is not local), key=setting.rank, reverse=True)
        found += [text for line in ranked[:_NAMED] if (text := _gain(setting, line))]
    if not setting.results:
        found.append(
            "One seed: differences of a few points can be chance, and no test was made. polyfed compare runs several seeds."
            if len(setting.seeds) == 1
            else f"{len(setting.seeds)} seeds; bands and ranges go from the lowest to the highest. polyfed compare tests."
        )
    return [*found, *_unfinished(setting)]


def _failed(setting: Setting) -> list[str]:
    return [f"{label} failed and is not in the table: {_sentence(why)}" for label, why in
            setting.results.get("failed", {}).items()]  # fmt: skip


def _highest(setting: Setting, known: Sequence[Line]) -> str:
    """Which mean is the highest, over the seeds that all methods have."""
    unit, local = setting.scale.unit, setting.local
    best = max(known, key=setting.rank)
    told = number(setting.mean(best), unit)
    if len(setting.lines) == 1:
        return f"{best.label} has a mean of {told} over clients."
    if not setting.common and len(known) > 1 and not setting.results:
        return f"No seed has a score of every method, so that none can be called the {setting.scale.extreme}."
    seeds = ""
    if set(setting.common) < set(setting.seeds) and not setting.results:
        which = "seed" if len(setting.common) == 1 else "seeds"
        seeds = f" of the {which} that every method with a score has ({listed(setting.common)})"
    if local is not None and local is not best and setting.mean(local) == setting.mean(best):
        better = "higher" if setting.scale.higher_is_better else "lower"
        return f"No method has a {better} mean{seeds} than training alone, {told}."
    beside = ""
    if local is not None and local in known and local is not best:
        beside = f"; training alone has {number(setting.mean(local), unit)}"
    return f"The {setting.scale.extreme} mean{seeds} has {best.label}, {told}{beside}."


def listed(values: Sequence[object]) -> str:
    """Words for a few values.

    >>> listed([0, 1, 4])
    '0, 1 and 4'
    """
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last


def notes(setting: Setting) -> list[str]:
    """What to bear in mind of a comparison: what was left out and why, how hyper-parameters and rounds were chosen."""
    told = setting.results
    if not told:
        return []
    found = [_upper(_sentence(text)) for text in told["notes"]]
    if told["best"] is not None:
        found.append(f"The best by {told['best_by']} examples is {told['best']}, with which p (best) compares.")
    found += [f"Left out: {_sentence(text)}" for text in told["skipped"].values()]
    if told["tuning"]:
        found.append(f"Searched {_sentence(told['tuning']['sentence'])}")
        found += [
            f"{label} got {fields} of {many(one['runs'], 'run')}."
            for label, one in told["tuning"]["methods"].items()
            if (fields := chosen_words(one))
        ]
    return [*found, f"Rounds: {_sentence(told['budget']['sentence'])}"]


def _gain(setting: Setting, line: Line) -> str:
    gains, scale = setting.gains(line), setting.scale
    if not gains:
        return ""
    up, down = sum(g.mean > 0 for g in gains), sum(g.mean < 0 for g in gains)
    of = many(len(gains), "client") + ("" if setting.same_clients or len(setting.seeds) == 1 else " of all seeds")
    text = (
        f"{line.label} against training alone: {scale.signed(mean([g.mean for g in gains]))} on average; {of}: "
        f"{up} gain, {down} lose"
    )
    losers = [f"{g.client} {scale.signed(g.mean)}" for g in gains[::-1] if g.mean < 0][:_NAMED]
    return f"{text} (most: {', '.join(losers)})." if losers else f"{text}."


def _unfinished(setting: Setting) -> list[str]:
    found = []
    for line in setting.lines:
        for run in line.runs:
            seed = f", seed {run.seed}" if len(setting.seeds) > 1 else ""
            if run.done < run.rounds and not setting.results:
                hint = f": polyfed resume {run.folder}" if run.folder else ""
                found.append(f"{line.label}{seed} has {run.done} of {run.rounds} rounds and can go on{hint}.")
            if missing := sorted(client for client, value in run.final.items() if value is None):
                named = ", ".join(missing[:_NAMED]) + (" and more" if len(missing) > _NAMED else "")
                found.append(
                    f"{line.label}{seed} has no score for {many(len(missing), 'client')} ({named}), left out of its mean."
                )
            if run.failures:
                found.append(f"{line.label}{seed}: {many(run.failures, 'failure')} of clients in its rounds.")
            if run.warnings:
                first = _sentence(run.warnings[0])
                found.append(
                    f"{line.label}{seed}: {many(len(run.warnings), 'warning')} about its rounds; the first: {first}"
                )
    return found


def many(number: int, noun: str) -> str:
    """A number and what it counts.

    >>> many(1, "client"), many(3, "client")
    ('1 client', '3 clients')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
