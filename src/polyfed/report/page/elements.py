"""Parts of a page: headings with figures, tables, choices between panels, and data inside a script element.

Arguments named `*_html` are HTML already; all others are plain text and are escaped here.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

from polyfed.report.page.svg_charts import COLOUR_COUNT

_CUT = 20  # letters from which a name may be cut off on the screen, so that pointing at it tells the whole


def html_figure(chart_html: str, caption: str, table_html: str = "") -> str:
    """A chart with its caption, and the numbers behind it in a table that opens."""
    numbers_html = f"<details><summary>The numbers</summary>{table_html}</details>" if table_html else ""
    return f"<figure>{chart_html}<figcaption>{escape(caption)}</figcaption>{numbers_html}</figure>"


def html_table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    bold: Sequence[Collection[int]] | None = None,
) -> str:
    """A table whose first column names the row; it scrolls sideways by itself where it is wider than the screen.

    Args:
        caption: what it shows.
        columns: headings.
        rows: cells of each row.
        bold: of each row the columns to stress; None for none at all.

    >>> html_table("scores", ["client", "local"], [["a<b", "0.5"]]).count("a&lt;b")
    1
    """
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = []
    for k, row in enumerate(rows):
        bold_columns: Collection[int] = () if bold is None else bold[k]
        cells = [
            f"<td>{f'<b>{escape(c)}</b>' if j in bold_columns else escape(c)}</td>" for j, c in enumerate(row[1:], 1)
        ]
        title_attribute = f' title="{escape(row[0])}"' if len(row[0]) > _CUT else ""
        body.append(f'<tr><th scope="row"{title_attribute}>{escape(row[0])}</th>{"".join(cells)}</tr>')
    label = escape(caption)
    # Focusable, so that the keyboard can scroll it.
    return (
        f'<p class="caption">{label}</p><div class="wide" tabindex="0" role="region" aria-label="{label}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def html_dropdown_panels(key: str, label: str, panels: Mapping[str, str]) -> str:
    """A menu over panels (HTML by their names) of which one is shown; without a script, and of one panel, all are.

    >>> html_dropdown_panels("k", "Layer", {"conv": "<p>a</p>"})
    '<p>a</p>'
    """
    if len(panels) == 1:
        return next(iter(panels.values()))
    options = "".join(f'<option value="{k}">{escape(name)}</option>' for k, name in enumerate(panels))
    parts = [
        f'<div class="panel{"" if k == 0 else " off"}" data-of="{key}" data-value="{k}"><h4 class="still">{escape(name)}'
        f"</h4>{panel}</div>"
        for k, (name, panel) in enumerate(panels.items())
    ]
    return (
        f'<p class="control"><label for="{key}">{escape(label)}</label> '
        f'<select id="{key}" data-choose>{options}</select></p>'
        f"{''.join(parts)}"
    )


def html_radio_panels(key: str, label: str, panels: Mapping[str, str]) -> str:
    """As `html_dropdown_panels`, with a button for each of a few panels."""
    buttons = "".join(
        f'<label><input type="radio" name="{key}" value="{k}" data-choose{" checked" if k == 0 else ""}> '
        f"{escape(name)}</label>"
        for k, name in enumerate(panels)
    )
    parts = [
        f'<div class="panel{"" if k == 0 else " off"}" data-of="{key}" data-value="{k}">{panel}</div>'
        for k, panel in enumerate(panels.values())
    ]
    return f'<fieldset class="control"><legend>{escape(label)}</legend>{buttons}</fieldset>{"".join(parts)}'


def html_collapsible(heading: str, content_html: str, *, opened: bool = False) -> str:
    """A section that opens at its heading; what is closed is not printed.

    >>> html_collapsible("a<b", "<p>c</p>")
    '<details class="part"><summary><h3>a&lt;b</h3></summary><p>c</p></details>'
    """
    shown = " open" if opened else ""
    return f'<details class="part"{shown}><summary><h3>{escape(heading)}</h3></summary>{content_html}</details>'


def html_json_script(identifier: str, content: Any) -> str:
    """JSON inside a script element, which no text in it can end.

    >>> html_json_script("d", {"</script>": 1})
    '<script type="application/json" id="d">{"\\\\u003c/script\\\\u003e":1}</script>'
    """
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))  # ASCII, so that U+2028 and its like are escaped
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="{identifier}">{text}</script>'


def html_line_swatch(style: int) -> str:
    """A short piece of the line of a style, for a legend."""
    return (
        f'<svg class="swatch s{style % COLOUR_COUNT} d{style // COLOUR_COUNT % 3}" viewBox="0 0 26 12" aria-hidden="true">'
        '<path class="line" d="M1 6H25"/></svg>'
    )


def html_legend(labels: Sequence[str], styles: Sequence[int] | None = None) -> str:
    """Labels of the lines of a chart in which there is nothing to choose; without styles they are counted from 0."""
    numbers = range(len(labels)) if styles is None else styles
    return "".join(
        [
            '<p class="control legend">',
            *(f"<span>{html_line_swatch(k)}{escape(label)}</span>" for k, label in zip(numbers, labels, strict=True)),
            "</p>",
        ]
    )


def html_list(sentences: Sequence[str]) -> str:
    """A list of sentences."""
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>" if sentences else ""
