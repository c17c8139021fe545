"""Defines `Comparison`: the results of a comparison as a user reads them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from polyfed.comparison.storage.comparison_files import write_results_from_memory
from polyfed.comparison.verdicts.answer import Answer, find_answer, list_answers
from polyfed.comparison.verdicts.answer_lines import build_answer_lines
from polyfed.comparison.verdicts.omissions import describe_omissions
from polyfed.comparison.verdicts.summary import comparison_html, plot_comparison
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.text.advice import keep_advice_for_python
from polyfed.core.io.text.number_format import count_with_noun
from polyfed.core.io.text.row_table import RowTable
from polyfed.core.io.text.site_words import say_sites_of
from polyfed.core.io.values.keyword_names import suggest_attributes
from polyfed.simulation.results.across_sites.cross_site_scores import (
    CrossSiteScores,
    average_cross_site,
    read_cross_site,
)
from polyfed.simulation.results.display.frames import build_frame
from polyfed.simulation.storage.directory import check_is_in_memory
from polyfed.simulation.storage.page_file import write_page_of

if TYPE_CHECKING:
    from polyfed.core.algorithm import Architecture, Client
    from polyfed.simulation.results.saved_run import SavedRun


@suggest_attributes
@final
@dataclass(frozen=True)
class Comparison:
    """Holds the results of a comparison of several methods on the same clients: scores, gains and conclusions.

    Attributes:
        results: the results, as `polyfed.comparison.storage.results_schema.ComparisonResults` describes them.
        out: the directory; None if the comparison was kept in memory.
        networks: what builds each client's network, where this process has compared the clients; for `run`.
    """

    results: Mapping[str, Any]
    out: Path | None = None
    networks: "Mapping[str, Architecture] | None" = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        seeds = count_with_noun(len(self.results["seeds"]), "seed")
        out = None if self.out is None else str(self.out)
        return f"Comparison({', '.join(self.results['methods']) or 'a plan, nothing trained'}; {seeds}, out={out!r})"

    def __str__(self) -> str:
        """Returns warnings, a line for each answer, and sentences on what was left out or failed."""
        warnings, heading, answers, omissions = self._texts
        return "\n".join([*warnings, *filter(None, [heading]), *answers, *omissions])

    def _repr_html_(self) -> str:
        warnings, heading, answers, omissions = self._texts
        texts = {"Before you rely on this:": warnings, f"{heading or 'Answers'}:": answers, "Left out:": omissions}
        return comparison_html(repr(self), texts, self.results, self.table())

    @property
    def _texts(self) -> tuple[list[str], str, list[str], list[str]]:
        """Returns warnings, the heading and lines of answers (without a heading sentences), and what was left out."""
        lines = build_answer_lines(self.results)
        heading, *answers = ["", *self.verdicts] if lines is None or len(lines.rows) == 1 else lines.to_text()
        texts = self.results.get("warnings", ()), answers, describe_omissions(self.results)
        warnings, answers, omissions = ([self._word_for_python(text) for text in group] for group in texts)
        return list(dict.fromkeys(warnings)), heading, answers, [text for text in omissions if text not in warnings]

    def _word_for_python(self, text: str) -> str:
        return say_sites_of(self.results.get("clients") or (), keep_advice_for_python(text))

    def to_frame(self) -> Any:
        """Returns the scores of the comparison as a pandas `DataFrame`.

        A row per method, seed and client, at the compared round; columns `method`, `seed`, `client`, `round`, and the
        score by its name. `pandas.DataFrame(found.table())` has a row per method.

        Raises:
            UserError: pandas is not installed.
        """
        score = self.results.get("score", "score")
        rows = [
            {"method": label, "seed": int(seed), "client": client, "round": run["round"], score: value}
            for label, method in self.results["methods"].items()
            for seed, run in method["runs"].items()
            for client, value in run["scores"].items()
        ]
        return build_frame(rows, ["method", "seed", "client", "round", score])

    def plot(self, *, ax: Any = None) -> Any:
        """Draws the answers' gains over the best that each client has alone, with intervals; returns matplotlib axes.

        The numbers are those of `answer_table`: the mean first, then each client, with the method of its answer. Without
        any gain the axes have the methods' mean scores.

        Args:
            ax: axes to draw into; None makes new ones.

        Raises:
            UserError: no method has a score.
        """
        return plot_comparison(self.results, self.answer_table(), self.table(), ax)

    def report(self, out: str | Path | None = None, *, images_of: "Sequence[Client] | None" = None) -> Path:
        """Writes the comparison's HTML page, as the command `polyfed report` does, and returns its path.

        Args:
            out: the page; None for `report.html` in the comparison's directory. One kept in memory needs it.
            images_of: clients of a segmentation, as they were compared; the page then has test images of each, truth and
                prediction, which are their data. None for no images.

        Raises:
            UserError: the page cannot be written, or a comparison kept in memory was given no place for it.
        """
        return write_page_of(self, out, images_of)

    def save(self, out: str | Path) -> Path:
        """Writes a comparison that was kept in memory to a new directory, which `polyfed.load` reads; returns its path.

        It holds the results, for tables, plots and the page, and no runs: only `compare(..., out=...)` keeps their networks
        and can be continued.

        Args:
            out: the folder, which must not exist or be empty.

        Raises:
            UserError: the comparison has a directory already, or the folder is taken or cannot be written.
        """
        check_is_in_memory("comparison", self.out, out)
        return write_results_from_memory(out, self.results)

    @property
    def answers(self) -> Sequence[str]:
        """Returns sentences on whom joining helps, as far as intervals decide, and what was left out."""
        return [*self.verdicts, *map(self._word_for_python, describe_omissions(self.results))]

    def answer(self, client: str | None = None) -> Answer:
        """Returns whether a client, or the mean over clients, gains by joining, with the gain and its interval.

        Args:
            client: its id; None or "mean" for the mean.

        Raises:
            UserError: there is no answer for this client.
        """
        answers = list_answers(self.results)
        is_mean = client == "mean" and all(answer.client != client for answer in answers)
        return find_answer(answers, None if is_mean else client)

    def answer_table(self) -> list[dict[str, Any]]:
        """Returns a dict for each answer, that of the mean first, whose `client` is "mean"; `print` shows them in columns.

        Columns: the attributes of `polyfed.Answer` without its sentence. `pandas.DataFrame` takes them as they are.
        """
        rows = ({**vars(answer), "client": answer.client or "mean"} for answer in list_answers(self.results))
        return RowTable({name: value for name, value in row.items() if name != "sentence"} for row in rows)

    @property
    def verdicts(self) -> Sequence[str]:
        """Returns the answers without what was left out, failed or could not be judged."""
        return list(map(self._word_for_python, self.results["verdicts"]))

    @property
    def skipped(self) -> Mapping[str, str]:
        """Returns `{method label: reason}` for each method that was not run because it does not suit the clients."""
        return dict(self.results["skipped"])

    @property
    def failed(self) -> Mapping[str, str]:
        """Returns `{method label: error message}` for each method with a run that failed."""
        return dict(self.results.get("failed", {}))

    def cross_site(self, method: str) -> CrossSiteScores:
        """Returns one method's scores of every model on every client's test examples, mean over runs.

        Raises:
            UserError: there is no such method, or its runs have no such scores.
        """
        runs = self._runs_of(method).values()
        folders = [self.out / run["path"] for run in runs if self.out is not None and run["path"] is not None]
        parts = [part for folder in folders if (part := read_cross_site(folder)) is not None]
        if not parts or len(parts) < len(runs):
            raise UserError(
                f"the runs of {method} have no scores of every client's model at every client; compare with "
                "cross_site=True and out=... from the beginning, or use run.cross_site()"
            )
        return average_cross_site(parts)

    def run(self, method: str, seed: int | None = None) -> "SavedRun":
        """Returns one of the compared runs, with its networks and predictions, as in `comparison.run("fml").table()`.

        Its `predictions` are those of the compared round, which give the scores of `to_frame`; its networks those of the
        round that the run keeps, which may be an earlier one.

        Args:
            method: its label in the comparison.
            seed: None for the first one.

        Raises:
            UserError: no such method or seed, or the comparison was kept in memory.
        """
        runs = self._runs_of(method)
        key = next(iter(runs)) if seed is None else str(seed)
        if key not in runs:
            raise UserError(f"{method} has no run with seed={seed!r}; choices: {', '.join(runs)}")
        if self.out is None or runs[key]["path"] is None:
            raise UserError("the runs of this comparison were kept in memory; compare with out=DIR")
        from polyfed.simulation.results.saved_run import load_run

        rounds = runs[key].get("rounds") or dict.fromkeys(runs[key]["scores"], runs[key]["round"])
        return replace(load_run(self.out / runs[key]["path"]), networks=self.networks, compared_rounds=rounds)

    def _runs_of(self, method: str) -> Mapping[str, Any]:
        methods: Mapping[str, Any] = self.results["methods"]
        if method not in methods:
            raise UserError(f"no method {method!r} in this comparison; {did_you_mean(method, methods)}")
        return methods[method]["runs"]  # type: ignore[no-any-return]

    def table(self) -> list[dict[str, Any]]:
        """Returns a dict of scores and costs for each method, None where undefined; `print` shows them in columns.

        Columns: `method`; `mean` over clients and seeds with its interval `low`, `high`; `worst` client, `p10` and `p90`;
        `gain` over training alone with `gain_low`, `gain_high`; `losers`, the number of clients that lose by joining; the
        corrected `p_reference` and `p_best`; `megabytes` (2^20 bytes) and `seconds` of a run.
        """
        rows = RowTable()
        for label, method in self.results["methods"].items():
            statistics = method["statistics"]
            low, high = statistics["interval"] or (None, None)
            gain_low, gain_high = statistics["gain_interval"] or (None, None)
            rows.append(
                {
                    "method": label,
                    "mean": statistics["mean"],
                    "low": low,
                    "high": high,
                    **{name: statistics[name] for name in ("worst", "p10", "p90")},
                    "gain": statistics["gain"],
                    "gain_low": gain_low,
                    "gain_high": gain_high,
                    **{name: statistics[name] for name in ("losers", "p_reference", "p_best")},
                    "megabytes": None if statistics["bytes"] is None else statistics["bytes"] / 2**20,
                    "seconds": statistics["seconds"],
                }
            )
        return rows
