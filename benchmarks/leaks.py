"""What a curious server learns from each method: members found, best image reconstructed, labels counted.

    python benchmarks/leaks.py run --out benchmarks/results/leaks.json      about 30 minutes of one core
    python benchmarks/leaks.py hearts                                       columns of a table; a few minutes
    python benchmarks/leaks.py page                                         writes those of docs/security/how_much_leaks.md

Four clients with 60 training images each of scikit-learn's digits (8 × 8 pixels), dealt by Dirichlet 1.0; a perceptron of
64-32-10 (methods that bring networks: their own, small; methods with adapters: rank 4 on the first layer, frozen below); SGD
at 0.1, minibatches of 10, two epochs a round, 10 rounds, other fields as in the tests (`MethodExample`), one seed. The rate
is the same for all methods and not tuned; test accuracy stands next to what leaks, since a network that learnt nothing
has nothing to reveal. Three measurements, those of `pf.audit`:

- members: LiRA on each client's network, 8 shadow runs (4 for methods that search architectures), all clients together.
- images and labels from the first message of the first two clients, as trained: 60 images, 12 steps.
- the same where a client has 4 images and takes one full-batch step, the most that one message can show.

300 iterations and 2 restarts of the search for images. Protections: secure sums, DP-SGD (ε = 8 and 1, δ = 1e-5), and
compressed replies, for three methods; and a network of two convolutions, which has no first linear layer. --out is written
after each row; rows that it has are not measured again.

hearts: columns of table rows guessed from each client's network (`pf.audit`, 8 shadow runs), for the four hospitals of UCI
Heart Disease (512 training patients without the column `ca`), a perceptron of 64 hidden units, SGD at 0.05, minibatches of
16, two epochs a round, 30 rounds; a few methods, and private training of one.
"""

import argparse
import dataclasses
import json
import shutil
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.data import SOURCES, Dirichlet, Split, make_clients
from polyfed.models.lora import add_lora
from polyfed.report.audit.messages.attack_messages import attack_messages
from polyfed.simulation.rounds.start.preparation import check_and_build_federation
from polyfed.simulation.settings import Settings
from polyfed.testing import example_of

RESULTS = Path(__file__).parent / "results" / "leaks.json"
PAGE = Path(__file__).parent.parent / "docs" / "security" / "how_much_leaks.md"
START, END = "<!-- leaks: written by benchmarks/leaks.py page -->", "<!-- end of leaks -->"
START_COLUMNS, END_COLUMNS = "<!-- columns: written by benchmarks/leaks.py page -->", "<!-- end of columns -->"
ROUNDS, IMAGES, FEW, ATTACKED, ITERATIONS, RESTARTS = 10, 60, 4, 2, 300, 2
TRAINING = {"lr": 0.1, "batch_size": 10, "local_epochs": 2}
ONE_STEP = {"lr": 0.1, "batch_size": 0, "local_epochs": 1, "local_steps": 1}
PROTECTED = ("fedavg", "fedavg_ft", "fedrep")
PROTECTIONS = {
    "secure sums": {"secure": True},
    "ε = 8": {"privacy": pf.Privacy(target_epsilon=8.0)},
    "ε = 1": {"privacy": pf.Privacy(target_epsilon=1.0)},
    "int8": {"compress": "int8"},
    "topk:0.1": {"compress": "topk:0.1"},
}

HEARTS = {
    **{name: (name, None) for name in ("local", "fedavg", "fedavg_ft", "fedrep", "fedproto", "pfedla", "flha_ghn")},
    "fedavg, ε = 8": ("fedavg", 8.0), "fedavg, ε = 1": ("fedavg", 1.0),
    "local, ε = 8": ("local", 8.0),
}  # fmt: skip
HEART_TRAINING = {"lr": 0.05, "batch_size": 16, "local_epochs": 2}
SHOWN_COLUMNS = ("sex", "cp", "slope")


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def adapted():
    return add_lora(network(), rank=4, layers=["1"], train=["3.*"])


def convolutions():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def cases():
    """(key, method, protection) of all rows, the plain ones first."""
    for method in REGISTRY:
        yield method, method, ""
    for method in PROTECTED:
        for protection in PROTECTIONS:
            yield f"{method}, {protection}", method, protection
    for protection in ("", "secure sums", "ε = 8"):
        yield f"fedavg, convolutions{', ' * bool(protection)}{protection}", "fedavg", protection


def measure(key, method, protection):
    example, extra = example_of(method), PROTECTIONS.get(protection, {})
    fields = {name: extra[name] for name in ("privacy",) if name in extra}
    settings = {name: value for name, value in extra.items() if name not in fields}
    parts, _ = make_clients(SOURCES["digits"]().load(), Split(clients=5, test_fraction=0.4), Dirichlet(1.0), seed=0)
    *parts, spare = parts
    public = spare.train.head(60) if "public_data" in example.method.requires else None
    net = convolutions if "convolutions" in key else adapted if "adapters" in example.method.requires else network
    net = None if "images" in example.method.requires else net

    def members(number):
        return [pf.Client(part.id, net, part.train.head(number), part.test) for part in parts]

    def messages(number, options):
        clients, trained = members(number), example.build(**options, **fields)
        federation = check_and_build_federation(clients, trained, Settings(rounds=ROUNDS, **settings), public, None)
        ids = [client.id for client in clients[:ATTACKED]]
        return [dataclasses.asdict(entry) for entry in attack_messages(federation, ids, ITERATIONS, RESTARTS)]

    folder, clients = Path(tempfile.mkdtemp()) / "run", members(IMAGES)
    run = pf.federate(
        clients, example.build(**TRAINING, **fields), rounds=ROUNDS, workers=0, quiet=True, evaluate_every=ROUNDS,
        public=public, out=folder, **settings,
    )  # fmt: skip
    shadow_runs = 4 if net is None else 8
    report = pf.audit(folder, clients=clients, public=public, runs=shadow_runs, iterations=0)
    shutil.rmtree(folder.parent)
    row = {
        "accuracy": round(run.history[-1]["summary"]["accuracy"]["mean"], 4),
        "shadow_runs": shadow_runs,
        "auc": dataclasses.asdict(report.overall.auc),
        "tpr_at_1_percent": dataclasses.asdict(report.overall.tpr_at_1_percent),
        "as trained": messages(IMAGES, TRAINING),
    }
    try:
        row["one step"] = messages(FEW, ONE_STEP)
    except Exception as error:  # a method may refuse so few examples; the table then says nothing
        row["one step"], row["refused"] = [], f"{type(error).__name__}: {error}"
    return row


def importance(case):
    """The order of measuring: protections of `fedavg`, methods, other protections, and last what searches architectures."""
    key, method, _ = case
    return "images" in REGISTRY[method].requires, method != "fedavg", key not in REGISTRY


def run(out, only):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    setting = {
        "data": "digits", "clients": 4, "images": IMAGES, "rounds": ROUNDS, "training": TRAINING, "one_step": ONE_STEP,
        "iterations": ITERATIONS, "restarts": RESTARTS, "seed": 0,
    }  # fmt: skip
    results = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    rows = results.get("rows", {})
    for case in sorted(cases(), key=importance):
        if case[0] in rows or (only and case[0] not in only):
            continue
        rows[case[0]] = measure(*case)
        ordered = {key: rows[key] for key, *_ in cases() if key in rows}
        text = json.dumps({**results, "setting": setting, "rows": ordered}, indent=1, ensure_ascii=False) + "\n"
        beside = out.with_suffix(".new")
        beside.write_text(text, encoding="utf-8")
        beside.replace(out)
        print(show(case[0], rows[case[0]]), flush=True)


def hearts():
    """Measures the columns of Heart Disease, and writes them beside the other rows."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sites = pf.data.heart(drop="ca")
    build = pf.models.ModelSpec("mlp", {"hidden": (64,)}, (sites.num_features,), sites.num_outputs)
    clients = sites.build_clients({part.id: build for part in sites.client_data})
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = results.setdefault("hearts", {})
    for key in [key for key in HEARTS if key not in rows]:
        method, epsilon = HEARTS[key]
        privacy = {} if epsilon is None else {"privacy": pf.Privacy(target_epsilon=epsilon)}
        folder = Path(tempfile.mkdtemp()) / "run"
        run = pf.federate(
            clients, pf.algorithms.get(method)(**HEART_TRAINING, **privacy), rounds=30, workers=0, quiet=True,
            evaluate_every=30, out=folder,
        )  # fmt: skip
        report = pf.audit(folder, clients=clients, runs=8, iterations=0)
        shutil.rmtree(folder.parent)
        rows[key] = {
            "accuracy": round(run.history[-1]["summary"]["accuracy"]["mean"], 4),
            "auc": dataclasses.asdict(report.overall.auc),
            "attributes": [dataclasses.asdict(entry) for entry in report.attributes],
        }
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(show_columns(key, rows[key]), flush=True)


def best(entries):
    """The best PSNR of the attacked clients, with that against images of others; a dash without candidates."""
    pairs = [(e["best_psnr"], e["other_best_psnr"]) for e in entries if e["best_psnr"] is not None]
    return "–" if not pairs else "{:.0f} ({:.0f})".format(*max(pairs))


def labels(entries):
    """The mean share of labels that are counted rightly, with that of a guess; and how."""
    counted = [e for e in entries if e["labels_right"] is not None]
    if not counted:
        return "–"
    right, guess = (
        100 * sum(e[name] for e in counted) / len(counted) for name in ("labels_right", "labels_right_by_guess")
    )
    source = counted[0]["label_source"]
    return f"{right:.0f} ({guess:.0f}) {source}"


def show(key, row):
    rate, cells = row["tpr_at_1_percent"], [f"`{key}`" if key in REGISTRY else key]
    cells.append(f"{100 * row['accuracy']:.0f}")
    cells.append("{:.1f} ({:.1f} to {:.1f})".format(*(100 * rate[end] for end in ("value", "low", "high"))))
    return f"| {' | '.join([*cells, best(row['as trained']), best(row['one step']), labels(row['as trained'])])} |"


def show_columns(key, row):
    """A row on columns: of rows trained on, of other rows."""
    cells, entries = [f"`{key}`" if key in REGISTRY else key, f"{100 * row['accuracy']:.0f}"], row["attributes"]
    for entry in (entry for name in SHOWN_COLUMNS for entry in entries if entry["column"] == name):
        inside, outside = (
            "{:.0f} ({:.0f} to {:.0f})".format(*(100 * entry[kind][end] for end in ("value", "low", "high")))
            for kind in ("trained_on", "others")
        )
        cells.append(f"{inside}, others {outside}")
    return f"| {' | '.join(cells)} |"


def table_of_columns(results):
    """The table on columns of Heart Disease, as text."""
    rows = results["hearts"]
    frequent = {entry["column"]: entry["most_frequent"] for entry in next(iter(rows.values()))["attributes"]}
    heads = [f"`{name}`: most frequent {100 * frequent[name]:.0f}" for name in SHOWN_COLUMNS]
    head = f"| method | accuracy | {' | '.join(heads)} |\n{'|---' * (2 + len(heads))}|"
    return "\n".join([head, *(show_columns(key, rows[key]) for key in HEARTS if key in rows)])


def tables(results):
    """The tables of docs/security/how_much_leaks.md, as text: all methods, then protections."""
    head = (
        "| method | accuracy | members found | image, as trained | image, one step | labels counted |\n"
        + "|---" * 6
        + "|"
    )
    rows = results["rows"]
    plain = [show(key, rows[key]) for key in REGISTRY if key in rows]
    missing = [f"`{key}`" for key in REGISTRY if key not in rows]
    note = ["", f"Not measured yet: {', '.join(missing)}."] if missing else []
    compared = [key for key in rows if key.partition(",")[0] in PROTECTED]
    order = sorted(compared, key=lambda key: (PROTECTED.index(key.partition(",")[0]), "convolutions" in key))
    first = "With and without protections:"
    return "\n".join([head, *plain, *note, "", first, "", head, *(show(key, rows[key]) for key in order)])


def updated_page(text, results):
    before, rest = text.split(START)
    text = f"{before}{START}\n\n{tables(results)}\n\n{END}{rest.split(END)[1]}"
    before, rest = text.split(START_COLUMNS)
    return f"{before}{START_COLUMNS}\n\n{table_of_columns(results)}\n\n{END_COLUMNS}{rest.split(END_COLUMNS)[1]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("run")
    measuring.add_argument("--out", type=Path, default=RESULTS)
    measuring.add_argument("--only", nargs="*", help="these rows alone, for a pilot")
    commands.add_parser("hearts")
    commands.add_parser("page")
    chosen = parser.parse_args()
    if chosen.command == "run":
        run(chosen.out, chosen.only)
    elif chosen.command == "hearts":
        hearts()
    else:
        results = json.loads(RESULTS.read_text(encoding="utf-8"))
        PAGE.write_text(updated_page(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
