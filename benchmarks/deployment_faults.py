"""What a deployment does when something breaks in mid-training: a SuperLink and two or three SuperNodes with TLS and keys on
this machine, and one fault after another.

    python benchmarks/deployment_faults.py [CASE ...] [--kills 10] --out benchmarks/results/deployment_faults.json

Cases (all without a word):
    kills      SIGKILL of the server's app, the SuperLink, a SuperNode and a site's process, ten of each, each while a
               network is being trained; the run ends (on-error = raise) and is resumed each time
    stopped    SIGSTOP of a site's process and of a SuperNode for 30 seconds, within round-seconds and beyond it
    slow       a site that is slower than round-seconds in one round
    one-id     two SuperNodes with keys of their own whose sites give one name
    read-only  the state-dir of a site, and the server's run directory, become read-only in mid-run (needs root)
    memory     a site's process that may take no more memory in mid-training
    book       noise and max-epsilon: a server killed and resumed, a book that is tampered with, rolled back and lost

What came is compared with a simulation of the same rounds, bit for bit, where all rounds were trained by all sites.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch

import polyfed as pf
from polyfed.deploy.trial import local_trial as trials
from polyfed.deploy.trial.project import create_project
from polyfed.simulation.storage.directory import read_manifest, read_metrics
from polyfed.testing import small_clients, without_durations

SITE = """
import os, time
from pathlib import Path

from polyfed.testing import SmallNet, small_clients

FOLDER, NAME = Path(%r), os.environ["POLYFED_SITE"]


plain = SmallNet.forward


def watched(self, x):
    # Says when the network is trained, and takes as long and as much memory as files say.
    if self.training:
        (FOLDER / ("training-" + NAME)).touch()
        for file in FOLDER.glob("slow-" + NAME):
            time.sleep(float(file.read_text()))
        for file in FOLDER.glob("memory-" + NAME):
            held = bytearray(int(float(file.read_text()) * 2**20))
    return plain(self, x)


SmallNet.forward = watched


def client():
    return {c.id: c for c in small_clients(3)}[NAME]
"""
SIGHT = 'disclose="num_examples,train_loss,accuracy,loss,val_accuracy,val_loss" allow-disclosure=true'
WAIT = 100.0  # seconds for anything that must come


class Deployment:
    """A trial with what the cases do to it."""

    def __init__(self, project, trial):
        self.project, self.trial = project, trial
        self.path = project.path

    def command(self, *words):
        return subprocess.run(
            [str(Path(sys.executable).parent / "polyfed"), "flower", *words], capture_output=True, text=True, timeout=900,
            check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def run(self, out, rounds, *more, **words):
        """Starts a run, or goes on with it."""
        if (out / "config.yaml").exists():
            return self.command("run", str(self.path), "--allow-disclosure", "--resume", str(out))
        given = {"algorithm.name": "fedavg", "algorithm.lr": 0.05, "algorithm.local_epochs": 1, "algorithm.batch_size": 4,
                 "file": str(self.path / "server" / "server.py"), "seed": 3, "rounds": rounds, **words}  # fmt: skip
        changes = [f"--set={name}={json.dumps(value)}" for name, value in given.items()]
        return self.command("run", str(self.path), "--allow-disclosure", "--out", str(out), *more, *changes)

    def slow(self, site, seconds):
        file = self.path / f"slow-{site}"
        file.write_text(str(seconds)) if seconds else file.unlink(missing_ok=True)

    def in_training(self, site):
        """Waits until the site's network is being trained."""
        mark = self.path / f"training-{site}"
        mark.unlink(missing_ok=True)
        wait_for(mark.exists, f"{site} does not train")

    def online(self):
        return len(re.findall(r" online ", self.command("status", str(self.path)).stdout))

    def node(self, site):
        return next(p for p in self.trial.processes if p.name == site)

    def site_folder(self, out, site):
        return self.path / "trial" / "sites" / site / read_manifest(out)["deployment"]


def records_of(out):
    """What the run has written of its rounds by now."""
    file = out / "metrics.jsonl"
    return read_metrics(file) if file.exists() else []


def wait_for(holds, what, seconds=WAIT):
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(what)
        time.sleep(0.05)


def processes(*words, parent=None):
    """Numbers of the processes whose command has all the words."""
    numbers = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            over = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if all(word in command for word in words) and parent in (None, over):
            numbers.append(int(folder.name))
    return numbers


@contextmanager
def deployed(number=2, node_config=SIGHT, watch=True):
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        project = create_project(Path(folder) / "federation", [f"client-{k}" for k in range(number)])
        project.site_file.write_text(SITE % str(project.path))
        (project.path / "server" / "server.py").write_text("from polyfed.testing import SmallNet as model\n")
        port = next(n for n in range(19000, 60000, 50) if not any(trials._is_port_open(m) for m in range(n, n + 8)))
        stop = threading.Event()
        with trials.start_trial(project, project.read_site_names(), port, node_config) as trial:
            here = Deployment(project, trial)

            def keep():
                while not stop.wait(1.0):
                    try:
                        trial.restart_ended_supernodes()
                    except Exception as error:
                        print("watch:", error, flush=True)

            thread = threading.Thread(target=keep, daemon=True)
            if watch:
                thread.start()
            try:
                yield here
            finally:
                stop.set()
                if watch:
                    thread.join()


def method():
    return pf.algorithms.FedAvg(lr=0.05, local_epochs=1, batch_size=4)


def simulated(number, rounds):
    return pf.federate(small_clients(3)[:number], method(), rounds=rounds, seed=3, workers=0, progress=False)


def differences(here, out, number, rounds):
    """What of a run differs from the simulation of all its rounds; empty if it is the same to the bit."""
    whole, records = simulated(number, rounds), read_metrics(out / "metrics.jsonl")
    wrong = [] if without_durations(records) == without_durations(whole.history) else ["records"]
    for client in whole.federation.clients:
        files = list((here.site_folder(out, client) / "models").glob("*.safetensors"))
        if not files:
            wrong.append(f"no model of {client}")
            continue
        ours, theirs = safetensors.torch.load_file(files[0]), whole.model(client).state_dict()
        wrong += [f"model of {client}"] if any(not torch.equal(ours[n], theirs[n]) for n in theirs) else []
    return wrong


# -- kills ------------------------------------------------------------------------------------------------------------


def kill_app(here):
    (number, *_) = processes("flwr-serverapp")
    os.kill(number, signal.SIGKILL)


def kill_link(here):
    link = here.trial.processes[0]
    os.killpg(link.running.pid, signal.SIGKILL)
    link.running.wait()
    link.running = trials._open_process(link.command, link.log, link.environment)


def kill_node(here):
    os.killpg(here.node("client-1").running.pid, signal.SIGKILL)


def kill_process(here):
    (number,) = processes("polyfed.deploy.worker", parent=here.node("client-1").running.pid)
    os.kill(number, signal.SIGKILL)


def kills(number):
    """`number` kills of each kind in one run each, which ends and is resumed each time."""
    kinds = {"server": kill_app, "superlink": kill_link, "supernode": kill_node, "site process": kill_process}
    for kind, kill in kinds.items():
        with deployed() as here:
            out, rounds, done, statuses = here.path / "runs" / "killed", 2 * number + 2, 0, []
            here.slow("client-1", 0.3)
            while done < number:
                began = len(records_of(out))
                wait_for(lambda here=here: here.online() == 2, "the SuperNodes are not online")

                def fault(began=began, here=here, out=out, kill=kill):
                    wait_for(lambda: len(records_of(out)) > began, "no round is played")
                    here.in_training("client-1")
                    kill(here)

                thread = threading.Thread(target=fault)
                thread.start()
                result = here.run(out, rounds, **{"on-error": "raise", "round-seconds": 120.0})
                thread.join()
                statuses.append(result.returncode)
                done += 1
                print(kind, done, "status", result.returncode, last_line(result), flush=True)
            here.slow("client-1", 0)
            wait_for(lambda here=here: here.online() == 2, "the SuperNodes are not online")
            result, tries = here.run(out, rounds), 1
            while result.returncode and tries < 3:
                time.sleep(15)
                wait_for(lambda here=here: here.online() == 2, "the SuperNodes are not online")
                result, tries = here.run(out, rounds), tries + 1
            yield f"kill: {kind}", {
                "kills": done, "runs that ended": sum(status != 0 for status in statuses), "resumed to the end":
                result.returncode == 0, "differs from the simulation": differences(here, out, 2, rounds),
            }  # fmt: skip


def last_line(result):
    """What the command said last, or why the server's app ended."""
    if reasons := re.findall(r"(?:UserError|ClientError|RoundError): (.*)", result.stderr):
        return reasons[-1][:300]
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


# -- waiting ----------------------------------------------------------------------------------------------------------


def failures(out):
    return [
        (r["round"], f["client"], f["reason"][:160]) for r in read_metrics(out / "metrics.jsonl") for f in r["failures"]
    ]


def stopped(number):
    for what in ("site process", "supernode"):
        for limit, word in ((120.0, "within round-seconds"), (15.0, "beyond round-seconds")):
            with deployed() as here:
                out = here.path / "runs" / "stopped"
                here.slow("client-1", 0.3)

                def pause(here=here, out=out, what=what):
                    wait_for((out / "metrics.jsonl").exists, "no round")
                    here.in_training("client-1")
                    node = here.node("client-1").running.pid
                    numbers = processes("polyfed.deploy.worker", parent=node) if what == "site process" else [node]
                    for one in numbers:
                        os.kill(one, signal.SIGSTOP)
                    time.sleep(30)
                    for one in numbers:
                        os.kill(one, signal.SIGCONT)

                thread = threading.Thread(target=pause)
                thread.start()
                result = here.run(out, 12 if limit < 30 else 6, **{"round-seconds": limit})
                thread.join()
                rounds = 12 if limit < 30 else 6
                yield f"SIGSTOP for 30 s: {what}, {word}", {
                    "status": result.returncode, "failures": failures(out),
                    "rounds": len(read_metrics(out / "metrics.jsonl")),
                    "differs from the simulation":
                    "rounds were missed" if failures(out) else differences(here, out, 2, rounds),
                    "last round without failures": not read_metrics(out / "metrics.jsonl")[-1]["failures"],
                }  # fmt: skip


def slow(number):
    with deployed() as here:
        out = here.path / "runs" / "slow"

        def once():
            wait_for((out / "metrics.jsonl").exists, "no round")
            here.slow("client-1", 6.0)
            here.in_training("client-1")
            wait_for(lambda: failures(out), "it was not missed")
            here.slow("client-1", 0)

        thread = threading.Thread(target=once)
        thread.start()
        result = here.run(out, 12, **{"round-seconds": 12.0})
        thread.join()
        yield "slower than round-seconds", {
            "status": result.returncode, "failures": failures(out), "rounds": len(read_metrics(out / "metrics.jsonl")),
            "last round without failures": not read_metrics(out / "metrics.jsonl")[-1]["failures"],
        }  # fmt: skip


def one_id(number):
    """The second SuperNode's site says that it is the first."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        project = create_project(Path(folder) / "federation", ["client-0", "client-1"])
        text = (SITE % str(project.path)).replace('os.environ["POLYFED_SITE"]', '"client-0"')
        project.site_file.write_text(text)
        (project.path / "server" / "server.py").write_text("from polyfed.testing import SmallNet as model\n")
        port = next(n for n in range(19000, 60000, 50) if not any(trials._is_port_open(m) for m in range(n, n + 8)))
        plain = trials._start_process

        def start(name, command, *more):
            return plain(name, [w.replace('client-id="client-1"', 'client-id="client-0"') for w in command], *more)

        trials._start_process = start
        try:
            with trials.start_trial(project, project.read_site_names(), port, SIGHT) as trial:
                here = Deployment(project, trial)
                wait_for(lambda: here.online() == 2, "the SuperNodes are not online")
                out = here.path / "runs" / "twice"
                both = here.run(out, 3, **{"join-seconds": 20.0})
        finally:
            trials._start_process = plain
        yield "two sites with one id", {
            "status": both.returncode, "sentence": last_line(both), "rounds": len(records_of(out)),
            "in the log": sorted(set(re.findall(r"says that it is .*", both.stderr))),
        }  # fmt: skip


# -- disks and memory -------------------------------------------------------------------------------------------------


def mounted(folder):
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", str(folder), "-o", "size=64m"], check=True)


def read_only(number):
    with deployed() as here:
        out, place = here.path / "runs" / "read-only", here.path / "trial" / "sites" / "client-1"
        mounted(place)
        try:
            here.slow("client-1", 0.2)

            def freeze():
                wait_for((out / "metrics.jsonl").exists, "no round")
                # Between two messages, when no file of the site is open.
                again = ["mount", "-o", "remount,ro", str(place)]
                wait_for(
                    lambda: not subprocess.run(again, capture_output=True, check=False).returncode, "still writable"
                )
                wait_for(lambda: failures(out), "it was not missed")
                subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)

            thread = threading.Thread(target=freeze)
            thread.start()
            result = here.run(out, 12)
            thread.join()
            yield "read-only disk of a site", {
                "status": result.returncode, "failures": failures(out), "last round without failures":
                not read_metrics(out / "metrics.jsonl")[-1]["failures"],
            }  # fmt: skip
        finally:
            subprocess.run(["umount", "-l", str(place)], check=False)
    with deployed() as here:
        place = here.path / "runs"
        mounted(place)
        try:
            subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
            result = here.run(place / "run", 2)
            yield "read-only disk of the server", {"status": result.returncode, "sentence": last_line(result)}
        finally:
            subprocess.run(["umount", "-l", str(place)], check=False)


def memory(number):
    with deployed() as here:
        out = here.path / "runs" / "memory"
        here.slow("client-1", 0.2)

        def limit():
            wait_for((out / "metrics.jsonl").exists, "no round")
            here.in_training("client-1")
            (one,) = processes("polyfed.deploy.worker", parent=here.node("client-1").running.pid)
            taken = int(Path(f"/proc/{one}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            subprocess.run(["prlimit", "--pid", str(one), f"--as={taken + 50 * 2**20}"], check=True)
            (here.path / "memory-client-1").write_text("400")  # MB that one step wants
            wait_for(lambda: failures(out), "it did not fail")
            (here.path / "memory-client-1").unlink()

        thread = threading.Thread(target=limit)
        thread.start()
        result = here.run(out, 14, **{"round-seconds": 60.0})
        thread.join()
        yield "memory limit at a site", {
            "status": result.returncode, "failures": failures(out), "rounds": len(read_metrics(out / "metrics.jsonl")),
            "last round without failures": not read_metrics(out / "metrics.jsonl")[-1]["failures"],
        }  # fmt: skip


# -- the book ---------------------------------------------------------------------------------------------------------

NOISY = 'noise-multiplier=20.0 clip-norm=1.0 max-epsilon=2.0 allow-disclosure=true data-set="patients"'


def entries(book):
    return sum(sum(page.values()) for page in json.loads(book.read_text())["data_sets"].values())


def sent(here, site):
    """Messages that left the site, by its own records."""
    lines = [json.loads(line) for file in (here.path / "trial" / "sites" / site).glob("*/metrics.jsonl")
             for line in file.read_text().splitlines()]  # fmt: skip
    return sum("epsilon" in line for line in lines)


def book(number):
    words = {"algorithm.weighted": False, "round-seconds": 60.0, "on-error": "raise"}
    with deployed(node_config=NOISY) as here:
        out, books = (
            here.path / "runs" / "noisy",
            {s: here.path / "trial" / "sites" / s / "privacy.json" for s in here.trial.sites},
        )
        here.slow("client-1", 0.2)

        def fault():
            wait_for((out / "metrics.jsonl").exists, "no round")
            here.in_training("client-1")
            kill_app(here)

        thread = threading.Thread(target=fault)
        thread.start()
        first = here.run(out, 6, **words)
        thread.join()
        before = {site: (entries(file), sent(here, site)) for site, file in books.items()}
        wait_for(lambda: here.online() == 2, "the SuperNodes are not online")
        second = here.run(out, 6, **words)
        after = {site: (entries(file), sent(here, site)) for site, file in books.items()}
        yield "the book over a killed server and a resumed run", {
            "status": [first.returncode, second.returncode], "entries and messages before": before, "after": after,
            "no message without an entry": all(booked >= left for booked, left in [*before.values(), *after.values()]),
        }  # fmt: skip
        early = {site: file.read_bytes() for site, file in books.items()}
        third = here.run(here.path / "runs" / "more", 3, **words)
        now = {site: entries(file) for site, file in books.items()}
        for label, spoil in {
            "rolled back": lambda file, site: file.write_bytes(early[site]),
            "with a smaller number": lambda file, site: file.write_text(re.sub(r": (\d+)}", ": 1}", file.read_text())),
            "not JSON": lambda file, site: file.write_text("{"),
            "missing": lambda file, site: file.unlink(),
        }.items():
            kept = books["client-1"].read_bytes()
            spoil(books["client-1"], "client-1")
            result = here.run(here.path / "runs" / label.replace(" ", "-"), 1, **words)
            yield f"a book {label}", {"status": result.returncode, "sentence": last_line(result)}
            books["client-1"].write_bytes(kept)
        print("more:", third.returncode, now, flush=True)


CASES = {
    "kills": kills,
    "stopped": stopped,
    "slow": slow,
    "one-id": one_id,
    "read-only": read_only,
    "memory": memory,
    "book": book,
}


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("cases", nargs="*", choices=[*CASES, []], default=[])
    arguments.add_argument("--kills", type=int, default=10)
    arguments.add_argument("--out", type=Path)
    asked = arguments.parse_args()
    for name in asked.cases or CASES:
        for case, found in CASES[name](asked.kills):
            print(case, json.dumps(found), flush=True)
            if asked.out:
                content = json.loads(asked.out.read_text()) if asked.out.exists() else {}
                content[case] = found
                asked.out.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
