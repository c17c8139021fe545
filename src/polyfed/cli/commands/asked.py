"""What `compare` and `warmstart` are asked for, read from the words of the command line before torch is imported."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from polyfed.cli.commands.words import flag, number, take
from polyfed.cli.outlines import outline
from polyfed.comparison.directory import DESCRIPTION
from polyfed.comparison.reading import Budget, Reading
from polyfed.core.code import trust_code
from polyfed.core.files import user_path

HERE = frozenset({"data.test_fraction", "data.augment"})  # of the split, what one unseen client alone can have


@final
@dataclass(frozen=True)
class Asked:
    """What the command line asks for beside the experiment.

    Args:
        algorithms: labels; empty for the experiment's method and its baselines.
        seeds: of the runs; None is 0 to 4, or one for each dealing of `resplit`.
        resplit: how many times each client's examples are dealt anew.
        method_config: a YAML file with the fields of methods, by label.
        budget, target: how results are read; None leaves what the directory says, or the defaults.
        tune: fields to search and their values or ranges, "lr=0.01,0.1,...;mu=0.01..1", or "none"; None and "grid" search
            the learning rate, None also beyond the grid.
        trials: runs a method has in the search, by Optuna; None tries all combinations.
        same_data: the first seed deals the data for all.
        no_references: no simple models beside the methods.
        parallel: runs at once.
        quiet: no progress.
        logger: places where the runs are tracked when all are finished.
    """

    algorithms: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None
    resplit: int | None = None
    method_config: Path | None = None
    budget: str | None = None
    target: float | None = None
    tune: str | None = None
    trials: int | None = None
    same_data: bool = False
    no_references: bool = False
    parallel: int | Literal["auto"] = "auto"
    quiet: bool = False
    logger: tuple[str, ...] = ()

    def reading(self, before: Reading | None = None) -> Reading:
        """Budget and target, over those that the directory has."""
        found = before or Reading()
        budget = found.budget if self.budget is None else Budget.parse(self.budget)
        return Reading(budget, found.target if self.target is None else self.target)


def read_words(words: list[str]) -> Asked:
    """Takes the command's own options from the words of the command line.

    Raises:
        UserError: a value that is none.

    >>> read_words(["--algorithms=local,fedavg", "--seeds", "4,5", "--quiet"]).seeds
    (4, 5)
    """
    algorithms, seeds, target = take(words, "--algorithms"), take(words, "--seeds"), take(words, "--target")
    method_config, parallel = take(words, "--method-config"), take(words, "--parallel") or "auto"
    trials, resplit, logger = take(words, "--trials"), take(words, "--resplit"), take(words, "--logger")
    if own := [name.strip() for name in (algorithms or "").split(",") if ":" in name]:
        trust_code(*own)
    several = "whole numbers with commas between, such as 0,1,2"
    return Asked(
        algorithms=tuple(name.strip() for name in algorithms.split(",")) if algorithms else (),
        seeds=None if seeds is None else tuple(number("--seeds", part, int, several) for part in seeds.split(",")),
        resplit=None if resplit is None else number("--resplit", resplit, int, "a whole number"),
        method_config=None if method_config is None else user_path(method_config, "--method-config"),
        budget=take(words, "--budget"),
        target=None if target is None else number("--target", target, float, "a number"),
        tune=take(words, "--tune"),
        trials=None if trials is None else number("--trials", trials, int, "a whole number"),
        same_data=flag(words, "--same-data"),
        no_references=flag(words, "--no-references"),
        parallel="auto" if parallel == "auto" else number("--parallel", parallel, int, "a whole number, or auto"),
        quiet=flag(words, "--quiet"),
        logger=tuple(name.strip() for name in logger.split(",")) if logger else (),
    )


def is_comparison(folder: str) -> bool:
    """Whether a folder holds a comparison."""
    return bool(folder) and (user_path(folder) / DESCRIPTION).exists()


def offered(key: str) -> bool:
    """Whether a key of a configuration is an option of this command: the fields of networks and sources, and what of the
    split one unseen client alone can have.

    >>> [offered(key) for key in ("model.name", "data.path", "data.clients", "data.partition.alpha", "rounds")]
    [True, True, False, False, False]
    """
    split = outline("polyfed.data.split", "Split")
    section, _, field = key.rpartition(".")
    if section == "data":
        return key in HERE or field not in {*split.__dataclass_fields__, "shifts"}
    return section == "model" or key == "model"
