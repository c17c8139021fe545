"""One site of three sends hostile replies, to every method: with `on_error="skip"` the run goes on without it.

Each case is a kind of reply that the first client sends in both rounds of a run. A kind that no method can mean is refused
in each round, with a sentence that names the client. The others have the right form, and values that no training gives:
whether they are refused or not, the run ends well, all states are finite and the other clients have finite losses.

    python tests/hostile/test_replies.py [METHOD ...]      the table of all cases
"""

import dataclasses
import math
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.core.algorithm import Message
from polyfed.core.state_dict import iter_tensors
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.testing import example_of

# -- replies -----------------------------------------------------------------------------------------------------------


def all_tensors(change):
    """Each tensor as `change` makes it."""
    return lambda r: Message({g: {n: change(t) for n, t in tree.items()} for g, tree in r.tensors.items()}, r.scalars)


def full(value):
    """Floating-point tensors full of one number."""
    return all_tensors(lambda t: torch.full_like(t, value) if t.is_floating_point() else t)


def one_number(value):
    """One number is another."""

    def change(t):
        if not t.is_floating_point() or not t.numel():
            return t
        t = t.clone(memory_format=torch.contiguous_format)
        t.view(-1)[-1] = value
        return t

    return all_tensors(change)


def trees(change):
    """Each group as `change` makes it of its tensors by name."""
    return lambda r: Message({g: change(dict(tree)) for g, tree in r.tensors.items()}, r.scalars)


def groups(change):
    """The groups as `change` makes them."""
    return lambda r: Message(change(dict(r.tensors)), r.scalars)


def scalars(change):
    """The numbers as `change` makes them."""
    return lambda r: Message(r.tensors, change(dict(r.scalars)))


def each_scalar(value):
    """All numbers of the reply are this one."""
    return scalars(lambda s: dict.fromkeys(s, value))


REFUSED = {
    # values
    "NaN": full(math.nan),
    "infinity": full(math.inf),
    "minus infinity": full(-math.inf),
    "one NaN": one_number(math.nan),
    "one infinity": one_number(math.inf),
    # types
    "float64": all_tensors(lambda t: t.double() if t.is_floating_point() else t.float()),
    "float16": all_tensors(torch.Tensor.half),
    "bfloat16": all_tensors(torch.Tensor.bfloat16),
    "int32": all_tensors(torch.Tensor.int),
    "bool": all_tensors(torch.Tensor.bool),
    "complex": all_tensors(lambda t: t.to(torch.complex64)),
    "sparse": all_tensors(lambda t: t.to_sparse() if t.dim() else t.reshape(1).to_sparse()),
    "quantised": all_tensors(lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)),
    "another device": all_tensors(lambda t: t.to("meta")),
    "arrays of numpy": all_tensors(lambda t: t.numpy()),
    "lists": all_tensors(lambda t: t.tolist()),
    "texts": all_tensors(str),
    "None": all_tensors(lambda t: None),
    # shapes
    "0 dimensions": all_tensors(lambda t: t.sum().to(t.dtype) if t.dim() else t[None]),
    "a dimension more": all_tensors(lambda t: t[None]),
    "flat": all_tensors(lambda t: t.reshape(-1, 1) if t.dim() != 2 or t.shape[1] != 1 else t.reshape(-1)),
    "no numbers": all_tensors(lambda t: t.new_empty(0) if t.shape != (0,) else t.new_empty(0, 1)),
    "twice as large": all_tensors(lambda t: torch.cat([t, t]) if t.dim() else t.repeat(2)),
    "views of one number": all_tensors(lambda t: t.reshape(-1)[:1].expand(7, 10**6)),
    # names
    "a tensor is missing": trees(lambda tree: dict(list(tree.items())[1:])),
    "a tensor more": trees(lambda tree: {**tree, "more": torch.ones(2)}),
    "other names": trees(lambda tree: {f"x{n}": t for n, t in tree.items()}),
    "names that are numbers": trees(lambda tree: dict(enumerate(tree.values()))),
    "names like paths": trees(lambda tree: {f"../{n}": t for n, t in tree.items()}),
    "no tensors": trees(lambda tree: {}),
    "a list of tensors": trees(lambda tree: list(tree.values())),
    "groups in groups": trees(lambda tree: {"model": tree}),
    "a group is None": trees(lambda tree: None),
    "no groups": groups(lambda found: {}),
    "a group more": groups(lambda found: {**found, "more": {"w": torch.ones(2)}}),
    "other groups": groups(lambda found: {f"x{g}": tree for g, tree in found.items()}),
    "groups that are None": groups(lambda found: None),
    # numbers
    "numbers that are NaN": each_scalar(math.nan),
    "numbers that are infinite": each_scalar(math.inf),
    "numbers that are texts": each_scalar("20"),
    "numbers that are true": each_scalar(True),
    "numbers that are None": each_scalar(None),
    "numbers that are lists": each_scalar([20]),
    "numbers that are tensors": each_scalar(torch.tensor(20.0)),
    "complex numbers": each_scalar(20j),
    "whole numbers of 400 digits": each_scalar(10**400),
    "a negative count": scalars(lambda s: {**s, "num_examples": -5}),
    "a count of 0": scalars(lambda s: {**s, "num_examples": 0}),
    "numbers that are none": lambda r: Message(r.tensors, None),
    # something else
    "nothing": lambda r: None,
    "a dict": lambda r: {"tensors": r.tensors},
    "a text": lambda r: "reply",
    "the class": lambda r: Message,
}
"""No method can mean these."""

ODD = {
    "3e38": full(3e38),
    "-3e38": full(-3e38),
    "one 3e38": one_number(3e38),
    "1e15": full(1e15),
    "1e-45": full(1e-45),
    "zeros": full(0.0),
    "not contiguous": all_tensors(lambda t: torch.stack([t, t], -1)[..., 0]),
    "shared memory": all_tensors(lambda t: t.reshape(-1)[0].expand(t.shape) if t.numel() else t),
    "another order": trees(lambda tree: dict(reversed(tree.items()))),
    "parameters": all_tensors(lambda t: torch.nn.Parameter(t) if t.is_floating_point() else t),
    "10^12 examples": scalars(lambda s: {**s, "num_examples": 10**12}),
    "10^300 examples": scalars(lambda s: {**s, "num_examples": 1e300}),
    "a hundredth of an example": scalars(lambda s: {**s, "num_examples": 1.01}),
    "numbers that are huge": each_scalar(1e300),
    "numbers that are negative": scalars(lambda s: {n: -1.0 if n != "num_examples" else 1 for n in s}),
    "no numbers at all": scalars(lambda s: {}),
    "a thousand numbers more": scalars(lambda s: {**s, **{f"s{k}": 1.0 for k in range(1000)}}),
}
"""These have the right form."""

KINDS = {**REFUSED, **ODD}


# -- runs --------------------------------------------------------------------------------------------------------------


def method_of(name):
    """A method, small."""
    return example_of(name).build()


def clients_of(name):
    """Three clients whom it suits."""
    return example_of(name).clients()


def broken(name, kind, rounds=2):
    """What a hostile reply does to a run: None if it does no harm, else a sentence; and whether it was refused."""
    change, honest, changed = KINDS[kind], InProcessEngine.run, set()

    def run(engine, tasks):
        for result in honest(engine, tasks):
            if result.task.phase == "local" and result.task.client == "client-0" and result.failure is None:
                reply = change(result.reply)
                if not _same(reply, result.reply):  # where no tensors are sent, none of them can be hostile
                    changed.add(result.task.round)
                result = dataclasses.replace(result, reply=reply)
            yield result

    method, words = method_of(name), {"public": example_of(name).public()}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(InProcessEngine, "run", run)
        try:
            found = pf.federate(clients_of(name), method, rounds=rounds, seed=3, workers=0, on_error="skip", **words)
        except Exception as error:
            return f"ends the run: {type(error).__name__}: {' '.join(str(error).split())[:150]}", False
    failures = [(r["round"], f["client"], f["phase"]) for r in found.history for f in r["failures"]]
    phases = (
        "reply",
        "local",
        "aggregate",
    )  # the last are replies that have no mean with the others, or spoil the state
    refused = bool(changed) and all({(r, "client-0", phase) for phase in phases} & {*failures} for r in changed)
    if others := sorted({f"{client} in {phase}" for _, client, phase in failures if client != "client-0"}):
        return f"makes fail: {', '.join(others)}", refused
    if any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in iter_tensors(found.last.state)):
        return "leaves a state that is not finite", refused
    losses = {i: found.history[-1]["clients"][i].get("loss", 0.0) for i in ("client-1", "client-2")}
    if odd := [i for i, loss in losses.items() if not math.isfinite(loss)]:
        return f"leaves {odd[0]} with a loss of {losses[odd[0]]}", refused
    must = kind in REFUSED or (kind == "no numbers at all" and method.scalars_needed)
    if must and changed and not refused:
        return "is taken", refused
    return None, refused


def _same(one, other):
    """Whether a reply was not changed at all, as far as can be seen."""
    if not isinstance(one, Message) or not isinstance(one.tensors, dict) or not isinstance(one.scalars, dict):
        return False
    if one.tensors.keys() != other.tensors.keys() or repr(one.scalars) != repr(other.scalars):
        return False
    return all(
        isinstance(tree, dict)
        and tree.keys() == other.tensors[g].keys()
        and all(t is other.tensors[g][n] for n, t in tree.items())
        for g, tree in one.tensors.items()
    )


def harms(name, kinds):
    """Which kinds do harm to a method, and what."""
    return {kind: found for kind in kinds if (found := broken(name, kind)[0])}


def test_there_are_forty_kinds():
    assert len(KINDS) >= 40


@pytest.mark.thorough
def test_a_quarter_of_them_does_no_harm_to_fedavg():
    assert not harms("fedavg", list(KINDS)[::4])


def eighth(name):
    """The kinds of which CI tries a method: others for each of eight methods, so that all are tried."""
    return list(KINDS)[list(REGISTRY).index(name) % 8 :: 8]


@pytest.mark.slow  # .ci/run has it
@pytest.mark.parametrize("name", REGISTRY)
def test_an_eighth_of_them_does_no_harm(name):
    assert not harms(name, eighth(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", REGISTRY)
def test_no_hostile_reply_ends_or_poisons_a_run(name):
    assert not harms(name, [kind for kind in KINDS if kind not in eighth(name)])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    for name in sys.argv[1:] or REGISTRY:
        results = {kind: broken(name, kind) for kind in KINDS}
        counts = Counter("harm" if harm else "refused" if refused else "harmless" for harm, refused in results.values())
        print(
            f"{name:14s} {len(results)} cases, {counts['refused']} refused, {counts['harmless']} harmless, "
            f"{counts['harm']} harmful",
            flush=True,
        )
        for kind, (harm, _) in results.items():
            if harm:
                print(f"    {kind}: {harm}", flush=True)
