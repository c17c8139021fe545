"""Pictures of pages of `polyfed report`, for docs/images: `python docs/shoot_report.py NAME=page.html ...`

Writes images/report_NAME_desktop.png (1280 pixels wide) and images/report_NAME_phone.png (390), at most 5,000 pixels high
and below 300 kB. Needs Chromium and its driver (apt-get install chromium chromium-driver) and selenium.
"""

import base64
import io
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from selenium import webdriver

IMAGES = Path(__file__).parent / "images"
WIDTHS = {"desktop": 1280, "phone": 390}
HIGHEST = 5000  # pixels of a page that a picture shows


def main(words):
    """Takes the pictures of each NAME=page.html."""
    with open_browser() as browser:
        for word in words:
            name, _, page = word.partition("=")
            for kind, width in WIDTHS.items():
                shoot(browser, Path(page), width, IMAGES / f"report_{name}_{kind}.png", HIGHEST)


def shoot_top(page, heading, height, target):
    """Takes a picture of a page as a desktop shows it, as far as a heading, or its first `height` pixels without such a
    heading."""
    with open_browser() as browser:
        browser.set_window_size(WIDTHS["desktop"], 900)
        browser.get(page.resolve().as_uri())
        places = browser.execute_script(
            "return [...document.querySelectorAll('h2, h3, summary')]"
            ".filter(e => e.textContent.trim().startsWith(arguments[0])).map(e => e.getBoundingClientRect().top)",
            heading,
        )
        shoot(browser, page, WIDTHS["desktop"], target, round(places[0]) - 12 if places else height)


@contextmanager
def open_browser():
    """Chromium without a window, which ends with the block."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    for word in ("--headless=new", "--disable-gpu", "--hide-scrollbars", *root):
        options.add_argument(word)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield browser
    finally:
        browser.quit()


def shoot(browser, page, width, target, at_most=None):
    """Takes one picture of the whole page, or of its first pixels, at a width."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1.5 if width < 500 else 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    )
    browser.get(page.resolve().as_uri())
    height = browser.execute_script("return document.documentElement.scrollHeight")
    height = min(height, at_most or height)
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    picture = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    target.parent.mkdir(exist_ok=True)
    picture.save(target, optimize=True)
    for colours in (256, 64, 32):
        if target.stat().st_size >= 300_000:
            picture.quantize(colours, dither=Image.Dither.NONE).save(target, optimize=True)
    assert target.stat().st_size < 300_000, f"{target} has {target.stat().st_size} bytes"


if __name__ == "__main__":
    main(sys.argv[1:])
