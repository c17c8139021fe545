"""Writes the model card of an exported network (`README.md`): its purpose, training, scores, and use."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from polyfed.core.io.text.terminal_text import sanitise_for_terminal
from polyfed.core.methods.declared_words import meaning_of_disclosure
from polyfed.core.tasks.task_lookup import get_task
from polyfed.core.training.config import LocalTraining
from polyfed.report.export.standalone_module import onnx_input_names
from polyfed.report.export.trained_model import ClientScore, TrainedModel

_SPLITS = {"train": "training", "val": "validation", "test": "test", "global_test": "common test set"}


def build_model_card(
    trained: TrainedModel,
    network_file: str | None,
    output_signature: Mapping[str, Any],
    *,
    outputs_checked: bool,
    versions: Mapping[str, str],
) -> str:
    """Returns the text of the model card of an exported network, as Markdown.

    Args:
        trained: what is exported.
        network_file: the network's file, "network.ts" or "network.onnx"; None where the weights are alone.
        output_signature: what the signature says of the outputs.
        outputs_checked: whether the file was read back and compared with the network.
        versions: of the packages that decide results.
    """
    client = _escape_markdown(trained.signature["client"])
    origin = (
        f", {'given' if trained.never_trained else 'trained'} by `{_escape_markdown(trained.method_name)}`"
        if trained.method_name
        else ""
    )
    parts = [
        f"# The network of {client}{origin}",
        "## What it is",
        _method_section(trained),
        _never_trained_section(trained, client),
        "## Data",
        _markdown_table(
            ["split", "examples"], [[_SPLITS.get(k, k), n] for k, n in trained.signature["examples"].items()]
        ),
        f"All of them are {client}'s own. What networks learnt from the examples of others may be in its weights, too.",
        "## Scores",
        _scores_section(trained.scores, client),
        "## Inputs and outputs",
        _signature_section(trained, output_signature),
        "## Use without polyfed",
        _usage_section(trained, network_file, outputs_checked),
        "## Use with polyfed",
        "`polyfed predict THIS-FOLDER FILE.csv` applies the preprocessing and names the classes."
        if trained.preprocessor is not None
        else "`weights.safetensors` is the network's state dict; signature.json says which network it is.",
        "## What the server learned",
        _disclosures_section(trained),
        "## Limits of use",
        _limits_section(client),
        "## Made with",
        ", ".join(f"{name} {number}" for name, number in versions.items()) + ".",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _method_section(trained: TrainedModel) -> str:
    if trained.algorithm is None:
        return "The personal network of one site; the run's method is in the records of the server."
    rounds = f"{trained.planned_rounds} rounds"
    kept_text = (
        f", of which round {trained.kept_round} is kept"
        if trained.kept_round and trained.kept_round != trained.planned_rounds
        else ""
    )
    method = trained.algorithm
    training = [f"{name}={getattr(method, name)!r}" for name in _fields_to_state(method)]
    seed = "" if trained.seed is None else f" Seed {trained.seed}."
    return (
        f"{_escape_markdown(trained.method_summary)}\n\n{rounds}{kept_text}.{seed} Settings: "
        f"{_escape_markdown(', '.join(training))}."
    )


def _never_trained_section(trained: TrainedModel, client: str) -> str:
    if not trained.never_trained:
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


def _fields_to_state(method: Any) -> list[str]:
    """Returns the hyper-parameters of a method that differ from the defaults of local training, as text."""
    defaults = {f.name: f.default for f in fields(LocalTraining)}
    names = [f.name for f in fields(method)]
    return [
        n for n in names if n in ("lr", "local_epochs", "batch_size") or getattr(method, n) != defaults.get(n, object())
    ]


def _scores_section(scores: Sequence[ClientScore], client: str) -> str:
    if not scores:
        return f"None were kept. Test the network on {client}'s own examples before you use it."
    rows = [
        [score.label, _format_number(score.value), "–" if score.interval is None else _format_interval(score.interval)]
        for score in scores
    ]
    explanation = (
        f"On {client}'s own test examples, which no training saw. The intervals are of the luck of these examples: in 95 of "
        "100 cases they hold the score on all such examples."
    )
    return f"{explanation}\n\n{_markdown_table(['score', 'value', '95 % interval'], rows)}"


def _signature_section(trained: TrainedModel, outputs: Mapping[str, Any]) -> str:
    rows = [
        [f"`{_escape_markdown(input_spec['name'])}`", _format_shape(input_spec["shape"]), input_spec["dtype"]]
        for input_spec in trained.signature["inputs"]
    ]
    text = _markdown_table(["input", "shape", "type"], rows)
    if trained.preprocessor is not None:
        columns = ", ".join(_escape_markdown(column.name) for column in trained.preprocessor.columns)
        text += (
            f"\n\nColumns, in this order: {columns}. A number is as in the table, NaN where there is none; a category is "
            "its place in the list in preprocessing.json, and -1 another. inputs.py makes such rows. Scaling and filling in "
            "are part of the network's file."
        )
    elif any(input_spec["normalise"] is not None for input_spec in trained.signature["inputs"]):
        text += "\n\nImages have channels first and values from 0 to 255; normalisation is part of the network's file."
    if (transform_name := trained.signature["transform"]) is not None:
        text += (
            f"\n\nInputs are those after the owner's own function `{_escape_markdown(transform_name)}`, which is not "
            "part of this folder."
        )
    if tables := [input_spec for input_spec in trained.signature["inputs"] if "prepared" in input_spec]:
        for input_spec in tables:
            columns = ", ".join(_escape_markdown(column["name"]) for column in input_spec["prepared"]["columns"])
            text += (
                f"\n\n`{_escape_markdown(input_spec['name'])}` are rows of a table, in this order: {columns}. A number "
                "is as in the table, NaN where there is none; a category is its place in the list in signature.json, "
                "and -1 another. Scaling and filling in are part of the network's file."
            )
    text += f"\n\nOutputs: {_format_shape(outputs['shape'])}, {outputs['dtype']}: {outputs['meaning']}"
    output_names = get_task(trained.signature["task"]).output_names(trained.class_names)
    names = ", ".join(map(_escape_markdown, output_names if trained.class_names else ()))
    return f"{text}{f' In this order: {names}.' if names else ''}"


def _usage_section(trained: TrainedModel, file: str | None, outputs_checked: bool) -> str:
    if file is None:
        return "Only the weights are here (`--format weights`): load them into the network's own code."
    table = trained.preprocessor is not None
    helper_module = "inputs" if table else ""
    if file.endswith(".ts"):
        inputs_code = "torch.from_numpy(inputs.of_csv('new.csv'))" if table else _example_inputs_code(trained, "torch")
        lines = [
            f"import torch{f', {helper_module}' if helper_module else ''}",
            f"network = torch.jit.load('{file}')",
            f"x = {inputs_code}",
            f"print(network({'x' if len(trained.signature['inputs']) == 1 else '*x'}))",
        ]
        needs = "torch" + (" and numpy" if table else "")
    else:
        inputs_code = "inputs.of_csv('new.csv')" if table else _example_inputs_code(trained, "numpy")
        names = onnx_input_names(trained.signature)
        feeds_code = f"{{'{names[0]}': x}}" if len(names) == 1 else f"dict(zip({names!r}, x))"
        start = f"network = onnxruntime.InferenceSession('{file}')"
        lines = [f"import numpy, onnxruntime{f', {helper_module}' if helper_module else ''}", start, f"x = {inputs_code}",
                 f"print(network.run(None, {feeds_code})[0])"]  # fmt: skip
        needs = "onnxruntime and numpy"
    code = "\n".join(lines)
    check_note = "It was read back and gave the outputs of the network." if outputs_checked else (
        "It was not read back, since onnxruntime was not installed: compare it before you use it."
    )  # fmt: skip
    more = " TorchScript is code: load such files only from people whom you trust." if file.endswith(".ts") else ""
    return f"In this folder, with {needs}:\n\n```python\n{code}\n```\n\n{check_note}{more}"


def _example_inputs_code(trained: TrainedModel, package: str) -> str:
    expressions = []
    for input_spec in trained.signature["inputs"]:
        shape = ", ".join(map(str, [8, *input_spec["shape"]]))
        expressions.append(
            f"{package}.zeros(({shape}{',' if not input_spec['shape'] else ''}), dtype={package}.{input_spec['dtype']})"
        )
    return f"{expressions[0]}  # eight examples" if len(expressions) == 1 else f"[{', '.join(expressions)}]"


def _disclosures_section(trained: TrainedModel) -> str:
    if trained.algorithm is None:
        return "What the method discloses; see the records of the run."
    if not trained.disclosures:
        return "Nothing of the data or the network."
    return "\n".join(f"- {word}: {meaning_of_disclosure(word)}" for word in sorted(trained.disclosures))


def _limits_section(client: str) -> str:
    return "\n".join(
        [
            f"- The scores are of {client}'s examples at one time. For other places, devices, groups of people or years "
            "nothing is known.",
            "- Weights can give away examples that they were trained on. Whoever gets this folder gets them.",
            "- It is not a medical device and makes no decision by itself: who uses it tests it, by subgroup and for "
            "calibration, and answers for it.",
            "- Outputs are not calibrated unless you have checked that they are.",
        ]
    )


def _markdown_table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _format_shape(shape: Sequence[int]) -> str:
    return f"({', '.join(['n', *map(str, shape)])}{',' if not shape else ''})"


def _format_number(value: float) -> str:
    return f"{value:.3f}"


def _format_interval(interval: tuple[float, float]) -> str:
    return f"{_format_number(interval[0])} to {_format_number(interval[1])}"


def _escape_markdown(text: object) -> str:
    """Escapes text from outside polyfed for a cell of a Markdown table."""
    return sanitise_for_terminal(text).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
