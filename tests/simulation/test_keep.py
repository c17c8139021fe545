"""Which round a run keeps, and what its networks give for new inputs."""

import shutil

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg, FedRep, Local, PFedHN, PFedLA, PFedMe
from polyfed.cli.main import main
from polyfed.core.evaluation.metrics import METRICS
from polyfed.core.examples.examples import Examples, Normalise
from polyfed.core.messages.contiguous import path_of_first_difference
from polyfed.simulation.rounds.round_scores import round_of_best_score
from polyfed.simulation.storage.checkpoints.checkpoint import load_newest_checkpoint, load_round_checkpoint
from polyfed.simulation.storage.directory import read_config
from polyfed.simulation.storage.predictions import prediction_store as predictions
from polyfed.testing import assert_runs_equal, small_clients
from tests.stopped import Stop

WILD = {"rounds": 6, "workers": 0, "seed": 11, "keep": "best"}  # the best rounds are 1, 1, 1, 4, 4 and 4


def wild(out=None, method=None, **options):
    return pf.federate(small_clients(), method or FedAvg(lr=0.5), out=out, **{**WILD, **options})


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind",
    [FedRep, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (FedAvg, Local, PFedHN, PFedMe, PFedLA))],
)
def test_the_network_of_the_best_round_is_returned(tmp_path, kind):
    method = kind(lr=2.0)
    run = wild(tmp_path / "run", method, seed=4)
    assert 1 <= run.best_round < 6, "the last round is the best, with which this test shows nothing"
    assert run.kept_checkpoint.round == run.best_round
    last = wild(tmp_path / "last", method, seed=4, keep="last")
    for client in small_clients():
        kept = run.predictions(client.id)
        assert kept.round == run.best_round
        assert torch.equal(run.predict(client.id, client.test.x), kept.outputs)
        row = run.history[run.best_round - 1]["clients"][client.id]
        assert (
            float((run.predict(client.id, client.test.x).argmax(1) == client.test.y).double().mean()) == row["accuracy"]
        )
        again = last.predictions(client.id)
        assert again.round == 6
        assert torch.equal(last.predict(client.id, client.test.x), again.outputs)
        assert not torch.equal(again.outputs, kept.outputs)
        file = safetensors.torch.load_file(tmp_path / "run" / "models" / f"{client.id}.safetensors")
        model = run.model(client.id)
        assert all(torch.equal(file[name], tensor) for name, tensor in model.state_dict().items())
        with torch.no_grad():
            torch.testing.assert_close(model(client.test.x), kept.outputs)


@pytest.mark.thorough
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 10])
def test_the_best_round_survives_a_stop(tmp_path, every):
    whole = wild()
    best = whole.best_round
    assert 1 < best < 6
    for stop in range(1, 6) if every == 1 else (best, best + 1):
        out = tmp_path / f"stopped-{stop}"
        with pytest.raises(KeyboardInterrupt):
            wild(out, checkpoint_every=every, progress=Stop(stop))
        run = pf.resume(out, clients=small_clients())
        assert_runs_equal(whole, run)
        assert run.kept_checkpoint.round == best
        names = {folder.name for folder in (out / "checkpoint").glob("round-*")}
        assert {f"round-{best:06d}", "round-000006"} <= names
        assert len(names) <= 4
        assert_runs_equal(whole, pf.resume(out, clients=small_clients()))


@pytest.mark.thorough
def test_checkpoints_are_written_at_each_new_best_round(tmp_path):
    """Without waiting for `checkpoint_every`; killed in the round after, the best is not played again."""
    best = wild().best_round
    with pytest.raises(KeyboardInterrupt):
        wild(tmp_path / "run", checkpoint_every=50, progress=Stop(best + 1))
    shutil.rmtree(tmp_path / "run" / "checkpoint" / f"round-{best + 1:06d}")  # as kill -9 would have it
    assert (tmp_path / "run" / "checkpoint" / f"round-{best:06d}").is_dir()
    assert_runs_equal(wild(), pf.resume(tmp_path / "run", clients=small_clients()))


@pytest.mark.thorough
def test_without_the_checkpoint_of_the_best_round_the_run_goes_back(tmp_path):
    """To the checkpoint before it, and the state of the round that was the best then, long before it."""
    whole = wild()
    assert [record["best_round"] for record in whole.history] == [1, 1, 1, 4, 4, 4]
    with pytest.raises(KeyboardInterrupt):
        wild(tmp_path / "run", progress=Stop(4))
    checkpoints = tmp_path / "run" / "checkpoint"
    assert sorted(folder.name[-1] for folder in checkpoints.glob("round-*")) == ["1", "3", "4"]
    shutil.copytree(tmp_path / "run", tmp_path / "both")
    (checkpoints / "round-000004" / "server.safetensors").write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert_runs_equal(whole, pf.resume(tmp_path / "run", clients=small_clients()))

    checkpoints = tmp_path / "both" / "checkpoint"
    for number in (1, 4):  # then 3 is whole, and cannot be gone on with
        (checkpoints / f"round-00000{number}" / "server.safetensors").write_bytes(b"damaged")
    with pytest.raises(pf.UserError, match=r"no checkpoint .* is whole .*round-000001 is missing or damaged"):
        pf.resume(tmp_path / "both", clients=small_clients())
    shutil.rmtree(checkpoints)  # as the sentence says
    assert_runs_equal(whole, pf.resume(tmp_path / "both", clients=small_clients()))


def test_the_checkpoint_of_the_best_round_keeps_its_states(tmp_path):
    """Two clients of three take part, and those that train after the best round get other states."""
    run = pf.federate(small_clients(), Local(lr=2.0), out=tmp_path / "run", clients_per_round=2, **WILD)
    folder = tmp_path / "run" / "checkpoint"
    assert run.best_round < 5
    assert len(list(folder.glob("round-*"))) == 3
    short = pf.federate(
        small_clients(), Local(lr=2.0), clients_per_round=2, **{**WILD, "keep": "last", "rounds": run.best_round}
    )
    best, newest = load_round_checkpoint(folder, run.best_round), load_newest_checkpoint(folder)[0]
    assert path_of_first_difference(dict(best.client_states), dict(short.last.client_states)) is None
    assert path_of_first_difference(dict(newest.client_states), dict(run.last.client_states)) is None
    assert path_of_first_difference(dict(best.client_states), dict(newest.client_states)) is not None


def test_keep_is_checked():
    without = [pf.Client(c.id, c.model, c.train, c.test) for c in small_clients()]
    with pytest.raises(pf.UserError, match="keep='best' needs validation examples, and no client has any"):
        pf.federate(without, FedAvg(), rounds=1, keep="best")
    for keep in ("first", 0, 3, -1, True, 1.5):
        with pytest.raises(
            pf.UserError, match=f"keep must be 'last', 'best', 'loss' or a round from 1 to 2, got {keep!r}"
        ):
            pf.federate(small_clients(), FedAvg(), rounds=2, keep=keep)


@pytest.mark.thorough
def test_a_round_by_its_number_is_kept(tmp_path):
    """Also after a stop before it, at it and after it; the state is that of a run which ends there."""
    short = wild(keep="last", rounds=2, method=Local(lr=0.5))
    clients = small_clients()
    whole = wild(tmp_path / "whole", keep=2, method=Local(lr=0.5), rounds=4)
    assert whole.last.round == 4
    runs = [whole]
    for stop in (1, 2, 3):
        out = tmp_path / f"stopped-{stop}"
        with pytest.raises(KeyboardInterrupt):
            wild(out, keep=2, method=Local(lr=0.5), rounds=4, checkpoint_every=10, progress=Stop(stop))
        runs.append(pf.resume(out, clients=clients))
        assert_runs_equal(whole, runs[-1])
    for run in runs:
        assert run.kept_checkpoint.round == 2
        for client in clients:
            expected = short.predict(client.id, client.test.x)
            assert torch.equal(run.predict(client.id, client.test.x), expected)
            kept = run.predictions(client.id)
            assert kept.round == 2
            assert torch.equal(kept.outputs, expected)
            assert predictions.read_predictions(run.out, client.id).round == 2
            file = safetensors.torch.load_file(run.out / "models" / f"{client.id}.safetensors")
            own = short.model(client.id).state_dict()
            assert all(torch.equal(file[name], tensor) for name, tensor in own.items())
            assert all(torch.equal(own[name], tensor) for name, tensor in run.model(client.id).state_dict().items())
    assert not torch.equal(whole.predictions("client-0", round=4).outputs, whole.predictions("client-0").outputs)


def test_the_command_takes_the_number_of_a_round(tmp_path):
    words = ["--data.clients", "2", "--data.examples_per_client", "20", "--model", "mlp", "--workers", "0", "--quiet"]
    out = tmp_path / "run"
    assert main(["run", "fedavg_digits", *words, "--rounds", "3", "--keep", "2", "--out", str(out)]) == 0
    assert read_config(out)["keep"] == 2
    for folder in (out, out / "baselines" / "local"):
        assert predictions.read_predictions(folder, "client-000").round == 2


def test_the_kept_rounds_predictions_stay_where_there_is_no_room_for_all(monkeypatch):
    monkeypatch.setattr(predictions, "LIMIT_BYTES", 1)
    run = wild(keep=2, method=Local(lr=0.5), rounds=4)
    for number in (2, 4):
        assert run.predictions("client-0", round=number).round == number
    with pytest.raises(pf.UserError, match="after round 3 were kept; give one of 2, 4"):
        run.predictions("client-0", round=3)


def test_without_any_validation_score_the_last_round_is_kept():
    clients = small_clients()
    one = [pf.Client(c.id, c.model, c.train, c.test, c.val.select(torch.tensor([0]))) for c in clients]
    with pytest.warns(RuntimeWarning, match="no round has a validation score"):
        run = pf.federate(one, FedAvg(), rounds=2, workers=0, keep="best", metrics="sensitivity_at_80")
    assert run.kept_checkpoint.round == 2


def test_inputs_are_transformed_as_the_clients_are():
    images = torch.randint(0, 256, (20, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    data = Examples(images, torch.arange(20) % 2, transform=Normalise((0.5,), (0.1,)))
    seen = data.select(torch.arange(10))
    client = pf.Client(
        "a", lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), data.select(torch.arange(10, 20)), seen
    )
    run = pf.federate([client], FedAvg(lr=0.1), rounds=1, workers=0)
    with torch.no_grad():
        expected = run.model("a")((images.float() / 255 - 0.5) / 0.1)
    for given in (images, images.numpy(), images[:, 0]):
        torch.testing.assert_close(run.predict("a", given), expected)
    assert torch.equal(run.predict("a", images[:10]), run.predictions("a").outputs)
    assert run.predict("a", images[:3]).shape == (3, 2)
    with pytest.raises(pf.UserError, match=r"are torch.float32, the client's are torch.uint8"):
        run.predict("a", images.float())


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (torch.zeros(2, 5), r"the inputs for client 'client-0' have shape \(2, 5\); they must be \(n, 6\)"),
        (torch.zeros(6), r"have shape \(6,\)"),
        (torch.zeros(0, 6), "with at least one example"),
        (torch.full((2, 6), float("nan")), "have values that are NaN or infinite"),
        (np.full((2, 6), -np.inf), "have values that are NaN or infinite"),
        ([["a"]], "cannot be read as one tensor of numbers"),
    ],
)
def test_inputs_are_checked(inputs, sentence):
    run = pf.federate(small_clients(1), FedAvg(), rounds=1, workers=0)
    with pytest.raises(pf.UserError, match=sentence):
        run.predict("client-0", inputs)
    with pytest.raises(pf.UserError, match="no client 'client-7' in this run"):
        run.predict("client-7", torch.zeros(2, 6))
    assert torch.equal(run.predict("client-0", np.zeros((2, 6))), run.predict("client-0", [[0] * 6] * 2))


def test_a_round_in_which_a_client_lost_its_score_is_not_the_best():
    """The mean over the other clients is higher without it."""

    def record(number, north, south):
        rows = {"north": {"val_auc": north}, "south": {"val_auc": south}}
        defined = [row["val_auc"] for row in rows.values() if row["val_auc"] is not None]
        return {"round": number, "clients": rows, "summary": {"val_auc": {"mean": sum(defined) / len(defined)}}}

    history = [record(1, 0.6, 0.9), record(2, None, 0.95), record(3, 0.7, 0.9), record(4, None, 1.0)]
    assert round_of_best_score(history, METRICS["auc"]) == 3
    assert round_of_best_score([record(1, None, 0.9), record(2, None, 0.8)], METRICS["auc"]) == 1  # it never had one
    assert round_of_best_score([record(1, None, 0.9), record(2, 0.1, 0.9)], METRICS["auc"]) == 2
