"""Four hospitals of unequal size, each with a network of its own, tell malignant from benign tumours.

The data come with scikit-learn (Breast Cancer Wisconsin): 30 measurements of cell nuclei for each of 569 patients. Here they
are dealt to four hospitals; take your own patients instead.
"""

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

import polyfed as pf

PATIENTS = {"north": 60, "south": 90, "east": 140, "west": 279}
MALIGNANT = {"north": 30, "south": 40, "east": 56, "west": 86}  # half of them in the north, a third in the west


# -- the networks: hospitals need not agree on one --------------------------------------------------------------------


def linear():
    return nn.Linear(30, 2)


def narrow():
    return nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))


def wide():
    return nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))


def deep():
    return nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))


NETWORKS = {"north": linear, "south": narrow, "east": wide, "west": deep}


# -- the patients -----------------------------------------------------------------------------------------------------


def hospitals(seed=0):
    """A client for each hospital; `seed` decides who is treated where. Label 1 is malignant."""
    measured, benign = load_breast_cancer(return_X_y=True)
    rng = np.random.default_rng(seed)
    malignant, others = (rng.permutation(np.flatnonzero(benign == label)).tolist() for label in (0, 1))
    clients = []
    for name, number in PATIENTS.items():
        train, val, test = [], [], []
        for patients, count in ((malignant, MALIGNANT[name]), (others, number - MALIGNANT[name])):
            own = [patients.pop() for _ in range(count)]
            for_test, for_val = round(0.3 * count), round(0.15 * count)
            test += own[:for_test]
            val += own[for_test : for_test + for_val]
            train += own[for_test + for_val :]
        # A hospital knows mean and spread of its own training patients, and of no others.
        mean, spread = measured[train].mean(axis=0), measured[train].std(axis=0)
        sets = {
            part: (torch.tensor((measured[rows] - mean) / spread, dtype=torch.float32), torch.tensor(1 - benign[rows]))
            for part, rows in {"train": train, "val": val, "test": test}.items()
        }
        clients.append(pf.Client(name, NETWORKS[name], **sets))
    return clients


# -- does it help them to work together? ------------------------------------------------------------------------------

TRAINING = {"lr": 0.1, "batch_size": 16, "local_epochs": 2}  # the learning rate is where the search begins
METHODS = {
    "local": pf.algorithms.Local(**TRAINING),
    "fedavg_kd": pf.algorithms.FedAvgKD(alpha=0.5, temperature=4.0, **TRAINING),
    "pfedhn": pf.algorithms.PFedHN(hn_lr=0.03, local_steps=None, **TRAINING),
}


def compare_methods(number=0):
    """The comparison: each hospital's patients are dealt five times to training and test, and AUC decides."""
    metrics, seeds = ["auc", "accuracy", "brier"], range(5 * number, 5 * number + 5)
    clients = hospitals(seed=number)
    return pf.compare(clients, METHODS, rounds=20, seeds=seeds, metrics=metrics, resplit=5, title="four hospitals")


if __name__ == "__main__":
    comparison = compare_methods()
    print(*comparison.results["warnings"], *comparison.answers, sep="\n")
