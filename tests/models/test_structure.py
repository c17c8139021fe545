"""Heads, bodies, norm layers and representations of networks whose names mislead."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from polyfed.core.errors import UserError
from polyfed.core.seeds import temporary_rng_seed
from polyfed.models import build
from polyfed.models.structure import (
    compute_batch_representation,
    find_head_modules,
    find_representation_module,
    norm_layer_tensor_names,
    split_body_and_head,
    tensor_names_by_module,
)


class Net(nn.Module):
    """A network whose modules and forward a test gives as they come."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def misleading() -> Net:
    """The head is called embedding, the body classifier; registered in the opposite order of use; fc_head never runs."""
    return Net(
        lambda net, x: net.embedding(net.classifier(x).relu()),
        embedding=nn.Linear(5, 2),
        fc_head=nn.Linear(5, 2),
        classifier=nn.Linear(4, 5),
    )


def test_the_head_is_found_by_order_of_execution() -> None:
    model = misleading()
    assert find_head_modules(model, X) == ("embedding",)
    body, head = split_body_and_head(model, find_head_modules(model, X))
    assert head == ("embedding.weight", "embedding.bias")
    assert body == ("fc_head.weight", "fc_head.bias", "classifier.weight", "classifier.bias")
    assert find_head_modules(model, X, num_layers=2) == ("classifier", "embedding")
    assert find_head_modules(model, X, num_layers=9) == ("classifier", "embedding")  # fc_head never runs
    assert find_representation_module(model, X) == "embedding"


def test_an_empty_head() -> None:
    model = misleading()
    assert find_head_modules(model, X, num_layers=0) == ()
    assert split_body_and_head(model, ()) == (tuple(model.state_dict()), ())


def test_the_users_word_counts() -> None:
    model = misleading()
    assert find_head_modules(model, X, names=["classifier"]) == ("classifier",)
    with pytest.raises(UserError, match="no such module; did you mean classifier"):
        find_head_modules(model, X, names=["clasifier"])
    with pytest.raises(UserError, match="Flatten has no parameters"):
        find_head_modules(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), X, names=["0"])
    with pytest.raises(UserError, match="num_layers=-1"):
        find_head_modules(model, X, num_layers=-1)
    with pytest.raises(UserError, match="did you mean embedding"):
        split_body_and_head(model, ["embeding"])


def test_an_auxiliary_branch_that_runs_last_is_no_head() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.body(x).relu()
        out: Tensor = net.out(hidden)
        net.auxiliary(hidden)  # computed and dropped
        return out

    model = Net(forward, body=nn.Linear(4, 5), out=nn.Linear(5, 2), auxiliary=nn.Linear(5, 7))
    assert find_head_modules(model, X) == ("out",)
    assert find_representation_module(model, X) == "out"
    for parameter in model.parameters():  # a frozen network has a head all the same
        parameter.requires_grad_(False)
    with torch.inference_mode():
        assert find_head_modules(model, X) == ("out",)
        assert find_head_modules(model, X.clone()) == ("out",)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("wrap", [lambda y: (y, None), lambda y: {"logits": [y]}])
def test_outputs_in_containers(wrap: Callable[[Tensor], Any]) -> None:
    model = Net(lambda net, x: wrap(net.out(net.body(x))), out=nn.Linear(4, 2), body=nn.Linear(4, 4))
    assert find_head_modules(model, X) == ("out",)


def test_an_output_without_gradient_takes_the_last_layer_that_runs() -> None:
    model = Net(lambda net, x: net.out(net.body(x)).argmax(1), out=nn.Linear(4, 2), body=nn.Linear(4, 4))
    assert find_head_modules(model, X) == ("out",)


def test_norms_go_along_with_the_layer_they_follow() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 2), nn.BatchNorm1d(2))
    assert find_head_modules(model, X) == ("3", "4")
    assert find_head_modules(model, X, num_layers=2) == ("0", "1", "3", "4")
    body, head = split_body_and_head(model, ("3", "4"))
    assert body == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert head[2:] == ("4.weight", "4.bias", "4.running_mean", "4.running_var", "4.num_batches_tracked")


def test_a_layer_used_again_counts_at_its_last_use() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.again(net.middle(net.again(x)))  # type: ignore[no-any-return]

    model = Net(forward, again=nn.Linear(4, 4), middle=nn.Linear(4, 4))
    assert find_head_modules(model, X) == ("again",)
    assert find_head_modules(model, X, num_layers=2) == ("middle", "again")
    assert torch.equal(compute_batch_representation(model, X), model.middle(model.again(X)))  # type: ignore[operator]


def test_one_module_under_two_names() -> None:
    shared = nn.Linear(4, 4)
    model = Net(lambda net, x: net.out(net.two(net.one(x))), one=shared, two=shared, out=nn.Linear(4, 2))
    assert find_head_modules(model, X, num_layers=2) == ("one", "out")
    body, head = split_body_and_head(model, ["two"])
    assert head == ("one.weight", "one.bias", "two.weight", "two.bias")  # one tensor cannot be on both sides
    assert body == ("out.weight", "out.bias")
    assert tensor_names_by_module(model) == {
        "one": ("one.weight", "one.bias", "two.weight", "two.bias"),
        "out": ("out.weight", "out.bias"),
    }


def test_shared_weights_follow_the_head() -> None:
    model = Net(lambda net, x: net.out(net.tokens(x).mean(1)), tokens=nn.Embedding(9, 4), out=nn.Linear(4, 9))
    model.out.weight = model.tokens.weight
    tokens = torch.tensor([[1, 2], [3, 4]])
    assert find_head_modules(model, tokens) == ("out",)
    assert split_body_and_head(model, ("out",)) == ((), ("tokens.weight", "out.weight", "out.bias"))
    assert tensor_names_by_module(model) == {"tokens": ("tokens.weight", "out.weight"), "out": ("out.bias",)}


def test_module_lists_and_dicts() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        for layer in net.layers:
            x = layer(x).relu()
        return net.heads["b"](x)  # type: ignore[no-any-return]

    heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2), "c": nn.Linear(4, 2)})
    model = Net(forward, heads=heads, layers=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    assert find_head_modules(model, X) == ("heads.b",)
    assert split_body_and_head(model, ["heads"])[1] == tuple(n for n in model.state_dict() if n.startswith("heads."))
    assert find_head_modules(model, X, num_layers=3) == ("layers.0", "layers.1", "heads.b")


def test_the_model_may_be_the_layer() -> None:
    model = nn.Linear(4, 2)
    assert find_head_modules(model, X) == ("",)
    assert split_body_and_head(model, [""]) == ((), ("weight", "bias"))
    assert tensor_names_by_module(model) == {"": ("weight", "bias")}
    assert torch.equal(compute_batch_representation(model, X), X)
    assert norm_layer_tensor_names(nn.LayerNorm(3)) == ("weight", "bias")


def test_no_layers_at_all() -> None:
    with pytest.raises(UserError, match="no parametric layer"):
        find_head_modules(nn.Flatten(), X)
    with pytest.raises(UserError, match=r"no nn.Linear"):
        compute_batch_representation(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), IMAGES)


def test_parametrised_layers_are_layers() -> None:
    model = nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.ReLU(), weight_norm(nn.Linear(4, 2)))
    assert find_head_modules(model, X) == ("2",)
    assert split_body_and_head(model, ["2"])[1] == tuple(n for n in model.state_dict() if n.startswith("2."))
    owners = tensor_names_by_module(model)
    assert set(owners) == {"0", "2"}
    assert sorted(n for names in owners.values() for n in names) == sorted(model.state_dict())
    assert find_representation_module(model, X) == "2"


def test_attention_whose_output_layer_is_never_called() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = Net(lambda net, x: net.out(net.encoder(x).mean(1)), out=nn.Linear(8, 3), encoder=encoder)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert find_head_modules(model, x) == ("out",)
    with torch.inference_mode():
        assert compute_batch_representation(model, x).shape == (2, 8)
    assert tensor_names_by_module(model)["encoder.self_attn"] == (
        "encoder.self_attn.in_proj_weight",
        "encoder.self_attn.in_proj_bias",
    )


@pytest.mark.parametrize(
    ("name", "shape", "head"),
    [
        ("mlp", (1, 8, 8), "fc2"),
        ("cnn_small", (1, 8, 8), "fc2"),
        ("resnet18", (3, 16, 16), "fc"),
        ("flha_arch2", (3, 16, 16), "fc"),
        ("vit", (1, 8, 8), "head"),
        ("lstm", (25,), "fc2"),
    ],
)
def test_heads_and_representations_of_the_zoo(name: str, shape: tuple[int, ...], head: str) -> None:
    sizes = {"width": 4} if name in ("resnet18", "flha_arch2") else {}
    with temporary_rng_seed(0):
        model = build(name, shape, 5, **sizes)
    x = torch.ones(2, *shape, dtype=torch.int64) if name == "lstm" else torch.ones(2, *shape)
    assert find_head_modules(model, x) == (head,)
    body, last = split_body_and_head(model, (head,))
    assert last == (f"{head}.weight", f"{head}.bias")
    assert set(body) | set(last) == set(model.state_dict())
    phi = compute_batch_representation(model, x)
    linear: Any = model.get_submodule(head)
    model.eval()
    assert phi.shape == (2, linear.in_features)
    assert torch.allclose(linear(phi), model(x), atol=1e-6)


def test_a_class_token_and_positions_are_body() -> None:
    model = build("vit", (1, 8, 8), 5, dim=8, pool="cls")
    body, _ = split_body_and_head(model, find_head_modules(model, torch.zeros(1, 1, 8, 8), num_layers=30))
    assert body == ("cls_token", "positions")
    assert tensor_names_by_module(model)[""] == ("cls_token", "positions")


def test_norms_are_found_by_type_in_shortcuts_too() -> None:
    model = build("resnet18", (3, 16, 16), 5, width=4)
    names = norm_layer_tensor_names(model)
    assert len(names) == 20 * 5  # 17 after the 3×3 convolutions and 3 in shortcuts
    assert {f"layer2.0.shortcut.norm.{n}" for n in ("weight", "bias", "running_mean", "running_var")} < set(names)
    assert not any("conv" in n or n.startswith("fc") for n in names)


def test_every_norm_type_counts_and_names_do_not() -> None:
    class MyNorm(nn.GroupNorm):
        pass

    norms: list[nn.Module] = [
        nn.BatchNorm1d(4),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        nn.LayerNorm(4),
        MyNorm(2, 4),
        nn.RMSNorm(4),
        nn.LocalResponseNorm(2),
        nn.InstanceNorm1d(4),
    ]
    model = nn.ModuleDict({f"linear{i}": norm for i, norm in enumerate(norms)} | {"norm": nn.Linear(4, 4)})
    expected = [n for n in model.state_dict() if not n.startswith("norm.")]
    assert list(norm_layer_tensor_names(model)) == expected
    assert len(expected) == 5 + 5 + 5 + 2 + 2 + 1


def test_buffers_that_are_not_persistent_do_not_count() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("kept", torch.zeros(1))
    model.register_buffer("dropped", torch.zeros(1), persistent=False)
    assert tensor_names_by_module(model) == {"": ("weight", "bias", "kept")}


def test_owners_partition_the_state() -> None:
    for model in (build("resnet18", (3, 8, 8), 3, width=4), build("lstm", (25,), 2, num_layers=2), misleading()):
        names = [n for owned in tensor_names_by_module(model).values() for n in owned]
        assert sorted(names) == sorted(model.state_dict())
    resnet = tensor_names_by_module(build("resnet18", (3, 8, 8), 3, width=4))
    assert resnet["layer2.0.shortcut.conv"] == ("layer2.0.shortcut.conv.weight",)
    assert len(resnet["norm1"]) == 5


def dropping() -> nn.Sequential:
    with temporary_rng_seed(1):
        return nn.Sequential(
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.Dropout(0.5),
            nn.ReLU(),
            nn.Linear(6, 5),
            nn.Dropout(0.5),
            nn.Linear(5, 2),
        )


def test_representation_is_the_input_of_the_last_linear_without_dropout() -> None:
    model = dropping().train()
    model[2].eval()  # a mode of its own, which must come back
    before = {name: value.clone() for name, value in model.state_dict().items()}
    phi = compute_batch_representation(model, X)
    assert [m.training for m in model] == [True, True, False, True, True, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model)
    first, norm = model[0], model[1]
    hidden = X @ first.weight.T + first.bias
    hidden = (hidden - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
    by_hand = hidden.clamp(min=0) @ model[4].weight.T + model[4].bias
    assert torch.allclose(phi, by_hand, atol=1e-6)


def test_representation_has_gradients_where_they_are_enabled() -> None:
    model = dropping()
    compute_batch_representation(model, X).square().sum().backward()
    assert model[0].weight.grad is not None
    assert bool(model[0].weight.grad.abs().sum() > 0)
    assert model[6].weight.grad is None
    with torch.no_grad():
        assert not compute_batch_representation(model, X).requires_grad


def test_representation_of_a_named_module_and_its_refusals() -> None:
    model = dropping()
    assert compute_batch_representation(model, X, module="4").shape == (3, 6)
    with pytest.raises(UserError, match="module='9'"):
        compute_batch_representation(model, X, module="9")
    with pytest.raises(UserError, match="gets no tensor"):
        compute_batch_representation(misleading(), X, module="fc_head")
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 14), nn.Flatten())
    assert compute_batch_representation(conv, IMAGES, module="2").shape == (2, 4 * 14 * 14)


def test_representation_keeps_the_mode_when_the_model_fails() -> None:
    model = dropping().train()
    with pytest.raises(RuntimeError):
        compute_batch_representation(model, torch.zeros(3, 7), module="6")
    assert all(m.training for m in model)
    assert not model[6]._forward_pre_hooks


def test_looking_for_the_head_changes_nothing() -> None:
    model = dropping().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.random.get_rng_state()
    find_head_modules(model, X)
    assert bool((torch.random.get_rng_state() == random_state).all())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert all(m.training and not m._forward_hooks for m in model)


def test_an_lstm_with_dropout_is_deterministic() -> None:
    lstm = nn.LSTM(4, 6, 2, dropout=0.5, batch_first=True)
    model = Net(lambda net, x: net.out(net.lstm(x)[0][:, -1]), lstm=lstm, out=nn.Linear(6, 2))
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(compute_batch_representation(model, x), compute_batch_representation(model, x))
    assert lstm.training
    assert find_head_modules(model, x, num_layers=2) == ("lstm", "out")
