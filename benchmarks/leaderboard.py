"""Every method on small federations of eleven kinds, and some once more: docs/leaderboard.md.

    python benchmarks/leaderboard.py list
    python benchmarks/leaderboard.py run digits-0.1 drift ... [--seeds 0,1,2] [--data NAME=FOLDER]     `all` is every one
    python benchmarks/leaderboard.py run architectures --only lg_fedavg,fedgh    their rows again, into the results there are
    python benchmarks/leaderboard.py join architectures --only fedgen      a new method's row, into the committed results
    python benchmarks/leaderboard.py page                        docs/leaderboard.md and its picture, from the results

A federation is a variant of the recipe `leaderboard`, and its run is `polyfed compare`: for each method five learning rates
(0.1, 0.3, 1, 3 and 10 times its own) with the first seed, the best by validation examples, then a run with each seed on the
same clients. All methods take the same number of local steps. Runs are in --runs (runs/leaderboard); what is finished is
not repeated, and what was stopped goes on. Results are in benchmarks/results/leaderboard, one file a federation.

Methods whose advantage does not show there are searched once more in federations like those of their papers: the variants of
the recipe `rivals`. There rates and each method's own weights are searched together, `TRIALS` runs a method by Optuna.

A method is compared after all rounds, so that all have taken as many local steps; besides, at equal bytes (what a third of
the rounds of FedAvg send) and at equal seconds (what the runs of FedAvg take). Where networks differ FedAvg's are the
teacher's of fedavg_kd. The mean at each method's best round by validation examples is there too, without an interval: with
so few of them the choice of a round is a matter of chance, which no interval covers.
With `--only`, `local` and the methods named are run, and the rows of these are put into the results that are there, if
`local` comes out as it is there. Their `gain_interval` is then of fewer methods, which the results say under `renewed`.
`join` does the same with the seeds of the results, and does not ask for the same `local`: another machine rounds otherwise.
How far `local` is from the committed one is printed and kept beside the row, under `joined`; the row's gain over `local` is
over that of its own machine. Clients, test examples and rounds must be those of the results, and the rule of the search:
that of the committed ones is in `leaderboard_rule.py`.
With one architecture `polyfed compare` runs FedAvg with and without fine-tuning beside them; the rows of these stay.
Intervals of differences cover new seeds and test examples (crossed), one difference at a time; `gain_interval` is that of
`polyfed compare`, for all methods together, which with three seeds and 35 methods decides next to nothing. Seconds mean
something only if nothing else ran: the load before is in the results.
"""

import argparse
import csv
import json
import os
import time
from pathlib import Path

import leaderboard_page
import numpy as np
from leaderboard_rule import RULE, compare_by_score
from papers import ahead, scores
from sklearn.datasets import load_breast_cancer

from polyfed.cli.commands.options.recipes import read_recipe
from polyfed.cli.main import main as polyfed

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "leaderboard"
FOLDERS = {"fashion_mnist": "/usr/share/datasets/fashion-mnist", "cifar10": "cifar10", "sentiment140": "sentiment140"}
HOSPITALS = {"north": (60, 30), "south": (90, 40), "east": (140, 56), "west": (279, 86)}  # patients, malignant ones
TRIALS = 12
SEARCHED = {  # of the variants of `rivals`: what a method has of these fields
    "drift": "lr=grid;mu=0.001,0.01,0.1,1;alpha=0.001,0.01,0.1;server_lr=0.01,0.1,1",
    "long_local": "lr=grid;mu=0.001,0.01,0.1,1;alpha=0.001,0.01,0.1;server_lr=0.01,0.1,1",
    "class_groups": "lr=grid;lam=0.1,1,10;personal_lr=0.03,0.1;adapt_steps=1,5;clip_norm=null,10",
    "near_networks": "lr=grid;lam=0.1,1,10;margin=1,10,100;gamma=0.1,1,10;alpha=0.2,0.5,0.8;distil=0.1,1;eta0=0.1,1,10;"
    "clip_norm=null,10",
}
COLUMNS = {"bytes": 2, "seconds": 3}  # of a curve's points
KEPT = (
    "mean", "interval", "worst", "gain", "gain_interval", "gain_per_seed", "losers", "participants", "bytes", "seconds",
    "rounds",
)  # fmt: skip


def federations():
    """The recipe and the configuration of each, by name."""
    recipes = {name: read_recipe(name) for name in ("leaderboard", "rivals")}
    return {
        variant: (name, recipe.configuration(variant=variant))
        for name, recipe in recipes.items()
        for variant in recipe.variants
    }


def hospitals(file):
    """The 569 patients of scikit-learn's breast cancer data, dealt to four hospitals of unequal size and share."""
    data = load_breast_cancer()
    draw = np.random.default_rng(0)
    malignant, benign = (draw.permutation(np.flatnonzero(data.target == label)).tolist() for label in (0, 1))
    with file.open("w", encoding="utf-8", newline="") as out:
        table = csv.writer(out)
        table.writerow([*(name.replace(" ", "_") for name in data.feature_names), "malignant", "site"])
        for site, (patients, ill) in HOSPITALS.items():
            for rows, count, word in ((malignant, ill, "yes"), (benign, patients - ill, "no")):
                for _ in range(count):
                    table.writerow([*data.data[rows.pop()], word, site])


def run(name, given):
    (recipe, config), folder = federations()[name], Path(given.runs)
    known = dict(part.split("=", 1) for part in given.data)
    source = config["data"]["name"]
    folder.mkdir(parents=True, exist_ok=True)
    path = known.get(source, FOLDERS.get(source))
    if source == "table":
        path = str(folder / "patients.csv")
        hospitals(Path(path))
    out, load, began = folder / name, os.getloadavg()[0], time.time()
    seeds = given.seeds if given.what == "run" else ",".join(map(str, committed(name)["seeds"]))
    words = ["compare", recipe, "--variant", name, "--same-data", "--seeds", seeds, "--no-references",
             "--budget", "steps", "--tune", *([SEARCHED[name], "--trials", str(TRIALS)] if name in SEARCHED else ["grid"]),
             *(["--data.path", path] if path else []), "--out", str(out), "--parallel", str(given.parallel),
             *(["--quiet"] if given.quiet else []), *given.more.split()]  # fmt: skip
    if given.only:
        put = join if given.what == "join" else renew
        only = given.only.split(",")
        put(name, [*words, "--baselines", json.dumps(baselines(config, only))], out, only)
        return
    found = compared(words, out)
    like = found["methods"].get("fedavg") or found["methods"]["fedavg_kd"]
    limits = {"bytes": whole(like, out, "bytes") / 3, "seconds": whole(like, out, "seconds")}
    content = {
        "federation": name, "score": found["score_label"], "unit": found["score_unit"], "clients": len(found["clients"]),
        "test_examples": found["mean_answer"]["test_examples"], "seeds": found["seeds"], "rounds": found["rounds"],
        "tuning": found["tuning"]["sentence"], "edge": found["tuning"]["edge"], "failed": found["failed"],
        "load": round(load, 1), "methods": {label: of(found, label, out) for label in found["methods"]}, "equal": {},
    }  # fmt: skip
    for kind, limit in {**limits, "best": None}.items():
        means = {label: at_equal(one, out, kind, limit) for label, one in found["methods"].items()}
        content["equal"][kind] = {"limit": limit, "means": rounded(means)}
    RESULTS.mkdir(parents=True, exist_ok=True)
    save(name, content)
    print(f"{name}: {time.time() - began:.0f} s", flush=True)


def baselines(config, only):
    """Those of the federation's methods that are named."""
    named = [one if isinstance(one, str) else one["name"] for one in config["baselines"]]
    if strange := set(only) - set(named):
        raise SystemExit(f"no {', '.join(sorted(strange))} there; there are {', '.join(named)}")
    return [one for one, name in zip(config["baselines"], named, strict=True) if name in only]


def committed(name):
    """The results of a federation that are there."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        raise SystemExit(
            f"{file} is missing: a method joins results that are there; `leaderboard.py run {name}` makes them"
        )
    return json.loads(file.read_text(encoding="utf-8"))


def renew(name, words, out, only):
    """Puts the rows of a few methods into the results of a federation."""
    content, found = committed(name), compared(words, out)
    before, now = content["methods"]["local"]["mean"], rounded(found["methods"]["local"]["statistics"]["mean"])
    if before != now or found["seeds"] != content["seeds"]:
        raise SystemExit(f"{out}: local is at {now} with seeds {found['seeds']}, in {RESULTS / name}.json at {before}: not "
                         "the same runs; `join` takes them, and keeps the difference")  # fmt: skip
    again = put_rows(content, found, out, only)
    content["renewed"] = {**content.get("renewed", {}), **{label: ["local", *again] for label in again}}
    save(name, content)


def join(name, words, out, only):
    """Puts the rows of new methods into the results of a federation, and how far `local` is from the one there."""
    content = committed(name)
    by_score = RULE in content["tuning"]
    found = compare_by_score(words, out, only, compared) if by_score else compared(words, out)
    settings = {
        "seeds": (content["seeds"], found["seeds"]), "rounds": (content["rounds"], found["rounds"]),
        "clients": (content["clients"], len(found["clients"])),
        "test_examples": (content["test_examples"], found["mean_answer"]["test_examples"]),
    }  # fmt: skip
    if not by_score:
        settings["tuning"] = (content["tuning"], found["tuning"]["sentence"])
    if other := {key: values for key, values in settings.items() if values[0] != values[1]}:
        raise SystemExit(f"{out}: not the federation of the results: {other} (there, here)")
    before, now = content["methods"]["local"]["mean"], rounded(found["methods"]["local"]["statistics"]["mean"])
    new = put_rows(content, found, out / "final" if by_score else out, only)
    local = {"committed": before, "here": now, "difference": rounded(now - before)}
    content["joined"] = {
        **content.get("joined", {}),
        **{label: {"with": sorted({*found["methods"]} - {label}), "local": local} for label in new},
    }
    save(name, content)
    print(
        f"{name}: {', '.join(new)} joined; local is at {now} here, and at {before} in the results ({now - before:+.5f})"
    )


def put_rows(content, found, out, only):
    """Puts the rows of these methods of a comparison into results; their names."""
    labels = [label for label in found["methods"] if label in only]
    for label in labels:
        content["methods"][label] = of(found, label, out)
        for kind, one in content["equal"].items():
            one["means"][label] = rounded(at_equal(found["methods"][label], out, kind, one["limit"]))
    failed = {label: reason for label, reason in found.get("failed", {}).items() if label in only}
    for label in failed:  # its row of before was of other settings
        content["methods"].pop(label, None)
    content["failed"] = {
        **{label: why for label, why in content.get("failed", {}).items() if label not in only},
        **failed,
    }
    edge = [one for one in content["edge"] if one.rpartition(" of ")[2] not in labels]
    content["edge"] = [*edge, *(one for one in found["tuning"]["edge"] if one.rpartition(" of ")[2] in labels)]
    return labels


def save(name, content):
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def compared(words, out):
    """The results of a comparison, as asked for; a method that diverged is missing in them, and named under `failed`."""
    # one of before would be taken for this one where this one is refused
    (out / "comparison.json").unlink(missing_ok=True)
    polyfed(words)
    if not (out / "comparison.json").exists():
        raise SystemExit(f"{out}: not compared, for the reason above")
    found = json.loads((out / "comparison.json").read_text(encoding="utf-8"))
    kind = words[words.index("--budget") + 1].partition("=")[0]
    if found["budget"]["kind"] != kind:
        raise SystemExit(f"{out}: the comparison is not read by {kind!r}, for the reason above")
    return found


def at_equal(method, folder, kind, limit):
    """Mean over seeds of the last evaluated round within so many bytes or seconds, or of the best by validation examples;
    None if a run has no such round."""
    scores = []
    for run in method["runs"].values():
        if kind == "best":
            last = (folder / run["path"] / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
            inside = [point for point in run["curve"] if point[0] == json.loads(last)["best_round"]]
        else:
            inside = [point for point in run["curve"] if point[COLUMNS[kind]] <= limit]
        scores.append(inside[-1][1] if inside else None)
    return None if None in scores else sum(scores) / len(scores)


def whole(method, out, kind):
    """What all rounds of a method's runs cost, mean over seeds."""
    fields = {"bytes": ("bytes_down", "bytes_up"), "seconds": ("seconds_clients", "seconds_server")}[kind]
    totals = []
    for run in method["runs"].values():
        lines = (out / run["path"] / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        totals.append(sum(json.loads(line)[field] for line in lines for field in fields))
    return sum(totals) / len(totals)


def of(found, label, out):
    """What is kept of a method: its scores, its clients', and how far it is ahead of training alone and of FedAvg."""
    method = found["methods"][label]
    kept = {name: method["statistics"][name] for name in KEPT}
    tuned = found["tuning"]["methods"][label]
    kept |= {"chosen": tuned["chosen"], "tried": len(tuned["tried"])}
    kept["clients"] = {
        client: {name: one.get(name) for name in ("mean", "gain", "gain_interval")}
        for client, one in method["statistics"]["clients"].items()
    }
    kept["against"] = {
        other: ahead(*(scores(found, out, one, found["rounds"]) for one in (label, other)))
        for other in ("local", "fedavg", "fedavg_ft") if other in found["methods"] and other != label
    }  # fmt: skip
    return rounded(kept)


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return round(value, 5) if isinstance(value, float) else value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["list", "run", "join", "page"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--runs", default="runs/leaderboard")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--only", default="", metavar="NAMES")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--more", default="", help="further options of polyfed compare, for a try: '--rounds 2'")
    given = parser.parse_args()
    if given.what == "list":
        print("\n".join(federations()))
    elif given.what == "page":
        leaderboard_page.write(RESULTS, HERE.parent / "docs")
    elif given.what == "join" and not given.only:
        raise SystemExit("which methods join? --only fedgen")
    else:
        for name in federations() if given.names == ["all"] else given.names:
            if name not in federations():
                raise SystemExit(f"no {name!r}; there are {', '.join(federations())}")
            run(name, given)


if __name__ == "__main__":
    main()
