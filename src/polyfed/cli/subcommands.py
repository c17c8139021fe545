"""Parses the command line of each subcommand, and calls the function that implements the subcommand.

torch takes seconds to import, so it is imported only when nothing is left to say about the words.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from polyfed.cli.commands.argv import (
    CommandParser,
    expand_optional_path,
    expand_page_path,
    has_help_flag,
    option_name,
    parse_decimal_number,
    parse_whole_number,
    split_names,
)
from polyfed.cli.commands.short_help import COMPARE_HELP, RUN_HELP, asks_for_short_help, replace_help_all_by_help
from polyfed.comparison.storage.comparison_files import check_can_hold_comparison
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.atomic_files import expand_user_path
from polyfed.core.io.text.terminal_text import sanitise_for_terminal
from polyfed.simulation.storage.directory import check_can_become_run_directory, read_config
from polyfed.simulation.storage.more_rounds import check_more_rounds
from polyfed.simulation.storage.paths import choose_run_directory


def run(argv: list[str]) -> None:
    """Implements `polyfed run`: runs a federation and its baselines."""
    if asks_for_short_help(argv):
        print(RUN_HELP, end="")
        return
    from polyfed.cli.commands.options import configuration_parser, early_checks, recipes
    from polyfed.cli.commands.options.option_hints import describe_promotion, describe_untuned_defaults
    from polyfed.cli.commands.options.site_options import find_last_option_value

    argv = replace_help_all_by_help(argv)
    parser = CommandParser(
        "polyfed run [RECIPE|config.yaml|DATA] [OPTIONS]",
        "Runs a federation and its baselines, and prints a table. Sources, partitions, networks, methods and metrics "
        "of your own are given as MODULE:NAME (docs/configuration.md).",
        "--print-config prints the configuration. --help also shows the options of the choices made: "
        "--algorithm fedprox --algorithm.mu 0.1 --help.",
    )
    parser.add_option("--out", "DIR", "run directory to create (default: runs/NAME-DATE-TIME)")
    recipes.add_scale_and_variant_options(parser)
    parser.add_flag("--quiet", "print no progress")
    parser.add_flag("--json", "print JSON, as polyfed show DIR --json does (docs/json.md)")
    parser.add_flag("--cross-site", "also score every site's model on every other site's test examples")
    parser.add_option(
        "--logger", "NAME", "tensorboard or mlflow: follow the run there, too (pip install 'polyfed[tracking]'); "
        "resume continues it; MLflow also gets the clients' networks as models with a signature",
    )  # fmt: skip
    options, words = parser.parse_declared_options(argv)
    if has_help_flag(argv):
        parser.print_help()
        print("  --loss MODULE:NAME  your own loss, a function of outputs and targets\n")
    recipe, recipe_config, note = recipes.pop_recipe(words, options.scale, options.variant)
    words += ["--cross_site", "true"] if options.cross_site else []
    data = find_last_option_value("--data", words) or recipe_config.get("data")
    is_table = (data.get("name") if isinstance(data, Mapping) else data) == "table"
    start_config = {"baselines": ["local"], **recipe_config} if is_table else recipe_config  # each site alone, too
    with early_checks.name_file_in_errors(recipe, words):
        config = configuration_parser.parse_configuration(
            words, start_config, "polyfed run", command_options=parser.option_names
        )
        early_checks.check_settings(config, words)
    logger = [name.strip() for name in (options.logger or "").split(",")] if options.logger is not None else []
    early_checks.check_logger_names(logger)
    out = expand_optional_path(options.out, "--out")
    if out is not None:
        check_can_become_run_directory(out)
    from polyfed.cli.commands.run import run_command
    from polyfed.simulation.experiment import build_experiment

    experiment = build_experiment(config)
    for sentence in filter(None, (note, describe_promotion(recipe_config, config))):
        if not options.quiet:
            print(sanitise_for_terminal(sentence), file=sys.stderr)
    title = Path(recipe).stem if recipe else type(experiment.algorithm).__name__.lower()
    run_command.run_experiment(
        experiment, out or choose_run_directory(title), quiet=options.quiet, logger=logger, as_json=options.json
    )
    if not options.quiet and (untuned := describe_untuned_defaults(recipe_config, config, words)):
        print(untuned, file=sys.stderr)


def compare(argv: list[str]) -> None:
    """Implements `polyfed compare`: compares methods, or continues or shows a comparison in a directory."""
    if asks_for_short_help(argv):
        print(COMPARE_HELP, end="")
        return
    argv = replace_help_all_by_help(argv)
    from polyfed.cli.commands.compare.compare_options import (
        build_compare_parser,
        check_folder_allows_options,
        check_searched_fields,
        is_comparison_folder,
        parse_compare_options,
    )
    from polyfed.cli.commands.options import configuration_parser, early_checks, recipes

    if has_help_flag(argv):
        build_compare_parser().print_help()
    compare_options, others, words = parse_compare_options(argv)
    if words and is_comparison_folder(words[0]):
        misplaced = [*words[1:], *(f"--{name}" for name, value in vars(others).items() if value is not None)]
        comparison_folder = expand_user_path(words[0], "the folder")
        check_folder_allows_options(comparison_folder, compare_options, misplaced)
        from polyfed.cli.commands.compare import compare_command

        compare_command.resume_comparison(comparison_folder, compare_options)
        return
    recipe, config, note = recipes.pop_recipe(words, others.scale, others.variant)
    if any(option_name(word) == "--seed" for word in words):
        raise UserError("polyfed compare takes no --seed; give --seeds, one or several")
    words += ["--cross_site", "true"] if others.cross_site else []
    with early_checks.name_file_in_errors(recipe, words):
        config = configuration_parser.parse_configuration(
            words, config, "polyfed compare", command_options=build_compare_parser().option_names
        )
        early_checks.check_settings(config, words)
    early_checks.check_logger_names(compare_options.logger)
    if compare_options.method_config is None:  # which may name labels
        early_checks.check_algorithm_names(compare_options.algorithms)
        check_searched_fields(compare_options, [config["algorithm"], *config["baselines"]])
    else:
        read_config(compare_options.method_config)
    out = expand_optional_path(others.out, "--out")
    if out is not None:
        check_can_hold_comparison(out)
    from polyfed.cli.commands.compare import compare_command

    compare_command.check_fields_have_a_method(words, config["algorithm"]["name"], compare_options.algorithms)
    if note and not compare_options.quiet:
        print(sanitise_for_terminal(note), file=sys.stderr)
    title = Path(str(config["data"].get("path") or config["data"]["name"])).stem  # as its page is called
    compare_command.run_compare_command(config, compare_options, title, out or choose_run_directory(f"compare-{title}"))


def resume(argv: list[str]) -> None:
    """Implements `polyfed resume`: continues a run or a comparison that was stopped."""
    parser = CommandParser(
        "polyfed resume DIR [--rounds N] [--json] [--quiet]",
        "Continues a run that was stopped by Ctrl-C, kill -9 or a failure, with its baselines, or a comparison. The "
        "result is the one of an uninterrupted run. With --rounds also a finished run goes on, to more rounds than it had.",
    )
    parser.add_option("--rounds", "N", "number of all rounds, more than the run had", parse_whole_number)
    parser.add_flag("--json", "print JSON (docs/json.md): of a run as polyfed show, of a comparison as polyfed compare")
    parser.add_flag("--quiet", "print no progress")
    options, (directory,) = parser.parse_options_and_words(argv, "one run directory")
    from polyfed.cli.commands.compare.compare_options import CompareOptions, is_comparison_folder

    if is_comparison_folder(directory):
        if options.rounds is not None:
            raise UserError(
                f"{directory} is a comparison, whose runs all have the same rounds; for others give the command of it again "
                "with --rounds and another --out"
            )
        from polyfed.cli.commands.compare import compare_command

        compare_command.resume_comparison(
            expand_user_path(directory, "the folder"), CompareOptions(quiet=options.quiet, json=options.json)
        )
        return
    from polyfed.cli.commands.options.early_checks import check_is_no_part_of_comparison, check_run_directory

    folder = expand_user_path(directory, "the run directory")
    check_run_directory(folder)
    config = read_config(folder)
    if options.rounds is not None:
        check_more_rounds(folder, config, options.rounds)
    if "data" not in config:
        check_is_no_part_of_comparison(folder)
    from polyfed.cli.commands.run import run_command

    run_command.resume_experiment(folder, rounds=options.rounds, quiet=options.quiet, as_json=options.json)


def warmstart(argv: list[str]) -> None:
    """Implements `polyfed warmstart`: generates unseen clients' weights with a run's hypernetwork."""
    from polyfed.cli.commands.compare.compare_options import is_warmstart_key
    from polyfed.cli.commands.options import configuration_parser
    from polyfed.cli.commands.options.early_checks import check_gives_weights, check_run_directory

    parser = CommandParser(
        "polyfed warmstart DIR [OPTIONS]",
        "Generates weights for unseen clients with the hypernetwork of the run in DIR, a run of flha_ghn, then trains "
        "the linear head for one epoch. Prints the share of generated weights, and the scores before and after. "
        "Without options it does so for all unseen clients that the run kept (--data.unseen).",
        "Also: --model NAME, the network, built-in or module:factory, with --model.FIELD VALUE (default: the unseen "
        "client's own); --data NAME, somebody's own data instead of an unseen client's, with --data.FIELD VALUE, which "
        "needs --model and is scored on the source's common test set, or without one (or with --data.test-fraction) on "
        "a held-out share. --help after --model NAME or --data NAME shows their fields.",
    )
    parser.add_option("--unseen", "ID", "one of these unseen clients alone")
    parser.add_option("--client", "ID", "instead, a client of the run, which changes its network to --model")
    parser.add_option(
        "--epochs", "E", "then train the whole network for E epochs, from the generated weights and from scratch",
        parse_whole_number,
    )  # fmt: skip
    parser.add_option("--lr", "RATE", "of these epochs (default: the run's)", parse_decimal_number)
    parser.add_option("--scratch-lr", "RATE", "of the epochs from scratch (default: --lr)", parse_decimal_number)
    parser.add_option("--plot", "FILE", "picture of both curves, .png or .svg")
    parser.add_option("--out", "FILE", "weights to write, .safetensors (default: DIR/unseen/ID.safetensors)")
    options, words = parser.parse_declared_options(argv)
    recipe_words = [
        word for word in words[bool(words and not words[0].startswith("-")) :] if word not in ("-h", "--help")
    ]
    if not recipe_words:
        parser.print_help_and_exit_if_asked(argv)
    if has_help_flag(argv):
        configuration_parser.parse_configuration(
            [*recipe_words, "--help"], {}, "polyfed warmstart", is_warmstart_key
        )  # prints their options and ends
    if not words or words[0].startswith("-"):
        raise UserError(f"polyfed warmstart takes a run directory before its options, got {(words or ['none'])[0]}")
    folder = expand_user_path(words.pop(0), "the run directory")
    keys = [word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")]
    if unknown := [key for key in keys if key not in ("data", "model") and not key.startswith(("data.", "model."))]:
        known_options = [*parser.option_names, "--data", "--model"]
        raise UserError(
            f"unknown option {option_name(f'--{unknown[0]}')}; {did_you_mean(f'--{unknown[0]}', known_options)}"
        )
    check_run_directory(folder)
    check_gives_weights(folder)
    from polyfed.cli.commands.run import warmstart_command

    warmstart_options = warmstart_command.WarmStartOptions(
        unseen=options.unseen,
        client=options.client,
        epochs=options.epochs or 0,
        lr=options.lr,
        scratch_lr=options.scratch_lr,
        plot=expand_optional_path(options.plot, "--plot"),
        out=expand_optional_path(options.out, "--out"),
    )
    warmstart_command.run_warmstart(folder, words, warmstart_options)


def report(argv: list[str]) -> None:
    """Implements `polyfed report`: prints the scores of runs, and writes an HTML page about them."""
    parser = CommandParser(
        "polyfed report DIR... [--out FILE] [--subgroup COLUMN]... [--images] [--quiet]",
        "Prints the last scores of runs, of their baselines and of comparisons (polyfed compare), and what their "
        "methods have learned: operations and cells (fedpnas and its relatives), aggregation weights (pfedla, "
        "heur_pfedla), alignment of representations (fedhenn, fedhenn_homo).",
    )
    parser.add_option(
        "--out", "FILE", "HTML page with everything; it needs no network (default: report.html in the first DIR)"
    )
    parser.add_option(
        "--subgroup", "COLUMN",
        "also scores of groups of test examples, by one of their columns, such as sex, or a number that polyfed compare "
        "--data.subgroups age=50:65 divided; several: sex,age, or the option again",
        split_names, repeatable=True,
    )  # fmt: skip
    parser.add_flag(
        "--images", "segmentation: also each client's best, middle and worst test image, which are its data"
    )
    parser.add_flag("--quiet", "print the path of the page alone")
    parser.print_help_and_exit_if_asked(argv)
    options, directories = parser.parse_declared_options(argv)
    parser.refuse_unknown_option(directories)
    if not directories:
        raise UserError("polyfed report takes run directories, for instance polyfed report runs/a runs/b")
    page = expand_page_path(options.out)
    column_names = [name for names in options.subgroup for name in names if name]
    from polyfed.cli.commands.options.early_checks import check_run_directory

    folders = [expand_user_path(word, "the run directory") for word in directories]
    for folder in folders:
        check_run_directory(folder, allows_comparison=True)
    if column_names:
        from polyfed.report.data.subgroup_columns import check_columns_of_predictions

        check_columns_of_predictions(folders, column_names)
    from polyfed.cli.commands.results import report_command

    report_command.show_report(
        folders,
        out=page,
        subgroups=list(dict.fromkeys(column_names)),
        show_images=options.images,
        quiet=options.quiet,
    )


def reproduce(argv: list[str]) -> None:
    """Implements `polyfed reproduce`: runs the experiments of a table or figure of a paper."""
    from polyfed.cli.commands.papers import reproduce_command

    parser = CommandParser(
        "polyfed reproduce [PAPER TABLE] [OPTIONS]",
        "Runs the recipes of a table or figure of a paper, and prints the results next to the paper's, cell by cell; "
        "finished "
        "runs are not repeated. Without arguments it lists papers (flha, fedhenn, pfedla, fedpnas) and tables.",
        "All other options are those of polyfed run, --data.path FOLDER for instance.",
    )
    parser.add_option("--scale", "SCALE", "smoke (seconds, built-in data), cpu (default) or paper")
    parser.add_option(
        "--variant", "NAMES", "only these variants of its recipes, with commas between; * matches any text"
    )
    parser.add_option("--seeds", "SEEDS", "one run for each, 0,1,2 for instance (default: the recipe's seed)")
    parser.add_option(
        "--out", "DIR", "run directories and reproduce.json, the cells (default: runs/reproduce-PAPER-TABLE-SCALE)"
    )
    parser.add_flag("--quiet", "print no progress")
    parser.print_help_and_exit_if_asked(argv)
    options, words = parser.parse_declared_options(argv)
    reproduce_options = reproduce_command.ReproduceOptions(options.scale, options.variant, options.seeds, options.out)
    reproduce_command.reproduce_table_or_list_papers(words, reproduce_options, quiet=options.quiet)


def list_choices(argv: list[str]) -> None:
    """Implements `polyfed list`: prints the available methods, data sets, networks and recipes."""
    parser = CommandParser(
        "polyfed list [algorithms|data|models|recipes|METHOD...]",
        "Lists the names that there are to choose from; with an argument, what each of one kind is, or the card of "
        "a method: its paper, what it needs and discloses, and its fields.",
    )
    parser.add_flag("--json", "print JSON")
    parser.print_help_and_exit_if_asked(argv)
    options, kinds = parser.parse_declared_options(argv)
    parser.refuse_unknown_option(kinds)
    from polyfed.cli.commands import list_command
    from polyfed.cli.commands.terminal import print_json

    if options.json:
        print_json(list_command.describe_choices(kinds))
    else:
        list_command.show_choices(kinds)


def show(argv: list[str]) -> None:
    """Implements `polyfed show`: prints what a directory holds of a run or a comparison."""
    parser = CommandParser(
        "polyfed show DIR [--json]",
        "Prints what DIR holds of a run or a comparison, finished or not: the answers, a table, where things are, and how "
        "to go on. Nothing is trained, and clients made in Python are not needed.",
    )
    parser.add_flag("--json", "print JSON (docs/json.md)")
    options, (directory,) = parser.parse_options_and_words(argv, "one directory of a run or a comparison")
    from polyfed.cli.commands.results import show_command

    show_command.show_directory(expand_user_path(directory, "the directory"), as_json=options.json)
