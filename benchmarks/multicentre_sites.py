"""The federations of multicentre.py: real sites (UCI Heart Disease, TCGA-BRCA, schools, Parkinson), tweets, made images.

Each function returns a `Federation`: clients, methods, and what `pf.compare` gets besides. Data that polyfed does not ship
are read from a folder; docs/multicentre.md says where they come from.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd

import polyfed as pf
from polyfed.data.sources.blobs import Blobs
from polyfed.data.sources.published.heart import read_heart_table
from polyfed.data.sources.published.tweets import Sentiment140

VALIDATION = 0.15  # share of a site's examples, held out of the training part in each fold
PUBLIC = 0.05  # share of a table's rows that are no site's, for FedHeNN's public examples; one scale for all sites then
FLAMBY_COLUMNS = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak"  # without slope, ca and thal
NETWORKS = ((), (16,), (32,), (16, 8))  # hidden layers of multilayer perceptrons, dealt to the sites in turn
SCHOOL_PUPILS = 15  # a school with fewer is left out: a fold would test one or two


@dataclass(frozen=True)
class Federation:
    """Holds what `pf.compare` needs: clients, methods by label, and its other arguments; and FedMRL's shared network."""

    clients: list[pf.Client]
    methods: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # sites and rows that take no part, and why
    shared: dict[str, Any] = field(default_factory=lambda: {"name": "mlp", "hidden": (8,)})  # the least of `NETWORKS`


def one_network(training: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Methods for sites with one architecture; each method's own options beside the common ones are in `more`."""
    a = pf.algorithms
    methods = {"fedavg": a.FedAvg, "fedavg_ft": a.FedAvgFT, "fedpac": a.FedPAC, "knn_per": a.KNNPer, "pfedla": a.PFedLA}
    return {"local": a.Local(**training), **{k: m(**training, **more.get(k, {})) for k, m in methods.items()}}


def several_networks(training: dict[str, Any], public: Any) -> dict[str, Any]:
    """Methods for sites with different architectures; FedHeNN only with public examples."""
    a = pf.algorithms
    methods = {"local": a.Local(**training), "flha_ghn": a.FLHAGHN(**training)}
    size = 0 if public is None else min(32, len(public))
    return methods | ({"fedhenn": a.FedHeNN(**training, rad_size=size)} if size else {})


NEWCOMERS = {  # methods that joined after the federations had been run, by whether all sites have one architecture
    True: ("afl", "fedbabu", "feddbe", "fednova", "fedper", "fedrod", "gpfl", "qfedavg"),
    False: ("fedgen", "fedl2g", "fedmrl", "takfl"),
}


def newcomers(federation: Federation) -> dict[str, Any]:
    """Training alone and the methods that are new in a federation, with the training of `local`."""
    methods = federation.methods
    training = {key: getattr(methods["local"], key) for key in ("lr", "local_epochs", "batch_size")}
    labels = [label for label in NEWCOMERS["fedavg" in methods] if label not in methods]
    options = {label: {"shared": federation.shared} if label == "fedmrl" else {} for label in labels}
    new = {label: pf.algorithms.get(label)(**training, **more) for label, more in options.items()}
    return {"local": methods["local"], **new}


def perceptrons(sites: pf.data.ClientTables, hidden: Any = None) -> list[pf.Client]:
    """Clients with one perceptron of these hidden layers; with those of `NETWORKS` in turn if none are given."""
    names = [part.id for part in sites.client_data]
    forms = dict(zip(names, cycle(NETWORKS) if hidden is None else cycle([hidden]), strict=False))
    build = {
        name: pf.models.ModelSpec("mlp", {"hidden": form}, (sites.num_features,), sites.num_outputs)
        for name, form in forms.items()
    }
    return sites.build_clients(build)


PUBLIC_ROWS = {"preprocess": "federated", "public_fraction": PUBLIC}


HEART = {"lr": 0.05, "local_epochs": 2, "batch_size": 16}


def heart(folder: Path) -> Federation:
    clients = perceptrons(pf.data.heart(drop="ca", val_fraction=VALIDATION), (16,))
    return Federation(clients, one_network(HEART), {"rounds": 30, "fold_repeats": 2, "metrics": ["auc", "accuracy"]})


def heart_networks(folder: Path) -> Federation:
    sites = pf.data.heart(drop="ca", val_fraction=VALIDATION, **PUBLIC_ROWS)
    settings = {"rounds": 30, "fold_repeats": 2, "metrics": ["auc", "accuracy"], "public": sites.public}
    return Federation(perceptrons(sites), several_networks(HEART, sites.public), settings)


def heart_flamby(folder: Path) -> Federation:
    """FLamby's preparation: ten columns, complete rows, logistic regression; accuracy decides."""
    frame = read_heart_table().to_pandas()
    columns = FLAMBY_COLUMNS.split(",")
    whole = frame.dropna(subset=columns)
    sites = pf.data.split_table(
        whole.reset_index(drop=True), "num", "hospital", positive=">0", columns=columns, categorical="cp,restecg",
        val_fraction=VALIDATION,
    )  # fmt: skip
    training = {"lr": 0.05, "local_epochs": 2, "batch_size": 4}
    methods = one_network(training)
    methods = {k: methods[k] for k in ("local", "fedavg", "fedavg_ft")} | {"fedopt": pf.algorithms.FedOpt(**training)}
    left_out = {"rows with missing values": f"{len(frame) - len(whole)} of {len(frame)}"}
    return Federation(
        perceptrons(sites, ()), methods, {"rounds": 20, "fold_repeats": 4, "metrics": ["accuracy", "auc"]}, left_out
    )


def tcga(folder: Path, **options: Any) -> pf.data.ClientTables:
    """Patients with breast cancer by region of the hospital, as FLamby has them."""
    place = folder / "fed_tcga_brca"
    with (place / "centers.csv").open(encoding="utf-8") as file:
        region = {row["TSS Code"]: row["Region"] for row in csv.DictReader(file)}
    frame, kept = (pd.read_csv(place / name) for name in ("brca.csv", "train_test_split.csv"))
    frame = frame[frame["pid"].isin(kept["pid"])]
    frame["region"] = [region[pid.split("-")[1]] for pid in frame["pid"]]
    frame["E"] = frame["E"].astype(int)
    frame = frame.drop(columns="pid").reset_index(drop=True)
    return pf.data.split_table(frame, "T", "region", event="E", task="survival", val_fraction=VALIDATION, **options)


TCGA = {"lr": 0.05, "local_epochs": 2, "batch_size": 0}  # 0: the risk sets are all of the region's patients


def brca(folder: Path) -> Federation:
    methods = one_network(TCGA) | {"fedprox": pf.algorithms.FedProx(**TCGA), "fedopt": pf.algorithms.FedOpt(**TCGA)}
    return Federation(perceptrons(tcga(folder), ()), methods, {"rounds": 30, "fold_repeats": 2, "metrics": ["c_index"]})


def brca_networks(folder: Path) -> Federation:
    sites = tcga(folder, **PUBLIC_ROWS)
    settings = {"rounds": 30, "fold_repeats": 2, "metrics": ["c_index"], "public": sites.public}
    return Federation(perceptrons(sites), several_networks(TCGA, sites.public), settings)


SCHOOLS = {"lr": 0.05, "local_epochs": 2, "batch_size": 16}


def schools(
    folder: Path, file: str, target: str, drop: str, **options: Any
) -> tuple[pf.data.ClientTables, dict[str, str]]:
    frame = pd.read_csv(folder / "schools_exam" / file)
    pupils = frame["school"].value_counts()
    few = pupils[pupils < SCHOOL_PUPILS]
    frame = frame[~frame["school"].isin(few.index)].reset_index(drop=True)
    options = {"preprocess": "federated", "val_fraction": VALIDATION, **options}
    sites = pf.data.split_table(frame, target, "school", drop=drop, **options)
    left_out = {f"schools of fewer than {SCHOOL_PUPILS} pupils": f"{len(few)} ({few.sum()} pupils)"} if len(few) else {}
    return sites, left_out


def exam(folder: Path) -> Federation:
    sites, left_out = schools(folder, "Exam.csv", "normexam", "rownames,student,schavg,vr,intake")
    settings = {"rounds": 20, "metrics": ["mae", "r2"], "evaluate_every": 2}
    return Federation(perceptrons(sites, (8,)), one_network(SCHOOLS), settings, left_out)


def hsb(folder: Path) -> Federation:
    sites, left_out = schools(folder, "Hsb82.csv", "mAch", "rownames,meanses,cses")
    settings = {"rounds": 20, "metrics": ["mae", "r2"], "evaluate_every": 2}
    return Federation(perceptrons(sites, (8,)), one_network(SCHOOLS), settings, left_out)


def exam_networks(folder: Path) -> Federation:
    sites, left_out = schools(folder, "Exam.csv", "normexam", "rownames,student,schavg,vr,intake", **PUBLIC_ROWS)
    settings = {"rounds": 20, "metrics": ["mae", "r2"], "evaluate_every": 2, "public": sites.public}
    return Federation(perceptrons(sites), several_networks(SCHOOLS, sites.public), settings, left_out)


PARKINSON = {"lr": 0.02, "local_epochs": 1, "batch_size": 32}


def voices(folder: Path) -> pf.data.ClientTables:
    """42 patients of about 140 recordings, seven patients each at six made sites: every sixth patient at the same."""
    frame = pd.read_csv(folder / "parkinsons_telemonitoring" / "parkinsons_updrs.csv")
    frame["clinic"] = [f"clinic-{(number - 1) % 6 + 1}" for number in frame["subject#"]]
    return pf.data.split_table(
        frame, "motor_UPDRS", "clinic", group="subject#", drop="total_UPDRS", val_fraction=VALIDATION,
        preprocess="federated",
    )  # fmt: skip


def parkinson(folder: Path) -> Federation:
    settings = {"rounds": 20, "fold_repeats": 2, "metrics": ["mae", "r2"], "evaluate_every": 2}
    return Federation(perceptrons(voices(folder), (16,)), one_network(PARKINSON), settings)


def parkinson_networks(folder: Path) -> Federation:
    settings = {"rounds": 20, "metrics": ["mae", "r2"], "evaluate_every": 2}
    left_out = {"fedhenn": "public examples would be single recordings, and rows of a patient stay together"}
    return Federation(perceptrons(voices(folder)), several_networks(PARKINSON, None), settings, left_out)


TWEETS, TWEET_SITES, TWEETS_A_SITE = {"lr": 0.5, "local_epochs": 2, "batch_size": 16}, 6, 1000


def tweets(folder: Path) -> Federation:
    """The sample names no users, so that sites are dealt: Dirichlet 1.0 over the two classes."""
    pool = Sentiment140(path=str(folder / "sentiment140-100k"), vocabulary_size=2000, deal_test=True).load()
    split = pf.data.Split(
        clients=TWEET_SITES, examples_per_client=TWEETS_A_SITE, test_fraction=0.3, val_fraction=VALIDATION
    )
    parts, _ = pf.data.make_clients(pool, split, pf.data.Dirichlet(alpha=1.0), seed=0)
    network = pf.models.ModelSpec("lstm", {"vocabulary": 2000, "embedding": 32, "hidden": 32}, (25,), 2)
    clients = [pf.Client(p.id, network, p.train, p.test, p.val) for p in parts]
    return Federation(clients, one_network(TWEETS), {"rounds": 15, "metrics": ["auc", "accuracy"]})


IMAGES = (24, 36, 48, 60)
BLOBS = {"lr": 0.1, "local_epochs": 2, "batch_size": 4}


def blobs(widths: tuple[int, ...], public_fraction: float = 0.0) -> tuple[list[pf.Client], Any]:
    """Made images of four sites with scanners of their own, and public images of all of them."""
    pool = Blobs(images=IMAGES).load()
    split = pf.data.Split(test_fraction=0.3, val_fraction=VALIDATION, public_fraction=public_fraction)
    parts, public = pf.data.make_clients(pool, split, pf.data.Natural("site"), seed=0)
    networks = [pf.models.ModelSpec("unet", {"width": width, "depth": 2}, (1, 32, 32), 2) for width in widths]
    clients = [
        pf.Client(part.id, network, part.train, part.test, part.val, task=pool.task)
        for part, network in zip(parts, networks, strict=True)
    ]
    return clients, public


def segmentation(folder: Path) -> Federation:
    return Federation(blobs((6, 6, 6, 6))[0], one_network(BLOBS), {"rounds": 15, "metrics": ["dice", "iou"]})


def segmentation_networks(folder: Path) -> Federation:
    clients, public = blobs((4, 6, 8, 4), public_fraction=0.1)
    settings = {"rounds": 15, "metrics": ["dice", "iou"], "public": public}
    shared = {"name": "unet", "width": 4, "depth": 2}
    return Federation(clients, several_networks(BLOBS, public), settings, shared=shared)


FEDERATIONS: dict[str, Callable[[Path], Federation]] = {
    "heart": heart, "heart-flamby": heart_flamby, "heart-networks": heart_networks, "brca": brca,
    "brca-networks": brca_networks, "parkinson": parkinson, "parkinson-networks": parkinson_networks, "exam": exam,
    "exam-networks": exam_networks, "hsb": hsb, "tweets": tweets, "segmentation": segmentation,
    "segmentation-networks": segmentation_networks,
}  # fmt: skip
