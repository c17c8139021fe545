"""How long the papers' tables take at scale cpu, all seeds, by `polyfed reproduce`.

    python benchmarks/papers_minutes.py pfedla/table1 ... [--data NAME=FOLDER] [--runs runs/minutes]

`all` is every table. A table is one call of the command for each data set that it needs, since --data.path names one folder:
as a user would make it, from its start to its end, on all cores and with no run there before, or those of the table whose
runs it shares. Results are in results/papers/minutes.json, all of one machine; what is there is not timed again. Before each
call the script waits until nothing else computes, and stops where that does not come. A method that diverges ends early, and
the call is marked "failed".
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from papers import RESULTS, TABLES, folder_of
from papers_page import TIMED
from workloads import cpu_name

from polyfed.cli.commands.papers.reproduce_command import RESULT_FILE
from polyfed.core.machine.threads import num_usable_cores

SEEDS = "0,1,2"
IDLE, PATIENCE = 0.15, 60  # of a core that others may use; seconds to wait for that


def calls_of(key):
    """The calls that measure a table: the data set whose folder each is given ("" needs none), and its variants (None is
    all)."""
    return TABLES[key].variants or {"": None}


def busy_cores(seconds=3.0):
    """Cores in use, of all processes (Linux)."""

    def used():
        times = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
        return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")  # less idle and waiting

    before = used()
    time.sleep(seconds)
    return (used() - before) / seconds


def wait_until_idle():
    until = time.monotonic() + PATIENCE
    while (found := busy_cores()) > IDLE:
        if time.monotonic() > until:
            raise SystemExit(f"something else uses {found:.2f} cores; time nothing beside it")


def children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(key, data, variants, given):
    """One call's seconds."""
    paper, name = key.split("/")
    plan = TABLES[key]
    out = Path(given.runs) / (plan.runs or key).replace("/", "-") / (data or "all")
    if not plan.runs:
        shutil.rmtree(out, ignore_errors=True)  # of an earlier call that was stopped
    elif not (out / RESULT_FILE).exists():
        raise SystemExit(f"{key} shares the runs of {plan.runs}: time that first")
    words = [sys.executable, "-m", "polyfed", "reproduce", paper, name, "--seeds", SEEDS, "--out", str(out), "--quiet"]
    words += plan.options
    words += ["--variant", variants] if variants else []
    words += ["--data.path", folder_of(data, given)] if data not in ("", "digits") else []
    wait_until_idle()
    began, used = time.monotonic(), children()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    took = {"seconds": round(time.monotonic() - began, 1), "processor": round(children() - used, 1), "seeds": SEEDS}
    if not (out / RESULT_FILE).exists():
        raise SystemExit(f"{key}, {data}: {done.stderr}")
    if done.returncode:
        took["failed"] = done.stderr.strip().rpartition("\n")[2]
    return took


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--runs", default="runs/minutes")
    parser.add_argument("--out", type=Path, default=RESULTS / TIMED)
    given = parser.parse_args()
    found = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {"tables": {}}
    machine = {"cpu": cpu_name(), "instructions": torch.backends.cpu.get_cpu_capability(), "cores": num_usable_cores()}
    if found["tables"] and any(found.get(key) != value for key, value in machine.items()):
        raise SystemExit(f"{given.out} is of another machine than this one ({machine}); give another file with --out")
    found |= machine
    for key in TABLES if given.tables == ["all"] else given.tables:
        if key not in TABLES:
            raise SystemExit(f"no {key!r}; there are {', '.join(TABLES)}")
        known = found["tables"].setdefault(key, {})
        for data, variants in calls_of(key).items():
            if data in known:
                continue
            known[data] = timed(key, data, variants, given)
            given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(key, data, known[data], flush=True)


if __name__ == "__main__":
    main()
