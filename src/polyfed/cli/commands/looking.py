"""`polyfed data` and `polyfed graph`: what clients and networks look like, before anything is trained."""

from dataclasses import replace
from typing import get_args

from polyfed.cli.commands.words import asked_for_help, flag, help_of, positive, take, value_of
from polyfed.core.code import trust_code
from polyfed.core.errors import UserError, nearest
from polyfed.core.files import user_path


def data(words: list[str]) -> None:
    """usage: polyfed data [RECIPE|config.yaml] [OPTIONS]

    Prints how many training examples of each class, or with each label, every client has, and draws it; of regression their
    number and the mean of their targets.

      --plot FILE   picture to write, .png or .svg (default: data.png)
      --scale SCALE, --variant NAME
                    of a recipe that has them, as for polyfed run
      the other options are those of polyfed run
    """
    if asked_for_help(words):
        print(help_of(data))
        return
    from polyfed.cli.commands import options
    from polyfed.cli.commands.recipes import chosen

    plot = take(words, "--plot") or "data.png"
    _, config, _ = chosen(words)
    config = options.parse(words, config, "polyfed data")
    from polyfed.cli.commands import running
    from polyfed.simulation.experiment import from_config

    running.show_data(from_config(config), user_path(plot, "--plot"))


def graph(words: list[str]) -> None:
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
    if asked_for_help(words):
        print(help_of(graph))
        return
    shape, classes = take(words, "--input"), take(words, "--classes")
    plot, catalogue = take(words, "--plot") or "graph.png", take(words, "--catalogue")
    integer, edges, form = flag(words, "--integer"), flag(words, "--no-joins"), take(words, "--graph")
    arguments = {}
    while given := next((word.partition("=")[0] for word in words if word.startswith("--model.")), None):
        arguments[given.removeprefix("--model.")] = value_of(given, str(take(words, given)))
    if unknown := [word for word in words if word.startswith("-")]:
        options = (
            "--input",
            "--integer",
            "--classes",
            "--plot",
            "--catalogue",
            "--graph",
            "--no-joins",
            "--model.NAME",
        )
        raise UserError(f"unknown option {unknown[0]}; {nearest(unknown[0].partition('=')[0], options)}")
    if len(words) != 1:
        raise UserError(f"polyfed graph takes one model, got {' and '.join(words) or 'none'}")
    if shape is None:
        raise UserError("polyfed graph needs the shape of an example, for instance --input 3,32,32")
    sizes = positive("--input", shape, "3,32,32"), positive("--classes", classes or "10", "10")
    if len(sizes[1]) != 1:
        raise UserError(f"--classes must be one whole number of at least 1, got {classes!r}")
    from polyfed.algorithms.flha_ghn import FLHAGHN, Graph
    from polyfed.cli.commands import graph as graphs
    from polyfed.models import ModelSpec

    trust_code(words[0])
    spec = ModelSpec(words[0], arguments, sizes[0], sizes[1][0])
    method = FLHAGHN(joins=not edges)
    if form is not None:
        if form not in (forms := get_args(Graph)):
            raise UserError(f"--graph must be {' or '.join(forms)}, got {form!r}")
        method = replace(method, graph=form)  # type: ignore[arg-type]
    file = None if catalogue is None else user_path(catalogue, "--catalogue")
    graphs.show(spec, method.contraction, integer=integer, plot=user_path(plot, "--plot"), catalogue=file)
