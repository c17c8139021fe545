"""The documentation site as it is built: whole, with equations that a browser sets, and a search that finds guides first."""

import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import polyfed
from polyfed.algorithms import REGISTRY

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
METHODS = sorted((DOCS / "methods").glob("*.md"))
BUILD = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([*BUILD, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (
        f"the site cannot be built (needs pip install -e '.[docs]'):\n{done.stdout}{done.stderr}"
    )
    return folder


@pytest.mark.slow
def test_the_site_is_built_strictly_and_whole(site):
    for name in REGISTRY:
        text = (site / "methods" / f"{name.removeprefix('ca_')}.html").read_text(encoding="utf-8")
        assert f"<code>{name}</code>" in text
        assert "<!-- " not in text.split("<article")[1].split("</article>")[0]
    index = (site / "api" / "index.html").read_text(encoding="utf-8")
    reference = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    assert [name for name in polyfed.__all__ if f'id="polyfed.{name}"' not in reference] == []
    federate = index.split('id="polyfed.federate"')[1].split('id="polyfed.resume"')[0]
    told = [name for name in inspect.signature(polyfed.federate).parameters if f"<code>{name}</code>" not in federate]
    assert (
        told == []
    )  # each parameter stands in the list of parameters, also those that the docstring tells of together


SEARCHED = {  # what people type -> the page that must be first
    "callback": "callbacks", "wandb": "callbacks", "early stopping": "callbacks",
    "choose method": "choose", "which method": "choose",
    "compare": "compare", "learning rate": "compare/fair", "hyperparameters": "compare/fair",
    "custom loss": "tasks/own_loss", "own loss": "tasks/own_loss", "class weights": "tasks/own_loss",
    "custom method": "add_a_method", "my own method": "add_a_method", "own method": "add_a_method",
    "own hook": "callbacks",
    "custom model": "networks", "own network": "networks",
    "csv": "tabular", "excel": "tabular", "tabular": "tabular", "patients": "tabular", "missing values": "tabular",
    "dataset": "data", "images": "data", "non-iid": "data/partitions",
    "deploy": "deploy", "flower deploy": "deploy", "docker": "deploy/machines", "secure aggregation": "deploy/secure_sums",
    "export model": "export", "save model": "export", "serve": "export", "onnx": "export", "predict": "export",
    "gpu": "gpu", "cuda": "gpu",
    "install": "index", "licence": "index", "cite": "index",
    "jupyter": "notebook", "notebook": "notebook", "logging": "notebook",
    "not decided": "faq", "resume": "faq", "nan": "faq", "memory": "faq", "slow": "faq",
    "confidence interval": "intervals", "cross validation": "intervals", "p-value": "intervals",
    "auc": "metrics", "lora": "pretrained", "hugging face": "pretrained",
    "privacy": "privacy", "differential privacy": "privacy", "bytes": "scaling",
    "survival": "tasks/survival", "segmentation": "tasks/segmentation", "regression": "tasks",
    "time series": "tasks/forecasting",
    "tensorboard": "tracking", "mlflow": "tracking", "certificate": "deploy/network", "renew certificate": "operations",
    "my own model": "networks", "different architectures": "networks", "save a model": "export", "load a model": "export",
    "add a method": "add_a_method", "my own data": "tabular", "what leaves my site": "security", "what is sent?": "security",
    "deploy two hospitals": "deploy", "firewall": "deploy/network", "sample size": "intervals", "reproducible": "faq",
    "my csv": "tabular", "serve model": "export", "add method": "add_a_method", "transformers": "pretrained",
    "deploy with flower": "deploy",
    "how do I install it?": "index", "quickstart": "tutorial", "getting started": "tutorial", "plot": "notebook",
    "how many patients do I need?": "intervals", "why not decided": "faq", "not converged": "faq", "more rounds": "faq",
    "string labels": "data", "who sees my data": "deploy/who_learns_what",
    "bad site": "security/bad_site", "byzantine": "security/bad_site", "offline site": "deploy/failures",
    "how much leaks": "security/how_much_leaks", "noise": "deploy/noise", "consent": "deploy/options", "bibtex": "index",
    "how to cite": "index", "hook": "callbacks", "privacy for a patient": "privacy", "upgrade": "operations",
    "python version": "versions", "lstm": "networks",
    "unbalanced classes": "tasks/own_loss", "repeated measurements": "tabular/groups",
    "print the report": "report", "subgroups": "report",
    "cross-site": "look", "is it safe?": "security", "windows": "faq", "how many clients": "scaling", "json output": "json",
}  # fmt: skip


@pytest.mark.slow
def test_the_search_finds_the_guide_first(site):
    if shutil.which("node") is None:
        pytest.skip("needs Node.js, which runs the theme's search")
    command = ["node", str(Path(__file__).parent / "site_search.js"), str(site), *SEARCHED]
    pages = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    first = {words: (pages[words] or [""])[0] for words in SEARCHED}
    assert first == {words: f"{page}.html" for words, page in SEARCHED.items()}


def test_words_of_the_search_are_of_pages_that_exist():
    sys.path.insert(0, str(DOCS))
    try:
        import site_search
    finally:
        sys.path.remove(str(DOCS))
    assert [page for page in site_search.WORDS if not (DOCS / page).is_file()] == []


@pytest.mark.slow
def test_guides_weigh_more_in_the_search_than_the_reference_and_results(site):
    boosts = {}
    assert (site / "search" / "search_index.json").stat().st_size < 1_500_000  # a browser loads it whole
    for entry in json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]:
        boosts[entry["location"].partition("#")[0]] = entry.get("boost", 1)
    guides, other = ("tutorial.html", "compare.html", "faq.html", "export.html"), ("api/index.html", "results.html")
    assert min(boosts[page] for page in guides) > 1 > max(boosts[page] for page in other)


_GUIDES = [DOCS / "add_a_method.md", DOCS / "add_a_method" / "private_state.md"]
EQUATIONS = [path for path in [*METHODS, *_GUIDES] if "```math\n" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", EQUATIONS, ids=lambda path: path.stem)
def test_an_equation_is_latex_whose_braces_and_rows_close(path):
    """Each method has one; a browser sets them in a slow test."""
    blocks = re.findall(r"^```math\n(.*?)^```$", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    for block in blocks:
        plain = re.sub(r"\\[{}]", "", block)
        assert plain.count("{") == plain.count("}")
        assert block.startswith("\\begin{aligned}\n")
        assert block.endswith("\\end{aligned}\n")
        assert re.sub(r"[“”–]", "", block).isascii()


def test_every_method_s_page_has_an_equation():
    assert set(METHODS) <= set(EQUATIONS)


@pytest.fixture
def browser():
    """A page 1280 pixels wide."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in ("--headless=new", "--disable-gpu", "--window-size=1280,900", "--no-sandbox"):
        options.add_argument(word)
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


@pytest.mark.slow
def test_a_browser_sets_every_equation_without_an_error_and_cuts_off_no_code(site, browser):
    guides = [site / f"{name}.html" for name in ("index", "tutorial", "tabular", "deploy", "add_a_method", "compare")]
    pages = [site / "methods" / f"{path.stem}.html" for path in METHODS]
    for page in [*pages, *guides]:
        browser.get(page.as_uri())
        count = "return document.querySelectorAll('%s').length"
        assert browser.execute_script(count % ".katex-error") == 0, page.name
        assert browser.execute_script(count % ".equation > .katex-display") >= (page in pages), page.name
        wide = "return [...document.querySelectorAll('%s')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        assert browser.execute_script(wide % ".equation, pre, pre > code") == 0, page.name


@pytest.mark.slow
def test_the_built_pages_fetch_nothing(site):
    """No script, style, picture or font from another address."""
    elsewhere = r"[\"']?(?:https?:|//)"
    fetched = re.compile(
        rf"<(?:script|img|iframe|source)\b[^>]*\bsrc={elsewhere}"
        rf"|<link\b[^>]*\brel=[\"']?(?:stylesheet|preconnect|icon)[^>]*\bhref={elsewhere}"
    )
    assert fetched.search('<script async src="https://x.y/z.js">')
    assert fetched.search('<link rel="stylesheet" href=//x.y/z.css>')
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(REGISTRY)
    assert not [page.name for page in pages if 'data-md-component="source"' in page.read_text(encoding="utf-8")]
    for page in pages:
        assert not fetched.search(page.read_text(encoding="utf-8")), page.name
