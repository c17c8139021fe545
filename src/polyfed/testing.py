"""The contract suite that every method must pass, for this library's methods and for yours.

Subclass `AlgorithmContract` in a test file and name the method in a fixture; pytest collects the tests:

    class TestMine(AlgorithmContract):
        @pytest.fixture
        def algorithm(self):
            return MyMethod(lr=0.1)
"""

from abc import ABC
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from polyfed.algorithm import Algorithm, Client
from polyfed.data.examples import as_examples
from polyfed.engines.inprocess import InProcessEngine
from polyfed.federation import federate, resume
from polyfed.rounds import Federation
from polyfed.runs.checkpoint import Checkpoint
from polyfed.runs.progress import Progress
from polyfed.runs.results import Run, one_thread
from polyfed.seeds import torch_generator
from polyfed.settings import Settings
from polyfed.tree import Nested, decode, encode, tensors_of

_KNOWN_REQUIREMENTS = {"model", "one_architecture", "architectures", "layer_catalogue", "public_data"}


@final
class SmallNet(nn.Module):
    """A network with BatchNorm and dropout, so that buffers and random numbers are put to the test."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (batch, 3) of inputs (batch, 6)."""
        out: torch.Tensor = self.head(self.body(x))
        return out


def small_clients(number: int = 3) -> list[Client]:
    """Clients with a few separable examples each, of unequal number; the same at every call.

    >>> [len(client.train) for client in small_clients()]
    [20, 26, 32]
    """
    generator = torch_generator(7)
    centres = 2 * torch.randn(3, 6, generator=generator)
    clients = []
    for k in range(number):
        y = torch.arange(20 + 6 * k + 9) % 3
        x = centres[y] + 0.5 * torch.randn(len(y), 6, generator=generator) + 0.3 * k
        test, val, train = ((x[rows].clone(), y[rows].clone()) for rows in (slice(0, 6), slice(6, 9), slice(9, None)))
        clients.append(Client(f"client-{k}", SmallNet, train, test, val))
    return clients


def without_times(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Records of rounds without the seconds, which differ from run to run."""

    def strip(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: strip(item) for key, item in value.items() if not key.startswith("seconds")}
        return value

    return [strip(record) for record in history]


def assert_same_run(one: Run, other: Run) -> None:
    """Raises an `AssertionError` unless metrics of every round and all personal models are equal bit for bit."""
    assert without_times(one.history) == without_times(other.history)
    for client in one.federation.clients:
        mine, theirs = one.model(client).state_dict(), other.model(client).state_dict()
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert torch.equal(mine[name], theirs[name]), f"client {client!r}: {name!r} differs"


def _copy(nested: Nested) -> Nested:
    return decode(encode(nested))


def _assert_unchanged(before: Nested, after: Nested, what: str) -> None:
    old, new = list(tensors_of(before)), list(tensors_of(after))
    assert len(old) == len(new), f"{what} has other tensors than before"
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(old, new, strict=True)), f"{what} was changed in place"


@final
class _StopAfter(Progress):
    """Presses Ctrl-C when a round is complete."""

    def __init__(self, round_number: int) -> None:
        self._round = round_number

    def start(self, title: str, rounds: int, done: int) -> None:
        """Nothing."""

    def client(self, phase: str, done: int, total: int) -> None:
        """Nothing."""

    def round(self, record: Mapping[str, Any]) -> None:
        """Ctrl-C after the chosen round."""
        if record["round"] == self._round:
            raise KeyboardInterrupt

    def say(self, sentence: str) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


class AlgorithmContract(ABC):
    """Tests of a method given by the fixture `algorithm`; override `clients` for a method that needs others."""

    def clients(self, number: int = 3) -> list[Client]:
        """The federation on which the method is tested."""
        return small_clients(number)

    def public(self) -> Any:
        """Public examples, for a method that requires them."""
        return torch.randn(40, 6, generator=torch_generator(8)), torch.zeros(40, dtype=torch.int64)

    def _federate(self, algorithm: Algorithm[Any, Any], clients: Sequence[Client] | None = None, **options: Any) -> Run:
        public = self.public() if "public_data" in algorithm.requires else None
        settings: dict[str, Any] = {"rounds": 2, "seed": 3, "workers": 0, "public": public} | options
        return federate(self.clients() if clients is None else clients, algorithm, **settings)

    def _federation(self, algorithm: Algorithm[Any, Any]) -> Federation:
        public = as_examples(self.public()) if "public_data" in algorithm.requires else None
        return Federation({c.id: c for c in self.clients()}, algorithm, Settings(rounds=2, seed=3), public)

    def test_requirements_are_known(self, algorithm: Algorithm[Any, Any]) -> None:
        """`requires` names only what can be checked."""
        assert algorithm.requires <= _KNOWN_REQUIREMENTS

    def test_same_result_for_0_1_and_2_workers(self, algorithm: Algorithm[Any, Any]) -> None:
        """Metrics and models are equal bit for bit in this process and on pools."""
        alone = self._federate(algorithm)
        for workers in (1, 2):
            assert_same_run(alone, self._federate(algorithm, workers=workers))

    def test_seed_decides_the_result(self, algorithm: Algorithm[Any, Any]) -> None:
        """The same seed gives the same run, another one another; torch's global random state is left alone."""
        state = torch.random.get_rng_state()
        one = self._federate(algorithm)
        assert torch.equal(state, torch.random.get_rng_state()), "the run used torch's global random state"
        assert_same_run(one, self._federate(algorithm))
        other = self._federate(algorithm, seed=4)
        assert without_times(one.history) != without_times(other.history)

    def test_inputs_are_not_changed(self, algorithm: Algorithm[Any, Any]) -> None:
        """No half changes the state, message, private state or data that it was given."""
        federation = self._federation(algorithm)
        clients = list(federation.clients.values())
        data = [t.clone() for c in clients for t in (c.train.x, c.train.y, c.test.x)]
        with one_thread():
            state = algorithm.init(federation.context())
            kept_state, replies = _copy(state), {}
            for client in clients:
                down = algorithm.dispatch(state, federation.info(client.id, 1))
                mine = algorithm.client_init(client, 3)
                kept_down, kept_mine = _copy(dict(down.arrays)), _copy(mine)
                replies[client.id], after = algorithm.local(down, mine, client, 5)
                _assert_unchanged(kept_down, down.arrays, "local: `down`")
                _assert_unchanged(kept_mine, mine, "local: `mine`")
                kept_after, kept_reply = _copy(after), _copy(dict(replies[client.id].arrays))
                algorithm.personal(down, after, client, 6)
                _assert_unchanged(kept_down, down.arrays, "personal: `down`")
                _assert_unchanged(kept_after, after, "personal: `mine`")
                _assert_unchanged(kept_reply, replies[client.id].arrays, "personal: an earlier reply")
            kept_replies = _copy({i: dict(reply.arrays) for i, reply in replies.items()})
            algorithm.aggregate(state, replies)
            _assert_unchanged(kept_replies, {i: reply.arrays for i, reply in replies.items()}, "aggregate: `replies`")
            _assert_unchanged(kept_state, state, "aggregate: `state`")
        _assert_unchanged(data, [t for c in clients for t in (c.train.x, c.train.y, c.test.x)], "a client's data")

    def test_order_of_clients_is_irrelevant(self, algorithm: Algorithm[Any, Any]) -> None:
        """Neither the order of the federation's clients nor that of the replies changes a bit."""
        assert_same_run(self._federate(algorithm), self._federate(algorithm, clients=self.clients()[::-1]))
        federation = self._federation(algorithm)
        with one_thread():
            state = algorithm.init(federation.context())
            start = Checkpoint(0, state, {})
            tasks = [
                federation.task("local", i, 1, algorithm.dispatch(state, federation.info(i, 1)), start)
                for i in federation.clients
            ]
            engine = InProcessEngine(algorithm, list(federation.clients.values()), torch.device("cpu"))
            replies = {result.task.client: result.reply for result in engine.run(tasks) if result.reply is not None}
            assert len(replies) == len(tasks)
            forward = algorithm.aggregate(state, replies)
            backward = algorithm.aggregate(state, dict(reversed(replies.items())))
        _assert_unchanged(forward, backward, "the aggregate of replies in another order")

    def test_resumed_equals_uninterrupted(self, algorithm: Algorithm[Any, Any], tmp_path: Path) -> None:
        """A run that is stopped and resumed ends as one that is not, bit for bit."""
        whole = self._federate(algorithm, rounds=4, sample=2)
        try:
            self._federate(algorithm, rounds=4, sample=2, out=tmp_path / "run", progress=_StopAfter(2))
        except KeyboardInterrupt:
            public = self.public() if "public_data" in algorithm.requires else None
            resumed = resume(tmp_path / "run", clients=self.clients(), algorithm=algorithm, public=public)
            assert_same_run(whole, resumed)
        else:
            raise AssertionError("the run was not interrupted")

    def test_private_state_is_not_sent(self, algorithm: Algorithm[Any, Any]) -> None:
        """No tensor of a client's private state occurs in its reply."""
        federation = self._federation(algorithm)
        with one_thread():
            state = algorithm.init(federation.context())
            for client in federation.clients.values():
                down = algorithm.dispatch(state, federation.info(client.id, 1))
                reply, mine = algorithm.local(down, algorithm.client_init(client, 3), client, 5)
                private = [t for t in tensors_of(mine) if t.is_floating_point() and t.numel() > 1]
                for sent in tensors_of(reply.arrays):
                    for kept in private:
                        equal = sent.shape == kept.shape and torch.equal(sent.to(kept.dtype), kept)
                        assert not equal, f"a private tensor of shape {tuple(kept.shape)} is in the reply"

    def test_one_client(self, algorithm: Algorithm[Any, Any]) -> None:
        """A federation of one runs."""
        assert len(self._federate(algorithm, clients=self.clients(1)).table()) == 2

    def test_a_client_missing(self, algorithm: Algorithm[Any, Any]) -> None:
        """Rounds with a part of the clients run, and those who never took part are evaluated too."""
        run = self._federate(algorithm, rounds=1, sample=1)
        assert all(row["loss"] is not None for row in run.table())
        assert len(run.history[0]["clients"]) == 3

    def test_metrics_are_complete(self, algorithm: Algorithm[Any, Any]) -> None:
        """Every client has a score, a loss and bytes in every round, and the bytes are those of the messages."""
        run = self._federate(algorithm)
        for record in run.history:
            assert record["failures"] == []
            for row in record["clients"].values():
                assert 0 <= row["accuracy"] <= 1
                assert row["loss"] >= 0
                assert row["bytes_down"] >= 0
            assert record["bytes_up"] == sum(row["bytes_up"] for row in record["clients"].values())
