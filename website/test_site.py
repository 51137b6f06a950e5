"""The site's pages load in a browser: no missing link, image or console error. ``make check`` runs this."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SIZES = {"phone": (390, 844), "desktop": (1280, 800)}
SCHEMES = {"light": "default", "dark": "slate"}

IMAGES = "[...document.images].every(i => i.complete && i.naturalWidth)"
FITS = "document.documentElement.scrollWidth <= innerWidth"
IN_SCHEME = "document.body.getAttribute('data-md-color-scheme') === '%s'"


@pytest.fixture(scope="module")
def site() -> Path:
    """As ``make docs`` has built it."""
    assert (ROOT / "site/index.html").exists(), "there is no site: make docs"
    return ROOT / "site"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM)
        yield chromium
        chromium.close()


class Visit:
    """One page, opened as if it were the first, and what it complains of.

    Args:
        browser: of playwright.
        url: of the page.
        scheme: ``light`` or ``dark``.
    """

    def __init__(self, browser: Any, url: str, scheme: str) -> None:
        self.page = browser.new_page(color_scheme=scheme)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._hear)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("requestfailed", lambda request: self.complaints.append(request.url))
        self.page.goto(url)

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.page.close()

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.text} {message.location}")

    def becomes(self, expression: str) -> bool:
        """Whether an expression of JavaScript holds, or does so before long: scripts still move a page."""
        try:
            self.page.wait_for_function(expression, timeout=10_000)
        except Exception as error:
            if type(error).__name__ != "TimeoutError":
                raise
            return False
        return True


EXAMPLES = ("index.html", "schedules.html", "reference/penstock.schedule.html")
"""A page with code, one with pictures and wide tables, and one that is made from docstrings."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["some", pytest.param("all", marks=pytest.mark.nightly)])
def test_pages_load_without_a_complaint(site: Path, address: str, browser: Any, part: str) -> None:
    """Light and dark by turns, as wide as a phone and as a desktop."""
    pages = (
        EXAMPLES
        if part == "some"
        else sorted(str(file.relative_to(site)) for file in site.rglob("*.html"))
    )
    wrong, links = [], set()
    for name, scheme in zip(pages, cycle(SCHEMES)):
        with Visit(browser, f"{address}/{name}", scheme) as visit:
            checks = {
                "shows all images": visit.becomes(IMAGES),
                f"is {scheme}": visit.becomes(IN_SCHEME % SCHEMES[scheme]),
                "asks nobody else": all(url.startswith(address) for url in visit.requests),
            }
            for device, (width, height) in SIZES.items():
                visit.page.set_viewport_size({"width": width, "height": height})
                checks[f"fits a {device}"] = visit.becomes(FITS)
            wrong += [f"{name}: not so: it {what}" for what, holds in checks.items() if not holds]
            wrong += [f"{name}: {complaint}" for complaint in visit.complaints]
            hrefs = visit.page.evaluate("[...document.links].map(a => a.href)")
            links |= {(name, href) for href in hrefs if href.startswith(address)}
    assert wrong == []
    dead = [f"{name}: {href}" for name, href in sorted(links) if not leads(href, site, address)]
    assert dead == []


def leads(link: str, site: Path, address: str) -> bool:
    """Whether a link leads to a file, and to a place that is in it."""
    whole, place = urldefrag(link)
    path = unquote(whole.removeprefix(address)).lstrip("/")
    file = site / (path or "index.html")
    file = file / "index.html" if file.is_dir() else file
    if not file.is_file():
        return False
    return not place or file.suffix != ".html" or f'id="{unquote(place)}"' in text_of(file)


@cache
def text_of(file: Path) -> str:
    return file.read_text()


def test_the_search_index_holds_names_pages_and_commands(site: Path) -> None:
    index = (site / "search/search_index.json").read_text()
    for wanted in ("penstock.schedule.build", "penstock.Pipeline.step", "tutorial.html"):
        assert wanted in index
    assert "penstock schedule show" in index


@pytest.mark.slow
@pytest.mark.parametrize("served", [True, False], ids=["served", "from a folder"])
def test_the_search_finds_pages(site: Path, address: str, browser: Any, served: bool) -> None:
    url = f"{address}/index.html" if served else (site / "index.html").as_uri()
    with Visit(browser, url, "light") as visit:
        visit.page.locator(".md-search__input").click()
        # At once: lunr fails on some prefixes alone, such as "z".
        visit.page.locator(".md-search__input").fill("zero bubble")
        visit.page.locator(".md-search__input").press("End")
        assert visit.becomes("document.querySelector('.md-search-result__link')")
        assert visit.complaints == []


def test_the_site_has_a_changelog_and_says_where_pages_are(site: Path) -> None:
    assert "0.1.0" in (site / "changelog.html").read_text()
    assert "docs/batches.md" in (site / "batches.html").read_text()
