"""The contract itself: words are checked when a class is made, and states and scalars before they travel."""

import copy
import pickle
from dataclasses import dataclass
from inspect import signature

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import REGISTRY, FedAvg
from polyfed.algorithms.base.averaging import Averaging
from polyfed.core.algorithm import Algorithm, Message
from polyfed.core.methods.declared_words import (
    DISCLOSURES,
    REQUIREMENTS,
    NewDisclosure,
    check_declared_words_are_known,
    meaning_of_disclosure,
)
from polyfed.deploy.privacy.gaussian_mechanism import noise_incompatibility_error
from polyfed.simulation.rounds.replies.secure_aggregation import disclosures_to_allow
from polyfed.testing import small_clients


def test_the_contract_is_short():
    public = [name for name in vars(Algorithm) if not name.startswith("_")]
    assert len(public) <= 14, public


@pytest.mark.parametrize(
    ("field", "word", "hint"), [("requires", "one_arch", "one_architecture"), ("discloses", "weight", "weights")]
)
def test_an_unknown_word_is_refused_when_the_class_is_made(field, word, hint):
    with pytest.raises(TypeError, match=f"Typo.{field} has the unknown word '{word}'; did you mean {hint}"):
        type("Typo", (Averaging,), {field: frozenset({word}), "__doc__": ""})


def test_a_word_alone_is_no_set_of_words():
    with pytest.raises(TypeError, match=r"must be a set of words, got 'weights'; write frozenset\(\{'weights'\}\)$"):
        type("Typo", (Averaging,), {"discloses": "weights", "__doc__": ""})


def test_a_dispatch_that_no_run_would_call_is_refused_when_the_class_is_made():
    """FedAvg makes the messages to all clients at once."""
    members = {"dispatch": lambda self, server_state, client_info: None, "__doc__": ""}
    with pytest.raises(TypeError, match=r"^Quiet overrides dispatch, which is never called, .* override dispatch_all"):
        type("Quiet", (FedAvg,), members)
    type("Heard", (FedAvg,), {**members, "dispatch_all": Algorithm.dispatch_all})
    type("Single", (Averaging,), members)


class TestNewDisclosures:
    """Words that a method brings itself."""

    GAZE = NewDisclosure("gaze", "where the client's people look")

    def test_a_method_outside_of_polyfed_may_bring_a_word(self):
        kind = type("Gazes", (Averaging,), {"discloses": frozenset({"weights", self.GAZE}), "__doc__": ""})
        check_declared_words_are_known(kind, "Gazes")
        assert disclosures_to_allow(kind(), secure=False) == ["gaze", "weights"]
        assert meaning_of_disclosure(self.GAZE) == "where the client's people look"
        assert "not part of polyfed" in meaning_of_disclosure("gaze")

    def test_the_bare_word_is_refused_with_the_cure(self):
        with pytest.raises(
            TypeError, match=r"Typo.discloses has the unknown word 'gaze'.*NewDisclosure\('gaze', ...\)"
        ):
            type("Typo", (Averaging,), {"discloses": frozenset({"gaze"}), "__doc__": ""})

    @pytest.mark.parametrize(
        ("word", "meaning", "sentence"),
        [
            ("weights", "again", "polyfed has this word already"),
            ("two words", "x", "a word such as"),
            ("gaze", " ", "say in a"),
        ],
    )
    def test_a_word_without_form_or_meaning_is_refused(self, word, meaning, sentence):
        with pytest.raises(TypeError, match=sentence):
            NewDisclosure(word, meaning)

    def test_it_reaches_another_process_whole(self):
        for copied in (pickle.loads(pickle.dumps(self.GAZE)), copy.deepcopy(self.GAZE)):  # noqa: S301
            assert (copied, copied.meaning) == (self.GAZE, self.GAZE.meaning)

    def test_no_noise_is_known_to_hide_it(self):
        kind = type("Gazes", (Averaging,), {"discloses": frozenset({self.GAZE}), "__doc__": ""})
        assert "discloses gaze, of which it is not known" in noise_incompatibility_error(
            kind(weighted=False), secure_sums=False
        )


@dataclass(frozen=True, kw_only=True)
class _Decides(Averaging):
    """Sets its words for the instance."""

    field: str = "requires"

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, self.field, frozenset({"wights"}))


@pytest.mark.parametrize("field", ["requires", "discloses"])
def test_an_unknown_word_of_an_instance_is_refused_before_the_first_round(field):
    with pytest.raises(TypeError, match=f"_Decides.{field} has the unknown word 'wights'"):
        pf.federate(small_clients(), _Decides(field=field), rounds=1, workers=0)


@pytest.mark.lists
def test_every_word_says_what_it_means():
    for method in REGISTRY.values():
        assert method.requires <= REQUIREMENTS.keys()
        assert method.discloses <= DISCLOSURES.keys()


@dataclass(frozen=True, kw_only=True)
class _Keeps(Averaging):
    """Puts something into the server's state, at the start or after a round."""

    after: bool = False

    def server_init(self, server):
        return {**super().server_init(server), **({} if self.after else {"seen": (1, 2)})}

    def server_step(self, server_state, mean, client_ids):
        return {**server_state, **mean, **({"seen": {1: "a"}} if self.after else {})}


@pytest.mark.parametrize(("after", "what"), [(False, "at 'seen' is a tuple"), (True, "at 'seen' has the key 1")])
def test_server_state_that_would_not_come_back_is_refused(after, what):
    """A tuple would come back from a checkpoint as a list, a key that is not a string as a string."""
    with pytest.raises(TypeError, match=f"the server's state {what}"):
        pf.federate(small_clients(), _Keeps(after=after), rounds=1, workers=0)


@dataclass(frozen=True, kw_only=True)
class _Sends(Averaging):
    """Sends a scalar that is none."""

    def dispatch(self, server_state, client_info):
        down = super().dispatch(server_state, client_info)
        return Message(down.tensors, {**down.scalars, "rate": torch.tensor(0.1)})


def test_scalars_that_go_down_are_checked():
    with pytest.raises(TypeError, match="the message to 'client-0': scalar 'rate' is tensor"):
        pf.federate(small_clients(), _Sends(), rounds=1, workers=0)


def test_a_method_must_say_what_it_sends():
    parts = {n: lambda *a: None for n in ("server_init", "aggregate", "client_init", "local_update", "personal_model")}
    with pytest.raises(TypeError, match="Mute must define dispatch or dispatch_all"):
        type("Mute", (Algorithm,), parts)


@dataclass(frozen=True, kw_only=True)
class _Picky(Averaging):
    """Requires what its field names."""

    word: str = "classification"

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "requires", frozenset({"model", self.word}))


def test_a_method_for_classes_refuses_other_tasks():
    (one,) = small_clients(1)
    numbers = pf.Client(
        "n", one.model, (one.train.x, one.train.x[:, :3]), (one.test.x, one.test.x[:, :3]), task="regression"
    )
    with pytest.raises(pf.UserError, match="needs one class per example, but the task of 'n' is regression"):
        pf.federate([numbers], _Picky(), rounds=1, workers=0)


def test_widths_of_representations_are_compared_before_the_first_round():
    one, other = small_clients(2)

    def wide():
        return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 3))

    clients = [one, pf.Client("wide", wide, other.train, other.test)]
    with pytest.raises(pf.UserError, match="the last layer of 'wide' takes 9 numbers, that of 'client-0' 8"):
        pf.federate(clients, _Picky(word="one_representation"), rounds=1, workers=0)


def test_a_wrong_keyword_of_a_method_suggests_the_right_one():
    with pytest.raises(TypeError, match=r"FedAvg has no field 'learning_rate'; did you mean lr\?"):
        pf.algorithms.FedAvg(learning_rate=0.1)
    with pytest.raises(TypeError, match=r"FedProx has no field 'muu'; did you mean mu\?"):
        pf.algorithms.FedProx(muu=0.1)
    assert "lr" in signature(pf.algorithms.FedAvg).parameters
