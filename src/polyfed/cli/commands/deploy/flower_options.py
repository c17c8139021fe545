"""Parses the command lines of `polyfed flower`: one parser for each of its commands, with help of its own."""

import argparse
from collections.abc import Callable, Mapping

from polyfed.cli.commands.argv import CommandParser, expand_optional_path, has_help_flag, parse_whole_number
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.atomic_files import expand_user_path

_PORT = 8000
_CONNECTION = "fed"


def parse_and_run_flower_command(argv: list[str]) -> None:
    """Implements `polyfed flower`: deploys a federation to real sites with the framework Flower."""
    action, words = (argv[0], argv[1:]) if argv else ("", [])
    if action not in _PARSERS:
        if not action or has_help_flag(argv):
            _print_overview()
            return
        raise UserError(f"polyfed flower takes a command, got {action!r}; {did_you_mean(action, _PARSERS)}")
    parser = _PARSERS[action]()
    options, (directory,) = parser.parse_options_and_words(words, "one folder")
    folder = expand_user_path(directory, "the project")
    from polyfed.cli.commands.deploy import doctor_command, flower_command, health_command

    if action == "init":
        flower_command.write_flower_project(folder, options.sites or "4")
    elif action == "up":
        loss = "" if options.loss is None else f' loss="{options.loss}"'
        node_config = f"{options.node_config or ''}{loss}"
        flower_command.run_local_trial(folder, options.sites, options.port or _PORT, node_config)
    elif action == "doctor":
        port = options.port or _PORT
        doctor_command.check_folder_and_print_findings(folder, port, options.address, as_json=options.json)
    elif action == "health":
        health_command.check_health_and_print_findings(folder)
    elif action == "status":
        flower_command.show_deployment_status(folder, options.connection or _CONNECTION, as_json=options.json)
    else:
        flower_command.submit_run_and_follow_log(
            folder,
            out=expand_optional_path(options.out, "--out"),
            resume=expand_optional_path(options.resume, "--resume"),
            allow_disclosure=options.allow_disclosure,
            changes=options.set,
            connection=options.connection or _CONNECTION,
        )


def _print_overview() -> None:
    print(
        "usage: polyfed flower init|up|run|status|doctor|health DIR [OPTIONS]   (polyfed flower COMMAND --help: more)\n"
    )
    print("Deploys a federation to real sites over Flower (docs/deploy.md); pip install 'polyfed[flower]'.\n")
    for name, build in _PARSERS.items():
        print(f"  {name:8}{build().description}")


def _parse_port(text: str) -> int:
    """Converts the text of an option's value to the number of a TCP port."""
    if not 0 < (port := parse_whole_number(text)) < 2**16:
        raise argparse.ArgumentTypeError(f"must be a port from 1 to 65535, got {text!r}")
    return port


def _build_init_parser() -> CommandParser:
    parser = CommandParser(
        "polyfed flower init DIR [--sites NAMES]",
        "Writes a ready project for these sites.",
        "example: polyfed flower init fed --sites north,south",
    )
    parser.add_option("--sites", "NAMES", "names with commas between, or a number (default: 4)")
    return parser


def _build_up_parser() -> CommandParser:
    parser = CommandParser(
        "polyfed flower up DIR [OPTIONS]",
        "Tries the project on this machine, with SuperLink and SuperNodes, TLS and keys, until Ctrl-C.",
        "example: polyfed flower up fed; then, in another terminal: polyfed flower run fed",
    )
    parser.add_option("--sites", "NAMES", "only these sites, with commas between, or a number (default: all)")
    parser.add_option("--port", "P", "port of the SuperLink (default: 8000)", _parse_port)
    parser.add_option("--node-config", "WORDS", "node configuration of all sites: 'KEY=VALUE ...'")
    parser.add_option("--loss", "MODULE:NAME", "the loss that sites minimise; its module stands next to site.py")
    return parser


def _build_run_parser() -> CommandParser:
    parser = CommandParser(
        "polyfed flower run DIR [OPTIONS]",
        "Submits a run; prints its log on standard error, and its table at the end.",
        "example: polyfed flower run fed --set rounds=3 --set algorithm.lr=0.05",
    )
    parser.add_option("--connection", "NAME", "Flower's name of the SuperLink (default: fed)")
    parser.add_option("--out", "DIR", "run directory to create (default: the next in DIR/runs)")
    parser.add_option("--resume", "DIR", "continue the run in this directory")
    parser.add_flag("--allow-disclosure", "the server may learn weights or architectures")
    parser.add_option("--set", "KEY=VALUE", "another value of the configuration; repeatable", repeatable=True)
    return parser


def _build_status_parser() -> CommandParser:
    parser = CommandParser(
        "polyfed flower status DIR [OPTIONS]",
        "Prints nodes, runs, and the newest round.",
        "example: polyfed flower status fed --json",
    )
    parser.add_option("--connection", "NAME", "Flower's name of the SuperLink (default: fed)")
    parser.add_flag("--json", "print JSON (docs/json.md)")
    return parser


def _build_doctor_parser() -> CommandParser:
    parser = CommandParser(
        "polyfed flower doctor DIR [OPTIONS]",
        "Checks the folder of a project, a server or a site: certificates, keys, ports, clocks, versions, disk and "
        "configuration; says how to fix what is wrong, and then exits with status 1.",
        "example: polyfed flower doctor /srv/site --address server.example.org:9092",
    )
    parser.add_option("--port", "P", "port of the SuperLink (default: 8000)", _parse_port)
    parser.add_option("--address", "HOST:PORT", "address of the SuperLink to reach")
    parser.add_flag("--json", "print JSON (docs/json.md)")
    return parser


def _build_health_parser() -> CommandParser:
    return CommandParser(
        "polyfed flower health DIR",
        "Says whether a site reaches the server, or a server answers; exits with status 1 if not. DIR is a state-dir, the "
        "folder of a site or a server with its unit, or a project whose trial runs.",
        "example: polyfed flower health /etc/polyfed",
    )


_PARSERS: Mapping[str, Callable[[], CommandParser]] = {
    "init": _build_init_parser, "up": _build_up_parser, "run": _build_run_parser, "status": _build_status_parser,
    "doctor": _build_doctor_parser, "health": _build_health_parser,
}  # fmt: skip
