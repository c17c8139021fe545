"""What a run gives back: metrics, a table, and each client's personal model."""

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import nn

from polyfed.algorithm import MODEL_WORDS, Architecture
from polyfed.engines import choose_device
from polyfed.engines.inprocess import InProcessEngine
from polyfed.errors import UserError, nearest
from polyfed.evaluation import SCORE
from polyfed.rounds import Federation, best_round
from polyfed.runs.checkpoint import Checkpoint
from polyfed.scratch import fill, new_module

if TYPE_CHECKING:
    from polyfed.newcomer import WarmStart

_ALONE = threading.RLock()


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside the block torch uses one thread, in this process as in each worker: sums in another order would give other
    results, and two busy processes with two threads each slow one another down tenfold. Federations in two Python threads of
    a process take turns: they would share scratch modules and torch's random state."""
    with _ALONE:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@final
@dataclass(frozen=True)
class Run:
    """A federation that has run.

    Attributes: `history`, the objects of `metrics.jsonl`; `out`, the run directory or None; `last`, the state after the
    last round.
    """

    federation: Federation
    history: Sequence[Mapping[str, Any]]
    last: Checkpoint
    out: Path | None = None

    @property
    def best_round(self) -> int | None:
        """The round with the best mean validation score; None if no client has validation examples."""
        return best_round(self.history)

    def table(self, at: Literal["last", "best"] = "last") -> list[dict[str, Any]]:
        """One row per client, then one of means: `client`, the task's score (`accuracy`, `auc` or `r2`), `loss`,
        `num_examples` (for training), where there are such sets `val_...` and `balanced_...`, and what the method evaluates
        beside the personal network (`trained_...` of pFedLA, `global_...` of pFedMe).

        Args:
            at: the last round, or the round with the best validation score (never the best on test).

        Raises:
            UserError: "best", but no client has validation examples.
        """
        if at not in ("last", "best"):
            raise UserError(f"table(at=) must be 'last' or 'best', got {at!r}")
        number = self.last.round if at == "last" else self.best_round
        if number is None:
            raise UserError("table(at='best') needs validation examples: give clients val=..., or --data.val_fraction")
        record = self.history[number - 1]
        roster = self.federation.roster
        task, known = roster.task, roster.num_examples
        metrics = {i: record["clients"].get(i, {}) for i in roster.ids}
        told = {name for values in metrics.values() for name in values}
        beside = sorted(name.removesuffix(SCORE[task]) for name in told if name.endswith(f"_{SCORE[task]}"))
        parts = dict.fromkeys(["", "val_", "balanced_", *beside])
        names = [
            f"{part}{name}" for part in parts for name in (SCORE[task], "loss") if f"{part}{name}" in told or not part
        ]
        rows: list[dict[str, Any]] = []
        for i, values in metrics.items():
            rows.append({"client": i, **{n: values.get(n) for n in names}, "num_examples": known.get(i)})
        means = {n: record["summary"].get(n, {}).get("mean") for n in names}
        total = sum(known.values()) / len(rows) if len(known) == len(rows) else None
        rows.append({"client": "mean", **means, "num_examples": total})
        return rows

    def model(self, client: str) -> nn.Module:
        """The personal network of a client after the last round, a module of its own in evaluation mode on the CPU. Where
        the server makes many clients' models at once (pFedLA, pFedHN), it is the one that was evaluated up to rounding.

        Raises:
            UserError: no client has this id.
        """
        clients = self.federation.clients
        if client not in clients:
            if client in self.federation.roster.ids:
                raise UserError(f"the model of {client!r} is at its site, in the folder models of its state-dir")
            raise UserError(f"no client {client!r} in this run; {nearest(client, clients)}")
        device = choose_device(self.federation.settings.device)
        engine = InProcessEngine(self.federation.algorithm, [clients[client]], device)
        with one_thread():
            task = self.federation.one_task("export", client, self.last)
            result = next(engine.run([task]))
            if result.failure is not None:
                raise result.failure
            assert result.weights is not None  # of a task of the phase "export", in this process
            factory = clients[client].model
            if factory is not None and self.federation.algorithm.requires & MODEL_WORDS:
                return fill(new_module(factory, seed=0), result.weights).eval()
            if result.description is not None:
                return fill(self.federation.algorithm.build(result.description), result.weights).eval()
            mine = (
                self.federation.algorithm.client_init(clients[client], task.run_seed)
                if task.mine is None
                else task.mine
            )
            return copy.deepcopy(self.federation.algorithm.personal(task.down, mine, clients[client], task.seed)).eval()

    def warmstart(self, model: Architecture, data: Any, *, test: Any = None, id: str = "newcomer") -> "WarmStart":
        """Weights at once for a network that took no part, from the hypernetwork of a run of `flha_ghn`: its score before
        and after one epoch on the head, and what could not be generated (see `polyfed.newcomer`).

        Args:
            model: builds the newcomer's network, as `Client.model`; its layers may be connected as they like.
            data: the newcomer's examples, as `Client.train`; they are not sent anywhere.
            test: examples for the score; None holds out a fifth of `data`.
            id: the newcomer's name. With the id of a client, the draws are that client's.

        Raises:
            UserError: a run of another method, or a network that does not suit the data.

        >>> from polyfed.algorithms import FLHAGHN
        >>> from polyfed.federation import federate
        >>> from polyfed.testing import small_clients
        >>> run = federate(small_clients(), FLHAGHN(head="factored"), rounds=1, workers=0)
        >>> data = run.federation.clients["client-0"].train
        >>> start = run.warmstart(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), data)
        >>> start.coverage, start.held_out, start.model
        (1.0, 4, Sequential(
          (0): Linear(in_features=6, out_features=8, bias=True)
          (1): ReLU()
          (2): Linear(in_features=8, out_features=3, bias=True)
        ))
        """
        from polyfed.newcomer import Server, as_newcomer, warmstart  # imported late: it builds on this module

        federation = self.federation
        server = Server(federation.algorithm, self.last.state, federation.settings, self.last.round)  # type: ignore[arg-type]
        task = next(iter(federation.clients.values())).task
        client, held_out = as_newcomer(model, data, test=test, id=id, task=task, seed=federation.settings.seed)
        return warmstart(server, client, held_out=held_out)
