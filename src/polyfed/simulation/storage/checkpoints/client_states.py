"""Defines the mapping from clients to their states, which reads saved states from the store when they are asked for."""

import copy
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, final

import torch

from polyfed.core.algorithm import Algorithm
from polyfed.core.errors import UserError
from polyfed.core.messages.contiguous import as_contiguous
from polyfed.core.methods.capabilities import KeepsServerStateByClient
from polyfed.core.serialization import check_serializable
from polyfed.core.state_dict import PyTree
from polyfed.simulation.storage.checkpoints.state_rows import PRIVATE_PART
from polyfed.simulation.storage.checkpoints.state_store import StateStore


class SavedStatesLocation(NamedTuple):
    """Says where the states of a checkpoint are: the store, the part of it, and the round of the checkpoint."""

    store: StateStore
    part: str
    round: int


@final
@dataclass(frozen=True)
class SharedInitialState:
    """Holds the state that clients have until they have one of their own, and the clients that have it.

    Attributes:
        clients: their ids, as keys.
        state: what they have.
        known_list: the last list that was found to have these ids, so that a million are compared once, not in each round.
    """

    clients: Mapping[str, None]
    state: PyTree
    known_list: list[list[str]] = field(default_factory=list, compare=False, repr=False)

    def has_ids(self, value: PyTree) -> bool:
        """Returns whether a value is a list of the clients' ids, in their order."""
        if any(value is ids for ids in self.known_list):
            return True
        has_ids = isinstance(value, list) and len(value) == len(self.clients) and value == list(self.clients)
        if has_ids:
            self.known_list[:] = [value]
        return has_ids


@final
class ClientStates(Mapping[str, PyTree]):
    """Maps client ids to states; those of a checkpoint are read from the store when asked for.

    It does not change: `states | {client: new state}` is another mapping, which shares all else. It knows which states have
    changed since the last checkpoint, so that the next one writes those alone.

    Args:
        changed: client id -> state that is not saved yet.
        saved: where the other states are; None if there are none.
        initial: the state of clients that have no other; None if clients without a state are not in the mapping.

    >>> states = ClientStates({"north": {"steps": 1}}) | {"south": {"steps": 2}}
    >>> states["south"], sorted(states), states
    ({'steps': 2}, ['north', 'south'], ClientStates(2 clients))
    """

    def __init__(
        self,
        changed: Mapping[str, PyTree] | None = None,
        saved: SavedStatesLocation | None = None,
        initial: SharedInitialState | None = None,
    ) -> None:
        self._changed, self._saved, self._initial = dict(changed or {}), saved, initial

    @classmethod
    def wrap(cls, states: Mapping[str, PyTree]) -> "ClientStates":
        """Returns a mapping as `ClientStates`; one that is already is returned itself."""
        return states if isinstance(states, ClientStates) else cls(states)

    @classmethod
    def wrap_group(cls, states: Mapping[str, PyTree]) -> "ClientStates":
        """Returns a server state's group as `ClientStates`; one entry that all clients share is held once."""
        if isinstance(states, ClientStates):
            return states
        first = next(iter(states.values()), None)
        is_empty = isinstance(first, dict) and not first
        is_shared = len(states) > 1 and all(
            state is first or (is_empty and isinstance(state, dict) and not state) for state in states.values()
        )
        return cls(initial=SharedInitialState(dict.fromkeys(states), first)) if is_shared else cls(states)

    def __getitem__(self, client: str) -> PyTree:
        if client in self._changed:
            return self._changed[client]
        try:
            if self._saved is None:
                raise KeyError(client)
            return self._saved.store.read(self._saved.part, client, self._saved.round)
        except KeyError:
            if self._initial is None or client not in self._initial.clients:
                raise
            return self._initial.state

    def __contains__(self, client: object) -> bool:
        if client in self._changed or (self._initial is not None and client in self._initial.clients):
            return True
        saved = self._saved
        return saved is not None and isinstance(client, str) and saved.store.contains(saved.part, client, saved.round)

    def __iter__(self) -> Iterator[str]:
        if self._initial is not None:
            return iter(self._initial.clients)
        return iter(self._changed if self._saved is None else sorted({*self._saved_ids(), *self._changed}))

    def __len__(self) -> int:
        saved = self._saved
        if self._initial is not None:
            return len(self._initial.clients)
        if saved is None:
            return len(self._changed)
        new = sum(not saved.store.contains(saved.part, client, saved.round) for client in self._changed)
        return saved.store.count(saved.part, saved.round) + new

    def __or__(self, newer: Mapping[str, PyTree]) -> "ClientStates":
        """Returns the states with those of some clients replaced."""
        if self._initial is not None and not newer.keys() <= self._initial.clients.keys():
            return ClientStates({**self, **newer})  # a client of whom there was no initial state
        return ClientStates({**self._changed, **newer}, self._saved, self._initial)

    def __repr__(self) -> str:
        return f"ClientStates({len(self)} clients)"

    def __reduce__(self) -> tuple[Any, ...]:  # a copy, or what another process gets, has all states in memory
        return ClientStates, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ClientStates":
        initial = self._initial
        copied = None if initial is None else SharedInitialState(initial.clients, copy.deepcopy(initial.state, memo))
        return ClientStates(copy.deepcopy(self._changed, memo), self._saved, copied)

    @property
    def changes(self) -> Mapping[str, PyTree]:
        """Returns the states that are not saved yet."""
        return self._changed

    def iterate_own_states(self) -> Iterator[tuple[str, PyTree]]:
        """Yields each client that has a state of its own, with the state; reads saved states one by one."""
        yield from self._changed.items()
        yield from ((client, self[client]) for client in self._saved_ids() if client not in self._changed)

    def iterate_distinct_states(self) -> Iterator[tuple[str, PyTree]]:
        """Yields (client, state) for each client with a state of its own, and for one client with the initial state."""
        own_ids = set[str]()
        for client, state in self.iterate_own_states():
            own_ids.add(client)
            yield client, state
        if self._initial is not None:
            first = next((client for client in self._initial.clients if client not in own_ids), None)
            if first is not None:
                yield first, self._initial.state

    def _saved_ids(self) -> list[str]:
        return [] if self._saved is None else self._saved.store.client_ids(self._saved.part, self._saved.round)

    @property
    def initial(self) -> SharedInitialState | None:
        """Returns the state of clients that have no other, or None."""
        return self._initial

    def is_saved_in(self, store: StateStore, part: str, round_number: int) -> bool:
        """Returns whether all but the changed states are those of a checkpoint of this round in this store."""
        saved = self._saved
        return saved is not None and (saved.store.path, saved.part, saved.round) == (store.path, part, round_number)

    def with_contiguous_changes(self, name: str) -> "ClientStates":
        """Returns the states with changed ones in row-major order.

        Raises:
            TypeError: a state cannot be saved.

        Args:
            name: what the states are, for the error.
        """
        initial = self._initial
        check_serializable(self._changed, name)
        changed = as_contiguous(self._changed)
        if initial is not None and self._saved is None:
            check_serializable(initial.state, name)
            initial = replace(initial, state=as_contiguous(initial.state))
        return ClientStates(changed, self._saved, initial)

    def mark_saved(self, store: StateStore, part: str, round_number: int) -> None:
        """Records that a checkpoint has saved all changed states, which are then read from the store."""
        self._changed, self._saved = {}, SavedStatesLocation(store, part, round_number)


# -- the server's state ------------------------------------------------------------------------------------------------


def check_and_wrap_server_state(state: PyTree, algorithm: Algorithm[Any, Any], name: str) -> PyTree:
    """Returns a server state in row-major order, with groups of one entry per client as `ClientStates`.

    Args:
        state: what the method returned.
        algorithm: the method, which may name such groups (`KeepsServerStateByClient`).
        name: of the state, for the error.

    Raises:
        TypeError: no dict, or a value that a checkpoint cannot restore.
    """
    names = algorithm.groups_by_client if isinstance(algorithm, KeepsServerStateByClient) else frozenset[str]()
    groups = groups_by_client(state)
    if isinstance(state, dict):
        groups |= {key: ClientStates.wrap_group(state[key]) for key in sorted(names & state.keys())}
    rest = without_groups({**state, **groups}) if groups else state
    check_serializable(rest, name)
    if not isinstance(rest, dict | None):
        raise TypeError(f"{name} is a {type(rest).__name__}, not a dict")
    rest = as_contiguous(rest)
    checked = {key: group.with_contiguous_changes(f"{name} at {key!r}") for key, group in groups.items()}
    return {**rest, **{key: state[key] for key in lists_of_clients(state, groups)}, **checked} if checked else rest


def groups_by_client(state: PyTree) -> dict[str, ClientStates]:
    """Returns the groups of a server's state that have an entry for each client, by name; empty if there are none."""
    if not isinstance(state, dict):
        return {}
    return {name: group for name, group in state.items() if isinstance(group, ClientStates)}


def lists_of_clients(state: Mapping[str, PyTree], groups: Mapping[str, ClientStates]) -> dict[str, str]:
    """Returns `{part: group}` for parts that list a group's clients: a million ids need not be saved again."""
    initial_by_group = {name: group.initial for name, group in groups.items() if group.initial is not None}
    return {
        key: name
        for key, value in state.items()
        for name, initial in initial_by_group.items()
        if initial.has_ids(value)
    }


def without_groups(state: PyTree) -> PyTree:
    """Returns a server state with None for groups of one entry per client, and for their lists of clients."""
    groups = groups_by_client(state)
    return {**state, **dict.fromkeys([*groups, *lists_of_clients(state, groups)])} if groups else state


def with_changes_only(state: PyTree) -> PyTree:
    """Returns a server state with only unsaved entries in its groups, and None for their lists of clients."""
    groups = groups_by_client(state)
    return without_groups(state) | {name: dict(group.changes) for name, group in groups.items()} if groups else state


# -- in the store ------------------------------------------------------------------------------------------------------


def write_states(
    store: StateStore,
    private: ClientStates,
    groups: Mapping[str, ClientStates],
    round_number: int,
    previous_round: int,
    needed_rounds: Collection[int],
) -> dict[str, str]:
    """Writes a checkpoint's changed states; returns row count and sum of hashes for `complete.json`.

    Args:
        store: of the run.
        private: the clients' private states.
        groups: those of the server's state.
        round_number, previous_round: of the checkpoint, and of the one before.
        needed_rounds: of the checkpoints that are on disk.
    """
    parts = {PRIVATE_PART: private, **groups}
    changes: dict[str, Iterable[tuple[str, PyTree]]] = {}
    replaced: list[str] = []
    for part, states in parts.items():
        if states.is_saved_in(store, part, previous_round):
            changes[part] = states.changes.items()
            continue
        replaced += [part, _initial_part(part)]
        changes[part] = list(states.iterate_own_states())  # read before the file is locked
        if states.initial is not None:
            ids = torch.frombuffer(bytearray(json.dumps(list(states.initial.clients)).encode()), dtype=torch.uint8)
            changes[_initial_part(part)] = [("", {"clients": ids, "state": states.initial.state})]
    return store.write(round_number, previous_round, changes, replaced, needed_rounds)


def load_states(store: StateStore, part: str, round_number: int) -> ClientStates:
    """Returns the states of a part of a checkpoint, which are read when they are asked for.

    Raises:
        UserError: the list of the clients of the part is damaged.
    """
    initial = None
    if part != PRIVATE_PART and store.contains(_initial_part(part), "", round_number):
        saved = store.read(_initial_part(part), "", round_number)
        try:
            clients = json.loads(saved["clients"].numpy().tobytes())
            initial = SharedInitialState(dict.fromkeys(clients), saved["state"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(f"the list of clients of {part!r} is damaged ({error})") from error
    return ClientStates(saved=SavedStatesLocation(store, part, round_number), initial=initial)


def _initial_part(part: str) -> str:
    return f"initial state of {part}"
