"""Defines `SourceClients`, the clients of a source as a mapping that makes each client when it is asked for."""

import hashlib
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice, pairwise
from typing import Any, final

import numpy as np

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError, describe_exception
from polyfed.core.examples.examples import Examples
from polyfed.data.sources.client_source import ClientSource, SourceManifest
from polyfed.simulation.checks.fingerprints import data_fingerprint
from polyfed.simulation.sources.drawn_client import DrawnClientChecker, make_client
from polyfed.simulation.sources.per_client import ValueByClient, place_of_id


@final
class SourceClients(Mapping[str, Client]):
    """Maps ids to the clients of a source: makes a client each time it is asked for, and keeps none.

    Attributes:
        ids: sorted.
        first: the id of the first client of the source, against which others are checked.
        num_examples: numbers of training examples by client; empty if the source has no manifest of them.
        manifest: of the source; an empty one if it has none.

    Args:
        source: makes the clients.

    Raises:
        UserError: no ids, an id that is not text or occurs twice, or a manifest that does not fit them.
    """

    def __init__(self, source: ClientSource) -> None:
        self.source = source
        listed = _list_ids(source)
        self.first = listed[0]
        order = np.arange(len(listed))
        # As fast as can be for a million that are sorted.
        if not all(map(operator.lt, listed, islice(listed, 1, None))):
            order = np.asarray(sorted(order.tolist(), key=listed.__getitem__), dtype=np.int64)
            listed = [listed[place] for place in order]
            if twice := next((i for i, after in pairwise(listed) if i == after), None):
                raise UserError(f"two clients have the id {twice!r}; ids must differ")
        self.ids = tuple(listed)
        self.manifest = read_manifest_of_source(source, len(listed))
        self.num_examples: Mapping[str, int] = self._by_client(self.manifest.num_examples, order)
        self.model_of: Mapping[str, int] = self._by_client(self.manifest.model_of, order)
        self.checker: DrawnClientChecker | None = None
        self._held: dict[str, Client] | None = None

    def _by_client(self, numbers: Any, order: np.ndarray[Any, np.dtype[np.int64]]) -> Mapping[str, int]:
        if numbers is None:
            return {}
        return ValueByClient(self.ids, _NumberAt(np.asarray(numbers, dtype=np.int64)[order]))

    def __getitem__(self, client: str) -> Client:
        """Makes a client, and checks it if it is new to this process.

        Raises:
            KeyError: no client has this id.
            UserError: the source fails, or the client does not suit the others or the method.
        """
        place_of_id(self.ids, client)
        if self._held is not None and client in self._held:
            return self._held[client]
        new_client = make_client(self.source, client)
        if self.checker is not None:
            self.checker.check_once(new_client)
        if self._held is not None:
            self._held[client] = new_client
        return new_client

    def __contains__(self, client: object) -> bool:
        """Returns whether a client has this id; makes none."""
        try:
            return isinstance(client, str) and place_of_id(self.ids, client) >= 0
        except KeyError:
            return False

    def __iter__(self) -> Iterator[str]:
        """Yields the ids."""
        return iter(self.ids)

    def __len__(self) -> int:
        """Returns the number of clients."""
        return len(self.ids)

    @contextmanager
    def hold_clients(self) -> Iterator[None]:
        """Keeps the clients that are made inside the `with` block until its end, so that none is made twice."""
        self._held = {}
        try:
            yield
        finally:
            self._held = None

    def fingerprint(self, public: Examples | None) -> str:
        """Hashes ids, manifest, first client and public examples, which a resumed run must share."""
        content = hashlib.sha256(repr((len(self.ids), self.manifest.fingerprint)).encode())
        content.update("\0".join(self.ids).encode())
        for numbers in (self.manifest.num_examples, self.manifest.model_of):
            content.update(b"" if numbers is None else np.asarray(numbers, dtype=np.int64).tobytes())
        content.update(data_fingerprint([make_client(self.source, self.first)], public).encode())
        return content.hexdigest()[:16]


@final
class _NumberAt:
    """Returns the number at a place of an array as a Python number; unlike a lambda it can be pickled."""

    def __init__(self, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._numbers = numbers

    def __call__(self, place: int) -> int:
        return int(self._numbers[place])


def _list_ids(source: ClientSource) -> list[str]:
    """Returns the ids of a source as a list of Python's strings; raises a `UserError` if one is none."""
    ids: Any = source.ids
    has_order = hasattr(ids, "__len__") and hasattr(ids, "__getitem__") and not isinstance(ids, str | bytes | Mapping)
    if not has_order:  # an iterator is empty the second time, and a set has another order in another process
        raise UserError(
            f"the ids of a source must be a sequence of texts, got {type(ids).__name__}; give a list, or a property that "
            "returns one"
        )
    listed = list(ids)
    if not listed:
        raise UserError("a federation needs at least one client, and the source has no ids")
    if set(map(type, listed)) != {str} or not all(listed):
        if odd := [i for i in listed if not isinstance(i, str) or not i]:
            raise UserError(f"the ids of a source must be texts that are not empty, got {odd[0]!r}")
        listed = [str.__str__(i) for i in listed]  # NumPy's strings, say
    try:
        "".join(listed).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the ids of a source must be texts of Unicode, and one has {error.object[error.start]!r}, half of a character"
        ) from error
    return listed


def read_manifest_of_source(source: ClientSource, num_clients: int) -> SourceManifest:
    """Returns the manifest of a source, or an empty one if it has none.

    Raises:
        UserError: the manifest is not a `SourceManifest`, or one of another number of clients.
    """
    manifest: Any = getattr(source, "manifest", None)
    try:
        manifest = manifest() if callable(manifest) else manifest
    except UserError:
        raise
    except Exception as error:  # whatever a user's source raises
        raise UserError(f"source.manifest() failed: {describe_exception(error)}") from error
    if manifest is None:
        return SourceManifest()
    if not isinstance(manifest, SourceManifest):
        raise UserError(f"source.manifest() must return a polyfed.data.SourceManifest, got {type(manifest).__name__}")
    for name in ("num_examples", "model_of"):
        values = getattr(manifest, name)
        if values is not None and len(values) != num_clients:
            raise UserError(f"the manifest's {name} has {len(values)} numbers, and the source {num_clients} clients")
    return manifest
