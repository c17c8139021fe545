"""Whether what a checkpoint holds has the form that its method gives it.

Checksums find accidents. A checkpoint that somebody has put together, with checksums that fit, may have tensors of other
names, shapes or types, numbers that are none, or lack a client: training would fail with a traceback rounds later, or go on
wrongly. So it is compared with what `server_init` and `client_init` make, before a run goes on from it.

What a method keeps may grow with the rounds (FedFomo's models, momentum, buffers), and one of your own may change it as it
likes. So only methods of the registry are compared in full, by these rules: what is there from the beginning keeps its
names, shapes and types; what comes later and has names of the network, or of something that was there, has their form too.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from torch import Tensor

from polyfed.algorithms import REGISTRY, name_of
from polyfed.core.algorithm import Client
from polyfed.core.finite import not_finite_in
from polyfed.core.gradients import gradients
from polyfed.core.scratch import scratch, whole_state
from polyfed.core.seeds import local_rng
from polyfed.core.tree import Nested, Tree, mismatch, spec
from polyfed.simulation.rounds import Federation
from polyfed.simulation.runs.checkpoint import Checkpoint

_SHRINKING = "private"  # flha_ghn: a parameter that turned out to be generated is no longer kept
_PARTS = "heads"  # fedpac: parts of the network, which of it only the clients know
_ALIEN = frozenset({"teacher", "common"})  # fedavg_kd, fedkd: networks of another form, with names like the client's


@final
class Forms:
    """The forms that a federation's method gives to what the server and the clients keep."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._known = type(federation.algorithm) in REGISTRY.values()
        self._private: dict[str, Nested] = {}  # of the first client of each architecture
        self._server: Nested = None
        if self._known:
            with warnings.catch_warnings(action="ignore"):  # they were told when the run began
                self._server = federation.begin().state

    def flaw(self, found: Checkpoint, records: Sequence[Mapping[str, Any]]) -> str:
        """How a checkpoint differs from what the method keeps, as half a sentence; empty if it does not.

        Args:
            found: the checkpoint.
            records: of the rounds up to it, as `metrics.jsonl` has them.
        """
        ids = set(self._federation.roster.ids)
        if strange := sorted(found.client_states.keys() - ids):
            return f"it has a private state of {strange[0]!r}, who is not in the federation"
        trained = {i for record in records for i, row in record.get("clients", {}).items() if "seconds" in row}
        if lost := sorted((trained & ids) - found.client_states.keys()):
            return f"the private state of {lost[0]!r} is missing, who has trained"
        if not self._federation.clients:  # those of sites are at the sites
            return next(filter(None, (_at_a_site(i, own, found) for i, own in found.client_states.items())), "")
        if not self._known:
            return ""
        if wrong := _differs(self._server, found.state, [*_trees(self._server)], ids) or not_finite_in(found.state):
            return f"the server's state: {wrong}"
        wrongs = ((i, self._private_flaw(self._federation.clients[i], own)) for i, own in found.client_states.items())
        return next((f"the private state of {i!r}: {wrong}" for i, wrong in wrongs if wrong), "")

    def _private_flaw(self, client: Client, own: Nested) -> str:
        known = [_network(client), *_parts(client)] if client.model is not None else []
        key = "" if client.model is None else scratch(client.model).architecture
        ids = set(self._federation.roster.ids)
        if key not in self._private:
            self._private[key] = self._first(client)
        begin = self._private[key]
        if _differs(begin, own, [*known, *_trees(begin)], ids):  # a form may follow from the client's data
            begin = self._first(client)
        return _differs(begin, own, [*known, *_trees(begin)], ids) or not_finite_in(own)

    def _first(self, client: Client) -> Nested:
        seed = self._federation.settings.seed
        with gradients(), local_rng(seed):
            return self._federation.algorithm.client_init(client, seed)


def explained(wrong: str, folder: object, federation: Federation, round_number: int) -> str:
    """The sentence about a checkpoint that is not of the form of its method."""
    return (
        f"the checkpoint of round {round_number} in {folder} is not what {name_of(federation.algorithm)} wrote for these "
        f"clients: {wrong}"
    )


def _at_a_site(client: str, own: Nested, found: Checkpoint) -> str:
    number = own.get("round") if isinstance(own, dict) and own.keys() == {"round"} else None
    if type(number) is int and 1 <= number <= found.round:
        return ""
    return f"the round of the private state that {client!r} keeps is {str(own)[:60]}"


def _differs(begin: Nested, found: Nested, known: Sequence[Tree], ids: set[str], place: str = "") -> str:
    """How a state differs from the one of the beginning; empty if it may have become that."""
    what = place or "it"
    if isinstance(begin, Tensor):
        if not isinstance(found, Tensor):
            return f"tensor {what!r} is a {type(found).__name__}"
        return mismatch({what: found}, spec({what: begin})) or ""
    if isinstance(begin, Mapping):
        if not isinstance(found, Mapping):
            return f"{what!r} is a {type(found).__name__}, not a mapping"
        return _mapping(begin, found, known, ids, place) if begin else _later(found, known, ids, place)
    if isinstance(begin, list):
        if not isinstance(found, list):
            return f"{what!r} is a {type(found).__name__}, not a list"
        if len(begin) != len(found):
            return f"list {what!r} has {len(found)} parts, expected {len(begin)}" if any(_trees(begin)) else ""
        pairs = zip(begin, found, strict=True)
        return _first_of(_differs(a, b, known, ids, _inside(place, k)) for k, (a, b) in enumerate(pairs))
    if begin is None:
        return _later(found, known, ids, place)
    return "" if type(begin) is type(found) else f"{what!r} is {str(found)[:60]}, not a {type(begin).__name__}"


def _mapping(
    begin: Mapping[str, Any], found: Mapping[str, Any], known: Sequence[Tree], ids: set[str], place: str
) -> str:
    if _is_tree(begin):
        if wrong := _no_tensor(found, place):
            return wrong
        wanted = {_inside(place, name): form for name, form in spec(begin).items()}
        if place.rpartition("/")[2] == _SHRINKING:
            wanted = {name: form for name, form in wanted.items() if name.removeprefix(f"{place}/") in found}
        return mismatch({_inside(place, name): tensor for name, tensor in found.items()}, wanted) or ""
    new = {name: value for name, value in found.items() if name not in begin}
    for name in begin.keys() - found.keys() - {_SHRINKING}:
        # FedRep's draw gives way to the body, a part of it: which part, only the clients know. It may be no tensor at all.
        akin = [n for n, value in new.items() if _is_tree(begin[name]) and _akin(value, begin[name])]
        empty = [n for n, value in new.items() if _is_tree(begin[name]) and _is_empty(value)]
        heir = next(iter(akin + empty), None)
        if heir is None:
            return f"{_inside(place, name)!r} is missing"
        part = {n: tensor for n, tensor in begin[name].items() if n in new[heir]}
        if wrong := _differs(part, new.pop(heir), known, ids, _inside(place, heir)):
            return wrong
    both = _first_of(
        _differs(begin[name], found[name], known, ids, _inside(place, name)) for name in begin if name in found
    )
    if not both and new and place:
        return f"{_inside(place, next(iter(new)))!r} is unexpected"
    return both or _first_of(_later(value, known, ids, _inside(place, name)) for name, value in new.items())


def _later(found: Nested, known: Sequence[Tree], ids: set[str], place: str) -> str:
    """What is wrong with something that was not there at the beginning."""
    if isinstance(found, list):
        return _first_of(_later(value, known, ids, _inside(place, k)) for k, value in enumerate(found))
    if not isinstance(found, Mapping) or place.rpartition("/")[2] in _ALIEN:
        return ""
    akin = [tree for tree in known if _akin(found, tree)]
    if not akin or found.keys() <= ids:
        return _first_of(_later(value, known, ids, _inside(place, name)) for name, value in found.items())
    if wrong := _no_tensor(found, place):
        return wrong
    if place.startswith(f"{_PARTS}/"):
        akin = [{name: tree[name] for name in tree if name in found} for tree in akin]
    named = {_inside(place, name): tensor for name, tensor in found.items()}
    reasons = [mismatch(named, {_inside(place, name): form for name, form in spec(tree).items()}) for tree in akin]
    if None in reasons:
        return ""
    alike = max(range(len(akin)), key=lambda k: len(akin[k].keys() & found.keys()) - len(akin[k].keys() ^ found.keys()))
    return reasons[alike] or ""


def _no_tensor(found: Mapping[str, Any], place: str) -> str:
    wrong = (name for name, value in found.items() if not isinstance(value, Tensor))
    return _first_of(f"tensor {_inside(place, name)!r} is a {type(found[name]).__name__}" for name in wrong)


def _network(client: Client) -> Tree:
    assert client.model is not None
    return whole_state(scratch(client.model).module)


def _parts(client: Client) -> list[Tree]:
    """Of a network its trained parameters, and its buffers."""
    assert client.model is not None
    net = scratch(client.model)
    return [{n: p for n, p in net.module.named_parameters() if n not in net.frozen}, net.buffers]


def _trees(nested: Nested) -> Iterator[Tree]:
    """The mappings of names to tensors in a state."""
    if _is_tree(nested):
        yield nested
    elif isinstance(nested, Mapping | list):
        for value in nested.values() if isinstance(nested, Mapping) else nested:
            yield from _trees(value)


def _is_tree(value: Nested) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(item, Tensor) for item in value.values())


def _is_empty(value: Nested) -> bool:
    return isinstance(value, Mapping) and not value


def _akin(value: Nested, tree: Tree) -> bool:
    return isinstance(value, Mapping) and bool(value.keys() & tree.keys())


def _inside(place: str, name: object) -> str:
    return f"{place}/{name}" if place else str(name)


def _first_of(found: Iterator[str]) -> str:
    return next(filter(None, found), "")
