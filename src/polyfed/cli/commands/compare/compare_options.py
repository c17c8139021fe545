"""Parses the options of `polyfed compare` without importing torch, which would take seconds."""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

from polyfed.cli.commands.argv import CommandParser, parse_decimal_number, parse_seeds, parse_whole_number, split_names
from polyfed.cli.commands.options.recipes import add_scale_and_variant_options
from polyfed.cli.static_registry import ALGORITHMS, StaticRegistry, read_value_or_outline_without_import
from polyfed.comparison.planning.budget import Budget, ResultCriteria
from polyfed.comparison.storage.comparison_directory import DESCRIPTION
from polyfed.comparison.tuning.grid import (
    EXTEND,
    EXTENDED_GRID,
    GRID,
    check_search_space,
    list_values_or_range_ends,
)
from polyfed.comparison.tuning.optuna_search import parse_number_or_text
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import expand_user_path
from polyfed.core.io.trusted_code import trust_code
from polyfed.core.io.values.number_checks import MAX_RUNS, check_whole_number
from polyfed.core.training.field_ranges import check_field_ranges

_DIRECTORY_OPTIONS = (
    "budget",
    "target",
    "parallel",
    "quiet",
    "logger",
    "tables",
    "json",
)  # of a directory
_WORDS = {"true": True, "false": False, "null": None}
_DEFAULT_METHODS = StaticRegistry("polyfed.comparison.planning.method_selection", "DEFAULT_METHODS")
UNSEEN_CLIENT_KEYS = frozenset({"data.test_fraction", "data.augment"})  # fields of a split that suit one client alone


@final
@dataclass(frozen=True)
class CompareOptions:
    """Holds the options of `polyfed compare` that do not describe the experiment.

    Args:
        algorithms: labels; empty for the experiment's method and its baselines.
        seeds: of the runs; None is 0 to 4, or one for each split of `resplit` or fold.
        resplit: how many times each client's examples are split again.
        folds, fold_repeats: folds of a cross-validation, and how many times they are drawn; None for none, and for once.
        stop_when_decided: whether folds are drawn again only until the mean's answer is decided.
        plan: whether only a pilot is run.
        method_config: a YAML file with the fields of methods, by label.
        budget, target: how results are read; None leaves what the directory says, or the defaults.
        tune: fields to search and their values or ranges, "lr=0.01,0.1,...;mu=0.01..1", or "none"; None and "grid" search
            the learning rate, None also beyond the grid.
        trials: runs a method has in the search, by Optuna; None tries all combinations.
        same_data: the first seed divides the data for all.
        no_references: no simple models in addition to the methods.
        parallel: runs at once.
        quiet: no progress.
        logger: places where the runs are tracked when all are finished.
        tables: whether scores, gains and costs of the methods are printed, too.
        json: whether JSON is printed instead.

    Raises:
        UserError: a value out of range, or two options that exclude each other.
    """

    algorithms: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None
    resplit: int | None = None
    folds: int | None = None
    fold_repeats: int | None = None
    stop_when_decided: bool = False
    plan: bool = False
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
    tables: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        self.result_criteria()
        for name, least in (("folds", 2), ("fold_repeats", 1), ("resplit", 1), ("trials", 1), ("parallel", 1)):
            value = getattr(self, name)
            if value not in (None, "auto"):
                check_whole_number(f"--{name.replace('_', '-')}", value, least, MAX_RUNS)
        if self.resplit is not None and self.folds is not None:
            raise UserError("--folds and --resplit both divide training and test examples; give one of them (--folds tests "
                            "every example once)")  # fmt: skip
        if self.trials is not None and self.tune in (None, "none"):
            raise UserError(f"--trials {self.trials} searches nothing without fields and their values or ranges; give them, "
                            "too: --tune lr=0.001..0.3")  # fmt: skip
        if self.json and self.tables:
            raise UserError("--json has the table, too; give it or --tables, not both")
        self.search_space()
        if duplicates := [label for label in self.algorithms if self.algorithms.count(label) > 1]:
            raise UserError(f"--algorithms has {duplicates[0]!r} twice; two kinds of one method need labels of their own in "
                            f"a file: --method-config, with {{name: {duplicates[0]}, ...}} below each")  # fmt: skip

    def search_space(self) -> dict[str, list[Any] | str] | None:
        """Returns the fields that `tune` names, each with its values or range; None if it names none.

        >>> CompareOptions(tune="lr=0.001..0.3; mu=1,2,...; weighted=true,false").search_space()
        {'lr': '0.001..0.3', 'mu': [1, 2, '...'], 'weighted': [True, False]}
        """
        if self.tune in (None, "none"):
            return None
        if self.tune in (GRID, EXTENDED_GRID):
            return {"lr": str(self.tune)}
        values_by_field: dict[str, list[Any] | str] = {}
        for part in str(self.tune).split(";"):
            name, _, values = (word.strip() for word in part.partition("="))
            if not values or name in values_by_field:
                raise UserError("--tune takes 'grid', or each field with its values or range, such as "
                                f"'lr=0.001..0.3;mu=0.1,1', got {self.tune!r}")  # fmt: skip
            is_range = ".." in values.removesuffix(EXTEND) or values in (GRID, EXTENDED_GRID)
            values_by_field[name] = (
                values
                if is_range
                else [_WORDS.get(v.strip(), parse_number_or_text(v.strip())) for v in values.split(",")]
            )
        return values_by_field

    def result_criteria(self, stored: ResultCriteria | None = None) -> ResultCriteria:
        """Returns budget and target score of the command line, or else of the comparison's directory.

        The budget is the rule that selects the round at which each run is compared.
        """
        defaults = stored or ResultCriteria()
        budget = defaults.budget if self.budget is None else Budget.from_text(self.budget)
        return ResultCriteria(budget, defaults.target if self.target is None else self.target)


def check_folder_allows_options(folder: Path, options: CompareOptions, extra_arguments: Sequence[str]) -> None:
    """Raises a `UserError` if an option or another argument contradicts a comparison's directory."""
    if misplaced := [
        *extra_arguments,
        *(
            f"--{f.name.replace('_', '-')}"
            for f in fields(options)
            if f.name not in _DIRECTORY_OPTIONS and getattr(options, f.name) != f.default
        ),
    ]:
        raise UserError(f"{folder} decides what is compared, so {misplaced[0]} cannot be given; with a directory, "
                        "polyfed compare takes --budget, --target, --parallel, --logger, --tables, --json, -q")  # fmt: skip


def check_searched_fields(options: CompareOptions, methods: Sequence[str | Mapping[str, Any]]) -> None:
    """Raises a `UserError` if `--tune` has a field of no method, or a number out of its range; for own methods nothing.

    Args:
        options: with the methods that are compared.
        methods: the sections of the configuration on methods, which are compared without `--algorithms`.
    """
    own_names = [entry if isinstance(entry, str) else str(entry["name"]) for entry in methods]
    names, space = options.algorithms or own_names, options.search_space() or {}
    if not all(name in ALGORITHMS for name in names):
        return
    kinds = [ALGORITHMS[name] for name in names] + list(_DEFAULT_METHODS.values())
    check_search_space(space, options.trials, {f.name for kind in kinds for f in fields(kind)})
    for name, values in space.items():
        for value in () if values in (GRID, EXTENDED_GRID) else list_values_or_range_ends(name, values):
            if isinstance(value, int | float):
                check_field_ranges(kinds[0].__name__, {name: value})


def build_compare_parser() -> CommandParser:
    """Builds the parser of the options of `polyfed compare`."""
    parser = CommandParser(
        "polyfed compare [RECIPE|config.yaml|DATA] [OPTIONS]\n"
        "       polyfed compare DIR [--budget BUDGET] [--target SCORE] [--logger NAMES]",
        "Compares methods on the same clients, with several seeds, the same clients in each round and the same "
        "amount of local training, and tunes each method alike. Says for each client: join, stay alone, or not decided. "
        "With DIR it continues a comparison that was stopped, or reads a finished one again.",
        "All other options are those of polyfed run, except --seed.",
    )
    parser.add_option(
        "--algorithms", "NAMES", "methods, with commas between (default: the recipe's method and its baselines); "
        "local, and for one architecture fedavg and fedavg_ft, always take part", split_names,
    )  # fmt: skip
    parser.add_option(
        "--seeds", "SEEDS", "one run of each method for each seed, or how many: 3 is 0,1,2, and 7, is seed 7 alone "
        "(default: 5, or as many as folds); each seed divides the data again unless --same-data, --resplit or --folds is "
        "given", parse_seeds,
    )  # fmt: skip
    parser.add_flag(
        "--same-data", "the first seed divides the data for all runs; only then are there answers per client"
    )
    parser.add_option(
        "--resplit", "K", "split each client's examples into training and test K times, with one seed each: gives "
        "answers per client, and suits small data better", parse_whole_number,
    )  # fmt: skip
    parser.add_option(
        "--folds", "K", "test every example once: divide each client's examples into K folds, with one seed each. Gives "
        "answers per client, and decides more than as many splits of --resplit (default: 5 where the clients are the "
        "data's own sites)", parse_whole_number,
    )  # fmt: skip
    parser.add_option(
        "--fold-repeats", "R", "draw the folds R times (default: once); needs R times the runs, and decides smaller gains",
        parse_whole_number,
    )  # fmt: skip
    parser.add_flag(
        "--stop-when-decided",
        "draw the folds again only until the mean's answer is decided, at most --fold-repeats times",
    )
    parser.add_flag(
        "--plan",
        "only say how many runs and minutes it takes, and how small a gain it decides, from a pilot of four runs",
    )
    parser.add_option(
        "--budget", "BUDGET", "best (default): each method at its best round by validation loss; there is no answer "
        "about a method that was still learning. steps: after all rounds. bytes or seconds: each method where it has "
        "spent what the cheapest one spends in total; or an amount, bytes=5e6 or seconds=30",
    )  # fmt: skip
    parser.add_option(
        "--target",
        "SCORE",
        "count rounds, MB and seconds until this score (default: the score of local)",
        _parse_score,
    )
    parser.add_option(
        "--method-config", "FILE", "YAML file with fields of methods, by name or by a label of your own that names its "
        "method",
    )  # fmt: skip
    parser.add_option(
        "--tune", "FIELDS", "none: keep all learning rates. Default: the best of 0.1, 0.3, 1, 3 and 10 times each "
        "method's "
        "own rate by validation examples, with up to two further values where the best is the smallest or largest. "
        '"lr=0.01,0.1;mu=0.1,1,...": all combinations, and with "..." further values',
    )  # fmt: skip
    parser.add_option(
        "--trials",
        "N",
        'search with N runs a method by Optuna, which also takes ranges: "lr=0.001..0.3"',
        parse_whole_number,
    )
    parser.add_flag("--cross-site", "also score every site's model on every other site's test examples")
    parser.add_flag("--no-references", "leave out simple models and the model of all data pooled")
    parser.add_option(
        "--parallel",
        "N",
        "runs at the same time (default: one per core where a round has few clients)",
        _number_or_auto,
    )
    parser.add_option(
        "--out", "DIR", "run directory (default: runs/compare-NAME-DATE-TIME); an existing one is continued"
    )
    parser.add_option(
        "--logger", "NAMES", "tensorboard, mlflow or both: gets all runs when they are finished; MLflow also gets the "
        "results and the networks of the first seed", split_names,
    )  # fmt: skip
    add_scale_and_variant_options(parser)
    parser.add_flag(
        "--tables", "print the tables of scores, gains and costs before the answers (polyfed show does so, too)"
    )
    parser.add_flag("--json", "print JSON (docs/json.md), of the plan with --plan")
    parser.add_flag("--quiet", "print no progress")
    return parser


@final
class ParsedCompareOptions(NamedTuple):
    """Holds the options of `polyfed compare`, those on folder and recipe, and all other words.

    Attributes:
        compare_options: the options of the comparison.
        folder_and_recipe_options: the options --out, --scale, --variant and --cross-site.
        remaining_words: all other words of the command line.
    """

    compare_options: CompareOptions
    folder_and_recipe_options: Namespace
    remaining_words: list[str]


def parse_compare_options(argv: Sequence[str]) -> ParsedCompareOptions:
    """Parses the options of `polyfed compare`, those on folder and recipe, and all other words.

    Raises:
        UserError: a value is missing or is not of its kind.

    >>> options, others, words = parse_compare_options(["--algorithms=local,fedavg", "--seeds", "4,5", "--rounds", "2"])
    >>> options.seeds, others.out, words
    ((4, 5), None, ['--rounds', '2'])
    """
    options, words = build_compare_parser().parse_declared_options(argv)
    others = Namespace(**{name: vars(options).pop(name) for name in ("out", "scale", "variant")})
    others.cross_site = vars(options).pop("cross_site") or None
    values = {name: value for name, value in vars(options).items() if value is not None}
    if "method_config" in values:
        values["method_config"] = expand_user_path(values["method_config"], "--method-config")
    if code_names := [name for name in values.get("algorithms", ()) if ":" in name]:
        trust_code(*code_names)
    return ParsedCompareOptions(CompareOptions(**values), others, words)


def _number_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"must be a whole number, or auto, got {text!r}") from None


def is_comparison_folder(folder: str) -> bool:
    """Returns True if `polyfed compare` has written a comparison to the folder."""
    return bool(folder) and (expand_user_path(folder) / DESCRIPTION).exists()


def is_warmstart_key(key: str) -> bool:
    """Returns True if the configuration key is an option of `polyfed warmstart`.

    It takes the fields of networks and sources, and those fields of the split that suit one client alone.

    >>> [is_warmstart_key(key) for key in ("model.name", "data.path", "data.clients", "data.partition.alpha", "rounds")]
    [True, True, False, False, False]
    """
    split = read_value_or_outline_without_import("polyfed.data.partitioning.split", "Split")
    section, _, field = key.rpartition(".")
    if section == "data":
        return key in UNSEEN_CLIENT_KEYS or field not in {*split.__dataclass_fields__, "shifts"}
    return section == "model" or key == "model"


def _parse_score(text: str) -> float:
    try:
        return parse_decimal_number(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}; for the column to predict give --data.target") from None
