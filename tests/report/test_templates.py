"""The templates of the page: what is not polyfed's HTML is escaped, and no variable is missing silently."""

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from polyfed.report.page.elements import (
    html_bullet_list,
    html_dropdown_panels,
    html_figure,
    html_legend,
    html_table,
    render_template,
)

EVIL = "</td><script>alert('1')</script>\"&"


def test_texts_are_escaped_and_markup_is_not():
    chart = Markup("<svg></svg>")
    for html in (
        html_table(EVIL, [EVIL], [[EVIL, EVIL]]),
        html_figure(chart, EVIL, html_table(EVIL, [EVIL], [[EVIL, EVIL]])),
        html_figure(EVIL, EVIL, EVIL),
        html_dropdown_panels("k", EVIL, {EVIL: EVIL, "b": chart}),
        html_legend([EVIL]),
        html_bullet_list([EVIL]),
    ):
        assert "&lt;script&gt;" in html
        assert "<script" not in html

    assert "<svg></svg>" in html_figure(chart, "a")


def test_a_variable_that_is_missing_is_an_error():
    with pytest.raises(UndefinedError, match="'opened' is undefined"):
        render_template("client_scores", clients="2 clients")


def test_json_for_the_script_cannot_end_it_and_keeps_its_order():
    page = render_template(
        "page", title="t", heading="h", style="", notes=[], groups=[], origins=[], versions={"polyfed": "1", "torch": "2"},
        curves={"z": "</script>", "a": 1}, scripts="",
    )  # fmt: skip
    assert '{"z":"\\u003c/script\\u003e","a":1}' in page
    assert page.count("</script>") == 2
