"""Implements `polyfed audit`: tries to find a run's training examples from its networks and messages."""

import sys

from polyfed.cli.commands.argv import CommandParser, parse_whole_number
from polyfed.core.io.atomic_files import expand_user_path
from polyfed.core.io.text.terminal_text import sanitise_for_terminal
from polyfed.report.audit.effort import check_audit_effort


def audit_command(argv: list[str]) -> None:
    """Parses `polyfed audit`, and prints how well attacks find examples, columns and messages' inputs."""
    parser = CommandParser(
        "polyfed audit DIR [--runs K] [--client ID] [--iterations N] [--restarts R] [--json] [--quiet]",
        "Tries to find the training examples of the run in DIR from its clients' networks (membership inference): trains K "
        "runs like it, each on a random half of every client's training examples, and attacks each with the others. Prints "
        "the AUC of the attack and its true positive rates at 1 % and 10 % false positives, with 95 % intervals; and for "
        "tables how often columns of few values are guessed. Then tries to reconstruct images and label counts from the "
        "first messages, as a server could that keeps what it receives. Classification only. It takes K times as long as "
        "the run, and the search for images seconds to minutes a client. The result is also written to audit.json in DIR, "
        "for the page of `polyfed report`.",
    )
    parser.add_option("--runs", "K", "number of runs to train, at least 4 (default: 8)", parse_whole_number)
    parser.add_option("--client", "ID", "attack this client alone")
    parser.add_option(
        "--iterations", "N", "of the search for images (default: 300); 0 leaves it out", parse_whole_number
    )
    parser.add_option("--restarts", "R", "of the search for images (default: 2)", parse_whole_number)
    parser.add_flag("--json", "print JSON (docs/json.md)")
    parser.add_flag("--quiet", "print no progress")
    options, (directory,) = parser.parse_options_and_words(argv, "one run directory")
    from polyfed.cli.commands.options.early_checks import check_run_directory
    from polyfed.cli.commands.options.table_checks import check_client_of_models

    folder = expand_user_path(directory, "the run directory")
    check_run_directory(folder)
    num_runs = 8 if options.runs is None else options.runs
    iterations = 300 if options.iterations is None else options.iterations
    restarts = 2 if options.restarts is None else options.restarts
    check_audit_effort(num_runs, iterations, restarts)
    if options.client is not None:
        check_client_of_models(folder, options.client)
    from polyfed.cli.commands.terminal import print_json
    from polyfed.report.audit.audit import audit

    report = audit(
        folder,
        runs=num_runs,
        client=options.client,
        iterations=iterations,
        restarts=restarts,
        on_run=None if options.quiet else lambda number: print(f"audit: {number} of {num_runs} runs", file=sys.stderr),
    )
    if options.json:
        print_json(report.to_json_dict())
    else:
        print("\n".join(map(sanitise_for_terminal, str(report).splitlines())))
