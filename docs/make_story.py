"""Makes the outputs and pictures of README, the landing page, the tutorial and compare.md from one run of their code.

    python docs/make_story.py          (make pictures; some minutes; the pictures need Chromium, its driver and selenium)

The code of README runs in a new folder, and so do its `polyfed compare`, the code of the tutorial and `polyfed run`. What
they print is written into these documents; their pages are photographed; and the numbers are kept in story.json, with
which a test compares a fresh run.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
README, INDEX, TUTORIAL, STORY = ROOT / "README.md", DOCS / "index.md", DOCS / "tutorial.md", DOCS / "story.json"
COMPARE = DOCS / "compare.md"
PICTURES = (
    "decision.png",
    "hospitals.png",
    "report_quickstart_desktop.png",
    "report_quickstart_phone.png",
)
CODE = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^(```(?:text|\{ \.text \.output \})\n)(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
MARK = "--- next piece of code ---"
END, TOP = "What these answers cover", 800  # the heading before which README's picture ends, or else its pixels


def main() -> None:
    """Makes everything anew."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        answered, compared = run_terminal(folder / "terminal"), run_readme(folder / "readme")
        told, quick = run_tutorial(folder / "tutorial"), run_quickstart(folder)
        README.write_text(with_outputs(README.read_text(encoding="utf-8"), [compared["printed"]]), encoding="utf-8")
        text = CODE.sub(lambda _: f"```python\n{readme_code()}```", INDEX.read_text(encoding="utf-8"))
        INDEX.write_text(with_outputs(text, [compared["printed"]]), encoding="utf-8")
        COMPARE.write_text(with_outputs(COMPARE.read_text(encoding="utf-8"), [answered["printed"]]), encoding="utf-8")
        TUTORIAL.write_text(with_outputs(TUTORIAL.read_text(encoding="utf-8"), told), encoding="utf-8")
        take_pictures(folder)
    hashes = {name: hashlib.sha256((DOCS / "images" / name).read_bytes()).hexdigest() for name in PICTURES}
    story = {"terminal": answered, "readme": compared, "tutorial": told, "quickstart": quick, "pictures": hashes}
    STORY.write_text(json.dumps(story, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def readme_code() -> str:
    """Returns the example of README."""
    (code,) = CODE.findall(README.read_text(encoding="utf-8"))
    return code


def run_code(code: str, folder: Path) -> str:
    """Runs a script in a new folder, with warnings as errors, and returns what it prints.

    Raises:
        SystemExit: it fails.
    """
    folder.mkdir()
    (folder / "example.py").write_text(code, encoding="utf-8")
    return run_command([sys.executable, "-W", "error", "example.py"], folder)


def run_command(words: list[str], folder: Path) -> str:
    """Runs a command in a folder with the source of this repository, and returns what it prints.

    Raises:
        SystemExit: it fails.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def run_readme(folder: Path) -> dict:
    """Returns what README's example in Python prints (but which methods were left out), and the numbers of its
    comparison."""
    return {"printed": shown_lines(run_code(readme_code(), folder)), **read_comparison(folder)}


def run_terminal(folder: Path) -> dict:
    """Returns what README's `polyfed compare` prints, and the numbers of its comparison."""
    folder.mkdir()
    words = [sys.executable, "-m", "polyfed", "compare", "--quiet", "-o", "runs/heart"]
    return {"printed": shown_lines(run_command(words, folder)), **read_comparison(folder)}


def read_comparison(folder: Path) -> dict:
    """Returns the answers and means of the comparison in a folder's `runs`."""
    (file,) = folder.glob("runs/*/comparison.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    answers = {
        answer["client"]: {key: answer[key] for key in ("answer", "gain", "interval")} for answer in found["answers"]
    }
    means = {name: method["statistics"]["mean"] for name, method in found["methods"].items()}
    mean = found["mean_answer"]
    return {"answers": answers, "means": means, "mean_answer": mean["answer"], "mean_interval": mean["interval"]}


def run_tutorial(folder: Path) -> list[str]:
    """Returns what each piece of the tutorial's code prints that has its output shown."""
    text = TUTORIAL.read_text(encoding="utf-8")
    code = f"\nprint({MARK!r})\n".join(CODE.findall(text))
    printed = run_code(code, folder).split(f"{MARK}\n")
    places = [(found.start(), None) for found in CODE.finditer(text)] + [(f.start(), f) for f in SHOWN.finditer(text)]
    order = [kind is None for _, kind in sorted(places, key=lambda place: place[0])]
    told, piece = [], -1
    for is_code in order:
        piece += is_code
        if not is_code:
            told.append(shown_lines(printed[piece]))
    return told


def run_quickstart(folder: Path) -> dict:
    """Runs `polyfed run`, and returns the scores of each client and the bytes of all rounds."""
    run_command([sys.executable, "-m", "polyfed", "run", "--quiet", "--out", "quickstart"], folder)
    shown = json.loads(run_command([sys.executable, "-m", "polyfed", "show", "quickstart", "--json"], folder))
    rounds = [json.loads(line) for line in (folder / "quickstart" / "metrics.jsonl").read_text().splitlines()]
    sent = {way: sum(one[way] for one in rounds) for way in ("bytes_up", "bytes_down")}
    table = [{key: row[key] for key in ("client", "accuracy", "auc")} for row in shown["table"]]
    return {"table": table, "bytes": sent}


def shown_lines(printed: str) -> str:
    """Returns printed lines without spaces at their ends, and without those on methods that were left out.

    >>> shown_lines("a: 1  \\nleft out fedavg: why\\n")
    'a: 1\\n'
    """
    return "".join(f"{line.rstrip()}\n" for line in printed.splitlines() if not line.startswith("left out "))


def with_outputs(text: str, outputs: list[str]) -> str:
    """Returns a document with its blocks of output replaced, in order."""
    given = iter(outputs)
    return SHOWN.sub(lambda found: f"{found[1]}{next(given)}```", text)


def take_pictures(folder: Path) -> None:
    """Photographs the tops of two comparisons' pages, and the page of `polyfed run`, by shoot_report.py."""
    if not shutil.which("chromium"):
        raise SystemExit("there is no Chromium to photograph pages with: apt-get install chromium chromium-driver")
    import shoot_report

    polyfed = [sys.executable, "-m", "polyfed", "report"]
    for picture, run in (("decision", "readme"), ("hospitals", "tutorial")):
        (file,) = (folder / run).glob("runs/*/comparison.json")
        run_command([*polyfed, str(file.parent), "--out", f"{picture}.html"], folder)
        shoot_report.shoot_top(folder / f"{picture}.html", END, TOP, DOCS / "images" / f"{picture}.png")
    run_command([*polyfed, "quickstart", "--out", "quickstart.html"], folder)
    shoot_report.main([f"quickstart={folder / 'quickstart.html'}"])


if __name__ == "__main__":
    main()
