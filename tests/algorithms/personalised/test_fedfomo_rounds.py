"""FedFomo, eq. 3 to 5 of its paper in plain torch: polyfed computes the same in rounds of clients of unlike sizes."""

import pytest
import torch
from plain_torch import (
    LOCAL,
    assert_networks_equal,
    assert_tensors_near,
    draw_network,
    load,
    normed,
    parameters_of,
    record_run,
    sgd,
    train,
    unequal_clients,
)
from torch.nn import functional as F

from polyfed.algorithms import FedFomo


def mix(network, start, models, x, y):
    """Eq. 3 to 5: the weights of models by how much they improve the loss on held-out examples, and their mixture."""

    def loss(tensors):  # polyfed evaluates in single precision
        return float(F.cross_entropy(load(network, tensors).eval()(x).float(), y).detach())

    weights = {}
    for j, model in models.items():
        distance = torch.cat([(model[name] - start[name]).flatten() for name in start]).norm()
        weights[j] = float((loss(start) - loss(model)) / distance)
    total = sum(max(w, 0.0) for w in weights.values()) or 1.0
    steps = {n: sum(max(w, 0.0) / total * (models[j][n] - start[n]) for j, w in weights.items()) for n in start}
    return {name: tensor + steps[name] for name, tensor in start.items()}, weights


@pytest.mark.parametrize(("num_models", "per_round"), [(5, 1.0), (1, 1.0), (5, 2)])
@pytest.mark.one_case
def test_rounds_in_plain_torch_are_the_same(num_models, per_round, monkeypatch):
    """With all models or the one of highest preference, of clients of whom one gives other labels. Models are compared with
    the client's own statistics."""
    requests, aggregate = [], FedFomo.aggregate

    def recorded_aggregate(method, state, replies, server):
        requests.append({i: reply.tensors["request"]["clients"].tolist() for i, reply in replies.items()})
        return aggregate(method, state, replies, server)

    monkeypatch.setattr(FedFomo, "aggregate", recorded_aggregate)
    clients = unequal_clients(normed, normed, normed, turns=(0, 0, 1))
    method = FedFomo(**LOCAL, num_models=num_models, epsilon=0.0)
    recorded = record_run(monkeypatch, method, clients, rounds=6, clients_per_round=per_round)

    networks, models, before, asked, signs = {c.id: draw_network(normed) for c in clients}, {}, {}, {}, set()
    preferences = {c.id: [0.0] * 3 for c in clients}
    for (cohort, minibatches), request in zip(recorded.rounds, requests, strict=True):
        sent = dict(models)
        for i in cohort:
            place, network = int(i[-1]), networks[i]
            start = parameters_of(network)
            if i in sent:
                client, rows = clients[place], recorded.run.last.client_states[i]["holdout"]
                offered = {j: sent[f"client-{j}"] for j in [*asked[i], place] if f"client-{j}" in sent}
                start, weights = mix(network, before[i], offered, client.train.x[rows], client.train.y[rows])
                signs |= {w > 0 for w in weights.values()}
                for j, w in weights.items():
                    preferences[i][j] += w
            before[i] = start
            train(load(network, start), sgd(network.parameters()), minibatches[i])
            models[i] = parameters_of(network)
            others = [p for j, p in enumerate(preferences[i]) if j != place]
            chosen = sorted((preferences[i][j] for j in request[i]), reverse=True)
            assert chosen == pytest.approx(sorted(others, reverse=True)[:num_models], abs=1e-9)
        asked |= request

    assert signs == {True, False}
    assert_networks_equal(recorded, networks)
    for c in clients:
        assert_tensors_near(recorded.run.last.client_states[c.id]["before"], before[c.id])
        assert recorded.run.last.client_states[c.id]["preferences"].tolist() == pytest.approx(preferences[c.id])
