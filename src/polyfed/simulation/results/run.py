"""Defines `Run`, the result of a run: its metrics as a table, and each client's personal model and predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from torch import Tensor, nn

from polyfed.algorithms import registry_name
from polyfed.core.algorithm import Architecture, Client
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.examples.prediction_inputs import convert_inputs_to_examples_like
from polyfed.core.io.text.number_format import NumberUnit
from polyfed.core.io.values.keyword_names import suggest_attributes
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.methods.capabilities import BringsNetwork, check_network_has_all_weights, wrap_network_if_method_wraps
from polyfed.core.methods.declared_words import MODEL_REQUIREMENTS
from polyfed.core.nn.deep_copy import deep_copy
from polyfed.core.nn.module_cache import build_module, fill_module, restore_all_but_weights_and_set_eval
from polyfed.data.tabular.preprocessing import TablePreprocessor
from polyfed.simulation.engines.base import ClientTask
from polyfed.simulation.engines.devices import choose_device
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.results.across_sites.cross_site import compute_cross_site
from polyfed.simulation.results.across_sites.cross_site_scores import CrossSiteScores, write_cross_site
from polyfed.simulation.results.display.frames import build_frame, list_scores_by_round
from polyfed.simulation.results.display.notebook_html import run_html, unit_of_column
from polyfed.simulation.results.display.plots import plot_learning_curves
from polyfed.simulation.results.display.remarks import list_remarks
from polyfed.simulation.results.display.run_text import run_line, run_text
from polyfed.simulation.results.run_writer import write_run_from_memory
from polyfed.simulation.results.saved_model import convert_outputs_to_columns
from polyfed.simulation.results.site_rows import predict_rows_by_site
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.planning.evaluation_sample import has_other_clients_each_round
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.simulation.storage.directory import check_is_in_memory
from polyfed.simulation.storage.metrics_table import build_metrics_table
from polyfed.simulation.storage.page_file import write_page_of
from polyfed.simulation.storage.predictions.prediction_store import Predictions, PredictionStore

if TYPE_CHECKING:
    from polyfed.simulation.results.unseen_clients import WarmStart


@suggest_attributes
@final
@dataclass(frozen=True)
class Run:
    """Holds the result of a finished run: the metrics of each round, and each client's personal model and predictions.

    Attributes:
        federation: method, clients and settings.
        history: the records of `metrics.jsonl`.
        last: the state after the last round.
        out: the run directory, or None.
        best: the state after the round that is kept; None with `keep="last"`.
        prediction_store: the stored predictions; None if none were kept.
        stopped_by: the class of the callback that stopped the run, or None.
        cross_site_scores: every client's model at every client; None unless the run was asked for them.
    """

    federation: Federation
    history: Sequence[Mapping[str, Any]]
    last: Checkpoint
    out: Path | None = None
    best: Checkpoint | None = None
    prediction_store: PredictionStore | None = None
    stopped_by: str | None = None
    cross_site_scores: CrossSiteScores | None = None

    def __repr__(self) -> str:
        return run_line(self.federation, self.history, self.out)

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
        return {metric.name: metric.unit for metric in self.federation.metrics}

    def to_frame(self) -> Any:
        """Returns the scores of all rounds as a pandas `DataFrame`.

        A row per round and client; columns `round`, `client`, and those of `table`. Without evaluation, scores are missing.

        Raises:
            UserError: pandas is not installed.
        """
        return build_frame(list_scores_by_round(self.history), ["round", "client", *self._units])

    def plot(self, metric: str | None = None, *, ax: Any = None) -> Any:
        """Draws each client's score by round, and the mean over clients; returns the matplotlib axes.

        Args:
            metric: a column of `table`, such as "accuracy", "val_auc" or "loss"; None is the metric that decides.
            ax: axes to draw into; None makes new ones.

        Raises:
            UserError: the run has no such score.
        """
        name = self.federation.metrics[0].name if metric is None else metric
        title = registry_name(self.federation.algorithm)
        return plot_learning_curves(self.history, name, unit_of_column(name, self._units), title, ax)

    def report(self, out: str | Path | None = None, *, images_of: Sequence[Client] | None = None) -> Path:
        """Writes the run's HTML page, as the command `polyfed report` does, and returns its path.

        Args:
            out: the page; None for `report.html` in the run directory. A run kept in memory needs it.
            images_of: clients of a segmentation; the page then has test images of each, truth and prediction, which are
                their data. None for no images.

        Raises:
            UserError: the page cannot be written, or a run kept in memory was given no place for it.
        """
        return write_page_of(self, out, images_of)

    def save(self, out: str | Path) -> Path:
        """Writes a run that was kept in memory to a new run directory, which `polyfed.load` reads; returns its path.

        It holds what `federate(..., out=...)` writes, without the arrays that a method keeps of each round for plots.

        Args:
            out: the folder, which must not exist or be empty.

        Raises:
            UserError: the run has a directory already, or the folder is taken or cannot be written.
        """
        check_is_in_memory("run", self.out, out)
        path = write_run_from_memory(
            out, self.federation, self.history, self.last, self.best, self.prediction_store, self.stopped_by
        )
        if self.cross_site_scores is not None:
            write_cross_site(self.cross_site_scores, path)
        return path

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Returns the classes' names in the order of outputs; None if labels were numbers."""
        return self.federation.class_names

    @property
    def kept_checkpoint(self) -> Checkpoint:
        """Returns the checkpoint that `keep` selects, which `model` and `predict` use."""
        return self.best or self.last

    @property
    def best_round(self) -> int | None:
        """Returns the round with the best mean validation score or loss; None without validation examples."""
        return self.federation.best_round(self.history)

    def table(self, at: Literal["last", "best"] = "last") -> list[dict[str, Any]]:
        """Returns the "last" or "best" round's metrics as dicts, by client id, then the means; `print` shows columns.

        Columns: `client`, the metrics (the first decides), `loss`, `num_examples` (for training), `val_...` and
        `global_...` if there are such sets, and other networks that the method evaluates (`trained_...` of pFedLA,
        `server_...` of pFedMe); `simulated_seconds`, the simulated time at the end of the round, if the run simulates time.
        Where a sample of the clients was evaluated, the rows are theirs, and the means have `evaluated` and `of` besides:
        how many of how many clients.

        Args:
            at: the last round, or the round with the best validation score (never the best on test).

        Raises:
            UserError: "best", but no client has validation examples.
        """
        if at not in ("last", "best"):
            raise UserError(f"table(at=) must be 'last' or 'best', got {at!r}")
        number = self.last.round if at == "last" else self.best_round
        if number is None and has_other_clients_each_round(
            self.federation.settings, len(self.federation.client_registry.ids)
        ):
            raise UserError(
                "table(at='best') compares rounds, and each round of this run evaluated other clients; give "
                "evaluate_clients=[...] with ids, the same in each round"
            )
        if number is None:
            raise UserError("table(at='best') needs validation examples: give clients val=..., or --data.val-fraction")
        roster = self.federation.client_registry
        names = [metric.name for metric in self.federation.metrics]
        return build_metrics_table(self.history[number - 1], roster.ids, roster.num_examples, names)

    def model(self, client: str) -> nn.Module:
        """Returns a client's network as evaluated after the last round, or that of `keep`.

        It is independent of the run, in evaluation mode on the CPU. It takes prepared inputs, as `examples.batch(rows)[0]`
        gives them; `predict` prepares rows of a table and raw images itself.

        Raises:
            UserError: no client has this id.
        """
        engine, task = self._engine_and_task(client)
        owner = self.federation.clients[client]
        with exclusive_single_torch_thread_with_grad():
            result = next(engine.run([task]))
            if result.failure is not None:
                raise result.failure
            assert result.weights is not None  # always set for phase "export" in this process
            factory, method = owner.model, self.federation.algorithm
            if factory is not None and method.requires & MODEL_REQUIREMENTS:
                network = wrap_network_if_method_wraps(method, build_module(factory, seed=0), result.weights)
                check_network_has_all_weights(method, network, result.weights)
                return fill_module(network, result.weights).eval()
            if isinstance(method, BringsNetwork):
                return fill_module(method.build_from_description(result.description or {}), result.weights).eval()
            model = method.personal_model(task.message, task.start_state(method, owner), owner, task.seed)
            return deep_copy(restore_all_but_weights_and_set_eval(model)).eval()

    def predict(self, client: Any = None, x: Any = None) -> Tensor:
        """Returns the outputs of a client's personal network for new inputs, as a tensor of shape (n, ...).

        Args:
            client: its id. Or, in place of both arguments, raw rows of a table with its column of sites: then each row's
                site is the client, as in `predict(frame)`.
            x: inputs as in `Client`: a tensor or array, shape (n, ...) of the client's inputs. Images of uint8 are
                normalised as the client's are, by `client.train.transform`. For data of a table, raw rows: a pandas frame, a
                mapping of columns, a list of {name: value}, a CSV or Parquet file by its path, or another client's `test.x`
                from the same table; they are prepared as the client's training rows were, missing values and all.

        Returns:
            Outputs (logits; numbers for regression, of a table in the unit of its target), float32 on the CPU, shape
            (n, ...). `predict_table` has classes and probabilities.

        Raises:
            UserError: no client has this id or is a row's site, or inputs are not like the client's (shape, type, NaN).
            ClientError: the network fails.

        >>> import torch
        >>> from polyfed.algorithms import FedAvg
        >>> from polyfed.simulation.federate import federate
        >>> from polyfed.testing import small_clients
        >>> federate(small_clients(), FedAvg(), rounds=1, workers=0).predict("client-0", torch.zeros(5, 6)).shape
        torch.Size([5, 3])
        """
        if client is None or x is None:
            rows, ids = x if client is None else client, self.federation.client_registry.ids
            return predict_rows_by_site(rows, ids, self._table_transform, self.predict)
        engine, task = self._engine_and_task(client)
        examples = convert_inputs_to_examples_like(
            self.federation.clients[client].train, x, f"the inputs for client {client!r}"
        )
        with exclusive_single_torch_thread_with_grad():
            outputs = engine.predict(task, examples)
        if isinstance(examples.transform, TablePreprocessor):
            return examples.transform.unscale_outputs(outputs)
        return outputs

    def predict_table(self, client: Any = None, x: Any = None) -> dict[str, list[Any]]:
        """Returns what `polyfed predict` writes of new inputs, as `{column: a value for each input}`.

        For classes the columns are "predicted" and "probability of ..."; for other tasks probabilities, risks or numbers.

        Args:
            client, x: as for `predict`.

        Raises:
            UserError: as `predict`, or outputs are NaN or infinite.

        >>> from polyfed.testing import small_clients
        >>> from polyfed.simulation.federate import federate
        >>> run = federate(small_clients(), "fedavg", rounds=1, workers=0)
        >>> list(run.predict_table("client-0", run.federation.clients["client-0"].test.x))
        ['predicted', 'probability of 0', 'probability of 1', 'probability of 2']
        """
        outputs = self.predict(client, x)
        owner = self.federation.clients[
            self.federation.client_registry.ids[0] if client is None or x is None else client
        ]
        transform = owner.train.transform
        names = transform.classes if isinstance(transform, TablePreprocessor) else self.class_names or ()
        return convert_outputs_to_columns(outputs, owner.task, names)

    def predictions(self, client: str, split: Literal["test", "val"] = "test", round: int | None = None) -> Predictions:
        """Returns a client's outputs on test or validation examples, stored at evaluation.

        Args:
            client: its id.
            split: "test" or "val".
            round: None is the last, or the one of `keep`. Which others are kept is in
                `polyfed.simulation.storage.predictions.prediction_store`.

        Raises:
            UserError: the predictions were not kept, or the file of the run directory is missing or damaged.
        """
        self._check_client(client, "predictions")
        if self.prediction_store is None:
            raise UserError("no predictions of this run were kept")
        return self.prediction_store.get_predictions(
            client, split, self.kept_checkpoint.round if round is None else round
        )

    def cross_site(self) -> CrossSiteScores:
        """Returns the scores of every client's network on every client's test examples, with intervals.

        The networks are those of `model`. `print` shows the matrix; `table()` has a row for each cell.

        Raises:
            UserError: the clients are real sites, whose models and test examples stay there.

        >>> from polyfed.algorithms import FedAvg
        >>> from polyfed.simulation.federate import federate
        >>> from polyfed.testing import small_clients
        >>> run = federate(small_clients(2), FedAvg(), rounds=1, workers=0)
        >>> [[cell.model_of for cell in row] for row in run.cross_site().matrix()]
        [['client-0', 'client-0'], ['client-1', 'client-1']]
        """
        return self.cross_site_scores or compute_cross_site(self.federation, self.kept_checkpoint)

    @property
    def _table_transform(self) -> Any:
        """Returns the transform of the first client, which knows the column of sites if the data are a table."""
        first = self.federation.client_registry.ids[0]
        self._check_client(first, "models")
        return self.federation.clients[first].train.transform

    def _check_client(self, client: str, folder: str) -> None:
        """Checks that the run has this client and its data in this process; raises a `UserError` if not."""
        clients = self.federation.clients
        if not isinstance(client, str | int):  # an array has no hash, and its values are not shown
            raise UserError(
                "the id of a client comes first, as in run.model('north') and run.predict('north', x); got "
                f"{type(client).__name__}"
            )
        if client not in clients:
            if client in self.federation.client_registry.ids:
                raise UserError(f"the {folder} of {client!r} are at its site, in the folder {folder} of its state-dir")
            raise UserError(f"no client {client!r} in this run; {did_you_mean(client, clients)}")

    def _engine_and_task(self, client: str) -> tuple[InProcessEngine, ClientTask]:
        """Builds an engine for one client, and the task that exports the client's network from the kept checkpoint."""
        self._check_client(client, "models")
        federation = self.federation
        device = choose_device(federation.settings.device)
        engine = InProcessEngine(federation.algorithm, [federation.clients[client]], device, federation.metrics)
        with exclusive_single_torch_thread_with_grad():
            return engine, federation.build_single_task("export", client, self.kept_checkpoint)

    def warmstart(self, model: Architecture, data: Any, *, test: Any = None, id: str = "unseen") -> "WarmStart":
        """Generates a new client's weights with the hypernetwork of a `flha_ghn` run.

        The result has its scores before and after one epoch of training the head, and the parameters that could not be
        generated (see `polyfed.simulation.results.unseen_clients`).

        Args:
            model: builds the unseen client's network, as `Client.model`; its layers may be connected in any way.
            data: the unseen client's examples, as `Client.train`; they are not sent anywhere.
            test: examples for the score; None holds out a fifth of `data`.
            id: the unseen client's name. With the id of a client, the random draws are that client's.

        Raises:
            UserError: a run of another method, or a network that does not suit the data.

        >>> from polyfed.algorithms import FLHAGHN
        >>> from polyfed.simulation.federate import federate
        >>> from polyfed.testing import small_clients
        >>> run = federate(small_clients(), FLHAGHN(head="factored"), rounds=1, workers=0)
        >>> data = run.federation.clients["client-0"].train
        >>> def build_network():
        ...     return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        >>> start = run.warmstart(build_network, data)
        >>> start.coverage, start.held_out, len(start.model)
        (1.0, 4, 4)
        """
        from polyfed.simulation.results.unseen_clients import TrainedServer, build_unseen_client, compute_warm_start

        federation = self.federation
        server = TrainedServer(federation.algorithm, self.last.state, federation.settings, self.last.round)  # type: ignore[arg-type]
        task = federation.task
        client, held_out = build_unseen_client(model, data, test=test, id=id, task=task, seed=federation.settings.seed)
        return compute_warm_start(server, client, held_out=held_out)
