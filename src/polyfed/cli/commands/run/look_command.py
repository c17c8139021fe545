"""Implements `polyfed look`: describes the data of all sites side by side before training."""

import json
import sys
import warnings
from shlex import quote
from typing import TYPE_CHECKING, Any

from polyfed.cli.commands.argv import CommandParser, expand_optional_path, expand_page_path
from polyfed.core.errors import UserError
from polyfed.core.io.text.advice import keep_advice_for_terminal
from polyfed.core.io.text.number_format import capitalize_first, end_with_period
from polyfed.core.io.text.terminal_text import sanitise_for_terminal

if TYPE_CHECKING:
    from polyfed.simulation.experiment import Experiment


def look_command(argv: list[str]) -> None:
    """Parses the command line of `polyfed look`, and prints a description of the data of all sites, side by side."""
    from polyfed.cli.commands.options import configuration_parser, recipes, table_checks, written_configuration

    parser = CommandParser(
        "polyfed look [RECIPE|config.yaml|DATA] [OPTIONS]",
        "Shows the data of all sites side by side before anything is trained: of each column the missing values, mean, "
        "spread, zeros, percentiles and a histogram, and of the target how many examples of each class, or events; marks "
        "what differs (an empty column, a number that stands for \"not measured\", another unit, few events), and says what "
        "it means. DATA is a CSV or Parquet file, or the name of a data set (polyfed list data).",
        "All other options are those of polyfed run: polyfed look heart.csv --data.target ill --data.site hospital.",
    )  # fmt: skip
    parser.add_option(
        "--out", "FILE", "HTML page to write, with histograms side by side, which needs no network; or a .yaml file for "
        "these options, which polyfed run, compare, data and look take in place of them",
    )  # fmt: skip
    parser.add_flag("--json", "print JSON instead of text")
    parser.add_flag(
        "--between-sites", "show what real sites would: by messages, without counts of fewer than five rows"
    )
    recipes.add_scale_and_variant_options(parser)
    parser.add_flag("--quiet", "with --out: print the path of the file alone")
    parser.print_help_and_exit_if_asked(argv)
    options, words = parser.parse_declared_options(argv)
    recipe = recipes.pop_recipe(words, options.scale, options.variant)
    config = configuration_parser.parse_configuration(
        words, recipe.configuration, "polyfed look", command_options=parser.option_names
    )
    table_checks.check_data_section(config.get("data"), is_for_training=False)
    if options.quiet and (options.out is None or options.json):
        raise UserError(
            "--quiet leaves nothing to print without --out, or with --json; give --out FILE, or leave it out"
        )
    is_configuration = str(options.out).lower().endswith((".yaml", ".yml"))
    out = expand_optional_path(options.out, "--out") if is_configuration else expand_page_path(options.out)
    if is_configuration and out is not None:
        written_configuration.check_can_write_configuration(out)
    from polyfed.report.look import look
    from polyfed.report.page.panels.look import write_look_page
    from polyfed.simulation.experiment import build_experiment

    experiment = build_experiment(config)
    with warnings.catch_warnings(record=True) as caught:  # above a long description nobody would read them
        warnings.simplefilter("always", UserWarning)  # of polyfed; others keep the filters that they have
        clients, class_names, refusals = _load_clients(experiment)
        summary = look(
            clients,
            class_names=class_names,
            between_sites=options.between_sites,
            secure=options.between_sites and experiment.settings.secure,
        )
    remarks = [keep_advice_for_terminal(f"Training refuses this: {refusal}") for refusal in refusals]
    remarks += list(dict.fromkeys(keep_advice_for_terminal(str(warning.message)) for warning in caught))
    if out is not None and is_configuration:
        written_configuration.write_configuration(config, out)
    elif out is not None:
        write_look_page(summary, out, remarks)
    if options.json:
        print(json.dumps(summary.to_json_dict() | {"warnings": remarks}, ensure_ascii=False, indent=1))
    elif not options.quiet:
        print("\n".join(map(keep_advice_for_terminal, str(summary).splitlines())))
        if remarks:
            lines = [f"- {end_with_period(capitalize_first(remark))}" for remark in remarks]
            print("", "Besides:", *map(sanitise_for_terminal, lines), sep="\n")
    if out is not None:
        place = quote(sanitise_for_terminal(str(out)))
        said = f"The page: {out}"
        if is_configuration:
            refused = "Training refuses the data as said above: give this command again with the options named there"
            said = f"The options are in {place}. {refused if refusals else f'Next: polyfed compare {place}'}"
        print(out if options.quiet else said, file=sys.stderr if options.json else sys.stdout)


def _load_clients(experiment: "Experiment") -> tuple[list[Any], tuple[str, ...], list[str]]:
    """Loads the data of an experiment's clients without their networks, the names of the classes, and what training refuses.

    Rows and columns of a table that training refuses are left out.
    Preprocessing over all sites is not fitted: it may refuse what a look must show.
    """
    from polyfed.core.algorithm import Client
    from polyfed.core.seeds import derive_seed
    from polyfed.data import make_clients
    from polyfed.data.sources.table_file import TableFile

    source, refusals = experiment.source, list[str]()
    if isinstance(source, TableFile):
        table = source.read(source.path)
        source, refusals = source.leave_out_refused(table)
        pool = source.build_dataset(table)
    else:
        pool = source.load()
    seed = derive_seed(experiment.settings.seed, "partition")
    parts, _ = make_clients(pool, experiment.split, experiment.partition, seed, experiment.shifts, None, False)
    clients = [Client(d.id, None, d.train, d.test, d.val, task=pool.task) if len(d.test) else d for d in parts]
    return clients, tuple(map(str, pool.class_names)), refusals
