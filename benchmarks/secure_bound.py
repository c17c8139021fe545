"""The bound on updates that secure sums follow by counts: what it costs, what it saves, and how soon it settles.

    python benchmarks/secure_bound.py --out benchmarks/results/secure_bound.json

The clients, data, networks and lies of `attacks.py`, all with secure=True, ten rounds, five seeds. `robust=None` is no
bound, `clip` the default of a deployment: 3 times a median that is followed by counts. `fedavg`, `fedrep` and `fml`.

- cost: accuracy of all clients after rounds 1, 3 and 10 without liars, as a difference to no bound, with Student's interval
  of 95 % over paired seeds.
- liars, one or two of ten, skewed data: "scaling" sends 1000 times the update, "sign flip" −5 times. A broken site's
  software limits its update as all do. "free": its software has been changed, limits nothing, and counts 0 or, "up", as if
  all others were within, so that all counts seem 0 and the bound rises. "quiet up" counts so, and sends a usual update.
  `fedavg`, `fedrep`; of `fml` the first two.
- settling: the round from which on the estimate stays within a third and three times the median norm (null: never), from a
  first estimate as it is, 100 times smaller and 100 times larger; 3 and 10 clients, skewed data, three seeds; `fedavg` and
  `fml`.

About ten minutes of one quiet core.
"""

import argparse
import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from attacks import CLIENTS, OPTIONS, clients, interval, received

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.core.algorithm import Message
from polyfed.core.messages.fixed_point import build_sum_message, parse_sum_message, to_fixed_point
from polyfed.core.robust.clip import euclidean_norm, update_changes
from polyfed.core.robust.counted_median import COUNTED_MEDIAN, CountedMedian
from polyfed.simulation.engines.cohort import CohortEngine
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.replies import reply_validation

ROUNDS, SEEDS, METHODS = 10, (0, 1, 2, 3, 4), ("fedavg", "fedrep", "fml")
BROKEN, CHANGED = ("scaling", "sign flip"), ("scaling, free", "scaling, free, up", "quiet up")  # software
FIRST = (0.01, 1.0, 100.0)
honest_run, honest_encode = CohortEngine.run, reply_validation.encode_reply_in_fixed_point
honest_blocks, honest_start = Federation.build_task_blocks, CountedMedian.from_first_message


def lying_run(lie, liars):
    """`CohortEngine.run`, with the updates of liars multiplied, and their replies marked."""
    times = {"sign flip": -5, "quiet up": 1}.get(lie, 1000)

    def run(engine, tasks):
        for result in honest_run(engine, tasks):
            if result.task.client in liars and result.task.phase == "local":
                start, sent = received(result), result.reply.tensors["model"]
                model = {n: start[n] + times * (t - start[n]) if t.is_floating_point() else t for n, t in sent.items()}
                reply = Message({**result.reply.tensors, "model": model}, {**result.reply.scalars, "liar": 1.0})
                result = replace(result, reply=reply)
            yield result

    return run


def lying_encode(lie, observed):
    """The encoding of a part of a secure sum, which notes norm and M, and in which a liar limits and counts as it likes."""

    def encode(reply, algorithm, size, message):
        norm = euclidean_norm(update_changes(reply, message, algorithm.groups))
        observed[-1].append((norm, message.scalars.get(COUNTED_MEDIAN)))
        part = honest_encode(reply, algorithm, size, message)
        if "liar" not in reply.scalars or not ("free" in lie or "up" in lie):
            return part
        words, layout = parse_sum_message(part)
        words = words.copy()
        if "free" in lie:
            groups = {group: reply.tensors[group] for group in algorithm.groups}
            plain = to_fixed_point(groups, reply.scalars["num_examples"], size)
            words[: len(plain)] = plain
        if layout.num_counts:  # "up": as if it knew that all others are within
            words[-2:] = np.array([1 - CLIENTS, 1] if "up" in lie else [0, 0], np.int64).view(np.uint64)
        return build_sum_message(words, layout)

    return encode


def play(members, method, rule, seed, lie=None, num_liars=0, first=1.0):
    """A run: accuracy of the honest clients by round, bounds, norms and M, and in how many rounds a lie was proved.

    `first` multiplies the first estimate.
    """
    liars, observed = sorted(member.id for member in members)[:num_liars], []

    def build_blocks(federation, phase, *more):
        if phase == "local":
            observed.append([])
        return honest_blocks(federation, phase, *more)

    with (
        patch.object(CohortEngine, "run", lying_run(lie, liars)),
        patch.object(reply_validation, "encode_reply_in_fixed_point", lying_encode(lie or "", observed)),
        patch.object(Federation, "build_task_blocks", build_blocks),
        patch.object(CountedMedian, "from_first_message", lambda m: CountedMedian(first * honest_start(m).median)),
    ):
        run = pf.federate(
            members, REGISTRY[method](**OPTIONS, robust=rule), rounds=ROUNDS, seed=seed, workers=0, engine="cohort",
            progress=SilentProgress(), secure=True, on_error="skip",
        )  # fmt: skip
    honest = [member.id for member in members if member.id not in liars]
    return {
        "accuracy": [statistics.fmean(record["clients"][i]["accuracy"] for i in honest) for record in run.history],
        "bounds": [record["robust"]["bound"] for record in run.history if "robust" in record],
        "observed": observed,
        "proved": sum(any("nobody can see which" in text for text in record["warnings"]) for record in run.history),
    }


def settling_round(observed):
    """The first round from which on M lies within a third and three times the median of the updates."""
    ratios = [rows[0][1] / statistics.median_low([norm for norm, _ in rows]) for rows in observed]
    good = [1 / 3 <= ratio <= 3 for ratio in ratios]
    return next((k + 1 for k in range(len(good)) if all(good[k:])), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    costs, lies, settling = {}, {}, {}
    for split in ("iid", "skewed"):
        for method in METHODS:
            pairs = []
            for seed in SEEDS:
                members = clients(split, seed, 0, None)
                pairs.append([play(members, method, rule, seed) for rule in (None, "clip")])
            costs[f"{split}|{method}"] = {
                f"round {number}": {
                    "no bound": round(100 * statistics.fmean(pair[0]["accuracy"][number - 1] for pair in pairs), 1),
                    **interval([p[1]["accuracy"][number - 1] - p[0]["accuracy"][number - 1] for p in pairs]),
                }
                for number in (1, 3, 10)
            }
            print(split, method, costs[f"{split}|{method}"], flush=True)
    for method in METHODS:
        for lie in (*BROKEN, *CHANGED) if method != "fml" else BROKEN:
            for num_liars in (1, 2) if "up" not in lie else (1,):
                for rule in (None, "clip") if "up" not in lie else ("clip",):
                    runs = [play(clients("skewed", s, 0, None), method, rule, s, lie, num_liars) for s in SEEDS]
                    key = f"{method}|{lie}|{num_liars}|{rule or 'none'}"
                    lies[key] = {
                        "accuracy": [round(run["accuracy"][-1], 4) for run in runs],
                        "largest bound": [round(max(run["bounds"]), 3) for run in runs] if rule else [],
                        "last bound": [round(run["bounds"][-1], 3) for run in runs] if rule else [],
                        "rounds with a proof of a lie": [run["proved"] for run in runs],
                    }
                    print(key, lies[key], flush=True)
    for method, number, first in itertools.product(("fedavg", "fml"), (3, CLIENTS), FIRST):
        runs = [play(clients("skewed", s, 0, None)[-number:], method, "clip", s, first=first) for s in SEEDS[:3]]
        settling[f"{method}|{number}|{first:g}"] = [settling_round(run["observed"]) for run in runs]
        print("settled", f"{method}|{number}|{first:g}", settling[f"{method}|{number}|{first:g}"], flush=True)
    setting = {"clients": CLIENTS, "rounds": ROUNDS, "seeds": SEEDS, **OPTIONS, "hidden": [32]}
    content = {"setting": setting, "cost": costs, "lies": lies, "rounds until settled": settling}
    given.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
