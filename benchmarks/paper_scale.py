"""One table or figure of each paper at its own numbers of clients and rounds, one seed, as far as hours allow.

    python benchmarks/paper_scale.py list
    python benchmarks/paper_scale.py run fedhenn --hours 10 --data cifar10=FOLDER [--only METHODS] [--until ROUND]
        [--runs runs/paper_scale]
    python benchmarks/paper_scale.py collect [NAMES] [--runs runs/paper_scale]

`run` plays the methods of the table one after another, each in a run directory RUNS/NAME/METHOD, and stops after the first
round that ends past the hours. With --until each method is played up to that round, so that first parts of all can be
compared. The same command goes on where it stopped. A checkpoint is written every few rounds, and when
it stops.
`collect`, and `run` at its end, writes results/paper_scale/NAME.json: what round each method has reached, its scores by
round, the paper's figures for the end, hours, processor. Every run directory below RUNS/NAME counts that has the settings of
the recipe at scale paper, those of `polyfed run` and `polyfed reproduce` too; one with other settings is named and left out.
A method without a run directory there keeps what the file says of it.

Run directories hold checkpoints of up to some hundred megabytes, so they are not in git; the JSON files are.
"""

import argparse
import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from workloads import cpu_name

from polyfed.algorithms import registry_name
from polyfed.cli.commands.options import configuration_parser, recipes
from polyfed.cli.commands.papers.paper_tables import find_table
from polyfed.cli.commands.run import run_command
from polyfed.core.errors import RunInterrupt
from polyfed.core.io.values.plain_values import to_plain_values
from polyfed.simulation.experiment import build_experiment
from polyfed.simulation.monitoring.progress import LineProgress, Progress
from polyfed.simulation.storage.configuration import describe_method_and_settings
from polyfed.simulation.storage.directory import read_config, read_metrics

RESULTS = Path(__file__).parent / "results" / "paper_scale"
SCALE, SEED = "paper", 0
SCORES = {"score": "accuracy", "global_score": "global_accuracy"}  # a cell's metric: what a record calls it
BESIDE = ("trained_accuracy", "server_accuracy")  # of the records, of methods that have them
# What may differ between a run and the recipe, since it does not change what is computed, or only which rounds are scored.
FREE = (
    "baselines", "engine", "workers", "ray_address", "gpus_per_worker", "device", "evaluate_every", "checkpoint_every",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A table or figure, a recipe that makes some of its cells, a variant of that, and the methods in the order in which
    they are run."""

    paper: str
    table: str
    recipe: str
    variant: str
    methods: tuple[str, ...]
    evaluate_every: int
    checkpoint_every: int


PLANS = {
    "pfedla": Plan(
        "pfedla", "table1", "pfedla_table1", "fashion_mnist-10",
        ("pfedla", "heur_pfedla", "local", "fedavg", "fedavg_ft", "fedrep", "pfedhn", "per_fedavg", "fedfomo", "pfedme"),
        25, 25,
    ),
    "fedhenn": Plan("fedhenn", "table2", "fedhenn_table2", "cifar10-100-2-hetero", ("fedhenn", "local"), 5, 1),
    "fedpnas": Plan(
        "fedpnas", "fig3", "fedpnas_fig3", "cifar10", ("ca_fedpnas", "feddsnas", "ca_feddsnas", "fedpnas", "fedavg"), 25, 5
    ),
    # pFedHN's hypernetwork has 2.9 billion numbers at this scale, see the recipe
    "flha": Plan("flha", "table1", "flha_table1", "cifar10-25", ("flha_ghn", "local", "fedavg_kd"), 1, 1),
}  # fmt: skip


class UntilHours(Progress):
    """A line a round; raises KeyboardInterrupt after a round that ends past `end`, and after the round `until`."""

    def __init__(self, end, until=None):
        self._lines, self._end, self._until = LineProgress(), end, until

    def start(self, title, rounds, rounds_done):
        self._lines.start(title, rounds, rounds_done)

    def show_clients_done(self, phase, clients_done, total):
        self._lines.show_clients_done(phase, clients_done, total)

    def finish_round(self, record):
        self._lines.finish_round(record)
        if time.monotonic() > self._end or record["round"] == self._until:
            raise KeyboardInterrupt

    def say(self, sentence):
        self._lines.say(sentence)

    def stop(self):
        self._lines.stop()


def recipe_of(plan):
    return recipes.read_recipe(plan.recipe)


def experiment_of(plan, folder=None, workers="auto"):
    """The recipe's experiment at scale paper, scored and saved as the plan says."""
    words = [
        "--seed", str(SEED), "--workers", str(workers), "--evaluate-every", str(plan.evaluate_every),
        "--checkpoint-every", str(plan.checkpoint_every), *([] if folder is None else ["--data.path", folder]),
    ]  # fmt: skip
    return build_experiment(
        configuration_parser.parse_configuration(
            words, recipe_of(plan).configuration(SCALE, plan.variant), "paper_scale.py"
        )
    )


def run(name, given):
    plan, end = PLANS[name], time.monotonic() + 3600 * given.hours
    folders = dict(part.split("=", 1) for part in given.data)
    config = recipe_of(plan).configuration(SCALE, plan.variant)
    experiment = experiment_of(plan, folders.get(config["data"]["name"]), given.workers)
    people = run_command.load_checked_participants(experiment)
    chosen = given.only.split(",") if given.only else plan.methods
    for method in chosen:
        if method not in plan.methods:
            raise SystemExit(f"{name} has no method {method!r}; there are {', '.join(plan.methods)}")
    for method in chosen:
        folder = Path(given.runs) / name / method
        if not finished(folder) and not reached_round(folder, given.until):
            try:
                run_command.run_or_resume_method(experiment, method, people, folder, UntilHours(end, given.until))
            except RunInterrupt as stop:
                print(f"{name}, {method}: {stop}", flush=True)
                if time.monotonic() > end or not reached_round(folder, given.until):
                    break
    collect(name, given)


def finished(folder):
    """Whether a run directory is there and has all of its rounds."""
    there = (folder / "config.yaml").exists()
    return there and len(read_metrics(folder / "metrics.jsonl")) == read_config(folder)["rounds"]


def reached_round(folder, until):
    """Whether a run directory has round `until` already; False without such a round."""
    there = until is not None and (folder / "config.yaml").exists()
    return there and len(read_metrics(folder / "metrics.jsonl")) >= until


def collect(name, given):
    plan, methods, with_directory = PLANS[name], {}, set()
    experiment, recipe, table = experiment_of(plan), recipe_of(plan), find_table(plan.paper, plan.table)
    known = {registry_name(experiment.algorithm): experiment.algorithm, **experiment.baselines}
    for file in sorted((Path(given.runs) / name).rglob("config.yaml")):
        config = read_config(file.parent)
        method = config["algorithm"]["name"]
        if method not in known:
            continue
        with_directory.add(method)
        expected = {
            **to_plain_values(experiment.config, "config"),
            **describe_method_and_settings(known[method], experiment.settings),
        }
        if differs := difference(expected, config):
            print(f"{file.parent}: left out, its {differs}")
        elif records := read_metrics(file.parent / "metrics.jsonl"):
            methods[method] = reached(
                file.parent, records, cells_of(table, plan, method, registry_name(experiment.algorithm))
            )
    file = RESULTS / f"{name}.json"
    earlier = json.loads(file.read_text(encoding="utf-8"))["methods"] if file.exists() else {}
    methods |= {method: of for method, of in earlier.items() if method not in with_directory}
    content = {
        "paper": plan.paper,
        "table": plan.table,
        "number": table.printed_name,
        "recipe": recipe.name,
        "variant": plan.variant,
        "scale": SCALE,
        "reduced": recipe.reduction_note(SCALE),
        "seed": SEED,
        "rounds": experiment.settings.rounds,
        "methods": {method: methods[method] for method in plan.methods if method in methods},
    }
    if methods or file.exists():
        RESULTS.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for method, of in content["methods"].items():
        print(f"{name}, {method}: round {of['round']} of {content['rounds']}, {of['hours']:.2f} h", flush=True)


def difference(expected, config):
    """The first settings of a run that are not the recipe's, as a sentence; empty if there are none. A field that the run's
    file does not have, because it is younger, is no difference."""
    for key in sorted(set(expected) - set(FREE)):
        was, now = config.get(key), expected[key]
        if isinstance(was, dict) and isinstance(now, dict):
            differ = [name for name in was if name in now and was[name] != now[name] and name not in ("path", "cache")]
            if differ:
                was, now = ({name: of[name] for name in differ} for of in (was, now))
                return f"{key} has {was}, and the recipe's {now}"
        elif was != now:
            return f"{key} is {was!r}, and the recipe's {now!r}"
    return ""


def cells_of(table, plan, method, main):
    """The table's cells of a method that the records can fill."""
    cells = [cell for cell in table.cells if (cell.recipe, cell.variant) == (plan.recipe, plan.variant)]
    return [cell for cell in cells if (cell.method or main) == method and cell.metric in SCORES]


def reached(folder, records, cells):
    """How far a run has come, and its scores on the way."""
    scored = [record for record in records if any(SCORES["score"] in row for row in record["clients"].values())]
    host = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    here = host["host"]["system"] == platform.platform()
    names = (*SCORES.values(), *BESIDE)
    by_round = {
        name: {
            str(record["round"]): round(fmean(row[name] for row in record["clients"].values()), 5)
            for record in scored
            if all(name in row for row in record["clients"].values())
        }
        for name in names
    }
    last = sorted(scored[-1]["clients"].items()) if scored else []
    return {
        "round": records[-1]["round"],
        "hours": round(sum(record["seconds"] for record in records) / 3600, 3),
        "processor": cpu_name() if here else host["host"]["processor"],
        "torch": host["versions"]["torch"],
        "cells": [
            {
                "row": cell.row, "column": cell.column, "metric": cell.metric, "unit": cell.unit, "paper": cell.paper,
                "printed": cell.printed, "at_round": scored[-1]["round"] if scored else None,
                "polyfed": share(last, cell),
            }
            for cell in cells
        ],
        "by_round": {name: of for name, of in by_round.items() if of},
    }  # fmt: skip


def share(last, cell):
    """A cell's value after the last round that was scored, in its unit."""
    part = slice(*(int(number) if number else None for number in cell.part.get("clients", ":").split(":")))
    values = [row[SCORES[cell.metric]] for _, row in last[part]]
    return (100 if cell.unit == "%" else 1) * fmean(values) if values else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["list", "run", "collect"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--hours", type=float, default=10.0, help="of this call; the round under way is finished")
    parser.add_argument("--until", type=int, metavar="ROUND", help="stop each method after it, and go on with the next")
    parser.add_argument("--runs", default="runs/paper_scale")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--only", metavar="METHODS", help="of the table, with commas between")
    parser.add_argument("--workers", default="auto", type=lambda word: int(word) if word.isdecimal() else word)
    given = parser.parse_args()
    for name in given.names:
        if name not in PLANS:
            raise SystemExit(f"no {name!r}; there are {', '.join(PLANS)}")
    if given.what == "list":
        for name, plan in PLANS.items():
            print(
                f"{name}: {find_table(plan.paper, plan.table).printed_name}, {plan.variant}: {', '.join(plan.methods)}"
            )
    for name in given.names or (PLANS if given.what == "collect" else ()):
        (run if given.what == "run" else collect)(name, given)


if __name__ == "__main__":
    main()
