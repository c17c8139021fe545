"""Whether the answers of examples/hospitals.py hold when everything is drawn anew.

    python benchmarks/hospitals.py [--repeats 5]

Each repetition deals the 569 patients to the four hospitals anew (`hospitals(seed=k)`) and compares the methods with other
seeds (5k to 5k + 4), each with the patients of a hospital dealt anew to training, validation and test. Prints a table and
writes benchmarks/results/hospitals.json. It ends with status 1 if a hospital is told "join" in one repetition and "stay" in
another.
"""

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "hospitals.json"


def example():
    spec = importlib.util.spec_from_file_location("hospitals_example", HERE.parent / "examples" / "hospitals.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def repeated(module, number):
    """One repetition, as it goes into the results."""
    start = time.perf_counter()
    content = module.compare_methods(number).results
    methods = {
        label: {
            "lr": one["fields"]["lr"],
            **{name: rounded(one["statistics"][name]) for name in ("mean", "interval", "gain", "gain_interval")},
            "rounds": one["statistics"]["rounds"],
            "converged": content["convergence"][label]["converged"],
        }
        for label, one in content["methods"].items()
    }
    answers = {
        answer["client"] or "mean": {
            **{name: answer[name] for name in ("answer", "method", "test_examples")},
            **{name: rounded(answer[name]) for name in ("gain", "interval")},
        }
        for answer in (content["mean_answer"], *content["answers"])
    }
    return {
        "repetition": number,
        "seeds": content["seeds"],
        "verdicts": content["verdicts"],
        "warnings": content["warnings"],
        "best": content["best"],
        "best_by": content["best_by"],
        "answers": answers,
        "methods": methods,
        "references": {name: rounded(one["mean"]) for name, one in content["references"].items()},
        "seconds": round(time.perf_counter() - start),
    }


def rounded(value):
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return None if value is None else round(value, 4)


def table(runs):
    """A row for each repetition: means of AUC, the gain of the method that the answers are about, its answers."""
    labels, references = list(runs[0]["methods"]), list(runs[0]["references"])
    who = list(runs[0]["answers"])
    lines = ["| " + " | ".join(["", *labels, *references, "gain of the mean", *who]) + " |"]
    lines += ["|" + "---|" * (len(labels) + len(references) + len(who) + 2)]
    for run in runs:
        mean = run["answers"]["mean"]
        low, high = mean["interval"] or ("", "")
        cells = [f"{run['repetition']}", *(f"{run['methods'][label]['mean']:.3f}" for label in labels)]
        cells += ["" if run["references"][name] is None else f"{run['references'][name]:.3f}" for name in references]
        cells += [f"{mean['method']} {low:.3f} to {high:.3f}", *(run["answers"][name]["answer"] for name in who)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", default=str(RESULTS))
    options = parser.parse_args()
    module = example()
    runs = [repeated(module, number) for number in range(options.repeats)]
    contradicted = [
        name for name in runs[0]["answers"] if {"join", "stay"} <= {run["answers"][name]["answer"] for run in runs}
    ]
    Path(options.out).write_text(json.dumps({"contradicted": contradicted, "repetitions": runs}, indent=1) + "\n")
    print(table(runs))
    for run in runs:
        print(f"{run['repetition']} ({run['seconds']} s):", *run["warnings"], *run["verdicts"], sep="\n  ")
    return f"join and stay are both told to {', '.join(contradicted)}" if contradicted else 0


if __name__ == "__main__":
    sys.exit(main())
