"""The page of `polyfed report` in a real Chromium: nothing overlaps, overflows or fails, and the keyboard is enough.

Needs Chromium and its driver (Debian: apt-get install chromium chromium-driver) and selenium (pip install selenium).
"""

import time

import pytest

from polyfed.cli.commands.results.report_command import show_report
from polyfed.cli.main import main

pytestmark = pytest.mark.slow
PHONE, DESKTOP, PAPER = 390, 1280, 718
RECIPES = ("pfedla_table1", "fedhenn_table1", "flha_table1", "fedpnas_fig3")
PAGES = (*RECIPES, "many", "one", "evil", "seeds", "diverged", "compared", "answered", "classes")
EVIL = [
    "</script><script>window.broken=1</script>",
    '"><img src=x onerror=window.broken=1>',
    "WWWW-MMMM-WWWW-MMMM" * 6,
    "東京の大きな病院と研究所と大学",
]

# Texts of a chart that are cut off at its edge, or lie on one another by more than a pixel or two.
CLASHES = """
const found = [];
for (const svg of document.querySelectorAll('svg[role=img]')) {
  const frame = svg.getBoundingClientRect();
  if (!frame.width) continue;
  const texts = [...svg.querySelectorAll('text:not(.cell)')].map((t) => [t.textContent, t.getBoundingClientRect()]);
  texts.forEach(([text, r], k) => {
    if (r.left < frame.left - 1 || r.right > frame.right + 1 || r.top < frame.top - 1 || r.bottom > frame.bottom + 1)
      found.push(['cut', svg.querySelector('title').textContent, text]);
    for (const [other, o] of texts.slice(k + 1)) {
      const x = Math.min(r.right, o.right) - Math.max(r.left, o.left);
      const y = Math.min(r.bottom, o.bottom) - Math.max(r.top, o.top);
      if (x > 1.5 && y > 3.5) found.push(['overlap', svg.querySelector('title').textContent, text, other]);
    }
  });
}
return found;
"""
# Figures that are seen but stand outside the window or show nothing.
UNDRAWN = """
const found = [];
let seen = 0;
for (const box of document.querySelectorAll('figure')) {
  const frame = box.getBoundingClientRect();
  if (!frame.width) continue;
  seen += 1;
  if (frame.left < 0 || frame.right > innerWidth) found.push(['outside', box.textContent.slice(0, 60)]);
  const charts = [...box.querySelectorAll('svg[role=img], img')].filter((c) => c.getBoundingClientRect().width);
  if (!charts.length) found.push(['no chart', box.textContent.slice(0, 60)]);
  for (const chart of charts) {
    const size = chart.getBoundingClientRect();
    if (size.width < 200 || size.height < 40) found.push(['small', box.textContent.slice(0, 60)]);
    if (chart.tagName === 'IMG') { if (!chart.naturalWidth) found.push(['broken', chart.alt]); continue; }
    const marks = [...chart.querySelectorAll('.line, circle, rect, image')].filter((m) => {
      const r = m.getBoundingClientRect();
      return r.width + r.height > 0 && getComputedStyle(m).visibility === 'visible';
    });
    const told = chart.textContent.includes('Nothing to draw');
    if (!marks.length && !told) found.push(['empty', chart.textContent.slice(0, 60)]);
  }
}
return [seen, found];
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory, write_run, learning, comparison_of, write_comparison):
    """The pages by name: a recipe of each paper, and runs as they come only rarely."""
    import json

    from rich.console import Console

    here = tmp_path_factory.mktemp("pages")
    folders = {name: [here / name] for name in PAGES}
    for recipe in RECIPES:
        words = ["run", recipe, "--scale", "smoke", "--workers", "0", "--quiet", "--out", str(here / recipe)]
        assert main(words) == 0
    methods = ["pfedla", *(f"method_{k}" for k in range(10)), "local"]
    for k, name in enumerate(methods):
        place = here / "many" if k == 0 else here / "many/baselines" / name
        write_run(place, name, learning(200, 60, 0.8 - 0.03 * k, seed=k), megabytes=0 if name == "local" else 9)
    _weights_of(here / "many", [f"client-{k:03d}" for k in range(200)])
    write_run(here / "one", "fedavg", {"only": [0.5]})
    write_run(here / "one/baselines/local", "local", {"only": [0.25]}, megabytes=0)
    write_run(here / "evil", "pfedla", learning(EVIL, 5, 0.7), wanted=9)
    write_run(here / "evil/baselines/local", "local", learning(EVIL, 5, 0.6, seed=1))
    _weights_of(here / "evil", EVIL)
    folders["seeds"] = [
        write_run(here / f"{name}-{seed}", name, learning(6, 20, level, seed=seed), seed=seed, megabytes=k)
        for k, (name, level) in enumerate((("local", 0.5), ("fedavg", 0.6), ("fedrep", 0.7)))
        for seed in range(3)
    ]
    nothing = {"a": [0.5, None, None], "b": [None, None, None]}
    write_run(here / "diverged", "fedavg", nothing, score="auc")
    write_run(here / "diverged/baselines/local", "local", nothing, score="auc")
    (here / "compared").mkdir()
    (here / "compared/comparison.yaml").write_text("title: mine\n")
    scores = {name: {seed: {"north": 0.5 + k / 9 + seed / 99, "east": 0.7 - k / 9} for seed in range(3)}
              for k, name in enumerate(("local", "fedavg", "fedrep"))}  # fmt: skip
    (here / "compared/comparison.json").write_text(json.dumps(comparison_of(scores)))
    hospitals = {"Charité Berlin": 80, "Leuven": 60, "St. Mary's": 70, "Utrecht": 5, EVIL[0]: 40}
    write_comparison(here / "answered", hospitals)
    write_comparison(here / "classes", {"north": 60, "south": 50}, classes=4, seeds=(0,))
    for name, given in folders.items():
        columns = ["sex"] if name == "answered" else []
        show_report(given, Console(quiet=True), out=here / f"{name}.html", subgroups=columns)
        assert (here / f"{name}.html").stat().st_size < 3_000_000
    return here


def _weights_of(folder, clients):
    """Aggregation weights as pFedLA keeps them."""
    import numpy as np

    (folder / "analysis").mkdir()
    alpha = np.random.default_rng(0).dirichlet(np.ones(len(clients)), (len(clients), 2)).astype(np.float32)
    arrays = {"alpha": alpha, "rows": clients, "layers": ["conv1", "fc"], "clients": clients}
    np.savez_compressed(folder / "analysis/round-000000.npz", **arrays)


@pytest.fixture
def visit(browser, pages):
    """Shows a page at a width, as a phone or a desktop does; what the browser has to say against it is told at the end."""

    def visit(name, width=DESKTOP, scheme="light", media=""):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width == PHONE}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get((pages / f"{name}.html").as_uri())
        return browser

    yield visit
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.execute_script("return window.broken") is None


def _choices(browser):
    """Every state of the page that its menus and buttons offer, one menu at a time."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    yield
    for menu in browser.find_elements(By.TAG_NAME, "select"):
        if menu.is_displayed():
            for k in range(1, min(len(menu.find_elements(By.TAG_NAME, "option")), 4)):
                Select(menu).select_by_index(k)
                yield
    for button in browser.find_elements(By.CSS_SELECTOR, "input[type=radio]"):
        button.click()
        yield


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("name", PAGES)
def test_every_figure_is_drawn_and_nothing_overflows(visit, name, width):
    browser = visit(name, width)
    browser.execute_script("for (const one of document.querySelectorAll('details.part')) one.open = true")
    most = 0
    for _ in _choices(browser):
        seen, wrong = browser.execute_script(UNDRAWN)
        assert wrong == []
        assert browser.execute_script(CLASHES) == []
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        most = max(most, seen)
    assert most >= 1
    browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    titles = browser.execute_script(
        "return [...document.querySelectorAll('svg[role=img]')].map((s) => ['title', 'desc'].every("
        "(e) => s.querySelector(e) && s.querySelector(e).textContent.length > 5))"
    )
    assert all(titles)


def test_no_line_ends_at_the_hyphen_of_an_option_or_id(visit):
    browser = visit("seeds", PHONE)
    words = browser.execute_script(
        "return [...document.querySelectorAll('.uncut')].map((e) => { const range = document.createRange();"
        "range.selectNodeContents(e);"
        "return [e.textContent, new Set([...range.getClientRects()].map((c) => c.top)).size] })"
    )
    assert words
    assert [word for word, lines in words if lines > 1 and len(word) < 25] == []


@pytest.mark.parametrize("name", ["pfedla_table1", "seeds"])
def test_the_keyboard_reaches_every_control_and_moves_it(visit, name):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser = visit(name)

    def press(*keys):
        ActionChains(browser).send_keys(*keys).perform()

    wanted = browser.execute_script(
        "return [...document.querySelectorAll('a[href], button, select, input, summary, [tabindex=\"0\"]')]"
        ".filter((e) => e.checkVisibility() && (e.type !== 'radio' || e.checked)).length"
    )
    outlines = set()
    for _ in range(wanted):
        press(Keys.TAB)
        outlines.add(browser.execute_script(
            "const e = document.activeElement; e.dataset.seen = 'yes'; return getComputedStyle(e).outlineStyle"
        ))  # fmt: skip
    assert browser.execute_script("return document.querySelectorAll('[data-seen]').length") == wanted
    assert outlines == {"solid"}  # where the focus is can be seen

    # The axis by arrow keys, then the values of the chart.
    browser.execute_script("document.querySelector('input[type=radio]').focus()")
    press(Keys.ARROW_RIGHT)
    shown = (
        "return [...document.querySelectorAll('[data-chart=p0]')].filter((e) => e.checkVisibility())"
        ".map((e) => e.dataset.axis)"
    )
    assert browser.execute_script(shown) == ["megabytes"]
    press(Keys.ARROW_LEFT)
    press(Keys.TAB)
    assert browser.execute_script("return document.activeElement.dataset.axis") == "rounds"
    press(Keys.ARROW_LEFT)
    told = browser.execute_script("return document.getElementById('tip').textContent").split("\n")
    data = browser.execute_script("return JSON.parse(document.getElementById('data').textContent).p0.lines")
    assert told[0] == f"round {data[0]['rounds'][-2]}"
    best = max(data, key=lambda line: line["mean"][-2])
    assert told[1].startswith(f"{best['label']}: {100 * best['mean'][-2]:.1f} %")
    # A line goes away.
    press(Keys.TAB, Keys.SPACE)
    gone = "return document.querySelector('[data-axis=rounds] [data-line=\"0\"]').getBoundingClientRect().width"
    assert browser.execute_script(gone) == 0


def test_values_are_told_where_the_pointer_is(visit):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    browser = visit("one")
    bar = browser.find_element(By.CSS_SELECTOR, "g[data-t]")
    ActionChains(browser).scroll_to_element(bar).pause(0.2).move_to_element(bar).perform()
    tip = browser.find_element(By.ID, "tip")
    assert (tip.is_displayed(), tip.text) == (True, "only: +25.0 %")
    chart = browser.find_element(By.CSS_SELECTOR, "[data-axis=rounds] svg")
    ActionChains(browser).scroll_to_element(chart).pause(0.2).move_to_element(chart).perform()
    assert tip.text.splitlines() == ["round 1", "fedavg: 50.0 %", "training alone: 25.0 %"]


def test_a_menu_shows_the_chosen_method(visit):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    browser = visit("seeds", PHONE)
    Select(browser.find_element(By.ID, "p0-gain")).select_by_visible_text("fedavg")
    texts = [one.text for one in browser.find_elements(By.CSS_SELECTOR, "[data-of=p0-gain] figcaption")]
    assert [bool(text) for text in texts] == [False, True]
    assert texts[1].startswith("fedavg against training alone")


def test_dark_and_light_can_be_read(visit):
    def contrast(scheme):
        browser = visit("seeds", scheme=scheme)
        style = "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
        light = []
        for colour in browser.execute_script(style):
            parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
            linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
            light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
        return (light[0] + 0.05) / (light[1] + 0.05)

    assert contrast("light") < 1 / 10
    assert contrast("dark") > 10


def test_printed_it_is_still_a_page(visit):
    browser = visit("seeds", scheme="dark", media="print")
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.execute_script("return document.querySelector('select').checkVisibility()") is False
    assert browser.execute_script(UNDRAWN)[1] == []
    assert len(browser.execute_cdp_cmd("Page.printToPDF", {})["data"]) > 20_000


def test_what_is_open_is_printed_and_nothing_else(visit):
    browser = visit("many", PAPER, media="print")
    rows = "return [...document.querySelectorAll('details tbody tr')].filter((row) => row.checkVisibility()).length"
    assert browser.execute_script(rows) == 0
    assert browser.execute_script("return document.querySelector('summary').checkVisibility()") is False
    browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
    assert browser.execute_script(rows) >= 200
    assert browser.execute_script(
        "return [...document.querySelectorAll('table')].filter((one) => one.checkVisibility() && "
        "one.getBoundingClientRect().right > one.parentElement.getBoundingClientRect().right + 1).length"
    ) == 0  # fmt: skip


@pytest.mark.parametrize("width", [PHONE, DESKTOP, 2560])
def test_long_names_leave_room_for_the_scores(visit, width):
    browser = visit("evil", width)
    browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
    # Of each table that is seen, scrolled to its right end: letters of the last cell that the sticky column leaves free.
    free = browser.execute_script("""
      return [...document.querySelectorAll('.wide')].filter((box) => box.checkVisibility()).map((box) => {
        box.scrollLeft = box.scrollWidth;
        const name = box.querySelector('tbody th').getBoundingClientRect();
        const cell = box.querySelector('tbody tr td:last-child').getBoundingClientRect();
        if (getComputedStyle(box.querySelector('tbody tr')).display === 'grid') return cell.width;  // a card
        return Math.min(cell.right, box.getBoundingClientRect().right + 1) - Math.max(cell.left, name.right);
      });
    """)
    assert len(free) >= 3
    assert min(free) > 30
    cut = "return [...document.querySelectorAll('th[scope=row]')].filter((e) => e.scrollWidth > e.clientWidth + 1)"
    assert browser.execute_script(f"{cut}.length") == 0  # names wrap
    assert browser.execute_script(f"{cut}.filter((e) => e.textContent !== e.title).map((e) => e.textContent)") == []


def test_without_a_script_everything_is_shown(browser, pages):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get((pages / "pfedla_table1.html").as_uri())
        time.sleep(0.2)
        tree = browser.execute_cdp_cmd("DOM.getDocument", {"depth": 0})["root"]["nodeId"]

        def sizes(selector):
            nodes = browser.execute_cdp_cmd("DOM.querySelectorAll", {"nodeId": tree, "selector": selector})["nodeIds"]
            found = []
            for node in nodes:
                style = browser.execute_cdp_cmd("CSS.getComputedStyleForNode", {"nodeId": node})["computedStyle"]
                found.append(next(entry["value"] for entry in style if entry["name"] == "display"))
            return found

        browser.execute_cdp_cmd("DOM.enable", {})
        browser.execute_cdp_cmd("CSS.enable", {})
        assert len(sizes(".panel")) > 10
        assert "none" not in sizes(".panel")
        assert set(sizes("select")) <= {"none", "inline-block", "block"}  # within controls, which are not shown
        assert set(sizes(".control:not(.legend)")) == {"none"}
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
