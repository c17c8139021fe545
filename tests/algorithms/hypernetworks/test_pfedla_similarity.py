"""pFedLA's aggregation by similarity, without hypernetworks (Fig. 1): against loops, and its two ends."""

import math

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FedAvg, HeurPFedLA, Local, PFedLA
from polyfed.core.seeds import torch_generator
from polyfed.hypernetworks.layer_aggregation import layer_similarity_weights
from polyfed.testing import small_clients

OPTIONS = {"lr": 0.05, "local_epochs": 2, "batch_size": 8, "momentum": 0.5}
LAYERS = {"body": ["w", "b"], "head": ["v"]}


def federate(method, **options):
    return pf.federate(small_clients(), method, **({"rounds": 3, "workers": 0} | options))


def same_models(one, other, **tolerance):
    for client in one.federation.clients:
        ours, theirs = one.model(client).state_dict(), other.model(client).state_dict()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], **tolerance)


def models(number=4, spread=1.0):
    """Of which the first two are alike in the body, and all in the head's direction."""
    generator = torch_generator(5)
    made = []
    for k in range(number):
        w, b = torch.randn(3, 2, generator=generator), torch.randn(2, generator=generator)
        made.append({"w": 1 + spread * w, "b": spread * b, "v": (k + 1) * torch.arange(4.0)})
    made[1] = {**made[1], "w": made[0]["w"].clone(), "b": made[0]["b"].clone()}
    return made


def by_loops(models, layers, measure, sharpness):
    """α[i][l][j] by the definition."""
    n = len(models)
    flat = [
        [torch.cat([m[name].double().flatten() for name in names]).tolist() for names in layers.values()]
        for m in models
    ]

    def dot(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True))

    def squared(a, b):
        return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))

    alpha = torch.zeros(n, len(layers), n, dtype=torch.float64)
    for layer in range(len(layers)):
        of = [one[layer] for one in flat]
        pairs = [squared(of[i], of[j]) for i in range(n) for j in range(n) if i != j]
        for i in range(n):
            if measure == "cosine":
                s = [dot(of[i], of[j]) / math.sqrt(dot(of[i], of[i]) * dot(of[j], of[j])) for j in range(n)]
            else:
                s = [-squared(of[i], of[j]) / (sum(pairs) / len(pairs)) for j in range(n)]
            whole = sum(math.exp(sharpness * value) for value in s)
            alpha[i, layer] = torch.tensor([math.exp(sharpness * value) / whole for value in s])
    return alpha


@pytest.mark.parametrize("measure", ["cosine", "distance"])
@pytest.mark.parametrize("layers", [LAYERS, {"model": ["w", "b", "v"]}], ids=["layer-wise", "model-wise"])
def test_weights_are_those_of_loops(measure, layers):
    made = models()
    wanted = by_loops(made, layers, measure, 2.5)
    found = layer_similarity_weights(made, layers, [2, 0], measure, 2.5)
    torch.testing.assert_close(found.double(), wanted[[2, 0]], rtol=1e-5, atol=1e-6)
    assert layer_similarity_weights(made, layers, range(4), measure, 2.5).sum(2).allclose(torch.ones(4, len(layers)))


def test_layers_are_weighed_each_by_itself():
    """Clients 0 and 1 share a body, and are as far apart in the head as others: only single layers show that."""
    layer_wise = layer_similarity_weights(models(), LAYERS, [0], "distance", 50.0)[0]
    assert layer_wise[0].tolist() == pytest.approx([0.5, 0.5, 0, 0], abs=1e-3)
    assert layer_wise[1, 0] > 0.9
    assert layer_similarity_weights(models(), LAYERS, [0], "cosine", 50.0)[0, 1].tolist() == pytest.approx(
        [0.25] * 4
    )  # one direction


@pytest.mark.parametrize("measure", ["cosine", "distance"])
def test_invariances(measure):
    """The order of clients, and the scale of all weights together; models that hardly differ are told apart."""
    made, order = models(), [3, 1, 0, 2]
    found = layer_similarity_weights(made, LAYERS, range(4), measure, 2.0)
    turned = layer_similarity_weights([made[k] for k in order], LAYERS, range(4), measure, 2.0)
    torch.testing.assert_close(turned, found[order][:, :, order])
    scaled = [{n: 8 * t for n, t in m.items()} for m in made]
    torch.testing.assert_close(layer_similarity_weights(scaled, LAYERS, range(4), measure, 2.0), found)
    if measure == "distance":
        near = layer_similarity_weights(models(spread=1e-3), {"w": ["w", "b"]}, range(4), measure, 2.0)
        torch.testing.assert_close(near, found[:, :1], rtol=1e-2, atol=1e-3)


def test_equal_models_weigh_alike():
    alike = [{"w": torch.ones(3)}, {"w": torch.ones(3)}]
    zero = [{"w": torch.zeros(3)}] * 2
    for made in (alike, zero, alike[:1]):
        for measure in ("cosine", "distance"):
            found = layer_similarity_weights(made, {"w": ["w"]}, range(len(made)), measure, 9.0)
            assert found.flatten().tolist() == [1 / len(made)] * len(made) ** 2


def test_without_sharpness_it_is_unweighted_fedavg():
    mixed = federate(PFedLA(weights="similarity", sharpness=0.0, **OPTIONS))
    same_models(mixed, federate(FedAvg(weighted=False, buffers="local", **OPTIONS)), rtol=1e-4, atol=1e-4)


def test_very_sharp_it_is_local():
    """From the round on in which clients differ; in the first all are the same model."""
    alone = federate(PFedLA(weights="similarity", sharpness=1e9, **OPTIONS))
    same_models(alone, federate(Local(**OPTIONS)), rtol=1e-3, atol=1e-4)  # rounding, amplified by training


@pytest.mark.thorough
@pytest.mark.parametrize(("layer", "number"), [("module", 3), ("model", 1)])
def test_nothing_is_learned_and_the_weights_are_kept_for_plots(layer, number, tmp_path):
    method = PFedLA(weights="similarity", layer=layer, **OPTIONS)
    run = federate(method, out=tmp_path / "run", clients_per_round=2)
    assert run.last.state["hypernetworks"] == {}
    models_now = [run.last.state["models"][c] for c in run.last.state["clients"]]
    wanted = by_loops(models_now, run.last.state["layers"], "distance", 3.0)
    found = method.analysis(run.last.state, run.last.state["clients"])
    assert found["alpha"].shape == (3, number, 3)
    torch.testing.assert_close(found["alpha"].double(), wanted, rtol=1e-4, atol=1e-5)
    assert found["zero_rows"] == 0
    resumed = pf.resume(tmp_path / "run", clients=small_clients(), workers=0)
    same_models(run, resumed, rtol=0, atol=0)


def test_retained_layers_are_those_that_rely_on_oneself_most():
    """A layer in which nobody is like the client has the largest own weight; all layers are Local."""
    run = federate(HeurPFedLA(k=3, weights="similarity", **OPTIONS))
    same_models(run, federate(Local(**OPTIONS)), rtol=0, atol=0)
    one = federate(HeurPFedLA(k=1, weights="similarity", **OPTIONS))
    none = federate(PFedLA(weights="similarity", **OPTIONS))
    assert one.history[-1]["bytes_down"] < none.history[-1]["bytes_down"]
