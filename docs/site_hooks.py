"""What the documentation site adds to the documents while it is built (hooks of MkDocs, see mkdocs.yml).

- Marks in the pages of methods are taken out, and lists indented as Python-Markdown wants them (`site_blocks.py`).
- benchmarks/README.md, which lies outside docs/, becomes the page benchmarks.md, and benchmarks/notes pages below it.
- Links that lead from a document to a file of the repository become links to pages, or plain text where there is no page.
- Blocks of LaTeX (```math) are set by KaTeX, whose files are part of the site (docs/katex); other pages do not load it.
- The search shows guides before reference, and reference before the pages of measurements; its index is short
  (`site_search.py`).
- The link to the repository is the one of pyproject.toml, if it has one.
"""

import json
import posixpath
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
if str(DOCS) not in sys.path:
    sys.path.insert(0, str(DOCS))

from site_blocks import BENCHMARKS, LINK, NOTES, ROOT, four_spaces, outside_code, set_equations, without_marks  # noqa: E402
from site_search import UNSEARCHED, WORDS, shorten_entries, weigh_page  # noqa: E402


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Takes the address of the repository from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if address := project.get("urls", {}).get("Source"):
        config.repo_url, config.repo_name = address, "/".join(address.rsplit("/", 2)[1:])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of measurements and their pictures."""
    pages = {BENCHMARKS: ROOT / "benchmarks" / "README.md", **{f"benchmarks/{note.name}": note for note in NOTES}}
    for page, source in pages.items():
        content = source.read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=content))
        for target in sorted({target for image, _, target, _ in LINK.findall(content) if image}):
            picture = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
            files.append(File.generated(config, picture, abs_src_path=str(source.parent / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Takes out the marks of a page, turns its links, prepares its equations, and weighs it for the search."""
    uri = page.file.src_uri
    page.meta.setdefault("search", {})["boost"] = weigh_page(uri, page.ancestors[-1].title if page.ancestors else "")
    page.meta["search"]["exclude"] = uri.startswith(UNSEARCHED)
    page.meta["tags"] = WORDS.get(uri, "").split()
    if uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    base = posixpath.dirname(posixpath.join("docs", uri))
    if uri == BENCHMARKS or uri.startswith("benchmarks/"):
        base = "benchmarks" if uri == BENCHMARKS else "benchmarks/notes"
    known = {file.src_uri for file in files}
    text = four_spaces(
        outside_code(without_marks(markdown), lambda text: LINK.sub(lambda link: _turned(link, base, uri, known), text))
    )
    return set_equations(text, posixpath.relpath("katex", posixpath.dirname(uri) or "."))


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Any) -> dict[str, Any]:
    """No link to edit a page: there is no public repository that it could lead to."""
    page.edit_url = None
    return context


def on_post_build(config: MkDocsConfig) -> None:
    """Shortens the index of the search, which a browser loads whole."""
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["docs"] = list(shorten_entries(index["docs"]))
    path.write_text(json.dumps(index, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def _turned(link: "re.Match[str]", base: str, uri: str, known: set[str]) -> str:
    """A link as the site has it."""
    image, text, target, anchor = link[1], link[2], link[3], link[4] or ""
    if "://" in target:
        return link[0]
    place = posixpath.normpath(posixpath.join(base, target))
    inside = place.removeprefix("docs/")
    if place == "benchmarks/README.md":
        inside = BENCHMARKS
    elif place.startswith("benchmarks/notes/"):
        inside = place.replace("/notes", "", 1)
    elif image and base == "benchmarks/notes":
        inside = posixpath.normpath(posixpath.join(posixpath.dirname(uri), target))
    elif not place.startswith("docs/") and (ROOT / place).exists():
        return text  # a source file: its text names it
    if inside not in known:
        return link[0]  # leads nowhere: MkDocs will say so
    there = posixpath.relpath(inside, posixpath.dirname(uri) or ".")
    return f"{image}[{text}]({there}{anchor})"
