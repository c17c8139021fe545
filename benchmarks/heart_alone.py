"""Is training alone a fair rival on the heart data of four hospitals (UCI, raw files with missing values)? Its AUC, and that
of logistic regression alone, by the command line.

    python benchmarks/heart_alone.py FOLDER --work DIR      FOLDER has processed.{cleveland,hungarian,switzerland,va}.data

Ten dealings of each hospital's patients, 30 rounds, a network of 16 hidden units on 13 raw columns; once with 15 % of each
hospital's patients for validation, once without, where the search holds out a fifth of the training patients and networks
are trained on all of them afterwards. Runs that are in DIR already are not repeated. The result is in
results/heart_alone.json.
"""

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "heart_alone.json"
COLUMNS = (
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal", "num",
)  # fmt: skip
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
CASES = {
    "with validation patients": (
        ["--data.val-fraction", "0.15"],
        "fedavg,fedopt,fedavg_ft,knn_per,fedpac,pfedla",
        "heart",
    ),
    "without": ([], "fedavg,fedavg_ft,fedpac", "heart2"),
}


def write_table(folder, path):
    """One table of all patients; whoever has any vessel narrowed is ill."""
    with path.open("w") as file:
        rows = csv.writer(file)
        rows.writerow([*COLUMNS, "hospital"])
        for hospital in HOSPITALS:
            for line in (folder / f"processed.{hospital}.data").read_text().split():
                *features, number = line.split(",")
                rows.writerow([*features, "yes" if float(number) > 0 else "no", hospital])


def compared(work, options, methods, name):
    words = [
        "compare", "--data", "table", "--data.path", "heart_bin.csv", "--data.target", "num", "--data.positive", "yes",
        "--data.site", "hospital", "--data.missing", "?", *options, "--model", "mlp", "--model.hidden", "[16]",
        "--algorithms", methods, "--rounds", "30", "--evaluate-every", "2", "--metrics", "auc,accuracy", "--resplit", "10",
        "--out", f"runs/{name}",
    ]  # fmt: skip
    print(" ".join(["polyfed", *words]), flush=True)
    subprocess.run(
        [str(Path(sys.executable).parent / "polyfed"), *words], cwd=work, check=True, stdout=subprocess.DEVNULL
    )
    content = json.loads((work / "runs" / name / "comparison.json").read_text())
    methods = {
        label: {"mean": one["statistics"]["mean"], "gain over local": one["statistics"]["gain"],
                "interval": one["statistics"]["gain_interval"],
                "hospitals": {c: v["mean"] for c, v in one["statistics"]["clients"].items()}}
        for label, one in content["methods"].items()
    }  # fmt: skip
    simple = {
        label: {"mean": one["mean"], "gain over local": one.get("gain"), "interval": one.get("gain_interval"),
                "hospitals": one["scores"]}
        for label, one in content["references"].items()
    }  # fmt: skip
    chosen = content["methods"]["local"]["fields"]["by_client"]
    return {"methods": methods, "beside": simple, "rates of local": chosen, "answers": content["verdicts"]}


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--work", type=Path, required=True)
    asked = arguments.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    write_table(asked.folder, asked.work / "heart_bin.csv")
    content = {case: compared(asked.work, *how) for case, how in CASES.items()}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    for case, one in content.items():
        local, lines = one["methods"]["local"]["mean"], one["beside"]["logistic_regression"]["mean"]
        print(f"{case}: local {local:.3f}, logistic regression alone {lines:.3f}")


if __name__ == "__main__":
    main()
