"""How often `polyfed compare` says something false where nothing differs, and how often it says what is there.

    python benchmarks/verdicts.py simulated [--repeats 2000]     predictions drawn with a known truth, 54 cells, and power
    python benchmarks/verdicts.py covered [--repeats 500]        the same with a large effect: do intervals hold the truth?
    python benchmarks/verdicts.py rivals [--repeats 1000]        simulated, with simple models of each site alone, 16 cells
    python benchmarks/verdicts.py real [--repeats 200]           federations trained and compared, 12 cells
    python benchmarks/verdicts.py table                          benchmarks/results/verdicts.md from all of them

Results are in benchmarks/results/verdicts.json, a cell as soon as it is done; what is there is not repeated.

Simulated: each example has a difficulty that both methods share, one of its own for each method, and one for each network;
each network has luck of its own at each site and at all sites together, about 4 points of accuracy. Both methods are drawn
alike, so that nothing differs in expectation. With one seed networks have no luck: its interval speaks of these two networks
alone.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from scipy import stats

import polyfed as pf
from polyfed.comparison.build_results import ResultInputs, build_results
from polyfed.comparison.planning.budget import Budget, ResultCriteria
from polyfed.comparison.statistics.estimate import CONFIDENCE_LEVEL
from polyfed.comparison.statistics.evidence import Evidence
from polyfed.comparison.statistics.mrmc import (
    estimate_client_means,
    estimate_mean_over_clients,
    estimate_variance_components,
)
from polyfed.core.evaluation.metrics import METRICS
from polyfed.core.seeds import derive_seed
from polyfed.simulation.monitoring.progress import SilentProgress

RESULTS = Path(__file__).parent / "results" / "verdicts.json"
SCORES = ("accuracy", "auc", "r2")
GAINS = (0.02, 0.05, 0.10)


def luck_of(seeds):
    """The standard deviation of a network's luck at a site; at all sites together it is half of that."""
    return 0.0 if seeds == 1 else 0.15


def drawn(score, clients, examples, seeds, rng, gain=0.0, base=None):
    """Outputs of two methods, (2, seeds, clients, examples, outputs), and targets (clients, examples). `base` are the
    clients' levels, (clients,), if they are not to be drawn."""
    luck = luck_of(seeds)
    shared = rng.normal(0, 1.2, (1, 1, clients, examples))
    of_method = rng.normal(0, 0.7, (2, 1, clients, examples))
    of_network = rng.normal(0, 0.7, (2, seeds, clients, examples))
    lucky = rng.normal(0, luck, (2, seeds, clients, 1)) + rng.normal(0, luck / 2, (2, seeds, 1, 1))
    level = (rng.normal(0.8, 0.4, (1, 1, clients, 1)) if base is None else base[:, None]) + lucky
    level[0] += gain
    if score == "r2":
        targets = rng.normal(size=(clients, examples))
        wrong = 0.5 * (0.5 * shared + of_method + of_network) * np.exp(-0.5 * (level - 0.8)) + 0.3 * lucky
        return (targets + wrong)[..., None], targets[..., None]
    targets = (rng.random((clients, examples)) < 0.4).astype(np.int64)
    targets[:, :2], targets[:, 2:4] = 0, 1
    sure = shared + of_method + of_network
    right = np.where(targets == 1, 1, -1) * (sure + level)  # where it is positive
    logit = right if score == "accuracy" else sure + 1.3 * level * targets
    return np.stack([np.zeros_like(logit), logit], axis=-1), targets


def sentences(score, outputs, targets):
    """What is said of the mean and of each site: the estimates of a comparison of two methods."""
    metric, truth = METRICS[score], torch.from_numpy(targets)
    ours, theirs = torch.from_numpy(outputs)
    sites = [
        estimate_variance_components(metric, [o[i] for o in ours], [t[i] for t in theirs], truth[i])
        for i in range(len(targets))
    ]
    known = [site for site in sites if site is not None]
    if not known:
        return None, []
    return estimate_mean_over_clients(known), estimate_client_means(known)


def cell(score, clients, examples, seeds, repeats):
    rng = np.random.default_rng(derive_seed(0, score, clients, examples, seeds))
    false = {"mean": 0, "sites": 0}
    for _ in range(repeats):
        mean, sites = sentences(score, *drawn(score, clients, examples, seeds, rng))
        false["mean"] += mean is not None and mean.p <= 1 - CONFIDENCE_LEVEL
        false["sites"] += any(site.p <= 1 - CONFIDENCE_LEVEL for site in sites)
    return {"repeats": repeats, **false}


def level_of(score, gain, rng):
    """By how much a method's level must be higher for a true difference of `gain`, by a large sample."""
    low, high = 0.0, 4.0
    for _ in range(18):
        middle = (low + high) / 2
        outputs, targets = drawn(score, 400, 400, 1, np.random.default_rng(1), middle)
        found = [
            METRICS[score](
                torch.from_numpy(o.reshape(-1, o.shape[-1])[:40000]),
                torch.from_numpy(targets.reshape(-1, *targets.shape[2:])[:40000]),
            )
            for o in outputs[:, 0]
        ]
        low, high = (middle, high) if found[0] - found[1] < gain else (low, middle)
    return (low + high) / 2


def power(score, gain, clients, examples, seeds, repeats):
    rng = np.random.default_rng(derive_seed(1, score, int(1000 * gain), clients, examples, seeds))
    level = level_of(score, gain, rng)
    said = {"mean": 0, "sites": 0}
    for _ in range(repeats):
        mean, sites = sentences(score, *drawn(score, clients, examples, seeds, rng, level))
        said["mean"] += mean is not None and mean.p <= 1 - CONFIDENCE_LEVEL and mean.value > 0
        said["sites"] += sum(site.p <= 1 - CONFIDENCE_LEVEL and site.value > 0 for site in sites)
    return {"repeats": repeats, "mean": said["mean"], "sites": said["sites"], "of_sites": repeats * clients}


def covered(gain, clients, examples, seeds, repeats):
    """How often an interval leaves out the expected accuracy, or difference of accuracies, of these very clients."""
    rng = np.random.default_rng(derive_seed(2, int(10 * gain), clients, examples, seeds))
    width = (1.2**2 + 2 * 0.7**2 + 1.25 * luck_of(seeds) ** 2) ** 0.5
    missed = {"gain": 0, "score": 0, "sites": 0}
    for _ in range(repeats):
        base = rng.normal(0.8, 0.4, clients)
        outputs, targets = drawn("accuracy", clients, examples, seeds, rng, gain, base)
        ours, theirs = (stats.norm.cdf((base + more) / width) for more in (gain, 0.0))
        mean, sites = sentences("accuracy", outputs, targets)
        found, truth = torch.from_numpy(outputs[0]), torch.from_numpy(targets)
        alone = estimate_mean_over_clients(
            [
                estimate_variance_components(METRICS["accuracy"], list(found[:, i]), None, truth[i])
                for i in range(clients)
            ]
        )
        missed["gain"] += not mean.low <= (ours - theirs).mean() <= mean.high
        missed["score"] += not alone.low <= ours.mean() <= alone.high
        missed["sites"] += any(not one.low <= true <= one.high for one, true in zip(sites, ours - theirs, strict=True))
    return {"repeats": repeats, **missed}


def kept():
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def once(kind, name, compute):
    """A cell that is not there yet."""
    if name in kept().get(kind, {}):
        return
    found = compute()
    content = kept()
    content.setdefault(kind, {})[name] = found
    RESULTS.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    print(kind, name, found, flush=True)


def simulated(repeats, scores):
    for score in scores:
        for clients in (4, 20):
            for examples in (12, 40, 200):
                for seeds in (1, 3, 10):
                    name = f"{score}, {clients} clients, {examples} examples, {seeds} seeds"
                    once("simulated", name, lambda a=(score, clients, examples, seeds): cell(*a, repeats))
    for score in scores:
        for gain in GAINS:
            for examples in (40, 200):
                for seeds in (3, 5, 10):
                    name = f"{score}, gain {gain}, 4 clients, {examples} examples, {seeds} seeds"
                    once("power", name, lambda a=(score, gain, 4, examples, seeds): power(*a, max(20, repeats // 10)))


def with_effects(repeats):
    for gain in (0.0, 1.5):
        for clients in (4, 20, 100):
            for examples in (12, 40, 200):
                for seeds in (1, 3):
                    effect = "a large effect" if gain else "no effect"
                    name = f"accuracy, {effect}, {clients} clients, {examples} examples, {seeds} seeds"
                    once("covered", name, lambda a=(gain, clients, examples, seeds): covered(*a, repeats))


# -- what a site has alone --------------------------------------------------------------------------------------------

SIMPLE = ("(line)", "(trees)", "(constant)")


def beside_rivals(score, clients, examples, seeds, rng, gain=0.0, weak=0.0):
    """Outputs by name, (seeds, clients, examples, outputs), and targets. A method, a network alone, and simple models, which
    have one outcome whatever the seed: what is luck of a network is noise of an example there, so that all have the same
    expected scores. The level of the method is higher by `gain`, and that of all rivals but one is lower by `weak`."""
    luck = luck_of(seeds)
    shared, level = rng.normal(0, 1.2, (1, clients, examples)), rng.normal(0.8, 0.4, (1, clients, 1))
    targets = (rng.random((clients, examples)) < 0.4).astype(np.int64)
    targets[:, :2], targets[:, 2:4] = 0, 1
    found = {}
    for name in ("fed", "local", *SIMPLE):
        size = 1 if name in SIMPLE else seeds
        noise = rng.normal(0, 0.7, (1, clients, examples)) + rng.normal(0, 0.7, (size, clients, examples))
        lucky = rng.normal(0, luck, (size, clients, 1)) + rng.normal(0, luck / 2, (size, 1, 1))
        if name in SIMPLE:
            lucky = rng.normal(0, 1.25**0.5 * luck, (1, clients, examples))
        own = level + lucky + (gain if name == "fed" else 0.0) - (weak if name in ("local", *SIMPLE[1:]) else 0.0)
        right = np.where(targets == 1, 1, -1) * (shared + noise + own)
        logit = right if score == "accuracy" else shared + noise + 1.3 * own * targets
        outputs = np.stack([np.zeros_like(logit), logit], axis=-1)
        found[name] = torch.from_numpy(np.repeat(outputs, seeds // size, axis=0))
    return found, torch.from_numpy(targets)


def over_the_best(score, found, targets, simple):
    """The gain of the method over the best that there is alone, of the mean and of each site, as a comparison has it."""
    metric, names = METRICS[score], [f"c{k:02d}" for k in range(len(targets))]
    seeds = range(len(found["fed"]))
    scores = {
        label: {s: {c: metric(outputs[s][k], targets[k]) for k, c in enumerate(names)} for s in seeds}
        for label, outputs in found.items()
    }
    evidence = Evidence(
        metric, seeds, scores, lambda label, seed, client: found[label][seed][names.index(client)],
        lambda client: targets[names.index(client)], True, True, {},
    )  # fmt: skip
    mean, sites = evidence.gain_over_best_rival("fed", ["local", *SIMPLE[:simple]], 1)
    return mean, list(sites.values())


def rivals_cell(score, examples, seeds, simple, weak, repeats):
    rng = np.random.default_rng(derive_seed(3, score, examples, seeds, simple, int(10 * weak)))
    said = dict.fromkeys(("join", "stay", "mean", "sites"), 0)
    for _ in range(repeats):
        mean, sites = over_the_best(score, *beside_rivals(score, 4, examples, seeds, rng, weak=weak), simple)
        known = [one.estimate for one in sites if one is not None]
        said["join"] += any(one.low > 0 for one in known)
        said["stay"] += any(one.high < 0 for one in known)
        said["sites"] += any(one.low > 0 or one.high < 0 for one in known)
        said["mean"] += mean is not None and not mean.estimate.low <= 0 <= mean.estimate.high
    return {"repeats": repeats, **said}


def rivals_power(score, gain, simple, repeats):
    rng = np.random.default_rng(derive_seed(4, score, int(100 * gain), simple))
    level, said = level_of(score, gain, rng), {"mean": 0, "sites": 0}
    for _ in range(repeats):
        mean, sites = over_the_best(score, *beside_rivals(score, 4, 200, 5, rng, gain=level), simple)
        said["mean"] += mean is not None and mean.estimate.low > 0
        said["sites"] += sum(one is not None and one.estimate.low > 0 for one in sites)
    return {"repeats": repeats, **said, "of_sites": 4 * repeats}


def rivals(repeats):
    for score in ("accuracy", "auc"):
        for examples in (40, 200):
            for seeds in (3, 10):
                for weak in (0.0, 1.5):
                    which = "one of four rivals as good" if weak else "four rivals as good"
                    name = f"{score}, 4 clients, {examples} examples, {seeds} seeds, {which}"
                    once("rivals", name, lambda a=(score, examples, seeds, 3, weak): rivals_cell(*a, repeats))
        for simple in (0, 3):
            name = f"{score}, gain 0.1 over each, 4 clients, 200 examples, 5 seeds, {simple} simple models"
            once("power", name, lambda a=(score, 0.1, simple): rivals_power(*a, max(20, repeats // 5)))


# -- real federations -------------------------------------------------------------------------------------------------

SITES = ("east", "north", "south", "west")
SEEDS = (0, 1, 2)


def federation(score, learnable, rng):
    """Four sites with 60 training and 40 test examples of ten features, and a linear network each."""
    direction, clients = rng.normal(size=10), []
    for site in SITES:
        x = rng.normal(size=(100, 10)).astype(np.float32)
        signal = x @ direction / 2 if learnable else np.zeros(100)
        if score == "r2":
            y = (signal + rng.normal(size=100)).astype(np.float32)
        else:
            y = (rng.random(100) < 1 / (1 + np.exp(-signal))).astype(np.int64)
        x, y = torch.from_numpy(x), torch.from_numpy(y)
        task = "regression" if score == "r2" else "classification"
        outputs = 1 if score == "r2" else 2
        build = LINEAR[outputs]
        clients.append(pf.Client(site, build, (x[:60], y[:60]), (x[60:], y[60:]), task=task))
    return clients


LINEAR = {outputs: (lambda outputs=outputs: torch.nn.Linear(10, outputs)) for outputs in (1, 2)}


def noise(score, rng, **more):
    """Labels (or targets) that nothing can predict: training alone against FedAvg, as users call it.

    Any network has an accuracy and an AUC of a half then. R² differs: with inputs and targets of variance 1 a linear network
    of weights w and bias b has −(|w|² + b²) on new examples, so that the less trained is the better.
    """
    clients = federation(score, False, rng)
    asked = {"rounds": 5, "evaluate_every": 5, "metrics": [score], "tune": "none", "budget": "steps", "engine": "inprocess",
             "references": False, "parallel": 1, "quiet": True}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        content = pf.compare(clients, ["fedavg"], **(asked | {"seeds": SEEDS} | more), out=folder).results
        truth = dict.fromkeys(SITES, 0.0) if score != "r2" else true_gains(Path(folder), content)
    return content, truth


def true_gains(folder, content):
    def expected(label, seed, site):
        weights = safetensors.torch.load_file(folder / label / f"seed-{seed}" / "models" / f"{site}.safetensors")
        return -sum(float(tensor.square().sum()) for tensor in weights.values())

    leader, seeds = content["leader"], content["seeds"]
    return {
        site: float(np.mean([expected(leader, s, site) - expected("local", s, site) for s in seeds])) for site in SITES
    }


def dealt(score, rng):
    """The same, with training and test examples dealt anew five times."""
    return noise(score, rng, seeds=None, resplit=5)


def beside(score, rng):
    """The same, with the simple models that a site has alone."""
    return noise(score, rng, references=True)


def one_negative(score, rng):
    """Four sites with labels that nothing can predict, one of which has 18 validation examples with one negative: rates and
    rounds are chosen on validation examples, and kNN-Per chooses on them too."""
    clients = []
    for site in SITES:
        x = torch.from_numpy(rng.normal(size=(118, 10)).astype(np.float32))
        y = torch.from_numpy((rng.random(118) < 0.5).astype(np.int64))
        if site == "south":
            y[:] = 1
            y[torch.from_numpy(np.concatenate([rng.choice(60, 4, False), [60], 78 + rng.choice(40, 4, False)]))] = 0
        parts = [(x[rows], y[rows]) for rows in (slice(0, 60), slice(60, 78), slice(78, None))]
        clients.append(pf.Client(site, LINEAR[2], parts[0], parts[2], parts[1]))
    asked = {"rounds": 6, "metrics": [score], "tune": {"lr": [0.01, 0.1, 1.0]}, "engine": "inprocess", "parallel": 1}
    content = pf.compare(clients, ["fedavg", "knn_per"], **asked, seeds=SEEDS, quiet=True).results
    return content, dict.fromkeys(SITES, 0.0)


def twins(score, rng):
    """Labels that can be learned: training alone against training alone with other seeds, read as a comparison is."""
    clients, method = federation(score, True, rng), pf.algorithms.Local(lr=0.1)
    runs = {
        (label, seed): pf.federate(
            clients, method, rounds=5, seed=seed + shift, metrics=[score], workers=0, progress=SilentProgress()
        )
        for label, shift in (("local", 0), ("twin", 100))
        for seed in SEEDS
    }
    description = {
        "title": "", "task": clients[0].task, "seeds": list(SEEDS), "reference": "local", "same_clients": True,
        "methods": {label: {"name": "local"} for label in ("local", "twin")}, "evaluated": {}, "skipped": {},
        "settings": {"rounds": 5},
    }  # fmt: skip
    data = {str(seed): {c.id: {"train": 60, "test": 40, "classes": None} for c in clients} for seed in SEEDS}
    targets = {c.id: c.test.labels for c in clients}
    material = ResultInputs(
        description=description,
        client_sizes=data,
        class_names=None,
        histories={run: one.history for run, one in runs.items()},
        metric=METRICS[score],
        outputs=lambda label, seed, client, number: runs[label, seed].predictions(client, round=number).outputs,
        targets=lambda seed, client: targets[client],
    )
    return build_results(material, ResultCriteria(Budget("steps"))), dict.fromkeys(SITES, 0.0)


def is_false(answer, truth):
    """Whether the interval of an answer leaves out the truth."""
    return answer["interval"] is not None and not answer["interval"][0] <= truth <= answer["interval"][1]


def real(repeats):
    plays = (
        ("noise", noise),
        ("twins", twins),
        ("dealt", dealt),
        ("simple models", beside),
        ("one negative", one_negative),
    )
    for name, play in plays:
        # Less training is better by R² where nothing can be learned, so that what a site has alone is not alike.
        for score in {"simple models": SCORES[:2], "one negative": ("auc",)}.get(name, SCORES):

            def count(score=score, play=play, name=name):
                false = {"mean": 0, "sites": 0}
                for k in range(repeats):
                    content, truth = play(score, np.random.default_rng(derive_seed(2, name, score, k)))
                    false["mean"] += is_false(content["mean_answer"], np.mean(list(truth.values())))
                    false["sites"] += any(is_false(one, truth[one["client"]]) for one in content["answers"])
                return {"repeats": repeats, **false}

            once("real", f"{name}, {score}", count)


# -- the table --------------------------------------------------------------------------------------------------------


def share(count, of):
    """A share with its exact interval (Clopper and Pearson 1934), in per cent."""
    found = stats.binomtest(count, of).proportion_ci(0.95, method="exact")
    return f"{100 * count / of:.1f} ({100 * found.low:.1f} to {100 * found.high:.1f})"


def table():
    content = kept()
    lines = [
        "False sentences where nothing differs, in per cent of comparisons with a 95 % interval of that share.",
        "",
    ]
    titles = {
        "real": "Real federations",
        "simulated": "Simulated predictions",
        "rivals": "Simulated, over the best of rivals",
    }
    for kind, title in titles.items():
        lines += [f"## {title}", "", "| case | repeats | about the mean | about a site or more |", "|---|---|---|---|"]
        for name, one in content.get(kind, {}).items():
            mean, sites = (share(one[what], one["repeats"]) for what in ("mean", "sites"))
            lines.append(f"| {name} | {one['repeats']} | {mean} | {sites} |")
        lines.append("")
    lines += [
        "False answers over the best of rivals, about a site or more:",
        "",
        "| case | join | stay |",
        "|---|---|---|",
    ]
    for name, one in content.get("rivals", {}).items():
        lines.append(f"| {name} | {share(one['join'], one['repeats'])} | {share(one['stay'], one['repeats'])} |")
    lines.append("")
    lines += [
        "## Intervals that leave out the truth, in per cent",
        "",
        "A large effect is one of about 20 points of accuracy.",
        "",
        "| case | repeats | mean gain | mean score | gain of a site or more |",
        "|---|---|---|---|---|",
    ]
    for name, one in content.get("covered", {}).items():
        cells = " | ".join(share(one[what], one["repeats"]) for what in ("gain", "score", "sites"))
        lines.append(f"| {name} | {one['repeats']} | {cells} |")
    lines.append("")
    lines += [
        "## Power: how often a true difference is said, in per cent",
        "",
        "| case | repeats | of the mean | of each site |",
    ]
    lines.append("|---|---|---|---|")
    for name, one in content.get("power", {}).items():
        sites = f"{100 * one['sites'] / one['of_sites']:.0f}"
        lines.append(f"| {name} | {one['repeats']} | {100 * one['mean'] / one['repeats']:.0f} | {sites} |")
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("part", choices=("simulated", "covered", "rivals", "real", "table"))
    arguments.add_argument("--repeats", type=int)
    arguments.add_argument(
        "--scores", default=",".join(SCORES), help="of the simulated part; several processes may share it"
    )
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    if asked.part == "simulated":
        simulated(asked.repeats or 2000, asked.scores.split(","))
    elif asked.part == "covered":
        with_effects(asked.repeats or 500)
    elif asked.part == "rivals":
        rivals(asked.repeats or 1000)
    elif asked.part == "real":
        real(asked.repeats or 200)
    else:
        table()


if __name__ == "__main__":
    main()
