"""What a site refuses of training with privacy, with the cure, and which words of server and owner decide it."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.server.server_config import build_or_restore_server
from polyfed.deploy.site.admission import build_allowed_algorithm
from polyfed.deploy.site.process.node_config import build_site
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.configuration import describe_method_and_settings
from polyfed.testing import small_clients

from ..private_sites import LIMITED, METHOD, PRIVACY, counted_steps, introduce


def admitted(method, protection=LIMITED):
    described = describe_method_and_settings(method, Settings(rounds=1))["algorithm"]
    words = {"methods": None, "secure_only": False, "allow_disclosure": True, "protection": protection}
    return build_allowed_algorithm({"algorithm": described}, **words)


@pytest.mark.parametrize(
    ("method", "protection", "sentence"),
    [
        (
            METHOD,
            ReplyProtection(clip_norm=1.0, noise_multiplier=1.0),
            "run without privacy, or the site takes noise-mult",
        ),
        (FedAvg(), LIMITED, "takes part with privacy only; set algorithm.privacy.target_epsilon"),
    ],
)
def test_the_owners_words_decide_who_may_train(method, protection, sentence):
    with pytest.raises(RefusalError, match=sentence):
        admitted(method, protection)
    assert admitted(METHOD, ReplyProtection()).privacy == PRIVACY


def with_batch_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def with_groups(client):
    x, y = client.train.batch(torch.arange(20))
    return dataclasses.replace(client, train=Examples(x, y, group=np.arange(20) // 4))


def epsilon(value, **words):
    return dataclasses.replace(METHOD, privacy=pf.Privacy(target_epsilon=value, run_epochs=2, **words))


@pytest.mark.parametrize(
    ("method", "of", "told", "logged"),
    [
        (
            METHOD,
            lambda c: pf.Client(c.id, with_batch_norm, c.train, c.test),
            "its log says why, and the cure",
            "GroupNorm",
        ),
        (epsilon(1e-7), lambda c: c, "its log says why, and the cure", "no noise gives epsilon 1e-07"),
        (epsilon(3.0, unit="group"), lambda c: c, "its log says why, and the cure", "give group=, or unit='example'"),
        (
            dataclasses.replace(METHOD, privacy=pf.Privacy(noise_multiplier=1e-200, run_epochs=1)),
            lambda c: c,
            "would spend more than the budget",
            "epsilon of each example would be inf",
        ),
        (
            dataclasses.replace(METHOD, privacy=pf.Privacy(noise_multiplier=1e4, run_epochs=10**19)),
            lambda c: c,
            "a site counts at most 1000000000000",
            "a site counts at most",
        ),
        (METHOD, with_groups, "run with algorithm.privacy.unit = 'group'", "run with algorithm.privacy.unit"),
        (
            FedAvg(privacy=PRIVACY, sampler="balanced"),
            lambda c: c,
            "privacy does not cover sampler='balanced'",
            "leave it out",
        ),
        (
            pf.algorithms.Scaffold(privacy=PRIVACY),
            lambda c: c,
            "privacy is not known to cover",
            "methods that it covers",
        ),
        (
            FedAvg(privacy=pf.Privacy(target_epsilon=3.0)),
            lambda c: c,
            "does not say how many steps",
            "does not say how many",
        ),
    ],
)
def test_what_noise_does_not_cover_is_refused_before_round_1(site, caplog, method, of, told, logged):
    one = site(of=of)
    assert told in introduce(one, method).head["refused"]
    assert logged in caplog.text
    assert counted_steps(one) == 0


@pytest.mark.parametrize("word", ["look", "errors", "seconds"])
def test_what_no_noise_covers_may_not_be_disclosed_with_a_budget(site, word):
    with pytest.raises(UserError, match=rf"disclose='{word}' lets out what no noise covers; take it out"):
        site(disclose=frozenset({word, "accuracy"}))
    assert site(disclose=frozenset({"accuracy", "num_examples"})).disclose


def test_the_servers_words(tmp_path):
    words = {
        "sites": "a,b,c",
        "out": "run",
        "rounds": 5,
        "allow-disclosure": True,
        "algorithm.privacy.target_epsilon": 8.0,
    }
    file = tmp_path / "server.py"
    file.write_text("from polyfed.testing import SmallNet as model\n")
    server = build_or_restore_server(
        {**words, "file": str(file), "algorithm.name": "fedavg", "algorithm.local_epochs": 2}
    )
    assert server.algorithm.privacy == pf.Privacy(target_epsilon=8.0, run_epochs=10)
    with pytest.raises(UserError, match="Scaffold: privacy is not known to cover"):
        build_or_restore_server({**words, "file": str(file), "algorithm.name": "scaffold"})
    with pytest.raises(UserError, match="unknown option 'epsilon'; did you mean"):
        build_or_restore_server({**words, "algorithm.name": "fedavg", "algorithm.privacy.epsilon": 8})


def test_a_node_configuration_has_the_budget(nodes):
    node = nodes(small_clients(1), **{"max-epsilon": 8.0, "delta": 1e-6, "disclose": "accuracy"})[101]
    assert build_site(node.config).protection == ReplyProtection(max_epsilon=8.0, delta=1e-6)
