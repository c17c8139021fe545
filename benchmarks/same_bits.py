"""Whether two versions of polyfed train the same models: short runs of every method, as hashes.

    python benchmarks/same_bits.py                       prints the hashes of the installed version, as JSON
    python benchmarks/same_bits.py --against REVISION    runs that revision too (a git worktree), and prints what differs
    python benchmarks/same_bits.py --floating            leaves buffers of whole numbers (counters) out of the hashes
    python benchmarks/same_bits.py --parts [--out FILE]  gives inputs as one tensor, as a tuple and as a dict, and prints
                                                         what differs

A change of the code that should not change any result is checked with this. The hash of a run is over the weights of all
clients after it, the training loss and the bytes of each round. It says nothing about whether a result is right.
"""

import argparse
import hashlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
FORMER_NAMES = {"fedavg_kd": "distillation"}
RUNS = {
    "": {},
    "unweighted": {"weighted": False},
    "weighted": {"weighted": True},
    "local buffers": {"buffers": "local"},
    "recomputed buffers": {"buffers": "recompute"},
    "averaged buffers": {"buffers": "average"},
}


class Net(nn.Module):
    """BatchNorm and dropout; all its state is in the state dict."""

    def __init__(self, width=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.body(x))


def wide():
    return Net(12)


def in_parts(x, way):
    """Inputs as one tensor, as a tuple of it, or as a dict by the name of forward's argument."""
    return {"tensor": x, "tuple": (x,), "dict": {"x": x}}[way]


def clients(pf, *, images, mixed, way="tensor"):
    generator, found = torch.Generator().manual_seed(7), []
    centres = 2 * torch.randn(3, 36 if images else 6, generator=generator)
    for k in range(4):
        y = torch.arange(29 + 6 * k) % 3
        x = centres[y] + 0.5 * torch.randn(len(y), centres.shape[1], generator=generator) + 0.3 * k
        x = x.view(-1, 1, 6, 6) if images else x
        places = slice(0, 6), slice(6, 9), slice(9, None)
        test, val, train = ((in_parts(x[rows], way), y[rows]) for rows in places)
        model = None if images else wide if mixed and k % 2 else Net
        found.append(pf.Client(f"client-{k}", model, train, test, val))
    return found


def digest(run, floating=False):
    whole = hashlib.sha256()
    for client in sorted(run.federation.clients):
        for name, tensor in run.model(client).state_dict().items():
            if floating and not tensor.is_floating_point():
                continue
            whole.update(f"{client}/{name}".encode())
            whole.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    for record in run.history:
        whole.update(repr((record["train_loss"], record["bytes_down"], record["bytes_up"])).encode())
    return whole.hexdigest()[:20]


def digests(only=(), way="tensor", common=False, floating=False):
    import polyfed as pf
    from polyfed.algorithms import REGISTRY

    sample = "clients_per_round" if "clients_per_round" in inspect.signature(pf.federate).parameters else "sample"
    noise = torch.randn(64, 6, generator=torch.Generator().manual_seed(8))
    public = in_parts(noise, way), torch.zeros(64, dtype=torch.int64)
    found = {}
    for name in sorted({*(set(REGISTRY) - set(FORMER_NAMES.values())), *FORMER_NAMES}):
        if only and name not in only:
            continue
        method = REGISTRY.get(name) or REGISTRY[FORMER_NAMES[name]]
        fields = inspect.signature(method).parameters
        plain = {"lr": 0.05, "momentum": 0.5, "batch_size": 8, "local_epochs": 2, "rad_size": 32, "channels": 4}
        plain |= {"base_cells": 1, "personal_cells": 1, "hidden": 8, "base_nodes": 2, "personal_nodes": 2}
        plain = {key: value for key, value in plain.items() if key in fields}
        images = "images" in method.requires
        mixed = "model" in method.requires or "layer_catalogue" in method.requires or "architectures" in method.requires
        mixed = mixed and "one_representation" not in method.requires
        if common:  # in place of a built-in network, which for several parts is another: with one that joins them
            plain |= {field: "same_bits:Net" for field in ("teacher", "shared") if field in fields}
        try:
            method(**plain)
        except pf.UserError:  # SCAFFOLD is for plain SGD
            plain.pop("momentum", None)
        for label, change in RUNS.items():
            if set(change) - set(fields):
                continue
            try:
                algorithm = method(**plain | change)
            except pf.UserError:
                continue  # the method refuses this policy
            needs = {"public": public} if "public_data" in algorithm.requires else {}
            for taking in (1.0, 3):
                run = pf.federate(
                    clients(pf, images=images, mixed=mixed, way=way),
                    algorithm,
                    rounds=4,
                    seed=3,
                    workers=0,
                    **needs,
                    **{sample: taking},
                )
                found[f"{name}, {label or 'as it is'}, {'all' if taking == 1.0 else taking} of 4"] = digest(
                    run, floating
                )
    return found


def compare_parts(only, out):
    """Whether inputs of one tensor, of a tuple and of a dict train the same networks; with what each method says if it
    refuses them."""
    import polyfed as pf
    from polyfed.algorithms import REGISTRY
    from polyfed.core.io.trusted_code import trust_code

    trust_code("same_bits:Net")
    found, refused = {}, {}
    for name in sorted(only or REGISTRY):
        if "images" in REGISTRY[name].requires:  # it brings its own network, for images alone
            refused[name] = "takes images alone"
            continue
        plain = digests([name], common=True)
        for way in ("tuple", "dict"):
            try:
                parts = digests([name], way, common=True)
                found[f"{name}, {way}"] = {run: digest == plain[run] for run, digest in parts.items()}
            except (pf.UserError, pf.ClientError) as error:
                refused[f"{name}, {way}"] = str(error)[:200]
        print(
            name,
            [sum(found.get(f"{name}, {way}", {}).values()) for way in ("tuple", "dict")],
            "of",
            len(plain),
            flush=True,
        )
    runs = {case: results for case, results in found.items() if results}
    differ = [f"{case}: {run}" for case, results in runs.items() for run, same in results.items() if not same]
    total = sum(map(len, runs.values()))
    methods = sorted({case.partition(",")[0] for case in runs})
    told = {"methods": methods, "runs": total, "differ": differ, "refused": refused}
    print(json.dumps({**told, "methods": len(methods)}, indent=1))
    if out:
        Path(out).write_text(json.dumps(told, indent=1) + "\n")
    return int(bool(differ))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REVISION")
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--floating", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--out")
    asked = parser.parse_args()
    if asked.parts:
        return compare_parts(asked.only, asked.out)
    if asked.against is None:
        print(json.dumps(digests(asked.only, floating=asked.floating), indent=1))
        return 0
    flags = ["--floating"] if asked.floating else []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "other"
        subprocess.run(
            ["git", "worktree", "add", "--detach", place, asked.against], cwd=ROOT, check=True, capture_output=True
        )
        try:
            there, here = (
                json.loads(
                    subprocess.run(
                        [sys.executable, "-W", "ignore", __file__, *flags, "--only", *asked.only],
                        env={**os.environ, "PYTHONPATH": str(source)}, check=True, stdout=subprocess.PIPE,
                    ).stdout
                )
                for source in (place / "src", ROOT / "src")
            )  # fmt: skip
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", place], cwd=ROOT, check=True)
    differ = sorted(run for run in {*there, *here} if there.get(run) != here.get(run))
    print(f"{len(here)} runs, {len(differ)} differ from {asked.against}" + "".join(f"\n  {run}" for run in differ))
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
