"""FedPNAS and its relatives on rotated tasks: accuracy against rounds and time, high heterogeneity, unseen rotations, cost.

    R=benchmarks/results; F=/usr/share/datasets/fashion-mnist; C=../shared/data/cifar10
    python benchmarks/search.py fig3 --variant fashion-mnist --path $F --out $R/search_fashion.json
    python benchmarks/search.py fig3 --variant cifar10 --path $C --transfer --out $R/search_cifar10.json
    python benchmarks/search.py table1 --variant high --path $C --out $R/search_high.json
    python benchmarks/search.py step --out $R/search_step.json
    python benchmarks/search.py calls --out $R/search_calls.json
    python benchmarks/search.py whole --path $F --seeds 0 --rounds 20 --out $R/search_whole.json
    python benchmarks/search.py draw --out $R/search.png          # accuracy against rounds and against time, of the above

The first three run the recipes `fedpnas_fig3` and `fedpnas_table1` at scale `cpu`, with `--rounds` and `--seeds`;
further options are those of `polyfed run`. An `--out` that is there keeps what it has: only seeds and methods that are
missing run. `--only NAME` runs one method alone. `--per-batch` runs the context-aware methods with one architecture for a
minibatch instead of one for each image. `--transfer` retrains the clients' networks of FedDSNAS and CA-FedPNAS on images
rotated by -90 and 90 degrees (Table 2). search_eta0.json is of the first, with `--per-batch --only ca_fedpnas
--algorithm.eta 0`.

`step` times one training step of each method (16 channels, 48 images of 28×28, the paper's search space) in one process
with one thread, in turns, counts which operations are computed, and profiles it. In its first step all operations are
equally probable; `whole` times whole federations of `fedpnas_fig3`, in which samplers learn: seconds of the clients' local
updates, one after the other in one thread. `calls` times each operation of each edge by itself, forward and back, nothing
around it: with all 48 images, as one that is chosen for the batch has them, and with its share of them, as each has them
where images choose and choices are equally probable. All three want an idle machine.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

import polyfed as pf
from polyfed.algorithms import CAFedDSNAS, CAFedPNAS, FedPNAS, registry_name
from polyfed.algorithms.nas.supernet_method import SupernetMethod
from polyfed.cli.commands.options import configuration_parser, recipes
from polyfed.core.seeds import temporary_rng_seed
from polyfed.data import Shift
from polyfed.nas import Network, operation_probabilities
from polyfed.simulation import experiment as experiments
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.results.architecture_transfer import transfer_network

TASKS = {
    "fig3": ["rotate -30", "rotate -15", "vanilla", "rotate 15", "rotate 30"],
    "high": ["hue -0.5", "hue 0.5", "vanilla", "rotate -90", "rotate 90"],
}


def measure(method, experiment, participants):
    """One run: the curve of its mean accuracy, the last accuracies of each client, and seconds."""
    settings = experiment.settings
    start = time.perf_counter()
    run = pf.federate(
        participants.clients, method, rounds=settings.rounds, seed=settings.seed, workers=2,
        evaluate_every=settings.evaluate_every, progress=SilentProgress(),
    )  # fmt: skip
    curve, trained = [], 0.0
    for record in run.history:
        trained += record["seconds_clients"] + record["seconds_server"]
        if record["summary"]:
            row = {"round": record["round"], "seconds": round(trained, 1)}
            curve.append(row | {n: round(v["mean"], 4) for n, v in record["summary"].items() if n.endswith("accuracy")})
    last = run.history[-1]
    result = {
        "curve": curve,
        "clients": {i: row["accuracy"] for i, row in last["clients"].items()},
        "seconds": round(time.perf_counter() - start, 1),
        "seconds_training": round(trained, 1),
        "MB": round((last["bytes_down_total"] + last["bytes_up_total"]) / 2**20, 1),
    }
    if isinstance(method, SupernetMethod):
        result["most probable"] = chosen(run)
    return result, run


def chosen(run):
    """How often each operation is the most probable one of an edge, over clients, and the mean of its probability."""
    best, sums = Counter(), []
    for i, client in run.federation.clients.items():
        model = run.model(i)
        network = model.network if not isinstance(model, Network) else model
        told = network.known or operation_probabilities(network, client.train)
        plan = network.supernet or network.plan
        for cell, shares in zip(plan.base + plan.personal, told, strict=True):
            best.update(cell.candidates[0][k] for k in shares.argmax(1).tolist())
            sums += shares.max(1).values.tolist()
    return {"operations": dict(best.most_common()), "mean of the largest probability": round(statistics.mean(sums), 3)}


def unseen(run, experiment, degrees):
    """Table 2: each client's network on 200 training and all test images of its own rotated by `degrees`, before and after
    100 steps, of all weights and of the personal stack's."""
    rotated = experiments.load_participants(replace(experiment, shifts=(Shift(rotation=degrees),)))
    found = {"before": [], "all": [], "personal": []}
    for client in rotated.clients:
        few = pf.Client(client.id, None, client.train.select(torch.arange(min(200, len(client.train)))), client.test)
        for parts in ("all", "personal"):
            done = transfer_network(run, client.id, few, parts=parts, lr=0.002)
            found[parts].append(done.scores_after_retraining["accuracy"])
        found["before"].append(done.scores_before_retraining["accuracy"])
    return found


def federations(arguments, rest):
    recipe = {"fig3": "fedpnas_fig3", "table1": "fedpnas_table1"}[arguments.what]
    out = Path(arguments.out)
    results = json.loads(out.read_text()) if out.exists() else {"runs": {}}
    words = ["--data.path", arguments.path, "--rounds", str(arguments.rounds), "--evaluate_every", "5", *rest]
    label = ", per batch" if arguments.per_batch else ""
    for seed in map(int, arguments.seeds.split(",")):
        config = recipes.read_recipe(recipe).configuration("cpu", arguments.variant)
        experiment = experiments.build_experiment(
            configuration_parser.parse_configuration([*words, "--seed", str(seed)], config, "benchmark")
        )
        participants = None
        methods = [*experiment.baselines.values(), experiment.algorithm]
        if arguments.per_batch:
            methods = [replace(m, per="batch") for m in methods if isinstance(m, CAFedPNAS | CAFedDSNAS)]
        methods = [m for m in methods if arguments.only in (None, registry_name(m))]
        results |= {"recipe": recipe, "variant": arguments.variant, "rounds": arguments.rounds, "options": rest}
        for method in sorted(methods, key=lambda m: list(pf.algorithms.REGISTRY).index(registry_name(m))):
            name = registry_name(method) + label
            if str(seed) in results["runs"].get(name, {}):
                continue
            participants = participants or experiments.load_participants(experiment)
            result, run = measure(method, experiment, participants)
            if arguments.transfer and name in ("feddsnas", "ca_fedpnas"):
                result["transfer"] = {str(d): unseen(run, experiment, d) for d in (-90.0, 90.0)}
            results["runs"].setdefault(name, {})[str(seed)] = result
            out.write_text(json.dumps(results, indent=1) + "\n")
            print(name, seed, result["curve"][-1], result["seconds"], "s", result.get("transfer", ""), flush=True)
    show(results, arguments)


def mean(values):
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.1f}{spread}"


def show(results, arguments):
    rounds = [row["round"] for row in next(iter(next(iter(results["runs"].values())).values()))["curve"]]
    print(
        "| method | " + " | ".join(f"round {r}" for r in rounds) + " | not adapted | s a round | time / FedDSNAS | MB |"
    )
    print("|" + "---|" * (len(rounds) + 5))
    pace = {
        n: statistics.mean(r["seconds_training"] for r in runs.values()) / rounds[-1]
        for n, runs in results["runs"].items()
    }
    for name, runs in results["runs"].items():
        curves = [r["curve"] for r in runs.values()]
        cells = [mean([c[k]["accuracy"] for c in curves]) for k in range(len(rounds))]
        plain = [c[-1]["server_accuracy"] for c in curves if "server_accuracy" in c[-1]]
        cells += [mean(plain) if plain else "–", f"{pace[name]:.1f}"]
        cells += [
            f"{pace[name] / pace['feddsnas']:.2f}" if "feddsnas" in pace else "–",
            f"{next(iter(runs.values()))['MB']:.0f}",
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")
    tasks = TASKS["high" if results["variant"] == "high" else "fig3"]
    print("\n| task | " + " | ".join(results["runs"]) + " |\n|" + "---|" * (len(results["runs"]) + 1))
    for k, task in enumerate(tasks):
        columns = [[list(r["clients"].values())[k] for r in runs.values()] for runs in results["runs"].values()]
        print(f"| {task} | " + " | ".join(map(mean, columns)) + " |")
    told = {n: [r["transfer"] for r in runs.values() if "transfer" in r] for n, runs in results["runs"].items()}
    if any(told.values()):
        print("\n| unseen task | method | as it is | all weights | personal stack |\n|---|---|---|---|---|")
        for degrees in ("-90.0", "90.0"):
            for name, found in told.items():
                if found:
                    cells = [
                        mean([statistics.mean(f[degrees][p]) for f in found]) for p in ("before", "all", "personal")
                    ]
                    print(f"| rotate {degrees[:-2]} | {name} | " + " | ".join(cells) + " |")


def step(arguments):
    """Time of one step, against the bare network with the most probable operations, and which operations were called.
    Methods take turns, so that whatever else the machine does slows all alike; the time is that of the processor."""
    torch.set_num_threads(1)
    runs, results = {}, {}
    with temporary_rng_seed(0):
        x, y = torch.randn(48, 1, 28, 28).contiguous(memory_format=torch.channels_last), torch.randint(10, (48,))
        for name, method in {
            "feddsnas": FedPNAS(), "ca_feddsnas": CAFedPNAS(), "ca_feddsnas, per=batch": CAFedPNAS(per="batch"),
            "fedpnas": FedPNAS(), "ca_fedpnas": CAFedPNAS(), "ca_fedpnas, per=batch": CAFedPNAS(per="batch"),
        }.items():  # fmt: skip
            network = method.plan(1, 10)().to(memory_format=torch.channels_last).train()
            calls = Counter()
            for cell, _ in network.cells():
                for number, edge in enumerate(cell.operations):
                    for op, module in edge.items():
                        module.register_forward_hook(
                            lambda *_, key=(cell, number, op), calls=calls: calls.update([key])
                        )
            optimizer = torch.optim.SGD(network.parameters(), lr=0.0)

            def loss_of(_, network=network, optimizer=optimizer):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(network(x), y)
                loss.backward()
                return loss.detach()

            run = method.build_meta_gradient_function(network) if "pnas" in name else lambda loss_of: loss_of(0)
            runs[name] = run, loss_of, network, optimizer, calls
        seconds = {name: [] for name in runs}
        for k in range(-3, arguments.steps):
            for name, (run, loss_of, _, optimizer, calls) in runs.items():
                start = time.process_time()
                run(loss_of)
                optimizer.step()
                if k < 0:
                    calls.clear()
                else:
                    seconds[name].append(time.process_time() - start)
        for name, (run, loss_of, network, _, calls) in runs.items():
            passes = arguments.steps * (2 if "pnas" in name else 1)
            edges = sum(len(cell.operations) for cell, _ in network.cells())
            mean = statistics.mean(seconds[name])  # of random operations, some of which cost ten times what others do
            results[name] = {
                "seconds": round(mean, 4),
                "images a second": round(48 / mean),
                "speed against feddsnas": round(statistics.mean(seconds["feddsnas"]) / mean, 2),
                "operations computed per edge and pass": round(sum(calls.values()) / passes / edges, 2),
                "of": round(
                    sum(len(n) for c in (*network.plan.base, *network.plan.personal) for n in c.candidates) / edges, 2
                ),
            }
            results[name]["profile"] = profiled(run, loss_of, network)
            print(name, results[name], flush=True)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(results, indent=1) + "\n")


def calls(arguments, images=48):
    """What operations alone allow: seconds of one operation an edge for all images, mean over its operations, and of all
    operations an edge for a share of them each."""
    torch.set_num_threads(1)

    def seconds(operation, x):
        """Forward and back: the least of five."""
        x, found = x.clone().requires_grad_(), []
        for _ in range(5):
            start = time.perf_counter()
            out = operation(x)
            if out is not x:
                out.backward(out.detach())
            found.append(time.perf_counter() - start)
        return min(found)

    with temporary_rng_seed(0):
        network = FedPNAS().supernet_plan(1, 10)().to(memory_format=torch.channels_last).train()
        seen, edges, hooks = {}, [edge for cell, _ in network.cells() for edge in cell.operations], []
        for number, edge in enumerate(edges):
            for operation in edge.values():
                keep = partial(lambda n, _, inputs: seen.update({n: inputs[0].detach()}), number)
                hooks.append(operation.register_forward_pre_hook(keep))
        network(torch.randn(images, 1, 28, 28).contiguous(memory_format=torch.channels_last))
        for hook in hooks:
            hook.remove()
        together = apart = 0.0
        for number, edge in enumerate(edges):
            x, k = seen[number], len(edge)
            together += statistics.mean(seconds(operation, x) for operation in edge.values())
            shares = [images * (i + 1) // k - images * i // k for i in range(k)]
            apart += sum(seconds(operation, x[:n]) for operation, n in zip(edge.values(), shares, strict=True))
    found = {
        "one an edge": together,
        "all, a share each": apart,
        "speed against one an edge": round(together / apart, 2),
    }
    print(found)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n")


def whole(arguments):
    """Seconds of all local updates of a federation, and how many times those of FedDSNAS, whole and in pieces."""
    results = {"rounds": arguments.rounds, "seeds": {}}
    for seed in map(int, arguments.seeds.split(",")):
        words = ["--data.path", arguments.path, "--rounds", str(arguments.rounds), "--seed", str(seed)]
        config = recipes.read_recipe("fedpnas_fig3").configuration("cpu", "fashion-mnist")
        experiment = experiments.build_experiment(configuration_parser.parse_configuration(words, config, "benchmark"))
        clients, seconds = experiments.load_participants(experiment).clients, {}
        methods = {registry_name(m): m for m in (*experiment.baselines.values(), experiment.algorithm)}
        for name in ("feddsnas", "ca_feddsnas", "fedpnas", "ca_fedpnas"):
            run = pf.federate(
                clients, methods[name], rounds=arguments.rounds, seed=seed, workers=0, evaluate_every=10**6,
                progress=SilentProgress(),
            )  # fmt: skip
            seconds[name] = [record["seconds_clients"] for record in run.history]
            pieces = {"all rounds": slice(None), "the first": slice(1), "the last five": slice(-5, None)}
            times = {of: sum(seconds[name][part]) / sum(seconds["feddsnas"][part]) for of, part in pieces.items()}
            images = sum(len(client.train) for client in clients) * methods[name].local_epochs * arguments.rounds
            found = {
                "seconds": sum(seconds[name]),
                "images a second": images / sum(seconds[name]),
                "by round": seconds[name],
            }
            results["seeds"].setdefault(str(seed), {})[name] = found | {"times feddsnas": times}
            print(
                seed,
                name,
                f"{found['seconds']:.1f} s",
                {of: round(value, 2) for of, value in times.items()},
                flush=True,
            )
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(results, indent=1) + "\n")


KINDS = {"convolution": "conv", "batch norm": "batch_norm", "pooling": "pool"}


def profiled(run, loss_of, network, steps=3):
    """Where the processor time of a step goes, in per cent: by kind of operator (self time, torch's profiler), and in the
    forward passes of the samplers, which are among the kinds too."""
    with ExitStack() as stack:
        for _, sampler in network.cells():
            good = sampler.forward

            def forward(*arguments, good=good, **named):
                with torch.profiler.record_function("samplers"):
                    return good(*arguments, **named)

            stack.enter_context(patch.object(sampler, "forward", forward))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(steps):
                run(loss_of)
    events = profile.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    found = Counter()
    for event in events:
        kind = next((kind for kind, part in KINDS.items() if part in event.key), "other")
        found[kind] += event.self_cpu_time_total
        if event.key == "samplers":
            found["samplers, forward"] += event.cpu_time_total
    return {kind: round(100 * time / total, 1) for kind, time in found.most_common()}


def draw(arguments):
    """Mean accuracy against rounds and against seconds of training; bands from the worst to the best seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder = Path(arguments.out).parent
    named = {"Fashion-MNIST": "search_fashion.json", "CIFAR-10": "search_cifar10.json"}
    colours: dict[str, str] = {}  # of a method, the same in all rows
    figure, rows = pyplot.subplots(len(named), 2, figsize=(9, 6.4), sharey="row", layout="constrained")
    for axes, (title, file) in zip(rows, named.items(), strict=True):
        for name, runs in json.loads((folder / file).read_text())["runs"].items():
            colour = colours.setdefault(name, f"C{len(colours)}")
            curves = [run["curve"] for run in runs.values()]
            scores = [[100 * row["accuracy"] for row in rows] for rows in zip(*curves, strict=True)]
            middle = [statistics.mean(each) for each in scores]
            for ax, key in zip(axes, ("round", "seconds"), strict=True):
                at = [statistics.mean(row[key] for row in rows) for rows in zip(*curves, strict=True)]
                ax.plot(at, middle, marker="o", markersize=3, label=name, color=colour)
                ax.fill_between(at, list(map(min, scores)), list(map(max, scores)), alpha=0.15, color=colour, lw=0)
        axes[0].set(ylabel=f"{title}: accuracy, %", xlabel="round")
        axes[1].set(xlabel="seconds of training, two workers", xscale="log")
    rows[0][0].legend(fontsize=8)
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fig3", "table1", "step", "calls", "whole", "draw"])
    parser.add_argument("--variant", default=None)
    parser.add_argument("--path")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", metavar="NAME", help="one method alone")
    parser.add_argument("--per-batch", action="store_true", help="the context-aware methods with per=batch")
    parser.add_argument("--transfer", action="store_true", help="Table 2 too")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default=None)
    known, others = parser.parse_known_args()
    alone = {"step": step, "calls": calls, "whole": whole, "draw": draw}
    if known.what in alone:
        alone[known.what](known)
    else:
        federations(known, others)
