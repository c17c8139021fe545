"""Writes what is made from code and measurements into the pages of methods, between their marks (see site_blocks.py).

    python docs/fill_methods.py

Run it after a change of a method's fields or of benchmarks/notes; a test finds pages that are out of date.
"""

from pathlib import Path

from site_blocks import filled

PAGES = sorted((Path(__file__).parent / "methods").glob("*.md"))

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
