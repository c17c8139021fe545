"""Tests the contract that every federated learning method must fulfil, whether polyfed ships it or you wrote it.

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

from polyfed.core.algorithm import Algorithm, Client, Message
from polyfed.core.evaluation.evaluate import evaluate_client_with_outputs
from polyfed.core.examples.as_examples import as_examples
from polyfed.core.examples.examples import Examples
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.messages.contiguous import path_of_first_difference
from polyfed.core.methods.declared_words import check_declared_words_are_known
from polyfed.core.methods.method_card import card_of_method
from polyfed.core.seeds import torch_generator
from polyfed.core.serialization import check_serializable, deserialize_state, serialize_state
from polyfed.core.state_dict import PyTree, iter_tensors
from polyfed.core.training.client_loss import training_loss_without_penalties
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.federate import federate, resume
from polyfed.simulation.monitoring.progress import Progress
from polyfed.simulation.results.run import Run
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.testing.disclosure_audit import (
    NETWORK_FACTS,
    collect_facts_declared_as_revealed,
    contains_client_examples,
    find_revealed_facts,
)
from polyfed.testing.run_equality import assert_runs_equal, without_durations
from polyfed.testing.small_clients import small_clients


def _copy_tree(nested: PyTree) -> PyTree:
    return deserialize_state(serialize_state(nested))


def _assert_unchanged(before: PyTree, after: PyTree, description: str) -> None:
    changed = path_of_first_difference(before, after)
    assert changed is None, f"{description} was changed in place, at {changed or 'the top'!r}"


def _roll_labels(examples: Examples, shift: int) -> Examples:
    return replace(examples, y=examples.y.roll(shift, 0))


def _message_content(message: Message) -> PyTree:
    return {"tensors": message.tensors, "scalars": message.scalars}


def _equals_sent(private: torch.Tensor, sent: torch.Tensor) -> bool:
    return private.shape == sent.shape and torch.equal(sent.to(private.dtype), private)


def _is_close_to_received(private: torch.Tensor, received: torch.Tensor) -> bool:
    """Returns whether a private tensor equals, up to rounding, a tensor that the server had sent.

    Training a bias in front of a BatchNorm, whose gradient is zero, hardly changes it.
    """
    return private.shape == received.shape and torch.allclose(received.to(private.dtype), private, rtol=1e-5, atol=1e-6)


def _storage_pointers(nested: PyTree) -> set[int]:
    """Returns the memory addresses of the storages of all tensors in a nested structure."""
    return {t.untyped_storage().data_ptr() for t in iter_tensors(nested) if t.numel()}


@final
class _InterruptAfter(Progress):
    """Interrupts a run, as Ctrl-C does, when a round is complete."""

    def __init__(self, round_number: int) -> None:
        self._round = round_number

    def finish_round(self, record: Mapping[str, Any]) -> None:
        """Raises a KeyboardInterrupt after the chosen round."""
        if record["round"] == self._round:
            raise KeyboardInterrupt


_DECLARATION_OF = {
    "class counts": "'class_counts' in discloses",
    "number of examples": "'num_examples' in scalars_needed",
    **dict.fromkeys(NETWORK_FACTS, "'architecture' in discloses"),
}
"""Maps a fact that replies may reveal to the declaration that it needs."""


class AlgorithmContract(ABC):
    """Runs the tests that every method must pass.

    Subclass it with a pytest fixture `algorithm` that returns the method.

    Override `clients` for a method that needs other clients.
    """

    published: ClassVar[frozenset[str]] = frozenset()
    """Groups (top-level keys) of the client state that a method without a card sends by its nature, as FedFomo does the
    client's own model (`MethodCard.published`). Nothing else of the client state may be in a reply."""

    def clients(self, number: int = 3) -> list[Client]:
        """Builds the clients on which the tests run the method."""
        return small_clients(number)

    def public(self) -> Any:
        """Builds the public examples for tests of a method that requires them."""
        return torch.randn(5000, 6, generator=torch_generator(8)), torch.zeros(5000, dtype=torch.int64)

    def _federate(self, algorithm: Algorithm[Any, Any], clients: Sequence[Client] | None = None, **options: Any) -> Run:
        public = self.public() if "public_data" in algorithm.requires else None
        settings: dict[str, Any] = {"rounds": 2, "seed": 3, "workers": 0, "public": public} | options
        return federate(self.clients() if clients is None else clients, algorithm, **settings)

    def _federation(self, algorithm: Algorithm[Any, Any]) -> Federation:
        public = as_examples(self.public()) if "public_data" in algorithm.requires else None
        return Federation({c.id: c for c in self.clients()}, algorithm, Settings(rounds=2, seed=3), public)

    def test_declared_words_are_known(self, algorithm: Algorithm[Any, Any]) -> None:
        """A method's `requires` and `discloses` must contain only words that polyfed defines."""
        check_declared_words_are_known(algorithm, type(algorithm).__name__)

    def test_metrics_are_complete_and_of_the_returned_network(self, algorithm: Algorithm[Any, Any]) -> None:
        """Every round must record score, loss and bytes of each client, the last those of `run.model`."""
        run = self._federate(algorithm)
        for record in run.history:
            assert record["failures"] == []
            for row in record["clients"].values():
                assert 0 <= row["accuracy"] <= 1
                assert row["loss"] >= 0
                assert row["bytes_down"] >= 0
            assert record["bytes_up"] == sum(row["bytes_up"] for row in record["clients"].values())
        for client in run.federation.clients.values():
            loss = training_loss_without_penalties(client, algorithm)
            metrics, outputs = evaluate_client_with_outputs(
                run.model(client.id), client, run.federation.metrics, loss=loss
            )
            recorded = run.history[-1]["clients"][client.id]
            # Out of fold.
            compared = [
                name for name in metrics if not ("fits_validation" in algorithm.traits and name.startswith("val_"))
            ]
            assert {n: recorded[n] for n in compared} == {n: metrics[n] for n in compared}, f"client {client.id!r}"
            assert torch.equal(run.predictions(client.id).outputs, outputs["test"]), (
                f"client {client.id!r}: predictions"
            )

    def test_states_survive_a_checkpoint(self, algorithm: Algorithm[Any, Any]) -> None:
        """Server and client states must be unchanged after a checkpoint is written and read."""
        federation = self._federation(algorithm)
        with exclusive_single_torch_thread_with_grad():
            check_serializable(algorithm.server_init(federation.server_context()), "the server's state")
            for client in federation.clients.values():
                check_serializable(algorithm.client_init(client, 3), "the private state")

    def test_same_result_for_0_and_2_workers(self, algorithm: Algorithm[Any, Any]) -> None:
        """Training here and in two workers must give equal metrics, predictions and models.

        One worker process is tested where a stopped run is resumed.
        """
        assert_runs_equal(self._federate(algorithm), self._federate(algorithm, workers=2))

    def test_seed_decides_the_result(self, algorithm: Algorithm[Any, Any]) -> None:
        """Equal seeds must give equal runs, others different ones; torch's random state must not change."""
        rng_state = torch.random.get_rng_state()
        run = self._federate(algorithm, rounds=1)
        assert torch.equal(rng_state, torch.random.get_rng_state()), "the run used torch's global random state"
        assert_runs_equal(run, self._federate(algorithm, rounds=1))
        other_run = self._federate(algorithm, rounds=1, seed=4)
        assert without_durations(run.history) != without_durations(other_run.history)
        federation = self._federation(algorithm)
        # The halves by themselves: an engine may give each task a random state of its own.
        with exclusive_single_torch_thread_with_grad():
            server_state = algorithm.server_init(federation.server_context())
            for client in federation.clients.values():
                message = algorithm.dispatch(server_state, federation.client_info(client.id, 1))
                _, client_state = algorithm.local_update(message, algorithm.client_init(client, 3), client, 5)
                algorithm.personal_model(message, client_state, client, 6)
        assert torch.equal(rng_state, torch.random.get_rng_state()), "the method used torch's global random state"

    def test_inputs_are_not_changed(self, algorithm: Algorithm[Any, Any]) -> None:
        """A method must not change the states, messages, replies and data that it receives."""
        federation = self._federation(algorithm)
        clients = list(federation.clients.values())
        data = [t.clone() for c in clients for t in (c.train.input_tensor, c.train.y, c.test.input_tensor)]
        with exclusive_single_torch_thread_with_grad():
            server_state = algorithm.server_init(federation.server_context())
            server_state_copy, replies = _copy_tree(server_state), {}
            for client in clients:
                message = algorithm.dispatch(server_state, federation.client_info(client.id, 1))
                client_state = algorithm.client_init(client, 3)
                message_copy, client_state_copy = _copy_tree(_message_content(message)), _copy_tree(client_state)
                replies[client.id], new_client_state = algorithm.local_update(message, client_state, client, 5)
                _assert_unchanged(message_copy, _message_content(message), "local: `message`")
                _assert_unchanged(client_state_copy, client_state, "local: `client_state`")
                new_state_copy, reply_copy = (
                    _copy_tree(new_client_state),
                    _copy_tree(_message_content(replies[client.id])),
                )
                algorithm.personal_model(message, new_client_state, client, 6)
                _assert_unchanged(message_copy, _message_content(message), "personal: `message`")
                _assert_unchanged(new_state_copy, new_client_state, "personal: `client_state`")
                _assert_unchanged(reply_copy, _message_content(replies[client.id]), "personal: an earlier reply")
            reply_copies = _copy_tree({i: _message_content(reply) for i, reply in replies.items()})
            algorithm.aggregate(server_state, replies, federation.server_context())
            _assert_unchanged(
                reply_copies, {i: _message_content(r) for i, r in replies.items()}, "aggregate: `replies`"
            )
            _assert_unchanged(server_state_copy, server_state, "aggregate: `state`")
        _assert_unchanged(
            data,
            [t for c in clients for t in (c.train.input_tensor, c.train.y, c.test.input_tensor)],
            "a client's data",
        )

    def test_dispatch_all_equals_dispatch(self, algorithm: Algorithm[Any, Any]) -> None:
        """`dispatch` and `dispatch_all` must send a client the same message, up to rounding."""
        federation = self._federation(algorithm)
        with exclusive_single_torch_thread_with_grad():
            server_state = algorithm.server_init(federation.server_context())
            for phase in ("local", "evaluate"):
                client_infos = [federation.client_info(i, 1, phase) for i in federation.clients]
                for client_info, message in zip(
                    client_infos, algorithm.dispatch_all(server_state, client_infos), strict=True
                ):
                    single_message = algorithm.dispatch(server_state, client_info)
                    assert single_message.scalars == message.scalars
                    assert single_message.tensors.keys() == message.tensors.keys()
                    for group, tensors in single_message.tensors.items():
                        torch.testing.assert_close(dict(tensors), dict(message.tensors[group]))

    def test_order_of_clients_is_irrelevant(self, algorithm: Algorithm[Any, Any]) -> None:
        """The result must not depend on the order of clients and replies, nor on unlisted reply scalars."""
        federation = self._federation(algorithm)
        with exclusive_single_torch_thread_with_grad():
            server_state = algorithm.server_init(federation.server_context())
            start = replace(federation.initial_checkpoint(), state=server_state)
            tasks = [
                federation.build_task(
                    "local", i, 1, algorithm.dispatch(server_state, federation.client_info(i, 1)), start
                )
                for i in federation.clients
            ]
            engine = InProcessEngine(algorithm, list(federation.clients.values()), torch.device("cpu"))
            results, reversed_results = (
                {r.task.client: r for r in engine.run(order)} for order in (tasks, tasks[::-1])
            )
            for client, result in results.items():
                assert result.reply is not None, result.failure
                second_reply = reversed_results[client].reply
                assert second_reply is not None, reversed_results[client].failure
                first, second = (
                    [_message_content(result.reply), result.client_state],
                    [_message_content(second_reply), reversed_results[client].client_state],
                )
                _assert_unchanged(first, second, f"what {client!r} computes after other clients")
            replies = {client: result.reply for client, result in results.items() if result.reply is not None}
            forward = algorithm.aggregate(server_state, replies, federation.server_context())
            backward = algorithm.aggregate(server_state, dict(reversed(replies.items())), federation.server_context())
            needed = {
                i: Message(r.tensors, {n: r.scalars[n] for n in r.scalars if n in algorithm.scalars_needed})
                for i, r in replies.items()
            }
            from_needed_scalars = algorithm.aggregate(server_state, needed, federation.server_context())
        _assert_unchanged(forward, backward, "the aggregate of replies in another order")
        _assert_unchanged(forward, from_needed_scalars, "the aggregate of replies with no scalars but `scalars_needed`")

    def test_resumed_equals_uninterrupted(self, algorithm: Algorithm[Any, Any], tmp_path: Path) -> None:
        """A run that is stopped and resumed must equal an uninterrupted run, bit for bit.

        It is resumed in this process and in another one. One of the three clients has not taken part when it stops.
        """
        public = self.public() if "public_data" in algorithm.requires else None
        uninterrupted = self._federate(algorithm, clients_per_round=2)
        stopped, copied = tmp_path / "run", tmp_path / "copy"
        interrupted = False
        try:
            self._federate(algorithm, clients_per_round=2, out=stopped, progress=_InterruptAfter(1))
        except KeyboardInterrupt:
            interrupted = True
        assert interrupted, "the run was not interrupted"
        copytree(stopped, copied)
        for out, workers in ((stopped, 0), (copied, 1)):
            resumed = resume(out, clients=self.clients(), algorithm=algorithm, public=public, workers=workers)
            assert_runs_equal(uninterrupted, resumed)

    def test_number_of_rounds_decides_only_where_declared(self, algorithm: Algorithm[Any, Any]) -> None:
        """Rounds must be the same in a longer run, unless the trait `plans_all_rounds` says that they are planned.

        So `resume(..., rounds=...)` may give a run more rounds. A method with `schedule="cosine"` or `privacy` is exempt,
        for which more rounds are refused.
        """
        is_planned = "plans_all_rounds" in algorithm.traits or getattr(algorithm, "schedule", "constant") == "cosine"
        if is_planned or getattr(algorithm, "privacy", None) is not None:
            return
        short, long = (without_durations(self._federate(algorithm, rounds=rounds).history) for rounds in (2, 3))
        assert short == long[:2], (
            "a round depends on the number of all rounds (`ClientInfo.rounds`, `ServerContext.rounds`); declare it: "
            "traits = frozenset({'plans_all_rounds'})"
        )

    def test_private_state_is_not_sent(self, algorithm: Algorithm[Any, Any]) -> None:
        """A reply must be valid, and must neither contain private tensors or data nor share their memory."""
        published = self.published | (
            frozenset[str]() if (card := card_of_method(algorithm)) is None else card.published
        )
        federation = self._federation(algorithm)
        with exclusive_single_torch_thread_with_grad():
            server_state = algorithm.server_init(federation.server_context())
            for client in federation.clients.values():
                message = algorithm.dispatch(server_state, federation.client_info(client.id, 1))
                before = algorithm.client_init(client, 3)
                reply, client_state = algorithm.local_update(message, before, client, 5)
                assert (reply_error := federation.reply_error(reply, server_state, message)) is None, reply_error
                data = [client.train.x, client.train.y, client.test.x, client.test.y]
                shared = _storage_pointers(reply.tensors) & _storage_pointers([before, client_state, data])
                assert not shared, "a tensor of the reply shares memory with the client's private state or data"
                private = [
                    (group, tensor)
                    for groups in (before, client_state)
                    for group, value in groups.items()
                    if group not in published
                    for tensor in iter_tensors(value)
                    if tensor.is_floating_point() and tensor.numel() > 1
                    if not any(_is_close_to_received(tensor, received) for received in iter_tensors(message.tensors))
                ]
                for sent in iter_tensors(reply.tensors):
                    assert not contains_client_examples(sent, client), "examples of the client are in the reply"
                    for group, tensor in private:
                        assert not _equals_sent(tensor, sent), (
                            f"a tensor of shape {tuple(tensor.shape)} of the client state's group {group!r} is in the "
                            f"reply; leave it out, or if the method sends it by its nature, name {group!r} in `published` "
                            "of the method's card, or of the test class for a method without a card"
                        )

    def test_replies_reveal_only_what_is_declared(self, algorithm: Algorithm[Any, Any]) -> None:
        """Replies must reveal facts about a client's data and network only if the method declares these facts.

        Such facts are the number and order of examples, the largest label and the network, which shapes and scalars may
        show, and the number of examples of each class, which values may show. The method declares them in `requires`,
        `discloses` and `scalars_needed`. The test takes tables, and is left out where `clients` is overridden.
        """
        if type(self).clients is AlgorithmContract.clients:
            public = as_examples(self.public()) if "public_data" in algorithm.requires else None
            undeclared = find_revealed_facts(algorithm, public) - collect_facts_declared_as_revealed(algorithm)
            assert not undeclared, (
                f"the replies reveal {sorted(undeclared)}, which the method does not declare: leave them out, or declare "
                + " and ".join(
                    dict.fromkeys(_DECLARATION_OF.get(fact, "'form' in discloses") for fact in sorted(undeclared))
                )
            )

    def test_validation_examples_are_fitted_only_where_declared(self, algorithm: Algorithm[Any, Any]) -> None:
        """Validation labels must change networks only with the trait `fits_validation`, the server never.

        A method with early stopping (`patience`) is exempt.
        """
        clients, runs = self.clients(), []
        for shift in (0, 1):
            relabelled_clients = [
                replace(c, val=_roll_labels(c.val if c.val is not None else c.test, shift)) for c in clients
            ]
            runs.append(self._federate(algorithm, clients=relabelled_clients, rounds=3))
        if getattr(algorithm, "patience", None) is None:
            _assert_unchanged(
                runs[0].last.state, runs[1].last.state, "with other validation examples, the server's state"
            )
            for client in () if "fits_validation" in algorithm.traits else clients:
                first_state, second_state = (dict(run.model(client.id).state_dict()) for run in runs)
                _assert_unchanged(first_state, second_state, "with other validation examples, a network")

    def test_single_client_runs(self, algorithm: Algorithm[Any, Any]) -> None:
        """A federation with a single client must run."""
        assert len(self._federate(algorithm, clients=self.clients(1)).table()) == 2

    def test_partial_participation_runs(self, algorithm: Algorithm[Any, Any]) -> None:
        """A run of few clients a round must finish, and evaluate also those that never trained."""
        run = self._federate(algorithm, rounds=1, clients_per_round=1)
        assert all(row["loss"] is not None for row in run.table())
        assert len(run.history[0]["clients"]) == 3
