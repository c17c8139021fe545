"""`polyfed data` and `polyfed graph`: what clients and networks look like, before anything is trained."""

from dataclasses import replace
from typing import get_args

from polyfed.cli.commands.argv import (
    has_help_flag,
    help_text,
    parse_positive_integers,
    parse_yaml_value,
    pop_flag,
    pop_option,
)
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.atomic_files import expand_user_path
from polyfed.core.io.trusted_code import trust_code


def data_command(argv: list[str]) -> None:
    """usage: polyfed data [RECIPE|config.yaml] [OPTIONS]

    Prints how many training examples of each class, or with each label, every client has, and draws it; of regression their
    number and the mean of their targets.

      --plot FILE   picture to write, .png or .svg (default: data.png)
      --scale SCALE, --variant NAME
                    of a recipe that has them, as for polyfed run
      the other options are those of polyfed run
    """
    if has_help_flag(argv):
        print(help_text(data_command))
        return
    from polyfed.cli.commands.options import configuration_parser
    from polyfed.cli.commands.options.recipes import pop_recipe_configuration

    plot = pop_option(argv, "--plot") or "data.png"
    _, config, _ = pop_recipe_configuration(argv)
    config = configuration_parser.parse_configuration(argv, config, "polyfed data")
    from polyfed.cli.commands.run import run_command
    from polyfed.simulation.experiment import build_experiment

    run_command.show_class_counts(build_experiment(config), expand_user_path(plot, "--plot"))


def graph_command(argv: list[str]) -> None:
    """usage: polyfed graph MODEL --input SHAPE [OPTIONS]

    Prints and draws the graph of a network's layers: which of them FLHA-GHN's hypernetwork can generate, and which stay
    with the client. MODEL is one of `polyfed list models`, or your own as module:factory.

      --input SHAPE      of one example, for instance 3,32,32
      --integer          examples are whole numbers, such as tokens
      --classes N        outputs, for a MODEL that takes num_classes (default: 10)
      --model.NAME VALUE
                         any other argument of MODEL
      --plot FILE        picture to write, .png or .svg (default: graph.png)
      --catalogue FILE   layer catalogue to write, or to add to if it is there
      --graph FORM       layers: a norm is part of the layer before it, or layers_and_norms: it is a node; as the field graph
                         of flha_ghn, whose default is the default here
      --no-joins         no nodes for sums and concatenations, as joins=false of flha_ghn
    """
    if has_help_flag(argv):
        print(help_text(graph_command))
        return
    shape, classes = pop_option(argv, "--input"), pop_option(argv, "--classes")
    plot, catalogue = pop_option(argv, "--plot") or "graph.png", pop_option(argv, "--catalogue")
    integer, no_joins, form = pop_flag(argv, "--integer"), pop_flag(argv, "--no-joins"), pop_option(argv, "--graph")
    arguments = {}
    while option := next((word.partition("=")[0] for word in argv if word.startswith("--model.")), None):
        arguments[option.removeprefix("--model.")] = parse_yaml_value(option, str(pop_option(argv, option)))
    if unknown := [word for word in argv if word.startswith("-")]:
        configuration_parser = (
            "--input",
            "--integer",
            "--classes",
            "--plot",
            "--catalogue",
            "--graph",
            "--no-joins",
            "--model.NAME",
        )
        raise UserError(
            f"unknown option {unknown[0]}; {did_you_mean(unknown[0].partition('=')[0], configuration_parser)}"
        )
    if len(argv) != 1:
        raise UserError(f"polyfed graph takes one model, got {' and '.join(argv) or 'none'}")
    if shape is None:
        raise UserError("polyfed graph needs the shape of an example, for instance --input 3,32,32")
    sizes = (
        parse_positive_integers("--input", shape, "3,32,32"),
        parse_positive_integers("--classes", classes or "10", "10"),
    )
    if len(sizes[1]) != 1:
        raise UserError(f"--classes must be one whole number of at least 1, got {classes!r}")
    from polyfed.algorithms.hypernetworks.flha_ghn import FLHAGHN, GraphForm
    from polyfed.cli.commands.run import layer_graph as graphs
    from polyfed.models import ModelSpec

    trust_code(argv[0])
    spec = ModelSpec(argv[0], arguments, sizes[0], sizes[1][0])
    method = FLHAGHN(joins=not no_joins)
    if form is not None:
        if form not in (forms := get_args(GraphForm)):
            raise UserError(f"--graph must be {' or '.join(forms)}, got {form!r}")
        method = replace(method, graph=form)  # type: ignore[arg-type]
    file = None if catalogue is None else expand_user_path(catalogue, "--catalogue")
    graphs.show_layer_graph(
        spec, method.contraction, integer=integer, plot=expand_user_path(plot, "--plot"), catalogue=file
    )
