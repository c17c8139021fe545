"""What a user's own method may get wrong is said before training, or names the method, its part and what was expected."""

import re
from dataclasses import dataclass

import pytest
import torch

import polyfed as pf
from polyfed.algorithms.base.averaging import Averaging
from polyfed.core.errors import ClientError
from polyfed.testing import small_clients


def _define(**parts):
    """Returns a method on `Averaging` with these parts, as one written from the page on adding a method."""
    return dataclass(frozen=True, kw_only=True)(type("Mine", (Averaging,), {"__doc__": "Mine.", **parts}))


def _run(**parts):
    return pf.federate(small_clients(), _define(**parts)(), rounds=1, engine="inprocess", progress=False)


def test_a_private_helper_may_have_a_name_like_one_of_the_base():
    private = next(name for name in dir(Averaging) if name.startswith("_") and not name.startswith("__"))
    assert _define(**{f"{private}s": lambda self: 0, private.strip("_"): lambda self: 0})


def _refuse_to_train(self, message, client_state, client, seed):
    raise AssertionError("training began")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"server_step": lambda self, server_state, mean: mean},
            r"Mine.server_step takes \(server_state, mean\), but gets \(server_state, mean, client_ids\): write def "
            r"server_step\(self, server_state, mean, client_ids\)",
        ),
        ({"aggregate": lambda self, server_state, replies: server_state}, r"Mine.aggregate takes .*replies, server\)$"),
        ({"client_init": lambda self, client: {}}, r"write def client_init\(self, client, seed\)"),
        (
            {"local_update": lambda self, client, message, client_state, seed: 0},
            r"takes \(client, message, client_state",
        ),
        ({"personal_model": lambda self, message, state, client: 0}, "Mine.personal_model takes"),
        ({"agregate": lambda self: 0}, "Mine.agregate overrides nothing, .*; did you mean aggregate?"),
    ],
)
def test_a_part_with_other_arguments_or_a_misspelt_name_is_refused_when_the_class_is_made(parts, message):
    with pytest.raises(TypeError, match=message):
        _define(**parts)


def test_a_method_without_parts_is_told_which_base_has_them():
    part = {"dispatch": lambda self, server_state, client_info: pf.Message()}
    expected = (
        "Mine lacks aggregate, client_init, local_update, personal_model, server_init: write them, or begin with a base "
        "that has them, as in class Mine(polyfed.algorithms.base.Averaging)"
    )
    with pytest.raises(TypeError, match=re.escape(expected)):
        dataclass(frozen=True)(type("Mine", (pf.Algorithm,), part))()


def test_a_method_shows_the_fields_that_are_not_its_defaults():
    assert repr(pf.algorithms.FedProx(mu=0.1, lr=0.01)) == "FedProx(mu=0.1)"
    assert repr(pf.algorithms.Local()) == "Local()"
    required = _define(__annotations__={"scale": float})
    assert repr(required(scale=0.25)) == "Mine(scale=0.25)"
    scaled = _define(scale=0.5, __annotations__={"scale": float})
    assert (repr(scaled()), repr(scaled(scale=0.25))) == ("Mine()", "Mine(scale=0.25)")
    own = dataclass(frozen=True, kw_only=True)(type("Mine", (Averaging,), {"__repr__": lambda self: "mine"}))
    assert repr(own()) == "mine"
    assert {repr(kind()) for kind in pf.algorithms.REGISTRY.values()} == {
        f"{kind.__name__}()" for kind in pf.algorithms.REGISTRY.values()
    }


def test_other_names_of_arguments_and_further_ones_with_defaults_may_be_chosen():
    _define(server_step=lambda self, state, mean, ids, scale=1.0: mean, dispatch=lambda self, *arguments: None)
    _define(client_update=lambda self: None)  # a helper of the method's own


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        (
            {"client_init": lambda self, client, seed: {"net": client.model()}},
            TypeError,
            "Mine.client_init: the private state at 'net' is a SmallNet; keep dicts",
        ),
        ({"client_init": lambda *_: None}, TypeError, "Mine.client_init: the private state is a NoneType, not a dict"),
        ({"server_init": lambda self, server: {"model": server.model()}}, TypeError, "state at 'model' is a SmallNet"),
        ({"server_init": lambda *_: [torch.zeros(2)]}, TypeError, "Mine: the server's state is a list, not a dict"),
        (
            {"server_init": lambda *_: {"model": {1: 2}}},
            TypeError,
            "state at 'model' has the key 1; keep dicts with string",
        ),
        ({"server_init": lambda *_: None}, pf.UserError, r"Mine: .* groups=\('model',\), .* has NoneType; server_init"),
        ({"groups": ("modle",)}, pf.UserError, r"each of groups=\('modle',\), a tuple of names, and has model;"),
        ({"groups": "model"}, pf.UserError, "each of groups='model', a tuple of names"),
        (
            {"dispatch": lambda self, server_state, client_info: pf.Message(server_state["model"])},
            pf.UserError,
            "Mine: dispatch must return a polyfed.Message, .*, got tensors that are in no group",
        ),
    ],
)
def test_states_and_messages_of_another_form_are_refused_before_training(parts, error, message):
    with pytest.raises(error, match=message):
        _run(**parts, local_update=_refuse_to_train)


def _divide_by_zero(self, message, client_state, client, seed):
    return 1 / 0


@pytest.mark.parametrize("engine", ["inprocess", "pool"])
def test_a_failure_in_ones_own_method_names_its_line(engine):
    line = _divide_by_zero.__code__.co_firstlineno + 1
    reason = "ZeroDivisionError: division by zero"
    place = re.escape(f" ({__file__}, line {line}, in _divide_by_zero)")
    with pytest.raises(ClientError, match=f"{reason}.*{place}$") as failure:
        pf.federate(small_clients(), _define(local_update=_divide_by_zero)(), rounds=1, engine=engine, workers=1)
    assert "line" not in failure.value.reason  # which a site sends to its server


def _lose_a_tensor(self, server_state, mean, client_ids):
    return {"model": {name: tensor for name, tensor in mean["model"].items() if name != "body.0.weight"}}


def _halve_counters(self, server_state, mean, client_ids):
    return {"model": {name: tensor / 2 for name, tensor in mean["model"].items()}}


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        (
            {"server_step": _halve_counters},
            pf.UserError,
            "Mine: group 'model' .* changes the type of body.1.num_batches_tracked in server_step, to torch.float32; keep",
        ),
        (
            {"server_step": _lose_a_tensor},
            pf.UserError,
            "Mine: group 'model' of the server's state loses body.0.weight in server_step, which must return the whole",
        ),
        (
            {"server_step": lambda self, server_state, mean, client_ids: mean["model"]},
            pf.UserError,
            "Mine: group 'model' .* loses body.0.bias, body.0.weight, body.1.bias and 6 more in server_step",
        ),
        (
            {"aggregate": lambda self, server_state, replies, server: server_state["model"]},
            pf.UserError,
            "and has body.0.bias, body.0.weight, body.1.bias and 6 more; server_init, and aggregate or server_step",
        ),
        (
            {
                "local_update": lambda self, message, client_state, client, seed: (
                    message,
                    {"a": client_state["control"]},
                )
            },
            ClientError,
            "KeyError: 'control'; groups: model, scalars: lr, private state: none",
        ),
        (
            {"other_models": lambda self, message, client_state, client, seed: [torch.nn.Identity()]},
            ClientError,
            "Mine.other_models must yield a name and a torch.nn.Module, .*, got Identity",
        ),
    ],
)
def test_what_is_found_in_the_first_round_names_the_part(parts, error, message):
    with pytest.raises(error, match=message):
        _run(**parts)


def test_hyper_parameters_that_no_run_would_keep_are_refused():
    for parts in ({"__annotations__": {"mu": float}, "mu": 0.1}, {"__init__": lambda self, mu=0.1: None}):
        kind = type("Mine", (Averaging,), {"__doc__": "Mine.", **parts})
        with pytest.raises(
            TypeError, match=r"Mine must be a dataclass: .*; write @dataclass\(frozen=True, kw_only=True\)"
        ):
            kind(mu=0.3)
    assert (
        type("Mine", (Averaging,), {})().lr == Averaging().lr
    )  # without hyper-parameters of its own it needs no decorator


def test_an_error_of_the_server_half_has_a_note_on_the_round_and_the_groups():
    with pytest.raises(KeyError, match="control") as caught:
        _run(server_step=lambda self, server_state, mean, client_ids: {"model": mean["control"]})
    (note,) = caught.value.__notes__
    assert re.fullmatch(
        r"polyfed: round 1, in aggregate or server_step of .*Mine; groups of the server's state: model", note
    )
