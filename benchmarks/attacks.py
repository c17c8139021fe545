"""What lying clients do to a federation, and what each robust rule saves: accuracy of the honest clients.

    python benchmarks/attacks.py --out benchmarks/results/attacks.json

Ten clients of scikit-learn's digits (30 % of the digits to test on), dealt evenly ("iid") or by Dirichlet 0.3 ("skewed");
an MLP of 64-32-10, SGD at 0.1, minibatches of 16, two epochs a round, 10 rounds, three seeds. The first one or two clients
lie, in every round, and know the updates of all others:

- sign flip: −5 times their update.
- scaling: 100 times their update.
- label flip: they train on labels 9 − y.
- same value: their update is 1 in every number (Li et al. 2019, RSA).
- ALIE: mean − 1.5 standard deviations of the honest updates, number by number (Baruch et al. 2019).
- IPM: −2 times the mean of the honest updates, inner product manipulation (Xie et al. 2020).

`fedavg` has every rule; `fedavg_ft`, `ditto` and `fedrep`, whose clients have models of their own, have none, "clip" and
"median", against two liars on skewed data. Rules that take a number of liars are told two.

Printed: accuracy in % on the honest clients' own test examples after the last round, mean over honest clients and seeds;
the cost of a rule without liars as a difference to no rule, with its interval of 95 %, Student's, over paired seeds. Each
cell has its three seeds in the output. Runs are appended to a file beside --out, from which it goes on.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from scipy import stats

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.core.algorithm import Message
from polyfed.data import IID, SOURCES, Dirichlet, Split, make_clients
from polyfed.models import ModelSpec
from polyfed.simulation.engines.cohort import CohortEngine
from polyfed.simulation.monitoring.progress import SilentProgress

CLIENTS, ROUNDS, SEEDS = 10, 10, (0, 1, 2)
OPTIONS = {"lr": 0.1, "batch_size": 16, "local_epochs": 2}
RULES = ("none", "clip:3x", "clip:1x", "median", "trimmed_mean:0.2", "krum:2", "multi_krum:2", "geometric_median")
PERSONAL, PERSONAL_RULES = ("fedavg_ft", "ditto", "fedrep"), ("none", "clip:3x", "median")
ATTACKS = ("sign flip", "scaling", "label flip", "same value", "ALIE", "IPM")
SPLITS = {"iid": IID(), "skewed": Dirichlet(0.3)}
honest_run = CohortEngine.run


def clients(split, seed, liars, attack):
    pool = SOURCES["digits"]().load()
    data, _ = make_clients(pool, Split(clients=CLIENTS, test_fraction=0.3), SPLITS[split], seed=seed)
    net = ModelSpec("mlp", {"hidden": (32,)}, pool.input_shape, pool.num_outputs)
    members = [pf.Client(d.id, net, d.train, d.test) for d in data]
    if attack == "label flip":
        for member in members[:liars]:
            member.train.y.copy_(9 - member.train.y)
    return members


def forge(attack, own, others):
    """The update that a liar sends, from its own and those of the honest, as flat vectors."""
    if attack == "sign flip":
        return -5 * own
    if attack == "scaling":
        return 100 * own
    if attack == "same value":
        return torch.ones_like(own)
    if attack == "ALIE":
        return others.mean(dim=0) - 1.5 * others.std(dim=0)
    return -2 * others.mean(dim=0)


def received(result):
    """The tensors that a client began with: FedRep's come as the common draw in round 1, and FML sends none then, so that
    they count from 0."""
    sent = result.task.message.tensors
    return sent.get("model") or sent.get("draw") or {n: 0 * t for n, t in result.reply.tensors["model"].items()}


def lying_engine(attack, liars):
    """`CohortEngine.run`, with the replies of liars forged."""

    def run(engine, tasks):
        results = list(honest_run(engine, tasks))
        ids = sorted({r.task.client for r in results})[:liars]
        trained = [r for r in results if r.task.phase == "local" and r.reply is not None]
        if not trained or attack in (None, "label flip"):
            yield from results
            return
        names = [n for n, t in trained[0].reply.tensors["model"].items() if t.is_floating_point()]

        def update(result):
            start = received(result)
            return torch.cat([(result.reply.tensors["model"][n] - start[n]).flatten() for n in names])

        others = torch.stack([update(r) for r in trained if r.task.client not in ids])
        for result in results:
            if result.task.client in ids and result.task.phase == "local":
                forged, start, place = forge(attack, update(result), others), received(result), 0
                model = dict(result.reply.tensors["model"])
                for n in names:
                    size = start[n].numel()
                    model[n] = start[n] + forged[place : place + size].view_as(start[n])
                    place += size
                result = replace(result, reply=Message({"model": model}, result.reply.scalars))
            yield result

    return run


def accuracy(split, seed, method, rule, attack, liars):
    """Mean accuracy of the honest clients after the last round."""
    members = clients(split, seed, liars, attack)
    CohortEngine.run = lying_engine(attack, liars)
    try:
        algorithm = REGISTRY[method](**OPTIONS, robust=None if rule == "none" else rule)
        run = pf.federate(
            members, algorithm, rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS, workers=0, engine="cohort",
            progress=SilentProgress(), on_error="skip",
        )  # fmt: skip
        rows, cosines = run.history[-1]["clients"], {}
        for record in run.history:
            for i, row in record["clients"].items():
                cosines.setdefault(i, []).append(row.get("update_cosine"))
        named = sorted({i for record in run.history for i in rows if any(repr(i) in s for s in record["warnings"])})
    finally:
        CohortEngine.run = honest_run
    ids = sorted(member.id for member in members)
    lying = ids[:liars] if attack else []
    return {
        "accuracy": round(statistics.fmean(rows[i]["accuracy"] for i in ids if i not in lying), 4),
        "warned of liars": len(set(named) & set(lying)), "warned of honest": len(set(named) - set(lying)),
    }  # fmt: skip


def cases():
    """(split, method, rule, attack, liars) of all cells, without liars first."""
    for split in SPLITS:
        for method, rules in (("fedavg", RULES), *((m, PERSONAL_RULES) for m in PERSONAL)):
            for rule in rules:
                yield split, method, rule, None, 0
    for liars in (2, 1):
        for split in SPLITS:
            for attack in ATTACKS:
                for rule in RULES:
                    yield split, "fedavg", rule, attack, liars
                for method in PERSONAL if liars == 2 and split == "skewed" else ():
                    for rule in PERSONAL_RULES:
                        yield split, method, rule, attack, liars


def interval(values):
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    mean = statistics.fmean(values)
    return {key: round(100 * value, 1) for key, value in (("value", mean), ("low", mean - half), ("high", mean + half))}


def tables(cells):
    """Lines of the tables in README: honest accuracy by attack and rule; the costs of rules; personalised methods."""

    def shown(*key):
        return f"{100 * statistics.fmean(cells['|'.join(map(str, key))]['accuracy']):.1f}"

    for split in SPLITS:
        for liars in (1, 2):
            yield f"\n{split}, {liars} of {CLIENTS} lie\n"
            yield "| rule | nobody lies | " + " | ".join(ATTACKS) + " | cost without liars |"
            yield "|---" * (3 + len(ATTACKS)) + "|"
            for rule in RULES:
                free = cells[f"{split}|fedavg|{rule}|None|0"]["accuracy"]
                base = cells[f"{split}|fedavg|none|None|0"]["accuracy"]
                gap = interval([b - a for a, b in zip(base, free, strict=True)])
                row = [shown(split, "fedavg", rule, attack, liars) for attack in ATTACKS]
                cost = "" if rule == "none" else f"{gap['value']:+.1f} ({gap['low']:+.1f} to {gap['high']:+.1f})"
                yield f"| {rule} | {shown(split, 'fedavg', rule, None, 0)} | {' | '.join(row)} | {cost} |"
        if split == "iid":
            continue
        yield f"\n{split}, 2 of {CLIENTS} lie, models of one's own\n"
        yield "| method | rule | nobody lies | " + " | ".join(ATTACKS) + " |"
        yield "|---" * (3 + len(ATTACKS)) + "|"
        for method in ("fedavg", *PERSONAL):
            for rule in PERSONAL_RULES:
                row = [shown(split, method, rule, attack, 2) for attack in ATTACKS]
                yield f"| `{method}` | {rule} | {shown(split, method, rule, None, 0)} | {' | '.join(row)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=10**9, help="only so many cells, for a pilot")
    given = parser.parse_args()
    torch.set_num_threads(1)
    beside = given.out.with_suffix(".partial.jsonl")
    done = dict(json.loads(line) for line in beside.read_text().splitlines()) if beside.exists() else {}
    for number, case in enumerate(cases()):
        key = "|".join(map(str, case))
        if number >= given.limit or key in done:
            continue
        split, method, rule, attack, liars = case
        scores = [accuracy(split, seed, method, rule, attack, liars) for seed in SEEDS]
        done[key] = {name: [score[name] for score in scores] for name in scores[0]}
        with beside.open("a") as file:
            file.write(json.dumps([key, done[key]]) + "\n")
        print(key, done[key], flush=True)
    if given.limit == 10**9:
        setting = {"clients": CLIENTS, "rounds": ROUNDS, "seeds": SEEDS, **OPTIONS, "hidden": [32]}
        given.out.write_text(json.dumps({"setting": setting, "cells": done}, indent=1) + "\n")
        beside.unlink()
        print("\n".join(tables(done)))


if __name__ == "__main__":
    main()
