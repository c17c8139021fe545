"""Seconds of a round of FedAvg in polyfed and in pfl-research 0.6: the same users, made when they are drawn, the same
network, cohort and steps; one process and one thread, in turns.

It runs with a Python that has pfl, as `cohorts_pfl.py` says, and polyfed:

    PYTHONPATH=src /tmp/pfl/bin/python benchmarks/million_pfl.py --out benchmarks/results/million_pfl.json

100 of 100,000 users a round, each with 16 to 48 examples of 16 numbers, and two steps of a network with 32 hidden units. The
first round does not count, and nothing is evaluated. Seconds are those of the processor, which other programs hardly change.
"""

import argparse
import json
import random
import statistics
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from cohorts_pfl import Counted, with_loss
from million import COHORT, build_mlp
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel

import polyfed as pf
from polyfed.data import SyntheticClients

STEPS, BATCH = 2, 16


class Clock(TrainingProcessCallback):
    """Holds the processor's time at the end of each round of pfl."""

    def __init__(self):
        self.ends = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.ends.append(time.process_time())
        return False, aggregate_metrics if aggregate_metrics is None else type(aggregate_metrics)()


def time_polyfed(source, rounds):
    """Returns the seconds of each round but the first and the last, which is evaluated."""
    ends = []
    pf.federate(
        source, pf.algorithms.FedAvg(lr=0.05, local_steps=STEPS, batch_size=BATCH), rounds=rounds + 2,
        clients_per_round=COHORT, evaluate_clients=1, evaluate_every=rounds + 2, checkpoint_every=rounds + 2,
        engine="inprocess", workers=0, quiet=True, callbacks=[lambda record: ends.append(time.process_time())],
    )  # fmt: skip
    return [after - before for before, after in pairwise(ends[:-1])]


def time_pfl(source, rounds):
    """Returns the seconds of each round but the first; checks that as many steps were taken."""
    draw, ids, clock = random.Random(0), list(source.ids), Clock()

    def make_dataset(user):
        train = source.client(user).train
        return Dataset(list(train.batch(torch.arange(len(train)))), user_id=user)

    data = FederatedDataset(make_dataset, lambda: draw.choice(ids))
    network = with_loss(build_mlp(16, 4))
    model = PyTorchModel(network, Counted, torch.optim.SGD(network.parameters(), lr=1.0))
    Counted.steps = 0
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds + 1, evaluation_frequency=10**6, train_cohort_size=COHORT, val_cohort_size=0
        ),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(
            local_num_epochs=None, local_learning_rate=0.05, local_batch_size=BATCH, local_num_steps=STEPS
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
    )  # fmt: skip
    print("steps of pfl a client and round:", Counted.steps / (rounds + 1) / COHORT)
    return [after - before for before, after in pairwise(clock.ends)]


def main():
    """Measures both in turns, and prints the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = SyntheticClients(options.users, shape=(16,), examples=(16, 48), model=partial(build_mlp, 16, 4))
    seconds = {"polyfed": [], "pfl": []}
    for _ in range(options.turns):
        seconds["polyfed"].append(statistics.median(time_polyfed(source, options.rounds)))
        seconds["pfl"].append(statistics.median(time_pfl(source, options.rounds)))
    medians = {name: statistics.median(of) for name, of in seconds.items()}
    content = {
        "users": options.users, "cohort": COHORT, "seconds_of_a_round": seconds, "medians": medians,
        "pfl_over_polyfed": [theirs / ours for ours, theirs in zip(seconds["polyfed"], seconds["pfl"], strict=True)],
    }  # fmt: skip
    print(json.dumps(content))
    if options.out:
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
