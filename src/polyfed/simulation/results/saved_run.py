"""Reads a run from its directory, without its clients: metrics, configuration, and the networks that are stored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.examples.examples import Examples, Normalise
from polyfed.core.examples.prediction_inputs import convert_inputs_to_examples_like
from polyfed.core.io.array_files import read_safetensors
from polyfed.core.io.atomic_files import read_file
from polyfed.core.io.text.number_format import NumberUnit
from polyfed.core.io.values.keyword_names import rename_keywords, suggest_attributes
from polyfed.core.io.values.validation import parse_json
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.methods.capabilities import BringsNetwork, wrap_network_if_method_wraps
from polyfed.core.methods.declared_words import MODEL_REQUIREMENTS
from polyfed.core.nn.module_cache import build_module, fill_module
from polyfed.core.tasks.task_lookup import get_task
from polyfed.data.tabular.preprocessing import TablePreprocessor, preprocessor_from_json
from polyfed.simulation.results.display.frames import build_frame, list_scores_by_round
from polyfed.simulation.results.display.notebook_html import run_html, unit_of_column
from polyfed.simulation.results.display.plots import plot_learning_curves
from polyfed.simulation.results.display.remarks import list_remarks, summarise_remarks
from polyfed.simulation.results.display.run_text import run_text
from polyfed.simulation.results.saved_model import convert_outputs_to_columns
from polyfed.simulation.results.site_rows import predict_rows_by_site
from polyfed.simulation.storage.configuration import build_method, read_section
from polyfed.simulation.storage.model_signature import (
    PREPROCESSING_SUFFIX,
    SIGNATURE_SUFFIX,
    Signature,
    find_factory_of_signature,
    read_signature,
)
from polyfed.simulation.storage.page_file import write_page_of
from polyfed.simulation.storage.paths import safe_file_name
from polyfed.simulation.storage.predictions.prediction_store import Predictions, read_predictions
from polyfed.simulation.storage.run_files import RunFiles

Model = Callable[[], nn.Module] | Mapping[str, Callable[[], nn.Module]] | None


@suggest_attributes
@final
@dataclass(frozen=True, repr=False)
class SavedRun:
    """Holds a run as `polyfed.load` reads it: configuration, metrics and stored networks.

    Attributes:
        out: the run directory.
        files: its configuration, manifest and records.
        networks: what builds the clients' networks, where this process knows it; used where no other `model` is given.
        compared_rounds: the round of each client by which a comparison scored it; those of its `predictions`.
    """

    out: Path
    files: RunFiles
    networks: Model = field(default=None, repr=False, compare=False)
    compared_rounds: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"SavedRun({self.files.describe()}{summarise_remarks(self.history)}, out={str(self.out)!r})"

    def __str__(self) -> str:
        """Returns one line, each client's scores in the last round, which clients failed, and what the rounds warn of."""
        return run_text(repr(self), self._last_scores, self.history)

    def _repr_html_(self) -> str:
        return run_html(repr(self), list_remarks(self.history), self._last_scores, self._units)

    @property
    def _last_scores(self) -> list[dict[str, Any]]:
        return self.table() if any(record["summary"] for record in self.history) else []

    @property
    def _units(self) -> dict[str, NumberUnit]:
        score = self.files.manifest.get("score")
        return {str(score["name"]): score.get("unit", "")} if isinstance(score, Mapping) and "name" in score else {}

    def to_frame(self) -> Any:
        """Returns the scores of all rounds as a `DataFrame` of pandas, which must be installed."""
        return build_frame(list_scores_by_round(self.history), ["round", "client", *self._units])

    def plot(self, metric: str | None = None, *, ax: Any = None) -> Any:
        """Draws each client's score by round, and the mean over clients, as `Run.plot` does; returns the matplotlib axes.

        Raises:
            UserError: the run has no such score.
        """
        name = (self.files.metric_names or ["loss"])[0] if metric is None else metric
        return plot_learning_curves(self.history, name, unit_of_column(name, self._units), self.files.method, ax)

    @property
    def config(self) -> Mapping[str, Any]:
        """Returns the configuration of the run, the content of its `config.yaml`."""
        return self.files.config

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Returns the names of the classes, in the order of the networks' outputs; None if the data have none."""
        return tuple(self.files.manifest.get("class_names") or ()) or None

    @property
    def history(self) -> Sequence[Mapping[str, Any]]:
        """Returns the records of the run's rounds (scores, losses and costs), one for each line of `metrics.jsonl`."""
        return self.files.history

    def table(self, at: Literal["last", "best"] = "last") -> list[dict[str, Any]]:
        """Returns the last or best round's metrics as dicts, one per client and one with means.

        Raises:
            UserError: no round has been evaluated, or "best" without validation examples.
        """
        return self.files.table(at)

    def report(self, out: str | Path | None = None, *, images_of: Sequence[Client] | None = None) -> Path:
        """Writes the run's HTML page (by default `report.html` in its directory); returns its path.

        Args:
            out: the page; None for the default.
            images_of: as for `Run.report`.
        """
        return write_page_of(self, out, images_of)

    @rename_keywords(build="model")
    def model(self, client: str, model: Model = None) -> nn.Module:
        """Returns a client's personal network as stored at the end of the run, in evaluation mode on the CPU.

        Args:
            client: its id.
            model: builds the client's network, as `Client.model`, for one that a function in Python built: its code is not
                in the directory. One of a module is imported if `polyfed.trust_code` allows it. Or one such function per
                client, by its id.

        Raises:
            UserError: there is no such network, or `model` is missing or builds another network.
        """
        stem, method = self._stem(client), build_method(read_section(self.config, "algorithm"))
        try:
            weights = read_safetensors(stem.with_name(f"{stem.name}.safetensors"))
            if isinstance(method, BringsNetwork) and not method.requires & MODEL_REQUIREMENTS:
                description = parse_json(read_file(stem.with_name(f"{stem.name}.json")))
                return fill_module(method.build_from_description(description), weights).eval()
            signature = self._signature(client)
            networks = self.networks if model is None else model
            own_function = networks.get(client) if isinstance(networks, Mapping) else networks
            if (factory := own_function or find_factory_of_signature(signature)) is None:
                path = signature.get("factory")
                trust = "" if path is None else f", or import it: polyfed.trust_code({path!r}), if you trust that code"
                raise UserError(
                    f"the network of {client!r} was built by a function in Python, which is not in {self.out}; give it: "
                    f"model=MyNetwork{trust}"
                )
            network = wrap_network_if_method_wraps(method, build_module(factory, seed=0), weights)
            return fill_module(network, weights).eval()
        except UserError:
            raise
        except (OSError, ValueError) as error:
            cure = (
                ""
                if model is None
                else "; give as model=... the function that built it in that run, or {client: function}"
            )
            raise UserError(f"the network of {client!r} in {self.out} cannot be built: {error}{cure}") from error

    @rename_keywords(build="model")
    def predict(self, client: Any = None, x: Any = None, model: Model = None) -> Tensor:
        """Returns a stored network's outputs for new inputs, prepared as the client's own were.

        Args:
            client, x: as for `Run.predict`; in place of both, raw rows of a table with its column of sites.
            model: as for `SavedRun.model`.

        Returns:
            Outputs, float32 on the CPU, shape (n, ...); for regression on a table in the unit of the target.

        Raises:
            UserError: as `model`; inputs of another form; or preprocessing by a function in Python, which is not stored.
        """
        if client is None or x is None:
            rows, transform = x if client is None else client, self._example_like_those_of(self._ids[0]).transform
            return predict_rows_by_site(rows, self._ids, transform, lambda site, part: self.predict(site, part, model))
        network, reference = self.model(client, model), self._example_like_those_of(client)
        examples = convert_inputs_to_examples_like(reference, x, f"the inputs for client {client!r}")
        with exclusive_single_torch_thread_with_grad():
            outputs = predict(network, examples)
        is_table = isinstance(reference.transform, TablePreprocessor)
        return reference.transform.unscale_outputs(outputs) if is_table else outputs  # type: ignore[union-attr]

    def predict_table(self, client: Any = None, x: Any = None, model: Model = None) -> dict[str, list[Any]]:
        """Returns classes and probabilities, or what else the task has, as `Run.predict_table` does.

        Raises:
            UserError: as `predict`, or outputs are NaN or infinite.
        """
        outputs, owner = self.predict(client, x, model), self._ids[0] if client is None or x is None else client
        transform = self._example_like_those_of(owner).transform
        if isinstance(transform, TablePreprocessor):
            return convert_outputs_to_columns(outputs, transform.task, transform.classes)
        task = get_task(self._signature(owner)["task"])
        return convert_outputs_to_columns(outputs, task, self.files.manifest.get("class_names") or ())

    def predictions(self, client: str, split: Literal["test", "val"] = "test", round: int | None = None) -> Predictions:
        """Returns a client's outputs on test or validation examples, stored at evaluation, as `Run.predictions` does.

        With `round=None` those of the round that the run keeps; of a run of a comparison, of its compared round.

        Raises:
            UserError: there are none for this client, split or round, or the file is damaged.
        """
        return read_predictions(
            self.out, client, split=split, round=self.compared_rounds.get(client) if round is None else round
        )

    @cached_property
    def _ids(self) -> list[str]:
        """Returns the ids of the clients whose networks are stored; raises a `UserError` if there are none."""
        files = sorted((self.out / "models").glob(f"*{SIGNATURE_SUFFIX}"))
        if not files:
            raise UserError(f"{self.out} has no network of a client; networks are written when a run has ended")
        return [read_signature(file)["client"] for file in files]

    def _stem(self, client: str) -> Path:
        """Returns the path of a client's files without suffix; raises a `UserError` if its network is not there."""
        stem = self.out / "models" / safe_file_name(client)
        if not stem.with_name(f"{stem.name}.safetensors").is_file():
            raise UserError(f"{self.out} has no network of a client {client!r}; {did_you_mean(client, self._ids)}")
        return stem

    def _signature(self, client: str) -> Signature:
        stem = self._stem(client)
        return read_signature(stem.with_name(f"{stem.name}{SIGNATURE_SUFFIX}"))

    def _example_like_those_of(self, client: str) -> Examples:
        """Returns an empty example with the form and preprocessing of the client's inputs."""
        stem = self._stem(client)
        transform: Any = None
        if (file := stem.with_name(f"{stem.name}{PREPROCESSING_SUFFIX}")).is_file():
            transform = preprocessor_from_json(parse_json(read_file(file)))
            x = torch.zeros((1, len(transform.columns)), dtype=torch.float64)
        else:
            signature = self._signature(client)
            if signature["transform"] is not None or signature["tree"] != 0:
                raise UserError(
                    f"the inputs of {client!r} have several parts or a preprocessing of your own "
                    f"({signature['transform']}), which is not in {self.out}; prepare them, and call the network: "
                    f"model({client!r})(x)"
                )
            entry = signature["inputs"][0]
            x = torch.zeros((1, *entry["shape"]), dtype=getattr(torch, entry["dtype"]))
            if (constants := entry["normalise"]) is not None:
                transform = Normalise(tuple(constants["mean"]), tuple(constants["std"]))
        return Examples(x, torch.zeros(1, dtype=torch.int64), transform=transform)


def load_run(folder: Path) -> SavedRun:
    """Reads a finished or unfinished run from its directory.

    Raises:
        UserError: `folder` is not a run directory, or a file is damaged.
    """
    return SavedRun(folder, RunFiles.read(folder))
