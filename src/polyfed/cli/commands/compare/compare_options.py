"""What `compare` and `warmstart` are asked for, read from the words of the command line before torch is imported."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from polyfed.cli.commands.argv import parse_number, pop_flag, pop_option
from polyfed.cli.static_registry import resolve_without_import
from polyfed.comparison.budget import Budget, ResultCriteria
from polyfed.comparison.storage.comparison_directory import DESCRIPTION
from polyfed.core.io.atomic_files import expand_user_path
from polyfed.core.io.trusted_code import trust_code

UNSEEN_CLIENT_KEYS = frozenset(
    {"data.test_fraction", "data.augment"}
)  # of the split, what one unseen client alone can have


@final
@dataclass(frozen=True)
class CompareOptions:
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

    def budget_and_target(self, stored: ResultCriteria | None = None) -> ResultCriteria:
        """Budget and target, over those that the directory has."""
        defaults = stored or ResultCriteria()
        budget = defaults.budget if self.budget is None else Budget.parse(self.budget)
        return ResultCriteria(budget, defaults.target if self.target is None else self.target)


def pop_compare_options(argv: list[str]) -> CompareOptions:
    """Takes the command's own options from the words of the command line.

    Raises:
        UserError: a value that is none.

    >>> pop_compare_options(["--algorithms=local,fedavg", "--seeds", "4,5", "--quiet"]).seeds
    (4, 5)
    """
    algorithms, seeds, target = (
        pop_option(argv, "--algorithms"),
        pop_option(argv, "--seeds"),
        pop_option(argv, "--target"),
    )
    method_config, parallel = pop_option(argv, "--method-config"), pop_option(argv, "--parallel") or "auto"
    trials, resplit, logger = pop_option(argv, "--trials"), pop_option(argv, "--resplit"), pop_option(argv, "--logger")
    if code_names := [name.strip() for name in (algorithms or "").split(",") if ":" in name]:
        trust_code(*code_names)
    several = "whole numbers with commas between, such as 0,1,2"
    return CompareOptions(
        algorithms=tuple(name.strip() for name in algorithms.split(",")) if algorithms else (),
        seeds=None
        if seeds is None
        else tuple(parse_number("--seeds", part, int, several) for part in seeds.split(",")),
        resplit=None if resplit is None else parse_number("--resplit", resplit, int, "a whole number"),
        method_config=None if method_config is None else expand_user_path(method_config, "--method-config"),
        budget=pop_option(argv, "--budget"),
        target=None if target is None else parse_number("--target", target, float, "a number"),
        tune=pop_option(argv, "--tune"),
        trials=None if trials is None else parse_number("--trials", trials, int, "a whole number"),
        same_data=pop_flag(argv, "--same-data"),
        no_references=pop_flag(argv, "--no-references"),
        parallel="auto" if parallel == "auto" else parse_number("--parallel", parallel, int, "a whole number, or auto"),
        quiet=pop_flag(argv, "--quiet"),
        logger=tuple(name.strip() for name in logger.split(",")) if logger else (),
    )


def is_comparison_folder(folder: str) -> bool:
    """Whether a folder holds a comparison."""
    return bool(folder) and (expand_user_path(folder) / DESCRIPTION).exists()


def is_warmstart_key(key: str) -> bool:
    """Whether a key of a configuration is an option of this command: the fields of networks and sources, and what of the
    split one unseen client alone can have.

    >>> [is_warmstart_key(key) for key in ("model.name", "data.path", "data.clients", "data.partition.alpha", "rounds")]
    [True, True, False, False, False]
    """
    split = resolve_without_import("polyfed.data.partitioning.split", "Split")
    section, _, field = key.rpartition(".")
    if section == "data":
        return key in UNSEEN_CLIENT_KEYS or field not in {*split.__dataclass_fields__, "shifts"}
    return section == "model" or key == "model"
