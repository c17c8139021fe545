"""The contract suite catches what it is there to catch: each broken method fails the test named beside it."""

import copy
import os
from dataclasses import dataclass

import pytest
import torch

from polyfed.algorithms import REGISTRY, FedAvg, Local
from polyfed.core.algorithm import Algorithm, Message
from polyfed.core.errors import UserError
from polyfed.core.state_dict import state_dict_spec, weighted_mean
from polyfed.simulation.checks.requirements import check_requirements
from polyfed.simulation.federate import federate
from polyfed.testing import AlgorithmContract, SmallNet, example_of, small_clients


class Contract(AlgorithmContract):
    """The suite, called by hand."""


@dataclass(frozen=True, kw_only=True)
class DependsOnTheProcess(FedAvg):
    def local_update(self, message, client_state, client, seed):
        return super().local_update(message, client_state, client, seed + os.getpid())


@dataclass(frozen=True, kw_only=True)
class UsesGlobalRandomness(FedAvg):
    def local_update(self, message, client_state, client, seed):
        torch.rand(1)
        return super().local_update(message, client_state, client, seed)


@dataclass(frozen=True, kw_only=True)
class ChangesTheMessage(FedAvg):
    def local_update(self, message, client_state, client, seed):
        message.tensors["model"]["head.weight"].add_(1.0)
        return super().local_update(message, client_state, client, seed)


@dataclass(frozen=True, kw_only=True)
class ChangesPrivateState(Local):
    def local_update(self, message, client_state, client, seed):
        client_state["model"]["head.weight"].add_(1.0)
        return super().local_update(message, client_state, client, seed)


@dataclass(frozen=True, kw_only=True)
class ChangesPrivateCounter(FedAvg):
    def client_init(self, client, seed):
        return {"n": 0}

    def local_update(self, message, client_state, client, seed):
        client_state["n"] += 1
        return super().local_update(message, {}, client, seed)[0], {"n": client_state["n"]}


@dataclass(frozen=True, kw_only=True)
class ChangesPrivateList(FedAvg):
    def client_init(self, client, seed):
        return {"losses": []}

    def local_update(self, message, client_state, client, seed):
        reply, _ = super().local_update(message, {}, client, seed)
        client_state["losses"].append(reply.scalars["train_loss"])
        return reply, {"losses": list(client_state["losses"])}


@dataclass(frozen=True, kw_only=True)
class ChangesTheScalars(FedAvg):
    def local_update(self, message, client_state, client, seed):
        message.scalars["lr"] *= 0.5
        return super().local_update(message, client_state, client, seed)


@dataclass(frozen=True, kw_only=True)
class ChangesTheState(FedAvg):
    def aggregate(self, server_state, replies, server):
        server_state["model"]["head.weight"].zero_()
        return super().aggregate(server_state, replies, server)


@dataclass(frozen=True, kw_only=True)
class FirstReplyWins(FedAvg):
    def aggregate(self, server_state, replies, server):
        return {"model": next(iter(replies.values())).tensors["model"]}


class Memory:
    """A counter hidden outside the state, as a field that is not a field."""

    calls = 0


class Neighbour:
    """Who was asked last, as a cached network could remember it."""

    name = ""


@dataclass(frozen=True, kw_only=True)
class DependsOnThePreviousClient(FedAvg):
    def local_update(self, message, client_state, client, seed):
        before, Neighbour.name = Neighbour.name, client.id
        return super().local_update(message, client_state, client, seed + (before > client.id))


@dataclass(frozen=True, kw_only=True)
class KeepsAHiddenCounter(FedAvg):
    def local_update(self, message, client_state, client, seed):
        Memory.calls += 1
        return super().local_update(message, client_state, client, seed + Memory.calls)


@dataclass(frozen=True, kw_only=True)
class SendsPrivateState(Local):
    def local_update(self, message, client_state, client, seed):
        reply, client_state = super().local_update(message, client_state, client, seed)
        return Message({"secret": {"w": client_state["model"]["head.weight"].clone()}}, reply.scalars), client_state

    def reply_spec(self, server_state, message, reply):
        return {group: state_dict_spec(tensors) for group, tensors in reply.tensors.items()}


@dataclass(frozen=True, kw_only=True)
class SendsAPieceOfPrivateState(SendsPrivateState):
    def local_update(self, message, client_state, client, seed):
        reply, client_state = super().local_update(message, client_state, client, seed)
        return Message({"secret": {"w": client_state["model"]["head.weight"][:2]}}, reply.scalars), client_state


@dataclass(frozen=True, kw_only=True)
class SendsInputs(FedAvg):
    def local_update(self, message, client_state, client, seed):
        reply, client_state = super().local_update(message, client_state, client, seed)
        return Message({**reply.tensors, "some": {"x": client.train.x[3:5].clone()}}, reply.scalars), client_state

    def reply_spec(self, server_state, message, reply):
        return {group: state_dict_spec(tensors) for group, tensors in reply.tensors.items()}


@dataclass(frozen=True, kw_only=True)
class SendsLabels(SendsInputs):
    def local_update(self, message, client_state, client, seed):
        reply, client_state = super().local_update(message, client_state, client, seed)
        return Message(
            {"model": reply.tensors["model"], "some": {"y": client.train.y.float()}}, reply.scalars
        ), client_state


@dataclass(frozen=True, kw_only=True)
class SendsWhatItMustNot(FedAvg):
    def local_update(self, message, client_state, client, seed):
        reply, client_state = super().local_update(message, client_state, client, seed)
        return Message({"model": {"luck": torch.ones(1)}}, reply.scalars), client_state


@dataclass(frozen=True, kw_only=True)
class NeedsEveryone(FedAvg):
    def aggregate(self, server_state, replies, server):
        if len(replies) < 3:
            raise RuntimeError("where is everyone?")
        return super().aggregate(server_state, replies, server)


@dataclass(frozen=True, kw_only=True)
class AsksForTheUnknown(FedAvg):
    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "requires", frozenset({"one_architecture", "luck"}))


@dataclass(frozen=True, kw_only=True)
class KeepsATuple(FedAvg):
    def client_init(self, client, seed):
        return {"seen": (1, 2)}


@dataclass(frozen=True, kw_only=True)
class SendsOneAnotherMessage(FedAvg):
    def dispatch_all(self, server_state, client_infos):
        for who in client_infos:
            down = self.dispatch(server_state, who)
            yield Message(down.tensors, {"lr": down.scalars["lr"] * len(client_infos)})


@dataclass(frozen=True, kw_only=True)
class IsUsedOtherwise(FedAvg):
    def personal_model(self, message, client_state, client, seed):
        model = copy.deepcopy(super().personal_model(message, client_state, client, seed))
        model.register_forward_hook(lambda module, inputs, outputs: outputs.flip(1))  # nothing that is saved says so
        return model


@dataclass(frozen=True, kw_only=True)
class PlansByTheNumberOfRounds(FedAvg):
    def aggregate(self, server_state, replies, server):
        model = super().aggregate(server_state, replies, server)["model"]
        return {"model": {name: tensor / server.rounds for name, tensor in model.items()}}


@dataclass(frozen=True, kw_only=True)
class IgnoresTheSeed(FedAvg):
    def server_init(self, server):
        from dataclasses import replace

        return super().server_init(replace(server, seed=0))

    def local_update(self, message, client_state, client, seed):
        return super().local_update(message, client_state, client, 0)


CASES = [
    (DependsOnTheProcess, "test_same_result_for_0_and_2_workers"),
    (UsesGlobalRandomness, "test_seed_decides_the_result"),
    (IgnoresTheSeed, "test_seed_decides_the_result"),
    (ChangesTheMessage, "test_inputs_are_not_changed"),
    (ChangesPrivateState, "test_inputs_are_not_changed"),
    (ChangesPrivateCounter, "test_inputs_are_not_changed"),
    (ChangesPrivateList, "test_inputs_are_not_changed"),
    (ChangesTheScalars, "test_inputs_are_not_changed"),
    (ChangesTheState, "test_inputs_are_not_changed"),
    (FirstReplyWins, "test_order_of_clients_is_irrelevant"),
    (DependsOnThePreviousClient, "test_order_of_clients_is_irrelevant"),
    (PlansByTheNumberOfRounds, "test_number_of_rounds_decides_only_where_declared"),
    (KeepsAHiddenCounter, "test_resumed_equals_uninterrupted"),
    (SendsPrivateState, "test_private_state_is_not_sent"),
    (SendsAPieceOfPrivateState, "test_private_state_is_not_sent"),
    (SendsInputs, "test_private_state_is_not_sent"),
    (SendsLabels, "test_private_state_is_not_sent"),
    (SendsWhatItMustNot, "test_private_state_is_not_sent"),
    (NeedsEveryone, "test_partial_participation_runs"),
    (NeedsEveryone, "test_single_client_runs"),
    (AsksForTheUnknown, "test_declared_words_are_known"),
    (KeepsATuple, "test_states_survive_a_checkpoint"),
    (SendsOneAnotherMessage, "test_dispatch_all_equals_dispatch"),
    (IsUsedOtherwise, "test_metrics_are_complete_and_of_the_returned_network"),
]
SEEN = {ChangesPrivateCounter, ChangesPrivateList, ChangesTheScalars, SendsAPieceOfPrivateState, SendsLabels}
"""Found by the same line of the suite as another one."""


@pytest.mark.parametrize(
    ("broken", "test"),
    [pytest.param(c, t, id=f"{c.__name__}-{t}", marks=pytest.mark.thorough if c in SEEN else ()) for c, t in CASES],
)
def test_the_suite_catches(broken, test, tmp_path):
    arguments = [tmp_path] if "resumed" in test else []
    with pytest.raises((AssertionError, RuntimeError, TypeError)):
        getattr(Contract(), test)(broken(lr=0.05, batch_size=8), *arguments)


def test_the_broken_methods_are_broken_only_where_they_say():
    """The same calls pass for the method that they were derived from, so that a failure means what it seems to mean."""
    for test in {t for _, t in CASES if "resumed" not in t}:
        getattr(Contract(), test)(FedAvg(lr=0.05, batch_size=8))
    assert weighted_mean({"a": {"w": torch.ones(1)}})["w"] == 1
    assert len(small_clients(2)) == 2


def test_the_small_network_shows_what_an_earlier_client_left_in_it():
    net, x = SmallNet(), small_clients(1)[0].train.x
    fresh = net.eval()(x)
    net.steps += 3
    assert "steps" not in net.state_dict()
    assert not torch.equal(net(x), fresh)


@dataclass(frozen=True, kw_only=True)
class SendsLabelCounts(FedAvg):
    """As FedGen does: the server weighs what it generates by how many labels of each class the clients have."""

    groups = ("model", "labels")

    def dispatch(self, server_state, client_info):
        return Message({"model": server_state["model"]}, {"lr": self.lr})

    dispatch_all = Algorithm.dispatch_all

    def reply_spec(self, server_state, message, reply):
        return {**state_specs(message), "labels": {"counts": ((3,), torch.float32)}}

    def local_update(self, message, client_state, client, seed):
        reply, after = super().local_update(message, client_state, client, seed)
        counts = torch.bincount(client.train.labels, minlength=3).float()
        return Message({**reply.tensors, "labels": {"counts": counts}}, reply.scalars), after


def test_label_counts_that_are_not_declared_are_found():
    test = Contract().test_replies_reveal_only_what_is_declared
    with pytest.raises(AssertionError, match=r"\['class counts'\].* or declare 'class_counts' in discloses"):
        test(SendsLabelCounts(lr=0.05))
    test(replace_words(SendsLabelCounts(lr=0.05), discloses={"weights", "class_counts"}))


def test_a_private_tensor_in_a_reply_is_named_with_its_group_and_the_cure():
    with pytest.raises(
        AssertionError, match=r"client state's group 'secret' is in the reply; leave it out, or .*'secret' in"
    ):
        Contract().test_private_state_is_not_sent(SendsItsState(lr=0.05))


@dataclass(frozen=True, kw_only=True)
class SendsItsState(FedAvg):
    def client_init(self, client, seed):
        return {"secret": {"weight": torch.arange(24.0).reshape(3, 8)}}

    def local_update(self, message, client_state, client, seed):
        reply, _ = super().local_update(message, {}, client, seed)
        model = {**reply.tensors["model"], "head.weight": client_state["secret"]["weight"].clone()}
        return Message({"model": model}, reply.scalars), client_state


@dataclass(frozen=True, kw_only=True)
class EvaluatesMore(FedAvg):
    def personal_model(self, message, client_state, client, seed):
        return torch.nn.Sequential(super().personal_model(message, client_state, client, seed))


def test_an_evaluated_network_that_is_not_the_clients_is_refused_with_the_cure():
    run = federate(small_clients(), EvaluatesMore(lr=0.05), rounds=1, workers=0)
    with pytest.raises(UserError, match=r"\['0.body.0.bias', .* derive EvaluatesMore from .*WrapsNetwork"):
        run.model("client-0")


def state_specs(message):
    return {group: state_dict_spec(tree) for group, tree in message.tensors.items()}


def replace_words(method, **words):
    for name, value in words.items():
        object.__setattr__(method, name, frozenset(value))
    return method


@pytest.mark.parametrize("name", REGISTRY)
def test_clients_and_arguments_suit_a_method(name):
    """They pass every check before the first round, with wishes that not every method can grant."""
    example = example_of(name)
    method = example.build(momentum=0.5, weighted=False, no_such_field=1)
    assert method.lr == 0.05
    check_requirements(example.clients(2), method, example.public())
    assert (example.public() is None) == ("public_data" not in method.requires)


def test_an_example_of_a_class_outside_of_polyfed():
    class Plain(FedAvg.__base__):
        """A method without a card of its own."""

    assert example_of(Plain).build(batch_size=4).batch_size == 4
    assert [client.id for client in example_of(Plain).clients(1)] == ["client-0"]
