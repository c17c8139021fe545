"""With noise nothing but noisy numbers depends on a site's data: names, shapes, types and whole numbers of its replies are
the same for other data, or the site refuses the method before anything is trained or booked."""

import dataclasses

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.core.algorithm import Message
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection
from polyfed.deploy.protocol.wire import PROTOCOL, Envelope
from polyfed.deploy.site.site import Site
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.configuration import describe_method_and_settings
from polyfed.testing import example_of, small_clients
from tests.hostile.test_replies import clients_of, method_of

NOISE = ReplyProtection(clip_norm=1.0, noise_multiplier=2.0)
REFUSED = {
    "ifca": "shows which models it sends or asks for",
    "fedfomo": "shows which models it sends or asks for",
    "fedkd": "shows the shapes of what it sends",
    **dict.fromkeys(["fedproto", "fedgh", "fedtgp", "fd", "fedpac"], "the server takes from 0 to 1 only"),
    **dict.fromkeys(
        [name for name, method in REGISTRY.items() if "one_data_spec" in method.requires],
        "the number of classes in the site's labels",
    ),
}
CHANGES = {
    "one class": lambda x, y: (x, torch.full_like(y, 2)),
    "labels in another order": lambda x, y: (x, y.roll(1)),
    "fewer classes": lambda x, y: (x, y.clamp(max=0)),
    "fewer rows": lambda x, y: (x[:8], y[:8]),
    "other values": lambda x, y: (3 * x.flip(0), y),
}
QUICK = ("fedavg", "scaffold", "fml", *REFUSED)


def unweighted(name):
    method = method_of(name)
    return dataclasses.replace(method, weighted=False) if getattr(method, "weighted", False) else method


def tasks_of(method, name, monkeypatch):
    """What an honest server asks the first client for, in two rounds."""
    seen, run = [], InProcessEngine.run

    def watched(engine, tasks):
        tasks = list(tasks)
        seen.extend(task for task in tasks if task.phase == "local" and task.client == "client-0")
        yield from run(engine, tasks)

    monkeypatch.setattr(InProcessEngine, "run", watched)
    pf.federate(clients_of(name), method, rounds=2, seed=3, workers=0, public=example_of(name).public())
    monkeypatch.setattr(InProcessEngine, "run", run)
    return seen


def head_of(method, client, **words):
    algorithm = describe_method_and_settings(method, Settings(rounds=2))["algorithm"]
    return {"protocol": PROTOCOL, "run": "a", "algorithm": algorithm, "client": client.id, **words}


def answers(folder, client, method, tasks):
    """The site's answers to these tasks, without their noisy numbers."""
    site = Site(client.id, lambda: client, folder, allow_disclosure=True, protection=NOISE, device="cpu")
    shown = []
    for place, task in enumerate(tasks):
        head = head_of(
            method, client, kind="task", phase="local", round=place + 1, seed=1, run_seed=1, keep=0, metrics=[],
            state=place or None,
        )  # fmt: skip
        answer = site.answer_envelope(Envelope(head, Message(task.message.tensors, task.message.scalars)))
        assert not answer.head.get("refused"), answer.head
        assert not answer.head["failure"], answer.head
        forms = {
            (group, name): (tuple(t.shape), t.dtype, None if t.is_floating_point() else t.tolist())
            for group, tree in answer.body.tensors.items()
            for name, t in tree.items()
        }
        shown.append((answer.head, forms, answer.body.scalars))
    return shown


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in REGISTRY])
def test_nothing_but_noisy_numbers_depends_on_the_data(name, tmp_path, monkeypatch):
    method, client = unweighted(name), clients_of(name)[0]
    if name in REFUSED:
        site = Site(client.id, lambda: client, tmp_path, allow_disclosure=True, protection=NOISE, device="cpu")
        for kind in ("introduce", "task"):
            told = site.answer_envelope(Envelope(head_of(method, client, kind=kind, architecture="x"), Message()))
            assert REFUSED[name] in told.head["refused"]
            compatible = told.head["refused"].partition("methods that can run with noise: ")[2].split(", ")
            assert {"local", "fedavg"} <= set(compatible)
        assert not list(tmp_path.rglob("*")), "the book is touched, or a state is kept"
        return
    tasks = tasks_of(method, name, monkeypatch)
    as_it_is = answers(tmp_path / "a", client, method, tasks)
    for change, changed in CHANGES.items():
        rows = changed(client.train.input_tensor.clone(), client.train.labels.clone())
        other = pf.Client(client.id, client.model, rows, client.test, client.val)
        assert answers(tmp_path / change, other, method, tasks) == as_it_is, change


@pytest.mark.parametrize("name", ["ifca", "fedkd", "fedproto"])
def test_a_run_ends_before_round_1_with_a_sentence(name, run, tmp_path):
    """The server tells what the site says, and names methods that would do."""

    def noisy(node):
        node.config |= {"clip-norm": 1.0, "noise-multiplier": 1.0, "disclose": ""}

    with pytest.raises(
        pf.UserError, match=f"'client-0' does not take part: .*{REFUSED[name]}.* run with noise: .*fedavg, "
    ):
        run(noisy, unweighted(name))
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "sites" / "client-0").rglob("privacy.json"))


def test_where_there_is_nothing_to_choose_noise_is_enough():
    assert "choice" not in REGISTRY["ifca"](k=1).discloses
    assert "choice" in REGISTRY["ifca"](k=2).discloses


def test_heterofl_tells_no_label(tmp_path):
    """The form that it needs is that of inputs; how many outputs labels ask for is left out."""
    client = small_clients()[0]
    site = Site(client.id, lambda: client, tmp_path, allow_disclosure=True, protection=NOISE, device="cpu")
    told = site.answer_envelope(
        Envelope(head_of(REGISTRY["heterofl"](), client, kind="introduce", architecture=None), Message())
    )
    assert told.head["form"] == [[6], 1]
