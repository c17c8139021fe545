"""What is checked before the first round, and the fingerprint by which a resumed run knows its clients."""

import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY, FedAvg, FedAvgFT, FedProx, Local
from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples, Normalise
from polyfed.core.methods.declared_words import MODEL_REQUIREMENTS
from polyfed.core.nn.module_cache import cached_module
from polyfed.simulation.checks import requirements
from polyfed.simulation.checks.fingerprints import data_fingerprint
from polyfed.testing import small_clients

# What is proved here holds of the examples that were trained on.
pytestmark = pytest.mark.filterwarnings("ignore:test examples that are also training examples:UserWarning")


def linear():
    return nn.Linear(4, 3)


def wide():
    return nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))


X, Y = torch.arange(24.0).view(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])


def client(name="a", model=linear, x=X, y=Y, **more):
    return Client(name, model, (x, y), (x, y), **more)


@dataclass(frozen=True)
class NeedsPublic(FedAvg):
    requires: ClassVar[frozenset[str]] = frozenset({"public_data"})


class TestClients:
    def test_none(self):
        with pytest.raises(UserError, match="a federation needs at least one client, got none"):
            requirements.check_clients([])

    def test_something_else(self):
        with pytest.raises(UserError, match=r"clients must be polyfed.Client objects, got tuple"):
            requirements.check_clients([(X, Y)])

    def test_an_id_twice(self):
        with pytest.raises(UserError, match="two clients have the id 'a'; ids must differ"):
            requirements.check_clients([client("a"), client("b"), client("a")])

    def test_two_tasks(self):
        labels = torch.eye(3)[Y]
        with pytest.raises(UserError, match="must have one task, got classification and multilabel"):
            requirements.check_clients([client("a"), client("b", y=labels, task="multilabel")])


class TestRequirements:
    @pytest.mark.parametrize("method", [FedAvg, FedAvgFT, FedProx])
    def test_mixed_architectures(self, method):
        of_clients = {name: other.requires for name, other in REGISTRY.items() if other.requires & MODEL_REQUIREMENTS}
        several = [name for name, requires in of_clients.items() if "one_architecture" not in requires]
        assert {"fedproto", "flha_ghn", "heterofl", "local"} <= set(several)
        mixed = [client("north"), client("south"), client("west", wide)]
        with pytest.raises(UserError) as error:
            pf.federate(mixed, method(), rounds=1)
        assert "needs one architecture, but the 3 clients have 2: 'west' differs from 'north'" in str(error.value)
        assert str(error.value).endswith(f"Methods for different architectures: {', '.join(sorted(several))}")
        requirements.check_requirements(mixed, Local(), None)

    def test_the_same_architecture_from_other_factories_is_one(self):
        requirements.check_requirements([client("a", lambda: nn.Linear(4, 3)), client("b")], FedAvg(), None)

    def test_public_examples(self):
        with pytest.raises(UserError, match=r"NeedsPublic needs public examples .*; give public=\.\.\."):
            pf.federate([client()], NeedsPublic(), rounds=1)
        requirements.check_requirements([client()], NeedsPublic(), Examples(X, Y))

    @pytest.mark.parametrize("method", [FedAvg(), Local()])
    def test_a_client_without_a_network(self, method):
        with pytest.raises(UserError, match="trains each client's own network, but client 'b' has model=None"):
            requirements.check_requirements([client("a"), client("b", None)], method, None)

    def test_a_method_with_its_own_network_takes_clients_without(self):
        requirements.check_requirements([client("a", None)], NeedsPublic(), Examples(X, Y))
        requirements.check_networks_run([client("a", None)])


class TestModels:
    def test_a_network_that_fails_on_the_data(self):
        with pytest.raises(
            UserError, match=r"client 'a': its network fails on a batch of shape \(2, 4\) \(torch.float32\)"
        ):
            requirements.check_networks_run([client("a", lambda: nn.Linear(5, 3))])

    def test_a_network_that_fails_on_one_clients_data_only(self):
        other = client("b", x=torch.zeros(6, 5))
        with pytest.raises(UserError, match="client 'b': its network fails"):
            requirements.check_networks_run([client("a"), other])

    def test_raw_images_need_a_transform(self):
        def net():
            return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

        images = torch.zeros(6, 1, 4, 4, dtype=torch.uint8)
        raw, ready = Examples(images, Y), Examples(images, Y, transform=Normalise((0.5,), (0.5,)))
        with pytest.raises(UserError, match=r"torch.uint8"):
            requirements.check_networks_run([Client("a", net, raw, raw)])
        requirements.check_networks_run([Client("a", net, ready, ready)])
        requirements.check_networks_run([client("a", net, x=images)])

    def test_a_label_beyond_the_outputs(self):
        beyond = client("a", y=torch.tensor([0, 1, 2, 3, 0, 0]))
        with pytest.raises(
            UserError, match=r"client 'a': train has label 3, but the network has 3 outputs \(classes 0 to 2\)"
        ):
            requirements.check_networks_run([beyond])
        only_in_test = Client("a", linear, (X, Y), (X, torch.full((6,), 7)))
        with pytest.raises(UserError, match="client 'a': test has label 7"):
            requirements.check_networks_run([only_in_test])

    def test_usual_reasons_for_a_label_beyond_the_outputs(self):
        one, from_one = "1 output .*give it an output for each class, 2 or more", "subtract 1 if they begin at 1$"
        for size, labels, cure in ((1, [0, 1], one), (2, [1, 2], from_one), (2, [1, 3], "size or the labels$")):
            y = torch.tensor(labels * 3)
            with pytest.raises(UserError, match=cure):
                requirements.check_networks_run([Client("a", lambda n=size: nn.Linear(X.shape[1], n), (X, y), (X, y))])

    def test_more_outputs_than_classes_seen_are_allowed_unless_the_classes_are_known(self):
        few = client("a", y=torch.zeros(6, dtype=torch.int64))
        requirements.check_networks_run([few])
        requirements.check_networks_run([few], num_outputs=3)
        for number in (2, 4):
            with pytest.raises(
                UserError, match=f"client 'a': its network has 3 outputs, but the data have {number} classes"
            ):
                requirements.check_networks_run([few], num_outputs=number)

    def test_outputs_that_are_no_logits(self):
        cases = {
            r"its network must return a tensor of logits, got Tuple": lambda: Two(),
            r"turns 2 examples into an output of shape \(3, 2\)": lambda: Turned(),
            r"logits of shape \(batch, classes\), got \(batch, 4, 1\)": lambda: nn.Sequential(
                nn.Linear(4, 4), nn.Unflatten(1, (4, 1))
            ),
        }
        for sentence, factory in cases.items():
            with pytest.raises(UserError, match=sentence.replace("Tuple", "tuple")):
                requirements.check_networks_run([client("a", factory)])

    def test_multilabel_outputs(self):
        with pytest.raises(UserError, match="they must have the same form"):
            requirements.check_networks_run([client("a", y=torch.eye(3)[Y][:, :2], task="multilabel")])
        requirements.check_networks_run([client("a", y=torch.eye(3)[Y], task="multilabel")])

    def test_regression_targets_are_columns(self):
        one = client("a", lambda: nn.Linear(4, 1), y=torch.arange(6), task="regression")
        requirements.check_networks_run([one])
        with pytest.raises(UserError, match=r"output is \(batch\), the labels are \(6, 1\)"):
            requirements.check_networks_run([client("a", Flat, y=torch.arange(6.0), task="regression")])

    def test_float64_inputs_and_a_float32_network(self):
        with pytest.raises(
            UserError,
            match=r"weights of torch.float32, but its inputs are torch.float64; convert the inputs, x.float()",
        ):
            requirements.check_networks_run([client(x=X.double())])
        requirements.check_networks_run([client(x=X.double(), model=lambda: linear().double())])
        requirements.check_networks_run([client(x=X.double().numpy())])

    def test_a_network_with_nothing_to_train(self):
        for factory in (nn.Identity, lambda: linear().requires_grad_(False)):
            with pytest.raises(UserError, match="client 'a': its network has no parameters that can be trained"):
                pf.federate([client(model=factory)], FedAvg(), rounds=1)

    def test_a_network_with_a_state_that_is_no_tensor(self):
        with pytest.raises(UserError, match=r"client 'a': '_extra_state' in its network's state_dict is a dict"):
            pf.federate([client(model=WithExtraState)], FedAvg(), rounds=1)
        with pytest.raises(UserError, match="_extra_state"):
            requirements.check_networks_run([client(model=WithExtraState)])

    def test_one_training_example_and_batch_norm(self):
        def net():
            return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

        def per_pixel():  # several values a channel even in a batch of one
            return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 3))

        def lone(model):
            return Client("lone", model, (X[:1], Y[:1]), (X, Y))

        with pytest.raises(UserError, match="client 'lone' has one training example, and its network cannot"):
            requirements.check_networks_run([client("a", net), lone(net)])
        requirements.check_networks_run(
            [client("a", net), Client("b", net, (X[:2], Y[:2]), (X[:1], Y[:1])), lone(linear)]
        )
        requirements.check_networks_run([lone(per_pixel)])

    def test_trying_a_network_leaves_no_trace(self):
        for rows in (6, 1):
            one = Client("a", Caching, (X[:rows], Y[:rows]), (X, Y))
            state = torch.random.get_rng_state()
            requirements.check_networks_run([one])
            module = cached_module(Caching).module
            assert module.cached is None
            assert int(module.calls) == 0
            assert torch.equal(state, torch.random.get_rng_state())
            pf.federate([one], FedAvg(), rounds=2, workers=0)

    def test_whole_numbers_into_a_network_of_floats(self):
        with pytest.raises(
            UserError, match=r"client 'a': .* its inputs are torch.int64; convert the inputs, x.float\(\)"
        ):
            requirements.check_networks_run([client(x=X.long())])

        def tokens():
            return nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(16, 3))

        requirements.check_networks_run([client(model=tokens, x=X.long() % 5)])
        with pytest.raises(UserError, match="has a vocabulary of 5"):  # the numbers are too large, not the type
            requirements.check_networks_run([client(model=tokens, x=X.long() + 9)])

    def test_a_network_that_is_other_in_training(self):
        cases = {
            r"fails on a batch of shape \(2, 4\) \(torch.float32\) in training: RuntimeError: broken": "fails",
            "must return a tensor of logits, got tuple in training": "tuple",
            r"output is \(batch, 3\) in evaluation and \(batch, 2\) in training": "narrow",
            "adds or removes the tensor 'added.bias' as it runs": "layer",
            "adds or removes the tensor 'buffer' as it runs": "buffer",
            r"changes the shape of 'queue' from \(1,\) to \(2,\) as it runs": "grows",
            "changes requires_grad of 'bias' from True to False as it runs": "freezes",
        }
        for sentence, what in cases.items():
            with pytest.raises(UserError, match=f"client 'a': .*{sentence}"):
                requirements.check_networks_run([client(model=lambda what=what: InTraining(what))])

    @pytest.mark.parametrize("what", ["whole", "part", "buffers"])
    def test_a_factory_that_gives_the_same_network_each_time(self, what):
        kept = linear() if what != "buffers" else nn.BatchNorm1d(4).requires_grad_(False)

        def factory():
            return kept if what == "whole" else nn.Sequential(kept, nn.Linear(3 if what == "part" else 4, 3))

        with pytest.raises(UserError, match=r"client 'a': its model factory puts the same '.*' into each network"):
            pf.federate([client(model=factory)], FedAvg(), rounds=1, workers=0)
        requirements.check_networks_run([client(model=lambda: copy.deepcopy(factory()))])

    def test_a_frozen_part_may_be_the_same_each_time(self):
        kept = nn.Linear(4, 4).requires_grad_(False)
        requirements.check_networks_run([client(model=lambda: nn.Sequential(kept, nn.Linear(4, 3)))])

    def test_a_network_without_values(self):
        def factory():
            with torch.device("meta"):
                return linear()

        with pytest.raises(UserError, match="factory leaves 'weight' on the meta device"):
            requirements.check_networks_run([client(model=factory)])


class InTraining(nn.Linear):
    """Does something else in training."""

    def __init__(self, what):
        super().__init__(4, 3)
        self.what = what
        if what == "grows":
            self.register_buffer("queue", torch.zeros(1))

    def forward(self, x):
        out = super().forward(x)
        if not self.training:
            return out
        if self.what == "grows":
            self.queue = torch.cat([self.queue, torch.zeros(1)])
        if self.what == "freezes":
            self.bias.requires_grad_(False)
        if self.what == "fails":
            raise RuntimeError("broken")
        if self.what == "layer":
            self.added = nn.Linear(3, 3)
        if self.what == "buffer":
            self.register_buffer("buffer", torch.zeros(1))
        return {"tuple": (out, out), "narrow": out[:, :2]}.get(self.what, out)


class Flat(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    def forward(self, x):
        return super().forward(x).squeeze(1)


class WithExtraState(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

    def get_extra_state(self):
        return {"steps": 3}

    def set_extra_state(self, state):
        pass


class Caching(nn.Linear):
    """Keeps a tensor of its first forward pass, counts calls, and uses random numbers in evaluation too."""

    def __init__(self):
        super().__init__(4, 3)
        self.cached = None
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x):
        self.calls += 1
        if self.cached is None:
            self.cached = torch.rand(4)
        return super().forward(x * self.cached)


class Two(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x):
        return x, x


class Turned(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x):
        return super().forward(x).T


class TestFingerprint:
    def test_the_same_clients_have_the_same_whatever_their_order(self):
        one, other = small_clients(), small_clients()[::-1]
        assert data_fingerprint(one) == data_fingerprint(other)
        assert len(data_fingerprint(one)) == 16

    @pytest.mark.parametrize("part", ["train", "test", "val", "global_test"])
    def test_a_single_label_changes_it(self, part):
        sets = {"train": (X, Y), "test": (X, Y), "val": (X, Y), "global_test": (X, Y)}
        changed = Y.clone()
        changed[4] = 0
        before = Client("a", linear, **sets)
        after = Client("a", linear, **(sets | {part: (X, changed)}))
        assert data_fingerprint([before]) != data_fingerprint([after])

    def test_everything_else_that_matters_changes_it(self):
        nudged = X.clone()
        nudged[5, 3] += 1e-4
        half = torch.arange(3)
        variants = [
            client(),
            client("b"),
            client(model=wide),
            client(model=None),
            client(x=nudged),
            client(val=(X, Y)),
            Client("a", linear, Examples(X, Y, index=half), (X, Y)),
            Client("a", linear, Examples(X, Y, index=half.flip(0)), (X, Y)),
            Client("a", linear, Examples(X, Y, transform=Normalise((0.0,), (1.0,))), (X, Y)),
            Client("a", linear, Examples(X, Y, transform=Normalise((0.0,), (2.0,))), (X, Y)),
        ]
        prints = [data_fingerprint([variant]) for variant in variants]
        prints += [data_fingerprint([client()], Examples(X, Y)), data_fingerprint([client()], Examples(nudged, Y))]
        assert len(set(prints)) == len(prints)


def test_the_fingerprint_knows_groups_and_times():
    rows = torch.arange(6)
    plain, *others = (
        Examples(X[:6], Y[:6], rows, **more)
        for more in (
            {},
            {"group": list("aabbcc")},
            {"group": list("abcabc")},
            {"time": [1.0] * 6},
            {"time": [1.0] * 5 + [2.0]},
        )
    )
    prints = [data_fingerprint([replace(client(), train=examples)]) for examples in (plain, *others)]
    assert len(set(prints)) == len(prints)
    assert prints[1] == data_fingerprint([replace(client(), train=Examples(X[:6], Y[:6], rows, group=list("aabbcc")))])
