"""Checkpoints, metrics and configuration belong to one run: what was replaced or changed is named, never taken silently."""

import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import yaml

import polyfed as pf
from polyfed.algorithms import FedAvg, FedProx, Local
from polyfed.cli.main import main
from polyfed.comparison.storage.comparison_directory import load_history_if_finished
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.checkpoints.state_store import STORE_FILE
from polyfed.simulation.storage.configuration import describe_method_and_settings
from polyfed.simulation.storage.directory import describe_changed_files_of_run, read_config, read_manifest
from polyfed.testing import assert_runs_equal, small_clients
from tests.few_cases import few
from tests.stored_states import change_rows, damage_states

OPTIONS = {"rounds": 4, "workers": 0}


def play(out, method=None, clients=None, **more):
    return pf.federate(clients or small_clients(), method or FedAvg(lr=0.1), out=out, **{**OPTIONS, **more})


@pytest.fixture
def run(tmp_path):
    play(tmp_path / "run")
    return tmp_path / "run"


OTHERS = {
    "another rate": {"method": FedAvg(lr=0.4)},
    "another seed": {"seed": 1},
    "another method": {"method": FedProx(lr=0.1)},
    "more rounds": {"rounds": 5},
    "other clients": {"clients": small_clients(4)},
}


@pytest.mark.thorough
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_checkpoint_of_another_run_is_not_taken(tmp_path, run, other):
    """The review's: a checkpoint of another rate resumed silently, with a loss of 0.37 instead of 1.88."""
    play(tmp_path / "other", **other)
    shutil.rmtree(run / "checkpoint")
    shutil.copytree(tmp_path / "other" / "checkpoint", run / "checkpoint")
    with pytest.raises(pf.UserError, match=r"round-00000. is of a run with (another config|other data)") as told:
        pf.resume(run, clients=small_clients())
    assert "Put a copy of what was lost back, or delete the folder" in str(told.value)


def test_metrics_of_another_run_are_not_taken(tmp_path, run):
    play(tmp_path / "other", FedAvg(lr=0.4))
    shutil.copy(tmp_path / "other" / "metrics.jsonl", run / "metrics.jsonl")
    with pytest.raises(
        pf.UserError, match=r"metrics.jsonl was changed in rounds 1 to 4 since .*, or is of another run"
    ):
        pf.resume(run, clients=small_clients())
    assert any("metrics.jsonl was changed" in sentence for sentence in describe_changed_files_of_run(run))


@pytest.mark.parametrize("line", few([0, 1, 2, 3], [0, 3]))
@pytest.mark.one_case
def test_one_changed_number_of_the_metrics_is_found(run, line):
    """A change in the last round costs that round; one before all checkpoints that are left ends with a sentence."""
    whole = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    changed = [dict(record) for record in whole]
    changed[line]["train_loss"] += 1e-9
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in changed))
    assert re.search(r"metrics.jsonl was changed in rounds 1 to 4", describe_changed_files_of_run(run)[0])
    if line == 3:
        with pytest.warns(
            RuntimeWarning, match=r"metrics.jsonl was changed in rounds 1 to 4 .*; the one before it is used"
        ):
            again = pf.resume(run, clients=small_clients())
        assert again.history[3]["train_loss"] == whole[3]["train_loss"]
        assert describe_changed_files_of_run(run) == []
    else:
        with pytest.raises(pf.UserError, match=r"metrics.jsonl was changed in rounds 1 to 4 .*in rounds 1 to 3"):
            pf.resume(run, clients=small_clients())


def test_a_changed_configuration_is_named_and_where_it_runs_is_free(run):
    config = read_config(run)
    whole = (run / "config.yaml").read_text()
    for name, value in {"rounds": 9, "seed": 3, "algorithm": {**config["algorithm"], "lr": 0.3}}.items():
        (run / "config.yaml").write_text(yaml.safe_dump({**config, name: value}))
        for action in (lambda: pf.resume(run, clients=small_clients()), lambda: pf.resume(run)):
            with pytest.raises(pf.UserError, match=r"config.yaml was changed since the run began; put it back"):
                action()
        assert "config.yaml was changed" in describe_changed_files_of_run(run)[0]
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "workers": 2, "engine": "inprocess"}))
    assert describe_changed_files_of_run(run) == []
    assert pf.resume(run, clients=small_clients()).last.round == 4
    (run / "config.yaml").write_text(whole)


@pytest.mark.parametrize("content", few([None, "", "{", "[]", "{}", "\x00" * 9], {None, "{", "[]"}))
@pytest.mark.one_case
def test_a_damaged_manifest_says_so(run, content):
    """It said that the clients were not those of the run."""
    (run / "manifest.json").unlink()
    if content is not None:
        (run / "manifest.json").write_text(content)
    with pytest.raises(pf.UserError, match=r"manifest.json is missing or damaged, .*; put back a copy of it"):
        pf.resume(run, clients=small_clients())


def test_models_and_predictions_that_were_changed_are_named_and_written_again(run):
    whole = {path: path.read_bytes() for part in ("models", "predictions") for path in (run / part).iterdir()}
    assert set(read_manifest(run)["files"]) == {path.relative_to(run).as_posix() for path in whole}
    for path, content in whole.items():
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert sorted(
        re.match(r"(\S+) was changed since the run wrote it; `polyfed resume", s)[1]
        for s in describe_changed_files_of_run(run)
    ) == sorted(map(str, whole))
    for path in whole:
        if path.suffix == ".parquet":
            path.unlink()
    assert len(describe_changed_files_of_run(run)) == sum(path.suffix != ".parquet" for path in whole)
    with warnings.catch_warnings(action="ignore"):
        pf.resume(run, clients=small_clients())
    assert describe_changed_files_of_run(run) == []


@pytest.mark.thorough
def test_report_and_compare_name_what_was_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["--data.clients", "2", "--rounds", "2", "--workers", "0", "--quiet"]
    one = ["--seeds", "0", "--tune", "none", "--no-references"]
    assert main(["run", "--algorithm", "local", *small, "--out", "run"]) == 0
    assert main(["compare", "--algorithms", "local", *small, *one, "--out", "c"]) == 0
    for folder in ("run", "c/local/seed-0"):
        text = Path(folder, "metrics.jsonl").read_text()
        Path(folder, "metrics.jsonl").write_text(re.sub(r'"train_loss": [\d.]+', '"train_loss": 0.5', text, count=1))
    for folder in ("run", "c"):
        capsys.readouterr()
        assert main(["report", folder]) == 0
        sentence = "metrics.jsonl was changed in rounds 1 to 2 since they were written; put back a copy"
        assert sentence in capsys.readouterr().out
        assert sentence in Path(folder, "report.html").read_text()
    assert main(["compare", "c", "--quiet"]) == 2
    assert "local/seed-0/metrics.jsonl was changed" in capsys.readouterr().err


def test_a_comparison_takes_no_changed_run(run):
    method = describe_method_and_settings(FedAvg(lr=0.1), Settings())["algorithm"]
    asked = (run, 4, [c.id for c in small_clients()], 0, method, read_manifest(run)["data_fingerprint"])
    assert len(load_history_if_finished(*asked)) == 4
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().replace("train_loss", "train_lass", 1))
    with pytest.raises(pf.UserError, match=r"metrics.jsonl was changed"):
        load_history_if_finished(*asked)


def test_a_comparison_takes_no_run_that_was_stopped_while_it_wrote_its_predictions(run):
    method = describe_method_and_settings(FedAvg(lr=0.1), Settings())["algorithm"]
    arguments = (run, 4, [c.id for c in small_clients()], 0, method, read_manifest(run)["data_fingerprint"])
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["files"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert load_history_if_finished(*arguments) is None


def test_warm_starts_take_no_checkpoint_of_another_run(tmp_path):
    from polyfed.algorithms import FLHAGHN
    from polyfed.simulation.results.unseen_clients import load_trained_server

    for name, rate in (("run", 0.1), ("other", 0.2)):
        play(tmp_path / name, FLHAGHN(head="factored", lr=rate), rounds=1)
    assert load_trained_server(tmp_path / "run").round == 1
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    shutil.copytree(tmp_path / "other" / "checkpoint", tmp_path / "run" / "checkpoint")
    with pytest.raises(pf.UserError, match="is of a run with another configuration"):
        load_trained_server(tmp_path / "run")


def test_a_run_that_goes_on_binds_as_one_that_was_not_stopped(tmp_path):
    whole = play(tmp_path / "whole", Local(lr=0.1), rounds=6, checkpoint_every=2, keep=3)
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyfed.simulation.rounds.round_loop.train_and_aggregate_round", _stop_after(4))
        with pytest.raises(KeyboardInterrupt):
            play(out, Local(lr=0.1), rounds=6, checkpoint_every=2, keep=3)
    assert_runs_equal(pf.resume(out, clients=small_clients()), whole)
    assert describe_changed_files_of_run(out) == describe_changed_files_of_run(tmp_path / "whole") == []
    for folder in (out, tmp_path / "whole"):
        for checkpoint in (folder / "checkpoint").glob("round-*"):
            bound = json.loads((checkpoint / "complete.json").read_text())["bound"]
            assert set(bound) == {"config", "data", "metrics"}
            assert all(len(value) >= 16 for value in bound.values())


def _stop_after(last):
    from polyfed.simulation.rounds.training_round import train_and_aggregate_round

    def playing(federation, now, *rest):
        if now.round == last:
            raise KeyboardInterrupt
        return train_and_aggregate_round(federation, now, *rest)

    return playing


PIECE = "id = (SELECT first FROM states WHERE client = CAST('client-1' AS BLOB) AND round = 3)"
OTHER = (
    "(SELECT data FROM pieces WHERE id = (SELECT first FROM states WHERE client = CAST('{}' AS BLOB) AND round = {}))"
)
DAMAGE = {
    "a byte": f"UPDATE pieces SET data = CAST(substr(data, 1, length(data) - 9) || '?12345678' AS BLOB) WHERE {PIECE}",
    "cut": f"UPDATE pieces SET data = substr(data, 1, length(data) - 9) WHERE {PIECE}",
    "missing": f"DELETE FROM pieces WHERE {PIECE}",
    "an older round's": f"UPDATE pieces SET data = {OTHER.format('client-1', 2)} WHERE {PIECE}",
    "another client's": f"UPDATE pieces SET data = {OTHER.format('client-0', 3)} WHERE {PIECE}",
}


@pytest.mark.thorough
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_private_state_is_named_and_the_run_goes_on_from_before_or_not_at_all(tmp_path, damage):
    whole = play(tmp_path / "run", Local(lr=0.1), rounds=3, keep=1)
    store = tmp_path / "run" / "checkpoint" / STORE_FILE
    before = change_rows(store, f"SELECT data FROM pieces WHERE {PIECE}")
    change_rows(store, DAMAGE[damage])
    assert change_rows(store, f"SELECT data FROM pieces WHERE {PIECE}") != before
    with pytest.warns(
        RuntimeWarning, match=r"round-000003 is damaged .*'client-1' does not match.*the one before it is used"
    ):
        assert_runs_equal(pf.resume(tmp_path / "run", clients=small_clients()), whole)
    damage_states(store, "client-1")
    with pytest.raises(pf.UserError, match=r"'client-1' does not match its checksum.*Put a copy of what was"):
        pf.resume(tmp_path / "run", clients=small_clients())


def test_a_changed_fingerprint_of_the_data_is_the_manifests_not_the_clients(run):
    """The review's: of 88 damaged manifests 45 made `resume` say that the clients are not those of the run."""
    manifest = read_manifest(run)
    changed = {**manifest, "data_fingerprint": "0" * len(manifest["data_fingerprint"])}
    (run / "manifest.json").write_text(json.dumps(changed))
    with pytest.raises(pf.UserError, match=r"manifest.json was changed since the run began: its data_fingerprint"):
        pf.resume(run, clients=small_clients())
    (run / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(pf.UserError, match="the clients are not those of the run"):
        pf.resume(run, clients=small_clients(4))
