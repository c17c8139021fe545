"""The contract suite that every method must pass, for this library's methods and for yours.

Subclass `AlgorithmContract` in a test file and name the method in a fixture; pytest collects the tests:

    class TestMine(AlgorithmContract):
        @pytest.fixture
        def algorithm(self):
            return MyMethod(lr=0.1)
"""

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any, ClassVar, final

import torch
from torch import nn

from polyfed.core.algorithm import Algorithm, Client, Message, check_words
from polyfed.core.criteria import trained_loss
from polyfed.core.dense import first_difference
from polyfed.core.evaluation import client_scores
from polyfed.core.examples import Examples, as_examples
from polyfed.core.seeds import torch_generator
from polyfed.core.threads import one_thread
from polyfed.core.tree import Nested, check_keepable, decode, encode, tensors_of
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.federation import federate, resume
from polyfed.simulation.rounds import Federation
from polyfed.simulation.runs.checkpoint import Checkpoint
from polyfed.simulation.runs.progress import Progress
from polyfed.simulation.runs.results import Run
from polyfed.simulation.settings import Settings
from polyfed.simulation.traffic import allowed, holds_examples, revealed


@final
class SmallNet(nn.Module):
    """A network with BatchNorm and dropout, so that buffers and random numbers are put to the test.

    A buffer that is not in the state dict counts the training steps and dampens the outputs: whoever trains or evaluates
    it with the count that another client left gets other results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 3)
        self.steps: torch.Tensor
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (batch, 3) of inputs (batch, 6)."""
        if self.training:
            self.steps += 1
        out: torch.Tensor = self.head(self.body(x)) / (1 + 0.02 * self.steps)
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
    """Raises an `AssertionError` unless metrics of every round, all predictions after the last and all personal models are
    equal bit for bit."""
    assert without_times(one.history) == without_times(other.history)
    for client in one.federation.clients:
        if "loss" in one.history[-1]["clients"].get(client, {}):
            first, second = one.predictions(client), other.predictions(client)
            assert first.round == second.round
            assert torch.equal(first.outputs, second.outputs), f"client {client!r}: the predictions differ"
            assert torch.equal(first.targets, second.targets), f"client {client!r}: the targets differ"
        own, theirs = one.model(client).state_dict(), other.model(client).state_dict()
        assert own.keys() == theirs.keys()
        for name in own:
            assert torch.equal(own[name], theirs[name]), f"client {client!r}: {name!r} differs"


def _copy(nested: Nested) -> Nested:
    return decode(encode(nested))


def _assert_unchanged(before: Nested, after: Nested, what: str) -> None:
    changed = first_difference(before, after)
    assert changed is None, f"{what} was changed in place, at {changed or 'the top'!r}"


def _relabelled(examples: Examples, shift: int) -> Examples:
    return replace(examples, y=examples.y.roll(shift, 0))


def _content(message: Message) -> Nested:
    return {"tensors": message.tensors, "scalars": message.scalars}


def _same(kept: torch.Tensor, other: torch.Tensor) -> bool:
    return kept.shape == other.shape and torch.equal(other.to(kept.dtype), kept)


def _near(kept: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a private tensor is what the server had sent, up to rounding: training a bias in front of a BatchNorm, whose
    gradient is zero, hardly changes it."""
    return kept.shape == other.shape and torch.allclose(other.to(kept.dtype), kept, rtol=1e-5, atol=1e-6)


def _memory(nested: Nested) -> set[int]:
    """The storages in which these tensors lie."""
    return {t.untyped_storage().data_ptr() for t in tensors_of(nested) if t.numel()}


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

    published: ClassVar[frozenset[str]] = frozenset()
    """Groups (top-level keys) of the private state that the method sends up by its nature, as FedFomo does the client's own
    model. Nothing else of the private state may be in a reply."""

    def clients(self, number: int = 3) -> list[Client]:
        """The federation on which the method is tested."""
        return small_clients(number)

    def public(self) -> Any:
        """Public examples, for a method that requires them; as many as FedHeNN's default takes."""
        return torch.randn(5000, 6, generator=torch_generator(8)), torch.zeros(5000, dtype=torch.int64)

    def _federate(self, algorithm: Algorithm[Any, Any], clients: Sequence[Client] | None = None, **options: Any) -> Run:
        public = self.public() if "public_data" in algorithm.requires else None
        settings: dict[str, Any] = {"rounds": 2, "seed": 3, "workers": 0, "public": public} | options
        return federate(self.clients() if clients is None else clients, algorithm, **settings)

    def _federation(self, algorithm: Algorithm[Any, Any]) -> Federation:
        public = as_examples(self.public()) if "public_data" in algorithm.requires else None
        return Federation({c.id: c for c in self.clients()}, algorithm, Settings(rounds=2, seed=3), public)

    def test_words_are_known(self, algorithm: Algorithm[Any, Any]) -> None:
        """`requires` names only what can be checked, `discloses` only what consent can be asked for."""
        check_words(algorithm, type(algorithm).__name__)

    def test_metrics_are_complete_and_of_the_returned_network(self, algorithm: Algorithm[Any, Any]) -> None:
        """Every client has a score, a loss and bytes in every round, the bytes are those of the messages, and loss, score
        and predictions of the last round are those of `run.model`, bit for bit."""
        run = self._federate(algorithm)
        for record in run.history:
            assert record["failures"] == []
            for row in record["clients"].values():
                assert 0 <= row["accuracy"] <= 1
                assert row["loss"] >= 0
                assert row["bytes_down"] >= 0
            assert record["bytes_up"] == sum(row["bytes_up"] for row in record["clients"].values())
        for client in run.federation.clients.values():
            loss = trained_loss(client, algorithm)
            metrics, outputs = client_scores(run.model(client.id), client, run.federation.metrics, loss=loss)
            recorded = run.history[-1]["clients"][client.id]
            known = [
                name for name in metrics if not ("fits_validation" in algorithm.traits and name.startswith("val_"))
            ]  # out of fold
            assert {n: recorded[n] for n in known} == {n: metrics[n] for n in known}, f"client {client.id!r}"
            assert torch.equal(run.predictions(client.id).outputs, outputs["test"]), (
                f"client {client.id!r}: predictions"
            )

    def test_states_can_be_kept(self, algorithm: Algorithm[Any, Any]) -> None:
        """The server's and the clients' states come back from a checkpoint as they were."""
        federation = self._federation(algorithm)
        with one_thread():
            check_keepable(algorithm.server_init(federation.context()), "the server's state")
            for client in federation.clients.values():
                check_keepable(algorithm.client_init(client, 3), "the private state")

    def test_same_result_for_0_and_2_workers(self, algorithm: Algorithm[Any, Any]) -> None:
        """Metrics, predictions and models are equal bit for bit in this process and on a pool of two; a pool of one is
        where a stopped run is resumed."""
        assert_same_run(self._federate(algorithm), self._federate(algorithm, workers=2))

    def test_seed_decides_the_result(self, algorithm: Algorithm[Any, Any]) -> None:
        """The same seed gives the same run, another one another; torch's global random state is left alone."""
        state = torch.random.get_rng_state()
        one = self._federate(algorithm, rounds=1)
        assert torch.equal(state, torch.random.get_rng_state()), "the run used torch's global random state"
        assert_same_run(one, self._federate(algorithm, rounds=1))
        other = self._federate(algorithm, rounds=1, seed=4)
        assert without_times(one.history) != without_times(other.history)
        federation = self._federation(algorithm)
        with one_thread():  # the halves by themselves: an engine may give each task a random state of its own
            start = algorithm.server_init(federation.context())
            for client in federation.clients.values():
                down = algorithm.dispatch(start, federation.info(client.id, 1))
                _, own = algorithm.local_update(down, algorithm.client_init(client, 3), client, 5)
                algorithm.personal_model(down, own, client, 6)
        assert torch.equal(state, torch.random.get_rng_state()), "the method used torch's global random state"

    def test_inputs_are_not_changed(self, algorithm: Algorithm[Any, Any]) -> None:
        """No half changes the state, message, private state or data that it was given."""
        federation = self._federation(algorithm)
        clients = list(federation.clients.values())
        data = [t.clone() for c in clients for t in (c.train.tensor, c.train.y, c.test.tensor)]
        with one_thread():
            state = algorithm.server_init(federation.context())
            kept_state, replies = _copy(state), {}
            for client in clients:
                down = algorithm.dispatch(state, federation.info(client.id, 1))
                own = algorithm.client_init(client, 3)
                kept_down, kept_mine = _copy(_content(down)), _copy(own)
                replies[client.id], after = algorithm.local_update(down, own, client, 5)
                _assert_unchanged(kept_down, _content(down), "local: `message`")
                _assert_unchanged(kept_mine, own, "local: `client_state`")
                kept_after, kept_reply = _copy(after), _copy(_content(replies[client.id]))
                algorithm.personal_model(down, after, client, 6)
                _assert_unchanged(kept_down, _content(down), "personal: `message`")
                _assert_unchanged(kept_after, after, "personal: `client_state`")
                _assert_unchanged(kept_reply, _content(replies[client.id]), "personal: an earlier reply")
            kept_replies = _copy({i: _content(reply) for i, reply in replies.items()})
            algorithm.aggregate(state, replies, federation.context())
            _assert_unchanged(kept_replies, {i: _content(r) for i, r in replies.items()}, "aggregate: `replies`")
            _assert_unchanged(kept_state, state, "aggregate: `state`")
        _assert_unchanged(
            data, [t for c in clients for t in (c.train.tensor, c.train.y, c.test.tensor)], "a client's data"
        )

    def test_one_message_is_that_of_many(self, algorithm: Algorithm[Any, Any]) -> None:
        """`dispatch` and `dispatch_all` send a client the same, up to rounding, before training and for evaluation."""
        federation = self._federation(algorithm)
        with one_thread():
            state = algorithm.server_init(federation.context())
            for phase in ("local", "evaluate"):
                everyone = [federation.info(i, 1, phase) for i in federation.clients]
                for who, message in zip(everyone, algorithm.dispatch_all(state, everyone), strict=True):
                    alone = algorithm.dispatch(state, who)
                    assert alone.scalars == message.scalars
                    assert alone.tensors.keys() == message.tensors.keys()
                    for group, tree in alone.tensors.items():
                        torch.testing.assert_close(dict(tree), dict(message.tensors[group]))

    def test_order_of_clients_is_irrelevant(self, algorithm: Algorithm[Any, Any]) -> None:
        """Neither the order in which an engine runs the clients nor that of the replies changes a bit; nor do scalars that
        the method does not call needed."""
        federation = self._federation(algorithm)
        with one_thread():
            state = algorithm.server_init(federation.context())
            start = Checkpoint(0, state, {})
            tasks = [
                federation.task("local", i, 1, algorithm.dispatch(state, federation.info(i, 1)), start)
                for i in federation.clients
            ]
            engine = InProcessEngine(algorithm, list(federation.clients.values()), torch.device("cpu"))
            one, other = ({r.task.client: r for r in engine.run(order)} for order in (tasks, tasks[::-1]))
            for client, result in one.items():
                assert result.reply is not None, result.failure
                again = other[client].reply
                assert again is not None, other[client].failure
                first, second = [_content(result.reply), result.own], [_content(again), other[client].own]
                _assert_unchanged(first, second, f"what {client!r} computes after other clients")
            replies = {client: result.reply for client, result in one.items() if result.reply is not None}
            forward = algorithm.aggregate(state, replies, federation.context())
            backward = algorithm.aggregate(state, dict(reversed(replies.items())), federation.context())
            needed = {
                i: Message(r.tensors, {n: r.scalars[n] for n in r.scalars if n in algorithm.scalars_needed})
                for i, r in replies.items()
            }
            sparing = algorithm.aggregate(state, needed, federation.context())
        _assert_unchanged(forward, backward, "the aggregate of replies in another order")
        _assert_unchanged(forward, sparing, "the aggregate of replies with no scalars but `scalars_needed`")

    def test_resumed_equals_uninterrupted(self, algorithm: Algorithm[Any, Any], tmp_path: Path) -> None:
        """A run that is stopped and resumed, in this process or in another, ends as one that is not, bit for bit. One of
        three clients has not taken part when it stops."""
        public = self.public() if "public_data" in algorithm.requires else None
        whole = self._federate(algorithm, clients_per_round=2)
        stopped, copied = tmp_path / "run", tmp_path / "copy"
        interrupted = False
        try:
            self._federate(algorithm, clients_per_round=2, out=stopped, progress=_StopAfter(1))
        except KeyboardInterrupt:
            interrupted = True
        assert interrupted, "the run was not interrupted"
        copytree(stopped, copied)
        for out, workers in ((stopped, 0), (copied, 1)):
            resumed = resume(out, clients=self.clients(), algorithm=algorithm, public=public, workers=workers)
            assert_same_run(whole, resumed)

    def test_private_state_is_not_sent(self, algorithm: Algorithm[Any, Any]) -> None:
        """A reply is valid, and holds no private tensor (nor shares its memory), no input and no labels of the client."""
        federation = self._federation(algorithm)
        with one_thread():
            state = algorithm.server_init(federation.context())
            for client in federation.clients.values():
                down = algorithm.dispatch(state, federation.info(client.id, 1))
                before = algorithm.client_init(client, 3)
                reply, own = algorithm.local_update(down, before, client, 5)
                assert (flaw := federation.flaw(reply, state, down)) is None, flaw
                data = [client.train.x, client.train.y, client.test.x, client.test.y]
                shared = _memory(reply.tensors) & _memory([before, own, data])
                assert not shared, "a tensor of the reply shares memory with the client's private state or data"
                private = [
                    tensor
                    for kept in (before, own)
                    for group, value in kept.items()
                    if group not in self.published
                    for tensor in tensors_of(value)
                    if tensor.is_floating_point() and tensor.numel() > 1
                    if not any(_near(tensor, known) for known in tensors_of(down.tensors))
                ]
                for sent in tensors_of(reply.tensors):
                    assert not holds_examples(sent, client), "examples of the client are in the reply"
                    for kept in private:
                        assert not _same(kept, sent), f"a private tensor of shape {tuple(kept.shape)} is in the reply"

    def test_traffic_reveals_what_is_declared(self, algorithm: Algorithm[Any, Any]) -> None:
        """Number and order of examples, the largest label and the network show in forms and scalars of the replies only
        where `requires`, `discloses` and `scalars_needed` say so. (On tables; left out where `clients` is overridden.)"""
        if type(self).clients is AlgorithmContract.clients:
            public = as_examples(self.public()) if "public_data" in algorithm.requires else None
            more = revealed(algorithm, public) - allowed(algorithm)
            assert not more, f"the replies reveal {sorted(more)}, which the method does not declare"

    def test_validation_examples_are_fitted_only_where_said(self, algorithm: Algorithm[Any, Any]) -> None:
        """With other labels of the validation examples the server's state and the networks are the same, but for networks of
        a method whose `traits` say `fits_validation`. (Early stopping, `patience`, is exempt.)"""
        clients, runs = self.clients(), []
        for shift in (0, 1):
            others = [replace(c, val=_relabelled(c.val if c.val is not None else c.test, shift)) for c in clients]
            runs.append(self._federate(algorithm, clients=others, rounds=3))
        if getattr(algorithm, "patience", None) is None:
            _assert_unchanged(
                runs[0].last.state, runs[1].last.state, "with other validation examples, the server's state"
            )
            for client in () if "fits_validation" in algorithm.traits else clients:
                one, other = (dict(run.model(client.id).state_dict()) for run in runs)
                _assert_unchanged(one, other, "with other validation examples, a network")

    def test_one_client(self, algorithm: Algorithm[Any, Any]) -> None:
        """A federation of one runs."""
        assert len(self._federate(algorithm, clients=self.clients(1)).table()) == 2

    def test_a_client_missing(self, algorithm: Algorithm[Any, Any]) -> None:
        """Rounds with a part of the clients run, and those who never took part are evaluated too."""
        run = self._federate(algorithm, rounds=1, clients_per_round=1)
        assert all(row["loss"] is not None for row in run.table())
        assert len(run.history[0]["clients"]) == 3
