"""`polyfed list`: an overview that can be taken in at once, and details with whole sentences."""

import io
import re

import pytest
from rich.console import Console

from polyfed.algorithms import REGISTRY
from polyfed.cli.commands.list_command import describe_choices, first_docstring_sentence, show_choices
from polyfed.cli.commands.options.recipes import shipped_recipe_files
from polyfed.cli.main import main
from polyfed.core.errors import UserError
from polyfed.data import PARTITIONS, SOURCES
from polyfed.models import MODELS

KINDS = {"algorithms": REGISTRY, "data": {**SOURCES, **PARTITIONS}, "models": MODELS}
THINGS = {name: thing for registry in KINDS.values() for name, thing in registry.items()}


def printed(*kinds, width=80):
    file = io.StringIO()
    show_choices(kinds, Console(file=file, width=width))
    return file.getvalue()


@pytest.mark.lists
def test_the_overview_fits_a_screen_of_forty_lines_with_every_name_in_full():
    lines = printed().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    words = " ".join(lines[1:-1]).split()
    assert not {*THINGS, *shipped_recipe_files()} - {*words}
    assert lines[-1] == "What each is: polyfed list algorithms|data|models|recipes, or a method's name"


@pytest.mark.parametrize("name", THINGS)
def test_a_sentence_is_whole(name):
    sentence = first_docstring_sentence(THINGS[name])
    assert sentence.endswith(".")
    assert sentence.count("(") == sentence.count(")")
    assert not re.search(r"\b(eqs?|al|e\.g|i\.e|cf|figs?|vs|sec)\.$", sentence, re.IGNORECASE)
    assert ". " not in re.sub(r"\b(eqs?|al|e\.g|i\.e|cf|Figs?|vs|sec)\. ", "", sentence)


@pytest.mark.parametrize("word", ["(eq.", "et al.", "e.g.", "(e.g.", "i.e.", "cf.", "Fig.", "(Figs.", "vs.", "eqs."])
def test_an_abbreviation_ends_no_sentence(word):
    def thing():
        pass

    thing.__doc__ = f"The first {word} 3) goes on. The second."
    assert first_docstring_sentence(thing) == f"The first {word} 3) goes on."


def test_a_symbol_or_a_number_may_begin_the_next_sentence():
    def thing():
        """The first of class C. 3 more."""

    assert first_docstring_sentence(thing) == "The first of class C."


def test_methods_are_grouped_sorted_and_readable_at_80_columns():
    lines = [line.rstrip() for line in printed("algorithms").splitlines()]
    assert max(map(len, lines)) <= 80
    titles = [line for line in lines if line.startswith("methods ")]
    assert len(titles) == 3
    names = [line.split()[0] for line in lines if line and line not in titles and not line.startswith(" ")]
    assert sorted(names) == sorted(REGISTRY)
    assert len(lines) < 2.5 * len(REGISTRY)
    first = names[: names.index("scaffold") + 1]
    assert first == sorted(first)
    assert not re.search(r"[a-z]_[a-z]", re.sub(r"^\S+", "", "\n".join(lines), flags=re.MULTILINE))


def test_recipes_are_readable_at_80_columns():
    lines = [line.rstrip() for line in printed("recipes").splitlines()]
    assert max(map(len, lines)) <= 80
    (first,) = [k for k, line in enumerate(lines) if line.startswith("fedhenn_table1 ") and "FedHeNN, Table 1" in line]
    assert any(line.strip().startswith("--scale: paper, cpu, smoke") for line in lines[first : first + 6])


def test_lines_are_whole_where_no_terminal_cuts_them(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    show_choices([])
    assert re.search(r"^  personalised +apfl .* pfedme *$", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setenv("COLUMNS", "80")
    show_choices([])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_the_words_of_the_documents_are_understood():
    assert printed("methods") == printed("algorithms")
    assert printed("networks") == printed("models")
    assert describe_choices(["methods"]) == describe_choices(["algorithms"])
    with pytest.raises(UserError, match="cannot list 'method'; choices"):
        printed("method")


def test_details_have_what_the_overview_leaves_out():
    assert "discloses architecture, weights" in printed("algorithms")
    assert "what the scales reduce against the paper" in printed("recipes", width=200)
    assert "what the scales reduce" not in printed()


def test_the_card_of_a_method_has_its_paper_needs_and_fields():
    for words in (["fedprox"], ["algorithms", "fedprox"]):
        text = " ".join(printed(*words, width=100).split())
        assert text.startswith(f"fedprox: {REGISTRY['fedprox'].card.summary} ({REGISTRY['fedprox'].card.paper})")
        assert "discloses weights" in text
        assert "mu 0.01 μ ≥ 0" in text
        assert "local training: local_epochs 1, " in text
    assert [entry["name"] for entry in describe_choices(["fedprox"])["algorithms"]] == ["fedprox"]
    with pytest.raises(UserError, match="cannot list 'fedprx'; did you mean fedprox"):
        printed("fedprx")
    for name in REGISTRY:
        assert printed(name).startswith(f"{name}: ")


def test_an_unknown_option_is_refused_with_those_there_are(capsys):
    assert main(["list", "-x"]) == 2
    assert "unknown option -x; choices: --json" in capsys.readouterr().err
