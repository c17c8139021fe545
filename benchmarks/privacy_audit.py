"""Whether the ε that `privacy=` states is too small: a lower bound from one training with canaries (Steinke, Nasr and
Jagielski 2023), beside the stated ε.

    python benchmarks/privacy_audit.py --out benchmarks/results/privacy_audit.json

A linear network of 4,084 weights is trained with ordinary examples and 1,000 canaries, each a training example with
probability 1/2. A canary has one input that no other example has, so that its gradient moves weights of its own: the worst
that can happen. The attacker sees the weights after each step, as a server does that gets an update a round. Its score of a
canary is the sum over steps of ⟨the canary's clipped gradient, minus the change of weights⟩. The 100 highest scores
are guessed as included, the 100 lowest as left out. `secret` draws samples and noise as a real site does, `seeded` as a
simulation. `broken` adds a fifth of the noise that it states: what the audit must find.
"""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import nn

import polyfed as pf
from polyfed.core.examples.examples import Examples
from polyfed.core.training.loop import fit
from polyfed.core.training.privacy.randomness import PrivateRandomness, use_randomness_source
from polyfed.deploy.privacy.secret_randomness import SecretRandomness
from polyfed.report.audit.one_run_audit import count_right_guesses, epsilon_lower_bound

CANARIES, ORDINARY, CLASSES, GUESSES = 1000, 200, 4, 200
STEPS, DELTA, NORM, RATE, EPSILONS = 40, 1e-5, 1.0, 0.1, (1.0, 2.0, 4.0, 8.0)


class TooLittleNoise(PrivateRandomness):
    """Adds a fifth of the noise that is asked for."""

    def __init__(self):
        self._true = SecretRandomness()

    def draw_sample(self, num_units, sampling_rate):
        return self._true.draw_sample(num_units, sampling_rate)

    def add_noise(self, total, deviation):
        return self._true.add_noise(total, deviation / 5)


SOURCES = {
    "seeded": nullcontext,
    "secret": lambda: use_randomness_source(lambda steps: SecretRandomness()),
    "broken": lambda: use_randomness_source(lambda steps: TooLittleNoise()),
}


def make_examples(generator):
    """Ordinary examples, which canaries of their own inputs follow."""
    ordinary = np.zeros((ORDINARY, CANARIES + 20), np.float32)
    ordinary[:, CANARIES:] = generator.normal(size=(ORDINARY, 20))
    canaries = np.zeros((CANARIES, CANARIES + 20), np.float32)
    canaries[np.arange(CANARIES), np.arange(CANARIES)] = 10.0
    x = torch.from_numpy(np.concatenate([ordinary, canaries]))
    return x, torch.from_numpy(generator.integers(0, CLASSES, ORDINARY + CANARIES))


def clipped_gradients_of_canaries(model, x, y):
    """The gradients of a linear network's loss, by hand: ((p − y) ⊗ x, p − y), each of at most the norm NORM."""
    with torch.no_grad():
        errors = torch.softmax(model(x), 1) - nn.functional.one_hot(y, CLASSES)
    sizes = x.sum(1)  # the one input that is not 0
    norms = errors.norm(dim=1) * torch.sqrt(sizes**2 + 1)
    factors = (NORM / norms).clamp(max=1.0)
    return errors * (factors * sizes)[:, None], errors * factors[:, None]


def audited_epsilon(target, steps, rate_of_units, source, seed):
    """Trains once; returns the share of right guesses and the lower bound of ε."""
    generator = np.random.default_rng(seed)
    x, y = make_examples(generator)
    included = generator.random(CANARIES) < 0.5
    keep = torch.from_numpy(np.concatenate([np.ones(ORDINARY, bool), included]))
    train = Examples(x[keep], y[keep])
    torch.manual_seed(seed)
    model = nn.Linear(CANARIES + 20, CLASSES)
    batch = 0 if rate_of_units == 1 else round(rate_of_units * len(train))
    method = pf.algorithms.Local(
        batch_size=batch, local_steps=1,
        privacy=pf.Privacy(target_epsilon=target, delta=DELTA, max_grad_norm=NORM, run_steps=steps),
    )  # fmt: skip
    scores = np.zeros(CANARIES)
    place = torch.arange(CANARIES)
    with SOURCES[source]():
        for step in range(steps):
            weights, biases = clipped_gradients_of_canaries(model, x[ORDINARY:], y[ORDINARY:])
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            fit(model, train, method, lr=RATE, seed=seed * 10_000 + step, task="classification")
            moved = {name: before[name] - tensor for name, tensor in model.state_dict().items()}
            scores += ((weights * moved["weight"][:, place].T).sum(1) + biases @ moved["bias"]).numpy()
    correct = count_right_guesses(scores, included, GUESSES)
    return correct, epsilon_lower_bound(CANARIES, GUESSES, correct, DELTA)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    rows = []
    kinds = [(source, share, target) for source in ("seeded", "secret") for share in (1.0, 0.25) for target in EPSILONS]
    for source, share, target in [*kinds, ("broken", 1.0, 1.0), ("broken", 1.0, 2.0)]:
        found = [audited_epsilon(target, STEPS, share, source, seed) for seed in range(given.seeds)]
        rows.append({
            "noise": source, "sampling_rate": share, "stated": target, "right": [correct for correct, _ in found],
            "audited": [round(epsilon, 3) for _, epsilon in found],
        })  # fmt: skip
        print(rows[-1], flush=True)
    about = {
        "canaries": CANARIES, "guesses": GUESSES, "steps": STEPS, "delta": DELTA, "confidence": 0.95,
        "weights": (CANARIES + 21) * CLASSES,
    }  # fmt: skip
    given.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
