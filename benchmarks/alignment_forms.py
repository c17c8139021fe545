"""What two choices in FedHeNN's kernels amount to: centring, which eq. 4 is printed without, and rank.

    python benchmarks/alignment_forms.py --path FOLDER_OF_CIFAR10 [--out benchmarks/results/alignment_forms.json]

The five CNNs at the paper's width, untrained and after 5 epochs alone on 300 images of two classes each (another pair for
each network), see 1,000 test images. Written are the mean CKA of two of them, centred and as eq. 4 is printed; and CKA of
each network's representation, and of the mean kernel of all five, with its first 128 principal components.
"""

import argparse
import json
from itertools import combinations
from pathlib import Path
from statistics import fmean

import torch
from torch.linalg import matrix_norm

from polyfed.algorithms import Local
from polyfed.alignment import compute_representations, linear_cka, mean_kernel_features, reduce_to_principal_components
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.training.loop import fit
from polyfed.data.sources.published.vision import CIFAR10
from polyfed.models import ModelSpec

LEVELS, RANK, SEEN, OWN, EPOCHS = range(1, 6), 128, 1000, 300, 5


def as_printed(a, b):
    """Equation 4."""
    return float(matrix_norm(b.T @ a) ** 2 / (matrix_norm(a.T @ a) * matrix_norm(b.T @ b)))


def of(parts):
    pairs, mean = list(combinations(parts, 2)), mean_kernel_features(parts, [1 / len(parts)] * len(parts))
    return {
        "cka": fmean(float(linear_cka(a, b)) for a, b in pairs),
        "as_printed": fmean(as_printed(a, b) for a, b in pairs),
        "of_rank": [float(linear_cka(a, reduce_to_principal_components(a, RANK))) for a in parts],
        "mean_of_rank": float(linear_cka(mean, reduce_to_principal_components(mean, RANK))),
        "widths": [a.shape[1] for a in parts],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True)
    parser.add_argument("--out", default="benchmarks/results/alignment_forms.json")
    given = parser.parse_args()
    pool, found = CIFAR10(path=given.path).load(), {}
    seen = pool.test.select(torch.arange(SEEN))
    with exclusive_single_torch_thread_with_grad():
        networks = []
        for level in LEVELS:
            torch.manual_seed(level)
            networks.append(ModelSpec("cnn_fedhenn", {"level": level}, (3, 32, 32), 10)())
        found["untrained"] = of([compute_representations(net, seen) for net in networks])
        options = Local(local_epochs=EPOCHS, batch_size=32, momentum=0.5)
        for k, net in enumerate(networks):
            two = (pool.train.labels == 2 * k) | (pool.train.labels == 2 * k + 1)
            fit(net, pool.train.select(two.nonzero().flatten()[:OWN]), options, lr=0.01, seed=k)
        found["trained"] = of([compute_representations(net, seen) for net in networks])
    print(json.dumps(found, indent=1))
    Path(given.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
