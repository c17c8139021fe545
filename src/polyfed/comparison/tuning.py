"""Hyper-parameters of a comparison, searched on validation examples before it, by the same rule for every method.

Without `trials` every combination of the values given is tried, the small grid. Where the best is then the smallest or the
largest value, up to two further ones are tried beyond it, unless only those given were asked for. With `trials` there are
that many runs a method, chosen by Optuna's tree-structured Parzen estimator, also within ranges.

Each is a run of full length with the first seed. The best mean validation score wins, of equals the lower validation loss:
each at the round at which methods are to be compared, or its best round where that is theirs. A score is the mean of three
evaluated rounds that are neighbours. Test examples have no say. Where clients have no validation examples, a fifth of their
training examples is held out for the search alone: the round of the winner's best score is then the round at which the
method is compared, and the final runs train on all of it. The results tell how many runs each method had. A run that
diverges counts as tried, and does not win. If what won diverges with another seed, the next best is compared in its place.
`DIR/tuning/METHOD/FIELDS` is the directory of each.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any, final

from polyfed.comparison.curves import curve, means
from polyfed.comparison.plans import EQUAL, TUNING, Failure, Job, Method, Plan, play
from polyfed.comparison.reading import Budget
from polyfed.comparison.trials import Study, imported
from polyfed.comparison.values import (
    GRID,
    GRID_AND_MORE,
    check_beyond,
    ends_of,
    goes_on,
    is_number,
    next_value,
    values_of,
)
from polyfed.core.errors import RoundError, UserError, nearest
from polyfed.data.held_out import with_validation
from polyfed.data.resplit import public_prepared_again
from polyfed.simulation.fingerprints import fingerprint
from polyfed.simulation.runs.paths import file_name

AUTO, NONE = "auto", "none"
BY_DEFAULT = {"lr": GRID_AND_MORE}
"""What is searched unless something else is asked for: every method's learning rate, around its own and beyond."""
_BEYOND = 2  # further values of a field
_NEAR = 3  # evaluated rounds of which a score is the mean
Fields = dict[str, Any]


def no_fields(trials: int) -> str:
    """A sentence for an error."""
    return (
        f"trials={trials} searches nothing without fields and their values or ranges; give them too, as in "
        "tune={'lr': '0.001..0.3'} (--tune lr=0.001..0.3)"
    )


def check(plan: Plan) -> None:
    """Raises a `UserError` if there are no validation examples, or a field may not or cannot be searched."""
    trials, asked = plan.trials, plan.search
    if asked is None:
        if trials is not None:
            raise UserError(no_fields(trials))
        return
    if not isinstance(asked, Mapping) or not asked:
        raise UserError(f"tune must be fields with the values to try, as in {{'lr': [0.01, 0.1]}}, got {asked!r}")
    if trials is not None and (isinstance(trials, bool) or not isinstance(trials, int) or trials < 1):
        raise UserError(f"trials must be a whole number of runs a method from 1, got {trials!r}")
    for name, values in asked.items():
        if name in EQUAL:
            raise UserError(f"{name} cannot be searched: methods are compared with equal local training")
        if isinstance(values, str) and values not in (GRID, GRID_AND_MORE) and trials is None:
            raise UserError(f"the range {values!r} for {name} needs a number of runs a method, trials=20 (--trials 20), "
                            "or give the values to try")  # fmt: skip
        known = {f.name for method in plan.methods.values() for f in _fields(method)}
        if name not in known:
            raise UserError(f"no method of the comparison has a field {name!r} to search; {nearest(name, known)}")
        check_beyond(name, values, trials)
        for method in plan.methods.values():
            if name in {f.name for f in _fields(method)}:
                for value in ends_of(name, values_of(method, name, values)):
                    dataclasses.replace(method, **{name: value})  # type: ignore[type-var]  # which checks the value
    if trials is not None:
        imported()
    if not any(c.val is not None for c in with_validation(plan.cast(plan.seeds[0]).clients, plan.seeds[0])):
        raise UserError(
            "hyper-parameters are searched on validation examples, and no client has any, or enough training examples to "
            "hold some out; give val=... (Client), --data.val-fraction 0.2, or tune='none' (--tune none)"
        )


def search(plan: Plan, methods: Mapping[str, Method]) -> "Searched":
    """Tries what is to be tried of each method."""
    cast = plan.cast(plan.seeds[0])
    held_out = any(c.val is None for c in cast.clients)
    members = with_validation(cast.clients, plan.seeds[0])
    searching = dataclasses.replace(
        cast, clients=members, public=public_prepared_again(cast.public, members), config={}
    )
    plan = dataclasses.replace(plan, cast=lambda seed: searching)
    data = fingerprint(searching.clients, searching.public)
    sign = 1 if plan.metrics[0].higher_is_better else -1
    tried: dict[str, list[_Tried]] = {label: [] for label in methods}
    if plan.trials is None:
        tries = [(label, fields) for label, method in methods.items() for fields in _grid(plan, method)]
        while tries:
            for one in _played(plan, methods, tries, data):
                tried[one.label].append(one)
            tries = [
                (label, fields)
                for label, ranked in _ranked(tried, sign).items()
                for fields in _beyond(plan, methods[label], tried[label], ranked)
            ]
    else:
        studies = {label: Study(of, plan.seeds[0]) for label, method in methods.items() if (of := _of(plan, method))}
        for _ in range(plan.trials):  # one run of each method at a time: the next depends on what it found
            wave = _played(plan, methods, [(label, study.ask()) for label, study in studies.items()], data)
            before = [one for runs in tried.values() for one in runs]
            known = max((len(one.scored) for one in (*wave, *before)), default=0)  # none if the methods are left out
            for one in wave:
                whole = one.validation is not None and len(one.scored) == known
                studies[one.label].tell(sign * one.validation if whole and one.validation is not None else None)
                tried[one.label].append(one)
    return Searched(plan, methods, tried, _ranked(tried, sign), held_out)


def _ranked(tried: Mapping[str, Sequence["_Tried"]], sign: int) -> "dict[str, list[_Tried]]":
    """The runs of each method that have a score over all clients, the best first."""
    everyone = max((one.scored for runs in tried.values() for one in runs), key=len, default=frozenset())
    found = {}
    for label, runs in tried.items():
        scored = [one for one in runs if one.validation is not None and one.scored == everyone]
        found[label] = sorted(scored, key=lambda one: (sign * (one.validation or 0.0), -one.loss), reverse=True)
    return found


def _beyond(plan: Plan, method: Method, runs: Sequence["_Tried"], ranked: Sequence["_Tried"]) -> list[Fields]:
    """What was best, with the next value of each field of which the best value is the smallest or the largest."""
    found = []
    for name, given in _of(plan, method).items() if ranked else ():
        if not goes_on((plan.search or {})[name]):
            continue
        tried, best = {one.fields[name] for one in runs}, ranked[0].fields
        whole = not any(f.name == name and "float" in str(f.type) for f in _fields(method))
        further = next_value([*tried], best[name], whole) if len(tried) - len(given) < _BEYOND else None
        if further is not None:
            try:
                dataclasses.replace(method, **{name: further})  # type: ignore[type-var]  # which checks the value
            except UserError:
                continue
            found.append({**best, name: further})
    return found


@final
@dataclass(frozen=True, eq=False)
class Searched:
    """What a search found.

    Attributes: `plan` and `methods`, of the search; `tried`, by label; `ranked`, those of them that have a score, the best
    first; `held_out`, whether validation examples were held out for it.
    """

    plan: Plan
    methods: Mapping[str, Method]
    tried: Mapping[str, Sequence["_Tried"]]
    ranked: Mapping[str, Sequence["_Tried"]]
    held_out: bool

    @property
    def failed(self) -> dict[str, Failure]:
        """The methods of which each run failed."""
        found = dict[str, Failure]()
        for label, runs in self.tried.items():
            if runs and not self.ranked[label]:
                lost = RoundError(f"no run of the search has a validation score of every client (method {label})")
                found[label] = next((one.failure for one in runs if one.failure is not None), lost)
        return found

    def fields(self, label: str, place: int) -> Fields | None:
        """What was found best for a method, or next best, by its `place` from 0; None if there is no more."""
        ranked = self.ranked[label]
        return ranked[place].fields if place < len(ranked) else None

    def chosen(self, places: Mapping[str, int]) -> tuple[dict[str, Method], dict[str, Any]]:
        """The methods with what was found best for each, and the search as `comparison.json` says it.

        Args:
            places: of the methods whose best diverged with another seed: which of the next is taken instead.
        """
        found, told = dict(self.methods), dict[str, Any]()
        rounds: dict[str, int | None] = {}
        losses: dict[str, list[list[float]]] = {}
        edge = []
        for label, runs in self.tried.items():
            ranked, place = self.ranked[label], places.get(label, 0)
            if ranked:
                best = ranked[place]
                found[label] = dataclasses.replace(found[label], **best.fields)  # type: ignore[type-var]
                rounds[label], losses[label] = best.round, [list(point) for point in best.losses]
                edge += [f"{name} of {label}" for name in best.fields if _at_the_edge(name, best, runs)]
            told[label] = {
                "chosen": ranked[place].fields if ranked else {},
                "diverged": [one.fields for one in ranked[:place]],
                "runs": len(runs),
                "tried": [
                    {"fields": one.fields, "validation": one.validation if one in ranked else None} for one in runs
                ],
            }
        most = max(entry["runs"] for entry in told.values())
        entry = {"sentence": self._sentence(most), "by": "validation", "methods": told, "edge": edge, "losses": losses}
        return found, entry | ({"rounds": rounds} if self.held_out else {})

    def _sentence(self, most: int) -> str:
        plan, at = self.plan, self.plan.searched_at
        how = "all combinations" if plan.trials is None else "by Optuna"
        if plan.trials is None and any(goes_on(values) for values in (plan.search or {}).values()):
            how += f", and up to {_BEYOND} values beyond where the best was the smallest or the largest"
        runs = (
            f"up to {most} {'run' if most == 1 else 'runs'} of {plan.settings.rounds} rounds with seed {plan.seeds[0]}"
        )
        score = "best mean validation score"
        if at.asked:
            score += f" of the last {_NEAR} evaluated rounds" + ("" if at.limit is None else f" within {at}")
        sentence = (
            f"{', '.join(plan.search or {})}, {how}: {runs} for each method that has the fields, chosen by the {score}"
        )
        if not self.held_out:
            return sentence
        also = "" if at.asked else "which also chose the number of rounds, "
        return (
            f"{sentence}; clients without validation examples held out a fifth of their training examples for the search, "
            f"{also}and train on all of them afterwards"
        )


def _best(scored: Sequence[tuple[int, float]], sign: int) -> tuple[float | None, int | None]:
    """The best score of a curve and its round. A score is the mean of an evaluated round and its two neighbours: the best of
    many single rounds would be that of the method whose scores vary most.

    >>> _best([(1, 0.5), (2, 0.9), (3, 0.4), (4, 0.7), (5, 0.8), (6, 0.75)], 1)
    (0.75, 5)
    """
    smooth = [(fmean(v for _, v in near), number)
              for k, (number, _) in enumerate(scored) if (near := scored[max(0, k - 1) : k + 2])]  # fmt: skip
    inner = smooth[1:-1] or smooth
    return max(inner, key=lambda one: (sign * one[0], -one[1]), default=(None, None))


def _last(
    history: Sequence[Mapping[str, Any]], scored: Sequence[tuple[int, float]], at: Budget
) -> tuple[float | None, int | None]:
    """The score of a run after all rounds that a budget allows, or after the first if that is none, and its last round.

    >>> _last([], [(1, 0.9), (2, 0.25), (3, 0.5), (4, 0.75)], Budget("steps"))
    (0.5, 4)
    """
    spent = {point.round: getattr(point, at.kind) for point in curve(history, "")} if at.limit is not None else {}
    inside = [one for one in scored if at.limit is None or spent[one[0]] <= at.limit][-_NEAR:] or scored[:1]
    return (fmean(value for _, value in inside), inside[-1][0]) if inside else (None, None)


def _at_the_edge(name: str, best: "_Tried", runs: Sequence["_Tried"]) -> bool:
    """Whether the best number is the smallest or the largest that was tried, of three or more."""
    values = sorted({one.fields[name] for one in runs if is_number(one.fields[name])})
    return len(values) > 2 and best.fields[name] in (values[0], values[-1])


@dataclass(frozen=True)
class _Tried:
    """A run of the search: its fields, the best mean validation score, at which round, with which validation loss, over
    which clients, or why it has none; and the validation loss of each evaluated round. A client whose training diverged has
    no score, and a mean over the others would be rewarded for that."""

    label: str
    fields: Fields
    validation: float | None
    round: int | None
    loss: float
    scored: frozenset[str]
    losses: Sequence[tuple[int, float]]
    failure: Failure | None


def _written(fields: Fields) -> str:
    return ",".join(f"{key}={value}" for key, value in fields.items())


def folder_of(fields: Fields) -> str:
    """Name of a folder for what is chosen instead of the best, within that of the method.

    >>> folder_of({"lr": 0.1})[:8]
    'lr%3D0.1'
    """
    return file_name(_written(fields))


def _played(plan: Plan, methods: Mapping[str, Method], tries: Sequence[tuple[str, Fields]], data: str) -> list[_Tried]:
    seed, jobs = plan.seeds[0], []
    for label, fields in tries:
        name = _written(fields)
        folder = None if plan.out is None else plan.out / TUNING / label / file_name(name)
        changed = dataclasses.replace(methods[label], **fields)  # type: ignore[type-var]
        jobs.append(Job(f"{label} with {name}", changed, seed, folder, data, compared=False))
    played, failed = play(plan, jobs) if jobs else ({}, {})
    name, found = plan.metrics[0].name, []
    for (label, fields), job in zip(tries, jobs, strict=True):
        history = played[job].history if job in played else [{"summary": {}, "clients": {}, "best_round": None}]
        scores = means(history, f"val_{name}")
        if plan.searched_at.asked:
            score, best = _last(history, scores, plan.searched_at)
        else:
            score, best = _best(scores, 1 if plan.metrics[0].higher_is_better else -1)
        at = history[-1] if best is None else history[best - 1]
        tested = [record["clients"] for record in history if record["summary"]]
        scored = frozenset(c for c in at["clients"] if all(rows[c].get(f"val_{name}") is not None for rows in tested))
        loss = at["summary"].get("val_loss", {}).get("mean")
        losses = means(history, "val_loss") if job in played else []
        worst = float("inf") if loss is None else loss
        found.append(_Tried(label, fields, score, best, worst, scored, losses, failed.get(job)))
    return found


def _fields(method: Method) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(method)  # type: ignore[arg-type]


def variants(plan: Plan, method: Method) -> list[Method]:
    """The method with the values that are to be tried: all combinations, or the low and the high ends of ranges."""
    if plan.trials is None:
        tries = _grid(plan, method)
    else:
        ends = {name: ends_of(name, values) for name, values in _of(plan, method).items()}
        tries = [{name: found[k] for name, found in ends.items()} for k in (0, -1)] if ends else []
    return [dataclasses.replace(method, **fields) for fields in tries]  # type: ignore[type-var]


def _of(plan: Plan, method: Method) -> dict[str, Any]:
    """The fields to search that a method has, with their values or range."""
    own = {f.name for f in _fields(method)}
    return {name: values_of(method, name, values) for name, values in (plan.search or {}).items() if name in own}


def _grid(plan: Plan, method: Method) -> list[Fields]:
    searched = _of(plan, method)
    return [dict(zip(searched, values, strict=True)) for values in product(*searched.values())] if searched else []
