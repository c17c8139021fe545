"""Renders the page's templates, and the parts that several sections share: tables, figures, menus and lists.

Templates are Jinja2 with autoescape: plain text is escaped, and only `Markup` made by polyfed is taken as HTML.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from polyfed.report.page.charts.svg_charts import COLOUR_COUNT

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def _jinja_environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("polyfed.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["colour_count"] = COLOUR_COUNT
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def read_asset(name: str) -> Markup:
    """Reads the style sheet or script `assets/NAME` as text that the page takes as it is."""
    return Markup(files("polyfed.report.page").joinpath("assets", name).read_text(encoding="utf-8"))


def render_template(name: str, **context: Any) -> Markup:
    """Renders `templates/NAME.html.j2`; a missing variable is an error."""
    return Markup(_jinja_environment().get_template(f"{name}.html.j2").render(**context))


def _render_macro(name: str, *arguments: Any) -> Markup:
    """Renders one macro of the template file `macros.html.j2` with the given arguments."""
    macro = getattr(_jinja_environment().get_template("macros.html.j2").module, name)
    return Markup(macro(*arguments).strip())


def html_figure(chart: Markup, caption: str, numbers: Markup | str = "") -> Markup:
    """Renders a chart with its caption, and below it a table of its numbers that a reader can unfold."""
    return _render_macro("figure", chart, caption, numbers)


def html_table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """Renders a table whose first column names the row; the reader can scroll a wide table sideways.

    Args:
        caption: text above the table.
        columns: headings of the columns.
        rows: the cells of each row.

    >>> html_table("scores", ["client", "local"], [["a<b", "0.5"]]).count("a&lt;b")
    1
    """
    return _render_macro("table", caption, columns, rows)


def html_dropdown_panels(key: str, label: str, panels: Mapping[str, Markup]) -> Markup:
    """Renders several panels with a menu that shows one at a time; without JavaScript all panels are shown.

    >>> html_dropdown_panels("k", "Layer", {"conv": Markup("<p>a</p>")})
    Markup('<p>a</p>')
    """
    return _render_macro("dropdown_panels", key, label, panels)


def html_legend(labels: Sequence[str], styles: Sequence[int] | None = None) -> Markup:
    """Renders the legend of a chart: the label and style of each line; `styles` defaults to 0, 1, 2 and so on."""
    return _render_macro("legend", labels, range(len(labels)) if styles is None else styles)


def html_bullet_list(sentences: Sequence[str]) -> Markup:
    """Renders sentences as a bullet list; returns an empty text if there are no sentences."""
    return _render_macro("sentence_list", sentences)


def html_paragraph(text: str) -> Markup:
    """Renders a text as a paragraph, with its special characters escaped.

    >>> html_paragraph("a < b")
    Markup('<p>a &lt; b</p>')
    """
    return _render_macro("paragraph", text)


def html_side_by_side(parts: Sequence[Markup]) -> Markup:
    """Renders several parts side by side where the screen is wide enough, otherwise one below the other."""
    return _render_macro("columns", parts)


def html_div(content: Markup) -> Markup:
    """Wraps content in an HTML `<div>` element."""
    return _render_macro("block", content)
