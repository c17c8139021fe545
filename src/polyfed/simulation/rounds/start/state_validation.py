"""Validates that the server and client states in a checkpoint have the form that the run's method gives them.

Hashes find accidents. A checkpoint that somebody has put together, with matching hashes, may have tensors of other
names, shapes or types, values that are not finite, or lack a client: training would fail with a traceback rounds
later, or continue wrongly. It is therefore compared with what `server_init` and `client_init` create before a run
resumes from it.

State may grow with the rounds (FedFomo's models, momentum, buffers), and a method of your own may change its state as
it likes. Only methods of the registry are therefore compared in full, by these rules: what exists from the beginning
keeps its names, shapes and types; what comes later and has the names of the network, or of something that existed, has
the same form.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from torch import Tensor

from polyfed.algorithms import REGISTRY
from polyfed.core.algorithm import Architecture, Client
from polyfed.core.errors import UserError
from polyfed.core.examples.nan_checks import nonfinite_state_error
from polyfed.core.methods.capabilities import AddsServerTensors
from polyfed.core.nn.grad_mode import grad_enabled
from polyfed.core.nn.module_cache import cached_module, copy_trained_weights_and_buffers
from polyfed.core.seeds import temporary_rng_seed
from polyfed.core.state_dict import PyTree, StateDict, spec_mismatch, state_dict_spec
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.scheduling.asynchronous.updates_in_flight import UpdatesInFlight
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.simulation.storage.checkpoints.client_states import ClientStates, groups_by_client

_SHRINKING = "private"  # flha_ghn: parameters that turn out to be generated are dropped from it
_PARTS = "heads"  # fedpac: a part of the network; only the clients know which
_ALIEN = frozenset({"teacher", "common"})  # fedavg_kd, fedkd: other networks whose tensors have names like the client's


@final
class StateValidator:
    """Compares a checkpoint's states with the initial states of server and clients."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._is_registered = type(federation.algorithm) in REGISTRY.values()
        self._initial_client_states: dict[str, PyTree] = {}  # of the first client of each architecture
        self._initial_server_state: PyTree = None
        if self._is_registered:
            with warnings.catch_warnings(action="ignore"):  # they were shown when the run began
                self._initial_server_state = federation.initial_checkpoint().state

    def state_error(self, checkpoint: Checkpoint, records: Sequence[Mapping[str, Any]]) -> str | None:
        """Returns half a sentence on how states differ in form from the method's; None if they do not.

        Args:
            checkpoint: the checkpoint.
            records: of the rounds up to it, as in `metrics.jsonl`.
        """
        ids = set(self._federation.client_registry.ids)
        versions = self._states_of_versions(checkpoint, ids)
        if isinstance(versions, str):
            return versions
        if unknown_ids := sorted(checkpoint.client_states.keys() - ids):
            return f"it has a private state of {unknown_ids[0]!r}, who is not in the federation"
        trained = {i for record in records for i, row in record.get("clients", {}).items() if "seconds" in row}
        if missing_ids := sorted((trained & ids) - checkpoint.client_states.keys()):
            return f"the private state of {missing_ids[0]!r} is missing, who has trained"
        if not self._federation.clients:  # private states of a deployment are at the sites
            states = checkpoint.client_states.items()
            return _first_error(_remote_state_error(i, state, checkpoint) for i, state in states) or None
        if not self._is_registered:
            return None
        known_states = [*_state_dicts(self._initial_server_state)]
        if isinstance(algorithm := self._federation.algorithm, AddsServerTensors):
            known_states.append(algorithm.later_server_tensors(self._initial_server_state))
        for state in (checkpoint.state, *versions):
            initial, part = _without_repeated_entries(self._initial_server_state, state)
            if error_text := _state_difference(initial, part, known_states, ids) or nonfinite_state_error(part):
                return f"the server's state: {error_text}"
        wrongs = (
            (i, self._client_state_error(self._federation.clients[i], client_state))
            for i, client_state in checkpoint.client_states.items()
        )
        return next((f"the private state of {i!r}: {error_text}" for i, error_text in wrongs if error_text), None)

    def _states_of_versions(self, checkpoint: Checkpoint, ids: set[str]) -> Sequence[PyTree] | str:
        """Returns the states from which clients at work have started, or what is wrong with the schedule."""
        schedule, has_real_clients = checkpoint.schedule or {}, not self._federation.clients
        if self._federation.settings.asynchronous is None or checkpoint.round == 0 or has_real_clients:
            return []  # real clients start again from the newest version
        try:
            flights = UpdatesInFlight.from_plain_state(schedule.get("flights"))
        except UserError as error:
            return str(error)
        at_work, versions = flights.by_client or {}, flights.versions or {}
        if unknown_ids := sorted(at_work.keys() - ids):
            return f"{unknown_ids[0]!r} is at work in it, who is not in the federation"
        if later_versions := sorted(version for version in versions if version >= checkpoint.round):
            return f"version {later_versions[0]} in it is later than its round"
        return list(versions.values())

    def _client_state_error(self, client: Client, client_state: PyTree) -> str:
        """Returns how a client's private state differs from the initial one; "" if it does not."""
        known_states = [] if client.model is None else _network_states(client.model)
        key = "" if client.model is None else cached_module(client.model).architecture
        ids = set(self._federation.client_registry.ids)
        if key not in self._initial_client_states:
            self._initial_client_states[key] = self._init_client_state(client)
        initial_state = self._initial_client_states[key]
        # Shapes may depend on the client's data.
        if _state_difference(initial_state, client_state, [*known_states, *_state_dicts(initial_state)], ids):
            initial_state = self._init_client_state(client)
        difference = _state_difference(initial_state, client_state, [*known_states, *_state_dicts(initial_state)], ids)
        return difference or nonfinite_state_error(client_state) or ""

    def _init_client_state(self, client: Client) -> PyTree:
        seed = self._federation.settings.seed
        with grad_enabled(), temporary_rng_seed(seed):
            return self._federation.algorithm.client_init(client, seed)


def _remote_state_error(client: str, client_state: PyTree, checkpoint: Checkpoint) -> str:
    """Returns what is wrong with the round of a private state kept at its site; "" if nothing is."""
    entry = client_state if isinstance(client_state, dict) and client_state.keys() <= {"round", "earlier"} else {}
    earlier = entry.get("earlier", [])
    numbers: list[Any] = [*earlier, entry.get("round")] if isinstance(earlier, list) else [None]
    are_whole = all(type(number) is int for number in numbers)
    if are_whole and numbers == sorted(set(numbers)) and numbers[0] >= 1 and numbers[-1] <= checkpoint.round:
        return ""
    return f"the round of the private state that {client!r} keeps is {str(client_state)[:60]}"


def _without_repeated_entries(initial: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    """Returns both server states, with clients' equal initial entries only once: a million need no comparison."""
    before, after = dict[str, Any](), dict[str, Any]()
    for name, group in groups_by_client(state).items():
        initial_group = initial.get(name) if isinstance(initial, Mapping) else None
        if not isinstance(initial_group, ClientStates) or initial_group.initial is None or group.initial is None:
            continue
        if initial_group.initial.clients.keys() == group.initial.clients.keys():
            after[name] = dict(group.iterate_distinct_states())
            before[name] = {client: initial_group[client] for client in after[name] if client in initial_group}
    return ({**initial, **before}, {**state, **after}) if after else (initial, state)


def _state_difference(
    initial: PyTree, state: PyTree, known_states: Sequence[StateDict], ids: set[str], place: str = ""
) -> str:
    """Returns in half a sentence how a state differs from the initial one; "" if the method can have made it."""
    label = place or "it"
    if isinstance(initial, Tensor):
        if not isinstance(state, Tensor):
            return f"tensor {label!r} is a {type(state).__name__}"
        return spec_mismatch({label: state}, state_dict_spec({label: initial})) or ""
    if isinstance(initial, Mapping):
        if not isinstance(state, Mapping):
            return f"{label!r} is a {type(state).__name__}, not a mapping"
        if initial:
            return _mapping_difference(initial, state, known_states, ids, place)
        return _later_state_error(state, known_states, ids, place)
    if isinstance(initial, list):
        if not isinstance(state, list):
            return f"{label!r} is a {type(state).__name__}, not a list"
        if len(initial) != len(state):
            return (
                f"list {label!r} has {len(state)} parts, expected {len(initial)}" if any(_state_dicts(initial)) else ""
            )
        pairs = zip(initial, state, strict=True)
        return _first_error(
            _state_difference(a, b, known_states, ids, _join_path(place, k)) for k, (a, b) in enumerate(pairs)
        )
    if initial is None:
        return _later_state_error(state, known_states, ids, place)
    return "" if type(initial) is type(state) else f"{label!r} is {str(state)[:60]}, not a {type(initial).__name__}"


def _mapping_difference(
    initial: Mapping[str, Any], state: Mapping[str, Any], known_states: Sequence[StateDict], ids: set[str], place: str
) -> str:
    """Returns how a mapping in a state differs from the initial one; "" if the method can have made it."""
    if _is_tree(initial):
        if error_text := _non_tensor_error(state, place):
            return error_text
        specs = {_join_path(place, name): form for name, form in state_dict_spec(initial).items()}
        if place.rpartition("/")[2] == _SHRINKING:
            specs = {name: form for name, form in specs.items() if name.removeprefix(f"{place}/") in state}
        return spec_mismatch({_join_path(place, name): tensor for name, tensor in state.items()}, specs) or ""
    new = {name: value for name, value in state.items() if name not in initial}
    for name in initial.keys() - state.keys() - {_SHRINKING}:
        # FedRep's draw gives way to the body, a part of it: which part, only the clients know. It may be no tensor at all.
        related_names = [
            n for n, value in new.items() if _is_tree(initial[name]) and _shares_names(value, initial[name])
        ]
        empty = [n for n, value in new.items() if _is_tree(initial[name]) and isinstance(value, Mapping) and not value]
        successor = next(iter(related_names + empty), None)
        if successor is None:
            return f"{_join_path(place, name)!r} is missing"
        part = {n: tensor for n, tensor in initial[name].items() if n in new[successor]}
        if error_text := _state_difference(part, new.pop(successor), known_states, ids, _join_path(place, successor)):
            return error_text
    difference = _first_error(
        _state_difference(initial[name], state[name], known_states, ids, _join_path(place, name))
        for name in initial
        if name in state
    )
    if not difference and new and place:
        return f"{_join_path(place, next(iter(new)))!r} is unexpected"
    return difference or _first_error(
        _later_state_error(value, known_states, ids, _join_path(place, name)) for name, value in new.items()
    )


def _later_state_error(state: PyTree, known_states: Sequence[StateDict], ids: set[str], place: str) -> str:
    """Returns what is wrong with a part of a state that did not exist initially; "" if nothing is."""
    if isinstance(state, list):
        return _first_error(
            _later_state_error(value, known_states, ids, _join_path(place, k)) for k, value in enumerate(state)
        )
    if not isinstance(state, Mapping) or place.rpartition("/")[2] in _ALIEN:
        return ""
    related_states = [tensors for tensors in known_states if _shares_names(state, tensors)]
    if not related_states or state.keys() <= ids:
        return _first_error(
            _later_state_error(value, known_states, ids, _join_path(place, name)) for name, value in state.items()
        )
    if error_text := _non_tensor_error(state, place):
        return error_text
    if place.startswith(f"{_PARTS}/"):
        related_states = [{name: tensors[name] for name in tensors if name in state} for tensors in related_states]
    tensor_by_path = {_join_path(place, name): tensor for name, tensor in state.items()}
    reasons = [
        spec_mismatch(
            tensor_by_path, {_join_path(place, name): form for name, form in state_dict_spec(tensors).items()}
        )
        for tensors in related_states
    ]
    if None in reasons:
        return ""
    closest = max(
        range(len(related_states)),
        key=lambda k: len(related_states[k].keys() & state.keys()) - len(related_states[k].keys() ^ state.keys()),
    )
    return reasons[closest] or ""


def _non_tensor_error(state: Mapping[str, Any], place: str) -> str:
    names = (name for name, value in state.items() if not isinstance(value, Tensor))
    return _first_error(f"tensor {_join_path(place, name)!r} is a {type(state[name]).__name__}" for name in names)


def _network_states(model: Architecture) -> list[StateDict]:
    """Returns the state of a network that is not frozen, its parameters that are trained, and its buffers."""
    net = cached_module(model)
    parameters = {n: p for n, p in net.module.named_parameters() if n not in net.frozen}
    return [copy_trained_weights_and_buffers(net.module), parameters, net.buffers]


def _state_dicts(nested: PyTree) -> Iterator[StateDict]:
    """Yields every mapping of names to tensors in a state."""
    if not isinstance(nested, ClientStates) and _is_tree(nested):
        yield nested
    elif isinstance(nested, ClientStates):
        for _, value in nested.iterate_distinct_states():
            yield from _state_dicts(value)
    elif isinstance(nested, Mapping | list):
        for value in nested.values() if isinstance(nested, Mapping) else nested:
            yield from _state_dicts(value)


def _is_tree(value: PyTree) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(item, Tensor) for item in value.values())


def _shares_names(value: PyTree, tensors: StateDict) -> bool:
    return isinstance(value, Mapping) and bool(value.keys() & tensors.keys())


def _join_path(place: str, name: object) -> str:
    return f"{place}/{name}" if place else str(name)


def _first_error(errors: Iterator[str]) -> str:
    return next(filter(None, errors), "")
