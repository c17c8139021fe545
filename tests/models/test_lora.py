"""Adapters of polyfed: what they compute, which layers get them, what is trained, and that peft agrees."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.messages.lora import find_adapters
from polyfed.models.lora import LoRALinear, add_lora
from polyfed.testing import small_clients


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.conv, self.norm = nn.Conv1d(1, 1, 1), nn.LayerNorm(4)

    def forward(self, x):
        return self.out(self.norm(self.query(x) * self.key(x)))


def test_a_layer_computes_the_scaled_product_beside_the_frozen_one():
    base = nn.Linear(4, 3)
    layer = LoRALinear(base, rank=2, alpha=5.0)
    x = torch.randn(7, 4)
    assert torch.equal(layer(x), base(x)), "B is zero at first"
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert (a.shape, b.shape) == ((2, 4), (3, 2))
    assert a.abs().min() > 0
    nn.init.normal_(b)
    torch.testing.assert_close(layer(x), base(x) + 2.5 * x @ a.T @ b.T)
    layer(x).sum().backward()
    assert base.weight.grad is None
    assert a.grad is not None


def test_named_layers_get_adapters_and_all_else_is_frozen():
    network = add_lora(Block(), 3, alpha=6.0, layers=["query", "k*"], train=["out.*", "norm.weight"])
    assert {pair.layer for pair in find_adapters(network.state_dict())} == {"query", "key"}
    assert network.query.scaling == {"default": 2.0}
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    factors = {f"{layer}.lora_{part}.default.weight" for layer in ("query", "key") for part in "AB"}
    assert trained == {*factors, "out.weight", "out.bias", "norm.weight"}
    everywhere = add_lora(Block(), 1, train=["out.*"])
    assert {pair.layer for pair in find_adapters(everywhere.state_dict())} == {"query", "key"}, "out is trained itself"


def test_networks_of_other_scales_are_other_architectures():
    given, factories = (
        small_clients(2),
        [lambda a=a: add_lora(nn.Sequential(nn.Linear(6, 3)), 2, alpha=a) for a in (2.0, 4.0)],
    )
    people = [pf.Client(c.id, factory, c.train, c.test) for c, factory in zip(given, factories, strict=True)]
    with pytest.raises(pf.UserError, match="needs one architecture"):
        pf.federate(people, "fedavg", rounds=1, workers=0)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"rank": 0}, "rank must be a whole number from 1, got 0"),
        ({"rank": 2, "alpha": 0.0}, "alpha must be above 0, got 0.0"),
        ({"rank": 2, "layers": ["quarry"]}, "layers has 'quarry', and nothing is named so; did you mean query"),
        ({"rank": 2, "train": ["head.*"]}, "train has 'head"),
        ({"rank": 2, "layers": "query"}, r"layers must be a list of patterns, got 'query'; write \['query'\]"),
        ({"rank": 2, "layers": ["out"], "train": ["out.*"]}, "no linear layer is named like"),
    ],
)
def test_what_fits_nothing_is_refused(words, sentence):
    with pytest.raises(pf.UserError, match=sentence):
        add_lora(Block(), **words)


@pytest.mark.slow  # peft imports transformers
def test_names_and_outputs_are_those_of_peft():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    ours = add_lora(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), 2, alpha=4.0, layers=["0"])
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["0"])
    theirs = peft.get_peft_model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), config)
    nn.init.normal_(ours[0].lora_B["default"].weight)
    theirs.load_state_dict({f"base_model.model.{name}": tensor for name, tensor in ours.state_dict().items()})
    x = torch.randn(5, 6)
    torch.testing.assert_close(ours(x), theirs(x))
