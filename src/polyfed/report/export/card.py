"""The model card of an exported network, `README.md`: what it is, from how many examples, how good, how to use it."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from polyfed.core.algorithm import DISCLOSURES
from polyfed.core.text import clean
from polyfed.core.training import LocalTraining
from polyfed.report.export.trained import Score, Trained
from polyfed.report.export.whole import onnx_names

_SPLITS = {"train": "training", "val": "validation", "test": "test", "global_test": "common test set"}


def card(
    trained: Trained, file: str | None, outputs: Mapping[str, Any], *, checked: bool, versions: Mapping[str, str]
) -> str:
    """The card as Markdown.

    Args:
        trained: what is exported.
        file: the network's file, "network.ts" or "network.onnx"; None where the weights are alone.
        outputs: what the signature says of the outputs.
        checked: whether the file was read back and compared with the network.
        versions: of the packages that decide results.
    """
    client = _plain(trained.signature["client"])
    by = f", {'given' if trained.absent else 'trained'} by `{_plain(trained.method)}`" if trained.method else ""
    parts = [
        f"# The network of {client}{by}",
        "## What it is",
        _method(trained),
        _never_trained(trained, client),
        "## Data",
        _table(["split", "examples"], [[_SPLITS.get(k, k), n] for k, n in trained.signature["examples"].items()]),
        f"All of them are {client}'s own. What networks learnt from the examples of others may be in its weights, too.",
        "## Scores",
        _scores(trained.scores, client),
        "## Inputs and outputs",
        _signature(trained, outputs),
        "## Use without polyfed",
        _use(trained, file, checked),
        "## Use with polyfed",
        "`polyfed predict THIS-FOLDER FILE.csv` applies the preprocessing and names the classes."
        if trained.prepared is not None
        else "`weights.safetensors` is the network's state dict; signature.json says which network it is.",
        "## What the server learned",
        _disclosed(trained),
        "## Limits of use",
        _limits(client),
        "## Made with",
        ", ".join(f"{name} {number}" for name, number in versions.items()) + ".",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _method(trained: Trained) -> str:
    if trained.algorithm is None:
        return "The personal network of one site; the run's method is in the records of the server."
    rounds = f"{trained.rounds} rounds"
    kept = f", of which round {trained.round} is kept" if trained.round and trained.round != trained.rounds else ""
    method = trained.algorithm
    training = [f"{name}={getattr(method, name)!r}" for name in _own_fields(method)]
    seed = "" if trained.seed is None else f" Seed {trained.seed}."
    return f"{_plain(trained.source)}\n\n{rounds}{kept}.{seed} Settings: {_plain(', '.join(training))}."


def _never_trained(trained: Trained, client: str) -> str:
    if not trained.absent:
        return ""
    estimated = getattr(trained.algorithm, "buffers", "average") != "average"
    norms = (
        " Running statistics of norm layers, if it has any, are estimated on the training examples."
        if estimated
        else ""
    )
    return (
        f"**{client} never trained it**: it took part in no round. The network is what the method gives to a client that "
        f"joins after the others.{norms}"
    )


def _own_fields(method: Any) -> list[str]:
    """The fields of a method that are not at the default of local training."""
    shared = {f.name: f.default for f in fields(LocalTraining)}
    names = [f.name for f in fields(method)]
    return [
        n for n in names if n in ("lr", "local_epochs", "batch_size") or getattr(method, n) != shared.get(n, object())
    ]


def _scores(scores: Sequence[Score], client: str) -> str:
    if not scores:
        return f"None were kept. Test the network on {client}'s own examples before you use it."
    rows = [[one.label, _number(one.value), "–" if one.interval is None else _ends(one.interval)] for one in scores]
    said = (
        f"On {client}'s own test examples, which no training saw. The intervals are of the luck of these examples: in 95 of "
        "100 cases they hold the score on all such examples."
    )
    return f"{said}\n\n{_table(['score', 'value', '95 % interval'], rows)}"


def _signature(trained: Trained, outputs: Mapping[str, Any]) -> str:
    rows = [[f"`{_plain(one['name'])}`", _shape(one["shape"]), one["dtype"]] for one in trained.signature["inputs"]]
    told = _table(["input", "shape", "type"], rows)
    if trained.prepared is not None:
        columns = ", ".join(_plain(column.name) for column in trained.prepared.columns)
        told += (
            f"\n\nColumns, in this order: {columns}. A number is as in the table, NaN where there is none; a category is "
            "its place in the list in preprocessing.json, and -1 another. inputs.py makes such rows. Scaling and filling in "
            "are part of the network's file."
        )
    elif any(one["normalise"] is not None for one in trained.signature["inputs"]):
        told += "\n\nImages have channels first and values from 0 to 255; normalisation is part of the network's file."
    if (own := trained.signature["transform"]) is not None:
        told += (
            f"\n\nInputs are those after the owner's own function `{_plain(own)}`, which is not part of this folder."
        )
    if tables := [one for one in trained.signature["inputs"] if "prepared" in one]:
        for one in tables:
            columns = ", ".join(_plain(column["name"]) for column in one["prepared"]["columns"])
            told += (
                f"\n\n`{_plain(one['name'])}` are rows of a table, in this order: {columns}. A number is as in the table, "
                "NaN where there is none; a category is its place in the list in signature.json, and -1 another. Scaling "
                "and filling in are part of the network's file."
            )
    told += f"\n\nOutputs: {_shape(outputs['shape'])}, {outputs['dtype']}: {outputs['meaning']}"
    names = ", ".join(map(_plain, trained.class_names))
    return f"{told}{f' In this order: {names}.' if names else ''}"


def _use(trained: Trained, file: str | None, checked: bool) -> str:
    if file is None:
        return "Only the weights are here (`--format weights`): load them into the network's own code."
    table = trained.prepared is not None
    own = "inputs" if table else ""
    if file.endswith(".ts"):
        given = "torch.from_numpy(inputs.of_csv('new.csv'))" if table else _tensors(trained, "torch")
        lines = [f"import torch{f', {own}' if own else ''}", f"network = torch.jit.load('{file}')", f"x = {given}",
                 f"print(network({'x' if len(trained.signature['inputs']) == 1 else '*x'}))"]  # fmt: skip
        needs = "torch" + (" and numpy" if table else "")
    else:
        given = "inputs.of_csv('new.csv')" if table else _tensors(trained, "numpy")
        names = onnx_names(trained.signature)
        fed = f"{{'{names[0]}': x}}" if len(names) == 1 else f"dict(zip({names!r}, x))"
        start = f"network = onnxruntime.InferenceSession('{file}')"
        lines = [f"import numpy, onnxruntime{f', {own}' if own else ''}", start, f"x = {given}",
                 f"print(network.run(None, {fed})[0])"]  # fmt: skip
        needs = "onnxruntime and numpy"
    code = "\n".join(lines)
    said = "It was read back and gave the outputs of the network." if checked else (
        "It was not read back, since onnxruntime was not installed: compare it before you use it."
    )  # fmt: skip
    more = " TorchScript is code: load such files only from people whom you trust." if file.endswith(".ts") else ""
    return f"In this folder, with {needs}:\n\n```python\n{code}\n```\n\n{said}{more}"


def _tensors(trained: Trained, package: str) -> str:
    made = []
    for one in trained.signature["inputs"]:
        shape = ", ".join(map(str, [8, *one["shape"]]))
        made.append(f"{package}.zeros(({shape}{',' if not one['shape'] else ''}), dtype={package}.{one['dtype']})")
    return f"{made[0]}  # eight examples" if len(made) == 1 else f"[{', '.join(made)}]"


def _disclosed(trained: Trained) -> str:
    if trained.algorithm is None:
        return "What the method discloses; see the records of the run."
    if not trained.discloses:
        return "Nothing of the data or the network."
    return "\n".join(f"- {word}: {DISCLOSURES[word]}" for word in sorted(trained.discloses))


def _limits(client: str) -> str:
    return "\n".join(
        [
            f"- The scores are of {client}'s examples at one time. For other places, devices, groups of people or years "
            "nothing is known.",
            "- Weights can give away examples that they were trained on. Whoever gets this folder gets them.",
            "- It is no medical device, and no decision by itself: who uses it tests it, by subgroup and for calibration, "
            "and answers for it.",
            "- Outputs are not calibrated unless you have checked that they are.",
        ]
    )


def _table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(['n', *map(str, shape)])}{',' if not shape else ''})"


def _number(value: float) -> str:
    return f"{value:.3f}"


def _ends(interval: tuple[float, float]) -> str:
    return f"{_number(interval[0])} to {_number(interval[1])}"


def _plain(text: object) -> str:
    """Text of others in a table of Markdown."""
    return clean(text).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
