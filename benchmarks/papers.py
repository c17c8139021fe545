"""The papers' tables, measured, and accuracy over the number of examples a client.

    python benchmarks/papers.py list
    python benchmarks/papers.py run pfedla/table1 fedhenn/table2 ... [--seeds 0,1,2] [--data NAME=FOLDER] [--only NAME
        [--variant PATTERN] [--add]]
        `all` is every table; --only what is on this data set, and of that these variants; --add joins these seeds with those
        in results/papers, and wants a folder of runs of its own
    python benchmarks/papers.py examples pfedla ... [--seeds 0,1,2] [--sizes 20,40,80,160,320]
    python benchmarks/papers.py page                        docs/results.md with its pictures and docs/papers.md

A table is `polyfed reproduce` at scale cpu; a curve is `polyfed compare`, which tunes each method's rate on validation
examples. Runs are in --runs (runs/papers). What is finished is not repeated, and what was stopped goes on. Results are in
benchmarks/results/papers, one file a table or curve.

Intervals of tables: each seed deals other data, other test examples, and trains anew. So the differences of two methods by
seed are independent, and Student's t interval over them covers new seeds, data and examples. It is for one difference at a
time. Intervals of curves are those of `polyfed compare` (crossed over seeds and test examples, for all methods together).
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean

import numpy as np
import papers_list
import papers_page
from papers_cells import completed, gains
from papers_curves import EVERY

from polyfed.algorithms import REGISTRY
from polyfed.cli.commands.papers import reproduce_command
from polyfed.cli.commands.papers.paper_tables import find_table
from polyfed.cli.commands.papers.reproduce_command import ReproduceOptions
from polyfed.cli.main import main as polyfed
from polyfed.comparison.statistics.mrmc import (
    estimate_mean_over_clients,
    score_seeds,
    variance_components_of_difference,
)
from polyfed.core.errors import RoundError
from polyfed.core.evaluation.metrics import METRICS
from polyfed.simulation.storage.directory import read_metrics
from polyfed.simulation.storage.predictions import prediction_store as predictions

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "papers"
FOLDERS = {"fashion_mnist": "/usr/share/datasets/fashion-mnist", "cifar10": "cifar10", "sentiment140": "sentiment140"}


@dataclass(frozen=True)
class Table:
    """A table or figure.

    Attributes:
        variants: to run, by the data set that they need (whose folder is given by --data); None is all.
        own: the rows of the paper's method, or with `by="column"` the columns.
        over: those it is compared with; empty: all others (of the same group).
        groups: beginnings of names of rows: rows are compared with rows of the same beginning.
        pairs: of the paper's method and of another, if not all are compared.
        means: differences of means over columns (with `by="column"`, over rows) whose names fit a pattern, by what they are
            called, instead of one column at a time.
        but: patterns of columns (with `by="column"`, of rows) that are no score, so that methods are not compared there.
        options: of `polyfed run`, beside the table's.
        runs: the table whose runs it shares.
        by_round: whether it is a curve over rounds: scores of all rounds that were evaluated are kept, too.
    """

    variants: dict[str, str | None]
    own: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    groups: tuple[str, ...] = ("",)
    pairs: tuple[tuple[str, str], ...] = ()
    means: tuple[tuple[str, str], ...] = ()
    by: str = "row"
    but: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    runs: str = ""
    by_round: bool = False


FASHION = "fashion_mnist"
# With so few images CIFAR-10 teaches four networks next to nothing. The page says so.
ON_FASHION = ("--data.name", FASHION)
SHARES = ("25 %, ", "12.5 %, ", "6.25 %, ")
FOUR = (
    ("CIFAR-10, mean of the architectures", "CIFAR-10, *"),
    ("Fashion-MNIST, mean of the architectures", "Fashion-MNIST, *"),
)
TABLES = {
    "pfedla/table1": Table({FASHION: "fashion_mnist-1*0", "cifar10": "cifar10-10"}, ("pFedLA", "HeurpFedLA")),
    "flha/table1": Table(
        {FASHION: "fashion_mnist-*"}, ("FLHA-GHN",), groups=SHARES, means=FOUR,
    ),
    "flha/table1_forms": Table(
        {FASHION: "fashion_mnist-*"}, ("FLHA-GHN as published", "FLHA-GHN without normalise"), groups=SHARES, means=FOUR,
        runs="flha/table1",
    ),
    "fedhenn/table2": Table(
        {FASHION: "fashion*", "cifar10": "cifar10-*", "sentiment140": "sentiment*"}, ("FedHeNN Homo", "FedHeNN Hetero"),
        by="column",
    ),
    "fedpnas/table1": Table(
        {FASHION: "*fashion*", "cifar10": "high"}, ("CA-FedPNAS",), by="column",
    ),
    "pfedla/table2": Table({FASHION: "fashion_mnist-10", "cifar10": "cifar10-10"}, ("pFedLA", "HeurpFedLA")),
    "flha/table2": Table(
        {FASHION: "fashion_mnist-*"}, ("with GNN",), groups=("25 %, ", "12.5 %, "),
        means=(("Fashion-MNIST, mean of the networks", "Fashion-MNIST, *"),),
    ),
    "fedhenn/table1": Table(
        {"cifar10": "cifar10-*", "sentiment140": "sentiment*"},
        ("FedHeNN, global", "FedHeNN, mean over the last round"), by="column",
    ),
    "fedpnas/effects": Table({"digits": "digits", FASHION: "fashion-mnist"}, ("CA-FedPNAS",), by="column"),
    "fedpnas/fig3": Table(
        {"digits": "digits", FASHION: "fashion-mnist", "cifar10": "cifar10"}, ("CA-FedPNAS", "FedPNAS"), by="column",
        by_round=True,
    ),
    "fedpnas/fig3c": Table(
        {FASHION: "fashion-mnist", "cifar10": "cifar10"}, ("CA-FedPNAS",), by="column", runs="fedpnas/fig3",
    ),
    "pfedla/table3": Table(
        {FASHION: "fashion_mnist-*", "cifar10": "cifar10-*"}, ("k = 0",), groups=("FashionMNIST, ", "CIFAR10, "),
        by="column",
    ),
    "pfedla/fig1": Table({FASHION: None}, ("layer-wise, similarity", "layer-wise, learned")),
    "pfedla/fig1b": Table(
        {FASHION: None}, ("fc1", "fc2"), ("conv1", "conv2", "fc3, the classifier"), by="column", runs="pfedla/fig1",
    ),
    "pfedla/sweep_layer": Table({FASHION: None}, ("each layer (paper)",)),
    "pfedla/sweep_hn_lr": Table({FASHION: None}, ("1 (the default, N/10)",)),
    "pfedla/table2b": Table({FASHION: "fashion_mnist-10*", "cifar10": "cifar10-10*"}, ("pFedLA", "HeurpFedLA")),
    "pfedla/fig5": Table(
        {FASHION: "fashion_mnist"}, ("the same classes",), ("three of four classes", "each of the others"), by="column",
    ),
    "pfedla/fig6": Table(
        {FASHION: "fashion_mnist"}, ("the next, 3 of 4 classes",),
        ("2 away, 2 of 4 classes", "3 away, 1 of 4 classes", "4 away"), by="column",
    ),
    "pfedla/fig7": Table({FASHION: "fashion_mnist", "cifar10": "cifar10"}, ("fc1",), by="column"),
    "flha/table5": Table(
        {FASHION: None}, ("FLHA-GHN",), groups=("α = 100, ", "α = 1, ", "α = 0.1, "),
        means=(("own test images", "* unbal."), ("balanced test images", "* bal.")), options=ON_FASHION,
    ),
    "flha/table6": Table({FASHION: None}, ("GHN init",), by="column", means=(("mean of the architectures", "Arch *"),),
        options=ON_FASHION,
    ),
    "fedhenn/effects": Table({"cifar10": None}, ("as in Table 2",),
        over=("η_0 = 0", "η_0 = 0.001", "η_0 = 0.1", "η_0 = 1", "a tenth of the RAD", "a fifth of the RAD",
              "a quarter of the epochs", "twice the epochs", "Procrustes distance", "RBF kernel, σ = 0.1",
              "RBF kernel, σ = 0.5", "RBF kernel, σ = 2"),
    ),
    "fedhenn/fig3": Table(
        {"cifar10": None}, ("FedHeNN Homo", "FedHeNN Hetero"), by="column",
        pairs=(
            ("FedHeNN Homo", "FedAvg"), ("FedHeNN Homo", "FedProx"), ("FedHeNN Homo", "FedAvg, mean over all"),
            ("FedHeNN Homo", "FedProx, mean over all"), ("FedHeNN Homo", "FedRep"),
            ("FedHeNN Homo", "local training, homo"), ("FedHeNN Hetero", "FedRep"),
            ("FedHeNN Hetero", "local training, hetero"),
        ),
    ),
    "fedhenn/table3": Table({"cifar10": "cifar10-*", "sentiment140": "sentiment*"}, ("linear CKA",), by="column"),
    "fedhenn/fig1": Table({"cifar10": None}, ("FedHeNN",), by="column"),
    "fedpnas/sweep_eta": Table({FASHION: None}, ("SGD, η = 0.01 (polyfed's default)",)),
    "fedpnas/table2": Table(
        {FASHION: "fashion-mnist", "cifar10": "cifar10"}, ("CA-FedPNAS", "CA-FedPNAS, retrained"), by="column",
        pairs=(("CA-FedPNAS", "FedDSNAS"), ("CA-FedPNAS, retrained", "FedDSNAS, retrained")),
        but=("*standard deviation*",),
        runs="fedpnas/fig3",
    ),
    "flha/table3": Table(
        {FASHION: "mosaics-*"}, ("FLHA-GHN",), groups=SHARES,
        means=(("mosaics, mean of the architectures", "mosaics *"),),
    ),
    "flha/table7": Table({FASHION: None}, ("none replaced",), options=ON_FASHION),
    "flha/drop": Table({FASHION: None}, options=ON_FASHION, runs="flha/table7"),
    "flha/fig4": Table({FASHION: None}, ("L = 1",), options=ON_FASHION),
    "flha/fig7": Table({FASHION: None}, ("GHN init",), by="column", options=ON_FASHION),
    "flha/appendix_b": Table(
        {FASHION: "cifar10-*"}, ("4 clients", "8 clients"), groups=("CIFAR-10, ",), options=ON_FASHION,
        pairs=tuple((f"CIFAR-10, {n} clients", f"CIFAR-10, {n} clients, distillation") for n in (4, 8)),
    ),
    "flha/appendix_d": Table({FASHION: None}, ("the paper's optimum",), options=ON_FASHION),
    "flha/fig6": Table({}),
    "fedpnas/proposition1": Table({"digits": "digits*", FASHION: "fashion-mnist*"}, by="column"),
    "fedpnas/table3": Table({}),
}  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """Accuracy over examples a client: a recipe's variant, the methods to tune and compare at every size, those to compare
    at `main` (the table's size) only, and the same clients with `one` network for all, for methods that need one. `forms`
    are further forms of the paper's method by label, with what each sets."""

    recipe: str
    variant: str
    methods: str
    data: str
    main: int = 40
    rivals: str = ""
    one: tuple[str, ...] = ()
    rates: str = "lr=0.02,0.05,0.1,0.2,..."
    rounds: tuple[int, ...] = (60, 60, 40, 25, 15)  # by size; fewer where an epoch has more steps
    options: tuple[str, ...] = ()
    forms: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


SIZES = (20, 40, 80, 160, 320)
TEST = 100  # test examples a client
HOMOGENEOUS = "fedavg,fedavg_ft"
CURVES = {
    "pfedla": Curve(
        "pfedla_table1", "fashion_mnist-10-balanced", "pfedla,local,fedavg,fedavg_ft", "fashion_mnist",
        rivals="heur_pfedla,per_fedavg,pfedme,pfedhn,fedrep,fedfomo",
        options=("--algorithm.clip-norm", "5"),  # without, a rate that suits one seed diverges with another
        rounds=(60, 60, 60, 60, 40),  # its weights over clients are learned by a step a round
    ),
    "pfedla_cifar10": Curve(  # Table 2b's, in which its rates are not chosen
        "pfedla_table2", "cifar10-10-share0.8", "pfedla,local,fedavg,fedavg_ft", "cifar10",
        options=("--algorithm.clip-norm", "5"), rounds=(60, 60, 60, 60, 60),
    ),
    "fedhenn": Curve(
        "fedhenn_table2", "fashion-100-5-hetero", "fedhenn,local", "fashion_mnist",
        rates="lr=0.01,0.02,0.05,0.1,...;eta0=0.1,1",
        options=("--algorithm.clip-norm", "5"),
        rounds=(40, 40, 30, 20, 15), one=("--model", "cnn_fedhenn", "--model.level", "1", "--model.channels", "16"),
    ),
    "fedhenn_homo": Curve(
        "fedhenn_table2", "fashion-100-5-homo", "fedhenn_homo,local,fedavg,fedavg_ft", "fashion_mnist",
        rates="lr=0.02,0.05,0.1,0.2,...;eta0=0.1,1", options=("--algorithm.clip-norm", "5"), rounds=(40, 40, 30, 20, 15),
    ),
    "flha": Curve(
        "flha_table1", "fashion_mnist-12.5", "flha_ghn,local,fedavg_kd", "fashion_mnist", main=80, rivals="pfedhn",
        rates="lr=0.01,0.03,0.1,0.3,...", rounds=(40, 40, 30, 20, 15), one=("--model", "flha_arch1", "--model.width", "8"),
        forms={"flha_ghn_published": {"graph": "layers", "normalise": False, "initialisation": "paper", "momentum": 0,
                                      "clip_norm": None}},
    ),
    "fedpnas": Curve(
        "fedpnas_table1", "high-fashion-mnist", "ca_fedpnas,local,fedavg,fedavg_ft", "fashion_mnist", main=160,
        rivals="feddsnas", rates="lr=0.001,0.003,0.01,...",  # of Adam
    ),
}  # fmt: skip


def folder_of(data, given):
    known = dict(part.split("=", 1) for part in given.data)
    return known.get(data, FOLDERS[data])


def run_table(key, given):
    paper, name = key.split("/")
    table, plan = find_table(paper, name), TABLES[key]
    out, began = Path(given.runs) / (plan.runs or key).replace("/", "-"), time.time()
    methods = ["--baselines", given.baselines] if given.baselines else []
    for data, pattern in (plan.variants or {"": None}).items():
        if given.only not in (None, data):
            continue
        where = ["--data.path", folder_of(data, given)] if data not in ("", "digits") else []
        wanted = ReproduceOptions(scale="cpu", variant=given.variant or pattern, seeds=given.seeds, out=str(out))
        try:
            reproduce_command.reproduce_table_or_list_papers(
                [paper, name, *plan.options, *where, *methods], wanted, quiet=given.quiet
            )
        except RoundError as error:  # of one method: the table has the others, and a gap
            print(f"{key}: {error}", flush=True)
    content, file = (
        json.loads((out / reproduce_command.RESULT_FILE).read_text(encoding="utf-8")),
        RESULTS / f"{paper}-{name}.json",
    )
    known = (given.only or given.add) and file.exists()
    before = json.loads(file.read_text(encoding="utf-8")) if known else {"cells": []}
    content["cells"], kept = completed(content["cells"], before["cells"], given.add)
    content |= {
        "number": table.printed_name,
        "own": plan.own,
        "by": plan.by,
        "options": plan.options,
        "runs": plan.runs,
    }
    content["gains"] = gains(content["cells"], plan)
    if plan.by_round:
        content["by_round"] = {
            f"{c['row']}, {c['column']}": over_rounds(c, out) for c in content["cells"] if c["metric"] == "score"
        }
    content["seconds"] = sum(
        record["seconds_clients"] + record["seconds_server"]
        for metrics in out.rglob("metrics.jsonl") for record in read_metrics(metrics)
    )  # fmt: skip
    if kept:
        content["seconds_kept"] = before["seconds"] if given.add else before.get("seconds_kept", before["seconds"])
        content["seconds"] += content["seconds_kept"]
    write(file, content)
    print(f"{key}: {time.time() - began:.0f} s", flush=True)


def over_rounds(cell, out):
    """A cell's score by round and seed: accuracy, mean over clients."""
    scores = {}
    for seed, run in zip(cell["seeds"], cell["runs"], strict=True):
        folder = out / run / (f"baselines/{cell['method']}" if cell["method"] else "")
        for record in read_metrics(folder / "metrics.jsonl"):
            rows = [row["accuracy"] for row in record["clients"].values() if "accuracy" in row]
            if rows:
                scores.setdefault(str(record["round"]), {})[seed] = fmean(rows)
    return scores


def run_curve(paper, given):
    curve = CURVES[paper]
    file = RESULTS / f"{paper}-examples.json"
    own = curve.methods.split(",")[0]
    settings = {"recipe": curve.recipe, "variant": curve.variant, "seeds": given.seeds, "own": own}
    for size in map(int, given.sizes.split(",")):
        began, rounds = time.time(), curve.rounds[SIZES.index(size)]
        asked = {"seeds": given.seeds, "tuned": curve.rates, "rounds": rounds}
        if curve.forms:
            asked["forms"] = {label: dict(changes) for label, changes in curve.forms.items()}
        known = points_of(file).get(str(size), {})
        if asked.items() <= known.items() and "after_all" in known:
            continue
        methods = ",".join(filter(None, [curve.methods, curve.rivals if size == curve.main else ""]))
        parts = [compared(paper, curve, size, rounds, methods, (), given)]
        if curve.one:
            parts.append(compared(paper, curve, size, rounds, HOMOGENEOUS, curve.one, given))
        point = {**asked, **joined(parts, own, tuple(curve.forms), rounds)}
        points = points_of(file) | {str(size): point}  # another call may have written some
        write(file, {"paper": paper, "points": points, **settings})
        print(f"{paper}, {size} examples a client: {time.time() - began:.0f} s", flush=True)


def points_of(file):
    return json.loads(file.read_text(encoding="utf-8"))["points"] if file.exists() else {}


def searched(curve, methods):
    """What is searched, of the fields that any of the methods has."""
    known = {field.name for name in methods.split(",") for field in fields(REGISTRY[name])}
    return ";".join(part for part in curve.rates.split(";") if part.split("=")[0] in known)


def compared(paper, curve, size, rounds, methods, network, given):
    """Runs a comparison: its content and its folder."""
    out = Path(given.runs) / f"{paper}-examples-{size}{'-one' if network else ''}"
    forms = [] if network or not curve.forms else ["--method-config", str(written_forms(paper, curve, given))]
    labels = ",".join([methods, *(curve.forms if forms else ())])
    words = ["compare", curve.recipe, "--scale", "cpu", "--variant", curve.variant, "--algorithms", labels,
             *forms, *curve.options, *network, "--data.path", folder_of(curve.data, given),
             "--data.examples-per-client", str(size), "--data.test-fraction", f"{TEST / (TEST + size):.6f}",
             "--same-data", "--rounds", str(rounds), "--seeds", given.seeds, "--tune", searched(curve, methods),
             "--no-references", "--evaluate-every", str(EVERY), "--out", str(out)]  # fmt: skip
    if polyfed([*words, *(["--quiet"] if given.quiet else [])]) != 0:
        raise SystemExit(f"{paper}, {size} examples: the comparison failed")
    return json.loads((out / "comparison.json").read_text(encoding="utf-8")), out


def written_forms(paper, curve, given):
    """A file for `--method-config` with the paper's method in its further forms."""
    file, own = Path(given.runs) / f"{paper}-forms.yaml", curve.methods.split(",")[0]
    content = {label: {"name": own, **changes} for label, changes in curve.forms.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")  # YAML has JSON in it
    return file


def joined(parts, own, forms, rounds):
    """The scores of all methods, and how far the paper's method and its further forms are ahead of each other one: at the
    round that was chosen for each, and after all rounds."""
    kept = ("mean", "interval", "gain", "gain_interval", "gain_per_seed", "seconds", "bytes", "rounds")
    content, methods, chosen, tried = parts[0][0], {}, {}, {}
    at_best, at_last = {}, {}
    for found, folder in parts:
        single = found is not content
        for name, one in found["methods"].items():
            name_kept = f"{name} (one network)" if single else name
            methods[name_kept] = {k: one["statistics"][k] for k in kept}
            chosen[name_kept] = found["tuning"]["methods"][name]["chosen"]
            tried[name_kept] = sorted(run["fields"]["lr"] for run in found["tuning"]["methods"][name]["tried"])
            at_best[name_kept] = scores(found, folder, name)
            at_last[name_kept] = scores(found, folder, name, rounds)
    against, after_all = (
        {form: {name: ahead(of[form], of[name]) for name in of if name not in (own, form)} for form in (own, *forms)}
        for of in (at_best, at_last)
    )
    return {
        "level": content["level"], "reference": content["reference"], "methods": methods, "chosen": chosen,
        "tried": tried, "against": against.pop(own), **({"of_forms": against} if forms else {}),
        "after_all": {"means": {name: fmean(by_seed(of)) for name, of in at_last.items()}, "against": after_all},
    }  # fmt: skip


def scores(found, folder, name, at=None):
    """A method's scores by client, of its chosen round or of the round `at`."""
    metric, runs = METRICS[found["score"]], found["methods"][name]["runs"].values()
    read = {
        client: [predictions.read_predictions(folder / run["path"], client, round=at or run["round"]) for run in runs]
        for client in found["clients"]
    }
    return {client: score_seeds(metric, [p.outputs for p in of], of[0].targets) for client, of in read.items()}


def by_seed(of):
    """Mean score over clients, one a seed."""
    return [float(value) for value in np.mean([one.values for one in of.values()], axis=0)]


def ahead(ours, theirs):
    """The difference of two methods' scores, mean over clients, with an interval for new seeds and test examples."""
    estimate = estimate_mean_over_clients(
        [variance_components_of_difference(one, theirs[client]) for client, one in ours.items()]
    )
    seeds = [one - other for one, other in zip(by_seed(ours), by_seed(theirs), strict=True)]
    return {"gain": estimate.value, "low": estimate.low, "high": estimate.high, "by_seed": seeds}


def write(file, content):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["list", "run", "examples", "page"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--sizes", default="20,40,80,160,320")
    parser.add_argument("--runs", default="runs/papers")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--only", metavar="NAME", help="of a data set; the rest of the table stays")
    parser.add_argument("--variant", metavar="PATTERN", help="of the variants on that data set; the rest stays, too")
    parser.add_argument("--baselines", metavar="LIST", help="of them only; the table's other methods stay, too")
    parser.add_argument("--add", action="store_true", help="these seeds join those that were measured before")
    parser.add_argument("--quiet", action="store_true")
    given = parser.parse_args()
    if (given.variant or given.baselines) and not given.only:
        raise SystemExit("--variant and --baselines are of one data set; say which with --only")
    if given.what == "list":
        print("\n".join([*TABLES, *(f"examples {paper}" for paper in CURVES)]))
    elif given.what == "page":
        papers_page.write(RESULTS, HERE.parent / "docs")
        papers_list.write(RESULTS, HERE.parent / "docs")
    else:
        known = TABLES if given.what == "run" else CURVES
        for name in known if given.names == ["all"] else given.names:
            if name not in known:
                raise SystemExit(f"no {name!r}; there are {', '.join(known)}")
            (run_table if given.what == "run" else run_curve)(name, given)


if __name__ == "__main__":
    main()
