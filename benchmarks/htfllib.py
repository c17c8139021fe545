"""polyfed's methods and HtFLlib's on HtFLlib's own setting: its eight CNNs on Fashion-MNIST, smaller.

    git clone https://github.com/TsingZ0/HtFLlib
    python benchmarks/htfllib.py --htfllib HtFLlib --out benchmarks/results/htfllib.json

20 clients have the eight networks of HtFLlib's group HCNNs8 in turn, 200 training and 200 test images each (Dirichlet 0.1
over the ten classes), and take an epoch a round of plain SGD, minibatches of 10, learning rate 0.01. These are HtFLlib's
settings, with fewer images and rounds. The weights of its `total.sh` are set in both (`SETTINGS`). Each repetition has its
own split, the same for both libraries, which also begin with the same weights, and run one after the other in one thread.
Printed: test accuracy after the last round, mean over clients and repetitions; the difference with its interval of 95 % over
clients; seconds of the processor a round, without evaluation.

HtFLlib reads its data from files that this script writes. It needs torchvision and h5py only for networks and files that are
not used here, so that empty modules take their place.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CLIENTS, TRAIN, TEST, BATCH, RATE, CLASSES, WIDTH = 20, 200, 200, 10, 0.01, 10, 512
NETWORKS = ((1, ()), (2, ()), (1, (512,)), (2, (512,)), (1, (1024,)), (2, (1024,)), (1, (1024, 512)), (2, (1024, 512)))
T_QUANTILE = 2.093  # of Student's t with 19 degrees of freedom, 97.5 %


@dataclass(frozen=True)
class Pair:
    """A method: HtFLlib's module and class with options, and polyfed's name with options of the same meaning."""

    module: str
    name: str
    options: Mapping[str, float]
    polyfed: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    sends_before: bool = False  # HtFLlib evaluates after the server's head has been handed out
    edits: Sequence[tuple[str, str, str]] = ()  # a file of HtFLlib's, a text in it, and what takes its place


SETTINGS = {
    "local": Pair("serverlocal", "Local", {}, "local"),
    "lg_fedavg": Pair("serverlg", "LG_FedAvg", {}, "lg_fedavg", {}, sends_before=True),
    "fedproto": Pair("serverproto", "FedProto", {"lamda": 10.0}, "fedproto", {"lam": 10.0}),
    "fedtgp": Pair(
        "servertgp", "FedTGP", {"lamda": 10.0, "server_epochs": 100, "margin_threthold": 100.0}, "fedtgp",
        {"lam": 10.0, "server_epochs": 100, "margin": 100.0, "server_lr": RATE},
    ),
    "fedgh": Pair(
        "servergh", "FedGH", {"server_learning_rate": 0.01, "server_epochs": 1}, "fedgh",
        {"server_lr": 0.01, "server_epochs": 1, "evaluate": "global"}, sends_before=True,
    ),
    "fd": Pair("serverfd", "FD", {"lamda": 1.0}, "fd", {"gamma": 1.0}),
    "fd_softmax": Pair(  # HtFLlib's takes the cross-entropy with raw outputs; here with their softmax, as the paper does
        "serverfd", "FD", {"lamda": 1.0}, "fd", {"gamma": 1.0},
        edits=[("flcore/clients/clientfd.py", "output[i, :].detach()", "output[i, :].detach().softmax(0)"),
               ("flcore/clients/clientfd.py", "copy.deepcopy(output.detach())", "output.detach().softmax(1)")],
    ),
    "fml": Pair(
        "serverfml", "FML", {"alpha": 0.5, "beta": 0.5}, "fml",
        {"alpha": 0.5, "beta": 0.5, "shared": "htfllib:build_first", "weighted": False},
    ),
    "fedkd": Pair(
        "serverkd", "FedKD", {"mentee_learning_rate": RATE, "T_start": 0.95, "T_end": 0.98}, "fedkd",
        {"t_start": 0.95, "t_end": 0.98, "shared": "htfllib:build_first"},
    ),
}  # fmt: skip


def build(place: int) -> nn.Sequential:
    """One of the eight networks of HCNNs8: convolutions of 5×5, hidden layers, and a representation of 512 numbers."""
    convolutions, hidden = NETWORKS[place % len(NETWORKS)]
    layers: list[nn.Module] = []
    channels, side = 1, 28
    for wider in (32, 64)[:convolutions]:
        layers += [nn.Conv2d(channels, wider, 5), nn.ReLU(), nn.MaxPool2d(2)]
        channels, side = wider, (side - 4) // 2
    layers.append(nn.Flatten())
    width = channels * side**2
    for wider in (*hidden, WIDTH):
        layers += [nn.Linear(width, wider), nn.ReLU()]
        width = wider
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def build_first() -> nn.Sequential:
    """The network that FML and FedKD share: the first of the eight, as in HtFLlib."""
    return build(0)


def begun(weights: Sequence[Tensor], place: int) -> nn.Sequential:
    """A network with given weights."""
    network = build(place)
    with torch.no_grad():
        for parameter, values in zip(network.parameters(), weights, strict=True):
            parameter.copy_(values)
    return network


def deal(path: str, seed: int) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """The clients' images, between -1 and 1 as HtFLlib's, and labels."""
    import polyfed as pf
    from polyfed.data.sources.published.vision import FashionMNIST

    pool = FashionMNIST(path=path, deal_test=True).load()
    split = pf.data.Split(clients=CLIENTS, examples_per_client=TRAIN, test_fraction=TEST / (TRAIN + TEST))
    parts, _ = pf.data.make_clients(pool, split, pf.data.Dirichlet(alpha=0.1), seed=seed)
    order = torch.Generator().manual_seed(seed)
    sets = []
    for part in parts:
        shuffled = torch.randperm(TRAIN, generator=order)  # HtFLlib goes through the images in their order
        images = {
            name: examples.raw_inputs.float() / 127.5 - 1
            for name, examples in (("train", part.train), ("test", part.test))
        }
        labels = {"train": part.train.labels, "test": part.test.labels}
        sets.append(
            {"train": (images["train"][shuffled], labels["train"][shuffled]), "test": (images["test"], labels["test"])}
        )
    return sets


def write_files(clients: Sequence[Mapping[str, tuple[Tensor, Tensor]]], folder: Path) -> None:
    """Writes HtFLlib's data files: an archive for each client and set."""
    for number, sets in enumerate(clients):
        for name, (images, labels) in sets.items():
            (folder / "dataset" / "fmnist" / name).mkdir(parents=True, exist_ok=True)
            content = {"x": images.numpy(), "y": labels.numpy()}
            np.savez_compressed(
                folder / "dataset" / "fmnist" / name / f"{number}.npz", data=np.array(content, dtype=object)
            )


def seconds_a_round(stamps: Sequence[float]) -> float:
    """The mean of the rounds between these times of the processor."""
    return (stamps[-1] - stamps[0]) / (len(stamps) - 1)


def edited_copy(system: Path, pair: Pair, folder: Path) -> Path:
    """HtFLlib's code with a method's edits."""
    for part in ("flcore", "utils"):
        shutil.copytree(system / part, folder / "edited" / part)
    for name, text, instead in pair.edits:
        file = folder / "edited" / name
        before = file.read_text(encoding="utf-8")
        if text not in before:
            raise SystemExit(f"{name} of {system} has no {text!r}: this script is for HtFLlib at e959261")
        file.write_text(before.replace(text, instead), encoding="utf-8")
    return folder / "edited"


def run_htfllib(pair: Pair, checkout: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """What HtFLlib's classes give; called in a process of its own."""
    for missing in ("h5py", "torchvision"):
        with contextlib.suppress(ImportError):
            importlib.import_module(missing)
        sys.modules.setdefault(missing, types.ModuleType(missing))
    (folder / "system").mkdir(exist_ok=True)
    os.chdir(folder / "system")
    sys.path.insert(0, str(edited_copy(checkout / "system", pair, folder) if pair.edits else checkout / "system"))
    forms = [
        f"CNN(num_cov={n}, hidden_dims={list(hidden)}, in_features=1, num_classes={CLASSES})" for n, hidden in NETWORKS
    ]
    options = argparse.Namespace(
        device="cpu", dataset="fmnist", num_classes=CLASSES, global_rounds=rounds - 1, local_epochs=1, batch_size=BATCH,
        local_learning_rate=RATE, num_clients=CLIENTS, join_ratio=1.0, random_join_ratio=False, few_shot=0,
        algorithm=pair.name, time_select=False, goal="test", time_threthold=10000, top_cnt=100, auto_break=False,
        save_folder_name="kept", eval_gap=10**9, client_drop_rate=0.0, train_slow_rate=0.0, send_slow_rate=0.0,
        feature_dim=WIDTH, models_folder_name="", models=forms, **pair.options,
    )  # fmt: skip
    torch.manual_seed(0)
    server = getattr(importlib.import_module(f"flcore.servers.{pair.module}"), pair.name)(options, 0)
    load = importlib.import_module("flcore.clients.clientbase").load_item
    first = [list(load(one.role, "model", one.save_folder_name).parameters()) for one in server.clients]
    if pair.sends_before:  # all begin with the first client's head
        first = [[*weights[:-2], *first[0][-2:]] for weights in first]
    torch.save([[tensor.detach().clone() for tensor in weights] for weights in first], folder / "first.pt")
    server.save_results, server.evaluate, server.rs_test_acc = (lambda: None), (lambda: None), [0.0]
    importlib.import_module("sklearn.metrics").roc_auc_score = lambda *_, **__: (
        0.0
    )  # not used; it refuses outputs of NaN
    stamps, select = [], server.select_clients  # called once, at the beginning of a round

    def select_and_note() -> Any:
        stamps.append(time.process_time())
        return select()

    server.select_clients = select_and_note
    server.train()
    if pair.sends_before:
        server.send_parameters()
    _, sizes, correct, _ = server.test_metrics()
    shares = [hits / size for hits, size in zip(correct, sizes, strict=True)]
    trained = [load(one.role, "model", one.save_folder_name) for one in server.clients]
    diverged = sum(not all(tensor.isfinite().all() for tensor in network.parameters()) for network in trained)
    return {"clients": shares, "seconds": seconds_a_round(stamps), **({"diverged": diverged} if diverged else {})}


def run_polyfed(
    pair: Pair, clients: Sequence[Mapping[str, tuple[Tensor, Tensor]]], folder: Path, rounds: int, seed: int
) -> dict[str, Any]:
    """What polyfed's method gives from the same weights."""
    import polyfed as pf
    from polyfed.simulation.monitoring.progress import SilentProgress

    first = torch.load(folder / "first.pt", weights_only=True)
    members = [
        pf.Client(f"client-{number:02}", partial(begun, first[number], number), sets["train"], sets["test"])
        for number, sets in enumerate(clients)
    ]
    pf.trust_code("htfllib:build_first")
    method = pf.algorithms.get(pair.polyfed)(**{"lr": RATE, "batch_size": BATCH, **pair.settings})
    stamps: list[float] = []

    class Clock(pf.Callback):
        def on_aggregated(self, round_number: int) -> None:
            stamps.append(time.process_time())

    run = pf.federate(
        members, method, rounds=rounds, seed=seed, evaluate_every=rounds, workers=0, progress=SilentProgress(),
        callbacks=[Clock()],
    )  # fmt: skip
    shares = [row["accuracy"] for row in run.table()[:CLIENTS]]
    return {"clients": shares, "seconds": seconds_a_round(stamps)}


def show(results: Mapping[str, Any]) -> None:
    """Prints the table."""
    print(
        "| method | rounds | HtFLlib | polyfed | difference | s a round, HtFLlib | polyfed |\n|---|---|---|---|---|---|---|"
    )
    for name, entry in results.items():
        rounds, runs = entry["rounds"], [entry[seed] for seed in entry if seed != "rounds"]
        by_client = {
            library: [
                statistics.mean(shares) for shares in zip(*(run[library]["clients"] for run in runs), strict=True)
            ]
            for library in ("htfllib", "polyfed")
        }
        ahead = [one - other for one, other in zip(by_client["polyfed"], by_client["htfllib"], strict=True)]
        half = T_QUANTILE * statistics.stdev(ahead) / len(ahead) ** 0.5
        means = " | ".join(f"{100 * statistics.mean(shares):.1f}" for shares in by_client.values())
        seconds = " | ".join(f"{statistics.mean(run[library]['seconds'] for run in runs):.1f}" for library in by_client)
        print(f"| {name} | {rounds} | {means} | {100 * statistics.mean(ahead):+.1f} ± {100 * half:.1f} | {seconds} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--htfllib", type=Path, required=True, help="a checkout of HtFLlib")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file; what it has is not computed again")
    parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist", help="the folder with the IDX files")
    parser.add_argument("--seeds", default="0", help="repetitions, with commas")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", default=",".join(SETTINGS), help="methods, with commas")
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # the method, in HtFLlib's process, whose folder --data is
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.inside:
        folder = Path(options.data)
        with contextlib.redirect_stdout(io.StringIO()):
            outcome = run_htfllib(SETTINGS[options.inside], options.htfllib, folder, options.rounds)
        (folder / "outcome.json").write_text(json.dumps(outcome), encoding="utf-8")
        return
    results: dict[str, Any] = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    for seed in options.seeds.split(","):
        clients = deal(options.data, int(seed))
        for name in options.only.split(","):
            entry = results.setdefault(name, {"rounds": options.rounds})
            if entry["rounds"] != options.rounds:
                raise SystemExit(f"{options.out}: {name} has {entry['rounds']} rounds, not {options.rounds}")
            if seed in entry:
                continue
            with tempfile.TemporaryDirectory() as path:
                folder = Path(path)
                write_files(clients, folder)
                words = [
                    sys.executable,
                    __file__,
                    "--htfllib",
                    str(options.htfllib.resolve()),
                    "--out",
                    str(options.out),
                ]
                words += ["--inside", name, "--data", path, "--rounds", str(options.rounds)]
                # HtFLlib reads networks that it has just written, which torch 2.6 and later do not by default
                here = {**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "PYTHONWARNINGS": "ignore"}
                subprocess.run(words, check=True, env=here)
                theirs = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
                entry[seed] = {"htfllib": theirs}
                entry[seed]["polyfed"] = run_polyfed(SETTINGS[name], clients, folder, options.rounds, int(seed))
            options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(f"{name}, seed {seed}", flush=True)
    show(results)


if __name__ == "__main__":
    main()
