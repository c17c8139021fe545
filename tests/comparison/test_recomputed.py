"""What a comparison says, computed again from what its directory holds: predictions, networks and nothing else."""

import math
from statistics import fmean

import pytest
import safetensors.torch
import torch
from torch import nn

import polyfed as pf
from polyfed.comparison.statistics.mrmc import (
    estimate_client_means,
    estimate_mean_over_clients,
    estimate_variance_components,
)
from polyfed.comparison.storage.comparison_directory import load_comparison
from polyfed.core.evaluation.metrics import METRICS
from polyfed.simulation.storage.predictions import prediction_store as predictions
from polyfed.testing import small_clients


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def ends(estimate, least):
    """Of an interval of accuracy, which is a share."""
    return [max(estimate.low, least), min(estimate.high, 1.0)] if math.isfinite(estimate.low) else None


@pytest.mark.thorough
@pytest.mark.parametrize("validated", [True, False], ids=["validation examples", "held out for the search"])
def test_scores_and_intervals_are_those_of_the_predictions_and_networks_that_are_kept(tmp_path, validated):
    clients = [pf.Client(c.id, network, c.train, c.test, c.val if validated else None) for c in small_clients(2)]
    pf.compare(
        clients, ["fedavg"], rounds=2, seeds=[0, 1], tune="none" if validated else {"lr": [20.0]}, references=False,
        parallel=1, quiet=True, out=tmp_path,
    )  # fmt: skip
    content = load_comparison(tmp_path).results
    accuracy, seeds, ids = METRICS["accuracy"], ("0", "1"), [client.id for client in clients]
    outputs, targets = {}, {}
    rounds, compared = set(), []
    for label, method in content["methods"].items():
        for seed in seeds:
            run = method["runs"][seed]
            rounds.add(run["round"])
            if not validated:
                assert run["round"] == content["tuning"]["rounds"][label]
            for client in clients:
                whose = run.get("rounds", {}).get(client.id, run["round"])  # alone, each client has a round of its own
                kept = predictions.read_predictions(tmp_path / run["path"], client.id, round=whose)
                assert kept.round == whose
                rounds.add(whose)
                assert torch.equal(kept.targets, client.test.labels)
                if (
                    whose == predictions.read_predictions(tmp_path / run["path"], client.id).round
                ):  # that of the kept networks
                    kept_network = network().eval()
                    file = tmp_path / run["path"] / "models" / f"{client.id}.safetensors"
                    kept_network.load_state_dict(safetensors.torch.load_file(file))
                    with torch.no_grad():
                        torch.testing.assert_close(kept_network(client.test.x), kept.outputs)
                    compared.append(label)
                right = (kept.outputs.argmax(1) == kept.targets).double().mean()
                assert run["scores"][client.id] == pytest.approx(float(right))
                outputs[label, seed, client.id], targets[client.id] = kept.outputs, kept.targets
            assert run["mean"] == pytest.approx(fmean(run["scores"].values()))
    assert {"fedavg", "fedavg_ft"} <= set(compared)
    assert 1 in rounds, "all runs are compared at their last round, with which this test shows less"

    def site(label, other, client):
        ours, theirs = ([outputs[one, seed, client] for seed in seeds] if one else None for one in (label, other))
        return estimate_variance_components(accuracy, ours, theirs, targets[client])

    others = len(content["methods"]) - 1
    for label, method in content["methods"].items():
        told = method["statistics"]
        own = estimate_mean_over_clients([site(label, None, client) for client in ids])
        assert told["mean"] == pytest.approx(own.value)
        assert told["interval"] == pytest.approx(ends(own, 0.0))
        if label == "local":
            continue
        gains = [site(label, "local", client) for client in ids]
        over_all = estimate_mean_over_clients(gains, num_tests=others)
        assert told["gain"] == pytest.approx(over_all.value)
        assert told["gain_interval"] == pytest.approx(ends(over_all, -1.0))
        for client, gain in zip(ids, estimate_client_means(gains, num_tests=others), strict=True):
            assert told["clients"][client]["gain"] == pytest.approx(gain.value)
            assert told["clients"][client]["gain_interval"] == pytest.approx(ends(gain, -1.0))
