"""Implements `polyfed data` and `polyfed graph`, which show the clients' data and a network's layers before training."""

from dataclasses import replace
from typing import get_args

from polyfed.cli.commands.argv import (
    CommandParser,
    expand_optional_path,
    option_name,
    parse_positive_integers,
    parse_yaml_value,
)
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.trusted_code import trust_code


def data_command(argv: list[str]) -> None:
    """Parses the command line of `polyfed data`, and shows each client's number of examples per class."""
    from polyfed.cli.commands.options import configuration_parser, early_checks, recipes, table_checks

    parser = CommandParser(
        "polyfed data [RECIPE|config.yaml|DATA] [OPTIONS]",
        "Prints how many training examples of each class, or with each label, every client has; for regression, "
        "the number of examples and the mean of their targets.",
        "All other options are those of polyfed run.",
    )
    parser.add_option("--plot", "FILE", "also draw it in this picture, .png or .svg")
    parser.add_flag("--json", "print JSON")
    parser.add_flag("--quiet", "print no table: draw the picture, or see whether the data can be used")
    recipes.add_scale_and_variant_options(parser)
    parser.print_help_and_exit_if_asked(argv)
    options, words = parser.parse_declared_options(argv)
    recipe = recipes.pop_recipe(words, options.scale, options.variant)
    with early_checks.name_file_in_errors(recipe.name, words):
        config = configuration_parser.parse_configuration(
            words, recipe.configuration, "polyfed data", command_options=parser.option_names
        )
    table_checks.check_data_section(config.get("data"))
    from polyfed.cli.commands.run import class_counts_table
    from polyfed.simulation.experiment import build_experiment

    plot = expand_optional_path(options.plot, "--plot")
    class_counts_table.show_class_counts(build_experiment(config), plot, as_json=options.json, quiet=options.quiet)


def graph_command(argv: list[str]) -> None:
    """Parses `polyfed graph`, and shows which of a network's layers a hypernetwork can generate."""
    parser = _build_graph_parser()
    parser.print_help_and_exit_if_asked(argv)
    model_options = {name: None for word in argv if (name := word.partition("=")[0]).startswith("--model.")}
    for name in model_options:
        parser.add_argument(name, dest=name)
    options, words = parser.parse_declared_options(argv)
    arguments = {
        name.removeprefix("--model."): parse_yaml_value(name, getattr(options, name)) for name in model_options
    }
    if unknown := [word for word in words if word.startswith("-")]:
        names = [*parser.option_names, "--model.NAME"]
        raise UserError(f"unknown option {unknown[0]}; {did_you_mean(option_name(unknown[0]), names)}")
    if len(words) != 1:
        raise UserError(f"polyfed graph takes one model, got {' and '.join(words) or 'none'}")
    from polyfed.cli.commands.options.early_checks import check_model_name

    check_model_name(words[0])
    if options.input is None:
        raise UserError("polyfed graph needs the shape of an example, for instance --input 3,32,32")
    sizes = (
        parse_positive_integers("--input", options.input, "3,32,32"),
        parse_positive_integers("--classes", options.classes or "10", "10"),
    )
    if len(sizes[1]) != 1:
        raise UserError(f"--classes must be one whole number of at least 1, got {options.classes!r}")
    from polyfed.algorithms.hypernetworks.flha_ghn import FLHAGHN, GraphForm
    from polyfed.cli.commands.run import layer_graph
    from polyfed.models import ModelSpec

    trust_code(words[0])
    spec = ModelSpec(words[0], arguments, sizes[0], sizes[1][0])
    method = FLHAGHN(joins=not options.no_joins)
    if options.graph is not None:
        if options.graph not in (forms := get_args(GraphForm)):
            raise UserError(f"--graph must be {' or '.join(forms)}, got {options.graph!r}")
        method = replace(method, graph=options.graph)
    if options.tables is not None:
        if options.tables not in ("local", "generated"):
            raise UserError(f"--tables must be local or generated, got {options.tables!r}")
        method = replace(method, tables=options.tables)
    layer_graph.print_and_draw_layer_graph(
        spec,
        method.contraction,
        has_integer_inputs=options.integer,
        plot=expand_optional_path(options.plot, "--plot"),
        catalogue=expand_optional_path(options.catalogue, "--catalogue"),
    )


def _build_graph_parser() -> CommandParser:
    parser = CommandParser(
        "polyfed graph MODEL --input SHAPE [OPTIONS]",
        "Prints the graph of a network's layers: which of them FLHA-GHN's hypernetwork can generate, and which stay "
        "with the client. MODEL is one of `polyfed list models`, or your own as module:factory.",
        "--model.NAME VALUE gives any other argument of MODEL.",
    )
    parser.add_option("--input", "SHAPE", "of one example, 3,32,32 for instance")
    parser.add_flag("--integer", "examples are whole numbers, such as tokens")
    parser.add_option("--classes", "N", "number of outputs, for a MODEL that takes num_classes (default: 10)")
    parser.add_option("--plot", "FILE", "also draw it in this picture, .png or .svg")
    parser.add_option("--catalogue", "FILE", "layer catalogue to write; an existing one is added to")
    parser.add_option(
        "--graph", "FORM", "layers: a norm is part of the layer before it; layers_and_norms: it is a node of its own; "
        "like the field graph of flha_ghn, with the same default",
    )  # fmt: skip
    parser.add_option(
        "--tables", "WHO", "local: tables of which the data choose rows stay with the client; generated: they are "
        "generated; like the field tables of flha_ghn, with the same default",
    )  # fmt: skip
    parser.add_flag("--no-joins", "no nodes for sums and concatenations, as joins=false of flha_ghn")
    return parser
