"""`polyfed.compare`: who is compared, on what, and that a comparison that was stopped ends as one that was not."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import CAFedPNAS, FedAvg, FedProx, Local, PFedLA
from polyfed.comparison.execution.process_pool import run_in_processes
from polyfed.comparison.planning.method_selection import select_methods
from polyfed.comparison.storage.comparison_directory import load_comparison
from polyfed.simulation.storage.directory import read_config
from polyfed.simulation.storage.directory_lock import lock_directory
from polyfed.testing import small_clients

QUICK = {
    "rounds": 2, "seeds": [0, 1], "budget": "steps", "tune": "none", "references": False, "parallel": 1, "quiet": True,
}  # fmt: skip
TIMED = "seconds", "path", "computed_from"  # of results; the last is a hash of files with times


def without_seconds(value, at=""):
    if isinstance(value, dict):
        return {key: without_seconds(item, key) for key, item in value.items() if key not in TIMED}
    if isinstance(value, list) and at == "curve":
        return [point[:3] for point in value]
    return [without_seconds(item) for item in value] if isinstance(value, list) else value


def wide():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def mixed_clients():
    first, *others = small_clients(3)
    return [pf.Client(first.id, wide, first.train, first.test), *others]


def test_with_secure_sums_methods_without_a_mean_are_left_out_and_the_others_run_on_sums(tmp_path):
    """`local` sends nothing, and stays; the scores are those of runs with `secure=True`, which differ from others'."""
    clients = small_clients(3)
    words = {**QUICK, "rounds": 1, "seeds": [0]}
    found = pf.compare(clients, {"la": PFedLA(lr=0.1), "prox": FedProx(lr=0.1)}, **words, secure=True, out=tmp_path)
    assert list(found.results["methods"]) == ["local", "fedavg", "fedavg_ft", "prox"]
    assert "secure=True gives the server nothing but the sum" in found.skipped["la"]
    for label, method in {"prox": FedProx(lr=0.1), "local": Local(lr=0.1)}.items():
        own = read_config(tmp_path / label / "seed-0" / "config.yaml")["secure"]
        assert own == (label != "local")
        run = pf.federate(clients, method, rounds=1, seed=0, workers=0, secure=own)
        ours = found.results["methods"][label]["runs"]["0"]
        assert ours["bytes"] == run.history[-1]["bytes_down_total"] + run.history[-1]["bytes_up_total"]
        assert ours["mean"] == run.table()[-1]["accuracy"]
    plain = pf.federate(clients, FedProx(lr=0.1), rounds=1, seed=0, workers=0)
    sent = found.results["methods"]["prox"]["runs"]["0"]["bytes"]
    assert sent > plain.history[-1]["bytes_down_total"] + plain.history[-1]["bytes_up_total"], "8 bytes a number go up"


def test_a_comparison_of_which_nothing_suits_secure_sums_is_refused():
    with pytest.raises(pf.UserError, match="no method that federates suits these clients: secure=True hides a client"):
        pf.compare(small_clients(3), ["fedavg"], **QUICK, secure=True, clients_per_round=1)


@pytest.mark.slow
def test_scores_bytes_and_means_are_those_of_the_runs(tmp_path):
    """Each number of the results beside the run that `federate` makes of the same method and seed."""
    clients = small_clients(3)
    found = pf.compare(clients, {"prox": FedProx(mu=0.5, lr=0.1)}, **QUICK, out=tmp_path / "out")
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert content == load_comparison(tmp_path / "out").results == found.results
    assert list(content["methods"]) == ["local", "fedavg", "fedavg_ft", "prox"]
    for label, method in {"prox": FedProx(mu=0.5, lr=0.1), "local": Local(lr=0.1)}.items():
        for seed in (0, 1):
            run = pf.federate(clients, method, rounds=2, seed=seed, workers=0)
            ours, last = content["methods"][label]["runs"][str(seed)], run.history[-1]
            rows = {row["client"]: row["accuracy"] for row in run.table()}
            assert ours["scores"] == {client: rows[client] for client in content["clients"]}
            assert ours["mean"] == rows["mean"]
            assert ours["bytes"] == last["bytes_down_total"] + last["bytes_up_total"]
            assert (tmp_path / "out" / ours["path"] / "metrics.jsonl").is_file()
    prox, local = (content["methods"][label] for label in ("prox", "local"))
    gains = [prox["runs"][s]["mean"] - local["runs"][s]["mean"] for s in ("0", "1")]
    assert prox["statistics"]["gain"] == pytest.approx(sum(gains) / 2)
    assert content["same_clients"] is True
    assert (
        content["data"]["0"]["client-0"]["train"]
        == len(clients[0].train)
        == sum(content["data"]["0"]["client-0"]["classes"])
    )


@pytest.mark.slow
def test_runs_side_by_side_give_what_one_after_the_other_gives():
    one, other = (
        pf.compare(small_clients(3), ["pfedla"], **(QUICK | {"parallel": parallel})).results for parallel in (1, 3)
    )
    assert without_seconds(one) == without_seconds(other)


def test_left_out_with_the_reason_and_compared_unasked():
    """A default method that several architectures do not suit is not named, unless somebody asked for it."""
    found = pf.compare(mixed_clients(), ["fedavg_kd", "fedprox", "fedavg"], **(QUICK | {"seeds": [3]}))
    assert [row["method"] for row in found.table()] == ["local", "fedavg_kd"]
    assert found.skipped.keys() == {"fedavg", "fedprox"}
    assert "fedprox needs one architecture, but the 3 clients have 2" in found.skipped["fedprox"]
    assert all("not decided" in sentence for sentence in found.verdicts)  # one seed


def test_local_training_is_equal_and_taken_over():
    methods = select_methods([FedProx(lr=0.3, local_epochs=4, batch_size=8, mu=2.0), "pfedla"])
    assert {type(m) for m in methods.values()} >= {Local, FedAvg, PFedLA}
    assert {(m.lr, m.local_epochs, m.batch_size) for m in methods.values()} == {(0.3, 4, 8)}
    plain = select_methods(["pfedla", "fedprox"])
    assert len({(m.local_epochs, m.local_steps, m.batch_size) for m in plain.values()}) == 1
    with pytest.raises(pf.UserError, match=r"must train equally in each round, but .*local_epochs=4.*local_epochs=1"):
        pf.compare(small_clients(2), {"a": FedAvg(local_epochs=4), "b": FedProx(local_epochs=1)}, **QUICK)


def test_a_method_with_an_optimiser_of_its_own_keeps_it():
    """The hypernetwork of FLHA-GHN diverges at the rate of a client's network; its relatives share a supernet's."""
    methods = select_methods([FedAvg(lr=0.3, local_epochs=4, batch_size=8, weight_decay=0.1), "flha_ghn", "fedrep"])
    ghn, rep = methods["flha_ghn"], methods["fedrep"]
    assert (ghn.lr, ghn.clip_norm, ghn.schedule, ghn.weight_decay) == (0.009, 5.0, "cosine", 0.0)
    assert (ghn.local_epochs, ghn.batch_size) == (4, 8)
    assert (rep.lr, rep.local_epochs, rep.batch_size, rep.weight_decay) == (0.3, 4, 8, 0.1)
    searching = select_methods([CAFedPNAS(lr=0.002), "feddsnas", "local"])
    assert (searching["feddsnas"].lr, searching["feddsnas"].optimizer) == (0.002, "adam")
    assert (searching["local"].lr, searching["local"].optimizer, searching["local"].batch_size) == (0.01, "sgd", 48)
    behind = select_methods([CAFedPNAS(), FedAvg(lr=0.3, batch_size=48), "local"])  # the first that trains alike
    assert behind["local"].lr == 0.3


@pytest.mark.thorough
def test_budget_of_bytes_compares_at_the_last_round_within_it(tmp_path):
    clients, words = small_clients(3), QUICK | {"rounds": 4, "seeds": [0]}
    whole = pf.compare(clients, ["pfedla"], **words, out=tmp_path / "a")
    curve = whole.results["methods"]["fedavg"]["runs"]["0"]["curve"]
    found = pf.compare(
        clients, ["pfedla"], **(words | {"budget": f"bytes={curve[1][2]}"}), out=tmp_path / "a", target=1.0
    )
    run = found.results["methods"]["fedavg"]["runs"]["0"]
    assert (run["round"], run["bytes"], run["mean"]) == (2, curve[1][2], curve[1][1])
    assert found.results["methods"]["local"]["runs"]["0"]["round"] == 4  # sends nothing
    assert run["to_target"] is None
    words |= {"budget": "bytes"}
    least = pf.compare(clients, ["pfedla"], **words, out=tmp_path / "a").results["budget"]["limit"]
    totals = [r["curve"][-1][2] for m in whole.results["methods"].values() for r in m["runs"].values()]
    assert least == min(total for total in totals if total)


def test_another_comparison_in_the_same_directory_is_refused(tmp_path):
    words = QUICK | {"seeds": [0]}
    pf.compare(small_clients(2), ["fedprox"], **words, out=tmp_path / "a")
    with pytest.raises(pf.UserError, match=r"settings.rounds was 2 and is now 3; choose another out="):
        pf.compare(small_clients(2), ["fedprox"], **(words | {"rounds": 3}), out=tmp_path / "a")
    with pytest.raises(pf.UserError, match=r"methods.fedprox.mu was"):
        pf.compare(small_clients(2), [FedProx(mu=9.0)], **words, out=tmp_path / "a")
    other = [shifted(client) for client in small_clients(2)]
    with pytest.raises(pf.UserError, match=r"fingerprints\.0 was"):
        pf.compare(other, ["fedprox"], **words, out=tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").touch()
    with pytest.raises(pf.UserError, match="not empty and holds no comparison"):
        pf.compare(small_clients(2), ["fedprox"], **words, out=tmp_path / "b")
    (tmp_path / "c").mkdir()
    with (
        lock_directory(tmp_path / "c"),  # of a comparison that begins at this moment
        pytest.raises(pf.UserError, match=r"another process is writing to the directory .*c; wait for it or stop it"),
    ):
        pf.compare(small_clients(2), ["fedprox"], **words, out=tmp_path / "c")
    assert [path.name for path in (tmp_path / "c").iterdir()] == [".lock"]


def shifted(client):
    x, y = client.test.x, client.test.y
    return pf.Client(client.id, client.model, client.train, (x + 1, y))


def test_what_is_refused():
    clients = [pf.Client(c.id, c.model, c.train, c.test) for c in small_clients(2)]
    for methods, words, sentence in (
        (["fedprx"], {}, "did you mean fedprox"),
        ([FedAvg(), FedAvg(lr=0.5)], {}, "has 'fedavg' twice"),
        (["fedavg"], {"seeds": []}, "seeds must be different whole numbers"),
        (["fedavg"], {"seeds": [1, 1]}, "seeds must be different whole numbers"),
        (["fedavg"], {"budget": "hours=3"}, "unknown budget 'hours'"),
        (["fedavg"], {"budget": "bytes=inf"}, "with a positive limit, got bytes=inf"),
        (["fedavg"], {"target": 80}, "a share such as 0.8 and not 80, got 80"),
        (["fedavg"], {"target": float("nan")}, "a number such as 0.8, got nan"),
        (["fedavg"], {"target": "0.8"}, "a number such as 0.8, got '0.8'"),
        (["fedavg"], {"seeds": 0}, "seeds must be different whole numbers, such as"),
        (["fedavg"], {"seeds": "3"}, "seeds must be different whole numbers, such as .* got '3'"),
        (None, {}, "must be a list of names or methods"),
        ({"local": FedAvg()}, {}, "'local' is the name of another method than fedavg"),
        ({"tuning": FedAvg()}, {}, "'tuning' is a name in the directory"),
        ({1: FedAvg()}, {}, "label must be a word"),
        (["fedavg"], {"tune": {}}, "tune must be fields with the values to try"),
        (["fedavg"], {"tune": ["lr"]}, "tune must be fields with the values to try"),
        (["fedavg"], {"tune": {"lr": torch.tensor([0.1])}}, "must be a list of at least one"),
        (
            ["fedavg"],
            {"tune": {"weight_decay": "grid"}},
            "weight_decay of a method is 0.0, which has no multiples to try",
        ),
        (["fedavg"], {"budget": "bytes=many"}, "the limit of a budget must be a number"),
        (["fedavg"], {"parallel": 0}, "parallel, unless it is 'auto', must be a whole number of at least 1, got 0"),
        ({"../x": "fedavg"}, {}, "label must be a word"),
        (["fedavg"], {"tune": "all"}, "tune must be 'auto', 'none', or fields with the values to try"),
        (["fedavg"], {"metrics": ["acuracy"]}, "unknown metric 'acuracy'; did you mean accuracy"),
        (["fedavg"], {"metrics": ["mae"]}, "mae is not a metric of a task of classification"),
        (["fedavg"], {"resplit": 1, "seeds": None}, "resplit must be a number of splits of at least 2, got 1"),
        (["fedavg"], {"resplit": 3}, "resplit=3 divides the data 3 times, with a seed each; got 2 seeds"),
        (["fedavg"], {"tune": {"local_epochs": [1]}}, "local_epochs cannot be searched"),
        (["fedavg"], {"tune": {"mew": [1]}}, "no method of the comparison has a field 'mew'"),
        (["fedavg"], {"tune": {"lr": []}}, "must be a list of at least one, or a range 'LOW..HIGH', got \\[\\]"),
        (["fedavg"], {"tune": {"lr": "0.1..1"}}, "needs a number of runs a method, trials=20"),
        (["fedavg"], {"tune": {"lr": "1..0.1"}, "trials": 3}, "from the lower to the higher number, got '1..0.1'"),
        (["fedavg"], {"tune": {"lr": "nan..1"}, "trials": 3}, "from the lower to the higher number, got 'nan..1'"),
        (["fedavg"], {"tune": {"lr": "much"}, "trials": 3}, "a range to search is LOW..HIGH, .* got 'much'"),
        (["fedavg"], {"tune": {"lr": "-1..1"}, "trials": 3}, "lr must be"),
        (["fedavg"], {"tune": {"lr": [0.1]}, "trials": 0}, "trials must be a whole number .* got 0"),
        (["fedavg"], {"trials": 3}, "trials=3 searches nothing"),
    ):
        with pytest.raises(pf.UserError, match=sentence):
            pf.compare(clients, methods, **(QUICK | words))
    with pytest.raises(
        pf.UserError, match="no method that federates suits these clients: fedavg needs one arch"
    ) as error:
        pf.compare(mixed_clients(), ["fedavg"], **QUICK)
    assert "fedavg_ft" not in str(error.value), "nobody asked for it"
    with pytest.raises(pf.UserError, match=r"all that it has train alone; name one besides local, such as fml: "):
        pf.compare(mixed_clients(), ["local"], **QUICK)


# -- stopped --------------------------------------------------------------------------------------------------------


def test_a_process_that_dies_or_fails_is_told_and_stops_the_others():
    def late():
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(ChildProcessError, match="the process of a died"):
        list(run_in_processes(iter([("a", lambda: os.kill(os.getpid(), signal.SIGKILL)), ("b", late)]), 2))

    def refused():
        raise pf.UserError("no such file")

    with pytest.raises(pf.UserError, match="no such file"):
        list(run_in_processes(iter([("a", refused), ("b", late)]), 2))
    assert time.monotonic() - start < 20


def test_networks_that_begin_with_other_weights_are_another_comparison(tmp_path):
    def zeros():
        net = small_clients(1)[0].model()
        for parameter in net.parameters():
            nn.init.zeros_(parameter)
        return net

    words = QUICK | {"seeds": [0]}
    pf.compare(small_clients(2), ["fedavg"], **words, out=tmp_path / "a")
    other = [pf.Client(c.id, zeros, c.train, c.test, c.val) for c in small_clients(2)]
    with pytest.raises(pf.UserError, match="first_weights was"):
        pf.compare(other, ["fedavg"], **words, out=tmp_path / "a")


def test_networks_that_begin_otherwise_at_each_call_may_be_gone_on_with(tmp_path):
    def drawn():
        net = small_clients(1)[0].model()
        with torch.no_grad():
            next(net.parameters()).mul_(np.random.default_rng().normal())
        return net

    clients, words = [pf.Client(c.id, drawn, c.train, c.test, c.val) for c in small_clients(2)], QUICK | {"seeds": [0]}
    first = pf.compare(clients, ["fedavg"], **words, out=tmp_path / "a")
    assert pf.compare(clients, ["fedavg"], **words, out=tmp_path / "a").results == first.results


def test_a_run_that_does_not_belong_there_is_refused_and_an_empty_model_is_made_again(tmp_path):
    words = QUICK | {"rounds": 1}
    found = pf.compare(small_clients(2), ["fedavg"], **words, out=tmp_path / "a")
    (tmp_path / "a/local/seed-1/models/client-0.safetensors").write_bytes(b"")
    pf.compare(small_clients(2), ["fedavg"], **words, out=tmp_path / "a")
    assert (tmp_path / "a/local/seed-1/models/client-0.safetensors").stat().st_size > 0
    shutil.rmtree(tmp_path / "a/local/seed-1")
    shutil.copytree(tmp_path / "a/local/seed-0", tmp_path / "a/local/seed-1")
    with pytest.raises(
        pf.UserError, match="does not hold the run that belongs there: seed was 0 and is now 1; remove it"
    ):
        pf.compare(small_clients(2), ["fedavg"], **words, out=tmp_path / "a")
    shutil.rmtree(tmp_path / "a/local/seed-1")
    again = pf.compare(small_clients(2), ["fedavg"], **words, out=tmp_path / "a")
    assert without_seconds(again.results) == without_seconds(found.results)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_fails_does_not_stop_the_others(processes):
    def wrong():
        raise pf.ClientError(3, "north", "local", "no power")

    found = dict(run_in_processes(iter([("a", wrong), ("b", lambda: 2)]), processes))
    assert found["b"] == 2
    assert str(found["a"]) == "round 3, client 'north', phase 'local': no power"


@pytest.mark.parametrize("parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_diverging_method_is_told_and_the_others_compared(tmp_path, parallel):
    methods = {"fedavg": FedAvg(lr=0.1), "wild": FedProx(lr=1e38, local_epochs=1)}
    words = QUICK | {"parallel": parallel, "out": tmp_path / "a", "seeds": [0]}
    found = pf.compare(small_clients(2), methods, **words)
    assert [row["method"] for row in found.table()] == ["local", "fedavg_ft", "fedavg"]
    assert "lower lr or set clip_norm (method wild, seed 0)" in found.failed["wild"]
    without = pf.compare(small_clients(2), {"fedavg": FedAvg(lr=0.1)}, **(words | {"out": None}))
    for label, method in without.results["methods"].items():
        assert without_seconds(method["runs"]) == without_seconds(found.results["methods"][label]["runs"])
    again = pf.compare(small_clients(2), methods, **words)  # fails again, and says so again
    assert again.failed.keys() == {"wild"}  # of which client, the processes decide
    assert without_seconds({**again.results, "failed": 0}) == without_seconds({**found.results, "failed": 0})


def test_if_training_alone_fails_there_are_no_gains_but_a_table():
    found = pf.compare(small_clients(2), [Local(lr=1e38), FedAvg(lr=0.1)], **(QUICK | {"seeds": [0]}))
    assert found.failed.keys() == {"local", "fedavg_ft"}  # which has the training of the first
    assert [(row["method"], row["gain"]) for row in found.table()] == [("fedavg", None)]
    assert found.verdicts == []


SCRIPT = """
import sys
import polyfed as pf
from polyfed.testing import small_clients
pf.compare(small_clients(4), ["fedprox", "pfedla"], rounds=25, seeds=[0, 1], parallel=2, out=sys.argv[1], quiet=True)
"""


@pytest.mark.slow
def test_killed_and_called_again_it_ends_as_if_it_was_not(tmp_path):
    def call(out, wait=True):
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(out)])
        return process.wait() if wait else process

    assert call(tmp_path / "whole") == 0
    out = tmp_path / "killed"
    process = call(out, wait=False)
    while len(list(out.glob("*/seed-*/models"))) < 4:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (out / "comparison.json").exists()
    done = {p: p.read_bytes() for p in out.glob("*/seed-*/metrics.jsonl") if (p.parent / "models").exists()}
    assert call(out) == 0
    kept = [p for p, content in done.items() if p.read_bytes() == content]
    assert len(kept) >= 3  # finished runs are as they were; of the last, models may have been missing
    contents = [json.loads((folder / "comparison.json").read_text()) for folder in (tmp_path / "whole", out)]
    assert without_seconds(contents[0]) == without_seconds(contents[1])


@pytest.mark.slow
def test_ctrl_c_stops_all_runs_saves_them_and_says_how_to_go_on(tmp_path):
    """As from a terminal, which sends it to all processes of the group."""
    out = tmp_path / "a"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(out)], stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while len(list(out.glob("*/seed-*/metrics.jsonl"))) < 3:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    assert f"interrupted; the complete rounds are saved: continue with the same call with out='{out}'" in told
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nobody is left
    for folder in out.glob("*/seed-*"):
        assert (folder / "config.yaml").exists()
    assert subprocess.run([sys.executable, "-c", SCRIPT, str(out)], check=True).returncode == 0
    assert subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "whole")], check=True).returncode == 0
    contents = [json.loads((folder / "comparison.json").read_text()) for folder in (tmp_path / "whole", out)]
    assert without_seconds(contents[0]) == without_seconds(contents[1])


def test_one_method_and_a_number_of_seeds_are_taken():
    words = {"tune": "none", "references": False, "parallel": 1, "quiet": True}
    results = pf.compare(small_clients(2), "fedprox", rounds=1, seeds=2, **words).results
    assert list(results["seeds"]) == [0, 1]
    assert "fedprox" in results["methods"]
