"""`polyfed export`: a client's network of a run as a folder to take away."""

from polyfed.cli.commands.argv import has_help_flag, help_text, pop_option
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.trusted_code import import_object, trust_code

_OPTIONS = ("client", "to", "format", "model")


def export_command(argv: list[str]) -> None:
    """usage: polyfed export RUN --client ID --to FOLDER [--format FORMAT] [--model MODULE:FACTORY]

    Writes a trained network to a new folder, which needs neither polyfed nor the data: the network with its preprocessing,
    its weights, signature.json (names, shapes, types) and README.md, a model card with the method, data sizes, scores with
    intervals, what the server learned, and five lines that use it. For a table also inputs.py, which reads rows;
    polyfed predict FOLDER FILE reads them, too. RUN is a run directory, one of a method and seed in a comparison, or a
    site's own folder of a run (in its state-dir).

      --client ID      whose network (needed if the run has several)
      --to FOLDER      folder to create
      --format FORMAT  torchscript (default); onnx, compared by onnxruntime if that is installed (pip install
                       'polyfed[export]'); weights, these alone
      --model MODULE:FACTORY
                       builds the network, where RUN does not say how: of clients that were made in Python, or of a site
    """
    if has_help_flag(argv):
        print(help_text(export_command))
        return
    options = {name: pop_option(argv, f"--{name}") for name in _OPTIONS}
    if unknown := [word for word in argv if word.startswith("-")]:
        raise UserError(f"unknown option {unknown[0]}; {did_you_mean(unknown[0], [f'--{name}' for name in _OPTIONS])}")
    if len(argv) != 1:
        raise UserError(f"polyfed export takes one run directory, got {' and '.join(argv) or 'none'}")
    if options["to"] is None:
        raise UserError("polyfed export needs a folder to create: --to FOLDER")
    from polyfed.report.export.folder import export_model

    model = options["model"]
    if model is not None:
        trust_code(model)  # the user's own word
    factory = None if model is None else import_object(model)
    format_name = options["format"] or "torchscript"
    folder = export_model(argv[0], options["client"], options["to"], format=format_name, network=factory)  # type: ignore[arg-type]
    print(f"{folder} has {', '.join(sorted(path.name for path in folder.iterdir()))}; README.md says how to use it")
