"""Runs readings of the four papers for which polyfed has no option: each is a method, clients, and what is replaced in
polyfed while it runs. `deviations_flha.py` and `deviations_pfedla.py` hold them.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from first_heads import difference

import polyfed as pf
from polyfed.core.algorithm import Algorithm
from polyfed.simulation.monitoring.progress import SilentProgress

SEEDS = range(6)


@dataclass(frozen=True)
class Form:
    """Holds one reading: `clients` gives the clients of a seed, and `replaced` is entered while they train."""

    method: Algorithm
    clients: Callable[[int], list[pf.Client]]
    rounds: int
    replaced: Callable[[], AbstractContextManager] = nullcontext
    score: str = "accuracy"

    def run(self, seed: int) -> float | None:
        """The score after the last round, mean over clients; None if training diverges."""
        clients = self.clients(seed)
        try:
            with self.replaced():
                run = pf.federate(
                    clients, self.method, rounds=self.rounds, seed=seed, evaluate_every=self.rounds, workers=0,
                    progress=SilentProgress(),
                )  # fmt: skip
        except (pf.ClientError, pf.RoundError) as error:
            print(error)
            return None
        return round(run.table()[-1][self.score], 5)


@contextmanager
def replace_in(module, **functions):
    """Sets a module's functions, and sets the old ones back at the end."""
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def build_parser(document, forms, file):
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", help=f"with commas between them, of {', '.join(forms)}; or all, or show")
    parser.add_argument("--out", type=Path, default=file)
    return parser


def train_and_show(arguments, forms: Mapping[str, Mapping[str, Form]], compared_with):
    """Runs what `arguments.out` lacks, seed by seed, so that a stop leaves whole seeds."""
    torch.set_num_threads(1)
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    chosen = {"show": [], "all": list(forms)}.get(arguments.settings, arguments.settings.split(","))
    for setting in chosen:
        for seed in SEEDS:
            for name, form in forms[setting].items():
                runs = results.setdefault(setting, {}).setdefault(name, {})
                if str(seed) not in runs:
                    runs[str(seed)] = form.run(seed)
                    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
                    print(setting, name, seed, runs[str(seed)], flush=True)
    show(results, compared_with)


def show(results, compared_with):
    """Prints each form's mean and its difference from its setting's default, or from the form that it is compared with."""
    for setting, forms in results.items():
        for name, runs in forms.items():
            other = compared_with.get((setting, name), next(iter(forms)))
            seeds = [seed for seed in runs if None not in (runs[seed], forms[other].get(seed))]
            theirs, ours = ([forms[one][seed] for seed in seeds] for one in (other, name))
            gap = difference(theirs, ours) if name != other and len(seeds) > 1 else ""
            mean = f"{100 * statistics.fmean(ours):.1f} %" if ours else "diverged"
            print(f"{setting}, {name}: {mean} ({len(seeds)} of {len(runs)} seeds) {gap}")
