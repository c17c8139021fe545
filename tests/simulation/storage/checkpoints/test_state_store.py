"""The store of clients' states: a cohort costs the cohort, a checkpoint what changed, and bits are those of memory."""

import copy
import errno
import hashlib
import json
import os
import pickle
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FedAMP, FedAvg, FedFomo, HeurPFedLA, Local, PFedLA
from polyfed.cli.main import main
from polyfed.core.errors import UserError
from polyfed.core.examples.nan_checks import nonfinite_state_error
from polyfed.core.messages.contiguous import path_of_first_difference
from polyfed.core.serialization import serialize_state
from polyfed.data import SyntheticClients
from polyfed.simulation.rounds.start import state_validation
from polyfed.simulation.storage.checkpoints import state_rows, state_store
from polyfed.simulation.storage.checkpoints.checkpoint import (
    Checkpoint,
    load_newest_checkpoint,
    save_checkpoint_and_remove_older,
)
from polyfed.simulation.storage.checkpoints.client_states import ClientStates, SavedStatesLocation, SharedInitialState
from polyfed.simulation.storage.checkpoints.state_store import STORE_FILE, StateStore
from polyfed.testing import assert_runs_equal, small_clients
from polyfed.testing.algorithm_contract import _InterruptAfter
from tests.stored_states import change_rows, damage_states

FOMO, PFEDLA = FedFomo(lr=0.1, num_models=1), PFedLA(lr=0.1, embedding_dim=4, hidden=5)
MORE = [
    HeurPFedLA(lr=0.1, embedding_dim=4, hidden=5), FedAMP(lr=0.1), FedAvg(lr=0.1, averaged_over="all"), Local(lr=0.1),
]  # fmt: skip
OPTIONS = {"rounds": 3, "workers": 0, "clients_per_round": 2}


def read_everything(states):
    return {client: states[client] for client in sorted(states)}


@pytest.fixture
def reads(monkeypatch):
    """The number of states that were read from files; none stay in memory."""
    counted = []

    def read(data):
        counted.append(len(data))
        return deserialize(data)

    deserialize = state_store.deserialize_state
    monkeypatch.setattr(state_store, "deserialize_state", read)
    monkeypatch.setattr(state_store, "_CACHED_BYTES", 0)
    return counted


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    "method", [FOMO, *(pytest.param(method, marks=pytest.mark.thorough) for method in (PFEDLA, *MORE))]
)
def test_a_run_whose_states_are_read_back_has_the_bits_of_one_in_memory(tmp_path, reads, method):
    whole = pf.federate(small_clients(), method, **OPTIONS)
    assert reads == []
    run = pf.federate(small_clients(), method, out=tmp_path / "run", **OPTIONS)
    assert reads
    assert_runs_equal(run, whole)
    for name, group in whole.last.state.items():
        found = run.last.state[name]
        if isinstance(group, ClientStates):
            found, group = read_everything(found), read_everything(group)
        assert path_of_first_difference(found, group) is None, name
    assert path_of_first_difference(*(read_everything(r.last.client_states) for r in (run, whole))) is None


@pytest.mark.parametrize("method", [FOMO, pytest.param(PFEDLA, marks=pytest.mark.thorough)])
def test_killed_between_the_rows_and_the_checkpoint_it_ends_as_if_it_had_not_been(tmp_path, monkeypatch, method):
    whole, out = pf.federate(small_clients(), method, **OPTIONS), tmp_path / "run"
    rename = Path.rename

    def killed(path, target):
        if Path(target).name == "round-000002":
            raise Killed
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(Killed):
            pf.federate(small_clients(), method, out=out, **OPTIONS)
    store = out / "checkpoint" / STORE_FILE
    assert change_rows(store, "SELECT max(round), max(until) FROM states") == [(2, 2)]
    assert [path.name for path in (out / "checkpoint").glob("round-*")] == ["round-000001"]
    assert_runs_equal(pf.resume(out, clients=small_clients()), whole)


def test_a_damaged_model_in_the_servers_state_is_named_and_the_checkpoint_before_is_used(tmp_path):
    method, out = FOMO, tmp_path / "run"
    whole = pf.federate(small_clients(), method, out=out, **{**OPTIONS, "clients_per_round": 3})
    ((piece,),) = change_rows(
        out / "checkpoint" / STORE_FILE,
        "SELECT first FROM states WHERE part = 'models' AND round = 3 AND client = ?",
        b"client-1",
    )
    change_rows(out / "checkpoint" / STORE_FILE, "UPDATE pieces SET data = x'00' WHERE id = ?", piece)
    sentence = (
        r"round-000003 is damaged \(the state of client 'client-1' in 'models' of the server's state does not match"
    )
    with pytest.warns(RuntimeWarning, match=f"{sentence}.*the one before it is used"):
        assert_runs_equal(pf.resume(out, clients=small_clients()), whole)


def test_a_run_that_goes_on_notices_a_damaged_state_when_it_reads_it(tmp_path, monkeypatch):
    monkeypatch.setattr(state_store, "_CACHED_BYTES", 0)
    run = pf.federate(small_clients(), Local(lr=0.1), out=tmp_path / "run", **OPTIONS)
    damage_states(tmp_path / "run" / "checkpoint" / STORE_FILE, "client-1")
    with pytest.raises(UserError, match="the state of client 'client-1' does not match its checksum"):
        run.model("client-1")


@pytest.mark.parametrize("number", [pytest.param(number, marks=pytest.mark.thorough) for number in (2_000, 200_000)])
def test_a_cohort_of_many_clients_is_read_and_written_without_the_others(tmp_path, monkeypatch, number):
    states = ClientStates({f"client-{k:06d}": {"head": torch.full((20,), float(k))} for k in range(number)})
    save_checkpoint_and_remove_older(tmp_path, Checkpoint(1, {}, states), 0)
    deserialize, counted = state_store.deserialize_state, []
    monkeypatch.setattr(state_store, "deserialize_state", lambda data: (counted.append(data), deserialize(data))[1])
    saved = load_newest_checkpoint(tmp_path)[0].client_states
    assert (len(saved), counted) == (number, [])
    cohort = [f"client-{k:06d}" for k in range(0, number, number // 100)]
    tracemalloc.start()
    assert [saved[client]["head"][0].item() for client in cohort] == [*range(0, number, number // 100)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(counted) == 100
    assert peak < 2**20
    size = (tmp_path / STORE_FILE).stat().st_size
    changed = saved | {client: {"head": torch.zeros(20)} for client in cohort}
    save_checkpoint_and_remove_older(tmp_path, Checkpoint(2, {}, changed), 1)
    assert change_rows(tmp_path / STORE_FILE, "SELECT count(*) FROM states") == [(number + 100,)]
    assert (tmp_path / STORE_FILE).stat().st_size < size + 2**18
    assert len(counted) == 100


def test_the_servers_file_does_not_grow_with_the_clients(tmp_path):
    """Its header held the names of all their tensors, and safetensors reads no header above 100 MB."""
    sizes = []
    for number in (10, 2_000):
        ids = [f"client-{k}" for k in range(number)]
        models = ClientStates.wrap_group({i: {} for i in ids}) | {
            i: {"w": torch.ones(2), "b": torch.ones(1)} for i in ids[1:]
        }
        folder = tmp_path / str(number)
        state = {"clients": ids, "names": ["x"], "models": models, "number": 3}
        save_checkpoint_and_remove_older(folder, Checkpoint(1, state, {i: {} for i in ids}), 0)
        sizes.append((folder / "round-000001" / "server.safetensors").stat().st_size)
        found = load_newest_checkpoint(folder)[0]
        assert list(found.state["models"]) == ids
        assert {**found.state, "models": None} == {"clients": ids, "names": ["x"], "models": None, "number": 3}
        assert list(found.state) == list(state)
        assert found.state["models"]["client-0"] == {}
        assert found.state["models"]["client-9"]["w"].tolist() == [1.0, 1.0]
        assert len(found.client_states) == number
    assert sizes[0] == sizes[1]


def test_a_round_reads_the_models_that_clients_asked_for_and_writes_those_that_replied(tmp_path, reads, monkeypatch):
    clients = small_clients(12)
    run = pf.federate(clients, FedFomo(lr=0.1, num_models=2), out=tmp_path / "run", **{**OPTIONS, "evaluate_every": 3})
    parts = change_rows(
        tmp_path / "run/checkpoint" / STORE_FILE, "SELECT part, round, count(*) FROM states GROUP BY 1, 2"
    )
    assert all(count <= 2 for part, number, count in parts)
    assert {part for part, _, _ in parts} == {"", "models", "requests", "initial state of models"}
    reads.clear()
    infos = [run.federation.client_info(client, 4) for client in run.federation.sample_round_clients(4)]
    list(run.federation.algorithm.dispatch_all(run.last.state, infos))
    assert len(reads) <= 2 * (1 + 2)


def test_states_change_by_a_new_mapping(tmp_path):
    store = StateStore(tmp_path / STORE_FILE)
    store.write(1, 0, {"": [("b", {"x": 1}), ("d", {"x": 2})]}, [], [])
    saved = ClientStates(saved=SavedStatesLocation(store, "", 1))
    states = saved | {"a": {"x": 3}, "b": {"x": 4}}
    assert (list(states), len(states), len(saved)) == (["a", "b", "d"], 3, 2)
    assert [client in states for client in ("a", "b", "c", "d", 7)] == [True, True, False, True, False]
    assert (dict(saved), dict(states)) == (
        {"b": {"x": 1}, "d": {"x": 2}},
        {"a": {"x": 3}, "b": {"x": 4}, "d": {"x": 2}},
    )
    assert (saved.get("a"), states.changes) == (None, {"a": {"x": 3}, "b": {"x": 4}})
    sent = pickle.loads(pickle.dumps(states))  # noqa: S301  # our own bytes
    assert (dict(sent), dict(copy.deepcopy(states))) == (dict(states), dict(states))
    assert repr(states) == "ClientStates(3 clients)"
    with pytest.raises(KeyError):
        states["c"]


def test_clients_without_a_state_of_their_own_share_the_initial_one():
    initial = {"w": torch.ones(2)}
    states = ClientStates.wrap_group(dict.fromkeys(["b", "a"], initial))
    assert (states.changes, states.initial) == ({}, SharedInitialState({"b": None, "a": None}, initial))
    changed = states | {"a": {"w": torch.zeros(2)}}
    assert (list(changed), len(changed), changed["b"] is initial, "c" in changed) == (["b", "a"], 2, True, False)
    assert changed["a"]["w"].tolist() == [0.0, 0.0]
    with pytest.raises(KeyError):
        changed["c"]
    assert list(changed | {"c": 1}) == ["b", "a", "c"]
    assert ClientStates.wrap_group({"a": {}, "b": {}}).initial.state == {}
    assert ClientStates.wrap_group({"a": {}, "b": {"w": 1}}).initial is None
    assert ClientStates.wrap_group({"a": initial}).initial is None


def test_a_state_larger_than_a_row_is_stored_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(state_rows, "_PIECE_BYTES", 1000)
    state = {"w": torch.arange(1000)}
    with closing(StateStore(tmp_path / STORE_FILE)) as store:
        store.write(1, 0, {"": [("a", state), ("b", {})]}, [], [])
    store = StateStore(tmp_path / STORE_FILE)
    assert torch.equal(store.read("", "a", 1)["w"], state["w"])
    assert store.read("", "b", 1) == {}
    assert change_rows(tmp_path / STORE_FILE, "SELECT pieces FROM states") == [(9,), (1,)]
    monkeypatch.setattr(state_rows, "total_memory_bytes", lambda: 5000)
    with pytest.raises(UserError, match=r"client 'a' has .* bytes, more than the memory of this machine"):
        StateStore(tmp_path / STORE_FILE).read("", "a", 1)


def test_what_fits_into_memory_is_not_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(state_store, "_CACHED_BYTES", 3 * state_store._ENTRY_BYTES)
    monkeypatch.setattr(state_store, "deserialize_state", lambda data: {"from": "the file"})
    store = StateStore(tmp_path / STORE_FILE)
    states = {name: {"name": name} for name in "abcd"}
    store.write(1, 0, {"": states.items()}, [], [])
    assert [store.read("", name, 1) for name in "abc"] == [{"name": name} for name in "abc"]
    assert store.read("", "d", 1) == {"from": "the file"}
    store.write(2, 1, {"": [("a", {"name": "A"})]}, [], [1])
    assert (store.read("", "a", 2), store.read("", "a", 1)) == ({"name": "A"}, {"from": "the file"})
    store.roll_back(1)
    assert store.read("", "a", 2) == {"from": "the file"}
    store.close()
    assert change_rows(tmp_path / STORE_FILE, "SELECT count(*), max(round), max(until) FROM states") == [(4, 1, None)]


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_the_states(tmp_path):
    store = StateStore(tmp_path / STORE_FILE)
    sums = store.write(1, 0, {"": [("a", {"x": 1})]}, [], [])
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(OSError, match="full") as error:
        store.write(2, 1, {"": [("a", {"x": torch.zeros(100_000)})]}, [], [1])
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(tmp_path / STORE_FILE))
    assert store.read("", "a", 2) == {"x": 1}
    store.check(1, sums)


def test_a_limit_on_the_size_of_files_is_told_from_a_broken_disk_and_the_run_goes_on(tmp_path):
    resource = pytest.importorskip("resource")
    whole = pf.federate(small_clients(2), Local(lr=0.1), rounds=2, seed=0, workers=0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*states.sqlite; .* make room, then go on with"):
            pf.federate(small_clients(2), Local(lr=0.1), rounds=2, seed=0, workers=0, out=tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_runs_equal(pf.resume(tmp_path / "run", clients=small_clients(2), workers=0), whole)


def test_only_the_owner_reads_the_files_and_no_link_is_followed(tmp_path):
    store = StateStore(tmp_path / STORE_FILE)
    old = os.umask(0)
    try:
        store.write(1, 0, {"": [("a", {"x": 1})]}, [], [])
    finally:
        os.umask(old)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        STORE_FILE: 0o600,
        f"{STORE_FILE}-wal": 0o600,
    }
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == [STORE_FILE]
    (tmp_path / "elsewhere").write_bytes((tmp_path / STORE_FILE).read_bytes())
    (tmp_path / STORE_FILE).unlink()
    (tmp_path / STORE_FILE).symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    for use in (
        lambda: StateStore(store.path).read("", "a", 1),
        lambda: store.write(2, 1, {"": []}, [], [1]),
    ):
        with pytest.raises(UserError, match="is a link or no file"):
            use()
    assert (tmp_path / "elsewhere").read_bytes() == before


def test_two_runs_of_one_directory_read_side_by_side(tmp_path, reads):
    run = pf.federate(small_clients(), Local(lr=0.1), out=tmp_path / "run", **OPTIONS)
    again = pf.resume(tmp_path / "run", clients=small_clients())
    assert_runs_equal(run, again)
    assert_runs_equal(again, run)


def test_states_of_a_round_that_is_not_kept_are_refused_and_never_those_of_another(tmp_path):
    initial = SharedInitialState(dict.fromkeys("ab"), {"x": 0})
    with closing(StateStore(tmp_path / STORE_FILE)) as store:
        store.write(1, 0, {"m": [("a", {"x": 1})]}, [], [])
        first = ClientStates(saved=SavedStatesLocation(store, "m", 1), initial=initial)
        for number in (2, 3, 4):
            store.write(number, number - 1, {"m": [("a", {"x": number})]}, [], [number - 1])
        alone = ClientStates(saved=SavedStatesLocation(store, "m", 1))
        for use in (lambda: first["a"], lambda: first["b"], lambda: list(alone), lambda: len(alone)):
            with pytest.raises(UserError, match="after round 1 are not stored any more"):
                use()
        assert ClientStates(saved=SavedStatesLocation(store, "m", 4), initial=initial)["b"] == {"x": 0}


def test_the_servers_state_is_read_while_the_run_writes(tmp_path):
    with closing(StateStore(tmp_path / STORE_FILE)) as store:
        save_checkpoint_and_remove_older(tmp_path, Checkpoint(1, {"w": torch.ones(1)}, {"a": {"x": 1}}), 0, store=store)
        before = sorted(path.name for path in tmp_path.iterdir())
        found, notes = load_newest_checkpoint(tmp_path, server_only=True)
        assert (found.state["w"].tolist(), dict(found.client_states), notes) == ([1.0], {}, [])
        assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_forged_list_of_groups_is_refused(tmp_path):
    save_checkpoint_and_remove_older(tmp_path, Checkpoint(1, [torch.ones(1)], {}), 0)
    file, sums = (tmp_path / "round-000001" / name for name in ("server.safetensors", "complete.json"))
    for groups, reason in ((["x"], "the server's state is a list, not a mapping"), ("x", "groups must be a list")):
        file.write_bytes(serialize_state({"round": 1, "state": [], "groups": groups}))
        content = json.loads(sums.read_text())
        content["files"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
        sums.write_text(json.dumps(content))
        found, (note,) = load_newest_checkpoint(tmp_path)
        assert found is None
        assert reason in note


def test_ids_of_any_text_come_back(tmp_path):
    ids = ["", "a\0b", "\ud800", "é", "医", "x" * 5000]
    store = StateStore(tmp_path / STORE_FILE)
    sums = store.write(1, 0, {"": [(i, {"id": len(i)}) for i in ids]}, [], [])
    store.close()
    fresh = StateStore(tmp_path / STORE_FILE)
    assert fresh.client_ids("", 1) == sorted(ids)
    assert [fresh.read("", i, 1)["id"] for i in ids] == [len(i) for i in ids]
    fresh.check(1, json.loads(json.dumps(sums)))


def test_commands_read_a_run_with_a_store(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = pf.federate(small_clients(), FOMO, out="run", **OPTIONS)
    for command in (["show", "run"], ["report", "run"]):
        assert main(command) == 0, capsys.readouterr().err
    again = pf.resume("run", clients=small_clients())
    for client in small_clients():
        assert torch.equal(again.predict(client.id, client.test.x), run.predictions(client.id).outputs)
        assert torch.equal(run.predict(client.id, client.test.x), run.predictions(client.id).outputs)


def test_a_resume_compares_what_clients_have_of_their_own_and_one_initial_entry(tmp_path, monkeypatch):
    """As often for sixty clients as for twenty, though the server's state has a model of each."""
    numbers, compare = [], state_validation._state_difference

    def compare_and_count(*arguments):
        numbers[-1] += str(arguments[-1]).startswith("models/")
        return compare(*arguments)

    monkeypatch.setattr(state_validation, "_state_difference", compare_and_count)
    method = PFedLA(lr=0.1, embedding_dim=4, hidden=5, neighbours=2)
    for number in (20, 60):
        numbers.append(0)
        source, out = SyntheticClients(number), tmp_path / str(number)
        words = {**OPTIONS, "evaluate_clients": 2, "quiet": True}
        with pytest.raises(KeyboardInterrupt):
            pf.federate(source, method, **words, out=out, progress=_InterruptAfter(1))
        numbers[-1] = 0
        pf.resume(out, clients=source, quiet=True)
    assert numbers == [3, 3]


def test_a_forged_initial_entry_is_refused():
    clients = dict.fromkeys(["a", "b", "c"])
    initial = {"models": ClientStates(initial=SharedInitialState(clients, {"w": torch.zeros(2)}))}
    for entry, sentence in (({"w": torch.zeros(3)}, "w"), ({"w": torch.tensor([0.0, torch.nan])}, "NaN")):
        forged = {"models": ClientStates(initial=SharedInitialState(clients, entry))}
        before, after = state_validation._without_repeated_entries(initial, forged)
        assert list(after["models"]) == ["a"]
        error = state_validation._state_difference(before, after, [], set(clients)) or nonfinite_state_error(after)
        assert sentence in error
