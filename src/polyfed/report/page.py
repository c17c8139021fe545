"""The page of `polyfed report`: one HTML file that needs nothing else, neither a network nor other files."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from polyfed.report import curves as by_example
from polyfed.report import subgroups, words
from polyfed.report.decision import decision, has_answers, level_of
from polyfed.report.gathering import Setting
from polyfed.report.html import choice, data, fold, paragraphs
from polyfed.report.sections import Beside, classes, clients, course, gains, methods
from polyfed.simulation.runs.directory import versions

_SEPARATE = "How well predictions separate, and how far they can be believed"


def render(settings: Sequence[Setting], beside: Sequence[Beside], notes: Sequence[str], title: str) -> str:
    """The whole page.

    Args:
        settings: as gathered.
        beside: of each of them.
        notes: sentences for the top.
        title: of the page.
    """
    here = files("polyfed.report")
    style, script = (here.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    more = here.joinpath("curves.js").read_text(encoding="utf-8")
    curves: dict[str, Any] = {}
    alone = len(settings) == 1
    parts = [_setting(setting, beside[k], f"p{k}", curves, alone=alone) for k, setting in enumerate(settings)]
    heading = _question(settings[0]) if alone and has_answers(settings[0]) else title
    # With no choice of sites there is nothing for this script to do.
    scripts = script if not any(one.outcomes for one in beside) else f"{script}\n{more}"
    known = versions()
    made = f"Made by polyfed {known['polyfed']}, torch {known['torch']}. All of it is in this file."
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        # Nothing may be fetched, whatever a name of a client holds.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body><main>"
        f"<h1>{escape(heading)}</h1>{paragraphs(notes)}{''.join(parts)}<footer>{escape(made)}</footer></main>\n"
        f"{data('data', curves)}<script>{scripts}</script></body></html>\n"
    )


def _question(setting: Setting) -> str:
    """The heading: the question, and the comparison's title, unless that names a method that was not compared."""
    told = setting.results
    absent = [*(told.get("skipped") or {}), *(told.get("failed") or {})]
    named = any(label.lower() in setting.title.lower() for label in absent)
    return "Join, or train alone?" + ("" if named else f" {_upper(setting.title)}")


def _setting(setting: Setting, beside: Beside, key: str, curves: dict[str, Any], *, alone: bool) -> str:
    heading = (
        f'<p class="facts">{escape(_upper(setting.title))}: '
        if alone
        else f'<h2>{escape(_upper(setting.title))}</h2><p class="facts">'
    )
    facts = f"{heading}{escape(words.facts(setting))}</p>"
    if has_answers(setting):
        plain = f'<p class="facts">{escape(words.facts(setting, "site"))}</p>'  # the title is the page's heading
        return _decided(setting, beside, key, curves, plain if alone else facts)
    parts = [
        f"<section>{facts}",
        paragraphs(words.summary(setting)),
        _notes(words.notes(setting)),
        methods(setting),
        '<div class="grid2">',
        f"<div><h3>Learning curves</h3>{course(setting, key, curves)}</div>",
        f"<div><h3>What each client gains over training alone</h3>{gains(setting, key)}</div>",
        f"<div><h3>Scores of each client</h3>{clients(setting)}</div>",
        f"<div><h3>Who has what</h3>{classes(setting, beside, key)}</div></div>",
    ]
    parts += [f"<h3>{escape(name)}</h3>{shown}" for name, shown in _by_example(setting, beside, key)]
    return "".join([*parts, *(f"<h3>{escape(name)}</h3>{shown}" for name, shown in _views(beside, key)), "</section>"])


def _decided(setting: Setting, beside: Beside, key: str, curves: dict[str, Any], facts: str) -> str:
    """What is to be decided first; all else opens below it."""
    said = f"{paragraphs(words.summary(setting))}{paragraphs(words.notes(setting))}"
    convergence = setting.results.get("convergence") or {}
    ended = paragraphs([f"{label}: {one['sentence']}" for label, one in convergence.items() if one.get("sentence")])
    below = [
        *((name, shown) for name, shown in _by_example(setting, beside, key)),
        ("Learning curves", f"{ended}{course(setting, key, curves)}"),
        ("All methods: percentiles, tests, costs", f"{methods(setting)}"),
        ("In sentences, and how to read them", said),
        ("What each client gains over training alone", gains(setting, key)),
        ("Scores of each client", clients(setting)),
        ("Who has what", classes(setting, beside, key)),
        *_views(beside, key),
    ]
    parts = [fold(name, shown, opened=name.startswith("Subgroups by")) for name, shown in below]
    top = decision(setting, beside.outcomes, key)
    return f'<section class="decided">{facts}{top}<h2 class="below">Details</h2>{"".join(parts)}</section>'


def _by_example(setting: Setting, beside: Beside, key: str) -> list[tuple[str, str]]:
    """Heading and HTML of what predictions tell, or why they tell nothing."""
    if beside.outcomes is None:
        return [(_SEPARATE, f"<p>{escape(beside.no_outcomes)}</p>")] if beside.no_outcomes else []
    level, found = level_of(setting), beside.outcomes
    parts = [(_SEPARATE, by_example.section(found, level, key))] if found.problems else []
    parts += [
        (f"Subgroups by {column}", subgroups.section(found, column, setting.scale, level, f"{key}-g{k}"))
        for k, column in enumerate(beside.subgroups)
    ]
    if not beside.subgroups and (columns := found.columns()):
        hint = f"polyfed report DIR --subgroup COLUMN adds scores of groups; the test examples have {words.listed(columns)}."
        parts.append(("Subgroups", f"<p>{escape(hint)}</p>"))
    return parts


def _views(beside: Beside, key: str) -> list[tuple[str, str]]:
    """Heading and HTML of what the methods have to show."""
    found = []
    for k, (name, by_method) in enumerate(beside.views.items()):
        if len(by_method) == 1:
            ((method, html),) = by_method.items()
            found.append((f"{name} ({method})", html))
        else:
            found.append((name, choice(f"{key}-v{k}", "Method", by_method)))
    return found


def _notes(sentences: Sequence[str]) -> str:
    shown = f"<summary>{words.many(len(sentences), 'note')} on how to read this</summary>{paragraphs(sentences)}"
    return f'<details class="notes">{shown}</details>' if sentences else ""


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
