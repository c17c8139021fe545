"""What `polyfed compare` prints last: warnings, an answer for the mean and each site in colour, and the next commands."""

import io
from pathlib import Path

import pytest
from rich.console import Console

import polyfed as pf
from polyfed.cli.commands.compare.answer_lines import print_answers
from polyfed.cli.commands.results.show_command import show_directory
from polyfed.cli.main import main
from polyfed.comparison.storage.comparison import Comparison
from polyfed.core.io.text.advice import keep_advice_for_python, keep_advice_for_terminal
from polyfed.testing import small_clients

WORDS = {"tune": "none", "references": False, "parallel": 1, "quiet": True}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    out = tmp_path_factory.mktemp("answers") / "c"
    return pf.compare(small_clients(3), ["fedprox"], rounds=1, seeds=[0], out=out, **WORDS)


def answer(client, word, gain, interval):
    sentence = f"{client}: not decided: fedavg is between (best estimate 1; 9 test examples)" if interval else ""
    return {"client": client, "answer": word, "method": "fedavg", "gain": gain, "interval": interval, "over": "local",
            "over_words": "training alone", "sentence": sentence if word == "undecided" else ""}  # fmt: skip


def results(sites):
    return {
        "warnings": ["Look out."], "score_unit": "%", "score_label": "accuracy", "level": 0.95,
        "reference": "local",
        "mean_answer": answer(None, "join", 0.041, [0.01, 0.06]), "answers": sites,
        "clients": [site["client"] for site in sites],
    }  # fmt: skip


def printed(content, out=Path("runs/a"), **words):
    console = Console(file=io.StringIO(), width=80, **words)
    print_answers(content, out, console)
    return console.file.getvalue()


def test_answers_are_ordered_and_the_next_commands_stand_last():
    sites = [answer("a", "undecided", 0.2, [-0.1, 0.5]), answer("b", "stay", -0.04, [-0.06, -0.02]),
             answer("c", "join", 0.03, [0.01, 0.05])]  # fmt: skip
    lines = [line.rstrip() for line in printed(results(sites)).splitlines()]
    assert lines == [
        "Look out.",
        "Gain in points of accuracy on new examples, with its 95 % interval",
        "join         mean over sites  fedavg +4.1 [+1.0, +6.0] over training alone",
        "join         c                fedavg +3.0 [+1.0, +5.0] over training alone",
        "stay alone   b                fedavg -4.0 [-6.0, -2.0] over training alone",
        "not decided  a                fedavg +20.0 [-10.0, +50.0] over training alone",
        "Page: polyfed report runs/a   Tables: polyfed show runs/a",
    ]


def test_an_answer_names_what_a_site_has_alone_in_words():
    row = answer("a", "join", 0.03, [0.01, 0.05]) | {"over_words": "the best alone, logistic regression"}
    assert "fedavg +3.0 [+1.0, +5.0] over the best alone, logistic regression\n" in printed(results([row]))


def test_results_of_an_earlier_release_have_no_words_of_alternatives():
    row = answer("a", "join", 0.03, [0.01, 0.05])
    earlier = {key: value for key, value in row.items() if key not in ("over", "over_words")}
    line = next(text for text in printed(results([earlier])).splitlines() if text.startswith("join  a"))
    assert line.rstrip().endswith("fedavg +3.0 [+1.0, +5.0]")


def test_an_answer_is_one_line_of_a_log():
    rows = [answer("a", "join", 0.03, [0.01, 0.05]) | {"method": "m" * 70}]
    assert f"{'m' * 70} +3.0 [+1.0, +5.0] over training alone" in printed(results(rows))
    assert len(printed(results(rows)).splitlines()) == 5
    assert len(printed(results(rows), force_terminal=True).splitlines()) > 5


def test_many_sites_are_counted():
    lines = printed(results([answer(f"s{k:02}", "join", 0.01 * k, [0.001, 0.5]) for k in range(30)])).splitlines()
    assert len(lines) == 13
    assert lines[-2] == "and 22 sites: join (polyfed show)"
    assert lines[3].split()[1] == "s29"


def test_answers_are_coloured_on_a_terminal_alone():
    sites = [answer("a", "undecided", 0.2, [-0.1, 0.5]), answer("b", "stay", -0.04, [-0.06, -0.02])]
    assert "\x1b" not in printed(results(sites))
    text = printed(results(sites), force_terminal=True, color_system="standard")
    assert all(f"{code}m{word}" in text for code, word in (("\x1b[1;32", "join"), ("\x1b[1;35", "stay alone")))
    assert "\x1b[33mnot decided" in text


def test_compare_report_and_show_print_the_same_answers(comparison, capsys):
    lines = printed(comparison.results, comparison.out).splitlines()
    assert len(lines) <= 12
    assert main(["report", str(comparison.out)]) == 0
    report = capsys.readouterr().out.splitlines()
    assert report[-1].startswith("Everything on one page:")
    console = Console(file=io.StringIO(), width=80)
    show_directory(comparison.out, console=console)
    shown = [line.rstrip() for line in console.file.getvalue().splitlines()]
    answers = [line.rstrip() for line in lines if line.startswith(("join", "stay", "not decided", "Gain"))]
    assert len(answers) == 5
    assert [line for line in shown if line in answers] == answers
    assert [line.rstrip() for line in report if line.rstrip() in answers] == answers
    assert shown[-1].startswith("go on: ")
    assert any("mean over clients" in line for line in report), "simulated clients are no sites"


def test_report_and_compare_have_one_scale(comparison, capsys):
    mean = comparison.table()[0]["mean"]
    assert main(["report", str(comparison.out)]) == 0
    assert f"{100 * mean:.1f} %" in capsys.readouterr().out
    assert main(["show", str(comparison.out)]) == 0
    assert f"{100 * mean:.1f}" in capsys.readouterr().out


def test_advice_names_the_option_here_and_the_argument_in_python():
    advice = (
        "The best value was at the edge: lr of fed. Try values beyond (tune={'lr': [...]}, --tune lr=VALUE,VALUE,...)."
    )
    results = {"warnings": [advice], "mean_answer": None, "verdicts": []}
    console = Console(file=io.StringIO(), width=60)
    print_answers(results, None, console)
    assert console.file.getvalue().strip().endswith("Try values beyond (--tune lr=VALUE,VALUE,...).")
    assert str(Comparison(results)).endswith("Try values beyond (tune={'lr': [...]}).")
    spaced = "leave it out (drop='mean radius', --data.drop 'mean radius'), or give group=... (--data.group)"
    assert keep_advice_for_python(spaced) == "leave it out (drop='mean radius'), or give group=..."
    assert keep_advice_for_terminal(spaced) == "leave it out (--data.drop 'mean radius'), or give --data.group"


def test_terminal_and_python_say_site_unless_the_clients_are_simulated():
    sites = [answer("north", "join", 0.03, [0.01, 0.05])]
    content = results(sites) | {
        "warnings": ["Each client is small."],
        "verdicts": ["mean over clients: join with fedavg"],
    }
    assert "Each site is small.\n" in printed(content)
    in_terminal = [line.rstrip() for line in printed(content, out=None).splitlines()]
    assert str(Comparison(content)).splitlines() == in_terminal
    assert in_terminal[2] == "join  mean over sites  fedavg +4.1 [+1.0, +6.0] over training alone"
    without_sites = Comparison(content | {"answers": []})  # whose clients differ from seed to seed
    assert without_sites.answers == ["mean over sites: join with fedavg"]
    assert str(without_sites) == "Each site is small.\nmean over sites: join with fedavg"
    simulated = content | {"clients": ["client-000", "client-001"]}
    assert "Each client is small.\n" in printed(simulated)
    assert "join  mean over clients  fedavg +4.1" in str(Comparison(simulated))
    many = content | {"answers": [answer(f"s{k}", "undecided", 0.01, [-0.1, 0.1]) for k in range(12)]}
    assert str(Comparison(many)).endswith("\nand 4 sites: not decided (comparison.answers)")
