"""Real sites, answered with intervals: docs/multicentre.md.

    python benchmarks/multicentre.py list
    python benchmarks/multicentre.py run [--only heart,brca] [--data FOLDER] [--work DIR]     all without --only
    python benchmarks/multicentre.py join [--only heart,brca] [--data FOLDER] [--work DIR]    rows of new methods
    python benchmarks/multicentre.py again [--only heart,brca] [--data FOLDER] [--work DIR]   answers, without training
    python benchmarks/multicentre.py page                                docs/multicentre.md, from the results

A federation is one call of `pf.compare` with `folds=5`: every example of a site is tested once per repeat, learning rates of
all methods are searched on validation examples, and simple models of each site alone are compared too. Runs are in --work
(runs/multicentre); what is finished is not repeated, and what was stopped goes on. Results are in
benchmarks/results/multicentre, one file a federation. `multicentre_sites.py` builds the federations, and docs/multicentre.md
says where their data are from. `join` compares the methods of `NEWCOMERS` with `local` on the same sites, folds and seeds,
and puts their rows under `joined` into the results that are there. Their gains are over the `local` of that comparison; the
answers stay those of the first one. `again` computes the answers of the runs in --work with the code as it
is now: it trains only simple models, leaves out what --work does not have, and keeps the minutes of the first time.
"""

import argparse
import json
import os
from pathlib import Path

import multicentre_page
import torch
from multicentre_sites import FEDERATIONS, newcomers

import polyfed as pf

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "multicentre"
FOLDS = 5
JOINED = (
    "best",
    "skipped",
    "failed",
    "tuning",
    "convergence",
    "methods",
)  # what is kept of a comparison of new methods


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(one) for one in value]
    return round(value, 5) if isinstance(value, float) else value


def scores(one):
    """A method's or a simple model's scores: mean and gain over training alone, at each site too."""
    statistics = one.get("statistics", one)
    sites = statistics.get("clients", {})
    means = one.get("scores") or {site: numbers["mean"] for site, numbers in sites.items()}
    return {
        **{key: statistics.get(key) for key in ("mean", "interval", "gain", "gain_interval")},
        "sites": {
            site: {"mean": mean, **{k: sites[site].get(k) for k in ("gain", "gain_interval", "verdict") if site in sites}}
            for site, mean in means.items()
        },
    }  # fmt: skip


def condensed(found, federation):
    """What the page needs of a comparison."""
    same = (
        "task", "score", "score_label", "score_unit", "higher_is_better", "rounds", "seeds", "folds", "fold_repeats",
        "best", "left_out", "skipped", "failed", "mean_answer", "site_model", "verdicts", "warnings", "notes",
        "convergence",
    )  # fmt: skip
    return {
        **{key: found[key] for key in same},
        "answers": [{key: value for key, value in one.items() if key != "gains"} for one in found["answers"]],
        "tuning": {key: found["tuning"].get(key) for key in ("sentence", "edge")},
        "without": federation.left_out,
        "sites": {
            client.id: {"examples": sum(len(part) for part in (client.train, client.val or (), client.test)),
                        "model": str(getattr(client.model, "arguments", {}))}
            for client in federation.clients
        },
        "methods": {
            label: {"fields": {k: v for k, v in one["fields"].items() if k in ("lr", "by_client")}, **scores(one)}
            for label, one in found["methods"].items()
        },
        "references": {label: scores(one) for label, one in found["references"].items()},
    }  # fmt: skip


def compare(name, federation, methods, out):
    """Runs the comparison in `out`; returns its results and the minutes of a core of all calls there together."""
    torch.set_num_threads(1)
    began = sum(os.times()[:4])
    results = pf.compare(
        federation.clients, methods, folds=FOLDS, parallel=1, engine="inprocess", quiet=True, out=out, title=name,
        **federation.settings,
    ).results  # fmt: skip
    minutes = (sum(os.times()[:4]) - began) / 60
    spent = out / "minutes.json"
    minutes += json.loads(spent.read_text()) if spent.exists() else 0.0
    spent.write_text(json.dumps(minutes))
    print(f"{name}: {minutes:.1f} minutes of a core", flush=True)
    return results, minutes


def save(name, content):
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(
        json.dumps(rounded(content), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def run(name, data, work):
    federation, load = FEDERATIONS[name](data), os.getloadavg()[0]
    results, minutes = compare(name, federation, federation.methods, work / name)
    content = {
        "federation": name,
        "minutes": round(minutes, 1),
        "load": round(load, 1),
        **condensed(results, federation),
    }
    save(name, content | joined_before(name, content))


def joined_before(name, content):
    """Rows that joined the committed results, if these have the sites and rounds of `content`, and what is of today."""
    file = RESULTS / f"{name}.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    same = all(before.get(key) == content[key] for key in ("sites", "rounds"))
    kept = {"joined": before["joined"]} if same and "joined" in before else {}
    return kept | {"again": sorted({"first", *(before.get("again", ()) if kept else ())})}


NONE_SUITS = "no method that federates suits these clients: "


def find_reasons(federation, methods):
    """`{label: why it does not suit the federation}` of methods of which none does."""
    reasons = {}
    for label in methods.keys() - {"local"}:
        pair = {"local": methods["local"], label: methods[label]}
        try:
            pf.compare(federation.clients, pair, folds=FOLDS, **federation.settings)
        except pf.UserError as error:
            reasons[label] = str(error).removeprefix(NONE_SUITS)
    return dict(sorted(reasons.items()))


def join(name, data, work):
    """Adds the rows of new methods to the committed results of a federation; where none suits it, the reasons."""
    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    federation, load = FEDERATIONS[name](data), os.getloadavg()[0]
    methods = newcomers(federation)
    try:
        results, minutes = compare(name, federation, methods, work / f"{name}-joined")
    except pf.UserError as error:
        if not str(error).startswith(NONE_SUITS):
            raise
        rows = {"skipped": find_reasons(federation, methods), "failed": {}, "convergence": {}, "methods": {}}
        save(name, content | {"joined": {"minutes": 0.0, **rows}})
        print(f"{name}: none of {', '.join(rows['skipped'])} suits", flush=True)
        return
    joined = condensed(results, federation)
    if joined["sites"] != content["sites"] or joined["rounds"] != content["rounds"]:
        raise SystemExit(f"{name}: sites or rounds are not those of {RESULTS / name}.json; run it again")
    rows = {key: joined[key] for key in JOINED}
    of_today = {"again": sorted({*content.get("again", ()), "joined"})}
    save(name, content | {"joined": {"minutes": round(minutes, 1), "load": round(load, 1), **rows}} | of_today)


def again(name, data, work):
    """Computes the answers of the comparisons of a federation that are in `work`, and finished, with today's code."""
    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    federation = FEDERATIONS[name](data)
    for out, methods in ((work / name, federation.methods), (work / f"{name}-joined", newcomers(federation))):
        if not (out / "comparison.json").exists():
            print(f"{name}: {out} has no finished comparison: left as it is", flush=True)
            continue
        results, _ = compare(name, federation, methods, out)
        found = condensed(results, federation)
        if found["sites"] != content["sites"] or found["rounds"] != content["rounds"]:
            raise SystemExit(f"{name}: sites or rounds are not those of {RESULTS / name}.json")
        if out.name == name:
            content |= found
        else:
            content["joined"] |= {key: found[key] for key in JOINED}
        content["again"] = sorted({*content.get("again", ()), "first" if out.name == name else "joined"})
    save(name, content)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("list", "run", "join", "again", "page"))
    parser.add_argument("--only", default=",".join(FEDERATIONS), help="federations, with commas between")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--work", type=Path, default=Path("runs/multicentre"))
    asked = parser.parse_args()
    if asked.what == "page":
        multicentre_page.write(RESULTS, HERE.parent / "docs")
        return
    names = asked.only.split(",")
    if strange := set(names) - set(FEDERATIONS):
        parser.error(f"no {', '.join(sorted(strange))} there; there are {', '.join(FEDERATIONS)}")
    for name in names:
        if asked.what == "list":
            print(name)
        else:
            {"run": run, "join": join, "again": again}[asked.what](name, asked.data, asked.work)


if __name__ == "__main__":
    main()
