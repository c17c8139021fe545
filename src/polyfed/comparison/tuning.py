"""Hyper-parameters of a comparison, searched on validation examples before it, by the same rule for every method.

Without `trials` every combination of the values given is tried, the small grid. Where the best is then the smallest or the
largest value, up to two further ones are tried beyond it, unless only those given were asked for. With `trials` there are
that many runs a method, chosen by Optuna's tree-structured Parzen estimator, also within ranges.

Each is a run of full length with the first seed. What wins is in module `choices`: methods whose clients train together have
one choice, by the loss on all validation examples; of `local`, which sends nothing, each client has a choice of its own, by
the loss on its own. The loss is that at the round at which methods are to be compared, or the lowest where that is theirs.
Test examples have no say, nor has the metric that decides. Where clients have no validation examples, a fifth of their
training examples is held out for the search alone: the round of the lowest loss is then the round at which the method, or
the client of `local`, is compared, and the final runs train on all of it. The results tell how many runs each method had. A
run that diverges counts as tried, and does not win. If what won diverges with another seed, the next best is compared in its
place. `DIR/tuning/METHOD/FIELDS` is the directory of each.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, final

from polyfed.algorithms import Local
from polyfed.comparison.choices import NEAR, WEIGHT, Fields, Tried, ranked, ranked_alone, stopped
from polyfed.comparison.curves import curve
from polyfed.comparison.plans import EQUAL, TUNING, Failure, Job, Method, Plan, play
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
from polyfed.comparison.verdicts import listed
from polyfed.core.errors import ClientError, RoundError, UserError, nearest
from polyfed.data.held_out import with_validation
from polyfed.data.resplit import public_prepared_again
from polyfed.simulation.fingerprints import fingerprint
from polyfed.simulation.losses import pooled
from polyfed.simulation.runs.paths import file_name

AUTO, NONE = "auto", "none"
BY_DEFAULT = {"lr": GRID_AND_MORE}
"""What is searched unless something else is asked for: every method's learning rate, around its own and beyond."""
_BEYOND = 2  # further values of a field, on either side
_LOSS = ("label_smoothing", "class_weights")  # fields that change what the loss means
_EACH = "by_client"  # field of `local` with what each client has chosen
Place = tuple[str, str | None]  # a label, and a client that chooses alone


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
        if name in _LOSS:
            raise UserError(f"{name} cannot be searched: the search goes by the loss, whose meaning it changes; compare "
                            "methods with different values, each by a label of its own")  # fmt: skip
        if name == _EACH:
            raise UserError(f"{name} cannot be searched: it holds what each client has chosen; search the fields in it")
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


def search(plan: Plan, methods: Mapping[str, Method], *, alike: bool) -> "Searched":
    """Tries what is to be tried of each method; `alike`, whether an id is the same client in each seed."""
    cast = plan.cast(plan.seeds[0])
    held_out = any(c.val is None for c in cast.clients)
    members = with_validation(cast.clients, plan.seeds[0])
    searching = dataclasses.replace(
        cast, clients=members, public=public_prepared_again(cast.public, members), config={}
    )
    plan = dataclasses.replace(plan, cast=lambda seed: searching)
    data = fingerprint(searching.clients, searching.public)
    sizes = {c.id: 0 if c.val is None else len(c.val) for c in searching.clients}
    found = Searched(plan, methods, {label: [] for label in methods}, sizes, held_out, alike)
    if plan.trials is None:
        tries = [(label, fields) for label, method in methods.items() for fields in _grid(plan, method)]
        while tries:
            found = found.with_runs(_played(found, tries, data))
            tries = [(label, fields) for label in methods for fields in _beyond(found, label)]
    else:
        studies = {label: Study(of, plan.seeds[0]) for label, method in methods.items() if (of := _of(plan, method))}
        for _ in range(plan.trials):  # one run of each method at a time: the next depends on what it found
            wave = _played(found, [(label, study.ask()) for label, study in studies.items()], data)
            found = found.with_runs(wave)
            for one in wave:
                whole = one.place is not None and one.losses.keys() == found.everyone
                studies[one.label].tell(-one.place[0] if whole and one.place is not None else None)
    return found


def _beyond(found: "Searched", label: str) -> list[Fields]:
    """What was best, with the next value of each field of which the best value is the smallest or the largest. Of clients
    that have a choice of their own, whoever has most validation examples decides on the other fields."""
    plan, method, runs = found.plan, found.methods[label], found.tried[label]
    tries: list[Fields] = []
    for name, given in _of(plan, method).items():
        if not goes_on((plan.search or {})[name]):
            continue
        tried = {one.fields[name] for one in runs}
        whole = not any(f.name == name and "float" in str(f.type) for f in _fields(method))
        sides = set[bool]()
        for best in found.bests(label):
            upper = best[name] == max(tried)
            beyond = [value for value in tried if (value > max(given) if upper else value < min(given))]
            further = next_value([*tried], best[name], whole) if len(beyond) < _BEYOND else None
            if further is None or upper in sides:
                continue
            sides.add(upper)
            try:
                dataclasses.replace(method, **{name: further})  # type: ignore[type-var]  # which checks the value
            except UserError:
                continue
            tries.append({**best, name: further})
    return [fields for k, fields in enumerate(tries) if fields not in tries[:k]]


@final
@dataclass(frozen=True, eq=False)
class Searched:
    """What a search found.

    Attributes: `plan` and `methods`, of the search; `tried`, by label; `sizes`, validation examples by client; `held_out`,
    whether validation examples were held out for it; `alike`, whether an id is the same client in each seed.
    """

    plan: Plan
    methods: Mapping[str, Method]
    tried: Mapping[str, Sequence[Tried]]
    sizes: Mapping[str, int]
    held_out: bool
    alike: bool

    def with_runs(self, runs: Sequence[Tried]) -> "Searched":
        """The same with further runs."""
        tried = {label: [*known, *(one for one in runs if one.label == label)] for label, known in self.tried.items()}
        return dataclasses.replace(self, tried=tried)

    @cached_property
    def everyone(self) -> frozenset[str]:
        """The clients that a loss is the mean over."""
        return max(
            (frozenset(one.losses) for runs in self.tried.values() for one in runs), key=len, default=frozenset()
        )

    @cached_property
    def ranked(self) -> Mapping[str, Sequence[Tried]]:
        """By label the runs that have a loss of all these clients, the best first."""
        return {label: ranked(runs, self.everyone) for label, runs in self.tried.items()}

    @cached_property
    def alone(self) -> Mapping[str, Mapping[str, Sequence[tuple[Tried, int]]]]:
        """By label of a method whose clients train alone and so choose alone, and by client: the runs in which it has a
        loss, the best for it first, each with its round. A client without any has the choice of all. Where each seed
        deals the data again, an id is no client, and there is none."""
        return {
            label: {client: order for client in sorted(self.sizes) if (order := ranked_alone(runs, client))}
            for label, runs in self.tried.items()
            if self.alike and runs and self.ranked[label] and isinstance(self.methods[label], Local)
        }

    def bests(self, label: str) -> list[Fields]:
        """What was found best for a method, or for its clients, those with most validation examples first."""
        if label in self.alone:
            clients = sorted(self.alone[label], key=lambda client: -self.sizes[client])
            return [self.alone[label][client][0][0].fields for client in clients]
        return [one.fields for one in self.ranked[label][:1]]

    @property
    def failed(self) -> dict[str, Failure]:
        """The methods of which each run failed."""
        found = dict[str, Failure]()
        for label, runs in self.tried.items():
            if runs and not self.ranked[label]:
                lost = RoundError(f"no run of the search has a validation loss of every client (method {label})")
                found[label] = next((one.failure for one in runs if one.failure is not None), lost)
        return found

    def next_place(self, label: str, failure: Failure, places: Mapping[Place, int]) -> Place | None:
        """Whose choice gives way to the next best after a failure of what was chosen: the client's that failed where clients
        choose alone, else the method's; None if there is no more."""
        if label in self.alone:
            client = failure.client if isinstance(failure, ClientError) else ""
            order = self.alone[label].get(client, ())
            return (label, client) if places.get((label, client), 0) + 1 < len(order) else None
        return (label, None) if places.get((label, None), 0) + 1 < len(self.ranked[label]) else None

    def folder(self, label: str, places: Mapping[Place, int]) -> str:
        """Within the folder of a method that for runs with what was chosen; empty for the first choice."""
        if place := places.get((label, None), 0):
            return file_name(_written(self.ranked[label][place].fields))
        later = sum(place for (name, _), place in places.items() if name == label)
        return f"choice-{later + 1}" if later else ""

    def chosen(self, places: Mapping[Place, int]) -> tuple[dict[str, Method], dict[str, Any]]:
        """The methods with what was found best for each, and the search as `comparison.json` says it.

        Args:
            places: of the methods and clients whose best diverged with another seed: which of the next is taken instead.
        """
        found, told = dict(self.methods), dict[str, Any]()
        rounds: dict[str, int | None] = {}
        losses: dict[str, list[list[float]]] = {}
        edge = []
        for label, runs in self.tried.items():
            order, place = self.ranked[label], places.get((label, None), 0)
            entry: dict[str, Any] = {"chosen": {}, "diverged": [one.fields for one in order[:place]], "runs": len(runs)}
            if order:
                best = order[place]
                found[label] = dataclasses.replace(found[label], **best.fields)  # type: ignore[type-var]
                entry["chosen"] = best.fields
                rounds[label], losses[label] = best.round, [list(point) for point in best.curve]
                edge += [] if label in self.alone else [
                    f"{name} of {label}" for name in best.fields if _at_the_edge(name, best, runs)]  # fmt: skip
            if label in self.alone:
                own = {c: order[places.get((label, c), 0)] for c, order in self.alone[label].items()}
                found[label] = _each(found[label], {c: one.fields for c, (one, _) in own.items()})
                entry["by_client"] = {c: one.fields for c, (one, _) in own.items()}
                entry["rounds"] = {c: own[c][1] if c in own else best.round for c in sorted(self.sizes)}
                rounds[label] = max(entry["rounds"].values())
                losses[label] = self._stopped(own)
                for name in next(iter(entry["by_client"].values())):
                    if at := [c for c, (one, _) in own.items() if _at_the_edge(name, one, runs)]:
                        edge.append(f"{name} of {label} at {listed(at)}")
                entry["diverged"] = [
                    {"client": c, **one.fields} for c, order in self.alone[label].items()
                    for one, _ in order[: places.get((label, c), 0)]
                ]  # fmt: skip
            whole = {id(one) for one in order}
            entry["tried"] = [
                {"fields": one.fields, "loss": one.place[0] if id(one) in whole and one.place else None,
                 "validation": one.validation if id(one) in whole else None} for one in runs
            ]  # fmt: skip
            told[label] = entry
        most = max(entry["runs"] for entry in told.values())
        sentence = self._sentence(most)
        entry = {"sentence": sentence, "by": "validation loss", "methods": told, "edge": edge, "losses": losses}
        return found, entry | ({"rounds": rounds} if self.held_out else {})

    def _stopped(self, own: Mapping[str, tuple[Tried, int]]) -> list[list[float]]:
        """The loss on all validation examples where each client trains as it has chosen, and ends at its round."""
        histories = {c: one.losses[c] for c, (one, _) in own.items()}
        return [list(point) for point in pooled(stopped(histories, {c: n for c, (_, n) in own.items()}), self.sizes)]

    def _sentence(self, most: int) -> str:
        plan, at = self.plan, self.plan.searched_at
        how = "all combinations" if plan.trials is None else "by Optuna"
        if plan.trials is None and any(goes_on(values) for values in (plan.search or {}).values()):
            how += f", and up to {_BEYOND} values beyond where the best was the smallest or the largest"
        runs = (
            f"up to {most} {'run' if most == 1 else 'runs'} of {plan.settings.rounds} rounds with seed {plan.seeds[0]}"
        )
        score = "lowest loss on all validation examples together"
        if at.asked:
            score += f", of the last {NEAR} evaluated rounds" + ("" if at.limit is None else f" within {at}")
        sentence = (
            f"{', '.join(plan.search or {})}, {how}: {runs} for each method that has the fields, chosen by the {score}"
        )
        if self.alone:
            sentence += (
                f"; each client of {listed(list(self.alone))} chose for itself, by the loss on its own validation examples "
                f"(where they are few, that of all clients counts as {WEIGHT} more)"
            )
        if not self.held_out:
            return sentence
        also = "" if at.asked else "which also chose the number of rounds, "
        return (
            f"{sentence}; clients without validation examples held out a fifth of their training examples for the search, "
            f"{also}and train on all of them afterwards"
        )


def _each(method: Method, chosen: Mapping[str, Fields]) -> Method:
    """`local` with what each client has chosen; what a client was given beforehand stays."""
    assert isinstance(method, Local)
    before = method.by_client or {}
    return dataclasses.replace(
        method, by_client={**before, **{c: {**fields, **before.get(c, {})} for c, fields in chosen.items()}}
    )


def _at_the_edge(name: str, best: Tried, runs: Sequence[Tried]) -> bool:
    """Whether the best number is the smallest or the largest that was tried, of three or more."""
    values = sorted({one.fields[name] for one in runs if is_number(one.fields[name])})
    return len(values) > 2 and best.fields[name] in (values[0], values[-1])


def _written(fields: Fields) -> str:
    return ",".join(f"{key}={value}" for key, value in fields.items())


def _played(found: Searched, tries: Sequence[tuple[str, Fields]], data: str) -> list[Tried]:
    plan, jobs = found.plan, []
    for label, fields in tries:
        name, method = _written(fields), found.methods[label]
        folder = None if plan.out is None else plan.out / TUNING / label / file_name(name)
        changed = dataclasses.replace(method, **fields)  # type: ignore[type-var]
        skips = isinstance(method, Local)  # who diverges alone takes nothing from the others
        jobs.append(Job(f"{label} with {name}", changed, plan.seeds[0], folder, data, compared=False, skips=skips))
    played, failed = play(plan, jobs) if jobs else ({}, {})
    runs = []
    for (label, fields), job in zip(tries, jobs, strict=True):
        history = played[job].history if job in played else []
        lost = frozenset(f["client"] for record in history for f in record["failures"] if not f.get("retried"))
        at = plan.searched_at
        spent = {point.round: getattr(point, at.kind) for point in curve(history, "")} if at.limit is not None else {}
        runs.append(
            Tried(
                label, fields, history, at, found.sizes, plan.metrics[0].name, lost if job.skips else frozenset(),
                failed.get(job), spent,
            )
        )  # fmt: skip
    return runs


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
