"""FLHA-GHN with asynchronous message passing (section 4.3 of its paper: "did not indicate an advantage"), and with edges
through sums and concatenations instead of nodes for them (appendix B), against the defaults.

    python benchmarks/flha_passing.py --out benchmarks/results/flha_passing.json

Clients of the recipe `digits` with the paper's heads, as in `heads.py`, at the rate that was chosen there for synchronous
passing, 0.1, for all forms. What the file has is not repeated. Accuracy after the last round, mean over clients, in percent;
differences from the defaults with Student's interval of 95 % over paired seeds, and processor seconds of a
run.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from first_heads import difference
from heads import BATCHES, ROUNDS, of_recipe

import polyfed as pf
from polyfed.algorithms import FLHAGHN
from polyfed.simulation.monitoring.progress import SilentProgress

FORMS = {"defaults": {}, "asynchronous": {"passing": "asynchronous"}, "no joins": {"joins": False}}
OPTIONS = {"head": "mlp", "lr": 0.1, **BATCHES["digits"]}


def measure(members, form, seed):
    """Accuracy after the last round, and processor seconds."""
    begin = time.process_time()
    run = pf.federate(
        members, FLHAGHN(**OPTIONS, **FORMS[form]), rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS, workers=0,
        progress=SilentProgress(),
    )  # fmt: skip
    return {"accuracy": round(run.table()[-1]["accuracy"], 5), "seconds": round(time.process_time() - begin, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "flha_passing.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {**OPTIONS, "rounds": ROUNDS}
    members, runs = of_recipe("digits"), results.setdefault("runs", {})
    for seed in range(given.seeds):
        for form in given.forms.split(","):
            by_seed = runs.setdefault(form, {})
            if str(seed) not in by_seed:
                by_seed[str(seed)] = measure(members, form, seed)
                given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                print(form, seed, by_seed[str(seed)], flush=True)
    for form, by_seed in runs.items():
        common = [seed for seed in by_seed if seed in runs["defaults"]]
        ours, theirs = ([runs[one][seed]["accuracy"] for seed in common] for one in (form, "defaults"))
        seconds = statistics.median(one["seconds"] for one in by_seed.values())
        gap = difference(theirs, ours) if form != "defaults" and len(common) > 1 else ""
        print(f"{form}: {100 * statistics.fmean(ours):.1f} % ({len(common)} seeds), {seconds:.0f} s {gap}")


if __name__ == "__main__":
    main()
