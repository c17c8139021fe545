"""Implements `polyfed export`, which writes a trained network to a folder that can be used without polyfed."""

from shlex import quote
from typing import cast

from polyfed.cli.commands.argv import CommandParser
from polyfed.cli.commands.results.network_of_answer import check_is_run_of_client
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import expand_user_path
from polyfed.core.io.trusted_code import import_trusted_callable, trust_code
from polyfed.report.export.export_target import Format, check_export_target


def export_command(argv: list[str]) -> None:
    """Parses the command line of `polyfed export`, and writes the trained network of one client of a run to a folder."""
    parser = CommandParser(
        "polyfed export DIR --client ID --out FOLDER [--format FORMAT] [--model MODULE:FACTORY]",
        "Writes a trained network to a new folder that works without polyfed and without the data: the network with "
        "its preprocessing, its weights, signature.json (names, shapes, types) and README.md, a model card with the "
        "method, the numbers of examples, scores with intervals, what the server learned, and five lines that use it; "
        "for a table also inputs.py, which reads rows (polyfed predict FOLDER FILE does so, too). DIR is a run "
        "directory, one of a method and seed in a comparison, or a site's own folder of a run (in its state-dir).",
    )
    parser.add_option("--client", "ID", "client whose network it is (needed where the run has several)")
    parser.add_option("--out", "FOLDER", "folder to create")
    parser.add_option("--to", "FOLDER", "the same")
    parser.add_option(
        "--format", "FORMAT", "torchscript (default); onnx, which is checked with onnxruntime if that is installed "
        "(pip install 'polyfed[export]'); weights: the weights alone",
    )  # fmt: skip
    parser.add_option(
        "--model",
        "MODULE:FACTORY",
        "builds the network where DIR does not name it: for clients made in Python, or a site",
    )
    from polyfed.cli.commands.options.early_checks import check_has_models
    from polyfed.cli.commands.options.table_checks import check_client_of_models

    options, (run,) = parser.parse_options_and_words(argv, "one run directory")
    if (options.out is None) == (options.to is None):
        raise UserError(f"polyfed export needs {'a' if options.out is None else 'one'} folder to create: --out FOLDER")
    target = options.to if options.out is None else options.out
    folder, file_format = expand_user_path(run, "the run directory"), cast(Format, options.format or "torchscript")
    check_export_target(expand_user_path(target, "the folder to create"), file_format)
    client = f" --client {quote(options.client)}" if options.client is not None else ""
    words = f"{client} --out {quote(target)}{f' --format {file_format}' if options.format else ''}"
    check_is_run_of_client(folder, options.client, f"polyfed export {{run}}{words}")
    check_has_models(folder)
    check_client_of_models(folder, options.client)
    if options.model is not None:
        trust_code(options.model)  # the user's own word
    factory = None if options.model is None else import_trusted_callable(options.model)
    from polyfed.report.export.folder import export_model

    exported = export_model(run, options.client, target, format=file_format, model=factory)
    print(f"{exported} has {', '.join(sorted(path.name for path in exported.iterdir()))}; README.md says how to use it")
