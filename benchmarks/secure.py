"""What secure sums cost in precision, and what noise on top of them costs in accuracy.

    python benchmarks/secure.py precision --out benchmarks/results/secure_precision.json     # about two minutes
    python benchmarks/secure.py epsilon --out benchmarks/results/secure_epsilon.json         # about four minutes

The 8×8 digits of scikit-learn. `precision`: five methods on six clients with label skew, with and without `secure=True`,
which is what a deployment computes, bit for bit. `epsilon`: each site clips its change and adds its share of Gaussian
noise, sized for the threshold of the secure sum; beside it what each site must add alone, where the server sees its message.
"""

import argparse
import dataclasses
import json
import math
import statistics
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import polyfed as pf
from polyfed.algorithms import FLHAGHN, FedAvg, FedBN, FedRep, PerFedAvg
from polyfed.deploy.privacy.accountant import compute_epsilon
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection, clip_and_add_noise

SEEDS, ROUNDS = (0, 1, 2), 20


class Small(nn.Module):
    """A convolution, BatchNorm, and two linear layers: 2.6k parameters."""

    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(128, width), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.body(x))


def digits(count, seed, alpha=0.5, model=Small):
    """So many clients whose mixtures of classes are drawn from a Dirichlet distribution; three quarters are for training."""
    pixels, labels = load_digits(return_X_y=True)
    generator = np.random.default_rng(seed)
    rows = [[] for _ in range(count)]
    for label in range(10):
        own = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet([alpha] * count) if alpha else np.full(count, 1 / count)
        for k, part in enumerate(np.split(own, (np.cumsum(shares)[:-1] * len(own)).astype(int))):
            rows[k].extend(part)
    clients = []
    for k, own in enumerate(rows):
        own = generator.permutation(own)
        x = torch.tensor(pixels[own] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
        y, cut = torch.tensor(labels[own]), max(1, len(own) // 4)
        clients.append(pf.Client(f"client-{k}", model, (x[cut:], y[cut:]), (x[:cut], y[:cut])))
    return clients


def accuracy(run):
    """Mean over clients, weighted by their test examples."""
    rows = [row for row in run.table() if row["client"] != "mean"]
    tests = {client.id: len(client.test) for client in run.federation.clients.values()}
    return sum(row["accuracy"] * tests[row["client"]] for row in rows) / sum(tests.values())


def largest_difference(one, other):
    """Of weights and statistics; BatchNorm's counters are means in a sum, and maxima without."""
    return max(
        float((a.double() - b.double()).abs().max())
        for client in one.federation.clients
        for a, b in zip(one.model(client).state_dict().values(), other.model(client).state_dict().values(), strict=True)
        if a.is_floating_point()
    )


PRECISION = {
    "fedavg": FedAvg(lr=0.05, momentum=0.9, batch_size=16),
    "fedbn": FedBN(lr=0.05, momentum=0.9, batch_size=16),
    "fedrep": FedRep(lr=0.05, local_epochs=2, body_epochs=1),
    "per_fedavg": PerFedAvg(lr=0.05),
    "flha_ghn": FLHAGHN(lr=0.02, depth=2, latent=12, hidden=8, batch_size=16, head="auto"),
}


def precision():
    found = {}
    for name, method in PRECISION.items():
        rows = []
        for seed in SEEDS:
            runs = {}
            for secure in (True, False):
                for rounds in (1, ROUNDS):
                    runs[secure, rounds] = pf.federate(
                        digits(6, seed),
                        method,
                        rounds=rounds,
                        seed=seed,
                        secure=secure,
                        workers=0,
                        evaluate_every=rounds,
                    )
            rows.append(
                {
                    "seed": seed,
                    "accuracy": accuracy(runs[False, ROUNDS]),
                    "accuracy_secure": accuracy(runs[True, ROUNDS]),
                    "difference_after_1_round": largest_difference(runs[True, 1], runs[False, 1]),
                    f"difference_after_{ROUNDS}_rounds": largest_difference(runs[True, ROUNDS], runs[False, ROUNDS]),
                }
            )
        found[name] = rows
        mean = {key: statistics.mean(row[key] for row in rows) for key in ("accuracy", "accuracy_secure")}
        worst = max(row["difference_after_1_round"] for row in rows)
        last = max(row[f"difference_after_{ROUNDS}_rounds"] for row in rows)
        print(
            f"{name}: accuracy {mean['accuracy']:.4f}, secure {mean['accuracy_secure']:.4f}; largest difference of weights "
            f"{worst:.1e} after 1 round, {last:.1e} after {ROUNDS}"
        )
    return {"rounds": ROUNDS, "clients": 6, "methods": found}


# -- noise ------------------------------------------------------------------------------------------------------------------

CLIENTS, NOISY_ROUNDS, DELTA = 40, 10, 1e-5
EPSILONS = (10.0, 30.0, 100.0, 300.0, 1000.0)


class Tiny(nn.Module):
    """A linear layer: 650 parameters."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(x.flatten(1))


NOISY = {  # method, and the norm C to which a change is clipped
    "fedavg": (FedAvg(lr=0.2, momentum=0.9, batch_size=16, local_epochs=2, weighted=False), 1.0),
    "flha_ghn": (
        FLHAGHN(lr=0.1, depth=1, latent=8, hidden=4, head="factored", rank=2, batch_size=32, local_epochs=2), 1.0,
    ),
}  # fmt: skip


def with_noise(method, protection, among):
    """The method at sites that clip their change and add their share of noise."""
    base = type(method)

    class Noisy(base):
        def local_update(self, message, client_state, client, seed):
            reply, client_state = super().local_update(message, client_state, client, seed)
            return clip_and_add_noise(reply, message, protection, among), client_state

    return Noisy(**{field.name: getattr(method, field.name) for field in dataclasses.fields(method)})


def multiplier(epsilon_wanted):
    """z with which so many messages cost this ε."""
    low, high = 1e-3, 1e4
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if compute_epsilon({middle: NOISY_ROUNDS}, DELTA) > epsilon_wanted else (low, middle)
    return high


def with_epsilon():
    """ε is that of exchanging a site's whole data set, over all rounds, against the server and every other site."""
    among = 2 * CLIENTS // 3  # the threshold is one more
    found = {"clients": CLIENTS, "rounds": NOISY_ROUNDS, "delta": DELTA, "threshold": among + 1, "methods": {}}
    for name, (method, clip) in NOISY.items():
        rows = found["methods"][name] = []
        for wanted in (*EPSILONS, None):
            z = 0.0 if wanted is None else multiplier(wanted)
            protection = ReplyProtection(clip_norm=clip, noise_multiplier=z)
            row = {"epsilon": wanted, "noise_multiplier": z}
            for way, share in (("secure", among), ("alone", 1)) if wanted else (("without noise", 1),):
                row[way] = [
                    accuracy(
                        pf.federate(
                            digits(CLIENTS, seed, alpha=0, model=Tiny), with_noise(method, protection, share),
                            rounds=NOISY_ROUNDS, seed=seed, secure=True, workers=0, evaluate_every=NOISY_ROUNDS,
                        )
                    )
                    for seed in SEEDS
                ]  # fmt: skip
            rows.append(row)
            shown = ", ".join(f"{way} {statistics.mean(row[way]):.3f}" for way in list(row)[2:])
            print(f"{name}, epsilon {wanted}, z {z:.3g}: {shown}", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["precision", "epsilon"])
    parser.add_argument("--out")
    given = parser.parse_args()
    found = {"precision": precision, "epsilon": with_epsilon}[given.what]()
    if given.out:
        Path(given.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
