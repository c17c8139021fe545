"""Sites that train with privacy, what the server asks of them, and what they have recorded."""

import dataclasses
import json

import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg
from polyfed.core.algorithm import Message
from polyfed.core.nn.module_cache import cached_module
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection
from polyfed.deploy.privacy.ledger import read_ledger
from polyfed.deploy.protocol.wire import PROTOCOL, Envelope
from polyfed.deploy.site.site import Site
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.configuration import describe_method_and_settings
from polyfed.testing import small_clients

LIMITED = ReplyProtection(max_epsilon=4.0)
PRIVACY = pf.Privacy(noise_multiplier=2.0, run_epochs=2)
METHOD = FedAvg(lr=0.5, batch_size=8, weighted=False, privacy=PRIVACY)
ROUND = 3  # steps of a round, since a client has 20 examples of which a step takes 8


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def people(number=3):
    """Clients with a network that can be trained with privacy."""
    return [pf.Client(c.id, network, c.train, c.test) for c in small_clients(number)]


def first_weights():
    torch.manual_seed(1)
    return network().state_dict()


def make_site(folder, name="client-0", protection=LIMITED, of=lambda client: client, **words):
    """A site, or the same site again; `of` changes its client."""
    client = of(dataclasses.replace(people(1)[0], id=name))
    return Site(
        name, lambda: client, folder / name, allow_disclosure=True, protection=protection, device="cpu", **words
    )


def head(kind, method, site, run="a", **words):
    described = describe_method_and_settings(method, Settings(rounds=2))["algorithm"]
    return {"kind": kind, "protocol": PROTOCOL, "run": run, "client": site.name, "algorithm": described, **words}


def introduce(site, method=METHOD, run="a"):
    kind = cached_module(site.client().model).architecture
    return site.answer_envelope(Envelope(head("introduce", method, site, run, architecture=kind)))


def ask(site, phase="local", number=1, method=METHOD, run="a", state=None, scale=1.0):
    model = {name: scale * tensor for name, tensor in first_weights().items()}
    asked = head(
        "task", method, site, run, phase=phase, round=number, seed=1, run_seed=1, state=state, keep=0, metrics=[]
    )
    return site.answer_envelope(Envelope(asked, Message({"model": model}, {"lr": 0.5})))


def counted_steps(site, data_set="data"):
    return sum(read_ledger(site.folder / "privacy.json").private_steps.get(data_set, {}).values())


def records(site, run="a"):
    return [json.loads(line) for line in (site.folder / run / "metrics.jsonl").read_text().splitlines()]


def weights(answer):
    return torch.cat([tensor.flatten() for tensor in answer.body.tensors["model"].values()])
