"""What pFedHN's server keeps: rows for the clients that have replied, with the bits of a table of all."""

import pytest
import torch

import polyfed as pf
from polyfed.algorithms.hypernetworks.pfedhn import PFedHN
from polyfed.core.errors import UserError
from polyfed.core.state_dict import iter_tensors
from polyfed.hypernetworks.pfedhn_hypernetwork import (
    backpropagate_deltas,
    draw_embeddings,
    generate_client_weights,
    sgd_step,
)
from polyfed.testing import small_clients
from tests.algorithms.hypernetworks.test_pfedhn import OPTIONS, halves, mixed_clients, replies_of
from tests.few_cases import few


def embeddings_of(method, state):
    return dict(zip(state["clients"], method._read_embeddings(state, state["clients"])[0], strict=True))


@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 1e-2), (0.5, 0.0), (0.0, 0.1), (0.0, 0.0)])
@pytest.mark.one_case
def test_rows_have_the_bits_of_steps_on_a_table_of_all(momentum, decay):
    """A client that is not drawn moves on by momentum and decay; the first client is drawn after seven rounds again."""
    method = PFedHN(**OPTIONS, local_steps=2, embedding_dim=5, hn_lr=0.1, hn_momentum=momentum, hn_weight_decay=decay)
    federation, state = halves(method, small_clients(5))
    table, velocity = draw_embeddings(3, 5, 5, torch.float32), {}
    (architecture,) = federation.client_registry.models
    drawn = [[0, 3], [3], [1, 4], [3, 4], [4], [1], [3], [0, 1, 2]]
    for rows in drawn:
        ids = [f"client-{row}" for row in rows]
        for row, client in zip(rows, ids, strict=True):
            sent = method.dispatch(state, federation.client_info(client, 1)).tensors["model"]
            expected = generate_client_weights(state["network"], architecture, table[[row]])
            assert all(torch.equal(tensor, expected[name][0]) for name, tensor in sent.items())
        replies = replies_of(method, federation, state, ids)
        deltas = {name: torch.stack([replies[i].tensors["delta"][name] for i in ids]) for name in expected}
        _, of_rows = backpropagate_deltas(state["network"], architecture, table[rows], deltas, method.hn_clip)
        gradient = torch.zeros_like(table).index_add(0, torch.tensor(rows), of_rows)
        stepped, velocity = sgd_step(
            {"table": table}, velocity, {"table": gradient}, lr=0.1, momentum=momentum, weight_decay=decay
        )
        table, state = stepped["table"], method.aggregate(state, replies, None)
        assert all(torch.equal(v, table[k]) for k, v in enumerate(embeddings_of(method, state).values()))


def test_the_state_has_rows_only_of_clients_that_replied_and_a_round_changes_no_other():
    method = PFedHN(**OPTIONS, local_steps=2, embedding_dim=2)
    federation, state = halves(method, small_clients(6))
    first = method.aggregate(state, replies_of(method, federation, state, ["client-1", "client-4"]), None)
    second = method.aggregate(first, replies_of(method, federation, first, ["client-4"]), None)
    entries = second["embeddings"]
    assert {client for client, entry in entries.items() if entry} == {"client-1", "client-4"}
    assert entries["client-1"] is first["embeddings"]["client-1"]
    assert [int(entries[client]["steps"]) for client in ("client-1", "client-4")] == [1, 2]
    small, large = (halves(method, small_clients(number))[1] for number in (2, 5))
    assert sum(1 for _ in iter_tensors(small)) == sum(1 for _ in iter_tensors(large))


@pytest.mark.parametrize("heads", few(["architecture", "client"], ["client"]))
def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path, heads):
    method = PFedHN(**OPTIONS, local_steps=2, heads=heads)
    words = {"clients_per_round": 2, "workers": 0, "quiet": True, "checkpoint_every": 1}
    whole = pf.federate(mixed_clients(5), method, rounds=6, **words)

    def end_after_three(record):
        if record["round"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pf.federate(mixed_clients(5), method, rounds=6, out=tmp_path / "run", callbacks=[end_after_three], **words)
    resumed = pf.resume(tmp_path / "run", clients=mixed_clients(5), quiet=True)
    expected, found = (embeddings_of(method, run.last.state) for run in (whole, resumed))
    assert all(torch.equal(v, found[client]) for client, v in expected.items())
    network = resumed.last.state["network"]
    assert all(torch.equal(tensor, network[name]) for name, tensor in whole.last.state["network"].items())


def test_an_embedding_that_has_had_more_steps_than_the_server_is_refused():
    method = PFedHN(**OPTIONS, local_steps=2)
    federation, state = halves(method, small_clients(2))
    after = method.aggregate(state, replies_of(method, federation, state, ["client-0"]), None)
    with pytest.raises(UserError, match="an embedding after 1 steps, and it has taken 0"):
        method.dispatch({**after, "steps": 0}, federation.client_info("client-0", 1))
