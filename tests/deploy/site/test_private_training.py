"""Training with privacy at a site: noise that no seed gives, and steps that are in the book before they are taken."""

import dataclasses
import json

import pytest
import safetensors.torch
import torch

from polyfed.algorithms import FedAvg, FedAvgFT
from polyfed.core.algorithm import Message
from polyfed.core.training.privacy.sampled_gaussian import epsilon_of_steps
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection
from polyfed.deploy.privacy.ledger import read_ledger
from polyfed.deploy.site import private_training
from polyfed.simulation.engines.base import ClientTask
from polyfed.simulation.engines.inprocess import InProcessEngine

from ..private_sites import METHOD, PRIVACY, ROUND, ask, counted_steps, first_weights, introduce, records, weights

# -- noise ------------------------------------------------------------------------------------------------------------


def test_noise_and_samples_come_from_no_seed(site):
    """The same data, seed and round: two sites, one site twice, and a simulation all send other weights."""
    north, south = site("north"), site("south")
    found = [weights(ask(one)) for one in (north, south, north, site("north"))]
    seeded = InProcessEngine(METHOD, [north.client()], torch.device("cpu"))
    message = Message({"model": first_weights()}, {"lr": 0.5})
    result = next(seeded.run([ClientTask("local", 1, "north", message, None, 1, 1)]))
    found.append(torch.cat([t.flatten() for t in result.reply.tensors["model"].values()]))
    for number, one in enumerate(found):
        assert torch.isfinite(one).all()
        assert all(float((one - other).std()) > 0.01 for other in found[:number]), "noise was repeated"


def test_a_reply_that_was_trained_without_noise_does_not_leave(site, monkeypatch):
    monkeypatch.setattr(private_training.PrivateTask, "_begin_training", lambda *_: pytest.fail("asked"))
    plain = InProcessEngine.run
    monkeypatch.setattr(
        InProcessEngine, "run",
        lambda self, tasks: plain(InProcessEngine(FedAvg(lr=0.5), list(self._clients.values()), self._device), tasks),
    )  # fmt: skip
    answer = ask(site())
    assert "refused" in answer.head
    assert not answer.body.tensors


# -- the book ---------------------------------------------------------------------------------------------------------


def test_a_round_is_in_the_book_and_in_the_sites_own_record(site):
    one = site()
    assert "refused" not in introduce(one).head
    for number in (1, 2):
        assert ask(one, number=number, state=None if number == 1 else 1).body.tensors
        assert counted_steps(one) == number * ROUND
        spent = epsilon_of_steps(8 / 20, 2.0, number * ROUND, 1e-5)
        assert (records(one)[-1]["epsilon"], records(one)[-1]["privacy_unit"]) == (spent, "example")
    assert "train_loss" not in records(one)[-1]
    assert read_ledger(one.folder / "privacy.json").messages == {}, "no message has left without noise"


class Killed(BaseException):
    """No `except Exception` sees it."""


def test_a_site_that_is_killed_before_its_reply_has_paid(site, monkeypatch):
    """The steps are in the book before the first number is drawn; a site that starts again pays for other noise."""

    def dies(*_, **words):
        assert counted_steps(one) == paid
        raise Killed

    one, paid = site(), ROUND
    for name in ("draw_sample", "add_noise"):
        with monkeypatch.context() as patch:
            patch.setattr(private_training.SecretRandomness, name, dies)
            with pytest.raises(Killed):
                ask(one)
        paid += ROUND
    with monkeypatch.context() as patch:  # after training, before the reply
        patch.setattr("polyfed.deploy.site.site.write_private_state_and_delete_older", dies)
        with pytest.raises(Killed):
            ask(site())
    assert counted_steps(one) == 3 * ROUND
    assert ask(site()).body.tensors
    assert counted_steps(one) == 4 * ROUND


def test_a_book_that_cannot_be_written_lets_nothing_leave(site, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    one = site()
    monkeypatch.setattr("polyfed.deploy.privacy.ledger.write_file_atomically", full)
    monkeypatch.setattr(private_training, "SecretRandomness", lambda *_: pytest.fail("noise was drawn"))
    answer = ask(one)
    assert "refused" in answer.head
    assert not answer.body.tensors


def test_two_runs_share_a_book_and_the_third_is_refused_before_round_1(site, caplog):
    """Three plans of six steps cost more than 4.2, two less; a run that has begun goes on after a restart."""
    assert epsilon_of_steps(0.4, 2.0, 12, 1e-5) < 4.2 < epsilon_of_steps(0.4, 2.0, 18, 1e-5)
    protection = ReplyProtection(max_epsilon=4.2)
    for run in ("a", "b"):
        assert "refused" not in introduce(site(protection=protection), run=run).head
        for number in (1, 2):
            again = site(protection=protection)
            assert ask(again, number=number, run=run, state=None if number == 1 else 1).body.tensors
            assert "refused" not in introduce(again, run=run).head
    one = site(protection=protection)
    before = (one.folder / "privacy.json").read_bytes()
    refused = introduce(one, run="c").head["refused"]
    assert refused.startswith("this run would spend more than the budget (max-epsilon) of each example of its data set")
    assert "smaller target_epsilon or a larger noise_multiplier, or fewer rounds" in refused
    assert "epsilon of each example would be" in caplog.text
    assert (one.folder / "privacy.json").read_bytes() == before
    assert "refused" not in introduce(site(protection=protection, data_set="patients of 2031"), run="d").head


def test_a_server_that_plans_less_than_it_asks_for_is_refused_at_the_round(site):
    one = site(protection=ReplyProtection(max_epsilon=2.5))
    greedy = dataclasses.replace(METHOD, local_epochs=1, privacy=dataclasses.replace(PRIVACY, run_epochs=1))
    assert "refused" not in introduce(one, greedy).head
    assert ask(one, method=greedy).body.tensors
    for _ in range(2):
        assert (
            ask(one, number=2, method=greedy, state=1)
            .head["refused"]
            .startswith("this training would spend more than the budget (max-epsilon) of each example")
        )
    assert counted_steps(one) == ROUND
    assert epsilon_of_steps(0.4, 2.0, ROUND, 1e-5) <= 2.5 < epsilon_of_steps(0.4, 2.0, 2 * ROUND, 1e-5)


def test_what_was_sent_without_noise_leaves_no_budget(site):
    assert ask(site(protection=ReplyProtection()), method=FedAvg(lr=0.5, weighted=False), run="z").body.tensors
    refused = ask(site()).head["refused"]
    assert refused == "what it has sent before leaves no budget (max-epsilon) for each example of its data set"


@pytest.mark.thorough
def test_without_a_limit_the_book_counts_and_refuses_nothing(site):
    one = site(protection=ReplyProtection())
    assert all(ask(one, run=run).body.tensors for run in "abcdefgh")
    assert counted_steps(one) == 8 * ROUND


# -- evaluations that train ---------------------------------------------------------------------------------------------


TUNED = FedAvgFT(lr=0.5, batch_size=8, weighted=False, privacy=dataclasses.replace(PRIVACY, run_epochs=4))


def model_of(site):
    return safetensors.torch.load_file(next((site.folder / "a" / "models").glob("*.safetensors")))


@pytest.mark.thorough
def test_fine_tuning_for_an_evaluation_is_counted_and_the_export_is_what_was_evaluated(site, monkeypatch):
    evaluated = []
    personal = FedAvgFT.personal_model

    def noted(self, *arguments):
        model = personal(self, *arguments)
        evaluated.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return model

    monkeypatch.setattr(FedAvgFT, "personal_model", noted)
    one = site()
    introduce(one, TUNED)
    ask(one, method=TUNED)
    assert counted_steps(one) == ROUND
    for phase in ("evaluate", "export", "export"):  # the last one after a restart
        assert "refused" not in ask(site(), phase, method=TUNED, state=1).head
        assert counted_steps(one) == 2 * ROUND
    saved = model_of(one)
    for network in evaluated:
        assert all(torch.equal(tensor, saved[name]) for name, tensor in network.items())
    ask(one, "evaluate", method=TUNED, state=1, scale=0.5)  # another network came
    assert counted_steps(one) == 3 * ROUND
    assert not torch.equal(evaluated[-1]["0.weight"], evaluated[0]["0.weight"])


def test_the_secret_of_an_evaluation_is_not_used_for_another_private_state(site):
    one = site()
    introduce(one, TUNED)
    ask(one, method=TUNED)
    ask(one, "evaluate", method=TUNED, state=1)
    key = json.loads((one.folder / "a" / "personal-noise.json").read_text())["key"]
    file = one.folder / "a" / "run.json"
    identity = json.loads(file.read_text())
    (one.folder / "a" / "personal-noise.json").write_text("{")  # damaged: another secret, which is counted
    ask(one, "evaluate", method=TUNED, state=1)
    assert counted_steps(one) == 3 * ROUND
    assert json.loads((one.folder / "a" / "personal-noise.json").read_text())["key"] != key
    assert identity["client"] == "client-0"
