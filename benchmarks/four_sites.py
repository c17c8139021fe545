"""Four sites with 40 to 240 handwritten digits and a network each: the page of docs/images/report_comparison_*.png.

    python benchmarks/four_sites.py DIR
    polyfed report DIR --subgroup ink
    python docs/shoot_report.py comparison=DIR/report.html

Three minutes on two cores. The digits are those of scikit-learn; `ink` says whether a digit is darker than the median.
"""

import itertools
import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import polyfed as pf

TRAIN = {"north": 40, "south": 40, "east": 80, "west": 240}
TEST = 200


def network(*widths):
    def build():
        sizes = [64, *widths]
        layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))

    return build


NETWORKS = {"north": network(32), "south": network(64), "east": network(64, 32), "west": network(128, 64)}


def sites():
    pixels, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    dark = pixels.sum(axis=1) > np.median(pixels.sum(axis=1))
    clients, at = [], 0
    for name, train in TRAIN.items():
        ends = np.cumsum([train, max(20, train // 4), TEST])
        rows, at = order[at : at + ends[-1]], at + ends[-1]
        parts = dict(zip(("train", "val", "test"), np.split(rows, ends[:2]), strict=True))
        sets = {
            part: pf.Examples(
                torch.tensor(pixels[own] / 16, dtype=torch.float32),
                torch.tensor(digits[own]),
                columns={"ink": np.where(dark[own], "dark", "light")},
            )
            for part, own in parts.items()
        }
        clients.append(pf.Client(name, NETWORKS[name], **sets))
    return clients


def main():
    found = pf.compare(
        sites(),
        {"fedavg_kd": pf.algorithms.FedAvgKD(lr=0.1, momentum=0.5, batch_size=8, local_epochs=2)},
        rounds=80,
        evaluate_every=4,
        seeds=range(5),
        tune={"lr": [0.05, 0.1, 0.2]},
        title="four sites",
        out=sys.argv[1],
    )
    print(*found.results["warnings"], *found.verdicts, sep="\n")


if __name__ == "__main__":
    main()
