"""Numbers lie in the same order in memory wherever they were, so that products of them are rounded alike."""

from dataclasses import dataclass

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FLHAGHN
from polyfed.algorithms.base.averaging import Averaging
from polyfed.core.algorithm import Message
from polyfed.core.messages.contiguous import as_contiguous, contiguous_message
from polyfed.core.state_dict import iter_tensors
from polyfed.simulation.results.unseen_clients import compute_warm_start, load_trained_server
from polyfed.testing import small_clients
from polyfed.testing.algorithm_contract import _InterruptAfter
from tests.few_cases import few


def turned(tensor):
    """The same numbers in column-major order, as an SVD leaves them."""
    return tensor.T.contiguous().T


@dataclass(frozen=True, kw_only=True)
class Turns(Averaging):
    """Turns each matrix that it makes, and writes down the order of all that it gets."""

    def server_init(self, server):
        return {**super().server_init(server), "kept": turned(torch.ones(3, 2)), "turned": 0}

    def dispatch(self, server_state, client_info):
        down = super().dispatch(server_state, client_info)
        scalars = {**down.scalars, "turned": server_state["turned"] + strides(server_state)}
        return Message({**down.tensors, "more": {"w": turned(torch.ones(3, 2))}}, scalars)

    def client_init(self, client, seed):
        return {"first": True}

    def local_update(self, message, client_state, client, seed):
        reply, _ = super().local_update(message, {}, client, seed)
        scalars = {**reply.scalars, "train_loss": message.scalars["turned"] + strides([message.tensors, client_state])}
        model = {name: turned(t) if t.dim() == 2 else t for name, t in reply.tensors["model"].items()}
        return Message({"model": model}, scalars), {"w": turned(torch.ones(3, 2)), "list": [turned(torch.ones(2, 4))]}

    def aggregate(self, server_state, replies, server):
        found = sum(strides(reply.tensors) for reply in replies.values())
        after = super().aggregate(server_state, replies, server)
        return {**after, "kept": turned(torch.ones(3, 2)), "turned": server_state["turned"] + found}


def strides(nested):
    """How many tensors are not in row-major order."""
    return sum(not tensor.is_contiguous() for tensor in iter_tensors(nested))


@pytest.mark.parametrize("workers", few([0, 2], [2]))
@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.one_case
def test_a_method_gets_row_major_numbers_whatever_it_gave(workers, stopped, tmp_path):
    """In this process, from a worker, and from a checkpoint."""
    method, out = Turns(local_epochs=1), tmp_path / "run"
    if stopped:
        with pytest.raises(KeyboardInterrupt):
            pf.federate(small_clients(), method, rounds=3, out=out, workers=workers, progress=_InterruptAfter(1))
        run = pf.resume(out, clients=small_clients(), algorithm=method, workers=workers)
    else:
        run = pf.federate(small_clients(), method, rounds=3, workers=workers)
    assert [row["train_loss"] for record in run.history for row in record["clients"].values()] == [0.0] * 9


def test_what_is_in_row_major_order_stays_the_same_object():
    kept = {"w": torch.ones(2, 3), "n": [1, None, torch.ones(2)]}
    assert as_contiguous(kept) is kept
    message = Message({"model": {"w": torch.ones(2, 3)}})
    assert contiguous_message(message) is message
    assert as_contiguous(7) == 7


def test_a_warm_start_reads_a_message_as_it_arrives(monkeypatch, tmp_path):
    found, dispatch, graph = [], FLHAGHN.dispatch, FLHAGHN.client_graph

    def left_turned(self, state, who):
        down = dispatch(self, state, who)
        parts = {
            part: {name: turned(t) if t.dim() == 2 else t for name, t in tree.items()}
            for part, tree in down.tensors.items()
        }
        return Message(parts, down.scalars)

    def seen(self, down, client):
        found.append(strides(down.tensors))
        return graph(self, down, client)

    first, *others = small_clients()
    pf.federate(others, FLHAGHN(latent=12, head="mlp"), rounds=1, workers=0, out=tmp_path / "run")
    monkeypatch.setattr(FLHAGHN, "dispatch", left_turned)
    monkeypatch.setattr(FLHAGHN, "client_graph", seen)
    compute_warm_start(load_trained_server(tmp_path / "run"), first)
    assert found == [0]
